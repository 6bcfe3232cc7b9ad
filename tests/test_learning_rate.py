"""Learning rates: effective values within a step, and base values in between."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.optim import lr_scheduler

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.ranks import World
from lightning_gradavg.rates.part import Rates
from lightning_gradavg.rates.scaling import SCALINGS


def make(lr_scaling: str = "linear") -> torch.optim.Optimizer:
    """Return an optimizer that the scaling fits, with one group at 0.1 and one at 0.01."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.01)]
    if lr_scaling == "adam_sde":
        return torch.optim.Adam(groups, betas=(0.9, 0.999))
    return torch.optim.SGD(groups, momentum=0.9)


def step(optimizer: torch.optim.Optimizer, rates: Rates) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    rates.optimizer_step(optimizer, optimizer.step)


def moving(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    names = ("lr", "betas", "eps")
    return [{name: copy.deepcopy(group[name]) for name in names if name in group} for group in optimizer.param_groups]


def shown(optimizer: torch.optim.Optimizer, rates: Rates) -> list[dict[str, Any]]:
    """Return what the groups hold during a step."""
    rates.apply()
    held = moving(optimizer)
    rates.end()
    return held


BASE = 1000
"""The base batch."""


def follow(rates: Rates, scale: float) -> None:
    rates.prepare_loaders("train")
    rates.add_loader(round(scale * BASE))


def attached(
    *optimizers: torch.optim.Optimizer, lr_scaling: Any = "linear", scale: float = 4, warmup: int = 0
) -> Rates:
    rates = Rates(GradAvgStrategy()._options, lr_scaling=lr_scaling, base_batch_size=BASE, lr_warmup_steps=warmup)
    trainer, loop = SimpleNamespace(callbacks=[]), SimpleNamespace(accumulation=1)
    rates.run = cast(Any, SimpleNamespace(world=World(), trainer=trainer, loop=loop))
    rates.setup_optimizers(optimizers)
    follow(rates, scale)
    return rates


def lrs(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def saved_by(rates: Rates) -> dict[str, Any]:
    """Return what a checkpoint holds of the steps."""
    saved: dict[str, Any] = {}
    rates.save(saved, {})
    return saved


def test_optimizers_count_their_own_steps() -> None:
    often, seldom = make(), make()
    rates = attached(often, seldom, scale=5, warmup=4)

    def within() -> None:
        assert [0.1, 0.01] == lrs(often), "only its own step scales an optimizer"
        assert [0.1, 0.01] == lrs(seldom), "at its first step it is where the warm-up begins"
        step(often, rates)

    def fails() -> None:
        assert pytest.approx([0.2, 0.02]) == lrs(seldom)
        raise KeyError

    for _ in range(3):
        step(often, rates)
    rates.optimizer_step(seldom, within)
    with pytest.raises(KeyError):
        rates.optimizer_step(seldom, fails)
    assert [0.1, 0.01] == lrs(seldom)
    assert pytest.approx([0.5, 0.05, 0.2, 0.02]) == rates.learning_rates()
    assert {"steps": [4, 1]} == saved_by(rates)["rates"], "a step that fails is not counted"

    rates.setup_optimizers([make(), often])
    assert {"steps": [0, 4]} == saved_by(rates)["rates"]


def test_an_optimizer_that_was_not_returned_is_scaled_in_its_steps() -> None:
    late = make()
    assert pytest.approx([0.4, 0.04]) == attached(make()).optimizer_step(late, lambda: lrs(late))
    assert [0.1, 0.01] == lrs(late)


def test_a_changed_scale_is_computed_from_the_base() -> None:
    optimizer = make("adam_sde")
    before = moving(optimizer)
    rates = attached(optimizer, lr_scaling="adam_sde")

    for scale in (2.0, 3.7, 0.3, 9.0, 1.0):
        rates.apply()
        follow(rates, scale)
        assert before == moving(optimizer)
        assert [SCALINGS["adam_sde"].hyperparameters(scale, group) for group in before] == shown(optimizer, rates)


def test_a_checkpoint_within_a_step_holds_base_values() -> None:
    optimizer = make("adam_sde")
    base = optimizer.state_dict()
    rates = attached(optimizer, lr_scaling="adam_sde")
    rates.apply()
    assert base["param_groups"] != optimizer.state_dict()["param_groups"]
    assert base["param_groups"] == rates.optimizer_state(optimizer, optimizer.state_dict())["param_groups"]


def test_a_written_value_keeps_its_bits() -> None:
    value = next(v for v in (n / 1000 for n in range(1, 1000)) if v / 49 * 49 != v)
    optimizer = make()
    rates = attached(optimizer, scale=49)
    rates.apply()
    optimizer.param_groups[0]["lr"] = value

    assert value == rates.optimizer_step(optimizer, lambda: lrs(optimizer))[0]
    assert value / 49 == lrs(optimizer)[0]
    assert pytest.approx(value, rel=1e-15) == rates.learning_rates()[0]


def test_groups_added_later_are_scaled() -> None:
    optimizer = make()
    rates = attached(optimizer)
    step(optimizer, rates)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5})
    del optimizer.param_groups[0]
    assert pytest.approx([0.04, 2.0]) == [group["lr"] for group in shown(optimizer, rates)]
    assert [0.01, 0.5] == lrs(optimizer)


@pytest.mark.parametrize("shared", [False, True])
def test_tensor_learning_rates_are_changed_in_place(shared: bool) -> None:
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(2)], lr=0.1)
    tensors = [torch.tensor(0.5, dtype=torch.float64) for _ in range(2)]
    for group, tensor in zip(optimizer.param_groups, tensors, strict=True):
        group["lr"] = tensors[0] if shared else tensor
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    held = [group["lr"] for group in optimizer.param_groups]
    rates = attached(optimizer, warmup=2)
    weight = optimizer.param_groups[0]["params"][0]

    for factor, following, schedule in ((1, 2.5, 0.5), (2.5, 4, 0.25), (4, 4, 0.125)):
        before = weight.item()
        step(optimizer, rates)
        rates.apply()
        assert [schedule * following] * 2 == [lr.item() for lr in held]
        state = rates.optimizer_state(optimizer, optimizer.state_dict())["param_groups"]
        rates.end()
        assert [schedule] * 2 == [group["lr"].item() for group in state] == lrs(optimizer)
        assert weight.item() == before - factor * schedule
        if not shared:
            scheduler.step()
        else:
            held[0].mul_(0.5)
    rates.apply()
    held[0].fill_(3.0)
    rates.end()
    assert 0.75 == held[0].item()
    assert 3.0 == rates.learning_rates()[0]
    assert all(group["lr"] is tensor for group, tensor in zip(optimizer.param_groups, held, strict=True))


def test_infeasible_values_are_refused_before_any_group_changes() -> None:
    optimizer = make("adam_sde")
    for beta, scale, limit in ((0.9, 10, 10), (0.5, 4, 2)):
        optimizer.param_groups[1]["betas"] = (beta, 0.999)  # as a schedule sets them
        rates, before = attached(optimizer, lr_scaling="adam_sde", scale=scale), moving(optimizer)
        with pytest.raises(ValueError, match=rf"scale {scale} with beta1={beta}.*below {limit}\."):
            rates.apply()
        assert before == moving(optimizer)
