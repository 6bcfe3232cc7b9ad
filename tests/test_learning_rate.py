"""Learning rates: effective values within a step, and base values in between."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.ranks import World
from lightning_gradavg.rates.part import Rates
from lightning_gradavg.rates.scaling import SCALINGS

BASE = 1000
"""The base batch."""
SCALES = (4.0, 3.0, 0.7, 9.0, 1.0)
VALUES = (None, 0.007, 0.3)
"""Rates that a user writes. Divided by some factors and multiplied again, 0.007 has other bits, and vice versa 0.1."""


def make(kind: str) -> torch.optim.Optimizer:
    """Return an optimizer with one group at 0.1 and one at 0.01, or with tensors for rates, two or one in common."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.01)]
    optimizer: torch.optim.Optimizer = torch.optim.Adam(groups) if kind == "adam" else torch.optim.SGD(groups)
    tensors = [torch.tensor(lr, dtype=torch.float64) for lr in (0.1, 0.01)]
    for group, tensor in zip(optimizer.param_groups, tensors, strict=True):
        group["lr"] = {"tensors": tensor, "shared": tensors[0]}.get(kind, group["lr"])
    return optimizer


def moving(groups: Any) -> list[dict[str, Any]]:
    """Return what a scaling may move of each group."""
    held = [{name: group[name] for name in ("lr", "betas", "eps") if name in group} for group in groups]
    return [{**group, "lr": float(group["lr"])} for group in held]


def follow(rates: Rates, scale: float) -> None:
    rates.prepare_loaders("train")
    rates.add_loader(round(scale * BASE))


def attached(
    *optimizers: torch.optim.Optimizer, lr_scaling: str = "linear", scale: float = 4, warmup: int = 0
) -> Rates:
    rates = Rates(GradAvgStrategy()._options, lr_scaling=lr_scaling, base_batch_size=BASE, lr_warmup_steps=warmup)
    trainer, loop = SimpleNamespace(callbacks=[]), SimpleNamespace(accumulation=1)
    rates.run = cast(Any, SimpleNamespace(world=World(), trainer=trainer, loop=loop))
    rates.setup_optimizers(optimizers)
    follow(rates, scale)
    return rates


def counted_by(rates: Rates) -> Any:
    """Return the steps of each optimizer that a checkpoint holds."""
    saved: dict[str, Any] = {}
    rates.save(saved, {})
    return saved["rates"]["steps"]


@pytest.mark.parametrize("kind", ["sgd", "adam", "tensors", "shared"])
@given(
    batches=st.lists(
        st.tuples(st.sampled_from(SCALES), st.sampled_from(VALUES), st.booleans(), st.sampled_from([0, 1, 2])),
        max_size=6,
    ),
    warmup=st.sampled_from([0, 3]),
)
def test_groups_hold_effective_values_in_a_step_and_base_values_between(kind: str, batches: Any, warmup: int) -> None:
    """Under any scale, with rates that are written, groups that are added, and steps that fail."""
    rule, steps, optimizer = "adam_sde" if kind == "adam" else "linear", 0, make(kind)
    rates, groups = attached(optimizer, lr_scaling=rule, warmup=warmup), optimizer.param_groups
    tensors = [group["lr"] for group in groups if isinstance(group["lr"], torch.Tensor)]

    def step(expected: Any, fails: bool) -> None:
        assert moving(groups) == expected
        if fails:
            raise KeyError

    for scale, written, fails, changed in batches:
        if changed == 2:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5})
        base = moving(groups)
        rates.apply()
        follow(rates, scale)
        assert moving(groups) == base
        full, moments = SCALINGS[rule].factor(scale), SCALINGS[rule].moments
        factor = 1 + (full - 1) * steps / warmup if steps < warmup else full
        expected = [{**group, **moments(scale, group), "lr": group["lr"] * factor} for group in base]
        assert rates.learning_rates() == tuple(group["lr"] for group in expected)
        rates.apply()
        assert moving(groups) == expected
        for group in [] if written is None else [0, 1] if kind == "shared" else [changed]:
            expected[group]["lr"], base[group]["lr"] = written, written / factor
            groups[group]["lr"] = tensors[group].fill_(written) if group < len(tensors) else written
        assert moving(rates.optimizer_state(optimizer, optimizer.state_dict())["param_groups"]) == base
        with pytest.raises(KeyError) if fails else nullcontext():
            rates.optimizer_step(optimizer, partial(step, expected, fails))
        steps += not fails
        assert moving(groups) == base
        assert all(group["lr"] is tensor for group, tensor in zip(groups, tensors, strict=False))
    assert counted_by(rates) == [steps]


def test_optimizers_that_come_later() -> None:
    """One that was not returned is scaled in its steps; those of before go on counting."""
    before, late = make("sgd"), make("sgd")
    rates = attached(before)
    for _ in range(2):
        rates.optimizer_step(before, lambda: None)
    assert pytest.approx([0.4, 0.04]) == rates.optimizer_step(late, lambda: [one["lr"] for one in late.param_groups])
    assert [0.1, 0.01] == [one["lr"] for one in late.param_groups]
    rates.setup_optimizers([make("sgd"), before])
    assert counted_by(rates) == [0, 2]


def test_infeasible_values_are_refused_before_any_group_changes() -> None:
    optimizer = make("adam")
    for beta, scale, limit in ((0.9, 10, 10), (0.5, 4, 2)):
        optimizer.param_groups[1]["betas"] = (beta, 0.999)  # as a schedule sets them
        rates, before = attached(optimizer, lr_scaling="adam_sde", scale=scale), moving(optimizer.param_groups)
        with pytest.raises(ValueError, match=rf"scale {scale} with beta1={beta}.*below {limit}\."):
            rates.apply()
        assert before == moving(optimizer.param_groups)
