"""What a rank that fails tells the others, so that those whose exchange then breaks can name the rank and its error.

A broken exchange says nothing of why: a rank raised, was killed, or is stuck. Whoever fails leaves a line in the store
that the process group was made with, and whose exchange failed looks there. Nothing is exchanged while all goes well.
"""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from lightning_gradavg.lightning_internals import store_of_world
from lightning_gradavg.ranks import World, on_ranks

__all__ = ["LastWords"]

_WAIT_SECONDS = 2.0
_POLL_SECONDS = 0.05
_MOST_CHARACTERS = 1000
_BROKEN = "an exchange with the other ranks broke: "


class LastWords:
    """The line that every rank of a run may leave.

    Args:
        world: All ranks.
        run: The number of the run in this process, the same on all ranks.
    """

    def __init__(self, world: World, run: int) -> None:
        self._world, self._run = world, run

    def say(self, exception: BaseException) -> str | None:
        """Leave a line, and return what is known of the others where an exchange with them broke; else None."""
        broke = is_broken_exchange(exception)
        line = f"{_BROKEN * broke}{type(exception).__name__}: {exception}"[:_MOST_CHARACTERS]
        try:
            store = store_of_world()
            store.set(self._key(self._world.rank), line)
            return self._listen(store) if broke else None
        except (RuntimeError, ValueError):  # the process that holds the store is gone, or the group was taken down
            return "the rank that holds the store of the process group, which is rank 0, is gone" if broke else None

    def _listen(self, store: Any) -> str:
        """Return who failed first, as far as ranks answer, and who is lost."""
        silent, deadline = set(range(self._world.size)), time.monotonic() + _WAIT_SECONDS
        while silent and time.monotonic() < deadline:
            silent -= {rank for rank in silent if store.check([self._key(rank)])}
            time.sleep(_POLL_SECONDS)
        answered = (rank for rank in range(self._world.size) if rank not in silent)
        lines = {rank: store.get(self._key(rank)).decode(errors="replace") for rank in answered}
        found = [f"rank {rank} ended with {line}" for rank, line in lines.items() if not line.startswith(_BROKEN)]
        if silent:
            found.append(
                f"nothing was heard {on_ranks(sorted(silent)).replace('on', 'from', 1)}: lost, killed or stuck"
            )
        return "; ".join(found) or "all ranks say the same: look at the network, or at the timeout of the process group"

    def _key(self, rank: int) -> str:
        return f"lightning_gradavg/last_words/{self._run}/{rank}"


def is_broken_exchange(exception: BaseException) -> bool:
    """Return whether an exception is that of a collective; of gloo it is told by the file that it names."""
    return isinstance(exception, dist.DistError) or (type(exception) is RuntimeError and "gloo" in str(exception))
