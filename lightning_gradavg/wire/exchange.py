"""The sum of buckets over the ranks: scattered in parts, summed where they arrive, and gathered.

A bucket is cut into as many equal parts as there are ranks, and each part is sent to the rank that sums it, in the type
of the sum. All ranks read the sum from the same bytes, so they hold the same bits, and the error does not grow with the
number of ranks: each number is rounded once before the sum and once after it.

On gloo each step of this, for all buckets, has a thread and a process group of its own (`Worker` says why), and ranks
send each other messages. A bucket goes through the steps in segments, some at a time, so that all steps work at once.
On NCCL they follow one another on a CUDA stream.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from lightning_gradavg.rules import Weight
from lightning_gradavg.wire.buffers import Buffers
from lightning_gradavg.wire.codecs import CODECS, Codec, Plain, fault_of
from lightning_gradavg.wire.feedback import Feedback, Residual
from lightning_gradavg.wire.route import Hop, Route
from lightning_gradavg.wire.segments import Segment, Travelling
from lightning_gradavg.wire.transport import NcclTransport, Transport, gloo_transports
from lightning_gradavg.wire.worker import Worker

__all__ = ["Exchange", "ScatteredSum"]

SEGMENT_BYTES = 2**21
"""Size of a segment on the wire: smaller ones cost more calls, larger ones come later to the next step."""

MOST_ON_NODE = 4
"""Ranks of a node up to which a segment is that many times as large, for what is left of it between nodes."""

_IN_FLIGHT = 4
"""Segments of a rank that are between the steps: with 8, what the next step needs has left the processor's caches."""


class Exchange(Protocol):
    """Sums buckets over the ranks."""

    def begin(self) -> None:
        """Begin a window, before its first bucket and after the last one of the window before has arrived."""
        ...

    def sum(self, bucket: GradBucket, factor: Callable[[], Weight]) -> Future[Tensor]:
        """Return the sum over the ranks of a dense bucket times each rank's factor, the same bits on all ranks.

        Buckets come in the same order on all ranks. The factor may be asked for in another thread, so that the backward
        does not wait for it. A factor of 0 discards the bucket, whatever is in it.
        """
        ...

    def close(self) -> None:
        """Release threads and process groups."""
        ...


class ScatteredSum:
    """Sums buckets along a route.

    Args:
        route: The route, with one hop or more.
        wire_dtype: The key in `CODECS` of what is sent in narrow hops, or None.
        rank: This rank in the process group of DDP.
        group: The process group of DDP.
        device: Where the gradients are.
    """

    def __init__(
        self, route: Route, wire_dtype: str | None, rank: int, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self.route = route
        self._wire_dtype, self._rank, self._device = wire_dtype, rank, device
        self._feedback = Feedback()
        # Whether what arrived of this window in a lossy type is not finite, which all ranks see alike.
        self._lost: Tensor | None = None
        self._pending: set[Travelling] = set()
        hops = route.hops
        way = (*hops, *reversed(hops))
        self._stream: torch.cuda.Stream | None = None
        self._workers: list[Worker] = []
        if device.type == "cpu":
            transports = gloo_transports(way, group)
            self._workers = [Worker(f"gradavg-wire-{number}") for number in range(len(way) + 1)]
            # Of a process that ends without `close`; gloo's threads would abort it.
            atexit.register(self.close)
        else:
            transports = [NcclTransport(group)] * len(way)
            self._stream = torch.cuda.Stream(device)
        self._steps: list[Callable[[Segment], None]] = [
            *(partial(self._scatter, number, transports[number]) for number in range(len(hops))),
            *(partial(self._gather, number, transports[len(hops) + number]) for number in range(len(hops))),
            self._arrive,
        ]
        self._window = threading.Semaphore(_IN_FLIGHT)
        self._buffers = Buffers()

    def begin(self) -> None:
        """As in `Exchange`."""
        lost, self._lost = self._lost, None
        if lost is not None:
            # The stream, if any, on which all of this is.
            with torch.cuda.stream(self._stream):
                self._feedback.forget(lost)

    def sum(self, bucket: GradBucket, factor: Callable[[], Weight]) -> Future[Tensor]:
        """As in `Exchange`."""
        buffer = bucket.buffer()
        flat = (torch.view_as_real(buffer) if buffer.is_complex() else buffer).flatten()
        future: Future[Any] = Future() if self._stream is None else Future(devices=[self._device])
        if flat.numel() == 0:
            future.set_result(buffer)
            return future
        wide = torch.promote_types(flat.dtype, torch.float32)
        travelling = Travelling(buffer, flat, factor, wide, future)
        segments = list(self._cut(travelling))
        travelling.remaining = len(segments)
        self._pending.add(travelling)
        if self._stream is None:
            self._find_residuals(bucket, segments)
            self._workers[0].submit(self._depart, segments)
            return future
        factor()  # while the stream of the gradients is current, which made the totals
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            # Made here and freed here: memory of the backward's stream would be given away there while it is read here.
            self._find_residuals(bucket, segments)
            for segment in segments:
                for step in self._steps:
                    step(segment)
        return future

    def close(self) -> None:
        """As in `Exchange`; while buckets are under way, as after an error, it is left to the threads themselves."""
        if self._pending:
            # A process group that is destroyed waits for its works, perhaps for a peer that is lost.
            if self._workers:
                self._workers[0].submit(self._end, 0)
            return
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.close()
        self._workers, self._steps = [], []

    def _end(self, number: int) -> None:
        """End the threads, each after all that the one before it has passed on."""
        self._workers[number].end()
        if number + 1 < len(self._workers):
            self._workers[number + 1].submit(self._end, number + 1)
        else:
            atexit.unregister(self.close)
            self._workers, self._steps = [], []

    def _codec(self, hop: Hop, wide: torch.dtype) -> Codec:
        if hop.narrow:
            assert self._wire_dtype is not None
            return CODECS[self._wire_dtype]
        return Plain(wide, wide)

    def _find_residuals(self, bucket: GradBucket, segments: Sequence[Segment]) -> None:
        """Have segments know what a lossy codec owes of them."""
        travelling = segments[0].bucket
        if not any(self._codec(hop, travelling.wide).lossy for hop in self.route.hops):
            return
        travelling.residuals = self._feedback.residuals(
            bucket.parameters(), lambda: [self._residual(segment) for segment in segments]
        )
        for segment, residual in zip(segments, travelling.residuals.segments, strict=True):
            segment.residual = residual

    def _residual(self, segment: Segment) -> Residual:
        *before, last = self.route.hops
        parts = torch.zeros(len(last.ranks), segment.columns, device=self._device)
        first = segment.start + (before[0].index * parts.numel() if before else 0)
        return Residual(parts, torch.zeros_like(parts[:1]), first, last.index)

    def _cut(self, bucket: Travelling) -> Iterator[Segment]:
        """Yield the segments of a bucket, of nearly equal size."""
        codecs = [self._codec(hop, bucket.wide) for hop in self.route.hops]
        multiple = max(codec.multiple for codec in codecs)
        units = -(-bucket.flat.numel() // (self.route.parts * multiple))
        unit_bytes = self.route.parts * max(codec.row_bytes(multiple) - codec.row_bytes(0) for codec in codecs)
        size = SEGMENT_BYTES * min(self.route.parts // len(self.route.hops[-1].ranks), MOST_ON_NODE)
        # Without threads nothing is gained by cutting.
        count = 1 if self._stream is not None else min(units, -(-units * unit_bytes // size))
        bounds = [number * units // count * multiple for number in range(count + 1)]
        for start, stop in pairwise(bounds):
            yield Segment(bucket, start * self.route.parts, stop - start, self.route.parts)

    def _depart(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            self._window.acquire()
            self._advance(0, segment)

    def _advance(self, number: int, segment: Segment) -> None:
        self._steps[number](segment)
        if number + 1 < len(self._steps):
            self._workers[number + 1].submit(self._advance, number + 1, segment)
        else:
            self._window.release()

    def _columns(self, number: int, segment: Segment) -> int:
        """Return how many numbers a hop sends to each rank."""
        return segment.columns * len(range(self.route.parts)[self.route.held(number + 1)])

    def _scatter(self, number: int, transport: Transport, segment: Segment) -> None:
        """Send each other member of a hop its rows."""
        hop = self.route.hops[number]
        codec = self._codec(hop, segment.bucket.wide)
        members, columns = len(hop.ranks), self._columns(number, segment)

        def encode() -> Tensor:
            source, factor = segment.read() if number == 0 else (self._summed(number - 1, segment), 1.0)
            rows = source.view(members, columns)
            segment.own = rows[hop.index : hop.index + 1], factor
            encoded = self._empty(segment, members - 1, codec.row_bytes(columns))
            codec.address(encoded, segment.bucket.fault)
            others = (slice(0, hop.index), encoded[: hop.index]), (slice(hop.index + 1, None), encoded[hop.index :])
            for of_others, sent in others:
                if len(sent) == 0:
                    continue
                owed = segment.residual.parts[of_others] if codec.lossy and segment.residual is not None else None
                codec.write(rows[of_others], sent, factor, owed)
            return encoded

        # Whatever fails on this rank, the others get what they wait for, and are told.
        try:
            encoded = encode()
        except Exception as error:  # noqa: BLE001 - it is raised by the backward that waits for the bucket
            encoded = self._spoilt(segment, self._empty(segment, members - 1, codec.row_bytes(columns)), error)
        segment.received = self._empty(segment, members - 1, codec.row_bytes(columns))
        try:
            segment.work = transport.scatter(encoded, segment.received)
        except Exception as error:  # noqa: BLE001 - as above
            self._spoilt(segment, segment.received, error)

    def _gather(self, number: int, transport: Transport, segment: Segment) -> None:
        """Send the members of a hop what this rank has of the sum; hops are gone through backwards."""
        depth = len(self.route.hops) - number
        codec = self._codec(self.route.hops[-1], segment.bucket.wide)
        if number == 0:
            segment.gathered = self._empty(segment, self.route.parts, codec.row_bytes(segment.columns))
        mine = segment.gathered[self.route.held(depth)]
        try:
            if number > 0:
                self._checked(segment, segment.arrived())
            else:
                total = self._summed(depth - 1, segment)
                codec.address(mine, segment.bucket.fault)
                codec.write(total, mine, owed=None if segment.residual is None else segment.residual.total)
        except Exception as error:  # noqa: BLE001 - as in `_scatter`
            self._spoilt(segment, mine, error)
        segment.received = segment.gathered[self.route.held(depth - 1)]
        try:
            segment.work = transport.gather(segment.received)
        except Exception as error:  # noqa: BLE001 - as above
            self._spoilt(segment, segment.received, error)

    def _empty(self, segment: Segment, rows: int, row_bytes: int) -> Tensor:
        """Return memory for a payload, until the segment has arrived."""
        if self._stream is not None:
            return torch.empty(rows, row_bytes, dtype=torch.uint8, device=self._device)
        taken = self._buffers.take(rows * row_bytes)
        segment.taken.append(taken)
        return taken.view(rows, row_bytes)

    def _spoilt(self, segment: Segment, payload: Tensor, error: Exception) -> Tensor:
        """Make a payload one that only says that this rank failed: by its header, on an accelerator by NaN."""
        bucket = segment.bucket
        bucket.error = bucket.error or error
        bucket.fault = max(bucket.fault, self._rank + 1)
        segment.own = None
        if self._stream is not None:
            # Nobody reads the header, so what came of a failure must not look like a sum: all bits are NaN in any type.
            return payload.fill_(255)
        payload.zero_()[:, :4].view(torch.float32).fill_(bucket.fault)
        return payload

    def _checked(self, segment: Segment, payload: Tensor) -> Tensor:
        # Written by several threads, but never back to 0.
        if self._stream is None and (fault := fault_of(payload)):
            segment.bucket.fault = max(segment.bucket.fault, fault)
        return payload

    def _summed(self, number: int, segment: Segment) -> Tensor:
        """Return the sum of what came in a hop and of what this rank has itself, as one row."""
        hop = self.route.hops[number]
        codec = self._codec(hop, segment.bucket.wide)
        payload = self._checked(segment, segment.arrived())
        if hop.narrow:
            size = len(payload), self._columns(number, segment) * codec.dtype.itemsize
            rows = self._empty(segment, *size).view(codec.dtype)
            codec.read(payload, rows)
        else:
            rows = codec.decode(payload)
        total = rows if len(rows) == 1 else rows.sum(0, keepdim=True)
        own, segment.own = segment.own, None
        if own is not None:
            total.add_(own[0], alpha=own[1])
        return total

    def _arrive(self, segment: Segment) -> None:
        """Put a segment of the sum into the bucket, and with the last one complete the bucket's future."""
        bucket = segment.bucket
        try:
            payload = self._checked(segment, segment.arrived())
            codec = self._codec(self.route.hops[-1], bucket.wide)
            if codec.lossy:
                lost = codec.lost(payload)
                self._lost = lost if self._lost is None else self._lost | lost
            segment.write(partial(codec.read, payload))
        except Exception as error:  # noqa: BLE001 - it is raised by the backward that waits for the bucket
            bucket.error = bucket.error or error
        # After a failure on this rank, messages may still be under way.
        if bucket.error is None:
            for taken in segment.taken:
                self._buffers.give(taken)
        bucket.remaining -= 1
        if bucket.remaining > 0:
            return
        if bucket.residuals is not None:
            bucket.residuals.carried = None
        self._pending.discard(bucket)
        if bucket.error is not None:
            bucket.future.set_exception(
                RuntimeError(f"the sum of a bucket over the ranks, which failed: {bucket.error!r}")
            )
        elif bucket.fault:
            where = f"rank {bucket.fault - 1}, whose own error tells more"
            bucket.future.set_exception(RuntimeError(f"the sum of a bucket over the ranks, which failed on {where}"))
        else:
            bucket.future.set_result(bucket.buffer)
