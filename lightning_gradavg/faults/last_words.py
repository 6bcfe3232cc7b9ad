"""What a rank that fails tells the others, so that they can name it and its error when their exchange breaks.

A broken exchange does not say whether a rank raised, was killed, or is stuck. A rank that fails leaves a line in the
store of the process group, where the others look. Nothing is exchanged while all goes well.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

import torch.distributed as dist

from lightning_gradavg._lightning.internals import store_of_world
from lightning_gradavg._support.collectives import World, on_ranks

__all__ = ["TOGETHER", "LastWords", "is_broken_exchange"]

_WAIT_SECONDS = 2.0
_PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.05
_MOST_CHARACTERS = 1000
_BROKEN = "communication with the other ranks failed: "
TOGETHER = "all ranks end together"
"""The text of an exception that the ranks have agreed on."""


class LastWords:
    """The line that every rank of a run may leave; `run` is its number, the same on all ranks."""

    def __init__(self, world: World, run: int) -> None:
        self._world, self._store = world, dist.PrefixStore(f"lightning_gradavg/{run}", store_of_world())

    def say(self, exception: BaseException, step: int) -> bool:
        """Leave a line; return whether this rank is the first to fail."""
        with suppress(RuntimeError):  # the process that holds the store is gone
            self._leave_line(exception, step)
            # One that the ranks have agreed on is nobody's fault.
            return self._store.add("said", 1) == 1 < self._world.size and TOGETHER not in exception.args
        return True

    def listen(self) -> str:
        """Return what the others tell when an exchange with them broke."""
        told = "the rank that failed first is not known: rank 0, which has ended, held the store"
        with suppress(RuntimeError):
            lines = self._lines(_WAIT_SECONDS)
            told = self._in_words(lines)
            self._store.set(f"heard {self._world.rank}", "")
            if self._world.rank == 0:
                # Keep the store until all that listen have heard.
                self._wait_for([f"heard {rank}" for rank, line in lines.items() if _BROKEN in line], _PATIENCE_SECONDS)
        return told

    def ends_equal(self, exception: BaseException, step: int) -> bool:
        """Return whether all ranks end by such an exception at this step: the same answer on all of them."""
        if TOGETHER in exception.args:
            return True
        with suppress(RuntimeError):
            self._leave_line(exception, step)
            lines = {} if is_broken_exchange(exception) else self._lines(_PATIENCE_SECONDS)
            kinds = {line.partition(":")[0] for line in lines.values()}
            equal = len(lines) == self._world.size and len(kinds) == 1
            return bool(self._store.compare_set("verdict", "", str(equal)) == b"True")
        return False

    def _leave_line(self, exception: BaseException, step: int) -> None:
        broken = _BROKEN * is_broken_exchange(exception)
        line = f"{step} {broken}{type(exception).__name__}: {exception}"[:_MOST_CHARACTERS]
        self._store.set(str(self._world.rank), line)

    def _lines(self, seconds: float) -> dict[int, str]:
        ranks = {rank: str(rank) for rank in range(self._world.size)}
        self._wait_for(list(ranks.values()), seconds)
        found = {rank: self._store.get(key) for rank, key in ranks.items() if self._store.check([key])}
        return {rank: line.decode(errors="replace") for rank, line in found.items()}

    def _wait_for(self, keys: list[str], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)  # the store's own `wait` writes that it timed out

    def _in_words(self, lines: Mapping[int, str]) -> str:
        told = {rank: line.partition(" ")[2] for rank, line in lines.items()}
        found = [f"rank {rank} ended with {line}" for rank, line in told.items() if not line.startswith(_BROKEN)]
        silent = [rank for rank in range(self._world.size) if rank not in lines]
        if silent:
            found.append(f"nothing was heard {on_ranks(silent).replace('on', 'from', 1)}: lost, killed or stuck")
        return "; ".join(found) or "all ranks say the same: look at the network, or at the timeout of the process group"


def is_broken_exchange(exception: BaseException) -> bool:
    """Return whether a collective raised an exception; gloo's name its source file."""
    return isinstance(exception, dist.DistError) or (type(exception) is RuntimeError and "gloo" in str(exception))
