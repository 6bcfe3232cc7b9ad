"""The records of the batches that Lightning has fetched, by their numbers in the epoch.

A batch reaches the user's hooks in the user's own type, so nothing can travel inside it. Its record is found by its
number when the batch arrives in training. Reading adds records; looking at a batch changes nothing, and what was
fetched ahead or failed is not counted.

For each batch, Lightning calls in this order:

1. `__next__` of the loader's iterator, perhaps one batch ahead: the record is added;
2. the hooks that move the batch to the device;
3. the strategy's own callback, the first in `on_train_batch_start`: the record is found;
4. the training step, and perhaps the optimizer's;
5. `save` of the strategy's parts, where a checkpoint is saved.
"""

from __future__ import annotations

from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

__all__ = ["Records"]

_Record = TypeVar("_Record")


class Records(Generic[_Record]):
    """The records of the batches of a loader that were fetched last, by epoch and number.

    An epoch is the object by which Lightning reads it, `TrainingLoop.epoch`. It is held weakly, so that the worker
    processes of an epoch that was left early end with it.
    """

    def __init__(self) -> None:
        self._of_epochs: WeakKeyDictionary[object, dict[int, _Record]] = WeakKeyDictionary()

    def next_number(self, epoch: object, *, first: int = 0) -> int:
        """Return the number of the batch that is fetched next; `first` is that of the first of a resumed epoch."""
        records = self._of_epochs.get(epoch)
        if not records:
            return first
        return max(records) + 1

    def add(self, epoch: object, number: int, record: _Record) -> None:
        """Add the record of a batch."""
        records = self._of_epochs.setdefault(epoch, {})
        records[number] = record
        # Two are kept: of a loader without length, Lightning fetches one batch ahead of the one in training.
        records.pop(number - 2, None)

    def get(self, epoch: object, number: int) -> _Record | None:
        """Return the record of a batch, or None if the loader had no batch of that number."""
        if epoch is None:  # no loader is read any more
            return None
        return self._of_epochs.get(epoch, {}).get(number)
