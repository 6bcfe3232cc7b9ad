"""`equivalent_to=` on any number of ranks is DataParallel with R replicas, or one, on one process."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from data_parallel import MODELS, Run, assert_same_run, fit, loader, train
from grids import grid
from ranks import make_trainer
from replicas import Options
from torch.utils.data import DataLoader
from toys import Toy, approx

from lightning_gradavg import GradAvgStrategy

# Fewer replicas than ranks is what some of these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:num_replicas=. leaves . of . ranks without a replica")

# Of one step, and of 20: batch norm amplifies a rounding, in the reference as here.
TOLERANCES = {torch.float32: (1e-6, 2e-5), torch.float64: (1e-12, 1e-11)}


class Place(NamedTuple):
    num_replicas: int
    world_size: int


OWN_LOSSES, OF_ALL = ["cnn", "masked", "sparse"], ["rows", "numbers"]
PLACES = [Place(4, 1), Place(4, 2), Place(4, 3), Place(4, 4), Place(3, 4)]
WINDOWS = [1, 2, 3]  # of 20 loader batches, so that the last window of 3 is a short one


def fit_as(name: str, dtype: torch.dtype, accumulate: int, strategy: Options) -> Any:
    """Body: 20 optimizer steps."""
    given = GradAvgStrategy(**strategy)
    run = fit(MODELS[name](dtype), given, max_epochs=accumulate, accumulate_grad_batches=accumulate)
    return dist.get_rank(), run


@cache
def reference(name: str, dtype: torch.dtype, num_replicas: int, accumulate: int) -> Run:
    model = MODELS[name](dtype)
    return train(model, loader(model), num_replicas, accumulate=accumulate, epochs=accumulate)


def compare(
    world: Any, place: Place, name: str, accumulate: int, dtype: torch.dtype = torch.float64, **options: Any
) -> None:
    strategy = {"equivalent_to": "data_parallel", "num_replicas": place.num_replicas, **options}
    ranks = world(place.world_size).run(fit_as, name, dtype, accumulate, strategy)
    assert list(range(place.world_size)) == [rank for rank, _ in ranks]
    expected = reference(name, dtype, place.num_replicas, accumulate)
    assert_same_run([run for _, run in ranks], expected, *TOLERANCES[dtype])


@pytest.mark.parametrize(("name", "place", "accumulate"), grid(OWN_LOSSES, PLACES, WINDOWS), ids=str)
def test_equals_data_parallel_in_float64(world, name, place, accumulate):
    compare(world, place, name, accumulate)


@pytest.mark.parametrize(("name", "size", "accumulate"), grid(OF_ALL, [1, 2, 4], WINDOWS), ids=str)
def test_the_loss_of_all_outputs_equals_data_parallel(world, name, size, accumulate):
    compare(world, Place(size, size), name, accumulate)


@pytest.mark.parametrize("name", OWN_LOSSES)
def test_equals_data_parallel_in_float32(world, name):
    compare(world, Place(4, 3), name, 1, torch.float32)


@pytest.mark.parametrize("place", [Place(4, 2), Place(3, 1)], ids=str)
@pytest.mark.parametrize(("name", "accumulate"), [("cnn", 3), ("masked", 2)])
def test_a_reproducible_run_is_that_of_data_parallel(world, name, place, accumulate):
    compare(world, place, name, accumulate, reproducible=True)


ONE_DEVICE = ["plain cnn", "masked", "sparse", "rows", "normed rows"]


@pytest.mark.parametrize(
    ("name", "world_size", "accumulate"), grid(ONE_DEVICE, [3, 4, 2, 1], [1, 2], strength=1), ids=str
)
def test_equals_one_device(world, name, world_size, accumulate):
    compare(world, Place(1, world_size), name, accumulate, equivalent_to="single_device", num_replicas=None)


def gradients(xs: int, **strategy: Any) -> list[float]:
    """Body: those of Toy-S on the batch 1, 2, ... xs."""
    model, batch = Toy(kind="s", lr=0.0), torch.arange(1, xs + 1, dtype=torch.float64)
    trainer = make_trainer(GradAvgStrategy(equivalent_to="data_parallel", **strategy), max_epochs=1)
    trainer.fit(model, DataLoader(batch, batch_size=xs))  # type: ignore[arg-type]  # a tensor is a dataset
    return [gradient.item() for gradient in model.seen.gradients]


@pytest.mark.parametrize(("xs", "gradient"), [(5, 11.0), (1, 1.0)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_replicas_of_unequal_size(world, world_size, xs, gradient):
    ranks = world(world_size).run(gradients, xs, num_replicas=2)
    assert [[approx(gradient)]] * world_size == ranks
