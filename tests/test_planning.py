"""Plans: three runs of one recipe side by side, the advice found in threads, and the nearest valid numbers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_gradavg.batches.chunks import Split
from lightning_gradavg.plan import Cluster, Recipe, make_plan

COUNTS = st.integers(1, 64)


class Named(dict[str, Any]):
    """A JSON object, whose keys are attributes."""

    def __getattr__(self, key: str) -> Any:
        return self[key]


def planned(*arguments: Any, **options: Any) -> Named:
    """Return a plan, as a program that reads the JSON has it."""
    plan: Named = json.loads(json.dumps(make_plan(*arguments, **options)), object_hook=Named)
    return plan


def lrs(run: Named) -> dict[str, float | None]:
    values = {outcome.lr_scaling: outcome.hyperparameters for outcome in run.scalings}
    return {rule: None if found is None else found["lr"] for rule, found in values.items()}


def outcome(run: Named, name: str) -> Named:
    (found,) = [outcome for outcome in run.scalings if outcome.lr_scaling == name]
    return found


def note(plan: Named, start: str) -> str:
    (found,) = [note for note in plan.notes if note.startswith(start)]
    return found


def test_the_question_of_the_threads() -> None:
    plan = planned(Recipe(16, 0.01), Cluster(2, 2))
    assert [(chunk.samples, chunk.devices) for chunk in plan.gradavg.chunks] == [(4, 4)]
    assert (plan.gradavg.global_batch_size, plan.gradavg.scale, plan.gradavg.accumulate) == (16, 1.0, 1)
    assert lrs(plan.gradavg) == {"none": 0.01, "linear": 0.01, "sqrt": 0.01, "adam_sde": None}
    assert (plan.stock_ddp.global_batch_size, plan.stock_ddp.scale) == (64, 4.0)
    assert lrs(plan.stock_ddp) == {"none": 0.01, "linear": 0.04, "sqrt": 0.02, "adam_sde": None}
    assert plan.stock_ddp.sum_loss_divisor == 4
    assert plan.stock_ddp.mean_loss_gradient == "mean of 4 means"
    assert plan.stock_ddp.sum_loss_gradient == "sum over 64, 4 times too small"


def test_advice_of_the_threads_is_judged() -> None:
    four = {advice.lr: advice.gradavg for advice in planned(Recipe(16, 0.01), Cluster(2, 2)).advice}
    assert four == {
        0.01: "right: the base step",
        0.0025: "wrong: 0.25 times the base step",
        0.04: "wrong: 4 times the base step",
        0.02: "wrong: 2 times the base step",
    }
    two = planned(Recipe(16, 0.01), Cluster(2, 1))
    assert two.advice[1].lr == 0.005
    assert two.advice[1].gradavg == "wrong: 0.5 times the base step"
    assert [advice.stock_ddp for advice in two.advice] == [
        "fits lr_scaling='none'",
        "fits no lr_scaling",
        "fits lr_scaling='linear'",
        "fits lr_scaling='sqrt'",
    ]


@given(size=st.integers(1, 10**6), parts=COUNTS)
def test_nearest_even_batches_are_even_and_nearest(size: int, parts: int) -> None:
    nearest = tuple(planned(Recipe(size, 0.1), Cluster(1, parts)).nearest_even_batch_sizes)
    assert all(batch % parts == 0 and batch > 0 for batch in nearest)
    if size % parts == 0:
        assert nearest == (size,)
    else:
        assert nearest[-1] - parts < size < nearest[-1]
        assert nearest[:-1] == ((nearest[-1] - parts,) if size > parts else ())


def test_no_advice_where_the_ranks_stay() -> None:
    plan = planned(Recipe(16, 0.01, devices=4), Cluster(2, 2))
    assert plan.advice == []
    assert plan.stock_ddp.scale == 1.0
    assert plan.stock_ddp == plan.base


def test_a_batch_that_does_not_divide_names_the_nearest() -> None:
    plan = planned(Recipe(12, 0.01, dataset_size=24, epochs=1), Cluster(1, 5))
    assert [(chunk.samples, chunk.devices) for chunk in plan.gradavg.chunks] == [(3, 4), (0, 1)]
    assert plan.nearest_even_batch_sizes == [10, 15]
    assert plan.gradavg.steps == plan.gradavg.steps_per_epoch == 2
    assert "10 and 15" in note(plan, "12 samples cannot be shared evenly by 5 devices")
    idle = "1 device of 5 would get no sample of any global batch: 4 devices would be as fast."
    assert idle == note(plan, "1 device of 5")


@given(size=st.integers(1, 500), devices=st.integers(1, 8), limit=st.none() | COUNTS)
def test_micro_batches_are_those_of_split_batches(size: int, devices: int, limit: int | None) -> None:
    run = planned(Recipe(size, 0.1), Cluster(1, devices), max_device_batch_size=limit).gradavg
    chunks = [chunk for chunk in run.chunks for _ in range(chunk.devices)]
    for rank, chunk in enumerate(chunks):
        split = Split(rank, devices, max_samples=limit)
        own = [piece.stop - piece.start for piece in split.cut(size).pieces]
        assert len(own) <= run.accumulate
        assert (sum(own), max(own, default=0)) == (chunk.samples, chunk.micro_batch_size)


@given(batch=COUNTS, base=COUNTS, window=st.integers(1, 4), nodes=st.integers(1, 4), devices=st.integers(1, 8))
def test_the_global_batch_is_kept_by_default(batch: int, base: int, window: int, nodes: int, devices: int) -> None:
    recipe = Recipe(batch, 0.1, devices=base, accumulate_grad_batches=window, optimizer="adam")
    plan = planned(recipe, Cluster(nodes, devices))
    expected = {"lr": 0.1, "betas": [0.9, 0.999], "eps": 1e-8}
    assert plan.gradavg.global_batch_size == plan.base.global_batch_size == batch * base * window
    assert plan.gradavg.scale == plan.base.scale == 1
    assert all(found.hyperparameters == expected for found in plan.gradavg.scalings)
    assert sum(chunk.samples * chunk.devices for chunk in plan.gradavg.chunks) == batch * base * window
    assert plan.stock_ddp.scale == pytest.approx(nodes * devices / base, rel=1e-15)


@given(size=st.integers(1, 400), batch=st.integers(1, 40), ranks=st.integers(1, 8), window=st.integers(1, 4))
def test_steps_per_epoch_of_stock_ddp_are_those_of_its_sampler(size: int, batch: int, ranks: int, window: int) -> None:
    samples = TensorDataset(torch.arange(size))
    loader: DataLoader[Any] = DataLoader(
        samples, batch_size=batch, sampler=DistributedSampler(samples, num_replicas=ranks, rank=0)
    )
    recipe = Recipe(batch, 0.1, accumulate_grad_batches=window, dataset_size=size)
    plan = planned(recipe, Cluster(1, ranks))
    assert plan.stock_ddp.steps_per_epoch == math.ceil(len(loader) / window)
    assert plan.gradavg.steps_per_epoch == math.ceil(size / (batch * window))


def test_lengths_follow_the_scale() -> None:
    plan = planned(Recipe(16, 0.01, steps=1000, warmup_steps=100), Cluster(2, 2), global_batch_size=64)
    assert (plan.base.steps, plan.base.warmup_steps) == (1000, 100)
    assert (plan.gradavg.steps, plan.gradavg.warmup_steps) == (250, 25)
    assert (plan.stock_ddp.steps, plan.stock_ddp.warmup_steps) == (1000, 100)


def test_epochs_become_steps() -> None:
    plan = planned(Recipe(16, 0.01, epochs=10, dataset_size=100), Cluster(2, 2), global_batch_size=64)
    assert (plan.base.steps, plan.gradavg.steps, plan.stock_ddp.steps) == (70, 20, 20)
    assert note(plan, "The last global batch of an epoch holds 36 of 64 samples")


def test_gradual_warmup_of_five_epochs() -> None:
    recipe = Recipe(16, 0.01, epochs=10, dataset_size=128)
    long = planned(recipe, Cluster(2, 2), global_batch_size=64)
    assert {found.lr_scaling: found.lr_warmup_steps for found in long.gradavg.scalings if found.feasible} == {
        "none": None,
        "linear": 10,
        "sqrt": None,
    }
    short = planned(Recipe(16, 0.01, epochs=2, dataset_size=128), Cluster(2, 2), global_batch_size=64)
    assert outcome(short.gradavg, "linear").lr_warmup_steps == 4
    smaller = planned(recipe, Cluster(2, 2), global_batch_size=8)
    assert outcome(smaller.gradavg, "linear").lr_warmup_steps is None
    assert "lr_scaling='linear', base_batch_size=16, lr_warmup_steps=10" in long.code[1]


@given(
    batch=st.integers(2, 64),
    optimizer=st.sampled_from(["adam", "adamw", "rmsprop"]),
    smoothing=st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.97]),
)
def test_the_largest_feasible_batch_is_feasible_and_the_next_is_not(
    batch: int, optimizer: str, smoothing: float
) -> None:
    options: dict[str, Any] = {"alpha": smoothing} if optimizer == "rmsprop" else {"betas": (smoothing, 0.99)}
    recipe = Recipe(batch, 1e-3, optimizer=optimizer, **options)
    refused = outcome(planned(recipe, Cluster(1, 1), global_batch_size=batch * 64).gradavg, "adam_sde")
    assert not refused.feasible
    largest = refused.largest_global_batch_size
    assert largest is not None
    for size, feasible in ((largest, True), (largest + 1, False)):
        assert outcome(planned(recipe, Cluster(1, 1), global_batch_size=size).gradavg, "adam_sde").feasible is feasible


def test_an_infeasible_scaling_says_why_once_per_batch() -> None:
    plan = planned(Recipe(16, 1e-3, optimizer="adam"), Cluster(1, 10), global_batch_size=160)
    refused = outcome(plan.gradavg, "adam_sde")
    assert (refused.hyperparameters, refused.largest_global_batch_size) == (None, 159)
    assert "not feasible at scale 10 with beta1=0.9" in note(plan, "Global batch 160: ")
    assert "lr_scaling='sqrt', base_batch_size=16" in plan.code[1]


def test_the_weight_decay_of_adamw_is_named_and_not_applied() -> None:
    plan = planned(Recipe(16, 1e-3, optimizer="adamw", weight_decay=0.1), Cluster(1, 4), global_batch_size=64)
    decays = {found.lr_scaling: found.weight_decay for found in plan.gradavg.scalings}
    assert decays == {"none": 0.4, "linear": 0.1, "sqrt": 0.2, "adam_sde": 0.2}
    assert "0.4 with 'none', 0.1 with 'linear'" in note(plan, "No scaling changes AdamW's weight_decay")
    coupled = planned(Recipe(16, 1e-3, weight_decay=0.1), Cluster(1, 4), global_batch_size=64)
    assert {found.weight_decay for found in coupled.gradavg.scalings} == {None}


def test_sum_losses_of_an_averaged_recipe_are_noted() -> None:
    plan = planned(Recipe(16, 0.06, devices=2, accumulate_grad_batches=3), Cluster(1, 4), global_batch_size=192)
    assert plan.base.sum_loss_divisor == 6
    assert plan.base.sum_loss_gradient == "sum over 96, 6 times too small"
    assert plan.gradavg.sum_loss_gradient == "sum over 192"
    assert "divided by 6: 0.01 at scale 1" in note(plan, "A sum loss of the base run was divided by 6")
    assert "4 times the base step" in note(plan, "With a sum loss: reduction='sum'")


def test_memory_of_a_device() -> None:
    free = planned(Recipe(16, 0.1), Cluster(1, 2), global_batch_size=80)
    assert "A device holds 40 samples at once, and 16 in the base run" in note(free, "A device holds")
    limited = planned(Recipe(16, 0.1), Cluster(1, 2), global_batch_size=80, max_device_batch_size=16)
    assert (limited.gradavg.accumulate, limited.gradavg.chunks[0].micro_batch_size) == (3, 14)
    assert "max_device_batch_size=16" in limited.code[1]
    assert not [note for note in limited.notes if note.startswith("A device holds")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"lr": 0.0}, "lr must be finite and > 0, got 0.0"),
        ({"lr": math.nan}, "lr must be finite and > 0, got nan"),
        ({"devices": -1}, "devices must be an integer >= 1, got -1"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches must be an integer >= 1, got 0"),
        ({"optimizer": "lion"}, "optimizer 'lion' is not known. Use one of sgd, adam, adamw, rmsprop"),
        ({"betas": (0.9, 0.99)}, r"betas=\(0.9, 0.99\) has no meaning for optimizer 'sgd'.*one of adam, adamw"),
        ({"optimizer": "adam", "alpha": 0.9}, "alpha=0.9 has no meaning for optimizer 'adam'.*one of rmsprop"),
        ({"optimizer": "adam", "betas": (0.9, 1.0)}, r"beta2 must be in \[0, 1\), got 1.0"),
        ({"optimizer": "rmsprop", "alpha": -0.1}, r"alpha must be in \[0, 1\), got -0.1"),
        ({"optimizer": "adam", "eps": -1.0}, "eps must be finite and >= 0, got -1.0"),
        ({"weight_decay": math.inf}, "weight_decay must be finite and >= 0, got inf"),
        ({"steps": 10, "epochs": 2, "dataset_size": 8}, "steps=10 and epochs=2 both give the length"),
        ({"epochs": 2}, "epochs=2 needs the size of the data set"),
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"warmup_steps": -1}, "warmup_steps must be an integer >= 0, got -1"),
        ({"steps": 10, "warmup_steps": 11}, "warmup_steps=11 is longer than the recipe's 10 steps"),
        ({"epochs": 2, "dataset_size": 64, "warmup_steps": 9}, "warmup_steps=9 is longer than the recipe's 8 steps"),
    ],
)
def test_impossible_recipes_are_quoted(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned(Recipe(**{"batch_size": 16, "lr": 0.1, **options}), Cluster(1, 1))
