"""What ranks do one by one, over their windows, equals the dense reference, in the corners too."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import CUSTOM, EVERY_RULE, NODE_LAYOUTS, WEIGHTED_RULES, assert_windows_equal_combine

from lightning_gradavg.place import places_on_nodes
from lightning_gradavg.reduction.combine import combine, constant_normalizer, depends_on_window, share_of, window_factor
from lightning_gradavg.rules import RULES, Rule, Share

WEIGHTS = st.sampled_from([0.0, 0.0, 1.0, 3.0, 0.125, 4096.0, 1e-3])
rules = pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.name)


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@rules
@given(layout=st.sampled_from(NODE_LAYOUTS), length=st.integers(1, 4), divisor=st.sampled_from([1.0, 3.0]), data=st.data())
def test_windows_equal_the_dense_reference(
    rule: Rule, tensors: bool, layout: list[int], length: int, divisor: float, data: st.DataObject
) -> None:
    """Case 11: the sum over ranks of each rank's factor times its gradient is `combine`, for any window and weight."""
    weights = [data.draw(st.lists(WEIGHTS, min_size=length, max_size=length)) for _ in layout]
    assert_windows_equal_combine(rule, layout, weights, divisor=divisor, tensors=tensors)


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("name", ["mean", "sum", "weighted_mean", "normalized_sum"])
@given(lengths=st.lists(st.integers(1, 4), min_size=3, max_size=3), data=st.data())
def test_windows_of_different_lengths(name: str, tensors: bool, lengths: list[int], data: st.DataObject) -> None:
    """Rules that do not depend on the length of a window are exact where ranks accumulate differently much."""
    weights = [data.draw(st.lists(WEIGHTS, min_size=length, max_size=length)) for length in lengths]
    assert_windows_equal_combine(RULES[name], [0, 0, 1], weights, divisor=1.0, tensors=tensors)


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("rule", WEIGHTED_RULES, ids=lambda rule: rule.name)
def test_window_that_begins_with_nothing(rule: Rule, tensors: bool) -> None:
    """Case 5: a first micro-batch of weight 0, whose gradient is NaN, is no reference for those after it."""
    for weights in ([[0.0, 4.0], [2.0, 0.0]], [[0.0, 0.0], [0.0, 5.0]], [[0.0, 0.0], [0.0, 0.0]]):
        assert_windows_equal_combine(rule, [0, 1], weights, divisor=2.0, tensors=tensors)


def test_which_rules_depend_on_the_window() -> None:
    """A rule depends on the length of the window where its shares' ratio or its normalizer does."""
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


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize(
    ("reference", "normalizer", "live", "divisor", "expected"),
    [
        (3.0, 12.0, True, 4.0, 1.0),
        (1.0, 2.0, True, 1.0, 0.5),
        (3.0, 12.0, False, 4.0, 0.0),
        (1.0, 0.0, True, 1.0, 0.0),
        (1.0, 0.0, False, 1.0, 0.0),
    ],
)
def test_factor(reference: float, normalizer: float, live: bool, divisor: float, expected: float, tensors: bool) -> None:
    """The factor is N * ref / Z, and 0 where the rank or the whole window has nothing."""
    arguments: dict[str, Any] = {"reference": reference, "normalizer": normalizer, "live": live}
    if tensors:
        arguments = {name: torch.tensor(value, dtype=torch.float64) for name, value in arguments.items()}
        arguments["live"] = arguments["live"] != 0
    assert expected == window_factor(**arguments, loss_divisor=divisor)
    if tensors:
        arguments["live"] = live
        assert expected == window_factor(**arguments, loss_divisor=divisor)


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
        multiplier, normalizer = share_of(rule, places_on_nodes([0, 0])[0], weight)
        assert isinstance(normalizer, torch.Tensor)
        assert "meta" == normalizer.device.type
        assert isinstance(multiplier, float) or "meta" == multiplier.device.type
