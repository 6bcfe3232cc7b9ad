"""The harness itself: a test that passes for the wrong reason would be worse than none."""

from __future__ import annotations

import functools
import os
import random
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import isolated_test
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from ranks import Raised, RankError, RankPool, isolated, make_trainer, rank_environment
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

World = Callable[[int], RankPool]
IMPORTED_BY = os.getpid()


def who() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def process() -> int:
    return os.getpid()


def threads() -> tuple[int, int]:
    return torch.get_num_threads(), torch.get_num_interop_threads()


def importer() -> tuple[bool, bool]:
    return os.getppid() == IMPORTED_BY, os.getpid() == IMPORTED_BY


def summed(value: int, *, factor: int = 1) -> int:
    total = torch.tensor(factor * (value + dist.get_rank()))
    dist.all_reduce(total)
    return int(total)


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


def fail_everywhere() -> None:
    raise LookupError(f"nothing found on {dist.get_rank()}")


def fail_on_odd_ranks() -> str:
    if dist.get_rank() % 2:
        raise LookupError("odd")
    return "even"


def fail_and_leave_a_collective_open() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(dist.get_world_size()), async_op=True)
    raise LookupError("after a collective on rank 0 only")


def leave_the_world() -> None:
    dist.destroy_process_group()


def warn() -> str:
    warnings.warn("odd numbers", UserWarning, stacklevel=1)
    return "went on"


def return_a_lambda() -> Any:
    return lambda: None


def handle_signal(*_: Any) -> None:
    raise AssertionError("no signal is sent in these tests")


def change_everything() -> None:
    os.environ["GRADAVG_LEAK"] = "1"
    os.chdir(tempfile.gettempdir())
    vars(rank_zero_only)["rank"] = 5
    signal.signal(signal.SIGTERM, handle_signal)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    random.random()
    np.random.random()  # noqa: NPY002  # the global generator is what must be put back
    torch.rand(3)


def settings() -> list[Any]:
    return [
        os.environ.get("GRADAVG_LEAK"),
        str(Path.cwd()),
        vars(rank_zero_only)["rank"],
        signal.getsignal(signal.SIGTERM),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        random.random(),
        float(np.random.random()),  # noqa: NPY002
        float(torch.rand(())),
    ]


class Line(LightningModule):
    """The loss is w * mean(x), so the gradient of w is mean(x) and SGD moves w by -lr * mean(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.w * batch[0].mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(nodes: Sequence[int] | None = None) -> tuple[int, float]:
    trainer = make_trainer(DDPStrategy(), nodes=nodes, max_epochs=1, use_distributed_sampler=False)
    model = Line()
    trainer.fit(model, DataLoader(TensorDataset(torch.full((6,), 1.0 + dist.get_rank())), batch_size=2))
    return trainer.global_step, float(model.w.detach())


def standing(nodes: Sequence[int]) -> tuple[int, int, int, int]:
    trainer = make_trainer(DDPStrategy(), nodes=nodes)
    return trainer.node_rank, trainer.local_rank, trainer.global_rank, trainer.world_size


def environment_of(nodes: Sequence[int]) -> None:
    rank_environment(nodes)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_in_rank_order_from_separate_processes(world: World, world_size: int) -> None:
    """Each rank answers once, in rank order, and is a process of its own that stays between calls."""
    pool = world(world_size)
    processes = pool.run(process)

    assert [(rank, world_size) for rank in range(world_size)] == pool.run(who)
    assert world_size == len({*processes, os.getpid()}) - 1
    assert processes == pool.run(process)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_collectives_reach_every_rank(world: World, world_size: int) -> None:
    """An all-reduce inside a body sums over the whole world, with the arguments given to `run`."""
    expected = 10 * sum(3 + rank for rank in range(world_size))

    assert [expected] * world_size == world(world_size).run(summed, 3, factor=10)


def test_a_rank_has_one_thread(world: World) -> None:
    """A rank computes on one thread, within and between operators."""
    assert world(2).run(threads) == [(1, 1)] * 2


def test_test_modules_are_imported_once_for_all_ranks(world: World) -> None:
    """The process that ranks are forked from has imported this module; no rank imports it again."""
    assert world(3).run(importer) == [(True, False)] * 3


def test_the_failing_rank_is_reported_and_the_waiting_ones_are_ended(world: World) -> None:
    """The error is that of the rank that failed, with its traceback; the world restarts at the next call."""
    pool = world(3)
    before = pool.run(process)

    with pytest.raises(RankError, match=r"(?s)^rank 1: LookupError: nothing found on 1\n.*in fail_alone") as caught:
        pool.run(fail_alone, 1)

    assert (
        caught.value.rank,
        caught.value.type_name,
        caught.value.message,
    ) == (1, "LookupError", "nothing found on 1")
    assert set(before).isdisjoint(pool.run(process))


def test_a_death_is_reported_with_the_last_output(world: World) -> None:
    """A rank that ends without an answer is the one reported, not its peers that lose the connection."""
    pattern = r"(?s)^rank 0: ProcessDied: the process ended with exit code 7\n.*output of rank 0:\nlast words"
    with pytest.raises(RankError, match=pattern):
        world(3).run(die_alone, 0)


def test_a_hanging_rank_is_ended_with_its_stack() -> None:
    """A rank that does not answer in time ends itself, and the error shows where it was."""
    pool = RankPool(1, timeout=0.2)
    try:
        with pytest.raises(RankError, match=r"(?s)^rank 0: Timeout: .* within 0\.2 s\n.*in wait_for_ever"):
            pool.run(wait_for_ever)
    finally:
        pool.close()


def test_expected_errors_leave_the_world_standing(world: World) -> None:
    """Where every rank answers, an error is an answer: the processes stay, and results may stand beside errors."""
    pool = world(3)
    before = pool.run(process)

    assert [Raised("LookupError", f"nothing found on {rank}") for rank in range(3)] == pool.run_expecting_errors(
        fail_everywhere
    )
    assert pool.run_expecting_errors(fail_on_odd_ranks) == ["even", ("LookupError", "odd"), "even"]
    assert before == pool.run(process)


def test_an_error_that_leaves_a_collective_open_does_not_reach_the_next_test(world: World) -> None:
    """Ranks that are out of step after an expected error fail the call that caused it."""
    with pytest.raises(RankError, match="out of step"):
        world(2).run_expecting_errors(fail_and_leave_a_collective_open)

    assert world(2).run(summed, 0) == [1, 1]


def test_ranks_that_leave_the_world_are_noticed(world: World) -> None:
    """An answer counts only with the rank and the world size that the process group states."""
    with pytest.raises(RankError, match=r"WrongWorld: .*\[\(-1, -1\), \(-1, -1\)\]"):
        world(2).run(leave_the_world)


def test_warnings_on_ranks_are_errors_unless_the_test_allows_them(world: World) -> None:
    """The warning filters of the calling test hold on the ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "odd num")

        with pytest.raises(RankError, match="UserWarning: odd numbers"):
            world(2).run(warn)

        warnings.filterwarnings("ignore", "odd num")

        assert world(2).run(warn) == ["went on"] * 2


@pytest.mark.parametrize("body", [lambda: None, functools.partial(summed, 1)], ids=["lambda", "partial"])
def test_a_body_that_ranks_cannot_import_is_refused(world: World, body: Callable[..., Any]) -> None:
    """Only module-level functions are bodies; the message quotes what was given."""
    with pytest.raises(TypeError, match=r"must be a module-level function of a test module, got .*(lambda|partial)"):
        world(2).run(body)


def test_a_result_that_cannot_be_sent_is_named(world: World) -> None:
    """A result that does not pickle is an error of the rank that returned it."""
    with pytest.raises(RankError, match=r"PicklingError: the body returned <function return_a_lambda.*cannot be sent"):
        world(2).run(return_a_lambda)


def test_no_rank_is_no_world() -> None:
    """A world has at least one rank."""
    with pytest.raises(ValueError, match="at least 1, got 0"):
        RankPool(0)


def test_bodies_do_not_leak_into_each_other(world: World) -> None:
    """Environment, folder, ranks, signals, precision and random state are the same before every body."""
    pool = world(2)
    before = pool.run(settings)
    pool.run(change_everything)

    assert before == pool.run(settings)
    assert before[0] == before[1]


def test_tests_do_not_leak_into_each_other() -> None:
    """The same holds for tests within the parent process."""
    with isolated():
        before = settings()
    with isolated():
        change_everything()

        assert before[:8] != settings()[:8]
    with isolated():
        assert before == settings()


def test_a_process_group_left_open_fails_the_test(tmp_path: Path) -> None:
    """A test must destroy the process group that it initializes."""
    with pytest.raises(pytest.fail.Exception, match="left its process group initialized"), isolated_test():
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

    assert not dist.is_initialized()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_lightning_trains_on_the_ranks(world: World, world_size: int) -> None:
    """A stock DDP fit runs on the ranks: rank r feeds x = 1 + r, so three steps move w to -0.3 * mean(1 + r)."""
    mean = sum(1 + rank for rank in range(world_size)) / world_size

    assert [(3, pytest.approx(-0.3 * mean, rel=1e-6))] * world_size == world(world_size).run(fit)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([0, 0, 1, 1], [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ([0, 0, 1], [(0, 0), (0, 1), (1, 0)]),
        ([0, 1, 1, 1], [(0, 0), (1, 0), (1, 1), (1, 2)]),
        ([0, 1, 0], [(0, 0), (1, 0), (0, 1)]),
    ],
    ids=str,
)
def test_synthetic_nodes_are_what_lightning_sees(
    world: World, nodes: list[int], expected: list[tuple[int, int]]
) -> None:
    """The node list gives each rank its node and its index on the node, for uneven and interleaved nodes, too."""
    seen = [(*place, rank, len(nodes)) for rank, place in enumerate(expected)]

    assert seen == world(len(nodes)).run(standing, nodes)


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 1, 1]], ids=str)
def test_lightning_trains_on_synthetic_nodes(world: World, nodes: list[int]) -> None:
    """Stock DDP does not look at nodes: the fit is the one of four ranks on one node."""
    assert world(4).run(fit) == world(4).run(fit, nodes)


@pytest.mark.parametrize("nodes", [[0], [0, 2], [1, 1], [0, 0, 0]], ids=str)
def test_impossible_nodes_are_refused(world: World, nodes: list[int]) -> None:
    """A node list names a node, counted from 0, for each rank of the world."""
    answers = world(2).run_expecting_errors(environment_of, nodes)

    assert [answer.type_name for answer in answers] == ["ValueError"] * 2
    assert all(f"nodes={nodes} must give one node index, counted from 0" in answer.message for answer in answers)
