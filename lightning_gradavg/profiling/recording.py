"""Notes a few steps while `torch.profiler` records them, and puts both together to timelines."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.hooks import RemovableHandle

from lightning_gradavg.profiling.chrome_trace import CLOCK_MARK, Collective, Trace, read_trace
from lightning_gradavg.profiling.ddp_buckets import BucketLayout, bucket_layout, leave_works, reduced_parameters
from lightning_gradavg.profiling.intervals import Interval, length, offset_between
from lightning_gradavg.profiling.summary import RankTimeline
from lightning_gradavg.profiling.timeline import Backward, Bucket, Step

__all__ = ["BackwardRecord", "Recorder", "StepRecord", "timeline_of"]

_CLOCK_READINGS = 16


@dataclass
class BackwardRecord:
    """What was noted of one backward, in nanoseconds of `time.time_ns`.

    Attributes:
        start: When it started.
        reduces: Whether DDP reduces the gradients in it; otherwise it only accumulates.
        end: When it returned.
        ready: When the gradient of each parameter was there, by position in the parameters that DDP reduces.
    """

    start: int
    reduces: bool = True
    end: int = 0
    ready: dict[int, int] = field(default_factory=dict)


@dataclass
class StepRecord:
    """What was noted of one optimizer step, in nanoseconds of `time.time_ns`.

    Attributes:
        batches: When each of its micro-batches started; at least one.
        backwards: Its backwards.
        end: When its last micro-batch ended.
    """

    batches: list[int]
    backwards: list[BackwardRecord] = field(default_factory=list)
    end: int = 0


def timeline_of(record: StepRecord, trace: Trace, layout: Sequence[BucketLayout] | None) -> Step:
    """Return the timeline of a step.

    With a device, its moments are those at which the device reached what the host had launched by then: the host
    runs ahead.

    Args:
        record: What was noted on the host.
        trace: The trace of the profiler, on the clock of `record`.
        layout: The buckets of DDP in order; None if they are unknown.
    """
    backwards = tuple(_backward(backward, trace, layout) for backward in record.backwards)
    start = trace.reached(record.batches[0])
    end = max([trace.reached(record.end), *(backward.interval.end for backward in backwards)])
    copies = [copy.clipped(Interval(start, end)) for copy in trace.copies]
    return Step(Interval(start, end), tuple(map(trace.reached, record.batches)), backwards, length(copies))


def _backward(record: BackwardRecord, trace: Trace, layout: Sequence[BucketLayout] | None) -> Backward:
    issued = [one for one in trace.collectives if record.start <= one.issued <= record.end]
    start, end = trace.reached(record.start), trace.reached(record.end)
    if trace.on_device:
        end = max([end, *(one.interval.end for one in issued if one.interval is not None)])
    within = Interval(start, end)
    ready = {position: trace.reached(moment) for position, moment in record.ready.items()}
    last_gradient = max([start, *ready.values()])

    def ran(collective: Collective) -> Interval | None:
        # A thread of gloo closes its event after DDP has gone on with the result.
        return None if collective.interval is None else collective.interval.clipped(within)

    if not record.reduces:
        return Backward(within, end, others=_known(map(ran, issued)))
    found = _by_bucket(issued, layout)
    if layout is None or not issued:
        return Backward(within, last_gradient, reductions=_known(map(ran, issued)))
    buckets = []
    for index, members in enumerate(layout):
        there = [ready[position] for position in members.parameters if position in ready]
        reduction, wire_bytes = None, None
        if found is not None:
            reduction, wire_bytes = ran(found[index]), found[index].num_bytes
        buckets.append(Bucket(index, max(there, default=None), reduction, wire_bytes))
    reductions = issued if found is None else found
    others = [one for one in issued if all(one is not reduction for reduction in reductions)]
    return Backward(within, last_gradient, tuple(buckets), _known(map(ran, reductions)), _known(map(ran, others)))


def _by_bucket(issued: Sequence[Collective], layout: Sequence[BucketLayout] | None) -> list[Collective] | None:
    """Return the collective of each bucket, or None if there is not one for each.

    DDP reduces its buckets in order; what else is issued in between has other sizes.
    """
    found: list[Collective] = []
    for collective in issued:
        if layout is not None and len(found) < len(layout) and collective.numel == layout[len(found)].numel:
            found.append(collective)
    return found if layout is not None and len(found) == len(layout) else None


def _known(intervals: Iterable[Interval | None]) -> tuple[Interval, ...]:
    return tuple(interval for interval in intervals if interval is not None)


class Recorder:
    """Notes what happens on the host, and has `torch.profiler` record what happens elsewhere.

    A step goes through `begin_batch`, `begin_backward`, `end_backward` and `end_batch`, for each of its micro-batches.

    Attributes:
        model: The module.
        device: Where it is.
        parameters: What DDP reduces, with names.
        layout: After `finish`, the buckets; None if they are unknown.
        steps: The steps recorded so far.
    """

    def __init__(self, model: DistributedDataParallel, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.parameters = reduced_parameters(model)
        self.layout: tuple[BucketLayout, ...] | None = None
        self.steps: list[StepRecord] = []
        self._step: StepRecord | None = None
        self._backward: BackwardRecord | None = None
        self._marks: list[Interval] = []
        self._handles: list[RemovableHandle] = []
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profile = profile(activities=activities, record_shapes=True)
        self._annotation: Any = None

    def start(self) -> None:
        """Start to record."""
        for position, (_, parameter) in enumerate(self.parameters):
            if parameter.requires_grad:
                hook = partial(self._note_gradient, position)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._profile.start()

    def _note_gradient(self, position: int, _: Tensor) -> None:
        if self._backward is not None:
            self._backward.ready[position] = time.time_ns()

    def begin_batch(self) -> None:
        """Note the start of a micro-batch, and of a step if the one before is closed."""
        if self._step is None:
            before = time.time_ns()
            with record_function(CLOCK_MARK):
                self._marks.append(Interval(before, time.time_ns()))
            self._step = StepRecord([])
        self._step.batches.append(time.time_ns())

    def begin_backward(self) -> None:
        """Note the start of a backward."""
        if self._step is not None:
            self._annotation = record_function("gradavg: backward")
            self._annotation.__enter__()
            self._backward = BackwardRecord(time.time_ns(), self.model.require_backward_grad_sync)

    def end_backward(self) -> None:
        """Note the end of a backward."""
        if self._step is not None and self._backward is not None:
            self._backward.end = time.time_ns()
            self._annotation.__exit__(None, None, None)
            self._step.backwards.append(self._backward)
            self._backward = None

    def end_batch(self, *, closes: bool) -> None:
        """Note the end of a micro-batch, which closes its step or not."""
        if closes and self._step is not None:
            self._step.end = time.time_ns()
            self.steps.append(self._step)
            self._step = None

    def abandon(self) -> None:
        """Stop to record after an exception, without the other ranks."""
        self._remove_hooks()
        # Within a backward collectives may be under way. The threads of gloo write to the memory of the profiler, and
        # on a device it would wait for ranks that may be gone: it is left alone.
        if self._marks and self._backward is None:
            self._profile.stop()

    def finish(self, path: Path | None) -> list[RankTimeline]:
        """Stop to record, and return the timelines of all ranks but for the first step. All ranks must call this.

        Args:
            path: Where to keep this rank's Chrome trace; None to keep none.
        """
        self._remove_hooks()
        leave_works(self.model, self.device)
        self._profile.stop()
        self.layout = bucket_layout(self.model, [parameter for _, parameter in self.parameters])
        trace = read_trace(_exported(self._profile, path), self._marks)
        steps = tuple(timeline_of(step, trace, self.layout) for step in self.steps[1:])
        readings = _read_clock(self.model.process_group, self.device)
        gathered: list[Any] = [None] * dist.get_world_size(self.model.process_group)
        dist.all_gather_object(gathered, (socket.gethostname(), readings, steps), group=self.model.process_group)
        return [_on_common_clock(rank, *said, reference=gathered[0][1]) for rank, said in enumerate(gathered)]

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _exported(profiled: profile, path: Path | None) -> str:
    """Return the Chrome trace, and keep it at `path`."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "trace.json" if path is None else path
        profiled.export_chrome_trace(str(file))
        return file.read_text(encoding="utf-8", errors="replace")


def _read_clock(group: dist.ProcessGroup, device: torch.device) -> list[Interval]:
    """Return when this rank entered and left each of a few barriers, by `time.time_ns`."""
    readings = []
    for _ in range(_CLOCK_READINGS):
        before = time.time_ns()
        token = torch.zeros(1, device=device)
        dist.all_reduce(token, group=group)
        token.item()  # on a device, all_reduce only starts the collective
        readings.append(Interval(before, time.time_ns()))
    return readings


def _on_common_clock(
    rank: int, host: str, readings: list[Interval], steps: tuple[Any, ...], *, reference: list[Interval]
) -> RankTimeline:
    offset = offset_between(readings, reference)
    return RankTimeline(rank, host, offset, tuple(step.shifted(offset.value) for step in steps))
