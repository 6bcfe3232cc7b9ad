"""Lightning's event that a training batch arrives, as a callback of the strategy's own."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

__all__ = ["Arrival"]


class Arrival(Callback):
    """Tells the strategy, before any callback of the user's, that a batch arrives or ends, and that an epoch ends.

    The strategy calls `insert` when training begins, and `remove` when the run ends. In between, Lightning calls
    `on_train_batch_start` and `on_train_batch_end` for each batch, and `on_train_epoch_end` for each epoch. The
    callback has no state, so checkpoints know nothing of it.

    No public method of the strategy is this event: users may call those, on any rank, for any batch
    (`tests/test_ranks_faults.py::test_a_method_that_one_rank_calls_is_no_event`). The strategy's own hook
    `on_train_batch_start` comes after the user's, which may save a checkpoint, of this batch.

    Args:
        begin: Called with each batch that is trained on.
        end: Called with each batch when it was trained on, or passed over because it is None.
        end_epoch: Called at the end of each epoch.
    """

    def __init__(
        self, begin: Callable[[object], None], end: Callable[[object], None], end_epoch: Callable[[], None]
    ) -> None:
        self._begin = begin
        self._end = end
        self._end_epoch = end_epoch

    def insert(self, trainer: Trainer) -> bool:
        """Make this the first callback of a trainer; return whether it had to be inserted."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        if self in callbacks:
            return False
        callbacks.insert(0, self)
        return True

    def remove(self, trainer: Trainer) -> None:
        """Take this out of the callbacks of a trainer, if it is there."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        if self in callbacks:
            callbacks.remove(self)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._begin(batch)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        self._end(batch)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_epoch()
