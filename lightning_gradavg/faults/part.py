"""The faults that a run is watched for while it trains."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from lightning_gradavg.faults.drift import require_replicas
from lightning_gradavg.part import Part, Run

__all__ = ["Faults"]


class Faults(Part):
    """Compares the replicas: when training begins, at the end of every epoch, and every so many steps.

    Args:
        check_every: Optimizer steps from one comparison to the next; None to compare nothing.
        buffers: Whether the ranks hold the same buffers after every step.

    Raises:
        ValueError: If `check_every` is below 1.
    """

    def __init__(self, check_every: int | None, *, buffers: bool) -> None:
        if check_every is not None and check_every < 1:
            raise ValueError(f"check_replicas_every_n_steps must be an integer >= 1, or None, got {check_every}")
        self._check_every, self._buffers = check_every, buffers
        self._checked = (0, 0)

    @property
    def _now(self) -> tuple[int, int]:
        trainer = self.run.trainer
        return trainer.current_epoch, trainer.global_step

    def on_train_start(self) -> None:
        """Compare what a checkpoint or the user has set."""
        self._check()

    def on_train_batch_start(self) -> None:
        """Compare after an epoch, and where it is due."""
        if self._check_every is None:
            return
        (epoch, step), (checked_epoch, checked_step) = self._now, self._checked
        if epoch != checked_epoch or step - checked_step >= self._check_every:
            self._check()

    def on_train_end(self) -> None:
        """Compare after the last epoch."""
        self._check()

    def _check(self) -> None:
        run = self.run
        if self._check_every is None or run.world.size == 1:
            return
        self._checked = self._now
        require_replicas(self._tensors(run), run.ddp.process_group, run.device, self._checked[1])

    def _tensors(self, run: Run) -> Iterator[tuple[str, Tensor]]:
        ignored = run.ddp.parameters_to_ignore
        for name, parameter in run.module.named_parameters():
            if name not in ignored:
                yield f"parameter {name!r}", parameter
        for name, buffer in run.module.named_buffers() if self._buffers else ():
            if name not in ignored:
                yield f"buffer {name!r}", buffer
