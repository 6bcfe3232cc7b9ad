"""`equivalent_to="data_parallel"` on any number of ranks is DataParallel with R replicas on one process."""

from __future__ import annotations

import random
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from data_parallel import MODELS, Run, assert_same_run, fit, loader, train
from grids import grid
from lightning.pytorch import LightningModule, seed_everything
from ranks import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradavg import GradAvgStrategy

# Fewer replicas than ranks is what some of these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:num_replicas=. leaves . of . ranks without a replica")

# Of one step, and of 20: batch norm amplifies a rounding, in the reference as here.
TOLERANCES = {torch.float32: (1e-6, 5e-6), torch.float64: (1e-12, 1e-12)}
LEGACY = {"reduction": "mean_of_replica_losses"}


def approx(value, tolerance=1e-12):
    return pytest.approx(value, rel=tolerance, abs=tolerance)


class Place(NamedTuple):
    num_replicas: int
    world_size: int


class Config(NamedTuple):
    recompute: bool = False
    accumulate: int = 1


NAMES = ["cnn", "masked", "sparse", "contrastive", "nested"]
PLACES = [Place(4, 1), Place(4, 2), Place(4, 4), Place(3, 1), Place(3, 3), Place(3, 4)]
# Of 20 loader batches, so that the last window of 3 is a short one.
CONFIGS = [Config(recompute, accumulate) for recompute in (False, True) for accumulate in (1, 2, 3)]


def fit_as(name: str, dtype: torch.dtype, num_replicas: int, config: Config, **strategy: Any) -> Any:
    """Body: 20 optimizer steps."""
    model, accumulate = MODELS[name](dtype), config.accumulate
    ours = GradAvgStrategy(
        equivalent_to="data_parallel", num_replicas=num_replicas, recompute_replicas=config.recompute, **strategy
    )
    run = fit(model, ours, loader(model), max_epochs=accumulate, accumulate_grad_batches=accumulate)
    return dist.get_rank(), run


@cache
def reference(name: str, dtype: torch.dtype, num_replicas: int, accumulate: int, mean_of_replicas: bool) -> Run:
    model = MODELS[name](dtype)
    options: Any = {"accumulate": accumulate, "epochs": accumulate, "mean_of_replicas": mean_of_replicas}
    return train(model, loader(model), num_replicas, **options)


def compare(world: Any, place: Place, name: str, dtype: torch.dtype, config: Config, **strategy: Any) -> None:
    ranks = world(place.world_size).run(fit_as, name, dtype, place.num_replicas, config, **strategy)
    assert list(range(place.world_size)) == [rank for rank, _ in ranks]
    legacy = strategy == LEGACY
    expected = reference(name, dtype, place.num_replicas, config.accumulate, legacy)
    # What is logged is a mean over samples whatever the reduction is.
    assert_same_run([run for _, run in ranks], expected, *TOLERANCES[dtype], losses=not legacy)


@pytest.mark.parametrize(("name", "place", "config"), grid(NAMES, PLACES, CONFIGS), ids=str)
def test_equals_data_parallel_in_float64(world, name, place, config):
    """20 steps on batches of 16, 15, 5 and 1 show the gradients, losses, buffers and weights of R replicas.

    So they do with replicas kept or computed again, and with windows of one loader batch or more.
    """
    compare(world, place, name, torch.float64, config)


@pytest.mark.parametrize(("name", "place"), grid(NAMES, PLACES, strength=1), ids=str)
def test_equals_data_parallel_in_float32(world, name, place):
    """The same within the rounding of float32."""
    compare(world, place, name, torch.float32, Config())


@pytest.mark.parametrize(("place", "config"), grid(PLACES, [Config(False, 1), Config(True, 2)], strength=1), ids=str)
def test_mean_of_replica_losses_is_the_default_of_lightning_1(world, place, config):
    """With `reduction="mean_of_replica_losses"` every replica of a loader batch has the same say, however small."""
    compare(world, place, "cnn", torch.float64, config, **LEGACY)


class Line(LightningModule):
    """Prediction w * x from w = 1; the loss of a replica is half the mean square of its predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.gradients: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 0.5 * (self.w * batch[0]).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.w.grad is not None
        self.gradients.append(self.w.grad.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Variance(Line):
    """The loss is the population variance of the predictions of the whole batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.w * batch[0]

    def training_step_end(self, outputs: Tensor) -> Tensor:
        return outputs.var(correction=0)


LINES: dict[str, type[Line]] = {"line": Line, "variance": Variance}


def line_gradient(name: str, xs: int, **strategy: Any) -> list[float]:
    """Body: one step on the batch 1, 2, ... xs."""
    model = LINES[name]()
    trainer = make_trainer(GradAvgStrategy(equivalent_to="data_parallel", **strategy), max_epochs=1)
    trainer.fit(model, DataLoader(TensorDataset(torch.arange(1, xs + 1, dtype=torch.float64)), batch_size=xs))
    return model.gradients


@pytest.mark.parametrize("num_replicas", [None, 2, 3, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_loss_over_the_outputs_of_all(world, world_size, num_replicas):
    """Case 26: the variance of 1..4 has gradient 2.5 and that of 1..5 has 4.0, for any ranks and replicas."""
    for xs, gradient in ((4, 2.5), (5, 4.0)):
        ranks = world(world_size).run(line_gradient, "variance", xs, num_replicas=num_replicas)
        assert [[approx(gradient)]] * world_size == ranks


@pytest.mark.parametrize(
    ("xs", "reduction", "gradient"),
    [
        (5, "mean", 11.0),
        (5, "weighted_mean", 11.0),
        (5, "mean_of_replica_losses", (14 / 3 + 41 / 2) / 2),
        (1, "mean", 1.0),
        (1, "mean_of_replica_losses", 1.0),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_replicas_of_unequal_size(world, world_size, xs, reduction, gradient):
    """Case 27: 1..5 on 2 replicas has gradient 11, and 12.5833 as Lightning 1.x's mean of means; 1 alone has 1."""
    ranks = world(world_size).run(line_gradient, "line", xs, num_replicas=2, reduction=reduction)
    assert [[approx(gradient)]] * world_size == ranks


class Normed(Line):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.w * self.norm(batch[0]).square().sum()


def norm_statistics(num_replicas: int) -> tuple[float, float, int]:
    """Body: one step on the batch 0, 2, 4, 6."""
    model = Normed()
    strategy = GradAvgStrategy(equivalent_to="data_parallel", num_replicas=num_replicas)
    data = TensorDataset(torch.tensor([[0.0], [2.0], [4.0], [6.0]], dtype=torch.float64))
    make_trainer(strategy, max_epochs=1).fit(model, DataLoader(data, batch_size=4))
    kept: Any = model.norm
    return kept.running_mean.item(), kept.running_var.item(), kept.num_batches_tracked.item()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("num_replicas", "mean", "variance"), [(1, 0.3, 1.5666667), (2, 0.1, 1.1)])
def test_batch_norm_is_that_of_replica_0(world, world_size, num_replicas, mean, variance):
    """Case 42: two replicas keep the statistics of 0 and 2 on every rank, as the first of two ranks did; one of all."""
    ranks = world(world_size).run(norm_statistics, num_replicas)
    assert [(approx(mean), approx(variance, 1e-7), 1)] * world_size == ranks


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_batch_norm_of_one_value(world, world_size):
    """Case 42: a replica of one sample, which batch norm refuses, is the same error on all ranks, and no hang."""
    raised = world(world_size).run_expecting_errors(norm_statistics, 4)
    assert ["ValueError"] * world_size == [one.type_name for one in raised]
    assert all("in 4 replicas gives one of them a single sample" in one.message for one in raised)


ROWS_A = [[0.5, -0.2], [1.0, 0.6], [-0.75, 0.3], [0.25, -0.9]]
ROWS_B = [[0.4, 0.1], [0.9, 0.5], [-1.0, -0.4], [-0.3, -0.7]]


class InfoNCE(LightningModule):
    """Both towers multiply by the transpose of M; the logits of the whole batch have the temperature 0.5."""

    def __init__(self) -> None:
        super().__init__()
        self.M = nn.Parameter(torch.tensor([[1.0, 0.2], [-0.3, 0.8]], dtype=torch.float64))
        self.losses: list[float] = []
        self.gradients: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        a, b = batch
        return a @ self.M.T, b @ self.M.T

    def training_step_end(self, outputs: Any) -> Tensor:
        a, b = outputs
        loss = nn.functional.cross_entropy(a @ b.T / 0.5, torch.arange(len(a)))
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.M.grad is not None
        self.gradients.append(self.M.grad.clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def contrast(num_replicas: int, recompute: bool, accumulate: int) -> Any:
    """Body: one step on the same batch, as often as the window is long."""
    model = InfoNCE()
    strategy = GradAvgStrategy(equivalent_to="data_parallel", num_replicas=num_replicas, recompute_replicas=recompute)
    rows = (torch.tensor(ROWS_A, dtype=torch.float64), torch.tensor(ROWS_B, dtype=torch.float64))
    data = TensorDataset(*(torch.cat([one] * accumulate) for one in rows))
    trainer = make_trainer(strategy, max_epochs=1, accumulate_grad_batches=accumulate)
    trainer.fit(model, DataLoader(data, batch_size=4))
    return model.losses, model.gradients


def check_contrast(ranks: Any, accumulate: int) -> None:
    gradient = torch.tensor([[-0.34945875, -0.21453436], [0.00286419, -0.34827028]], dtype=torch.float64)
    for losses, gradients in ranks:
        assert [approx(0.6918260226, 1e-9)] * accumulate == losses
        assert len(gradients) == 1
        torch.testing.assert_close(gradients[0], gradient, rtol=0, atol=1e-8)


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_contrastive_loss_of_the_whole_batch(world, world_size, num_replicas):
    """Case 43: in training_step_end the loss is 0.6918260226, and the gradient of M is as computed by hand."""
    check_contrast(world(world_size).run(contrast, num_replicas, False, 1), 1)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_features_computed_again(world, world_size, accumulate):
    """Case 44: replicas that are computed again one by one have parts of the gradient that add up to the full one."""
    for num_replicas in (2, 4):
        check_contrast(world(world_size).run(contrast, num_replicas, True, accumulate), accumulate)


class Noisy(LightningModule):
    """Dropout, and noise from every generator that a training step may draw from."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)).double()
        self.drawn: dict[int, list[float]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x,) = batch
        noise = torch.randn(x.shape, dtype=x.dtype)
        numbers = [noise[0, 0].item(), random.random(), float(np.random.rand())]  # noqa: NPY002  # what users draw from
        strategy: Any = self.trainer.strategy
        if not strategy._batches.chunk.stand_in:
            self.drawn.setdefault(int(x[0, 0]), numbers)
        return (self.network(x + 0.1 * noise).square().mean(dim=1) * (1 + sum(numbers[1:]))).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001, momentum=0.9)


def fit_noisy(seed: int, recompute: bool) -> Any:
    """Body: 8 steps on batches of 16 and one of 5, whose samples are numbered in their first column."""
    seed_everything(seed, verbose=False)
    model = Noisy()
    strategy = GradAvgStrategy(equivalent_to="data_parallel", num_replicas=4, recompute_replicas=recompute)
    x = torch.arange(3 * 37, dtype=torch.float64).reshape(37, 3) / torch.tensor([3.0, 40.0, 50.0])
    trainer = make_trainer(strategy, max_epochs=3)
    trainer.fit(model, DataLoader(TensorDataset(x), batch_size=16))
    return model.drawn, model.state_dict(), trainer.global_step


def merged(ranks: Any) -> dict[int, list[float]]:
    return {first: numbers for drawn, _, _ in ranks for first, numbers in drawn.items()}


def test_random_numbers_of_replicas(world):
    """Case 41: noise and dropout are those of the replica, and not of the rank that computes it, and repeat exactly."""
    expected = world(1).run(fit_noisy, 7, False)
    firsts = [start + offset for start in (0, 16) for offset in (0, 4, 8, 12)] + [32, 34, 36]
    drawn = merged(expected)
    assert set(firsts) == set(drawn)
    for generator in range(3):
        assert len(firsts) == len({numbers[generator] for numbers in drawn.values()})
    for world_size, recompute in ((1, False), (1, True), (2, False), (2, True), (3, False), (4, False)):
        ranks = world(world_size).run(fit_noisy, 7, recompute)
        assert drawn == merged(ranks)
        for _, weights, steps in ranks:
            assert steps == 9
            torch.testing.assert_close(weights, expected[0][1], rtol=1e-12, atol=1e-12)
    other = merged(world(2).run(fit_noisy, 8, False))
    assert all(drawn[first][0] != other[first][0] for first in firsts)
