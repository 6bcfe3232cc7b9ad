"""`equivalent_to=` on any number of ranks is DataParallel with R replicas, or one, on one process."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from data_parallel import MODELS, Run, assert_same_run, fit, parallel, train
from grids import grid
from torch import Tensor
from toys import Toy, approx, same_everywhere
from toys import train as train_toy

# Fewer replicas than ranks is what some of these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:num_replicas=. leaves . of . ranks without a replica")

# Of one step, and of 20: batch norm amplifies a rounding, in the reference as here.
TOLERANCES = {torch.float32: (1e-6, 2e-5), torch.float64: (1e-12, 1e-11)}


class Place(NamedTuple):
    num_replicas: int
    world_size: int


@cache
def reference(name: str, dtype: torch.dtype, num_replicas: int, accumulate: int) -> Run:
    model = MODELS[name](dtype)
    return train(model, model.loader(), num_replicas, accumulate)


WINDOWS = [1, 3]  # of 20 loader batches, so that the last window of 3 is a short one
SINGLE: dict[str, Any] = {"equivalent_to": "single_device", "num_replicas": None}
FLOAT32, SPLIT = {"dtype": torch.float32}, {"equivalent_to": None, "split_batches": True}
RUNS = [
    # The model, replicas on ranks, the window, and options.
    *grid(["cnn", "masked", "sparse"], [Place(4, 1), Place(4, 3), Place(4, 4), Place(3, 4)], WINDOWS, [{}]),
    # With the loss of all outputs, and where steps are taken by hand: one replica per rank.
    *grid(["rows", "numbers"], [Place(1, 1), Place(2, 2), Place(4, 4)], WINDOWS, [{}]),
    *(("byhand", Place(size, size), 1, {}) for size in (2, 3)),
    *((name, Place(4, 3), 1, FLOAT32) for name in ("cnn", "masked")),
    ("cnn", Place(4, 3), 1, SPLIT),
    ("cnn", Place(4, 2), 3, {"reproducible": True}),
    ("masked", Place(3, 1), 2, {"reproducible": True}),
    # One replica, of all ranks together.
    *grid(["masked", "sparse", "rows"], [Place(1, size) for size in (3, 4, 2, 1)], [1, 2], [SINGLE], strength=1),
    *(("terms", Place(1, size), 1, SINGLE) for size in (2, 4)),
]


@pytest.mark.parametrize(("name", "place", "accumulate", "options"), RUNS, ids=str)
def test_equals_data_parallel(world, name, place, accumulate, options):
    """20 loader batches give the gradients, weights, buffers and losses of DataParallel by hand; ranks are equal."""
    options = {"dtype": torch.float64, **options}
    dtype, windows = options.pop("dtype"), {"accumulate_grad_batches": accumulate} if accumulate > 1 else {}
    ranks = world(place.world_size).run(fit, MODELS[name], parallel(place.num_replicas) | options, dtype, **windows)
    assert place.world_size == len(ranks)
    assert_same_run(ranks, reference(name, dtype, place.num_replicas, accumulate), *TOLERANCES[dtype])


class Variance(Toy):
    """The loss is the variance of the predictions on the whole batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.w * batch

    def training_step_end(self, outputs: Tensor) -> Tensor:
        return outputs.var(correction=0)


@pytest.mark.parametrize(
    ("kind", "xs", "replicas", "sizes", "gradient"),
    [
        (Toy, 5, 2, (1, 2, 3), 55 / 5),
        (Toy, 1, 2, (1, 2, 3), 1.0),
        (Variance, 4, None, (1, 2, 4), 2.5),
        (Variance, 5, None, (2, 3), 4.0),
    ],
)
def test_gradient_by_hand(world, kind, xs, replicas, sizes, gradient):
    """Cases 26 and 27, of the batch 1, 2, ... xs."""
    batches, toy = [[float(x) for x in range(1, xs + 1)]], {"kind": "s", "lr": 0.0}
    for size in sizes:
        seen = world(size).run(train_toy, [batches] * size, toy, parallel(replicas), module=kind)
        assert [approx(gradient)] == [one.item() for one in same_everywhere(seen).gradients]
