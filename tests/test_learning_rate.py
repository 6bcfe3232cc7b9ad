"""Learning rates: effective = factor * schedule within a step for every scheduler, and base values in between."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from lightning_gradavg.options import Options
from lightning_gradavg.ranks import World
from lightning_gradavg.rates.part import Rates

FACTORS: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt, "adam_sde": math.sqrt}
STEPS = 30


class Decay:
    """A schedule that can be pickled."""

    def __call__(self, step: int) -> float:
        return 0.95**step


def chained(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    first = lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=6)
    return lr_scheduler.ChainedScheduler([first, lr_scheduler.ExponentialLR(optimizer, gamma=0.9)])


# Of each kind one: by a closed form, by a factor on what stands in the group, by both, of betas, too, and by a metric.
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, Decay()),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 4, 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.2, 0.02], total_steps=STEPS + 1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, [0.01, 0.001], [0.1, 0.01], 4, 3, mode="triangular2"),
    "ChainedScheduler": chained,
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=7),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.3, patience=3, min_lr=2e-4),
}
MOVES_BETA = ["OneCycleLR", "CyclicLR"]


def make(lr_scaling: str = "linear") -> torch.optim.Optimizer:
    """Return an optimizer that the scaling fits, with one group at 0.1 and one at 0.01."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.01)]
    if lr_scaling == "adam_sde":
        return torch.optim.Adam(groups, betas=(0.9, 0.999))
    return torch.optim.SGD(groups, momentum=0.9)


def step(optimizer: torch.optim.Optimizer, rates: Rates | None = None) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step() if rates is None else rates.optimizer_step(optimizer, optimizer.step)


def step_scheduler(scheduler: Any, count: int) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0 / count if count < 3 else 1.0)
    else:
        scheduler.step()


def moving(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    names = ("lr", "betas", "alpha", "eps", "momentum")
    return [{name: copy.deepcopy(group[name]) for name in names if name in group} for group in optimizer.param_groups]


def shown(optimizer: torch.optim.Optimizer, rates: Rates) -> list[dict[str, Any]]:
    """Return what the groups hold during a step."""
    rates.apply()
    held = moving(optimizer)
    rates.end()
    return held


def factor_at(lr_scaling: str, scale: float, steps: int, warmup: int) -> float:
    factor = FACTORS[lr_scaling](scale)
    return 1 + (factor - 1) * min(steps / warmup, 1) if warmup else factor


def effective(lr_scaling: str, scale: float, steps: int, warmup: int, base: dict[str, Any]) -> dict[str, Any]:
    """Return by the published formulas what must stand in a group, to 1e-12, for what a stock run has there."""
    values = {**base, "lr": float(base["lr"]) * factor_at(lr_scaling, scale, steps, warmup)}
    if lr_scaling == "adam_sde":
        values["betas"] = tuple(1 - scale * (1 - beta) for beta in base["betas"])
        values["eps"] = base["eps"] / math.sqrt(scale)
    return {name: pytest.approx(value, rel=1e-12, abs=1e-18) for name, value in values.items()}


BASE = 1000
"""The base batch."""


def follow(rates: Rates, scale: float) -> None:
    rates.prepare_loaders("train")
    rates.add_loader(round(scale * BASE))


def attached(
    *optimizers: torch.optim.Optimizer, lr_scaling: Any = "linear", scale: float = 4, warmup: int = 0
) -> Rates:
    rates = Rates(
        Options.of({"reduction": "mean"}), lr_scaling=lr_scaling, base_batch_size=BASE, lr_warmup_steps=warmup
    )
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


# What a scheduler does with base values does not depend on the scaling, except that two of them move the betas, too.
@pytest.mark.parametrize(
    ("name", "lr_scaling", "warmup"),
    [
        *((name, "linear", 20) for name in SCHEDULERS),
        *((name, "adam_sde", warmup) for name in MOVES_BETA for warmup in (0, 5)),
        *(("StepLR", lr_scaling, 0) for lr_scaling in FACTORS),
        ("StepLR", "sqrt", 5),
    ],
)
def test_effective_is_factor_times_schedule(name: str, lr_scaling: str, warmup: int) -> None:
    """Resumed after 13 of 30 steps at half the scale, from what an unscaled run would have saved."""
    optimizer, twin = make(lr_scaling), make(lr_scaling)
    scheduler, twin_scheduler = SCHEDULERS[name](optimizer), SCHEDULERS[name](twin)
    scale, schedule = 4, set()
    rates = attached(optimizer, lr_scaling=lr_scaling, scale=scale, warmup=warmup)

    for count in range(1, STEPS + 1):
        step(optimizer, rates)
        step_scheduler(scheduler, count)
        step(twin)
        step_scheduler(twin_scheduler, count)
        assert [effective(lr_scaling, scale, count, warmup, group) for group in moving(twin)] == shown(optimizer, rates)
        assert moving(twin) == moving(optimizer), "the schedule must see the bits of the unscaled run"
        schedule.add(moving(twin)[0]["lr"])
        if count == 13:
            rates.apply()
            within = rates.optimizer_state(optimizer, optimizer.state_dict())
            assert optimizer.state_dict()["param_groups"] != within["param_groups"]
            rates.end()
            assert twin.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"] == within["param_groups"]
            assert twin_scheduler.state_dict() == scheduler.state_dict()
            assert {*vars(twin_scheduler)} == {*vars(scheduler)}
            saved = io.BytesIO()
            torch.save([within, scheduler.state_dict(), saved_by(rates)], saved)
            saved.seek(0)
            # SWALR of torch 2.4 keeps a function in its state.
            state, scheduler_state, counters = torch.load(saved, weights_only=name != "SWALR")
            optimizer, scale = make(lr_scaling), 2
            scheduler = SCHEDULERS[name](optimizer)
            rates = attached(optimizer, lr_scaling=lr_scaling, scale=scale, warmup=warmup)
            optimizer.load_state_dict(state)
            scheduler.load_state_dict(scheduler_state)
            rates.load_optimizers(counters)

    assert len(schedule) > 1, "a schedule that does not move proves nothing"


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
        assert [effective("adam_sde", scale, 0, 0, group) for group in before] == shown(optimizer, rates)


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
