"""`GradAvgProfiler`: `torch.profiler` around a few optimizer steps of a run, and how much of their communication shows.

A reduction names its work in the trace by `torch.profiler.record_function`: `gradavg::bucket 3` from the moment at
which DDP hands over its fourth bucket until that one is reduced. Stock DDP has no hook that could name its buckets: its
collectives are in the trace by the names of their backend (`gloo:all_reduce`). The callback labels `gradavg::backward`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities import rank_zero_warn
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule
from typing_extensions import override

from lightning_gradavg.lightning_internals import process_groups, profiling
from lightning_gradavg.timers import Communication, DDPTimers

__all__ = ["GradAvgProfiler", "StepTimes", "overlap", "read_steps"]

_FEWEST_SKIPPED = 2
_STEP = "ProfilerStep#"  # of torch.profiler, from one call of its `step` to the next
_BACKWARD = "gradavg::backward"
_NODE = "autograd::engine::evaluate_function"  # of a backward, on the host
_GLOO = "gloo:"
_SEEN = re.compile(f"{_STEP}|{_BACKWARD}|{_NODE}|{_GLOO}")
_NCCL = "ncclDevKernel"

Interval = tuple[int, int]  # start and end, in nanoseconds


class StepTimes(NamedTuple):
    """What was seen of one optimizer step on one rank.

    Attributes:
        seconds: From the end of the step before to its own end, the loading of data included.
        trace: Communication by the trace.
        timers: Communication by DDP's own timers: from the start of the first reduction of the last backward to the end
            of the last one, pauses included; 0 where DDP kept no times.
    """

    seconds: float
    trace: Communication
    timers: Communication


def _length(intervals: Iterable[Interval]) -> int:
    """Return how long it is covered by any of the intervals; where they overlap, time counts once."""
    covered, reached = 0, 0
    for start, end in sorted(intervals):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def overlap(communication: Sequence[Interval], computation: Sequence[Interval]) -> Communication:
    """Return how long there was communication, and how long both."""
    total = _length(communication)
    both = total + _length(computation) - _length([*communication, *computation])
    return Communication(total / 1e9, both / 1e9)


def read_steps(events: Iterable[Any]) -> list[tuple[float, Communication]]:
    """Return the seconds and the communication of each step but the last, which is not complete.

    On a host, collectives are the events of gloo's threads, and computation is the evaluation of a backward's nodes.
    On a device, collectives are NCCL's kernels, and computation is all others.

    Args:
        events: Of `profile.profiler.kineto_results`.
    """
    host: dict[str, list[Interval]] = {_STEP: [], _BACKWARD: [], _NODE: [], _GLOO: []}
    names, device = set(), []
    for event in events:
        name, start = event.name(), event.start_ns()
        interval = start, start + event.duration_ns()
        if event.device_type() != DeviceType.CPU:
            device.append((name, interval))
            continue
        names.add(name)
        if (seen := _SEEN.match(name)) is not None:
            host[seen[0]].append(interval)
    # A thread of gloo closes its event after DDP has gone on with the result, see `_close_events`.
    limits = host[_STEP] + host[_BACKWARD]
    communication = [
        (start, min(last for first, last in [*limits, (start, end)] if first <= start <= last))
        for start, end in host[_GLOO]
    ]
    nccl = {name for name, _ in device if name.startswith(_NCCL)}
    communication += [interval for name, interval in device if name in nccl]
    # On a device the labels of the host span their kernels, under the same names: they are no work of their own.
    computation = [interval for name, interval in device if name not in names | nccl] or host[_NODE]

    def within(step: Interval, intervals: Iterable[Interval]) -> list[Interval]:
        return [(start, end) for start, end in intervals if step[0] <= start < step[1]]

    return [
        ((step[1] - step[0]) / 1e9, overlap(within(step, communication), within(step, computation)))
        for step in sorted(host[_STEP])[:-1]
    ]


class GradAvgProfiler(Callback):
    """Has `torch.profiler` record a few optimizer steps, under any strategy that uses DistributedDataParallel.

    After the last of them rank 0 prints how much of each step's communication was hidden behind the backward and how
    much was exposed, by the trace and by DDP's own timers, and every rank writes `trace_rank{r}.json.gz` for Perfetto
    and HolisticTraceAnalysis. Nothing is changed in training, and other steps cost nothing.

    Args:
        steps: Optimizer steps to profile.
        skip: Optimizer steps before them. At least 2, because DDP forms its buckets anew after the first.
        folder: Where to write, on every rank; the default is `gradavg_profile` in the Trainer's `default_root_dir`.
        trace: Whether to write the traces.

    Attributes:
        profile: What recorded, for its `key_averages` and the like; None before training.
        times: This rank's profiled steps, once they are over.

    Raises:
        ValueError: If `steps` or `skip` is too small, or, when training begins, if another profiler records with
            `torch.profiler`.
        TypeError: When training begins, if the strategy does not use DistributedDataParallel.
    """

    def __init__(self, *, steps: int = 10, skip: int = 5, folder: str | Path | None = None, trace: bool = True) -> None:
        if steps < 1:
            raise ValueError(f"steps is the number of optimizer steps to profile, at least 1, got {steps}")
        if skip < _FEWEST_SKIPPED:
            raise ValueError(
                f"skip={skip} is too small: DDP forms its buckets anew after its first step, and the step before the"
                f" first profiled one warms up. Use {_FEWEST_SKIPPED} or more."
            )
        self.steps, self.skip, self.folder, self.trace = steps, skip, folder, trace
        self.profile: profile | None = None
        self.times: list[StepTimes] = []
        self._running: profile | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"{type(self).__name__} profiles the reduction of DistributedDataParallel, which the strategy"
                f" {type(trainer.strategy).__name__} does not use. Train with strategy='gradavg' or 'ddp', or leave the"
                " callback out."
            )
        other = trainer.profiler  # type: ignore[attr-defined]  # set by a connector
        if isinstance(other, PyTorchProfiler) or profiling():
            raise ValueError(
                f"{type(self).__name__} and another profiler (profiler={type(other).__name__}, or one around fit())"
                " both record with torch.profiler, of which a process can run one at a time. Leave one of them out;"
                " where a run failed while it was recorded, start a new process."
            )
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (pl_module.device.type == "cuda")
        # One step more, which the table leaves out: in it the ranks wait for each other.
        when = schedule(wait=self.skip - 1, warmup=1, active=self.steps + 1, repeat=1)
        self.profile = self._running = profile(activities=activities, schedule=when, record_shapes=True)
        self.times, self._model, self._step_before = [], model, trainer.global_step
        self._timers, self._timed = DDPTimers(model), list[Communication]()
        self._recording = self._within_backward = False
        self._label = ExitStack()
        self.profile.start()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._within_backward = True
        if self._recording:
            self._label.enter_context(record_function(_BACKWARD))

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._within_backward = False
        self._label.close()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._running is None or trainer.global_step == self._step_before:
            return
        self._step_before = trainer.global_step
        if self._recording:
            self._timed.append(self._timers.read())
        self._running.step()
        self._recording = self._running.current_action == ProfilerAction.RECORD
        if self._recording:  # after each step, because GradAvgMonitor puts the usual rate back
            self._timers.start()
        elif self._timed:
            self._finish(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._running is not None:
            self._finish(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        running, self._running = self._running, None
        # Within a backward collectives may be under way. The threads of gloo write to the memory of the profiler, and
        # on a device it would wait for ranks that may be gone: it is left alone.
        if running is not None and not self._within_backward:
            running.stop()

    def _finish(self, trainer: Trainer) -> None:
        finished, model, self._running = self._running, self._model, None
        assert finished is not None
        self._timers.stop()
        _close_events(model)
        finished.stop()
        if not self._timed:
            rank_zero_warn(
                f"{type(self).__name__} has nothing to report: training ended before the first step after"
                f" skip={self.skip}. Train longer, or skip less."
            )
            return
        steps = read_steps(finished.profiler.kineto_results.events())  # type: ignore[union-attr]  # there since `start`
        self.times = [StepTimes(*step, timers) for step, timers in zip(steps, self._timed, strict=True)]
        everyone: list[list[StepTimes]] = [[] for _ in range(dist.get_world_size(model.process_group))]
        dist.all_gather_object(everyone, self.times, group=model.process_group)
        if self.trace:
            folder = Path(self.folder or Path(trainer.default_root_dir, "gradavg_profile"))
            folder.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(folder / f"trace_rank{trainer.global_rank}.json.gz"))
        if trainer.is_global_zero:
            Console(highlight=False).print(_table(type(trainer.strategy).__name__, self.skip, everyone))


def _close_events(model: DistributedDataParallel) -> None:
    """Wait until the threads of gloo have closed their events in the trace. All ranks must call this.

    A thread hands over a collective's result, for which DDP waits, before it closes the collective's event
    (`AsyncWork::finishWorkGloo` in torch's ProcessGroupGloo.cpp, 2.4 to 2.13). Stopped in between, the profiler loses
    the event, and in 2.4 the thread writes into freed memory ("free(): corrupted unsorted chunks"). What waits for the
    event is a barrier of the same group (`AsyncBarrierWork::run`).
    """
    ranks = set(dist.get_process_group_ranks(model.process_group))
    for group in process_groups():
        # A group that reaches beyond the ranks of the model could wait for one that does not come here.
        if "gloo" in dist.get_backend_config(group) and ranks.issuperset(dist.get_process_group_ranks(group)):
            dist.barrier(group=group)


def _table(strategy: str, first: int, everyone: Sequence[Sequence[StepTimes]]) -> Table:
    """Return the steps of rank 0, the medians over them, and the range of all ranks' medians, in ms (80 columns)."""
    title = f"{strategy} on {len(everyone)} rank(s), in ms: communication by trace and by DDP's timers"
    headings = ("step", "ms", "trace", "overlap", "exposed", "DDP", "overlap", "exposed")
    columns = [Column(heading, justify="right") for heading in headings]
    table = Table(*columns, title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    medians = [[statistics.median(one) for one in zip(*map(_numbers, steps), strict=True)] for steps in everyone]
    rows = {str(step): _numbers(times) for step, times in enumerate(everyone[0], start=first)}
    rows["rank 0"] = medians[0]
    rows |= {name: list(map(of, zip(*medians, strict=True))) for name, of in (("smallest", min), ("largest", max))}
    for name, numbers in rows.items():
        table.add_row(name, *(f"{1e3 * seconds:.2f}" for seconds in numbers))
    return table


def _numbers(times: StepTimes) -> list[float]:
    return [times.seconds, *times.trace, times.trace.exposed, *times.timers, times.timers.exposed]
