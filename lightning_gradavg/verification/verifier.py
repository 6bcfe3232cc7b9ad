"""The callback that verifies a run which is under way."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Sequence
from typing import Any, Literal

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console
from typing_extensions import override

from lightning_gradavg.verification.compare import compare
from lightning_gradavg.verification.recorder import Recorder
from lightning_gradavg.verification.report import Report
from lightning_gradavg.verification.table import print_report
from lightning_gradavg.verification.targets import ObjectTarget
from lightning_gradavg.verification.worlds import Settings, in_processes, reference_in_process

__all__ = ["GradAvgVerifier"]

_PIPE_WIDTH = 120  # rich assumes 80 columns where there is no terminal


class GradAvgVerifier(Recorder):
    """Verifies the first steps of a training run against one process, and lets it go on.

    After `steps` optimizer steps rank 0 starts a process that computes the same steps on the same global batches alone,
    compares, and prints the report. Until then every step costs one further differentiation per micro-batch and copies
    of weights and gradients. The module, as it was before training, is pickled for that process.

    The order of samples is not compared, for which one process would have to read the data, too; `verify` and
    `gradavg verify` do.

    Args:
        steps: Optimizer steps to verify.
        on_difference: "warn", or "raise" to end training on all ranks.
        tolerance: The largest relative difference that counts as equal; default: 1e-5, in float64 1e-10.
        ignore: Causes that are not to be reported.

    Attributes:
        report: The report, on every rank, once there is one.
    """

    def __init__(
        self,
        steps: int = 3,
        *,
        on_difference: Literal["warn", "raise"] = "warn",
        tolerance: float | None = None,
        ignore: Sequence[str] = (),
    ) -> None:
        super().__init__(steps, stops=False)
        if on_difference not in ("warn", "raise"):
            raise ValueError(f"on_difference must be 'warn' or 'raise', got {on_difference!r}")
        self.on_difference, self.tolerance, self.ignore = on_difference, tolerance, tuple(ignore)
        self.report: Report | None = None
        self._module: LightningModule | None = None
        self._datamodule: Any = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep the module as it is before training."""
        if stage == "fit":
            self.report = None
            self._module = copy.deepcopy(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Verify once all steps are recorded."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.complete and self.report is None:
            self._release(pl_module)
            self.report = self._verify(trainer)
            self._answer(self.report)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so where training was too short."""
        super().on_train_end(trainer, pl_module)
        if self.report is None:
            done = 0 if self.run is None else len(self.run.steps)
            rank_zero_warn(f"GradAvgVerifier: training took {done} optimizer steps, {self.steps} were to be verified.")

    def _verify(self, trainer: Trainer) -> Report:
        several = dist.is_initialized() and dist.get_world_size() > 1
        runs: list[Any] = [self.run]
        if several:
            runs = [None] * dist.get_world_size()
            dist.gather_object(self.run, runs if dist.get_rank() == 0 else None)
        # One rank that fails must not leave the others waiting.
        answer: list[Any] = [None]
        if not several or dist.get_rank() == 0:
            try:
                answer = [self._compare(runs, trainer)]
            except Exception as error:  # noqa: BLE001  # raised on all ranks below
                answer = [error]
        if several:
            dist.broadcast_object_list(answer, 0)
        if isinstance(answer[0], Exception):
            raise RuntimeError(  # noqa: TRY004  # what another rank raised
                f"GradAvgVerifier could not verify the run: {answer[0]}"
            ) from answer[0]
        report: Report = answer[0]
        return report

    def _compare(self, runs: Sequence[Any], trainer: Trainer) -> Report:
        assert self._module is not None
        options = {
            "max_epochs": trainer.max_epochs,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
            "precision": trainer.precision,
        }
        target = ObjectTarget(self._module, None, {name: value for name, value in options.items() if value is not None})
        accelerator = "cuda" if trainer.strategy.root_device.type == "cuda" else "cpu"
        settings = Settings(1, self.steps, accelerator, compare_order=False)
        ((reference, _),) = in_processes([(reference_in_process, (target, runs, settings))])
        report = compare(runs, reference, tolerance=self.tolerance).without(self.ignore)
        piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
        print_report(report, Console(width=_PIPE_WIDTH if piped else None, highlight=False))
        return report

    def _answer(self, report: Report) -> None:
        first = report.first
        if first is None:
            return
        message = (
            f"GradAvgVerifier: the run is not the one that one process would train: {first.cause} ({first.detail})."
            f" {first.advice[0].upper()}{first.advice[1:]}."
        )
        if self.on_difference == "raise":
            raise RuntimeError(message)
        rank_zero_warn(message)
