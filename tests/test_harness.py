"""The ranks of the tests: a test that passes for the wrong reason would be worse than none."""

from __future__ import annotations

import os
import threading
import warnings
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from ranks import Raised, RankError, RankPool


def summed(value, *, factor=1):
    total = torch.tensor(factor * (value + dist.get_rank()))
    dist.all_reduce(total)
    return os.getpid(), int(total)


def fail_alone(rank):
    if dist.get_rank() == rank:
        raise LookupError(f"nothing found on {rank}")
    dist.barrier()


def die_alone(rank):
    if dist.get_rank() == rank:
        print("last words", flush=True)  # noqa: T201  # the output of a rank is what is tested
        os._exit(7)
    dist.barrier()


def wait_for_ever():
    threading.Event().wait()


def fail_on_odd_ranks():
    if dist.get_rank() % 2:
        raise LookupError("odd")
    return "even"


def leave_a_collective_open():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(dist.get_world_size()), async_op=True)
    raise LookupError("after a collective on rank 0 only")


def change_everything():
    """Return what was set, and change it, with a warning."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    found = [os.environ.get("GRADAVG_LEAK"), vars(rank_zero_only)["rank"], torch.get_default_dtype(), deterministic]
    found.append(float(torch.rand(())))
    warnings.warn("odd numbers", UserWarning, stacklevel=1)
    os.environ["GRADAVG_LEAK"] = "1"
    vars(rank_zero_only)["rank"] = 5
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    return found


def test_ranks_are_processes_that_exchange_and_stay(world):
    processes, sums = zip(*world(3).run(summed, 3, factor=10), strict=True)
    assert 3 == len({*processes, os.getpid()}) - 1
    assert (120,) * 3 == sums
    assert processes == tuple(process for process, _ in world(3).run(summed, 0))


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        (fail_alone, r"(?s)^rank 1: LookupError: nothing found on 1\n.*in fail_alone"),
        (die_alone, r"(?s)^rank 1: ProcessDied: the process ended with exit code 7\n.*output of rank 1:\nlast words"),
    ],
)
def test_the_rank_that_failed_is_reported_and_the_world_starts_again(world, body, pattern):
    with pytest.raises(RankError, match=pattern):
        world(3).run(body, 1)
    assert [3] * 3 == [value for _, value in world(3).run(summed, 0)]


def test_a_rank_that_hangs_is_ended_with_its_stack():
    with (
        closing(RankPool(1, timeout=0.2)) as pool,
        pytest.raises(RankError, match=r"(?s)^rank 0: Timeout: .* within 0\.2 s\n.*in wait_for_ever"),
    ):
        pool.run(wait_for_ever)


def test_expected_errors_are_answers_unless_ranks_are_out_of_step(world):
    assert ["even", Raised("LookupError", "odd"), "even"] == world(3).run_expecting_errors(fail_on_odd_ranks)
    with pytest.raises(RankError, match="out of step"):
        world(2).run_expecting_errors(leave_a_collective_open)


def test_bodies_leave_nothing_and_warn_only_where_the_test_allows_it(world):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "odd num")
        assert world(2).run(change_everything) == world(2).run(change_everything)
    with pytest.raises(RankError, match="UserWarning: odd numbers"):
        world(2).run(change_everything)
