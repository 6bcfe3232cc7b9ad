"""What stands behind the batches of a loader, by the number that Lightning gives them in the epoch."""

from __future__ import annotations

import weakref
from typing import Any

from lightning_gradavg.lightning_internals import TrainingLoop

__all__ = ["Numbers", "nothing"]


def nothing() -> None:
    """Stand in for a weak reference."""


class Numbers(dict[int, Any]):
    """What stands behind the batches of a loader, by the number that Lightning gives them in the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._next, self._epoch = 0, nothing

    def note(self, loop: TrainingLoop, behind: Any, *, first: int = 0, keep: int = 2) -> None:
        """Note what stands behind the next batch, and forget old ones.

        Args:
            loop: The training loop.
            behind: What to note.
            first: The number of the epoch's first batch.
            keep: How many are asked for at most: one is fetched ahead where the length is unknown.
        """
        epoch: Any = loop.epoch
        if self._epoch() is not epoch:
            self.clear()
            # Not the epoch itself: the workers of one that is left must be able to end.
            self._next, self._epoch = first, weakref.ref(epoch)
        self[self._next] = behind
        self.pop(self._next - keep, None)
        self._next += 1
