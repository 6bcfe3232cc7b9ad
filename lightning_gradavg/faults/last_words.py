"""What a rank that fails tells the others, so that they can name it and its error when their exchange breaks.

A broken exchange does not say whether a rank raised, was killed, or is stuck. A rank that fails leaves a line in the
store of the process group, where the others look. Nothing is exchanged while all goes well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from lightning_gradavg.lightning_internals import store_of_world
from lightning_gradavg.ranks import World, on_ranks

__all__ = ["TOGETHER", "LastWords", "is_broken_exchange"]

_WAIT_SECONDS = 2.0
_PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.05
_MOST_CHARACTERS = 1000
_BROKEN = "communication with the other ranks failed: "
_STORE_LOST = (RuntimeError, ValueError)  # the process that holds it is gone, or the group was taken down
TOGETHER = "all ranks end together"
"""The text of an exception that the ranks have agreed on."""


class LastWords:
    """The line that every rank of a run may leave; `run` is its number, the same on all ranks."""

    def __init__(self, world: World, run: int) -> None:
        self._world, self._run = world, run

    def say(self, exception: BaseException, step: int) -> tuple[str | None, bool]:
        """Leave a line; return what others tell if an exchange broke, and whether this rank is the first to fail."""
        broke = is_broken_exchange(exception)
        told, first = "the rank that failed first is not known: rank 0, which has ended, held the store", True
        with suppress(*_STORE_LOST):
            store = self._leave_line(exception, step)
            # One that the ranks have agreed on is nobody's fault.
            first = store.add(self._key("said"), 1) == 1 and TOGETHER not in exception.args
            told = self._listen(store) if broke else ""
            store.add(self._key("heard"), 1)
            if broke and self._world.rank == 0:
                # Keep the store until all that spoke have listened.
                _poll(lambda: store.add(self._key("heard"), 0) >= store.add(self._key("said"), 0), _PATIENCE_SECONDS)
        return told if broke else None, first

    def ends_equal(self, exception: BaseException, step: int) -> bool:
        """Return whether all ranks end by such an exception at this step: the same answer on all of them."""
        if TOGETHER in exception.args:
            return True
        with suppress(*_STORE_LOST):
            store, equal = self._leave_line(exception, step), False
            if not is_broken_exchange(exception):
                lines = self._lines(store, _PATIENCE_SECONDS)
                kinds = {line.partition(":")[0] for line in lines.values()}
                equal = len(lines) == self._world.size and len(kinds) == 1
            return bool(store.compare_set(self._key("verdict"), "", str(equal)) == b"True")
        return False

    def _leave_line(self, exception: BaseException, step: int) -> Any:
        store, broken = store_of_world(), _BROKEN * is_broken_exchange(exception)
        line = f"{step} {broken}{type(exception).__name__}: {exception}"[:_MOST_CHARACTERS]
        store.set(self._key(self._world.rank), line)
        return store

    def _lines(self, store: Any, seconds: float) -> dict[int, str]:
        keys = {rank: self._key(rank) for rank in range(self._world.size)}
        _poll(lambda: all(store.check([key]) for key in keys.values()), seconds)
        return {rank: store.get(key).decode(errors="replace") for rank, key in keys.items() if store.check([key])}

    def _listen(self, store: Any) -> str:
        lines = {rank: line.partition(" ")[2] for rank, line in self._lines(store, _WAIT_SECONDS).items()}
        found = [f"rank {rank} ended with {line}" for rank, line in lines.items() if not line.startswith(_BROKEN)]
        silent = [rank for rank in range(self._world.size) if rank not in lines]
        if silent:
            found.append(f"nothing was heard {on_ranks(silent).replace('on', 'from', 1)}: lost, killed or stuck")
        return "; ".join(found) or "all ranks say the same: look at the network, or at the timeout of the process group"

    def _key(self, what: object) -> str:
        return f"lightning_gradavg/{self._run}/{what}"


def _poll(met: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not met() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def is_broken_exchange(exception: BaseException) -> bool:
    """Return whether a collective raised an exception; gloo's name its source file."""
    return isinstance(exception, dist.DistError) or (type(exception) is RuntimeError and "gloo" in str(exception))
