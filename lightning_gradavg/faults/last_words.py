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
    """The line that every rank of a run may leave; `run` is its number in this process, the same on all ranks."""

    def __init__(self, world: World, run: int) -> None:
        self._world, self._run = world, run

    def say(self, exception: BaseException) -> str | None:
        """Leave a line; if an exchange with the other ranks broke, return what is known of them."""
        broke = is_broken_exchange(exception)
        line = f"{_BROKEN * broke}{type(exception).__name__}: {exception}"[:_MOST_CHARACTERS]
        told = "the rank that failed first is not known: rank 0, which has ended, held the store"
        with suppress(*_STORE_LOST):
            store = store_of_world()
            store.set(self._key("said", self._world.rank), line)
            told = self._listen(store) if broke else ""
            store.set(self._key("heard", self._world.rank), "")
            if broke and self._world.rank == 0:
                self._outlast(store)
        return told if broke else None

    def is_first(self, exception: BaseException) -> bool:
        """Return whether this rank is the first to fail, and not by an exception that the ranks agreed on."""
        if TOGETHER in exception.args:
            return False
        mine = str(self._world.rank)
        with suppress(*_STORE_LOST):
            return bool(store_of_world().compare_set(self._key("first", 0), "", mine) == mine.encode())
        return True  # nobody else can ask

    def ends_equal(self, exception: BaseException, step: int) -> bool:
        """Return whether all ranks end by such an exception at this step. Their verdict is the same."""
        if TOGETHER in exception.args:
            return True
        with suppress(*_STORE_LOST):
            store, mine = store_of_world(), f"{type(exception).__name__} {step}"
            everyone, equal = [self._key("ends", rank) for rank in range(self._world.size)], False
            if not is_broken_exchange(exception):
                store.set(everyone[self._world.rank], mine)
                _poll(lambda: store.check(everyone), _PATIENCE_SECONDS)
                equal = store.check(everyone) and {store.get(key) for key in everyone} == {mine.encode()}
            return bool(store.compare_set(self._key("verdict", 0), "", str(equal)) == b"True")
        return False

    def _listen(self, store: Any) -> str:
        """Return who failed, as far as ranks answer, and who is lost."""
        keys = {rank: self._key("said", rank) for rank in range(self._world.size)}
        _poll(lambda: all(store.check([key]) for key in keys.values()), _WAIT_SECONDS)
        lines = {rank: store.get(key).decode(errors="replace") for rank, key in keys.items() if store.check([key])}
        found = [f"rank {rank} ended with {line}" for rank, line in lines.items() if not line.startswith(_BROKEN)]
        silent = sorted(keys.keys() - lines)
        if silent:
            found.append(f"nothing was heard {on_ranks(silent).replace('on', 'from', 1)}: lost, killed or stuck")
        return "; ".join(found) or "all ranks say the same: look at the network, or at the timeout of the process group"

    def _outlast(self, store: Any) -> None:
        """Keep the store until all that spoke have listened."""
        others = range(1, self._world.size)

        def listens(rank: int) -> bool:
            return bool(store.check([self._key("said", rank)]) and not store.check([self._key("heard", rank)]))

        _poll(lambda: not any(map(listens, others)), _PATIENCE_SECONDS)

    def _key(self, kind: str, rank: int) -> str:
        return f"lightning_gradavg/{kind}/{self._run}/{rank}"


def _poll(met: Callable[[], bool], seconds: float) -> None:
    """Wait until something is so, or for so long."""
    deadline = time.monotonic() + seconds
    while not met() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def is_broken_exchange(exception: BaseException) -> bool:
    """Return whether a collective raised an exception; gloo's name its source file."""
    return isinstance(exception, dist.DistError) or (type(exception) is RuntimeError and "gloo" in str(exception))
