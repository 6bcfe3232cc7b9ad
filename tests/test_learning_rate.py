"""Learning rates: effective = factor * schedule for every scheduler, base units in all that is saved, and no trace."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
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


class LegacyScheduler(lr_scheduler._LRScheduler):
    """A scheduler of a user on torch's legacy base class, which reads what stands in the group."""

    def get_lr(self) -> list[Any]:
        return [group["lr"] * (1 if self.last_epoch == 0 else 0.9) for group in self.optimizer.param_groups]


class OwnRecursion:
    """A scheduler of a user who derives from nothing and names the optimizer as they like."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.mine = optimizer

    def step(self) -> None:
        for group in self.mine.param_groups:
            group["lr"] *= 0.9


class OwnClosedForm(OwnRecursion):
    steps = 0

    def step_update(self) -> None:
        self.steps += 1
        for index, group in enumerate(self.mine.param_groups):
            group["lr"] = 0.1 / (self.steps + index)


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
    "legacy": LegacyScheduler,
    "own_recursion": OwnRecursion,
    "own_closed_form": OwnClosedForm,
}
WITH_STATE = [name for name in SCHEDULERS if not name.startswith("own")]
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
    optimizer.step()
    if rates is not None:
        rates.advance(optimizer)


def step_scheduler(scheduler: Any, count: int) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0 / count if count < 3 else 1.0)
    else:
        getattr(scheduler, "step_update", scheduler.step)()


def moving(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    names = ("lr", "betas", "alpha", "eps", "momentum")
    return [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]


def run(optimizer: Any, scheduler: Any, rates: LearningRates | None, counts: range) -> list[list[dict[str, Any]]]:
    """Return what the groups hold after each step."""
    held = []
    for count in counts:
        step(optimizer, rates)
        step_scheduler(scheduler, count)
        held.append(copy.deepcopy(moving(optimizer)))
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


def lrs(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


# What a scheduler does in base units does not depend on the scaling, except that two of them move the betas, too.
@pytest.mark.parametrize(
    ("name", "lr_scaling", "warmup"),
    [
        *((name, "linear", 5) for name in SCHEDULERS),
        *((name, "adam_sde", warmup) for name in MOVES_BETA for warmup in (0, 5)),
        *(("StepLR", lr_scaling, 0) for lr_scaling in FACTORS),
        ("StepLR", "sqrt", 5),
    ],
)
def test_effective_is_factor_times_schedule(name: str, lr_scaling: str, warmup: int) -> None:
    """Case 22: with every scheduler the groups hold, after each step, the factor times what an unscaled run holds."""
    optimizer, twin = make(lr_scaling), make(lr_scaling)
    scheduler, twin_scheduler = SCHEDULERS[name](optimizer), SCHEDULERS[name](twin)
    rates = attached(optimizer, lr_scaling, 4, warmup)
    rates.watch(scheduler)
    schedule = set()

    for count in range(1, STEPS + 1):
        (got,) = run(optimizer, scheduler, rates, range(count, count + 1))
        (base,) = run(twin, twin_scheduler, None, range(count, count + 1))

        assert [effective(lr_scaling, 4, count, warmup, group) for group in base] == got
        with rates.in_base_units():
            assert base == moving(optimizer), "the schedule must see the bits of the unscaled run"
        schedule.add(base[0]["lr"])

    assert len(schedule) > 1, "a schedule that does not move proves nothing"


@pytest.mark.parametrize("name", WITH_STATE)
def test_a_resume_at_another_scale_computes_its_own_factor(name: str) -> None:
    """Saved at scale 4 in the middle and resumed at scale 2, a run goes on with factor 2 of the unscaled schedule."""
    twin = make()
    base = run(twin, SCHEDULERS[name](twin), None, range(1, STEPS + 1))
    optimizer = make()
    scheduler = SCHEDULERS[name](optimizer)
    rates = attached(optimizer, "linear", 4, warmup=20)
    rates.watch(scheduler)
    run(optimizer, scheduler, rates, range(1, 14))
    saved = io.BytesIO()
    torch.save(
        [rates.base_state_dict(optimizer, optimizer.state_dict()), scheduler.state_dict(), rates.state_dict()], saved
    )
    saved.seek(0)
    # SWALR of torch 2.4 keeps a function in its state.
    state, scheduler_state, counters = torch.load(saved, weights_only=name != "SWALR")

    optimizer = make()
    scheduler = SCHEDULERS[name](optimizer)
    rates = attached(optimizer, "linear", 2, warmup=20)
    rates.watch(scheduler)
    optimizer.load_state_dict(state)
    rates.reload(optimizer)
    scheduler.load_state_dict(scheduler_state)
    rates.load_state_dict(counters)
    got = [lrs(optimizer)] + [[float(g["lr"]) for g in now] for now in run(optimizer, scheduler, rates, range(14, 31))]

    expected = [
        [float(group["lr"]) * factor_at("linear", 2, count, 20) for group in now]
        for count, now in enumerate(base[12:], start=13)
    ]
    assert len(got) == 18
    assert got == [pytest.approx(now, rel=1e-12, abs=1e-18) for now in expected]


@pytest.mark.parametrize(
    ("name", "lr_scaling"), [*((name, "linear") for name in WITH_STATE), *((name, "adam_sde") for name in MOVES_BETA)]
)
def test_saved_states_are_those_of_an_unscaled_run(name: str, lr_scaling: str) -> None:
    """The states of optimizer and scheduler hold what a stock run saves, and saving changes no group."""
    optimizer, twin = make(lr_scaling), make(lr_scaling)
    scheduler, twin_scheduler = SCHEDULERS[name](optimizer), SCHEDULERS[name](twin)
    rates = attached(optimizer, lr_scaling, 4, warmup=5)
    rates.watch(scheduler)
    run(optimizer, scheduler, rates, range(1, 14))
    run(twin, twin_scheduler, None, range(1, 14))
    before = copy.deepcopy(moving(optimizer))

    state = rates.base_state_dict(optimizer, optimizer.state_dict())

    assert twin.state_dict()["param_groups"] == state["param_groups"]
    assert before == moving(optimizer)
    assert optimizer.state_dict()["param_groups"] != state["param_groups"]
    assert twin_scheduler.state_dict() == scheduler.state_dict()
    assert {*vars(twin_scheduler)} == {*vars(scheduler)}


@pytest.mark.parametrize("lr_scaling", ["linear", "adam_sde"])
def test_a_resume_at_the_base_scale_needs_no_learning_rates(lr_scaling: str) -> None:
    """A stock run, with none of this, goes on from what was saved as if the run had never been scaled."""
    optimizer, twin, stock = make(lr_scaling), make(lr_scaling), make(lr_scaling)
    scheduler, twin_scheduler = (SCHEDULERS["OneCycleLR"](o) for o in (optimizer, twin))
    rates = attached(optimizer, lr_scaling, 4)
    rates.watch(scheduler)
    run(optimizer, scheduler, rates, range(1, 14))
    stock_scheduler = SCHEDULERS["OneCycleLR"](stock)

    stock.load_state_dict(rates.base_state_dict(optimizer, optimizer.state_dict()))
    stock_scheduler.load_state_dict(scheduler.state_dict())

    expected = run(twin, twin_scheduler, None, range(1, 31))[13:]
    assert expected == run(stock, stock_scheduler, None, range(14, 31))


@pytest.mark.parametrize(
    ("lr_scaling", "expected"), [("linear", [0.4, 0.04]), ("sqrt", [0.2, 0.02]), ("none", [0.1, 0.01])]
)
def test_all_groups_are_scaled(lr_scaling: str, expected: list[float]) -> None:
    """Case 20: at scale 4 groups of 0.1 and 0.01 show 0.4 and 0.04, 0.2 and 0.02, or what they were."""
    optimizer = make()

    rates = attached(optimizer, lr_scaling, 4)

    assert expected == lrs(optimizer)
    assert 4 == rates.scale


def test_step_lr_by_hand() -> None:
    """Case 22: StepLR(2, 0.1) from 0.1 at scale 4 shows 0.4, 0.4, 0.04, 0.04, 0.004."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 2, 0.1)
    rates = attached(optimizer)
    rates.watch(scheduler)

    shown = lrs(optimizer) + [now[0]["lr"] for now in run(optimizer, scheduler, rates, range(1, 5))]

    assert pytest.approx([0.4, 0.4, 0.04, 0.04, 0.004], rel=1e-12) == shown
    assert [0.1] == scheduler.base_lrs
    assert pytest.approx([0.001]) == scheduler.get_last_lr()


def test_warmup_by_hand() -> None:
    """From 0.1 to 0.4 in 3 steps: 0.1, 0.2, 0.3, 0.4, then constant (Goyal et al. 2017)."""
    optimizer = make()
    rates = attached(optimizer, warmup=3)
    shown = [lrs(optimizer)]
    for _ in range(5):
        step(optimizer, rates)
        shown.append(lrs(optimizer))

    assert pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4], rel=1e-15) == [lr for lr, _ in shown]
    assert pytest.approx([0.01, 0.02, 0.03, 0.04, 0.04, 0.04], rel=1e-15) == [lr for _, lr in shown]


def test_optimizers_count_their_own_steps() -> None:
    """Warm-up follows the steps of each optimizer, and the counters are saved in order."""
    often, seldom = make(), make()
    rates = LearningRates("linear", 4)
    rates.attach([often, seldom, often])
    rates.set_scale(5)

    for _ in range(3):
        step(often, rates)
    step(seldom, rates)

    assert [0.4, 0.2] == pytest.approx([lrs(often)[0], lrs(seldom)[0]])
    assert {"steps": [3, 1]} == rates.state_dict()


def test_a_changed_scale_is_computed_from_the_base() -> None:
    """Scales that follow each other do not compound, and scale 1 gives back the very base values."""
    optimizer = make("adam_sde")
    before = moving(optimizer)
    rates = attached(optimizer, "adam_sde", 4)

    for scale in (2.0, 3.7, 0.3, 9.0):
        rates.set_scale(scale)
        assert [effective("adam_sde", scale, 0, 0, group) for group in before] == moving(optimizer)
    rates.set_scale(1)

    assert before == moving(optimizer)


def test_what_others_write_is_effective() -> None:
    """A value that a callback writes stays as written, and its base is the value / the factor in force."""
    optimizer = make()
    rates = attached(optimizer, "linear", 3, warmup=2)
    step(optimizer, rates)
    group = optimizer.param_groups[0]
    group["lr"] = 0.7

    rates.refresh()
    assert 0.7 == group["lr"]
    assert (
        pytest.approx(0.35, rel=1e-15)
        == rates.base_state_dict(optimizer, optimizer.state_dict())["param_groups"][0]["lr"]
    )
    step(optimizer, rates)
    assert pytest.approx(1.05, rel=1e-15) == group["lr"]
    step(optimizer, rates)
    assert pytest.approx(1.05, rel=1e-15) == group["lr"]
    assert pytest.approx(0.03) == lrs(optimizer)[1]


def test_a_written_value_keeps_its_bits() -> None:
    """Case 24: the rate that a finder sets is used exactly, also where value / factor * factor is another number."""
    value = next(v for v in (n / 1000 for n in range(1, 1000)) if v / 49 * 49 != v)
    optimizer = make()
    rates = attached(optimizer, "linear", 49)
    for group in optimizer.param_groups:
        group["lr"] = value

    for _ in range(3):
        rates.refresh()
        step(optimizer, rates)

    assert [value, value] == lrs(optimizer)


def test_nothing_is_written_while_the_factor_stays() -> None:
    """After the warm-up a step leaves the very objects in the groups."""
    optimizer = make()
    rates = attached(optimizer, "linear", 3, warmup=2)
    for _ in range(2):
        step(optimizer, rates)
    held = [group["lr"] for group in optimizer.param_groups]

    step(optimizer, rates)

    assert all(group["lr"] is lr for group, lr in zip(optimizer.param_groups, held, strict=True))


def test_moments_that_others_write_are_effective() -> None:
    """Betas and eps that a callback writes are taken by the inverse of the rule, each for itself."""
    optimizer = make("adam_sde")
    rates = attached(optimizer, "adam_sde", 4)
    optimizer.param_groups[0]["eps"] = 5e-7
    optimizer.param_groups[1]["betas"] = [0.4, 0.996]

    first, second = rates.base_state_dict(optimizer, optimizer.state_dict())["param_groups"]

    assert (0.1, (0.9, 0.999)) == (first["lr"], first["betas"])
    assert pytest.approx(1e-6, rel=1e-15) == first["eps"]
    assert (0.01, 1e-8) == (second["lr"], second["eps"])
    assert pytest.approx((0.85, 0.999)) == second["betas"]
    assert [0.4, 0.996] == optimizer.param_groups[1]["betas"]


def test_moments_without_a_base_are_refused() -> None:
    """A beta that no base value leads to is an error that quotes it, before it would be saved."""
    optimizer = make("adam_sde")
    rates = attached(optimizer, "adam_sde", 0.25)
    optimizer.param_groups[0]["betas"] = (0.5, 0.999)

    with pytest.raises(ValueError, match=r"not feasible at scale 4 with beta1=0\.5"):
        rates.base_state_dict(optimizer, optimizer.state_dict())


def test_groups_added_later_are_scaled() -> None:
    """A group of add_param_group holds base values, its own or those of the optimizer's defaults."""
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(2)], lr=0.1)
    rates = attached(optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5})

    rates.refresh()

    assert pytest.approx([0.4, 0.4, 0.4, 2.0]) == lrs(optimizer)
    step(optimizer, rates)
    with rates.in_base_units():
        assert [0.1, 0.1, 0.1, 0.5] == lrs(optimizer)
    assert pytest.approx([0.4, 0.4, 0.4, 2.0]) == lrs(optimizer)
    del optimizer.param_groups[0]
    rates.set_scale(2)
    assert pytest.approx([0.2, 0.2, 1.0]) == lrs(optimizer)


def test_a_loaded_optimizer_holds_base_values() -> None:
    """What load_state_dict put into an optimizer is base units even before reload is called."""
    optimizer, other = make(), make()
    rates = attached(optimizer)
    other.param_groups[0]["lr"] = 0.3

    optimizer.load_state_dict(other.state_dict())

    assert [0.3, 0.01] == [
        group["lr"] for group in rates.base_state_dict(optimizer, optimizer.state_dict())["param_groups"]
    ]
    rates.reload(optimizer)
    assert pytest.approx([1.2, 0.04]) == lrs(optimizer)


def test_reload_takes_values_written_in_place_as_base() -> None:
    """An optimizer that keeps its groups when it loads is in base units after reload."""
    optimizer = make()
    rates = attached(optimizer)
    optimizer.param_groups[0]["lr"] = 0.2

    rates.reload(optimizer)

    assert pytest.approx([0.8, 0.16]) == lrs(optimizer)


def test_base_units_can_be_nested() -> None:
    """Only the outermost context writes effective values again, also after an error and a changed scale within."""
    optimizer = make()
    rates = attached(optimizer)

    def fail() -> None:
        with rates.in_base_units(), rates.in_base_units():
            rates.set_scale(2)
            rates.advance(optimizer)
            assert [0.1, 0.01] == lrs(optimizer)
            optimizer.param_groups[0]["lr"] = 0.3
            raise KeyError("inner")

    with rates.in_base_units():
        with rates.in_base_units():
            pass
        assert [0.1, 0.01] == lrs(optimizer)
    assert [0.4, 0.04] == lrs(optimizer)
    with pytest.raises(KeyError, match="inner"):
        fail()
    assert [0.6, 0.02] == lrs(optimizer)


def test_inner_schedulers_may_be_watched_too() -> None:
    """SequentialLR and its inner schedulers, all watched, give the same learning rates as the outer one alone."""
    optimizer, twin = make(), make()
    scheduler, twin_scheduler = sequential(optimizer), sequential(twin)
    rates = attached(optimizer, "linear", 4)
    for watched in (*scheduler._schedulers, scheduler, scheduler):
        rates.watch(watched)

    got = run(optimizer, scheduler, rates, range(1, STEPS + 1))

    base = run(twin, twin_scheduler, None, range(1, STEPS + 1))
    assert [[4 * group["lr"] for group in now] for now in base] == [[group["lr"] for group in now] for now in got]
    assert twin_scheduler.state_dict() == scheduler.state_dict()


@pytest.mark.parametrize("name", WITH_STATE)
def test_pickles_and_copies_are_of_the_own_class(name: str) -> None:
    """A watched scheduler can be pickled and copied; both are stock schedulers, and it stays watched."""
    optimizer, twin = make(), make()
    scheduler = SCHEDULERS[name](optimizer)
    original = type(scheduler)
    rates = attached(optimizer, "linear", 4)
    rates.watch(scheduler)
    run(optimizer, scheduler, rates, range(1, 4))

    for copied in (pickle.loads(pickle.dumps(scheduler)), copy.deepcopy(scheduler), copy.copy(scheduler)):
        assert type(copied) is original
        assert scheduler.state_dict() == copied.state_dict()
    assert isinstance(scheduler, original)
    assert original.__name__ == type(scheduler).__name__
    twin_scheduler = SCHEDULERS[name](twin)
    run(twin, twin_scheduler, None, range(1, 4))
    base = run(twin, twin_scheduler, None, range(4, 9))
    assert [[4 * group["lr"] for group in now] for now in base] == [
        [group["lr"] for group in now] for now in run(optimizer, scheduler, rates, range(4, 9))
    ]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_detach_restores_everything(name: str) -> None:
    """After detach, class, attributes and values are those of a run that was never scaled, and it goes on as such."""
    optimizer, twin = make(), make()
    scheduler, twin_scheduler = SCHEDULERS[name](optimizer), SCHEDULERS[name](twin)
    rates = attached(optimizer, "linear", 4)
    rates.watch(scheduler)
    run(optimizer, scheduler, rates, range(1, 9))
    run(twin, twin_scheduler, None, range(1, 9))

    rates.detach()

    assert type(scheduler) is type(twin_scheduler)
    assert {*vars(twin_scheduler)} == {*vars(scheduler)}
    assert moving(twin) == moving(optimizer)
    expected = run(twin, twin_scheduler, None, range(9, STEPS))
    assert expected == run(optimizer, scheduler, None, range(9, STEPS))


def test_optimizers_that_are_not_attached_are_refused() -> None:
    """A step of an optimizer that is detached, or that another took the place of, is an error."""
    optimizer, other = make(), make("adam_sde")
    rates = attached(optimizer)
    step(optimizer, rates)

    rates.attach([other, optimizer])
    assert {"steps": [0, 1]} == rates.state_dict()
    rates.attach([other])
    with pytest.raises(ValueError, match=r"This SGD is not attached; attached are \['Adam'\]"):
        rates.advance(optimizer)
    rates.detach()
    with pytest.raises(ValueError, match="This Adam is not attached"):
        rates.advance(other)


@pytest.mark.parametrize(("lr_scaling", "scale"), [("none", 4), ("linear", 1), ("adam_sde", 1), (lambda k: 1.0, 4)])
def test_a_factor_of_one_changes_nothing(lr_scaling: Any, scale: float) -> None:
    """Where effective values are base values, every value in a group keeps its bits, whatever the warm-up."""
    optimizer = make("adam_sde")
    before = [dict(group) for group in optimizer.param_groups]

    rates = attached(optimizer, lr_scaling, scale, warmup=5)
    step(optimizer, rates)
    assert before == optimizer.param_groups
    with rates.in_base_units():
        assert before == optimizer.param_groups
    rates.reload(optimizer)
    rates.detach()

    assert before == optimizer.param_groups


def test_a_function_of_the_user_scales() -> None:
    """lr_scaling may be a function of the scale."""
    optimizer = make()

    attached(optimizer, lambda scale: scale**0.75, 16)

    assert pytest.approx([0.8, 0.08]) == lrs(optimizer)


def test_rmsprop_follows_the_sde() -> None:
    """With RMSprop at scale 4 lr doubles, 1 - alpha is 4 times larger and eps halves; momentum stays."""
    optimizer = torch.optim.RMSprop([torch.nn.Parameter(torch.ones(1))], lr=0.1, alpha=0.99, eps=1e-8, momentum=0.5)
    scheduler = lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, 2, base_momentum=0.3, max_momentum=0.5)
    rates = attached(optimizer, "adam_sde", 4)
    rates.watch(scheduler)
    step(optimizer, rates)
    scheduler.step()

    assert [{"lr": 0.3, "alpha": 0.96, "eps": 5e-9, "momentum": 0.4}] == [
        pytest.approx(group) for group in moving(optimizer)
    ]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_gets_no_momentum_correction(momentum: float) -> None:
    """In a warm-up SGD makes v = m v + g and w = w - lr(t) v with the unchanged m: its buffer does not contain lr."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum)
    rates = attached(optimizer, "linear", 4, warmup=5)
    expected, velocity = 0.0, 0.0

    for count in range(8):
        gradient = 1.0 + count
        velocity = momentum * velocity + gradient
        expected -= 0.1 * (1 + 3 * min(count / 5, 1)) * velocity
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        rates.advance(optimizer)

        assert pytest.approx(expected, rel=1e-14) == weight.item()
        assert momentum == optimizer.param_groups[0]["momentum"]


@pytest.mark.parametrize("order", ["attach_first", "scale_first"])
def test_infeasible_scales_are_refused_before_anything_changes(order: str) -> None:
    """At scale 10 beta1=0.9 has no SDE value: the error names group and limit, and all values stay."""
    optimizer = make("adam_sde")
    before = moving(optimizer)
    rates = LearningRates("adam_sde")
    if order == "attach_first":
        rates.attach([optimizer])
        rates.set_scale(2)
        shown = moving(optimizer)
        with pytest.raises(ValueError, match=r"Adam, parameter group 0: .*scale 10 .*beta1=0\.9.*below 10"):
            rates.set_scale(10)
        assert (2, shown) == (rates.scale, moving(optimizer))
    else:
        rates.set_scale(10)
        with pytest.raises(ValueError, match=r"Adam, parameter group 0: .*scale 10 .*beta1=0\.9.*below 10"):
            rates.attach([optimizer])
        assert before == moving(optimizer)
        assert {"steps": []} == rates.state_dict()


@pytest.mark.parametrize("name", MOVES_BETA)
def test_betas_that_a_schedule_will_use_are_checked(name: str) -> None:
    """Scale 7 suits the first beta1 but not the 0.85 or 0.8 that the schedule moves to: an error before training."""
    smallest = {"OneCycleLR": 0.85, "CyclicLR": 0.8}[name]
    optimizer = make("adam_sde")
    SCHEDULERS[name](optimizer)
    with pytest.raises(ValueError, match=rf"cycle_momentum.*scale 7 .*beta1={smallest}"):
        attached(optimizer, "adam_sde", 7)


def test_a_schedule_that_becomes_infeasible_leaves_base_values() -> None:
    """A scheduler that takes beta1 out of reach fails in its step, and what is saved then is in base units."""
    optimizer = make("adam_sde")

    class Lowers:
        def step(self) -> None:
            optimizer.param_groups[1]["betas"] = (0.5, 0.999)

    scheduler = Lowers()
    rates = attached(optimizer, "adam_sde", 4)
    rates.watch(scheduler)

    with pytest.raises(ValueError, match=r"scale 4 with beta1=0\.5"):
        scheduler.step()

    saved = rates.base_state_dict(optimizer, optimizer.state_dict())["param_groups"]
    assert [(0.1, (0.9, 0.999)), (0.01, (0.5, 0.999))] == [(group["lr"], group["betas"]) for group in saved]


def test_optimizers_that_the_scaling_does_not_fit_are_refused() -> None:
    """adam_sde with SGD is refused at once, also at scale 1, so that one device says what a cluster would."""
    with pytest.raises(ValueError, match=r"SGD, parameter group 0: .*meant for Adam"):
        LearningRates("adam_sde").attach([make()])


def test_tensor_learning_rates_are_refused() -> None:
    """A learning rate that is a tensor, which groups of one optimizer share, is an error at once, also at scale 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=torch.tensor(0.1))

    with pytest.raises(TypeError, match=r"must be a number, got tensor\(0\.1000\)\. Use lr\.item\(\)"):
        LearningRates("linear").attach([optimizer])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (("linaer", 0), ValueError, "'linaer' is not a scaling. Use one of 'none'"),
        ((3, 0), TypeError, "lr_scaling must be one of .*; got 3"),
        (("linear", -1), ValueError, "lr_warmup_steps must be an integer >= 0, got -1"),
        (("linear", 2.5), TypeError, "lr_warmup_steps must be an integer >= 0, got 2.5 of type float"),
        (("linear", True), TypeError, "lr_warmup_steps must be an integer >= 0, got True of type bool"),
    ],
)
def test_options_are_checked(options: tuple[Any, Any], error: type[Exception], message: str) -> None:
    """Options that cannot be are errors that quote the value."""
    with pytest.raises(error, match=message):
        LearningRates(*options)


class Counted(OwnRecursion):
    def __init_subclass__(cls, *, key: str) -> None:
        """Ask every subclass for a key, as a registry of a user does."""


class Mine(Counted, key="mine"):
    """A scheduler in such a registry."""


def test_what_cannot_be_watched_is_refused() -> None:
    """Objects without a step, built-in ones, with a step of their own or watched by others: errors with a way out."""
    optimizer = make()
    scheduler, patched = OwnRecursion(optimizer), OwnRecursion(optimizer)
    vars(patched)["step"] = lambda: None
    rates, others = attached(optimizer), LearningRates("linear")

    rates.watch(scheduler)
    with pytest.raises(TypeError, match=r"OwnRecursion is watched by another LearningRates; call its detach\(\)"):
        others.watch(scheduler)
    with pytest.raises(TypeError, match=r"object has no method 'step' or 'step_update'\. Wrap .*\.in_base_units\("):
        rates.watch(object())
    with pytest.raises(
        TypeError, match=r"This OwnRecursion holds step in the object, before .*\. Wrap .*in_base_units"
    ):
        rates.watch(patched)
    with pytest.raises(TypeError, match=r"A Mine cannot be watched: .*'key'\. Wrap .*\.in_base_units\("):
        rates.watch(Mine(optimizer))
    with pytest.raises(TypeError, match=r"A range cannot be watched: .*\. Wrap .*\.in_base_units\("):
        rates.watch(range(3))  # it has a `step`, and a class that Python does not let change


def test_states_of_other_runs_and_impossible_scales_are_refused() -> None:
    """Counters of another number of optimizers, and a scale of 0, are errors that change nothing."""
    optimizer = make()
    rates = attached(optimizer)

    with pytest.raises(ValueError, match=r"steps \[1, 2\] are of 2 optimizers, and 1 are attached"):
        rates.load_state_dict({"steps": [1, 2]})
    with pytest.raises(ValueError, match="scale must be finite and > 0, got 0"):
        rates.set_scale(0)

    assert ({"steps": [0]}, 4.0, [0.4, 0.04]) == (rates.state_dict(), rates.scale, lrs(optimizer))


def test_a_given_state_is_copied() -> None:
    """The state that a strategy gives is used, with base values in a copy."""
    optimizer = make()
    rates = attached(optimizer)
    given = {"state": {}, "param_groups": [{"lr": 9.0, "extra": 1}, {"lr": 9.0}]}

    assert [{"lr": 0.1, "extra": 1}, {"lr": 0.01}] == rates.base_state_dict(optimizer, given)["param_groups"]
    assert 9.0 == given["param_groups"][0]["lr"]
