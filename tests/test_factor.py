"""The factors against the dense reference: what a loss carries and what is multiplied afterwards give the rule."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import approx

from lightning_gradavg._support.place import Place, places_on_nodes
from lightning_gradavg.reduction.factor import factor_after, factor_before, inverse_power_of_two
from lightning_gradavg.reduction.reference import combine
from lightning_gradavg.reduction.totals import Totals, exact_sum
from lightning_gradavg.rules import RULES, Share, depends_on_length, in_window, resolve_rule, share_of

COUNTS = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=4), min_size=1, max_size=4)
"""The weights of each rank's micro-batches."""


@pytest.mark.parametrize("name", ["weighted_mean", "normalized_sum"])
@pytest.mark.parametrize("divisor", [1.0, 4.0])
@given(weights=COUNTS)
def test_both_forms_are_the_rule(name, divisor, weights):
    """DDP averages over W what each rank adds up, and the loop has divided by N: the rest makes it the rule."""
    rule = RULES[name]
    world_size = len(weights)
    pairs = [
        (weight, 1.0 + 7 * rank + index) for rank, of_rank in enumerate(weights) for index, weight in enumerate(of_rank)
    ]
    shares = [share_of(rule, Place(), weight) for weight, _ in pairs]
    normalizer = float(sum(share.normalizer for share in shares))
    gradients = [gradient for _, gradient in pairs]
    expected = combine(
        torch.tensor(gradients, dtype=torch.float64), rule=rule, nodes=[0] * len(pairs), weights=[w for w, _ in pairs]
    ).item()
    before = sum(
        factor_before(float(share.multiplier), divisor, world_size, normalizer) * gradient / divisor
        for share, gradient in zip(shares, gradients, strict=True)
    )
    assert approx(expected) == before / world_size
    lift = inverse_power_of_two(3.0) or 1.0
    after = factor_after(divisor, world_size, normalizer, lift)
    carried = sum(
        float(share.multiplier) * lift * gradient / divisor for share, gradient in zip(shares, gradients, strict=True)
    )
    assert approx(expected) == carried / world_size * after


@given(st.integers(1, 2**31).map(float), st.integers(1, 64), st.integers(1, 16))
def test_equal_weights_give_exactly_1(weight, world_size, divisor):
    """So a rule with equal weights has the bits of the mean."""
    assert factor_before(weight, divisor, world_size, exact_sum([weight] * world_size)) == divisor


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if not rule.uses_weight])
@pytest.mark.parametrize("nodes", [[0], [0, 0, 1], [0, 1, 1, 2], [0, 0, 0, 0]])
@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_a_window_of_a_rule_without_weights(name, nodes, length):
    """A full window is multiplied by exactly 1 afterwards; every pair counts as a rank of its node."""
    rule = RULES[name]
    places = places_on_nodes(nodes)
    world_size = len(nodes)
    normalizer = float(sum(share_of(rule, place, 1.0).normalizer for place in places))
    divisor = float(length) if rule.averages_window else 4.0
    lift = factor_before(1.0, 1.0 if rule.averages_window else divisor, world_size, normalizer)
    after = factor_after(divisor, world_size, normalizer * (length if rule.averages_window else 1), lift)
    assert after == 1
    for place in places:
        whole = share_of(rule, in_window(place, length), 1.0)
        total = float(sum(share_of(rule, in_window(other, length), 1.0).normalizer for other in places) * length)
        carried = float(share_of(rule, place, 1.0).multiplier) * lift / divisor / world_size * after
        assert approx(float(whole.multiplier) / total) == carried


def test_nothing_to_normalize():
    """Where no pair has any weight, the gradient is 0, and not NaN."""
    assert (0.0, 0.0) == (factor_before(3.0, 1.0, 2, 0.0), factor_after(1.0, 2, 0.0, 0.5))


@given(st.floats(1e-300, 1e300))
def test_the_lift_is_a_power_of_two(number):
    """Multiplying by it is exact, and brings a weight near 1."""
    lift = inverse_power_of_two(number)
    assert lift is not None
    assert math.frexp(lift)[0] == 0.5
    assert 0.5 <= number * lift <= 1


@pytest.mark.parametrize("number", [0.0, math.inf, math.nan])
def test_no_lift(number):
    """A first window without any weight chooses none."""
    assert inverse_power_of_two(number) is None


def row(*, pairs: int = 1, agreement: str = "the same", normalizer: float = 1.0, faults: int = 0) -> Totals:
    return Totals.of_rank(faults=faults, without_loss=False, pairs=pairs, agreement=agreement, normalizer=normalizer)


@pytest.mark.parametrize(
    ("rows", "usable"),
    [
        ([row(), row()], True),
        ([row(), row(agreement="another")], False),
        ([row(), row(pairs=0, agreement="another", normalizer=0.0)], True),
        ([row(pairs=0, normalizer=0.0)] * 3, True),
        ([row(), row(faults=1)], False),
        ([row(normalizer=1e308), row(normalizer=1e308)], False),
        ([row(normalizer=math.nan), row()], False),
        # Digests of so many ranks were told apart by a sum of squares, which float64 rounds.
        ([row()] * 4095 + [row(agreement="another")], False),
        ([row()] * 4096, True),
    ],
)
def test_totals_are_usable_if_all_ranks_agree(rows, usable):
    """A rank without a micro-batch that counts agrees with all."""
    assert usable == Totals.over(rows).is_usable


def per_node(place: Place, weight: float) -> Share:
    return Share(weight / place.ranks_on_node, weight)


def plain(place: Place, weight: float) -> Share:
    return Share(weight**0.5, weight)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("mean", True),
        ("sum", False),
        ("weighted_mean", False),
        ("mean_of_node_means", True),
        (per_node, True),
        (plain, False),
    ],
)
def test_rules_that_depend_on_the_number_of_micro_batches(reduction, expected):
    assert expected == depends_on_length(resolve_rule(reduction), places_on_nodes([0, 0, 1]))
