"""A callback that logs what the strategy observes, and warns of ranks that do not train as one."""

import math
from statistics import fmean
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_gradavg._lightning.internals import TrainingLoop
from lightning_gradavg._support.arguments import as_count_or_none
from lightning_gradavg.faults.drift import SameData
from lightning_gradavg.report.report import StepReport
from lightning_gradavg.strategy import GradAvgStrategy

__all__ = ["GradAvgMonitor"]


class GradAvgMonitor(Callback):
    """Logs every n-th optimizer step: the loss of the global batch, and the gradients on both sides of the reduction.

    The values go to all loggers of the Trainer and to `trainer.callback_metrics`. Other steps cost nothing. It also
    warns if all ranks read the same data in their first three batches. See docs/monitor.md.

    Args:
        every_n_steps: Optimizer steps from one logged step to the next; None for the Trainer's `log_every_n_steps`.
        prefix: The prefix of all logged names.
        prog_bar: Whether the progress bar shows the loss and the gradient norm.
        per_rank: Whether to log the values of every rank beside their mean, minimum and maximum.
        check_data: Whether to compare the first batches.
        fingerprint_every_n_steps: Optimizer steps from one log line with `strategy.fingerprint()`, by which you compare
            runs, to the next; None for no line.

    Raises:
        ValueError: If a number of steps is below 1.
        TypeError: If it is no integer. When training starts, if the Trainer's strategy is not a `GradAvgStrategy`.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        prefix: str = "gradavg",
        prog_bar: bool = False,
        per_rank: bool = False,
        check_data: bool = True,
        fingerprint_every_n_steps: int | None = None,
    ) -> None:
        self.every_n_steps, self.fingerprint_every_n_steps = every_n_steps, fingerprint_every_n_steps
        self.prefix = prefix
        self.prog_bar, self.per_rank, self.check_data = prog_bar, per_rank, check_data
        for name in ("every_n_steps", "fingerprint_every_n_steps"):
            as_count_or_none(name, getattr(self, name))

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not isinstance(trainer.strategy, GradAvgStrategy):
            raise TypeError(
                "GradAvgMonitor reads what a GradAvgStrategy observes, but the Trainer has a"
                f" {type(trainer.strategy).__name__}. Use Trainer(strategy='gradavg'), which trains as 'ddp' does, or"
                " leave the monitor out."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._waits = False
        self._data = SameData("training batches", compares=self.check_data and trainer.world_size > 1)
        by_trainer: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector; 0 logs nothing
        self._every = self.every_n_steps or by_trainer

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        if self._data.left > 0:
            # A digest reads no values on an accelerator.
            self._data.compare(None if strategy.facts().samples == 0 else move_data_to_device(batch, "cpu"))
        if _is_due(TrainingLoop(trainer.fit_loop).step, self._every):
            self._waits = True
            if not strategy.observing:  # a window has several batches and is asked for once
                strategy.observe_next_step()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        strategy: Any = trainer.strategy
        loop = TrainingLoop(trainer.fit_loop)
        if self._waits and not strategy.observing:
            self._waits = False
            self._log(trainer, pl_module, strategy.report(), loop.step)
        if loop.accumulates:
            return
        if _is_due(loop.step, self.fingerprint_every_n_steps):
            rank_zero_info(f"GradAvgMonitor: after step {loop.step + 1}, fingerprint {strategy.fingerprint()}")

    def _log(self, trainer: Trainer, module: LightningModule, report: StepReport, step: int) -> None:
        values = {f"{self.prefix}/{name}": value for name, value in self._values_of(report).items()}
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)
        for name in (f"{self.prefix}/loss", f"{self.prefix}/gradient_norm") if self.prog_bar else ():
            module.log(name, values[name], prog_bar=True, logger=False, batch_size=1)

    def _values_of(self, report: StepReport) -> dict[str, float]:
        names = ("loss", "gradient_norm", "lr_scale", "global_batch_size")
        found: dict[str, float | None] = {name: getattr(report, name) for name in names}
        found |= {f"lr/group_{index}": lr for index, lr in enumerate(report.learning_rates)}
        found["normalizer"] = report.normalizer
        of_ranks = {"local_gradient_norm": report.local_gradient_norms, "weight": report.weights}
        for name, values in of_ranks.items():
            found |= {f"{name}/mean": fmean(values), f"{name}/min": min(values), f"{name}/max": max(values)}
            found |= {f"{name}/rank_{rank}": value for rank, value in enumerate(values) if self.per_rank}
        return {name: value for name, value in found.items() if value is not None}


def _is_due(step: int, every: int | None) -> bool:
    return (step + 1) % (every or math.inf) == 0
