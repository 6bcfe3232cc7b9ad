"""What a Chrome trace of `torch.profiler` says about collectives: when each was issued, and when it ran.

A collective is issued by an operator `c10d::*` on the host. With gloo it runs on a thread of the process group, as an
event `gloo:*`; with NCCL as a kernel `nccl*` on the device, tied to its launch by a correlation number.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from lightning_gradavg.profiling.intervals import Interval, offset_within

__all__ = ["CLOCK_MARK", "Collective", "Trace", "read_trace"]

CLOCK_MARK = "gradavg: clock"
"""The annotation by which the clock of the trace is tied to that of `time.time_ns`."""

_COPY_BACK = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_NAMES = (CLOCK_MARK, _COPY_BACK, "c10d::", "gloo:", "record_param_comms")
_ELEMENT_SIZES = {
    "double": 8,
    "float": 4,
    "half": 2,
    "bfloat16": 2,
    "complexfloat": 8,
    "complexdouble": 16,
}


@dataclass(frozen=True)
class Collective:
    """A collective of one rank.

    Attributes:
        issued: When the host issued it, in nanoseconds.
        interval: When it ran; None if the trace does not say.
        numel: Elements of its tensors; None if unknown.
        element_size: Bytes of an element; None if unknown.
    """

    issued: int
    interval: Interval | None
    numel: int | None
    element_size: int | None

    @property
    def num_bytes(self) -> int | None:
        """Size of its tensors; None if unknown."""
        return None if self.numel is None or self.element_size is None else self.numel * self.element_size


class Trace:
    """The collectives of a trace, and when the device reached what the host did.

    Attributes:
        collectives: In the order in which they were issued.
        copies: When reduced gradients were copied out of their buckets: where it ran, on the host or on the device.
        on_device: Whether the trace has work of a device.
    """

    def __init__(
        self, collectives: Sequence[Collective], copies: Sequence[Interval], computed: Iterable[tuple[int, int]] = ()
    ) -> None:
        self.collectives = sorted(collectives, key=lambda collective: collective.issued)
        self.copies = list(copies)
        launches = sorted(computed)
        self.on_device = bool(launches)
        self._launched = [launch for launch, _ in launches]
        self._ended = list(accumulate((end for _, end in launches), max))

    def reached(self, moment: int) -> int:
        """Return when what the host had launched by `moment` was computed; `moment` itself without a device."""
        position = bisect_right(self._launched, moment)
        return max(moment, self._ended[position - 1]) if position else moment


def read_trace(text: str, marks: Sequence[Interval]) -> Trace:
    """Return what a trace says about collectives, on the clock of `time.time_ns`.

    Args:
        text: The JSON that `torch.profiler.profile.export_chrome_trace` writes, recorded with `record_shapes=True`.
        marks: `time.time_ns()` just before and just after each annotation `CLOCK_MARK`, in order.

    Raises:
        ValueError: If the trace has not one annotation for each of `marks`.
    """
    base = re.search(r'"baseTimeNanoseconds":\s*(\d+)', text)
    since = int(base[1]) if base else 0
    events = [_Event.read(event, since) for event in _events(text) if _is_of_use(event)]
    events.sort(key=lambda event: event.interval.start)
    seen = [event for event in events if event.name == CLOCK_MARK and event.category == "user_annotation"]
    if len(seen) != len(marks) or not marks:
        raise ValueError(
            f"the trace has {len(seen)} annotations {CLOCK_MARK!r} for {len(marks)} readings of the clock; both must be"
            " the same number, at least 1. Was another profiler started or stopped in between?"
        )
    offset = offset_within(
        (mark.start - event.interval.start, mark.end - event.interval.start)
        for event, mark in zip(seen, marks, strict=True)
    )
    return _Reader([event.shifted(offset.value) for event in events]).trace()


def _events(text: str) -> Iterator[dict[str, Any]]:
    """Yield the events one by one: a trace has millions, and all at once they take ten times the memory of the text."""
    decoder, separator = json.JSONDecoder(), re.compile(r"[\s,]*")
    position = text.index("[", text.index('"traceEvents"')) + 1
    while True:
        gap = separator.match(text, position)
        position = gap.end() if gap else position
        if text[position] == "]":
            return
        event, position = decoder.raw_decode(text, position)
        yield event


def _is_of_use(event: Mapping[str, Any]) -> bool:
    category = event.get("cat")
    return event.get("ph") == "X" and (
        category in _LAUNCHES or category in _ON_DEVICE or str(event.get("name", "")).startswith(_NAMES)
    )


@dataclass(frozen=True)
class _Event:
    name: str
    category: str
    thread: tuple[Any, Any]
    interval: Interval
    arguments: Mapping[str, Any]

    @classmethod
    def read(cls, event: Mapping[str, Any], base: int) -> _Event:
        start = base + round(float(event["ts"]) * 1000)
        end = start + round(float(event.get("dur", 0)) * 1000)
        thread = (event.get("pid"), event.get("tid"))
        return cls(event.get("name", ""), event.get("cat", ""), thread, Interval(start, end), event.get("args", {}))

    def shifted(self, offset: int) -> _Event:
        return _Event(self.name, self.category, self.thread, self.interval.shifted(offset), self.arguments)

    @property
    def kind(self) -> str:
        """`allreduce` of both `c10d::allreduce_` and `gloo:all_reduce`."""
        return self.name.rpartition(":")[2].replace("_", "").lower()

    @property
    def numel(self) -> int | None:
        shapes = self.arguments.get("Input Dims")
        if not shapes:
            return None
        first = shapes[0]
        tensors = first if first and isinstance(first[0], list) else [first]
        return sum(math.prod(map(int, shape)) for shape in tensors)

    @property
    def element_size(self) -> int | None:
        types = self.arguments.get("Input type") or [""]
        return _ELEMENT_SIZES.get(str(types[0]).rpartition(":")[2].lower())


class _Reader:
    """Ties the events of a trace together; events come sorted by their start."""

    def __init__(self, events: Sequence[_Event]) -> None:
        self._events = events
        self._launches: dict[tuple[Any, Any], list[_Event]] = defaultdict(list)
        self._kernels: dict[Any, list[_Event]] = defaultdict(list)
        for event in events:
            if event.category in _LAUNCHES:
                self._launches[event.thread].append(event)
            elif event.category in _ON_DEVICE:
                self._kernels[event.arguments.get("correlation")].append(event)

    def trace(self) -> Trace:
        operators = [event for event in self._events if event.category == "cpu_op"]
        # An event that the profiler saw only the start of has no arguments.
        on_threads = [event for event in self._events if event.name.startswith("gloo:") and event.numel is not None]
        collectives = [
            self._collective(operator, on_threads) for operator in operators if operator.name.startswith("c10d::")
        ]
        copies = [
            interval
            for operator in operators
            if operator.name == _COPY_BACK
            for interval in self._launched_in(operator) or [operator.interval]
        ]
        computed = [
            (launch.interval.start, kernel.interval.end)
            for launches in self._launches.values()
            for launch in launches
            for kernel in self._kernels.get(launch.arguments.get("correlation"), ())
            if not _is_collective(kernel)
        ]
        return Trace(collectives, copies, computed)

    def _collective(self, operator: _Event, on_threads: list[_Event]) -> Collective:
        """Return the collective of an operator, and take what ran it out of `on_threads`."""
        numel, size = self._said_within(operator)
        kernels = self._launched_in(operator, collective=True)
        if kernels:
            ran = Interval(min(kernel.start for kernel in kernels), max(kernel.end for kernel in kernels))
            return Collective(operator.interval.start, ran, numel, size)
        for position, event in enumerate(on_threads):
            same = event.kind.removeprefix("sparse") == operator.kind and event.numel == operator.numel
            if same and event.interval.start >= operator.interval.start:
                del on_threads[position]
                # The shape of a sparse tensor does not say how much of it travels.
                size = None if event.kind.startswith("sparse") else event.element_size
                return Collective(operator.interval.start, event.interval, event.numel, size)
        return Collective(operator.interval.start, None, numel, size)

    def _launched_in(self, operator: _Event, *, collective: bool = False) -> list[Interval]:
        launches = self._launches.get(operator.thread, [])
        first = bisect_right(launches, operator.interval.start - 1, key=lambda launch: launch.interval.start)
        found = []
        for launch in launches[first:]:
            if launch.interval.start > operator.interval.end:
                break
            kernels = self._kernels.get(launch.arguments.get("correlation"), ())
            found += [kernel.interval for kernel in kernels if _is_collective(kernel) == collective]
        return found

    def _said_within(self, operator: _Event) -> tuple[int | None, int | None]:
        """Return elements and element size, from the event `record_param_comms` that NCCL leaves in the operator."""
        first = bisect_right(self._events, operator.interval.start - 1, key=lambda event: event.interval.start)
        for event in self._events[first:]:
            if event.interval.start > operator.interval.end:
                break
            if event.name == "record_param_comms" and event.thread == operator.thread:
                numel = event.arguments.get("In msg nelems")
                size = _ELEMENT_SIZES.get(str(event.arguments.get("dtype", "")).lower())
                return operator.numel if numel is None else int(numel), size
        return operator.numel, None


def _is_collective(kernel: _Event) -> bool:
    return kernel.name.startswith("nccl")
