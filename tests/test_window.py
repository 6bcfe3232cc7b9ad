"""What ranks do one by one, over their windows, equals the dense reference, in the corners too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import (
    CUSTOM,
    EVERY_RULE,
    NODE_LAYOUTS,
    WEIGHTED_RULES,
    assert_windows_equal_combine,
    exchange,
    windows_of,
)

from lightning_gradavg.place import Place, places_on_nodes
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.reference import combine
from lightning_gradavg.reduction.weights import MOST_TERMS, WHOLE_LOSS, MicroBatch
from lightning_gradavg.reduction.window import Totals, Window, _lift_of
from lightning_gradavg.rules import RULES, Rule, Share, resolve_rule, share_of

META = torch.device("meta")
WEIGHTS = st.sampled_from([0.0, 0.0, 1.0, 3.0, 0.125, 4096.0, 1e-3])
WEIGHTED = RULES["weighted_mean"]
every_rule = pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.name)
every_weighted_rule = pytest.mark.parametrize("rule", WEIGHTED_RULES, ids=lambda rule: rule.name)


@every_rule
@given(
    layout=st.sampled_from(NODE_LAYOUTS),
    length=st.integers(1, 4),
    divisor=st.sampled_from([1.0, 3.0, None]),
    lift=st.sampled_from([None, 1.0, 8192.0, 2.0**-9]),
    afterwards=st.booleans(),
    data=st.data(),
)
def test_windows_equal_the_dense_reference(
    rule: Rule, layout: list[int], length: int, data: st.DataObject, **of_windows: Any
) -> None:
    weights = [data.draw(st.lists(WEIGHTS, min_size=length, max_size=length)) for _ in layout]
    assert_windows_equal_combine(rule, layout, weights, **of_windows)
    if rule.uses_weight:
        assert_windows_equal_combine(rule, layout, [[first] for first, *_ in weights], alone=True, **of_windows)


@pytest.mark.parametrize("name", ["sum", "weighted_mean", "normalized_sum"])
@given(lengths=st.lists(st.integers(1, 4), min_size=3, max_size=3), data=st.data())
def test_windows_of_different_lengths(name: str, lengths: list[int], data: st.DataObject) -> None:
    weights = [data.draw(st.lists(WEIGHTS, min_size=length, max_size=length)) for length in lengths]
    assert_windows_equal_combine(RULES[name], [0, 0, 1], weights)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("missing", [[1], [0, 2]], ids=str)
def test_mean_over_the_ranks_that_have_a_batch(missing: list[int], length: int) -> None:
    weights = [[1.0] * length] * 3
    assert_windows_equal_combine(RULES["mean"], [0, 0, 1], weights, missing=missing, divisor=float(length))


@every_weighted_rule
def test_window_that_begins_with_nothing(rule: Rule) -> None:
    for weights in ([[0.0, 4.0], [2.0, 0.0]], [[0.0, 0.0], [0.0, 5.0]], [[0.0, 0.0], [0.0, 0.0]]):
        assert_windows_equal_combine(rule, [0, 1], weights, divisor=2.0, lift=0.25)


def test_mean_of_full_windows_and_equal_weights_are_stock() -> None:
    """Nothing is multiplied, so the bits are those of DDP."""
    (window, *_) = windows_of(RULES["mean"], [0, 0, 1], [[batch(1.0)] * 4] * 3, divisor=4.0)
    assert (True, 1.0) == (window.carries_nothing, window.after(window.totals()))
    alone = windows_of(WEIGHTED, [0, 0, 1], [[batch(7.0)]] * 3)
    exchange(alone)
    assert [[1.0]] * 3 == [one.alone(one.totals()) for one in alone]


def batch(weight: Any, *, explicit: bool = True, **given: Any) -> MicroBatch:
    """A micro-batch of this weight, or of one per term."""
    return MicroBatch(weight if isinstance(weight, dict) else {WHOLE_LOSS: weight}, explicit, **given)


def window_of(weights: Sequence[Any], rule: Rule = WEIGHTED, **given: Any) -> Window:
    return windows_of(rule, [0, 0], [[batch(weight, **given) for weight in weights], []])[0]


def totals_of(*windows: Window) -> Totals:
    return Totals.of(torch.stack([window._summarized() for window in windows]).sum(0))


def test_terms_have_their_own_weights() -> None:
    """Case 9: every named term has its own factor."""
    terms = [{"box": 1.0, "cls": 2.0}, {"box": 3.0, "cls": 0.0}]
    windows = windows_of(WEIGHTED, [0, 0], [[batch(weight)] for weight in terms])
    exchange(windows)
    assert [[1 * 2 / 4, 2 * 2 / 2], [3 * 2 / 4, None]] == [one.alone(one.totals()) for one in windows]


@pytest.mark.parametrize(
    ("weights", "unit"), [([3.0, 3.0], 4.0), ([4096.0, 0.0], 4096.0), ([0.0, 0.0], 2.0), ([1e-3] * 2, 2.0**-9)], ids=str
)
def test_lift_follows_the_weights(weights: list[float], unit: float) -> None:
    """The next one inverts a power of two above the mean weight of the window before; of nothing it stays."""
    windows = windows_of(WEIGHTED, [0, 0], [list(map(batch, weights))] * 2, lift=0.5)
    exchange(windows)
    for window in windows:
        window.totals()
        window.reset()
        assert 1 / unit == window.lift


def test_first_lift_is_that_of_the_first_weight_above_0() -> None:
    window = window_of([])
    for weight, unit in ((0.0, 1.0), (100.0, 128.0), (3.0, 128.0)):
        window.reset()
        window.add(batch(weight))
        window.agree_on_lift(batch(weight))
        assert 1 / unit == window.lift


@given(st.floats(0, exclude_min=True, allow_infinity=False, allow_subnormal=True))
def test_lift_inverts_a_power_of_two_above(weight: float) -> None:
    lift = _lift_of(weight)
    assert lift is not None
    assert (0.5, 0.5) == (math.frexp(lift)[0], math.frexp(1 / lift)[0])
    assert 0 < weight * lift < 4
    if 1e-300 < weight < 1e300:
        assert 0.5 <= weight * lift < 1


def test_lift_of_nothing() -> None:
    assert [None] * 4 == [_lift_of(number) for number in (0.0, -3.0, math.nan, math.inf)]


def test_which_rules_depend_on_the_window() -> None:
    depends = {name for name, rule in RULES.items() if windows_of(rule, [0, 0, 1], [[]] * 3)[0].depends_on_length}
    assert {"mean", "mean_of_node_means", "sum_of_node_means"} == depends
    assert window_of([1.0], CUSTOM).depends_on_length


def test_ratio_of_multipliers() -> None:
    """One vote per node has a third of each multiplier in a window of 3; rules without nodes have all of it."""
    thirds = ("mean_of_node_means", "sum_of_node_means", CUSTOM.name)
    for rule in (*RULES.values(), CUSTOM):
        assert (
            pytest.approx(1 / 3 if rule.name in thirds else 1.0)
            == windows_of(rule, [0, 0, 1], [[]] * 3)[0]._of_length(3)[0]
        )


def picky(place: Place, weight: Any) -> Share:
    if weight > 3:
        raise RuntimeError("too heavy")
    return Share(weight, weight)


FAULTS = [
    *(
        pytest.param([2.0, weight], WEIGHTED, f"weight {weight!r} is not a finite number >= 0", id=str(weight))
        for weight in (-1.0, -5e-324, math.nan, math.inf, -math.inf)
    ),
    pytest.param([1.0, -2.0], RULES["normalized_sum"], "weight -2.0 is not a finite number >= 0", id="normalized_sum"),
    pytest.param(
        [{"box": 1.0}, {"box": -2.0}], WEIGHTED, "loss term 'box': weight -2.0 is not a finite number", id="of a term"
    ),
    pytest.param([1.0, 4.0], resolve_rule(picky), "the reduction rule 'picky' failed on (Place(rank=0,", id="picky"),
    pytest.param(
        [0.0, 5.0],
        Rule("drifting", lambda place, n: Share(n + place.world_size, 1.0), uses_weight=True, formula=""),
        "the multiplier of weight 5 follows the length of the window by a factor of its own",
        id="drifting",
    ),
    pytest.param(
        [0.0, 5.0],
        Rule("uneven", lambda place, n: Share(n / place.ranks_on_node ** (place.rank == 0), n), True, ""),
        "gives some ranks multipliers 0.5 times, and others 1 times as large in a window of 2",
        id="of rank 0",
    ),
]


@pytest.mark.parametrize(("weights", "rule", "said"), FAULTS)
def test_fault_of_the_second_micro_batch(weights: list[Any], rule: Rule, said: str) -> None:
    """It is quoted with its place, on all ranks, and Z is 0, so that nothing is stepped on."""
    good = windows_of(rule, [0, 0], [[], [batch(dict.fromkeys(window_of(weights).terms, 1.0))] * 2])[1]
    bad = window_of(weights, rule)
    problem = bad.problems()[-1]
    assert problem.startswith("micro-batch 1 of the window: ")
    assert said in problem
    totals = totals_of(bad, good)
    assert (True, [0.0]) == (float(totals.faults) > 0, [float(bad._usable(totals, 0))])
    exchange([bad, good])
    for window in (bad, good):
        with pytest.raises(ValueError, match=rf"reduction '{rule.name}': a weight or a share is not usable\."):
            window.totals()


@pytest.mark.parametrize("usable", [0.0, -0.0, 5e-324, 1.0, 1e300])
def test_usable_weights(usable: float) -> None:
    window = window_of([usable])
    assert ([], None) == (window.problems(), totals_of(window).problem(1))


def test_weights_are_not_judged_where_they_are_not_used() -> None:
    window = window_of([math.nan], RULES["sum"])
    assert ([], None) == (window.problems(), totals_of(window).problem(1))


def test_given_problem_is_kept() -> None:
    window = window_of([7.0], problem="no number")
    assert (["micro-batch 0 of the window: no number"], [Share(0.0, 0.0)]) == (
        window.problems(),
        window.shares(WHOLE_LOSS),
    )
    assert 1.0 == float(totals_of(window).faults)


@pytest.mark.parametrize("rule", [RULES["mean"], WEIGHTED], ids=lambda rule: rule.name)
def test_absent_micro_batch_carries_nothing(rule: Rule) -> None:
    window = window_of([0.0], rule, absent=True)
    assert ([None], None) == (window.held(), totals_of(window).problem(1))


@pytest.mark.parametrize("weights", [[4.0, 1.0], [0.0, 1.0, 2.0], [0.0, 0.0]], ids=str)
def test_rule_that_counts_ranks_may_be_accumulated(weights: list[float]) -> None:
    window = window_of(weights, CUSTOM)
    assert ([], None) == (window.problems(), totals_of(window).problem(1))


def test_rounding_makes_no_different_terms() -> None:
    """On 2 to 2000 ranks alike the squares are compared without a false alarm, and one other rank is seen."""
    alike = [window_of([{f"term {index}": 1.0}])._summarized() for index in range(20)]
    for ranks in range(2, 2001):
        one, other = alike[ranks % 20], alike[(ranks + 1) % 20]
        assert Totals.of(ranks * one).problem(ranks) is None
        assert "the ranks' losses have different terms" == Totals.of((ranks - 1) * one + other).problem(ranks)


@pytest.mark.parametrize("terms", [10, MOST_TERMS])
def test_summaries_have_one_length_whatever_the_terms(terms: int) -> None:
    many = window_of([{f"t{index:02}": 1.0 for index in range(terms)}])
    assert (64,) == many._summarized().shape == window_of([1.0])._summarized().shape
    assert "the ranks' losses have different terms" == totals_of(many, window_of([1.0])).problem(2)


def test_weight_given_for_some_micro_batches_only() -> None:
    given, taken = window_of([1.0, 1.0]), window_of([1.0], explicit=False)
    assert "a weight was given for 2 of 3 micro-batches" in str(totals_of(given, taken).problem(2))
    assert [None, None] == [totals_of(one, one).problem(2) for one in (given, taken)]


@pytest.mark.parametrize("name", ["mean_of_node_means", "weighted_mean"])
def test_uneven_windows(name: str) -> None:
    """A rule that depends on the length of windows raises on all ranks where they differ."""
    windows = windows_of(RULES[name], [0, 0], [[batch(1.0)], [batch(1.0)] * 2])
    for window in windows:
        window._exchanges = True
    exchange(windows)
    for window in windows:
        if name == "weighted_mean":
            assert 3.0 == window.totals().pairs
        else:
            with pytest.raises(ValueError, match="the ranks accumulated different numbers of micro-batches, which"):
                window.totals()


@pytest.mark.parametrize("rule", [WEIGHTED, RULES["normalized_sum"], CUSTOM], ids=lambda rule: rule.name)
def test_nothing_is_read_from_a_weight_on_an_accelerator(rule: Rule) -> None:
    """Shares, the summary and the factor are computed there, without looking at any number."""
    window = Window(rule, places_on_nodes([0, 0]), World(None, 0, 2), META)
    window.add(MicroBatch({WHOLE_LOSS: torch.ones((), dtype=torch.float64, device=META)}))
    summary = window._summarized()
    assert ("meta", torch.float64, (64,)) == (summary.device.type, summary.dtype, summary.shape)
    assert ["meta"] == [factor.device.type for factor in window.alone(Totals.of(summary))]


def test_combine_keeps_dtype_and_shape() -> None:
    for dtype in (torch.float32, torch.float64, torch.complex128):
        combined = combine(torch.ones(2, 3, 1, dtype=dtype), rule=RULES["mean"], nodes=[0, 0], weights=[1.0, 1.0])
        assert torch.equal(torch.ones(3, 1, dtype=dtype), combined)


def test_a_rule_that_uses_weights_is_not_asked_for_nothing() -> None:
    """A weight of 0 is an absent pair, so a user's rule may divide by the weight or take its logarithm."""
    rule = Rule("inverse", lambda place, weight: Share(1 / weight, 1 / weight), uses_weight=True, formula="")
    assert Share(0.0, 0.0) == share_of(rule, places_on_nodes([0])[0], 0.0)
    assert [6.0] == combine(torch.tensor([[math.nan], [6.0]]), rule=rule, nodes=[0, 0], weights=[0.0, 2.0]).tolist()
