"""A rank without samples: what the strategy exchanges leaves it out, and a collective of the user's own is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import group_of, make_trainer
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.nn import functional as differentiable
from torchmetrics import SumMetric
from toys import Toy, make_loader

from lightning_gradavg import GradAvgStrategy, gather
from lightning_gradavg._lightning import user_collectives

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.distributed.* (is|will be) deprecated"),
    pytest.mark.filterwarnings("ignore:The .compute. method of metric SumMetric was called before"),
]

ROWS = torch.ones(4, dtype=torch.float64)


def several(rows: Tensor) -> list[Tensor]:
    """Return a tensor for each rank."""
    return [rows.clone() for _ in range(dist.get_world_size())]


def last() -> int:
    """Return the rank that has no samples in the last step."""
    return dist.get_world_size() - 1


class Own(Toy):
    """Does something in each training step, and keeps what came of it."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.does = does
        self.automatic_optimization = does != "a backward by hand"
        self.metric = SumMetric(dist_sync_on_step=True)
        self.found: list[Any] = []
        self.had_samples: list[bool] = []
        self.watched: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.watched.append(user_collectives._Process.refusal is not None)
        self.found.append({**OWN, **SERVED}[self.does](self, batch))
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        strategy: Any = self.trainer.strategy
        self.had_samples.append(strategy.has_samples)


Act = Callable[[Own, Tensor], Any]
# Collectives in the words of users, and as torch's dispatcher calls them.
OWN: dict[str, Act] = {
    "c10d::allreduce_": lambda module, batch: dist.all_reduce(torch.tensor(len(batch))),
    "c10d::allreduce_ that nobody waits for": lambda module, batch: dist.all_reduce(ROWS.clone(), async_op=True),
    "c10d::allreduce_ of two ranks": lambda module, batch: dist.all_reduce(ROWS.clone(), group=group_of((0, 1))),
    "c10d::allreduce_ of the differentiable kind": lambda module, batch: differentiable.all_reduce(module.w.clone()),
    "c10d::allreduce_ of the strategy": lambda module, batch: module.trainer.strategy.reduce(ROWS, reduce_op="sum"),
    "c10d::allreduce_coalesced_": lambda module, batch: dist.all_reduce_coalesced([ROWS.clone()]),
    "c10d::allgather_": lambda module, batch: dist.all_gather(several(ROWS), ROWS),
    "c10d::allgather_ of objects": lambda module, batch: dist.all_gather_object([None] * (last() + 1), "one"),
    "c10d::allgather_ of a metric in a step": lambda module, batch: module.metric(batch),
    "c10d::_allgather_base_": lambda module, batch: dist.all_gather_into_tensor(torch.cat(several(ROWS)), ROWS),
    "c10d::reduce_": lambda module, batch: dist.reduce(ROWS.clone(), 0),
    "c10d::gather_": lambda module, batch: dist.gather(ROWS, None if dist.get_rank() else several(ROWS)),
    "c10d::scatter_": lambda module, batch: dist.scatter(ROWS.clone(), None if dist.get_rank() else several(ROWS)),
    "c10d::alltoall_": lambda module, batch: dist.all_to_all(several(ROWS), several(ROWS)),
    "c10d::alltoall_base_": lambda module, batch: dist.all_to_all_single(torch.zeros(12), torch.ones(12)),
    "c10d::reduce_scatter_": lambda module, batch: dist.reduce_scatter(ROWS.clone(), several(ROWS)),
    "c10d::broadcast_": lambda module, batch: dist.broadcast(ROWS.clone(), last()),
    "c10d::broadcast_ of objects": lambda module, batch: dist.broadcast_object_list(["one"], last()),
    "_c10d_functional::all_reduce": lambda module, batch: functional.all_reduce(ROWS, "sum", dist.group.WORLD) + 0,
    "self.all_gather": lambda module, batch: module.all_gather(batch),
}


def count_where_there_are_samples(module: Own, batch: Tensor) -> float:
    strategy: Any = module.trainer.strategy
    count = torch.tensor(float(len(batch) if strategy.has_samples else 0))
    dist.all_reduce(count)
    return count.item()


def gathered_by_lightning(module: Own, batch: Tensor) -> float:
    strategy: Any = module.trainer.strategy
    counts = module.all_gather(torch.tensor(float(len(batch) if strategy.has_samples else 0)))
    return float(torch.as_tensor(counts).sum())


def logged(module: Own, batch: Tensor) -> float:
    for reduce in ("mean", "sum", "max", "min"):
        module.log(reduce, batch.mean(), reduce_fx=reduce, sync_dist=True)
    return float(len(gather(batch)))


def broadcast(module: Own, batch: Tensor) -> float:
    """What a rank with samples says is right on all."""
    count = torch.tensor(float(len(gather(batch))))
    dist.broadcast(count, 0)
    dist.barrier()
    said = [count.item()]
    dist.broadcast_object_list(said, 0)
    return module.trainer.strategy.broadcast(said[0])


def mean_of_ranks(module: Own, batch: Tensor) -> float:
    """Of ranks 0, 1 and 2, of which the last has samples in the first step only; and of the group of the last two."""
    strategy, rank, first = module.trainer.strategy, float(dist.get_rank()), module.trainer.global_step == 0
    group = group_of((1, 2))
    assert strategy.reduce(torch.tensor(rank), reduce_op="mean") == (1.0 if first else 0.5)
    if rank > 0:
        assert strategy.reduce(torch.tensor(rank), group=group, reduce_op="avg") == (1.5 if first else 1.0)
    return float(len(gather(batch)))


def normed_by_torch(module: Own, batch: Tensor) -> float:
    """By torch's layer, which runs on accelerators alone: it sees the rows of every rank."""
    nn.SyncBatchNorm(1)(batch[:, None])
    return float(len(gather(batch)))


def gradient_through_gather(module: Own, batch: Tensor) -> float:
    """A backward within the step, whose exchange is that of `gather`."""
    rows = batch.clone().requires_grad_()
    gathered = gather(rows)
    torch.autograd.grad(gathered.square().sum(), rows, allow_unused=True)
    return float(len(gathered))


SERVED: dict[str, Act] = {
    "takes a gradient through gather": gradient_through_gather,
    "counts where there are samples": count_where_there_are_samples,
    "gathers by Lightning where there are samples": gathered_by_lightning,
    "logs": logged,
    "broadcasts from rank 0": broadcast,
    "takes the mean of the ranks": mean_of_ranks,
    "normalizes by torch's layer": normed_by_torch,
    "a backward by hand": lambda module, batch: float(len(gather(batch))),
}


def fit(does: str, runs_out: bool, strategy: dict[str, Any]) -> Any:
    """Body: train two steps, the last of them without samples for the last rank, and return what the model noted."""
    rank, module = dist.get_rank(), Own(does)
    size = dist.get_world_size()
    shared = [[1.0] * size, [2.0] * (size - 1)]
    batches = [[1.0], [2.0]][: 1 if rank == last() else 2] if runs_out else shared
    of = {"reduction": "weighted_mean"} if runs_out else {"split_batches": True}
    options: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": False}

    def synchronized(layer: Any, rows: Tensor) -> Tensor:
        dist.all_reduce(torch.tensor(len(rows)))
        return rows

    with mock.patch.object(nn.SyncBatchNorm, "forward", synchronized):
        make_trainer(GradAvgStrategy(**of, **strategy), **options).fit(module, make_loader(batches))
    assert type(module).training_step is Own.training_step
    assert "training_step" not in vars(module)
    return module.found, module.had_samples, module.watched


def body_of(does: str, runs_out: bool, **strategy: Any) -> Any:
    return fit(does, runs_out, strategy)


def make_parameters_of_collectives() -> list[Any]:
    """Return a parameter of pytest for every row of OWN."""
    parameters = []
    for does in OWN:
        marks = []
        if does == "c10d::reduce_scatter_":
            marks.append(NEEDS_GLOO_OF_2_7)
        if does == "c10d::alltoall_":
            marks.append(NEEDS_GLOO_OF_2_13)
        parameters.append(pytest.param(does, marks=marks))
    return parameters


NEEDS_GLOO_OF_2_7 = pytest.mark.skipif(torch.__version__ < "2.7", reason="gloo of an older torch cannot do it")
# Torch 2.11 has none, 2.13 has it; 2.12 was not tried.
NEEDS_GLOO_OF_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="gloo of torch 2.11 cannot do it")


@pytest.mark.parametrize("runs_out", [False, True])
@pytest.mark.parametrize("does", make_parameters_of_collectives())
def test_a_collective_of_the_users_own_is_an_error_on_all_ranks(world, does, runs_out):
    """3 samples in batches of 2 on 2 ranks: a count by `dist.all_reduce` was 4."""
    size = 3 if does == "c10d::alltoall_base_" else 2
    for raised in world(size).run_expecting_errors(body_of, does, runs_out):
        assert raised.type_name == "RuntimeError", raised
        said = f"training_step runs the collective {does.partition(' ')[0]}, but rank {size - 1} has no samples"
        assert raised.message.startswith(said)
        assert all(way in raised.message for way in ("lightning_gradavg.gather", "drop_last", "has_samples"))


@pytest.mark.parametrize("runs_out", [False, True])
@pytest.mark.parametrize("does", SERVED)
def test_what_leaves_out_a_rank_without_samples_is_served(world, does, runs_out):
    """Each step counts its samples once. A step that all ranks have samples in is not watched."""
    ranks = world(3).run(body_of, does, runs_out)
    assert [rank for rank, _ in enumerate(ranks)] == [0, 1, 2]
    for rank, (found, had_samples, watched) in enumerate(ranks):
        assert found == [3.0, 2.0]
        assert had_samples == [True, rank < 2]
        assert watched == [False, True]


def test_pieces_and_one_device_are_watched_too(world):
    for strategy in ({"equivalent_to": "single_device"}, {"max_device_batch_size": 1}, {"num_replicas": 4}):
        for raised in world(2).run_expecting_errors(body_of, "c10d::allreduce_", False, **strategy):
            assert "rank 1 has no samples" in raised.message


class Marked(Toy):
    """Keeps whether a dispatch mode runs in each training step, and who has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[int] = []
        self.without: list[list[int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        strategy: Any = self.trainer.strategy
        self.modes.append(torch._C._len_torch_dispatch_stack())
        self.without.append(list(strategy._batches.idle))
        return super().training_step(batch, batch_idx)


def mark(counts: list[int] | None, epochs: int, **strategy: Any) -> Any:
    """Body: train on so many batches of this rank, or on two batches that all share; return modes and idle ranks."""
    module = Marked()
    batches = [[1.0, 2.0], [3.0]] if counts is None else [[1.0]] * counts[dist.get_rank()]
    options: dict[str, Any] = {"max_epochs": epochs, "use_distributed_sampler": False}
    make_trainer(GradAvgStrategy(**strategy), **options).fit(module, make_loader(batches))
    return module.modes, module.without


def test_under_reproducible_a_rank_with_samples_runs_no_mode(world):
    """Its kernels, and so its bits, are those of a run on one rank."""
    assert [[0, 0], [0, 1]] == [modes for modes, _ in world(2).run(mark, None, 1, reproducible=True, num_replicas=2)]
    assert [[0, 1], [0, 1]] == [modes for modes, _ in world(2).run(mark, None, 1, split_batches=True)]


def test_ranks_are_named_as_their_batches_end(world):
    """Of 3, 1 and 2 batches, in two epochs."""
    expected = [[], [1], [1, 2]] * 2
    ranks = world(3).run(mark, [3, 1, 2], 2, reduction="weighted_mean")
    assert [expected] * 3 == [without for _, without in ranks]


def test_many_ranks_are_counted():
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more have no samples" in user_collectives.refusal("x", range(10))
