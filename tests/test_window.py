"""Weights of every type, the window of one rank, and what the ranks' totals say of all windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from laws import CUSTOM

from lightning_gradavg.place import Place, places_on_nodes
from lightning_gradavg.reduction.window import MOST_TERMS, WHOLE_LOSS, MicroBatch, Totals, Window, as_weight
from lightning_gradavg.rules import RULES, Rule, Share, resolve_rule

CPU, META = torch.device("cpu"), torch.device("meta")
PLACES = places_on_nodes([0, 0])
WEIGHTED = RULES["weighted_mean"]


@pytest.mark.parametrize(
    "value",
    [3, 3.0, np.int64(3), np.float32(3), np.float64(3), np.uint8(3), np.array(3), Fraction(3), Decimal(3)],
    ids=lambda value: type(value).__name__,
)
def test_numbers_are_weights(value: Any) -> None:
    """Case 32: ints, floats and NumPy scalars are weights."""
    weight = as_weight(value, CPU)
    assert (torch.float64, (), 3.0) == (weight.dtype, weight.shape, weight.item())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_tensors_are_weights(shape: tuple[int, ...]) -> None:
    """Case 32: a tensor with one element, of any dtype, is a weight, and taken without its graph."""
    floating = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    for dtype in (*floating, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        weight = as_weight(torch.full(shape, 3, dtype=dtype, requires_grad=dtype in floating), CPU)
        assert (torch.float64, (), False, 3.0) == (weight.dtype, weight.shape, weight.requires_grad, weight.item())


def test_truth_values_are_weights() -> None:
    """A single truth value counts as one or nothing."""
    assert [0.0, 1.0] == [as_weight(torch.tensor(value), CPU).item() for value in (False, True)]


def test_weight_is_not_rounded() -> None:
    """Case 32: counts beyond float32 stay exact."""
    assert 2.0**24 + 1 == as_weight(torch.tensor(2**24 + 1), CPU).item()
    assert 2.0**40 + 1 == as_weight(2**40 + 1, CPU).item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64], ids=str)
def test_tensor_on_an_accelerator_stays_there(dtype: torch.dtype) -> None:
    """A tensor off the CPU is not read, but detached, 0-dim and float64 there; a number of the host stays on it."""
    weight = as_weight(torch.empty(1, dtype=dtype, device=META, requires_grad=dtype.is_floating_point), META)
    assert (torch.float64, (), "meta", False) == (weight.dtype, weight.shape, weight.device.type, weight.requires_grad)
    assert "cpu" == as_weight(3, META).device.type


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "None of type NoneType"),
        ("3", "'3' of type str"),
        (b"3", "b'3' of type bytes"),
        ([3], "[3] of type list"),
        (3j, "3j of type complex"),
        pytest.param(10**400, "too large for a float", id="10**400"),
        (np.array([1, 2]), "of type ndarray"),
        (torch.ones(2), "a tensor of shape (2,) and torch.float32"),
        (torch.ones(0), "a tensor of shape (0,) and torch.float32"),
        (torch.tensor(1j), "a tensor of shape () and torch.complex64"),
        (torch.ones(2, device=META), "a tensor of shape (2,) and torch.float32"),
    ],
    ids=str,
)
def test_what_is_not_one_number(value: Any, said: str) -> None:
    """What is not one number is quoted with its type."""
    with pytest.raises(TypeError, match="a weight is one number, got") as caught:
        as_weight(value, CPU)
    assert said in str(caught.value)


def window_of(weights: Sequence[Any], rule: Rule = WEIGHTED, *, explicit: bool = True) -> Window:
    """Return a window of these weights, each a number or one per term."""
    window = Window(rule, PLACES, 0)
    for weight in weights:
        named = weight if isinstance(weight, dict) else {WHOLE_LOSS: weight}
        window.add(MicroBatch({term: as_weight(value, CPU) for term, value in named.items()}, explicit))
    return window


def totals_of(*windows: Window) -> Totals:
    return Totals(torch.stack([window.summary(CPU) for window in windows]).sum(0), len(windows))


def test_terms_have_their_own_weights() -> None:
    """Case 9: every named term has its own shares and normalizer; a missing one is absent."""
    window = window_of([{"box": 1.0, "cls": 2.0}, {"box": 3.0, "cls": 2.0}, {"cls": 4.0}])
    assert ("box", "cls") == window.terms
    assert [1.0, 3.0, 0.0] == [float(share.multiplier) for share in window.shares("box")]
    totals = totals_of(window, window)
    assert [8.0, 16.0] == [totals.normalizer(index).item() for index in (0, 1)]


@pytest.mark.parametrize(
    ("weights", "unit"),
    [([3.0, 3.0], 4.0), ([4096.0, 0.0], 4096.0), ([{"a": 1.0, "b": 100.0}] * 2, 128.0), ([0.0, 0.0], 7.0)],
    ids=str,
)
def test_unit_follows_the_weights(weights: list[Any], unit: float) -> None:
    """The next unit is a power of two above the mean weight of the heaviest term; without any it stays."""
    totals = totals_of(window_of(weights), window_of(weights))
    assert unit == Totals(totals.values.tolist(), 2).unit_after(7.0)


@pytest.mark.parametrize("usable", [0.0, -0.0, 5e-324, 1.0, 1e300])
def test_usable_weights(usable: float) -> None:
    """Every finite number >= 0 is usable, in any unit of measure."""
    window = window_of([usable])
    assert ([], None) == (window.problems(), totals_of(window).problem)


@pytest.mark.parametrize("weight", [-1.0, -5e-324, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["weighted_mean", "normalized_sum"])
def test_unusable_weight(name: str, weight: float) -> None:
    """Case 32: an unusable weight is quoted with its place in the window, and spoils the totals, whose Z is then 0."""
    window = window_of([2.0, weight, 3.0], RULES[name])
    assert [f"micro-batch 1 of the window: weight {weight!r} is not a finite number >= 0"] == window.problems()
    totals = totals_of(window, window_of([1.0, 1.0, 1.0], RULES[name]))
    assert ("a weight or a share is not usable", 0.0) == (totals.problem, totals.normalizer(0).item())


def test_unusable_weight_of_a_term_is_named() -> None:
    """The message says which of the loss terms has the unusable weight."""
    window = window_of([{"box": -2.0, "cls": 1.0}])
    assert [
        "micro-batch 0 of the window: loss term 'box': weight -2.0 is not a finite number >= 0"
    ] == window.problems()
    assert ("box", "cls") == window.terms


def test_weights_are_not_judged_where_they_are_not_used() -> None:
    """A rule without weights looks at none."""
    window = window_of([math.nan], RULES["sum"])
    assert ([], None) == (window.problems(), totals_of(window).problem)


def test_given_problem_is_kept() -> None:
    """A problem found before, when the weight was read, is raised with the window, to which its share is nothing."""
    window = Window(WEIGHTED, PLACES, 0)
    window.add(MicroBatch({WHOLE_LOSS: as_weight(7.0, CPU)}, explicit=True, problem="no number"))
    assert ["micro-batch 0 of the window: no number"] == window.problems()
    assert [Share(0.0, 0.0)] == window.shares(WHOLE_LOSS)
    assert "a weight or a share is not usable" == totals_of(window).problem


def test_absent_micro_batch_counts_in_the_normalizer_alone() -> None:
    """A micro-batch that only keeps its rank busy is multiplied by 0 under any rule."""
    for name in ("mean", "weighted_mean"):
        window = Window(RULES[name], PLACES, 0)
        share = window.add(MicroBatch({WHOLE_LOSS: as_weight(0.0, CPU)}, absent=True))[WHOLE_LOSS]
        assert 0.0 == share.multiplier
        assert totals_of(window).problem is None


def test_failure_of_a_rule_is_a_problem() -> None:
    """What a user's rule raises for one weight is that micro-batch's problem, on that rank."""

    def picky(place: Place, weight: Any) -> Share:
        if weight > 3:
            raise RuntimeError("too heavy")
        return Share(weight, weight)

    window = window_of([1.0, 4.0], resolve_rule(picky))
    (problem,) = window.problems()
    assert problem.startswith("micro-batch 1 of the window: the reduction rule ")
    assert "too heavy" in problem
    assert "a weight or a share is not usable" == totals_of(window).problem


def test_rule_whose_ratio_depends_on_the_weight_is_found_out() -> None:
    """A multiplier that changes with the length of the window otherwise than by a factor cannot be accumulated."""

    def drifting(place: Place, weight: Any) -> Share:
        return Share(weight + place.world_size, 1.0)

    rule = resolve_rule(drifting)
    one, two = window_of([1.0], rule), window_of([1.0, 5.0], rule)
    assert ([], None) == (one.problems(), totals_of(one).problem)
    assert "a weight or a share is not usable" == totals_of(two).problem
    (problem,) = two.problems()
    assert "micro-batch 1 of the window: the multiplier of weight 5 follows the length of the window by a" in problem


def test_rule_whose_ratio_depends_on_the_rank_is_found_out() -> None:
    """Nor can one that changes by one factor on some ranks and by another on others: NaN is no ratio."""

    def of_rank_0(place: Place, weight: Any) -> Share:
        return Share(weight / place.ranks_on_node if place.rank == 0 else weight, weight)

    two = window_of([1.0, 5.0], resolve_rule(of_rank_0))
    assert math.isnan(two.ratio)
    assert "a weight or a share is not usable" == totals_of(two).problem
    assert all("gives some ranks multipliers 0.5 times, and others 1 times" in problem for problem in two.problems())


@pytest.mark.parametrize("weights", [[4.0, 1.0], [0.0, 1.0, 2.0], [0.0, 0.0]], ids=str)
def test_rule_that_counts_ranks_may_be_accumulated(weights: list[float]) -> None:
    """A multiplier that only changes by a factor of the length is fine, whichever micro-batches are absent."""
    window = window_of(weights, CUSTOM)
    assert ([], None) == (window.problems(), totals_of(window).problem)


def test_totals_see_different_terms() -> None:
    """Ranks whose losses have other terms are found out, in any world."""
    alike, other = window_of([{"a": 1.0, "b": 1.0}]), window_of([{"a": 1.0, "c": 1.0}])
    assert totals_of(alike, alike, alike).problem is None
    for windows in ([alike, other], [alike, alike, other], [other, alike, other, alike]):
        assert "the ranks' losses have different terms" == totals_of(*windows).problem


def test_rounding_makes_no_different_terms() -> None:
    """On 2 to 2000 ranks alike the squares are compared without a false alarm, and one other rank is seen."""
    names = [f"term {index}" for index in range(20)]
    alike = [window_of([{name: 1.0}]).summary(CPU) for name in names]
    for world_size in range(2, 2001):
        one = alike[world_size % 20]
        assert Totals(world_size * one, world_size).problem is None
        other = Totals((world_size - 1) * one + alike[(world_size + 1) % 20], world_size)
        assert "the ranks' losses have different terms" == other.problem


@pytest.mark.parametrize("terms", [10, MOST_TERMS])
def test_summaries_have_one_length_whatever_the_terms(terms: int) -> None:
    """Ranks with different numbers of loss terms, or with a fault, send vectors that can be summed."""
    many = window_of([{f"t{index:02}": 1.0 for index in range(terms)}])
    assert (64,) == many.summary(CPU).shape == window_of([1.0]).summary(CPU).shape
    assert "the ranks' losses have different terms" == totals_of(many, window_of([1.0])).problem


def test_weight_given_for_some_micro_batches_only() -> None:
    """A weight given now and then would mix units: the message says for how many it was given."""
    given, taken = window_of([1.0, 1.0]), window_of([1.0], explicit=False)
    problem = totals_of(given, taken).problem
    assert problem is not None
    assert "a weight was given for 2 of 3 micro-batches" in problem
    assert "or never" in problem
    assert totals_of(taken, taken).problem is None
    assert totals_of(given, given).problem is None


def test_uneven_windows() -> None:
    """Windows are uneven where some rank accumulated another number of micro-batches, in any world."""
    one, two = window_of([1.0]), window_of([1.0, 1.0])
    assert [False, False, True, True] == [
        totals.uneven
        for totals in (totals_of(one), totals_of(two, two, two), totals_of(one, two), totals_of(two, two, one))
    ]


def test_window_after_another() -> None:
    """The next window is empty, and the one before it stays as it was."""
    window = window_of([1.0, 2.0])
    following = window.anew()
    assert (0, 2, ()) == (following.length, window.length, following.terms)


def test_summary_off_the_cpu_stays_there() -> None:
    """Shares, the summary and what follows from it are put together on the device, without looking at any number."""
    for rule in (WEIGHTED, RULES["normalized_sum"], RULES["sum"], CUSTOM):
        window = Window(rule, PLACES, 0)
        for _ in range(2):
            window.add(MicroBatch({WHOLE_LOSS: as_weight(torch.ones((), device=META), META)}))
        summary = window.summary(META)
        assert ("meta", torch.float64, 1) == (summary.device.type, summary.dtype, summary.ndim)
        assert "meta" == Totals(summary, 2).normalizer(0).device.type
