"""The ranks of the tests: a test that passes for the wrong reason would be worse than none."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import isolated_test
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import DDPStrategy
from ranks import Raised, RankError, RankPool, isolated, make_trainer
from toys import Toy, train

World = Callable[[int], RankPool]


def summed(value: int, *, factor: int = 1) -> tuple[int, int]:
    """Body: return the process, and a sum over the ranks."""
    total = torch.tensor(factor * (value + dist.get_rank()))
    dist.all_reduce(total)
    return os.getpid(), int(total)


def fail_alone(rank: int) -> None:
    if dist.get_rank() == rank:
        raise LookupError(f"nothing found on {rank}")
    dist.barrier()


def die_alone(rank: int) -> None:
    if dist.get_rank() == rank:
        print("last words", flush=True)  # noqa: T201  # the output of a rank is what is tested
        os._exit(7)
    dist.barrier()


def wait_for_ever() -> None:
    threading.Event().wait()


def fail_on_odd_ranks() -> str:
    if dist.get_rank() % 2:
        raise LookupError("odd")
    return "even"


def leave_a_collective_open() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(dist.get_world_size()), async_op=True)
    raise LookupError("after a collective on rank 0 only")


def warn() -> str:
    warnings.warn("odd numbers", UserWarning, stacklevel=1)
    return "went on"


def change_everything() -> None:
    os.environ["GRADAVG_LEAK"] = "1"
    vars(rank_zero_only)["rank"] = 5
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.rand(3)


def settings() -> list[object]:
    rank, deterministic = vars(rank_zero_only)["rank"], torch.are_deterministic_algorithms_enabled()
    return [os.environ.get("GRADAVG_LEAK"), rank, torch.get_default_dtype(), deterministic, float(torch.rand(()))]


def standing(nodes: list[int]) -> tuple[int, int, int, int]:
    trainer = make_trainer(DDPStrategy(), nodes=nodes)
    return trainer.node_rank, trainer.local_rank, trainer.global_rank, trainer.world_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_are_processes_that_exchange_and_stay(world: World, world_size: int) -> None:
    processes, sums = zip(*world(world_size).run(summed, 3, factor=10), strict=True)
    assert world_size == len({*processes, os.getpid()}) - 1
    assert (10 * sum(3 + rank for rank in range(world_size)),) * world_size == sums
    assert processes == tuple(process for process, _ in world(world_size).run(summed, 0))


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        (fail_alone, r"(?s)^rank 1: LookupError: nothing found on 1\n.*in fail_alone"),
        (die_alone, r"(?s)^rank 1: ProcessDied: the process ended with exit code 7\n.*output of rank 1:\nlast words"),
    ],
)
def test_the_rank_that_failed_is_reported_and_the_world_starts_again(world: World, body, pattern) -> None:
    with pytest.raises(RankError, match=pattern):
        world(3).run(body, 1)
    assert [3] * 3 == [value for _, value in world(3).run(summed, 0)]


def test_a_rank_that_hangs_is_ended_with_its_stack() -> None:
    pool = RankPool(1, timeout=0.2)
    try:
        with pytest.raises(RankError, match=r"(?s)^rank 0: Timeout: .* within 0\.2 s\n.*in wait_for_ever"):
            pool.run(wait_for_ever)
    finally:
        pool.close()


def test_expected_errors_are_answers_unless_ranks_are_out_of_step(world: World) -> None:
    assert ["even", Raised("LookupError", "odd"), "even"] == world(3).run_expecting_errors(fail_on_odd_ranks)
    with pytest.raises(RankError, match="out of step"):
        world(2).run_expecting_errors(leave_a_collective_open)


def test_warnings_on_ranks_are_errors_unless_the_test_allows_them(world: World) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "odd num")
        with pytest.raises(RankError, match="UserWarning: odd numbers"):
            world(2).run(warn)
        warnings.filterwarnings("ignore", "odd num")
        assert ["went on"] * 2 == world(2).run(warn)


def test_bodies_and_tests_do_not_leak_into_each_other(world: World) -> None:
    before = world(2).run(settings)
    world(2).run(change_everything)
    assert before == world(2).run(settings)
    with isolated():
        here = settings()
    with isolated():
        change_everything()
    with isolated():
        assert here == settings()


def test_a_process_group_left_open_fails_the_test(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="left its process group initialized"), isolated_test():
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 1, 1]], ids=str)
def test_lightning_trains_on_uneven_nodes(world: World, nodes: list[int]) -> None:
    """Four ranks with gradients 1, 2, 3, 4 of stock DDP, whatever their nodes."""
    places = [(node, nodes[:rank].count(node), rank, 4) for rank, node in enumerate(nodes)]
    assert places == world(4).run(standing, nodes)
    found = world(4).run(train, [[[1.0]], [[2.0]], [[3.0]], [[4.0]]], {}, {}, module=Toy, nodes=nodes)
    assert [2.5] * 4 == [one.gradients[0].item() for one in found]
