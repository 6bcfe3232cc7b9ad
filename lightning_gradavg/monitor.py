"""A callback that logs what the strategy observes, and warns of ranks that read the same data."""

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
    """Logs every n-th optimizer step: `Z`, the weight, the norm of the reduced gradient, and the learning rate factor.

    The values go to all loggers of the Trainer and to `trainer.callback_metrics`. Other steps cost nothing. It also
    warns if all ranks read the same data in their first three batches. See docs/monitor.md.

    Args:
        every_n_steps: Optimizer steps from one logged step to the next; None for the Trainer's `log_every_n_steps`.
        prefix: The prefix of all logged names.
        prog_bar: Whether the progress bar shows the gradient norm.
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
        check_data: bool = True,
        fingerprint_every_n_steps: int | None = None,
    ) -> None:
        as_count_or_none("every_n_steps", every_n_steps)
        as_count_or_none("fingerprint_every_n_steps", fingerprint_every_n_steps)
        self.every_n_steps = every_n_steps
        self.fingerprint_every_n_steps = fingerprint_every_n_steps
        self.prefix = prefix
        self.prog_bar = prog_bar
        self.check_data = check_data

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
        self._awaits_report = False  # whether a step is requested whose report is not logged yet
        self._data = SameData("training batches", compares=self.check_data and trainer.world_size > 1)
        self._every = self.every_n_steps
        if self._every is None:
            self._every = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        strategy = _strategy_of(trainer)
        if self._data.left > 0:
            self._compare_data(strategy, batch)
        if _is_due(TrainingLoop(trainer.fit_loop).step, self._every):
            self._awaits_report = True
            # A window has several batches, and its step is requested with the first.
            if not strategy.observing:
                strategy.observe_next_step()

    def _compare_data(self, strategy: GradAvgStrategy, batch: object) -> None:
        """Compare one batch with those of the other ranks. A collective operation."""
        has_samples = strategy.facts().samples != 0
        if has_samples:
            # A digest leaves out the values of tensors on an accelerator, for which it would have to wait.
            self._data.compare(move_data_to_device(batch, "cpu"))
        else:
            # A rank without samples runs a stand-in, on samples of another rank.
            self._data.compare(None)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        strategy = _strategy_of(trainer)
        loop = TrainingLoop(trainer.fit_loop)
        # Once the strategy stops observing, the window of the requested step is reduced and its report is there.
        if self._awaits_report and not strategy.observing:
            self._awaits_report = False
            self._log(trainer, pl_module, strategy.report(), loop.step)
        if not loop.accumulates and _is_due(loop.step, self.fingerprint_every_n_steps):
            rank_zero_info(f"GradAvgMonitor: after step {loop.step + 1}, fingerprint {strategy.fingerprint()}")

    def _log(self, trainer: Trainer, module: LightningModule, report: StepReport, step: int) -> None:
        """Log a report on every rank. Lightning's loggers write on rank 0 only, and so its weight.

        `module.log` serves the progress bar only, as it logs in the steps of `log_every_n_steps`, not in ours.
        """
        values = {
            f"{self.prefix}/normalizer": report.normalizer,
            f"{self.prefix}/weight": report.weight,
            f"{self.prefix}/gradient_norm": report.gradient_norm,
        }
        for index, factor in enumerate(report.lr_factors):
            values[f"{self.prefix}/lr_factor/optimizer_{index}"] = factor
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)
        if self.prog_bar:
            name = f"{self.prefix}/gradient_norm"
            module.log(name, values[name], prog_bar=True, logger=False, batch_size=1)


def _strategy_of(trainer: Trainer) -> GradAvgStrategy:
    """Return the strategy, whose type `setup` has checked."""
    strategy = trainer.strategy
    assert isinstance(strategy, GradAvgStrategy)
    return strategy


def _is_due(step: int, every: int | None) -> bool:
    """Return whether a step is the last of `every` ones; never if that is None, or 0 as in `log_every_n_steps=0`."""
    if not every:
        return False
    return (step + 1) % every == 0
