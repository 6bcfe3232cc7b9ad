"""What a rank that fails tells the others, so that they can name it and its error when their exchange breaks.

A broken exchange does not say whether a rank raised, was killed, or is stuck. A rank that fails leaves a report in the
store of the process group, where the others look. Nothing is exchanged while all goes well.
"""

from __future__ import annotations

import dis
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gradavg._lightning.internals import store_of_world
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.text import listed_ranks, message_of

__all__ = ["FailureReports", "is_broken_exchange", "text_of"]

_WAIT_SECONDS = 2.0
"""How long a rank whose exchange broke waits for the reports of the others. They fail at the same moment."""
_PATIENCE_SECONDS = 5.0
"""How long a rank waits before it decides that the others do not end with it, and how long rank 0 keeps the store."""
_POLL_SECONDS = 0.05
_MOST_CHARACTERS = 1000
_BROKEN = "communication with the other ranks failed: "
_GLOO_SOURCE = re.compile(r"\[[^\]]*gloo/[\w/]+\.(?:cc|h):\d+\]")
"""The place in gloo's source with which its errors begin."""
_RAISE = dis.opmap["RAISE_VARARGS"]


class FailureReports:
    """The reports that the ranks of a run may leave; `run` is its number, the same on all ranks.

    A report is one line: "STEP ERROR: TEXT", or "STEP communication with the other ranks failed: ERROR: TEXT" of a rank
    that only saw its exchange break. These keys of the store are used:

    | key | value |
    |---|---|
    | the rank | its report |
    | failed | how many ranks have failed |
    | read RANK | set when the rank has read all reports |
    | equal | whether all ranks end by the same error, as the first rank that decided says |

    No method is a collective operation. A RuntimeError of the store means that its process, rank 0, is gone.
    """

    def __init__(self, world: World, run: int) -> None:
        self._world = world
        # Not the keys of an earlier run in the same processes.
        self._store = dist.PrefixStore(f"lightning_gradavg/{run}", store_of_world())

    def report(self, exception: BaseException, step: int) -> bool:
        """Leave a report; return whether this rank is the first of several to fail."""
        try:
            self._leave(exception, step)
            failed = self._store.add("failed", 1)
        except RuntimeError:
            return True
        # Lightning ends all ranks by a SIGTERM, which is nobody's fault.
        return failed == 1 and self._world.size > 1 and not isinstance(exception, SIGTERMException)

    def read(self) -> str:
        """Return what the others report, on a rank whose exchange with them broke."""
        text = "the rank that failed first is not known: rank 0, which has ended, held the store"
        with suppress(RuntimeError):
            reports = self._wait_for_reports(_WAIT_SECONDS)
            text = self._in_words(reports)
            self._store.set(_read_by(self._world.rank), "")
            if self._world.rank == 0:
                # Keep the store until all that read it have done so.
                readers = [_read_by(rank) for rank, report in reports.items() if _BROKEN in report]
                self._wait_for(readers, _PATIENCE_SECONDS)
        return text

    def ends_equal(self, exception: BaseException, step: int) -> bool:
        """Return whether all ranks end by such an exception at this step: the same answer on all of them."""
        try:
            self._leave(exception, step)
            equal = self._all_report_the_same(exception)
            # The first answer holds, as ranks may look at different moments. `compare_set` sets a key that is not there
            # yet, and returns its value.
            return bool(self._store.compare_set("equal", "", str(equal)) == b"True")
        except RuntimeError:
            return False

    def _all_report_the_same(self, exception: BaseException) -> bool:
        """Wait for the reports of all ranks; return whether they name the same step and type of error."""
        if is_broken_exchange(exception):
            return False
        reports = self._wait_for_reports(_PATIENCE_SECONDS)
        kinds = {report.partition(":")[0] for report in reports.values()}
        return len(reports) == self._world.size and len(kinds) == 1

    def _leave(self, exception: BaseException, step: int) -> None:
        # In one line, as the report is the last line of other ranks, by which a user finds the cause.
        error = " ".join(text_of(exception).split())
        if is_broken_exchange(exception):
            error = f"{_BROKEN}{error}"
        self._store.set(str(self._world.rank), f"{step} {error}"[:_MOST_CHARACTERS])

    def _wait_for_reports(self, seconds: float) -> dict[int, str]:
        """Wait for the reports of all ranks; return those that are there, by rank."""
        self._wait_for([str(rank) for rank in range(self._world.size)], seconds)
        reports = {}
        for rank in range(self._world.size):
            key = str(rank)
            if self._store.check([key]):
                reports[rank] = self._store.get(key).decode(errors="replace")
        return reports

    def _wait_for(self, keys: Sequence[str], seconds: float) -> None:
        # The store has a `wait` of its own, which writes to standard error that it timed out.
        deadline = time.monotonic() + seconds
        while not self._store.check(list(keys)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _in_words(self, reports: Mapping[int, str]) -> str:
        texts = []
        for rank, report in reports.items():
            _, _, error = report.partition(" ")  # without the step
            if not error.startswith(_BROKEN):
                texts.append(f"rank {rank} failed with {error}")
        silent = [rank for rank in range(self._world.size) if rank not in reports]
        if silent:
            texts.append(f"nothing was heard from {listed_ranks(silent)}: lost, killed or stuck")
        if not texts:
            return "all ranks say the same: look at the network, or at the timeout of the process group"
        return "; ".join(texts)


def _read_by(rank: int) -> str:
    """Return the key that says that a rank has read the reports."""
    return f"read {rank}"


def text_of(exception: BaseException) -> str:
    """Return the type and the text of an exception."""
    return f"{type(exception).__name__}: {message_of(exception)}"


def is_broken_exchange(exception: BaseException) -> bool:
    """Return whether a collective raised an exception.

    NCCL and stores have types of their own. Gloo raises a plain RuntimeError in C++, which names the place in its
    source. A user's exception may have any text, also that of gloo's, but Python code raised it.
    """
    if isinstance(exception, dist.DistError):
        return True
    if type(exception) is not RuntimeError:
        return False
    return _GLOO_SOURCE.search(text_of(exception)) is not None and not _is_raised_in_python(exception)


def _is_raised_in_python(exception: BaseException) -> bool:
    """Return whether the instruction that raised an exception is a `raise`, and not a call of a function in C++."""
    last = exception.__traceback__
    if last is None:
        return True
    while last.tb_next is not None:
        last = last.tb_next
    return last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE
