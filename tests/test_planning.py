"""Plans: three runs of one recipe side by side, the advice found in threads, and the nearest valid numbers."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_gradavg.batches.chunks import Split
from lightning_gradavg.plan import Recipe, make_plan

COUNTS = st.integers(1, 64)


class Named(dict[str, Any]):
    """A JSON object, whose keys are attributes."""

    def __getattr__(self, key: str) -> Any:
        return self[key]


def planned(recipe: Recipe, devices: int, **options: Any) -> Named:
    """Return a plan for a node, as a program that reads the JSON has it."""
    made = make_plan(recipe, devices_per_node=devices, **options)
    plan: Named = json.loads(json.dumps(made), object_hook=Named)
    return plan


def lrs(run: Named) -> dict[str, float | None]:
    values = {outcome.lr_scaling: outcome.hyperparameters for outcome in run.scalings}
    return {rule: None if found is None else found["lr"] for rule, found in values.items()}


def outcome(run: Named, name: str) -> Named:
    (found,) = [outcome for outcome in run.scalings if outcome.lr_scaling == name]
    return found


def test_the_question_of_the_threads() -> None:
    plan = planned(Recipe(16, 0.01), 2, nodes=2)
    assert [(chunk.samples, chunk.devices) for chunk in plan.gradavg.chunks] == [(4, 4)]
    assert (plan.gradavg.global_batch_size, plan.gradavg.scale, plan.gradavg.accumulate) == (16, 1.0, 1)
    assert lrs(plan.gradavg) == {"none": 0.01, "linear": 0.01, "sqrt": 0.01, "adam_sde": None}
    assert (plan.stock_ddp.global_batch_size, plan.stock_ddp.scale) == (64, 4.0)
    assert lrs(plan.stock_ddp) == {"none": 0.01, "linear": 0.04, "sqrt": 0.02, "adam_sde": None}
    assert plan.stock_ddp.mean_loss_gradient == "mean of 4 means"
    assert plan.stock_ddp.sum_loss_gradient == "sum over 64, 4 times too small"


@given(size=st.integers(1, 10**6), parts=COUNTS)
def test_nearest_even_batches_are_even_and_nearest(size: int, parts: int) -> None:
    plan = planned(Recipe(size, 0.1), parts)
    nearest = tuple(plan.nearest_even_batch_sizes)
    assert all(batch % parts == 0 and batch > 0 for batch in nearest)
    if size % parts == 0:
        assert nearest == (size,)
    else:
        assert nearest[-1] - parts < size < nearest[-1]
        assert nearest[:-1] == ((nearest[-1] - parts,) if size > parts else ())
    uneven = f"cannot be shared evenly by {parts} devices.* evenly: {' and '.join(map(str, nearest))}\\."
    assert bool(size % parts) == any(re.search(uneven, note) for note in plan.notes)


@given(size=st.integers(1, 500), devices=st.integers(1, 8), limit=st.none() | COUNTS)
def test_micro_batches_are_those_of_split_batches(size: int, devices: int, limit: int | None) -> None:
    run = planned(Recipe(size, 0.1), devices, max_device_batch_size=limit).gradavg
    chunks = [chunk for chunk in run.chunks for _ in range(chunk.devices)]
    for rank, chunk in enumerate(chunks):
        split = Split(rank, devices, max_samples=limit)
        own = [piece.samples for piece in split.cut(size).pieces]
        assert len(own) <= run.accumulate
        assert (sum(own), max(own, default=0)) == (chunk.samples, chunk.micro_batch_size)


def test_the_global_batch_is_kept_by_default() -> None:
    """4 samples on each of 2 devices, twice a step, are 16: on 5 nodes of 3 devices, too, where stock DDP makes 120."""
    plan = planned(Recipe(4, 0.1, devices=2, accumulate_grad_batches=2, optimizer="adam"), 3, nodes=5)
    sizes = [(run.global_batch_size, run.scale) for run in (plan.base, plan.gradavg, plan.stock_ddp)]
    assert sizes == [(16, 1), (16, 1), (120, 7.5)]
    assert [(chunk.samples, chunk.devices) for chunk in plan.gradavg.chunks] == [(2, 8), (0, 7)]
    expected = {"lr": 0.1, "betas": [0.9, 0.999], "eps": 1e-8}
    assert all(found.hyperparameters == expected for found in plan.gradavg.scalings)


@given(size=st.integers(1, 400), batch=st.integers(1, 40), ranks=st.integers(1, 8), window=st.integers(1, 4))
def test_steps_per_epoch_of_stock_ddp_are_those_of_its_sampler(size: int, batch: int, ranks: int, window: int) -> None:
    samples = TensorDataset(torch.arange(size))
    loader: DataLoader[Any] = DataLoader(
        samples, batch_size=batch, sampler=DistributedSampler(samples, num_replicas=ranks, rank=0)
    )
    recipe = Recipe(batch, 0.1, accumulate_grad_batches=window, dataset_size=size)
    plan = planned(recipe, ranks)
    assert plan.stock_ddp.steps_per_epoch == math.ceil(len(loader) / window)
    assert plan.gradavg.steps_per_epoch == math.ceil(size / (batch * window))


def test_gradual_warmup_of_five_epochs() -> None:
    recipe = Recipe(16, 0.01, dataset_size=128)
    long = planned(recipe, 4, global_batch_size=64)
    warmups = {found.lr_scaling: found.lr_warmup_steps for found in long.gradavg.scalings}
    assert warmups == {"none": None, "linear": 10, "sqrt": None, "adam_sde": None}
    short = planned(Recipe(16, 0.01, steps=16, dataset_size=128), 4, global_batch_size=64)
    assert outcome(short.gradavg, "linear").lr_warmup_steps == 4
    assert outcome(planned(recipe, 4, global_batch_size=8).gradavg, "linear").lr_warmup_steps is None
    assert "lr_scaling='linear', base_batch_size=16, lr_warmup_steps=10" in long.code[1]


@given(batch=st.integers(2, 64), smoothing=st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.97]))
def test_the_largest_feasible_batch_is_feasible_and_the_next_is_not(batch: int, smoothing: float) -> None:
    recipe = Recipe(batch, 1e-3, optimizer="adam", betas=(smoothing, 0.99))
    plan = planned(recipe, 1, global_batch_size=batch * 64)
    refused = outcome(plan.gradavg, "adam_sde")
    assert refused.hyperparameters is None
    assert f"not feasible at scale 64 with beta1={smoothing}" in refused.problem
    assert "lr_scaling='sqrt'" in plan.code[1]
    largest = refused.largest_global_batch_size
    for size, feasible in ((largest, True), (largest + 1, False)):
        fits = outcome(planned(recipe, 1, global_batch_size=size).gradavg, "adam_sde").problem is None
        assert fits is feasible


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"lr": math.nan}, "lr must be finite and > 0, got nan"),
        ({"optimizer": "lion"}, "optimizer 'lion' is not known. Use one of sgd, adam, adamw"),
        ({"optimizer": "adam", "betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"warmup_steps": -1}, "warmup_steps must be an integer >= 0, got -1"),
        ({"steps": 10, "warmup_steps": 11}, "warmup_steps=11 is longer than the recipe's 10 steps"),
    ],
)
def test_impossible_recipes_are_quoted(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**{"batch_size": 16, "lr": 0.1, **options})
