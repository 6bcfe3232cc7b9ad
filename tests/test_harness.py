"""The ranks of the tests: a test that passes for the wrong reason would be worse than none."""

from __future__ import annotations

import os
import threading
import warnings
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Raised, RankError, RankPool


def fail_alone(code: int | None) -> None:
    """Body: raise, or die, on rank 1, for which the others wait."""
    if dist.get_rank() == 1:
        print("last words", flush=True)  # noqa: T201  # the output of a rank is what is tested
        if code is not None:
            os._exit(code)
        raise LookupError("nothing found")
    dist.barrier()


def hang() -> None:
    threading.Event().wait()


def leave_open() -> None:
    """Body: raise on rank 1 what is expected, with a collective of rank 0 left open."""
    if dist.get_rank() == 1:
        raise LookupError("odd")
    dist.all_reduce(torch.zeros(dist.get_world_size()), async_op=True)


def change_everything() -> Any:
    """Body: return what was set, and change it, with a warning."""
    found = [os.environ.get("GRADAVG_LEAK"), torch.get_default_dtype(), float(torch.rand(())), os.getpid()]
    warnings.warn("odd numbers", UserWarning, stacklevel=1)
    os.environ["GRADAVG_LEAK"] = "1"
    torch.set_default_dtype(torch.float64)
    return found


@pytest.mark.parametrize(
    ("code", "pattern"),
    [(None, r"LookupError: nothing found\n.*in fail_alone"), (7, "ProcessDied: the process ended with exit code 7\n")],
)
def test_the_rank_that_failed_is_reported_and_the_world_starts_again(world, code, pattern):
    with pytest.raises(RankError, match=rf"(?s)^rank 1: {pattern}.*output of rank 1:\nlast words"):
        world(2).run(fail_alone, code)
    assert [2, 2] == world(2).run(dist.get_world_size)


def test_a_rank_that_hangs_is_ended_with_its_stack():
    expected = r"(?s)^rank 0: ProcessDied: .*output of rank 0:\nTimeout .*in hang"
    with closing(RankPool(1, timeout=0.2)) as pool, pytest.raises(RankError, match=expected):
        pool.run(hang)


def test_ranks_that_are_out_of_step_after_expected_errors_are_found(world):
    with pytest.raises(RankError, match="out of step"):
        world(2).run_expecting_errors(leave_open)


def test_bodies_leave_nothing_and_warn_only_where_the_test_allows_it(world):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "odd num")
        assert world(2).run(change_everything) == world(2).run(change_everything)
    assert [Raised("UserWarning", "odd numbers")] * 2 == world(2).run_expecting_errors(change_everything)
