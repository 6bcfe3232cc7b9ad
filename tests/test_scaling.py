"""Scalings: the published formulas, warm-up, what is counted in steps, and what is refused."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Adam, AdamW, NAdam, RMSprop

from lightning_gradavg.rates.scaling import SCALINGS, resolve_scaling, scale_limit, scaled_steps, warmup_factor

ADAM: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}


def param_group(optimizer: Any, **options: Any) -> dict[str, Any]:
    group: dict[str, Any]
    (group,) = optimizer(
        [torch.nn.Parameter(torch.zeros(1))], **{"lr": 0.1, "weight_decay": 0.1, **options}
    ).param_groups
    return group


def cube_root(scale: float) -> float:
    return math.pow(scale, 1 / 3)


@pytest.mark.parametrize(
    ("lr_scaling", "optimizer", "scale", "expected"),
    [
        ("none", SGD, 8, {"lr": 0.1}),
        *(("linear", optimizer, 8, {"lr": 0.8}) for optimizer in (SGD, Adam)),
        *(("sqrt", optimizer, 4, {"lr": 0.2}) for optimizer in (SGD, Adam)),
        (cube_root, SGD, 8, {"lr": 0.2}),
        *(
            ("adam_sde", optimizer, 4, {"lr": 0.2, "betas": (0.6, 0.996), "eps": 5e-9})
            for optimizer in (Adam, AdamW, NAdam)
        ),
        ("adam_sde", RMSprop, 4, {"lr": 0.2, "alpha": 0.96, "eps": 5e-9}),
    ],
)
def test_groups_of_torch_are_scaled(lr_scaling: Any, optimizer: Any, scale: float, expected: dict[str, Any]) -> None:
    scaling = resolve_scaling(lr_scaling)
    assert scaling.hyperparameters(scale, param_group(optimizer)) == expected
    assert scaling.name == getattr(lr_scaling, "__name__", lr_scaling)


@st.composite
def feasible(draw: st.DrawFn) -> tuple[float, list[float]]:
    """Return a scale and betas of at least 0.5 for which "adam_sde" is feasible."""
    scale = draw(st.floats(1 / 64, 64))
    smallest = max(0.5, 1 - 0.99 / scale)
    return scale, draw(st.lists(st.floats(smallest, 0.9999), min_size=2, max_size=2))


@pytest.mark.parametrize("name", SCALINGS)
@given(case=feasible(), lr=st.floats(1e-6, 10))
def test_published_formulas_and_back_again(name: str, case: tuple[float, list[float]], lr: float) -> None:
    scale, betas = case
    group: dict[str, Any] = {"lr": lr, "betas": tuple(betas), "eps": 1e-8}
    there = {**group, **SCALINGS[name].hyperparameters(scale, group)}
    back = {**there, **SCALINGS[name].hyperparameters(1 / scale, there)}
    root, sde = math.sqrt(scale), name == "adam_sde"
    assert there["lr"] == pytest.approx(lr * {"none": 1, "linear": scale}.get(name, root), rel=1e-15)
    assert there["eps"] == pytest.approx(1e-8 / root if sde else 1e-8, rel=1e-15)
    moved = [1 - scale * (1 - beta) if sde else beta for beta in betas]
    assert there["betas"] == pytest.approx(moved, rel=0, abs=4e-16 * max(1, scale))
    assert (back["lr"], back["eps"]) == pytest.approx((lr, 1e-8), rel=1e-15)
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
        SCALINGS["adam_sde"].hyperparameters(limit, group)
    below = SCALINGS["adam_sde"].hyperparameters(math.nextafter(limit, 0), group)
    assert min(below.get("betas", (below.get("alpha"),))) > 0


FACTOR, SCALE, NUMBER = (
    "at scale 8 must be finite and > 0, got",
    "scale must be finite and > 0, got",
    "must be a number",
)
OTHER = "is meant for Adam (betas, eps) and RMSprop (alpha, eps); this optimizer has"


@pytest.mark.parametrize(
    ("lr_scaling", "group", "scale", "error", "said"),
    [
        *(
            ("adam_sde", param_group(kind), 2, ValueError, OTHER)
            for kind in (SGD, torch.optim.ASGD, torch.optim.Adagrad)
        ),
        ("adam_sde", {"lr": 0.1, "betas": (0.9, 0.99)}, 2, ValueError, OTHER),  # Lion
        *((lambda _, value=value: value, ADAM, 8, ValueError, FACTOR) for value in (0.0, math.inf, math.nan)),
        *(
            (lambda _, value=value: value, ADAM, 8, TypeError, f"{NUMBER}, got {value!r}")
            for value in ("2", None, True)
        ),
        *(("linear", ADAM, scale, ValueError, SCALE) for scale in (0.0, -4.0, math.inf, math.nan)),
    ],
)
def test_what_cannot_be_scaled_is_refused(lr_scaling: Any, group: Any, scale: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        resolve_scaling(lr_scaling).hyperparameters(scale, group)


def test_gradual_warmup_values() -> None:
    assert [warmup_factor(4.0, step, 3) for step in range(6)] == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]
    assert [warmup_factor(0.5, step, 2) for step in range(4)] == [1.0, 0.75, 0.5, 0.5]
    assert warmup_factor(4.0, 0, 0) == 4.0


def test_steps_shrink_with_the_scale() -> None:
    pairs = ((1000, 4.0), (5, 2.0), (1, 64.0), (0, 4.0), (100, 0.25))
    assert [scaled_steps(steps, scale) for steps, scale in pairs] == [250, 3, 1, 0, 400]
