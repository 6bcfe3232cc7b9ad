"""Losses that read other ranks' rows, under weights that differ by rank: the gradient by hand, in every engine.

A loss has gradients on other ranks there, which must carry the weight of the loss, and not that of the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from ranks import NEEDS_SHARDS_ON_CPU, make_trainer
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import batch_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from toys import IGNORE_DEPRECATED_GATHER, IGNORE_UNUSED_PARAMETERS, Toy, approx

from lightning_gradavg import GradAvgModelParallelStrategy, GradAvgStrategy, gather, global_mean

pytestmark = [*IGNORE_UNUSED_PARAMETERS, IGNORE_DEPRECATED_GATHER]

X = ((1.0, 2.0, 3.0), (5.0, 7.0, 11.0))
"""The sample of each micro-batch of both ranks."""
WEIGHTS = ((3.0, 1.0, 2.0), (1.0, 2.0, 4.0))
"""The weight of each."""
TOTALS = (6.0, 9.0, 14.0)
"""The sum of both samples of each micro-batch."""


class Crossing(NamedTuple):
    """A loss, of this rank's row: each rank multiplies it by its rank + 1."""

    loss: Callable[[Tensor], Tensor]
    # The gradient of each micro-batch, by hand, before ranks multiply it.
    gradients: Callable[[int, int], float]
    reduction: str = "weighted_mean"


CROSSINGS = {
    "plain": Crossing(lambda row: row.sum(), lambda rank, index: X[rank][index]),
    "gather": Crossing(lambda row: gather(row).sum(), lambda rank, index: TOTALS[index]),
    "torch's gather": Crossing(lambda row: torch.stack(all_gather(row)).sum(), lambda rank, index: TOTALS[index]),
    "global_mean": Crossing(lambda row: global_mean(row.sum(), 1), lambda rank, index: TOTALS[index] / 2, "mean"),
}


def expected_of(name: str, window: range) -> float:
    """Return the gradient of a window: sum(n * c * g) / sum(n), with c = rank + 1; without n under the plain mean."""
    total = 0.0
    normalizer = 0.0
    for rank in range(2):
        for index in window:
            weight = WEIGHTS[rank][index]
            multiplier = weight * (rank + 1)
            if CROSSINGS[name].reduction == "mean":
                weight = 1.0
                multiplier = 1.0
            total += multiplier * CROSSINGS[name].gradients(rank, index)
            normalizer += weight
    return total / normalizer


class Crossed(LightningModule):
    """Two weights, whose sum multiplies the sample of a rank; so a sharded model has one on each."""

    def __init__(self, loss: Callable[[Tensor], Tensor], *, shards: bool = False, weighs: bool = True) -> None:
        super().__init__()
        self.net = nn.Linear(1, 2, bias=False).double()
        nn.init.ones_(self.net.weight)
        self.loss = loss
        self.shards = shards
        self.weighs = weighs
        self.gradients: list[float] = []

    def configure_model(self) -> None:
        if self.shards:
            from torch.distributed._composable.fsdp import fully_shard  # noqa: PLC0415  # slow

            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(self.net(batch.reshape(1, 1)).sum(1))
        if not self.weighs:
            return loss
        rank = dist.get_rank()
        return {"loss": (rank + 1) * loss, "weight": WEIGHTS[rank][batch_idx]}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient: Any = self.net.weight.grad
        if self.shards:
            gradient = gradient.full_tensor()
        first, second = gradient.flatten().tolist()
        assert first == second
        self.gradients.append(first)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train_crossed(name: str, engine: str, window: int) -> list[float]:
    """Body: return the gradient of each window."""
    loss, _, reduction = CROSSINGS[name]
    batches: Any = [torch.tensor(number, dtype=torch.float64) for number in X[dist.get_rank()]]
    loader = DataLoader(batches, batch_size=None)
    strategy: Any = GradAvgStrategy(reduction=reduction)
    if engine == "FSDP2":
        strategy = GradAvgModelParallelStrategy(reduction=reduction, data_parallel_size=2, tensor_parallel_size=1)
    if engine == "tree":
        strategy = GradAvgStrategy(reduction=reduction, reproducible=True, num_replicas=2)
        both: Any = torch.tensor(X, dtype=torch.float64).T.flatten()
        loader = DataLoader(both, batch_size=2)
    # Under the tree "mean" weighs by samples, of which each rank has one.
    module = Crossed(loss, shards=engine == "FSDP2", weighs=reduction != "mean")
    options: Any = {"use_distributed_sampler": False, "accumulate_grad_batches": window}
    make_trainer(strategy, max_epochs=1, **options).fit(module, loader)
    return module.gradients


@NEEDS_SHARDS_ON_CPU
@pytest.mark.parametrize(("name", "engine", "window"), [*product(CROSSINGS, ["DDP", "FSDP2", "tree"], [1, 3])])
def test_losses_of_all_ranks_rows_by_hand(world, name, engine, window):
    windows = [range(start, start + window) for start in range(0, 3, window)]
    expected = [approx(expected_of(name, micro_batches)) for micro_batches in windows]
    assert [expected] * 2 == world(2).run(train_crossed, name, engine, window)


class OfOneDevice(Crossed):
    """Batch norm over both ranks' samples. The loss of each has a weight of its own."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        row = self.net(batch.reshape(-1, 1)).sum(1)
        normed = nn.functional.batch_norm((row + row.square())[:, None], None, None, training=True)[:, 0]
        rank = dist.get_rank()
        return {"loss": (rank + 1) * (normed * row).sum(), "weight": WEIGHTS[rank][batch_idx]}


class Compiled(OfOneDevice):
    """Has its rows normalized by compiled code."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__(loss)
        self.norm = nn.BatchNorm1d(1, affine=False, track_running_stats=False)
        self.normalize = torch.compile(lambda row: self.norm((row + row.square())[:, None])[:, 0], backend="aot_eager")

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        row = self.net(batch.reshape(-1, 1)).sum(1)
        rank = dist.get_rank()
        return {"loss": (rank + 1) * (self.normalize(row) * row).sum(), "weight": WEIGHTS[rank][batch_idx]}


class RunsAlone(Callback):
    """Normalizes a batch of its own on rank 0, in training mode, around and between steps."""

    def __init__(self) -> None:
        for hook in ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_train_batch_end"):
            setattr(self, hook, self.run)

    def run(self, *_: Any) -> None:
        if dist.get_rank() == 0:
            rows = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
            normed = nn.functional.batch_norm(rows, None, None, training=True)
            assert approx([-1.0, 1.0], 1e-5) == normed.flatten().tolist()


def train_normed(window: int, compiled: bool) -> list[float]:
    """Body: return the gradient of each window."""
    both: Any = torch.tensor(X, dtype=torch.float64).T.flatten()
    module = Compiled(torch.sum) if compiled else OfOneDevice(torch.sum)
    strategy = GradAvgStrategy(equivalent_to="single_device")
    options: Any = {"accumulate_grad_batches": window, "callbacks": [RunsAlone()]}
    make_trainer(strategy, max_epochs=1, **options).fit(module, DataLoader(both, batch_size=2))
    return module.gradients


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile reads it
@pytest.mark.parametrize(("window", "compiled"), [(1, False), (3, False), (1, True)])
def test_batch_norm_over_all_ranks_is_that_of_one_process(world, window, compiled):
    """The loss is sum(n * c * normed * row) / sum(n), over all rows. Elsewhere, rank 0 normalizes alone."""
    expected = []
    for start in range(0, 3, window):
        w = torch.ones((), dtype=torch.float64, requires_grad=True)
        total: Any = 0.0
        normalizer = 0.0
        for index in range(start, start + window):
            rows = 2 * w * torch.tensor([X[0][index], X[1][index]], dtype=torch.float64)
            normed = batch_norm((rows + rows.square())[:, None], None, None, training=True)[:, 0]
            weights = torch.tensor([WEIGHTS[0][index], 2 * WEIGHTS[1][index]], dtype=torch.float64)
            total = total + (weights * normed * rows).sum()
            normalizer += WEIGHTS[0][index] + WEIGHTS[1][index]
        (total / normalizer).backward()
        assert w.grad is not None
        expected.append(approx(w.grad.item() / 2))  # of one of the two weights
    assert [expected] * 2 == world(2).run(train_normed, window, compiled)


class NormalizesWhatItMoves(Toy):
    """Has rank 0 normalize alone in a hook that moves a piece, which is no part of a step."""

    moved = 0

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        RunsAlone().run()
        self.moved += 1
        return batch


def move_pieces() -> int:
    """Body: train on a batch of four samples, in pieces of one; return how many pieces were moved."""
    module = NormalizesWhatItMoves()
    strategy = GradAvgStrategy(equivalent_to="single_device", max_device_batch_size=1)
    make_trainer(strategy, max_epochs=1).fit(module, DataLoader(torch.ones(4, dtype=torch.float64), batch_size=4))
    return module.moved


def test_a_hook_that_moves_a_piece_normalizes_by_itself(world):
    assert [2, 2] == world(2).run(move_pieces)


ROWS = ((2.0, 3.0), (5.0, 7.0), (11.0, 13.0))
"""The sample of both micro-batches of each of three ranks, in every window."""
COUNTS = ((3.0, 1.0), (1.0, 2.0), (2.0, 4.0))
"""The weight of each."""
UNCOUNTED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "finite": lambda loss, row: {"loss": loss, "weight": 0},
    "with an infinite derivative": lambda loss, row: {"loss": loss + (row * 0).sqrt().sum(), "weight": 0},
    "NaN": lambda loss, row: {"loss": loss + (row * 0).sum() / 0, "weight": 0},
    "None": lambda loss, row: None,
    "without a graph": lambda loss, row: {"loss": torch.zeros((), dtype=torch.float64), "weight": 0},
}
"""What the last rank returns for a micro-batch that does not count; its loss also reads the row beside the exchange."""
CELLS = list(product(UNCOUNTED, [0, 1]))
"""One window each: what the last rank returns, and for which of the two micro-batches."""
EXCHANGES: dict[str, Crossing] = {
    "none": Crossing(lambda row: row.sum(), lambda rank, index: ROWS[rank][index]),
    "gather": Crossing(lambda row: gather(row).sum(), lambda rank, index: total_of(index)),
    "global_mean": Crossing(lambda row: global_mean(row.sum(), 1), lambda rank, index: ROWS[rank][index]),
    "gather, checkpointed": Crossing(
        lambda row: checkpoint(lambda x: gather(x).sum(), row, use_reentrant=False), lambda rank, index: total_of(index)
    ),
    # The row is twice the sample, as two weights of 1 multiply it: the gradient of its square is 2 * 2x * x.
    "gather, computed again": Crossing(
        lambda row: checkpoint(lambda x: gather(x).square().sum(), row, use_reentrant=False),
        lambda rank, index: 4 * sum(samples[index] ** 2 for samples in ROWS[: dist.get_world_size()]),
    ),
}


def total_of(index: int) -> float:
    """Return the sum of all ranks' samples of a micro-batch."""
    return sum(samples[index] for samples in ROWS[: dist.get_world_size()])


def counted(ranks: int, position: int) -> list[tuple[int, int]]:
    """Return rank and micro-batch of all that count, where one of the last rank does not."""
    return [pair for pair in product(range(ranks), [0, 1]) if pair != (ranks - 1, position)]


class Uncounted(Crossed):
    """Trains on a window for each of CELLS."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        row = self.net(batch.reshape(1, 1)).sum(1)
        rank = dist.get_rank()
        loss = (rank + 1) * self.loss(row)
        kind, position = CELLS[batch_idx // 2]
        if (rank, batch_idx % 2) == (dist.get_world_size() - 1, position):
            return UNCOUNTED[kind](loss, row)
        return {"loss": loss, "weight": COUNTS[rank][batch_idx % 2]}


def train_uncounted(name: str, engine: str) -> tuple[list[float], list[float]]:
    """Body: return the gradient of each window, and the one by hand: sum(n * c * g) / sum(n), with c = rank + 1."""
    ranks = dist.get_world_size()
    batches: Any = [torch.tensor(number, dtype=torch.float64) for number in ROWS[dist.get_rank()] * len(CELLS)]
    loader = DataLoader(batches, batch_size=None)
    strategy: Any = GradAvgStrategy(reduction="weighted_mean")
    if engine == "FSDP2":
        strategy = GradAvgModelParallelStrategy(
            reduction="weighted_mean", data_parallel_size=ranks, tensor_parallel_size=1
        )
    if engine == "DDP, unused parameters":
        strategy = GradAvgStrategy(reduction="weighted_mean", find_unused_parameters=True)
    if engine == "tree":
        strategy = GradAvgStrategy(reduction="weighted_mean", reproducible=True, num_replicas=ranks)
        of_all: Any = torch.tensor(ROWS[:ranks], dtype=torch.float64).T.repeat(len(CELLS), 1).flatten()
        loader = DataLoader(of_all, batch_size=ranks)
    crossing = EXCHANGES[name]
    module = Uncounted(crossing.loss, shards=engine == "FSDP2")
    options: Any = {"use_distributed_sampler": False, "accumulate_grad_batches": 2}
    make_trainer(strategy, max_epochs=1, **options).fit(module, loader)
    expected = []
    for _, position in CELLS:
        pairs = counted(ranks, position)
        total = sum(COUNTS[rank][index] * (rank + 1) * crossing.gradients(rank, index) for rank, index in pairs)
        expected.append(total / sum(COUNTS[rank][index] for rank, index in pairs))
    return module.gradients, expected


@NEEDS_SHARDS_ON_CPU
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *product(EXCHANGES, ["DDP"]),
        *product(["gather"], ["DDP, unused parameters", "FSDP2", "tree"]),
        ("none", "FSDP2"),
    ],
)
def test_a_loss_that_does_not_count_is_zeros_for_all_that_was_exchanged(world, name, engine, ranks):
    for found, expected in world(ranks).run(train_uncounted, name, engine):
        assert [approx(gradient) for gradient in expected] == found


class UncountedOfOneDevice(Crossed):
    """Batch norm over all ranks' samples, in a window for each of CELLS."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        row = self.net(batch.reshape(-1, 1)).sum(1)
        normed = nn.functional.batch_norm((row + row.square())[:, None], None, None, training=True)[:, 0]
        rank = dist.get_rank()
        loss = (rank + 1) * (normed * row).sum()
        kind, position = CELLS[batch_idx // 2]
        if (rank, batch_idx % 2) == (dist.get_world_size() - 1, position):
            return UNCOUNTED[kind](loss, row)
        return {"loss": loss, "weight": COUNTS[rank][batch_idx % 2]}


def train_uncounted_normed() -> list[float]:
    """Body: return the gradient of each window."""
    of_all: Any = torch.tensor(ROWS[: dist.get_world_size()], dtype=torch.float64).T.repeat(len(CELLS), 1).flatten()
    module = UncountedOfOneDevice(torch.sum)
    trainer = make_trainer(GradAvgStrategy(equivalent_to="single_device"), max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, DataLoader(of_all, batch_size=dist.get_world_size()))
    return module.gradients


@pytest.mark.parametrize("ranks", [2, 3])
def test_batch_norm_over_all_ranks_sees_rows_whose_loss_does_not_count(world, ranks):
    expected = []
    for _, position in CELLS:
        w = torch.ones((), dtype=torch.float64, requires_grad=True)
        total: Any = 0.0
        normalizer = 0.0
        for index in (0, 1):
            rows = 2 * w * torch.tensor([samples[index] for samples in ROWS[:ranks]], dtype=torch.float64)
            normed = batch_norm((rows + rows.square())[:, None], None, None, training=True)[:, 0]
            for rank, _ in [pair for pair in counted(ranks, position) if pair[1] == index]:
                total = total + COUNTS[rank][index] * (rank + 1) * normed[rank] * rows[rank]
                normalizer += COUNTS[rank][index]
        (total / normalizer).backward()
        assert w.grad is not None
        expected.append(approx(w.grad.item() / 2))  # of one of the two weights
    assert [expected] * ranks == world(ranks).run(train_uncounted_normed)


class Beside(LightningModule):
    """Two layers, each in its own bucket. The first is gathered; the second runs between that layer and gather."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = nn.Linear(1, 1, bias=False)
        self.beside = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.gathered.weight)
        nn.init.ones_(self.beside.weight)
        self.gradients: list[tuple[float, float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        row = self.gathered(batch)
        beside = self.beside(batch)
        loss = gather(row).sum() + beside.sum()
        return None if (dist.get_rank(), batch_idx) == (1, 2) else {"loss": loss, "weight": 1}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [layer.weight.grad for layer in (self.gathered, self.beside)]
        self.gradients.append(tuple(gradient.item() for gradient in gradients))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train_beside() -> list[tuple[float, float]]:
    """Body: return the gradients of both layers in each step."""
    module = Beside()
    strategy = GradAvgStrategy(reduction="weighted_mean", bucket_cap_mb=1e-6)
    batches: Any = torch.full((3, 1, 1), 2.0 + dist.get_rank())
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module.gradients


def test_a_layer_beside_gather_is_reduced_in_its_own_group(world):
    """Rank 1 has no loss in the third step, and its zeros for `beside` before the backward of gather.

    On rank 0 they are in the other order: of one process group, each rank would wait in another operation.
    """
    assert [[(5.0, 2.5), (5.0, 2.5), (5.0, 2.0)]] * 2 == world(2).run(train_beside)


RECOMPUTED: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    # (1 + 3) / 2, and then 4 of the one rank that has samples.
    "global_mean": (lambda row: global_mean(row.sum(), len(row)), [2.0, 4.0]),
    # 2 * (1 + 9), in the loss of each rank, and then 2 * 16: rank 1 brings no row.
    "gather": (lambda row: gather(row).square().sum(), [20.0, 32.0]),
}
"""What a checkpoint computes of a row, and the gradients of two steps. Rank 1 stands in for its second batch."""


class Recomputed(Crossed):
    """Computes its loss within a checkpoint."""

    def __init__(self, loss: Callable[[Tensor], Tensor], *, use_reentrant: bool, loses: bool = False) -> None:
        super().__init__(loss)
        self.use_reentrant = use_reentrant
        self.loses = loses

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        row = self.net(batch.reshape(1, 1)).sum(1) / 2
        loss = checkpoint(self.loss, row, use_reentrant=self.use_reentrant)
        return None if self.loses else loss


def train_recomputed(name: str, use_reentrant: bool, loses: bool = False) -> list[float]:
    """Body: return the gradient of each step."""
    loss, _ = RECOMPUTED[name]
    module = Recomputed(loss, use_reentrant=use_reentrant, loses=loses)
    batches: Any = [torch.tensor([number], dtype=torch.float64) for number in ([1.0, 4.0], [3.0])[dist.get_rank()]]
    strategy = GradAvgStrategy(reduction="mean" if name == "global_mean" else "weighted_mean")
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return [2 * gradient for gradient in module.gradients]


@pytest.mark.parametrize(("name", "use_reentrant"), [*product(RECOMPUTED, [False, True])])
def test_what_is_computed_again_knows_that_a_rank_stands_in(world, name, use_reentrant):
    """The backward, and with it the checkpoint, runs on threads of autograd and after `training_step`."""
    _, expected = RECOMPUTED[name]
    assert [expected] * 2 == world(2).run(train_recomputed, name, use_reentrant)


def test_a_missing_loss_behind_a_reentrant_checkpoint_is_an_error(world):
    for raised in world(2).run_expecting_errors(train_recomputed, "gather", True, True):
        assert "returned no loss, or one without a graph, after gather within a reentrant checkpoint," in raised.message


class LosesBehindTorch(Crossed):
    """Gathers by an exchange of torch's whose backward a loss of 0 cannot reach, and has no loss."""

    def __init__(self, how: str) -> None:
        super().__init__(torch.sum)
        self.how = how

    def on_train_start(self) -> None:
        if self.how == "SyncBatchNorm":
            # Not before, as DDP refuses it on CPUs. It is not run.
            self.norm = nn.SyncBatchNorm(1, affine=False, track_running_stats=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        row = self.net(batch.reshape(1, 1))
        if self.how == "self.all_gather":
            self.all_gather(row, sync_grads=True)
        if self.how == "self.all_gather of a target":
            self.all_gather(batch, sync_grads=True)
            return None if dist.get_rank() == 1 else row.sum()
        if self.how == "self.all_gather under no_grad":
            with torch.no_grad():
                self.all_gather(row, sync_grads=True)
            return None if dist.get_rank() == 1 else row.sum()
        return {"loss": torch.zeros(()), "weight": 0} if batch_idx % 2 else None


def lose(how: str) -> list[float]:
    """Body: return the gradient of each step."""
    module = LosesBehindTorch(how)
    batches: Any = [torch.tensor([3.0], dtype=torch.float64)] * 2
    trainer = make_trainer(GradAvgStrategy(reduction="weighted_mean"), max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module.gradients


@pytest.mark.parametrize("how", ["self.all_gather", "SyncBatchNorm"])
def test_a_missing_loss_behind_an_exchange_of_torch_is_an_error(world, how):
    """The other ranks would wait for its backward until the timeout."""
    for raised in world(2).run_expecting_errors(lose, how):
        assert f"returned no loss, or one without a graph, after {how}" in raised.message


@pytest.mark.parametrize("how", ["self.all_gather of a target", "self.all_gather under no_grad"])
def test_a_missing_loss_behind_an_exchange_without_backward_does_not_count(world, how):
    assert [[3.0, 3.0]] * 2 == world(2).run(lose, how)
