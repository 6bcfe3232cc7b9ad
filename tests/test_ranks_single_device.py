"""`equivalent_to="single_device"` on any number of ranks is plain training on one; the digits, under both presets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel import MODELS, Numbers, Run, assert_same_run, fit, loader, train
from grids import grid
from ranks import make_trainer
from replicas import Regression, single
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradavg import GradAvgStrategy


def fit_all(name: str, dtype: torch.dtype, windows: Sequence[int]) -> Any:
    """Body: 20 optimizer steps in windows of so many loader batches."""
    runs = []
    for accumulate in windows:
        model = MODELS[name](dtype)
        strategy = GradAvgStrategy(equivalent_to="single_device")
        runs.append(fit(model, strategy, max_epochs=accumulate, accumulate_grad_batches=accumulate))
    return dist.get_rank(), runs


@cache
def reference(name: str, dtype: torch.dtype, accumulate: int) -> Run:
    model = MODELS[name](dtype)
    return train(model, loader(model), 1, accumulate=accumulate, epochs=accumulate)


@pytest.mark.parametrize(
    ("name", "world_size"), grid(["plain cnn", "masked", "sparse", "rows"], [1, 2, 3, 4], strength=1)
)
def test_equals_one_process(world, name, world_size):
    windows = (1, 2)
    ranks = world(world_size).run(fit_all, name, torch.float64, windows)
    assert list(range(world_size)) == [rank for rank, _ in ranks]
    for index, accumulate in enumerate(windows):
        expected = reference(name, torch.float64, accumulate)
        assert_same_run([runs[index] for _, runs in ranks], expected, 1e-12, 1e-11)


class WithNumbers(Numbers):
    """A buffer that counts steps, as one device has it."""

    def step_of(self, x: torch.Tensor) -> int:
        return 1


def fit_with_numbers() -> None:
    model = WithNumbers(torch.float64)
    fit(model, GradAvgStrategy(equivalent_to="single_device"))


def test_numbers_of_a_rank_are_refused(world):
    raised = world(3).run_expecting_errors(fit_with_numbers)
    assert ["TypeError"] * 3 == [one.type_name for one in raised]
    assert all("['penalty'] of training_step is one number" in one.message for one in raised)


class Halved(Regression):
    """The second half of every batch does not count: on two ranks, one rank's whole chunk."""

    norm = True
    named = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch[0], batch[1]
        kept = y[:, 1] > -90
        error = self(x) - y
        loss, weight = error[kept].square().mean() + error[kept].abs().mean(), kept.sum()
        if self.named:
            return {"loss": {"a": loss, "b": error.abs().mean()}, "weight": {"a": weight, "b": len(x)}}
        return {"loss": loss, "weight": weight}


class NamedHalved(Halved):
    named = True


def fit_halved(kind: type[Regression], accumulate: int) -> Any:
    module = kind()
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(16, size, dtype=torch.float64, generator=generator) for size in (4, 2))
    y[4:8, 1] = y[12:16, 1] = -99.0
    trainer = make_trainer(GradAvgStrategy(**single()), max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=8))
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.filterwarnings("ignore:rank . has a micro-batch of weight 0")
@pytest.mark.parametrize(("kind", "accumulate"), [(Halved, 1), (Halved, 2), (NamedHalved, 1)])
def test_samples_of_weight_zero_stay_in_the_statistics(world, kind, accumulate):
    expected = world(1).run(fit_halved, kind, accumulate)[0]
    for size in (2, 3):
        for state in world(size).run(fit_halved, kind, accumulate):
            torch.testing.assert_close(state, expected, rtol=1e-12, atol=1e-12)
