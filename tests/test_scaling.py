"""Scalings: the factor of the learning rate, Adam's SDE rule, warm-up, and what is counted in steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gradavg.rates.scaling import SCALINGS, resolve_scaling, scale_limit, scaled_steps, warmup_factor

SDE = SCALINGS["adam_sde"]
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
SCALES = st.floats(1 / 64, 64)


@st.composite
def feasible(draw: st.DrawFn) -> tuple[float, tuple[float, float]]:
    """Return a scale and betas of at least 0.5 for which "adam_sde" is feasible."""
    scale = draw(SCALES)
    smallest = max(0.5, 1 - 0.99 / scale)
    return scale, draw(st.tuples(st.floats(smallest, 0.9999), st.floats(smallest, 0.9999)))


def param_group(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> dict[str, Any]:
    (group,) = optimizer([torch.nn.Parameter(torch.zeros(1))], lr=0.1, **options).param_groups
    return group


@pytest.mark.parametrize("name", SCALINGS)
@given(scale=SCALES, larger=SCALES)
def test_factors_are_monotonic_and_one_at_scale_one(name: str, scale: float, larger: float) -> None:
    low, high = sorted((scale, larger))
    assert SCALINGS[name].at(low) <= SCALINGS[name].at(high)
    assert SCALINGS[name].at(1.0) == 1.0


@pytest.mark.parametrize(
    ("optimizer", "smoothing", "scaled"),
    [
        *((each, "betas", (0.8, 0.998)) for each in (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam)),
        (torch.optim.RMSprop, "alpha", 0.98),
    ],
)
def test_adam_sde_reads_the_groups_of_torch(optimizer: Any, smoothing: str, scaled: Any) -> None:
    found = SDE.hyperparameters(2.0, param_group(optimizer, weight_decay=0.1))
    assert found == {"lr": 0.1 * math.sqrt(2), smoothing: scaled, "eps": 1e-8 / math.sqrt(2)}


@given(case=feasible())
def test_adam_sde_keeps_the_invariants_of_the_equation(case: tuple[float, tuple[float, float]]) -> None:
    scale, betas = case
    scaled = SDE.hyperparameters(scale, {**ADAM, "betas": betas})
    assert scaled["lr"] ** 2 / scale == pytest.approx(ADAM["lr"] ** 2, rel=1e-15)
    assert scaled["lr"] * scaled["eps"] == pytest.approx(ADAM["lr"] * ADAM["eps"], rel=1e-15)
    for beta, moved in zip(betas, scaled["betas"], strict=True):
        assert float(1 - Fraction(moved)) == pytest.approx(scale * (1 - beta), abs=2e-16 * max(1, scale))


@pytest.mark.parametrize("name", SCALINGS)
@given(case=feasible(), lr=st.floats(1e-6, 10))
def test_there_and_back_again(name: str, case: tuple[float, tuple[float, float]], lr: float) -> None:
    scale, betas = case
    group: dict[str, Any] = {"lr": lr, "betas": betas, "eps": 1e-8}
    there = {**group, **SCALINGS[name].hyperparameters(scale, group)}
    back = {**there, **SCALINGS[name].hyperparameters(1 / scale, there)}
    assert back["lr"] == pytest.approx(lr, rel=1e-15)
    assert back["eps"] == pytest.approx(1e-8, rel=1e-15)
    assert back["betas"] == pytest.approx(betas, rel=1e-15 * max(1.0, 1 / scale))


@pytest.mark.parametrize(
    ("group", "limit"),
    [
        (ADAM, 10),
        ({**ADAM, "betas": (0.95, 0.9)}, 10),
        ({**ADAM, "betas": (0.975, 0.999)}, 40),
        ({"lr": 0.1, "alpha": 0.99, "eps": 1e-8}, 100),
    ],
)
def test_an_infeasible_scale_is_refused_with_the_largest_feasible_one(group: dict[str, Any], limit: int) -> None:
    assert scale_limit(group) == limit
    with pytest.raises(ValueError, match=rf"not feasible at scale {limit} .* must stay below {limit}\. Use a smaller"):
        SDE.hyperparameters(limit, group)
    below = SDE.hyperparameters(math.nextafter(limit, 0), group)
    assert min(below.get("betas", (below.get("alpha"),))) > 0


@pytest.mark.parametrize(
    "group",
    [
        param_group(torch.optim.SGD, momentum=0.9),
        param_group(torch.optim.ASGD),
        param_group(torch.optim.Adagrad),
        {"lr": 0.1, "betas": (0.9, 0.99)},
    ],
    ids=["sgd", "asgd", "adagrad", "lion"],
)
def test_adam_sde_is_refused_for_other_optimizers(group: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is meant for Adam .* this optimizer has .*lr"):
        SDE.hyperparameters(2.0, group)


def cube_root(scale: float) -> float:
    return math.pow(scale, 1 / 3)


def test_a_function_is_a_scaling() -> None:
    assert ("cube_root", {"lr": 2e-3}) == (
        resolve_scaling(cube_root).name,
        resolve_scaling(cube_root).hyperparameters(8.0, ADAM),
    )


@pytest.mark.parametrize(
    ("scale", "returned", "error", "said"),
    [
        *((8, value, ValueError, "wrong' at scale 8 must be finite and > 0, got") for value in (0.0, math.inf)),
        (8, math.nan, ValueError, "wrong' at scale 8 must be finite and > 0, got nan"),
        *((8, value, TypeError, f"must be a number, got {value!r} of type") for value in ("2", None, True)),
        *((scale, 1.0, ValueError, "scale must be finite and > 0, got") for scale in (0.0, -4.0, math.inf, math.nan)),
    ],
)
def test_impossible_scales_and_factors_are_refused(
    scale: float, returned: Any, error: type[Exception], said: str
) -> None:
    def wrong(scale: float) -> Any:
        return returned

    with pytest.raises(error, match=said):
        resolve_scaling(wrong).at(scale)


def test_gradual_warmup_values() -> None:
    assert [warmup_factor(4.0, step, 3) for step in range(6)] == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]
    assert [warmup_factor(0.5, step, 2) for step in range(4)] == [1.0, 0.75, 0.5, 0.5]
    assert warmup_factor(4.0, 0, 0) == 4.0


@pytest.mark.parametrize(
    ("steps", "scale", "expected"), [(1000, 4.0, 250), (5, 2.0, 3), (1, 64.0, 1), (0, 4.0, 0), (100, 0.25, 400)]
)
def test_steps_shrink_with_the_scale(steps: int, scale: float, expected: int) -> None:
    assert scaled_steps(steps, scale) == expected
