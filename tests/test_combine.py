"""What ranks do one by one, over their windows, equals the dense reference, in the corners too."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import CUSTOM, EVERY_RULE, NODE_LAYOUTS, WEIGHTED_RULES, assert_windows_equal_combine

from lightning_gradavg.place import Place, places_on_nodes
from lightning_gradavg.reduction.combine import (
    after_sum,
    combine,
    constant_normalizer,
    depends_on_window,
    share_of,
    unit_above,
    window_ratio,
)
from lightning_gradavg.rules import RULES, Rule, Share

WEIGHTS = st.sampled_from([0.0, 0.0, 1.0, 3.0, 0.125, 4096.0, 1e-3])
UNITS = st.sampled_from([1.0, 8192.0, 2.0**-9])


@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.name)
@given(
    layout=st.sampled_from(NODE_LAYOUTS),
    length=st.integers(1, 4),
    divisor=st.sampled_from([1.0, 3.0]),
    unit=UNITS,
    data=st.data(),
)
def test_windows_equal_the_dense_reference(
    rule: Rule, layout: list[int], length: int, divisor: float, unit: float, data: st.DataObject
) -> None:
    """Case 11: the scaled sum over ranks of their weighed gradients is `combine`, for any window, weight and unit."""
    weights = [data.draw(st.lists(WEIGHTS, min_size=length, max_size=length)) for _ in layout]
    unit = unit if rule.uses_weight else 1.0
    assert_windows_equal_combine(rule, layout, weights, divisor=divisor, unit=unit)


@pytest.mark.parametrize("name", ["sum", "weighted_mean", "normalized_sum"])
@given(lengths=st.lists(st.integers(1, 4), min_size=3, max_size=3), data=st.data())
def test_windows_of_different_lengths(name: str, lengths: list[int], data: st.DataObject) -> None:
    """Rules that do not depend on the length of a window are exact where ranks accumulate differently much."""
    weights = [data.draw(st.lists(WEIGHTS, min_size=length, max_size=length)) for length in lengths]
    assert_windows_equal_combine(RULES[name], [0, 0, 1], weights, divisor=1.0)


@pytest.mark.parametrize("rule", WEIGHTED_RULES, ids=lambda rule: rule.name)
def test_window_that_begins_with_nothing(rule: Rule) -> None:
    """Case 5: a first micro-batch of weight 0, whose gradient is NaN, changes nothing for those after it."""
    for weights in ([[0.0, 4.0], [2.0, 0.0]], [[0.0, 0.0], [0.0, 5.0]], [[0.0, 0.0], [0.0, 0.0]]):
        assert_windows_equal_combine(rule, [0, 1], weights, divisor=2.0, unit=4.0)


def test_which_rules_depend_on_the_window() -> None:
    """A rule depends on the length of the window where its multipliers or its normalizer do."""
    places = places_on_nodes([0, 0, 1])
    expected = {
        "mean": True,
        "sum": False,
        "weighted_mean": False,
        "normalized_sum": False,
        "mean_of_node_sums": False,
        "mean_of_node_means": True,
        "sum_of_node_means": True,
    }
    assert expected == {name: depends_on_window(rule, places) for name, rule in RULES.items()}
    assert depends_on_window(CUSTOM, places)


@pytest.mark.parametrize("window", [1, 3])
def test_constant_normalizers(window: int) -> None:
    """Without weights Z is known beforehand, and exact: W for the mean, 1 for sums, the number of nodes for means."""
    places = places_on_nodes([0, 0, 0, 1, 1, 2])
    expected = {
        "mean": 6.0 * window,
        "sum": 1.0,
        "mean_of_node_sums": 3.0,
        "mean_of_node_means": 3.0,
        "sum_of_node_means": 1.0,
    }
    assert expected == {
        name: constant_normalizer(rule, places, window) for name, rule in RULES.items() if not rule.uses_weight
    }


def test_ratio_of_multipliers() -> None:
    """One vote per node has a third of each multiplier in a window of 3; rules without nodes have all of it."""
    places = places_on_nodes([0, 0, 1])
    thirds = ("mean_of_node_means", "sum_of_node_means", CUSTOM.name)
    for rule in (*RULES.values(), CUSTOM):
        assert pytest.approx(1 / 3 if rule.name in thirds else 1.0) == window_ratio(rule, places, 3)


def test_ratio_that_differs_between_ranks() -> None:
    """Multipliers that follow the window by one factor on some ranks and by another on others cannot be accumulated."""

    def of_rank_0(place: Place, weight: Any) -> Share:
        return Share(1.0 / place.ranks_on_node if place.rank == 0 else 1.0, 1.0)

    rule = Rule("of_rank_0", of_rank_0, uses_weight=False, formula="")
    places = places_on_nodes([0, 0])
    assert 1.0 == window_ratio(rule, places, 1)
    with pytest.raises(ValueError, match=r"'of_rank_0' gives some ranks multipliers 0\.5 times, and others 1 times"):
        window_ratio(rule, places, 2)


@pytest.mark.parametrize(
    "number", [float, lambda value: torch.tensor(value, dtype=torch.float64)], ids=["float", "tensor"]
)
@pytest.mark.parametrize(
    ("normalizer", "divided_by", "expected"),
    [(12.0, 12.0, 1.0), (2.0, 1.0, 0.5), (0.0, 1.0, 0.0), (math.nan, 1.0, 0.0), (math.inf, 1.0, 0.0)],
)
def test_scale_after_the_sum(normalizer: float, divided_by: float, expected: float, number: Any) -> None:
    """The sum is multiplied by N u / Z, and by 0 where there is nothing to normalize, or no number."""
    assert expected == after_sum(normalizer=number(normalizer), divided_by=divided_by)


@given(st.floats(0, exclude_min=True, allow_infinity=False, allow_subnormal=True))
def test_unit_is_a_power_of_two_above(weight: float) -> None:
    """A number is below its unit, and not below its half; the unit and its reciprocal are normal powers of two."""
    unit = unit_above([weight, -1.0, 0.0])
    assert (0.5, 0.5) == (math.frexp(unit)[0], math.frexp(1 / unit)[0])
    if 1e-300 < weight < 1e300:
        assert unit / 2 <= weight < unit
    assert 0 < weight / unit < 4


def test_unit_of_nothing() -> None:
    """Where no number is above 0 and finite the unit is 1."""
    for numbers in ([0.0], [-3.0], [math.nan], [math.inf, 0.0]):
        assert 1.0 == unit_above(numbers)
    assert 4.0 == unit_above([math.nan, 3.0, math.inf])


def test_combine_keeps_dtype_and_shape() -> None:
    """The reduced gradient has the shape and the dtype of one gradient."""
    for dtype in (torch.float32, torch.float64, torch.complex128):
        combined = combine(torch.ones(2, 3, 1, dtype=dtype), rule=RULES["mean"], nodes=[0, 0], weights=[1.0, 1.0])
        assert torch.equal(torch.ones(3, 1, dtype=dtype), combined)


def test_a_rule_that_uses_weights_is_not_asked_for_nothing() -> None:
    """A weight of 0 is an absent pair, so a user's rule may divide by the weight or take its logarithm."""
    asked: list[float] = []

    def inverse(place: Any, weight: Any) -> Share:
        asked.append(weight)
        return Share(1 / weight, 1 / weight)

    rule = Rule("inverse", inverse, uses_weight=True, formula="")
    assert Share(0.0, 0.0) == share_of(rule, places_on_nodes([0])[0], 0.0)
    combined = combine(torch.tensor([[math.nan], [6.0]]), rule=rule, nodes=[0, 0], weights=[0.0, 2.0])
    assert ([6.0], [2.0]) == (combined.tolist(), asked)


def test_nothing_is_read_from_a_weight_that_is_a_tensor() -> None:
    """The share of a weight on an accelerator is computed there: no value is looked at."""
    weight = torch.empty((), dtype=torch.float64, device="meta")
    for rule in WEIGHTED_RULES:
        for number in share_of(rule, places_on_nodes([0, 0])[0], weight):
            assert "meta" == number.device.type
