"""`GradAvgProfiler`: where the time of a few optimizer steps goes, in the user's own run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_gradavg.profiling.recording import Recorder
from lightning_gradavg.profiling.report import can_draw, draw, print_report, to_json
from lightning_gradavg.profiling.summary import Profile, summary_of

__all__ = ["GradAvgProfiler"]

_FEWEST_SKIPPED = 2
_PIPE_WIDTH = 120  # rich assumes 80 columns where there is no terminal: too few for the tables


class GradAvgProfiler(Callback):
    """Profiles the reduction of gradients in a few optimizer steps of a run, under any DDP strategy.

    After the last profiled step rank 0 prints a table and writes `profile.json` and `timeline.png`; every rank writes
    its Chrome trace `trace_rank{r}.json`. Nothing is changed in training, and other steps cost nothing. The last of the
    skipped steps is recorded too, and thrown away, because a profiler's first step is slow.

    Args:
        steps: Optimizer steps to profile.
        skip: Optimizer steps before them. At least 2, because DDP forms its buckets anew after the first.
        folder: Where to write, on every rank; the default is `gradavg_profile` in the Trainer's `default_root_dir`.
            Files of an earlier profile are overwritten.
        picture: Whether to draw `timeline.png`, which needs matplotlib.
        trace: Whether to keep the Chrome traces.

    Raises:
        ValueError: If `steps` or `skip` is too small, or, when training begins, if another profiler records with
            `torch.profiler`.
        TypeError: When training begins, if the strategy does not use DistributedDataParallel.
    """

    def __init__(
        self,
        *,
        steps: int = 10,
        skip: int = 5,
        folder: str | Path | None = None,
        picture: bool = True,
        trace: bool = True,
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps is the number of optimizer steps to profile, at least 1, got {steps}")
        if skip < _FEWEST_SKIPPED:
            raise ValueError(
                f"skip={skip} is too small: DDP forms its buckets anew after its first step, and the step before the"
                f" first profiled one warms up. Use {_FEWEST_SKIPPED} or more."
            )
        self.steps = steps
        self.skip = skip
        self.folder = folder
        self.picture = picture
        self.trace = trace
        self._recorder: Recorder | None = None
        self._waiting = True
        self._step_before = 0
        self._skipped = 0

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
        if isinstance(other, PyTorchProfiler) or torch.autograd._profiler_enabled():
            who = f"profiler={type(other).__name__}" if isinstance(other, PyTorchProfiler) else "a profiler around fit()"
            raise ValueError(
                f"{type(self).__name__} and {who} both record with torch.profiler, of which a process can run one at a"
                " time. Leave one of them out; where a run failed while it was recorded, start a new process."
            )
        if self.picture and not can_draw():
            rank_zero_warn(
                "timeline.png will not be drawn, because matplotlib is not installed: pip install matplotlib, or set"
                " picture=False. All other results are written."
            )
        self._recorder = Recorder(model, pl_module.device)
        self._waiting = True
        self._step_before, self._skipped = trainer.global_step, 0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._waiting and self._recorder is not None and self._skipped == self.skip - 1:
            self._recorder.start()
            self._waiting = False
        if self._recording is not None:
            self._recording.begin_batch()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._recording is not None:
            self._recording.begin_backward()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._recording is not None:
            self._recording.end_backward()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = trainer.global_step > self._step_before
        if self._recording is not None:
            self._recording.end_batch(closes=stepped)
            if len(self._recording.steps) == self.steps + 1:
                self._report(trainer)
        if stepped:
            self._skipped += 1
            self._step_before = trainer.global_step

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._recording is not None:
            self._report(trainer)
        elif self._recorder is not None and self._waiting:
            self._too_short()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.abandon()

    @property
    def _recording(self) -> Recorder | None:
        return None if self._waiting else self._recorder

    def _too_short(self) -> None:
        rank_zero_warn(
            f"{type(self).__name__} has nothing to report: training ended before the first step after skip={self.skip}."
            " Train longer, or skip less."
        )

    def _report(self, trainer: Trainer) -> None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        folder = Path(trainer.default_root_dir) / "gradavg_profile" if self.folder is None else Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / f"trace_rank{trainer.global_rank}.json" if self.trace else None
        timelines = recorder.finish(trace)
        if not timelines[0].steps:
            self._too_short()
            return
        if not trainer.is_global_zero:
            return
        model = recorder.model
        found = Profile(
            ranks=tuple(timelines),
            first_step=self.skip,
            buckets=recorder.layout,
            names=tuple(name for name, _ in recorder.parameters),
            strategy=type(trainer.strategy).__name__,
            backend=model.process_group._get_backend(recorder.device).name(),
            device=recorder.device.type,
            bucket_cap_mb=model.bucket_bytes_cap / 2**20,
            gradient_as_bucket_view=model.gradient_as_bucket_view,
        )
        summary = summary_of(found)
        console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
        print_report(found, summary, console)
        (folder / "profile.json").write_text(to_json(found, summary), encoding="utf-8")
        if self.picture and can_draw():
            draw(folder / "timeline.png", found)
        console.print(f"Written to {folder}", markup=False, soft_wrap=True)
