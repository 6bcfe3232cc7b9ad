"""A rank without samples: what the strategy exchanges leaves it out, and collectives of the user's own see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_module
from ranks import group_of, make_trainer
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from toys import Toy, make_loader

from lightning_gradavg import GradAvgStrategy, gather
from lightning_gradavg._lightning.loaders import last_batch_size
from lightning_gradavg._support.running import running_forward

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.distributed.* (is|will be) deprecated"),
]


class Own(Toy):
    """Does something in each training step, and keeps what came of it."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.does = does
        self.automatic_optimization = does != "a backward by hand"
        self.found: list[Any] = []
        self.had_samples: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.found.append(SERVED[self.does](self, batch))
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


def counted_by_itself(module: Own, batch: Tensor) -> float:
    """Sees the sample that a rank without samples computes, which must not count."""
    count = torch.tensor(float(len(batch)))
    dist.all_reduce(count)
    return count.item()


SERVED: dict[str, Act] = {
    "counts by itself": counted_by_itself,
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
    batches = [[1.0], [2.0]][: 1 if rank == size - 1 else 2] if runs_out else shared
    of = {"reduction": "weighted_mean"} if runs_out else {"split_batches": True}
    options: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": False}

    def synchronized(layer: Any, rows: Tensor) -> Tensor:
        dist.all_reduce(torch.tensor(len(rows)))
        return rows

    with mock.patch.object(nn.SyncBatchNorm, "forward", synchronized):
        make_trainer(GradAvgStrategy(**of, **strategy), **options).fit(module, make_loader(batches))
    return module.found, module.had_samples


def body_of(does: str, runs_out: bool, **strategy: Any) -> Any:
    return fit(does, runs_out, strategy)


@pytest.mark.parametrize("runs_out", [False, True])
@pytest.mark.parametrize("does", SERVED)
def test_what_leaves_out_a_rank_without_samples_is_served(world, does, runs_out):
    """Each step counts its samples once."""
    ranks = world(3).run(body_of, does, runs_out)
    assert [rank for rank, _ in enumerate(ranks)] == [0, 1, 2]
    for rank, (found, had_samples) in enumerate(ranks):
        # A stand-in for a batch that ranks share has two samples.
        counted_twice = 3.0 if runs_out else 4.0
        assert found == [3.0, counted_twice if does == "counts by itself" else 2.0]
        assert had_samples == [True, rank < 2]


class Marked(Toy):
    """Keeps which ranks have no samples in each training step."""

    def __init__(self) -> None:
        super().__init__()
        self.without: list[list[int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.without.append(list(running_forward().ranks_without_samples))
        return super().training_step(batch, batch_idx)


def mark(counts: list[int] | None, epochs: int, **strategy: Any) -> Any:
    """Body: train on so many batches of this rank, or on two that all share; return the ranks without samples."""
    module = Marked()
    batches = [[1.0, 2.0], [3.0]] if counts is None else [[1.0]] * counts[dist.get_rank()]
    options: dict[str, Any] = {"max_epochs": epochs, "use_distributed_sampler": False}
    make_trainer(GradAvgStrategy(**strategy), **options).fit(module, make_loader(batches))
    return module.without


def test_ranks_are_named_as_their_batches_end(world):
    """Of 3, 1 and 2 batches, in two epochs."""
    expected = [[], [1], [1, 2]] * 2
    ranks = world(3).run(mark, [3, 1, 2], 2, reduction="weighted_mean")
    assert [expected] * 3 == ranks


class Changes(LightningModule):
    """Assigns a buffer, takes the labels out of the batch, and changes them. Rank 0 alone looks at its data."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        self.count = self.count + 1
        labels = batch.pop("labels")
        assert labels == 1, "the batch is as it was loaded"
        labels -= 1
        return {"loss": self.w * labels, "weight": 1}

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 0:
            next(iter(self.trainer.train_dataloader))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train_changing() -> float:
    """Body: train on 3 batches on rank 0, and on 1 on rank 1; return the buffer."""
    module = Changes()
    batches: Any = [{"labels": torch.ones(())} for _ in range(3 - 2 * dist.get_rank())]
    strategy = GradAvgStrategy(reduction="weighted_mean", check_replicas_every_n_steps=None)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module.count.item()


def test_a_stand_in_leaves_no_trace_in_buffers_or_its_batch(world):
    assert [3.0, 1.0] == world(2).run(train_changing)


SAID = "ank 1 has no samples"  # at the start of a sentence, or within a line


def hear(runs_out: bool) -> list[str]:
    """Body: return what this rank is told of stand-ins, in two epochs of 3 samples in batches of 2."""
    batches = [[1.0], [2.0]][: 2 - dist.get_rank()] if runs_out else [[1.0, 2.0], [3.0]]
    strategy = GradAvgStrategy(**({"reduction": "weighted_mean"} if runs_out else {"split_batches": True}))
    with mock.patch.object(rank_zero_module.log, "info") as info:
        trainer = make_trainer(strategy, max_epochs=2, use_distributed_sampler=False)
        loader: Any = make_loader(batches)
        if not runs_out:
            loader = DataLoader(torch.arange(3, dtype=torch.float64), batch_size=2)
        trainer.fit(Toy(), loader)
    lines = [str(call.args[0]) for call in info.call_args_list]
    return [SAID + line.partition(SAID)[2].partition(":")[0] for line in lines if SAID in line]


@pytest.mark.parametrize(("runs_out", "when"), [(True, "in a step"), (False, "in the last batch of an epoch")])
def test_who_stands_in_is_said_once(world, runs_out, when):
    assert [[f"{SAID} {when}"], []] == world(2).run(hear, runs_out)


NINE: Any = range(9)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"batch_size": 4}, 1),
        ({"batch_size": 3}, 3),
        ({"batch_size": 4, "drop_last": True}, 4),
        ({"batch_sampler": BatchSampler(SequentialSampler(NINE), 4, drop_last=True)}, None),
        ({"batch_size": None}, None),
    ],
)
def test_the_size_of_the_last_batch_where_it_is_known(options, size):
    assert last_batch_size(DataLoader(NINE, **options)) == size
