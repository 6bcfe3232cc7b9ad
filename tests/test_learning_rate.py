"""Learning rates: effective = factor * schedule within a step for every scheduler, and base values in between."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from lightning_gradavg.rates.groups import LearningRates

FACTORS: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt, "adam_sde": math.sqrt}
STEPS = 30


class Decay:
    """A schedule that can be pickled."""

    def __call__(self, step: int) -> float:
        return 0.95**step


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    first = lr_scheduler.ConstantLR(optimizer, factor=0.1, total_iters=4)
    second = lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    third = lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    return lr_scheduler.SequentialLR(optimizer, [first, second, third], [7, 18])


def chained(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    first = lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=6)
    return lr_scheduler.ChainedScheduler([first, lr_scheduler.ExponentialLR(optimizer, gamma=0.9)])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, Decay()),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, Decay()),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 4, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 11], 0.1),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 9),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 8),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 20, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 12, 1e-3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.2, 0.02], total_steps=STEPS + 1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, [0.01, 0.001], [0.1, 0.01], 4, 3, mode="triangular2"),
    "CyclicLR_exp": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 6, mode="exp_range", gamma=0.97),
    "SequentialLR": sequential,
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


def step(optimizer: torch.optim.Optimizer, rates: LearningRates | None = None) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    with rates.step(optimizer) if rates is not None else nullcontext():
        optimizer.step()


def step_scheduler(scheduler: Any, count: int) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0 / count if count < 3 else 1.0)
    else:
        scheduler.step()


def moving(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    names = ("lr", "betas", "alpha", "eps", "momentum")
    return [{name: copy.deepcopy(group[name]) for name in names if name in group} for group in optimizer.param_groups]


def shown(optimizer: torch.optim.Optimizer, rates: LearningRates) -> list[dict[str, Any]]:
    """Return what the groups hold during a step."""
    rates.begin()
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


def attached(
    optimizer: torch.optim.Optimizer, lr_scaling: Any = "linear", scale: float = 4, warmup: int = 0
) -> LearningRates:
    rates = LearningRates(lr_scaling, warmup)
    rates.attach([optimizer])
    rates.set_scale(scale)
    return rates


def lrs(optimizer: torch.optim.Optimizer, rates: LearningRates | None = None) -> list[float]:
    """Return the learning rates in the groups, with `rates` during a step."""
    return [float(group["lr"]) for group in (moving(optimizer) if rates is None else shown(optimizer, rates))]


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
    rates = attached(optimizer, lr_scaling, scale, warmup)

    for count in range(1, STEPS + 1):
        step(optimizer, rates)
        step_scheduler(scheduler, count)
        step(twin)
        step_scheduler(twin_scheduler, count)
        assert [effective(lr_scaling, scale, count, warmup, group) for group in moving(twin)] == shown(optimizer, rates)
        assert moving(twin) == moving(optimizer), "the schedule must see the bits of the unscaled run"
        schedule.add(moving(twin)[0]["lr"])
        if count == 13:
            rates.begin()
            within = rates.base_state_dict(optimizer, optimizer.state_dict())
            assert optimizer.state_dict()["param_groups"] != within["param_groups"]
            rates.end()
            assert twin.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"] == within["param_groups"]
            assert twin_scheduler.state_dict() == scheduler.state_dict()
            assert {*vars(twin_scheduler)} == {*vars(scheduler)}
            saved = io.BytesIO()
            torch.save([within, scheduler.state_dict(), rates.state_dict()], saved)
            saved.seek(0)
            # SWALR of torch 2.4 keeps a function in its state.
            state, scheduler_state, counters = torch.load(saved, weights_only=name != "SWALR")
            optimizer, scale = make(lr_scaling), 2
            scheduler = SCHEDULERS[name](optimizer)
            rates = attached(optimizer, lr_scaling, scale, warmup)
            optimizer.load_state_dict(state)
            scheduler.load_state_dict(scheduler_state)
            rates.load_state_dict(counters)

    assert len(schedule) > 1, "a schedule that does not move proves nothing"


def test_optimizers_count_their_own_steps() -> None:
    often, seldom, other = make(), make(), make("adam_sde")
    rates = LearningRates("linear", 4)
    rates.attach([often, seldom, often])
    rates.set_scale(5)

    for _ in range(3):
        step(often, rates)
    with rates.step(seldom):
        step(often, rates)
        assert [0.1, 0.01] == lrs(often), "only its own step scales an optimizer"
        assert [0.1, 0.01] == lrs(seldom), "at its first step it is where the warm-up begins"
    with suppress(KeyError), rates.step(seldom):
        assert pytest.approx([0.2, 0.02]) == lrs(seldom)
        raise KeyError
    rates.begin()
    assert [0.1, 0.01] == lrs(other), "it is not attached"
    rates.end()
    with pytest.raises(ValueError, match=r"does not know this Adam, .* return it from configure_optimizers"):
        step(other, rates)

    assert [0.1, 0.01] == lrs(seldom)
    assert [0.5, 0.2] == pytest.approx([rates.of(often)[0], rates.of(seldom)[0]])
    assert {"steps": [4, 1]} == rates.state_dict(), "a step that fails is not counted"
    rates.attach([other, often])
    assert {"steps": [0, 4]} == rates.state_dict()
    with pytest.raises(ValueError, match=r"steps \[1\] are of 1 optimizers, and 2 are attached"):
        rates.load_state_dict({"steps": [1]})


def test_a_changed_scale_is_computed_from_the_base() -> None:
    optimizer = make("adam_sde")
    before = moving(optimizer)
    rates = attached(optimizer, "adam_sde", 4)

    for scale in (2.0, 3.7, 0.3, 9.0, 1.0):
        rates.begin()
        rates.set_scale(scale)
        assert before == moving(optimizer)
        assert [effective("adam_sde", scale, 0, 0, group) for group in before] == shown(optimizer, rates)


def test_a_written_value_keeps_its_bits() -> None:
    value = next(v for v in (n / 1000 for n in range(1, 1000)) if v / 49 * 49 != v)
    optimizer = make()
    rates = attached(optimizer, "linear", 49)
    rates.begin()
    optimizer.param_groups[0]["lr"] = value

    with rates.step(optimizer):
        assert value == lrs(optimizer)[0]
    assert value / 49 == lrs(optimizer)[0]
    assert pytest.approx(value, rel=1e-15) == lrs(optimizer, rates)[0]


def test_moments_that_are_written_in_a_step_are_effective() -> None:
    optimizer = make("adam_sde")
    rates = attached(optimizer, "adam_sde", 4)
    rates.begin()
    optimizer.param_groups[0]["eps"] = 5e-7
    optimizer.param_groups[1]["betas"] = [0.4, 0.996]
    rates.end()

    first, second = moving(optimizer)

    assert (0.1, (0.9, 0.999)) == (first["lr"], first["betas"])
    assert pytest.approx(1e-6, rel=1e-15) == first["eps"]
    assert (0.01, 1e-8) == (second["lr"], second["eps"])
    assert pytest.approx((0.85, 0.999)) == second["betas"]
    assert pytest.approx((0.4, 0.996)) == shown(optimizer, rates)[1]["betas"]


def test_moments_without_a_base_are_refused() -> None:
    optimizer = make("adam_sde")
    before = moving(optimizer)
    rates = attached(optimizer, "adam_sde", 0.25)
    rates.begin()
    optimizer.param_groups[0]["betas"] = (0.5, 0.999)

    for call in (lambda: rates.base_state_dict(optimizer, optimizer.state_dict()), rates.end):
        with pytest.raises(ValueError, match=r"not feasible at scale 4 with beta1=0\.5"):
            call()
    assert before == moving(optimizer)


def test_groups_added_later_are_scaled() -> None:
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(2)], lr=0.1)
    rates = attached(optimizer)
    step(optimizer, rates)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5})

    assert pytest.approx([0.4, 0.4, 2.0]) == lrs(optimizer, rates)
    del optimizer.param_groups[0]
    rates.set_scale(2)
    assert pytest.approx([0.2, 1.0]) == lrs(optimizer, rates)
    assert [0.1, 0.5] == lrs(optimizer)


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

    for factor, schedule in ((1, 0.5), (2.5, 0.25), (4, 0.125)):
        before = weight.item()
        step(optimizer, rates)
        rates.begin()
        written = [lr.item() for lr in held]
        state = rates.base_state_dict(optimizer, optimizer.state_dict())["param_groups"]
        rates.end()
        assert [schedule] * 2 == [group["lr"].item() for group in state] == lrs(optimizer)
        assert weight.item() == before - factor * schedule
        assert [schedule * {1: 2.5, 2.5: 4, 4: 4}[factor]] * 2 == written
        if not shared:
            scheduler.step()
        else:
            held[0].mul_(0.5)
    rates.begin()
    held[0].fill_(3.0)
    rates.end()
    assert 0.75 == held[0].item()
    assert 3.0 == rates.of(optimizer)[0]
    assert all(group["lr"] is tensor for group, tensor in zip(optimizer.param_groups, held, strict=True))


def test_infeasible_scales_are_refused_before_any_group_changes() -> None:
    optimizer = make("adam_sde")
    before = moving(optimizer)
    rates, later = attached(optimizer, "adam_sde", 2), LearningRates("adam_sde")
    later.set_scale(10)

    for call in (lambda: rates.set_scale(10), lambda: later.attach([optimizer])):
        with pytest.raises(ValueError, match=r"Adam, parameter group 0: .*scale 10 .*beta1=0\.9.*below 10"):
            call()
        assert before == moving(optimizer)


@pytest.mark.parametrize(("name", "smallest"), [("OneCycleLR", 0.85), ("CyclicLR", 0.8)])
def test_betas_that_a_schedule_will_reach_are_checked_at_the_start(name: str, smallest: float) -> None:
    optimizer = make("adam_sde")
    SCHEDULERS[name](optimizer)
    with pytest.raises(ValueError, match=rf"parameter group 0: .*scale 7 with beta1={smallest}"):
        attached(optimizer, "adam_sde", 7)


def test_a_schedule_that_becomes_infeasible_is_refused() -> None:
    optimizer = make("adam_sde")
    rates = attached(optimizer, "adam_sde", 4)
    optimizer.param_groups[1]["betas"] = (0.5, 0.999)
    before = moving(optimizer)

    for begin in (rates.begin, lambda: rates.of(optimizer)):
        with pytest.raises(ValueError, match=r"Adam, parameter group 1: .*scale 4 with beta1=0\.5"):
            begin()
    assert before == moving(optimizer)
