"""The sum of gradients over the ranks along a route: scattered in parts, summed where they arrive, and gathered.

A bucket is cut into as many equal parts as there are ranks, and each part is sent to the rank that sums it, in the type
of the sum. All ranks read the sum from the same bytes, so they hold the same bits, and the error does not grow with the
number of ranks: each number is rounded once before the sum and once after it.

A bucket goes through the steps (scatter per hop, gather per hop, arrive) in segments, a few at a time, so that the link
is busy while numbers are converted and added. Which step of which segment comes next depends on nothing but their
number (`_in_turn`): ranks start the collectives of a process group in one order, which gloo and NCCL match them by. To
start one when another *completes*, as a future's callback would, is to start it at another moment on every rank.

On a CPU the steps run in a thread, on process groups that no other thread uses. On an accelerator they are launched at
once on a stream of their own, where nothing waits on the host, and cutting would only add launches.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_gradavg.device import current_stream, new_stream, within
from lightning_gradavg.wire.codecs import Codec
from lightning_gradavg.wire.route import Hop, Route

__all__ = ["AddRows", "Exchange", "InOrder", "Step", "others_first"]

SEGMENT_BYTES = 2**20
"""Of a segment on the wire: smaller ones cost more calls, larger ones come later to the next step."""

IN_FLIGHT = 2
"""Segments of a bucket between one step and the next: gloo runs two collectives of a process group at a time."""

all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Renamed in torch 2.13, which warns of the old name."""


@dataclass(eq=False)
class _Segment:
    """Consecutive numbers of a bucket, cut into equal parts, one for each rank.

    Attributes:
        numbers: What the bucket has of it, in one dimension; the last parts of the last segment may be shorter.
        columns: Numbers in a part.
        memory: Lends what the segment travels in.
        total: The sum so far of the parts that this rank holds: shape `(1, numbers of these parts)`, and at first as
            many rows as the rank brings.
        received: What is arriving: of a scattering the others' payloads, of a gathering all parts known by then.
        work: Its arrival.
    """

    numbers: Tensor
    columns: int
    memory: Callable[..., Tensor]
    total: Tensor
    received: Tensor = field(default_factory=lambda: torch.empty(0))
    work: dist.Work | None = None

    def arrived(self) -> Tensor:
        """Return what came last, waiting for it: the host on a CPU, else the current stream."""
        assert self.work is not None
        self.work.wait()
        return self.received


Step = Callable[[_Segment], None]

AddRows = Callable[[Tensor, Tensor], Tensor]
"""`(others, own) -> sum`: adds what came from the other ranks, a row from each in rank order, and this rank's row.

It may write into both, and returns one row. Where an exchange sums several rows, they stand one after another in each.
"""


def others_first(others: Tensor, own: Tensor) -> Tensor:
    """Return the sum of the other ranks' rows, and this rank's own."""
    summed = others if len(others) == 1 else others.sum(0, keepdim=True)
    return summed.add_(own)


class Exchange:
    """Sums tensors over the ranks along a route, each in one order on all ranks. Not for two threads at once.

    Args:
        route: The route, with one hop or more.
        codec: What narrow hops send by.
        groups: The process group of each hop's ranks; whoever made them may take them away.
        add_rows: Adds up where rows arrive.
        rows: Rows that each rank brings, of which one sum is made. With several, the route has one hop.
        stretch: Segments are so many times as long as those that numbers are converted in.
    """

    def __init__(
        self,
        route: Route,
        codec: Codec,
        groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        add_rows: AddRows = others_first,
        rows: int = 1,
        stretch: int = 1,
    ) -> None:
        self.route, self._codec, self._groups = route, codec, groups
        self._add_rows, self._rows, self._stretch = add_rows, rows, stretch
        self._memory: dict[tuple[int, str], Tensor] = {}
        numbers = range(len(route.hops))
        self._steps: list[Step] = [
            *(partial(self._scatter, number) for number in numbers),
            *(partial(self._gather, number) for number in reversed(numbers)),
            self._arrive,
        ]

    def sum_(self, tensor: Tensor) -> None:
        """Replace a dense, contiguous tensor of the type of sums by its sum over the ranks. Collective.

        Where each rank brings several rows, they are the first dimension, and the sum is in the first of them.
        """
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(self._rows, -1)
        with torch.no_grad():
            for step, segment in _in_turn(self._steps, list(self._cut(flat))):
                step(segment)

    def _cut(self, flat: Tensor) -> Iterator[_Segment]:
        """Yield the segments of a bucket, all but the last of one size: as few as may be, so that little is padding."""
        parts, multiple = self.route.parts, self._codec.multiple
        length = flat.shape[1]
        most = self._stretch * SEGMENT_BYTES // (self._codec.wire.itemsize * parts)
        most = max(most, 1) if flat.device.type == "cpu" else length
        segments = max(-(-length // (parts * most)), 1)
        columns = max(-(-length // (parts * segments)), 1)
        columns = -(-columns // multiple) * multiple
        for index, numbers in enumerate(flat.split(parts * columns, dim=1)):
            # On an accelerator torch keeps freed memory by itself.
            slot = index % (IN_FLIGHT * len(self._steps)) if flat.device.type == "cpu" else None
            whole = numbers if numbers.shape[1] == parts * columns else _padded(numbers, parts * columns)
            yield _Segment(numbers[0], columns, self._lender(slot, flat.device), whole)

    def _lender(self, slot: int | None, device: torch.device) -> Callable[..., Tensor]:
        """Return what lends memory for one segment, under a name for each use.

        The C library returns freed memory of megabytes to the system, and every page of what comes instead is cleared
        and mapped at its first use: a fifth of the processor time of a sum.
        """

        def lend(name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
            if slot is None:
                return torch.empty(rows, width, dtype=dtype, device=device)
            size = rows * width * dtype.itemsize
            kept = self._memory.get((slot, name))
            if kept is None or len(kept) < size:
                kept = self._memory[slot, name] = torch.empty(size, dtype=torch.uint8)
            return kept[:size].view(dtype).view(rows, width)

        return lend

    def _codec_of(self, hop: Hop, segment: _Segment) -> Codec:
        return self._codec if hop.narrow else Codec(segment.total.dtype)

    def _scatter(self, number: int, segment: _Segment) -> None:
        """Send each other member of a hop its rows of what was summed so far."""
        hop = self.route.hops[number]
        codec, others = self._codec_of(hop, segment), len(hop.ranks) - 1
        if number > 0:
            self._add(number - 1, segment)
        rows = segment.total.unflatten(1, (len(hop.ranks), -1)).transpose(0, 1).flatten(1)
        payload, segment.received = (
            segment.memory(f"{name} {number}", others, codec.header + rows.shape[1], codec.wire)
            for name in ("sent", "received")
        )
        # What a rank keeps for itself is neither copied nor rounded.
        codec.encode(rows[: hop.index], payload[: hop.index])
        codec.encode(rows[hop.index + 1 :], payload[hop.index :])
        segment.total = rows[hop.index : hop.index + 1]
        counts = [int(index != hop.index) for index in range(len(hop.ranks))]
        group = self._groups[hop.ranks]
        segment.work = dist.all_to_all_single(segment.received, payload, counts, counts, group=group, async_op=True)

    def _add(self, number: int, segment: _Segment) -> None:
        """Add what came in a hop to what this rank has itself."""
        codec = self._codec_of(self.route.hops[number], segment)
        payload = segment.arrived()
        rows = segment.memory(f"rows {number}", len(payload), segment.total.shape[1], segment.total.dtype)
        codec.decode(payload, rows)
        segment.total = self._add_rows(rows, segment.total)

    def _gather(self, number: int, segment: _Segment) -> None:
        """Send the members of a hop what this rank has of the sum; hops are gone through backwards."""
        codec = self._codec_of(self.route.hops[-1], segment)
        if number == len(self.route.hops) - 1:
            self._add(number, segment)
            width = codec.header + segment.columns
            gathered = segment.memory("gathered", self.route.parts, width, codec.wire)
            codec.encode(segment.total, gathered[self.route.held(number + 1)])
        else:
            gathered = segment.arrived()
        mine, all_of_hop = gathered[self.route.held(number + 1)], gathered[self.route.held(number)]
        segment.received = gathered
        group = self._groups[self.route.hops[number].ranks]
        segment.work = all_gather_into(all_of_hop, mine, group=group, async_op=True)

    def _arrive(self, segment: _Segment) -> None:
        """Put the sum into the bucket."""
        codec = self._codec_of(self.route.hops[-1], segment)
        payload, numbers = segment.arrived(), segment.numbers
        if len(numbers) == self.route.parts * segment.columns:
            codec.decode(payload, numbers.view(self.route.parts, segment.columns))
            return
        rows = segment.memory("rows 0", self.route.parts, segment.columns, segment.total.dtype)
        codec.decode(payload, rows)
        numbers.copy_(rows.view(-1)[: len(numbers)])


def _padded(numbers: Tensor, size: int) -> Tensor:
    rows, length = numbers.shape
    return torch.cat([numbers, numbers.new_zeros(rows, size - length)], dim=1)


def _in_turn(steps: Sequence[Step], segments: Sequence[_Segment]) -> Iterator[tuple[Step, _Segment]]:
    """Yield every step of every segment, in an order that keeps `IN_FLIGHT` segments between any two steps."""
    for tick in range(len(segments) + IN_FLIGHT * (len(steps) - 1)):
        # The segment that is furthest on goes first: it frees what the others travel in.
        for number, step in reversed(list(enumerate(steps))):
            index = tick - IN_FLIGHT * number
            if 0 <= index < len(segments):
                yield step, segments[index]


class InOrder:
    """Runs calls on buckets one after another, where the backward does not wait for them.

    On a CPU that is a thread; it ends when it is closed or collected. On an accelerator it is a stream. After a call
    that failed none is run: its collectives would meet those on the other ranks that the failed one did not come to.

    Args:
        device: Where the buckets are.
        name: Of the thread.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self._device = device
        self._latest: Future[Any] | None = None
        self._error: RuntimeError | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stream = new_stream(device)
        if self._stream is None:
            # A daemon: where a peer is lost in the middle of a collective, the interpreter must not wait for it.
            thread = threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
            thread.start()
            self._thread = thread
        self._end = weakref.finalize(self, self._calls.put, None)

    @property
    def failed(self) -> bool:
        """Whether a call raised."""
        return self._error is not None

    def submit(self, call: Callable[[], Tensor]) -> Future[Tensor]:
        """Return the future of what `call` returns: a tensor on the device."""
        if self._stream is not None:
            return self._launch(call, self._stream)
        future: Future[Any] = Future()

        def run() -> None:
            try:
                result = call() if self._error is None else None
            except Exception as error:  # noqa: BLE001 - whatever it is belongs to the backward that waits for the bucket
                self._error = RuntimeError(f"the sum of a bucket over the ranks failed: {error!r}")
            if self._error is None:
                future.set_result(result)
            else:
                future.set_exception(self._error)

        self._latest = future
        self._calls.put(run)
        return future

    def _launch(self, call: Callable[[], Tensor], stream: torch.Stream) -> Future[Tensor]:
        future: Future[Any] = Future(devices=[self._device])
        stream.wait_stream(current_stream(self._device))
        with within(stream):
            # What is made here is freed here: memory of the backward's stream would be given away there while this
            # stream reads it. The future notes the stream, and whoever waits for it waits for that.
            future.set_result(call())
        return future

    def close(self) -> bool:
        """End the thread after what was submitted, and return whether it has ended: not where a peer may be lost."""
        self._end()
        idle = self._latest is None or self._latest.done() or self._error is not None
        if self._latest is not None and idle:
            self._thread.join()
        return idle


def _serve(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        # What the call held must not live until the next one comes.
        del call
