"""The window of one rank, and what the ranks' totals say of all windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from laws import CUSTOM
from torch import Tensor

from lightning_gradavg.place import Place
from lightning_gradavg.reduction.window import WHOLE_LOSS, MicroBatch, Totals, Window
from lightning_gradavg.rules import RULES, Rule, Share, resolve_rule

CPU, META = torch.device("cpu"), torch.device("meta")
PLACE = Place(0, 2, 0, 2)
WEIGHTED = RULES["weighted_mean"]


def window_of(weights: Sequence[Any], rule: Rule = WEIGHTED, *, explicit: bool = True) -> Window:
    """Return a window of these weights, each a number or one per term."""
    window = Window(rule, PLACE)
    for weight in weights:
        named = weight if isinstance(weight, dict) else {WHOLE_LOSS: weight}
        window.add(MicroBatch(named, explicit))
    return window


def totals_of(*windows: Window) -> Totals:
    return Totals(torch.stack([window.summary(CPU) for window in windows]).sum(0).tolist(), len(windows))


def tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_coefficients_are_relative_to_the_first_weight() -> None:
    """Losses keep their magnitude whatever the unit of the weights: the first coefficient is 1."""
    window = Window(WEIGHTED, PLACE)
    seen = []
    for weight in (4096.0, 1024.0, 0.0, 8192.0):
        window.add(MicroBatch({WHOLE_LOSS: weight}))
        seen.append(window.coefficient(WHOLE_LOSS))
    assert [1.0, 0.25, 0.0, 2.0] == seen
    assert 4096.0 == window.reference(WHOLE_LOSS, whole=True)
    assert window.live(WHOLE_LOSS) is True


@pytest.mark.parametrize("number", [float, tensor], ids=["numbers", "tensors"])
def test_first_weight_above_zero_is_the_reference(number: Any) -> None:
    """Where the window begins with nothing, the first weight above 0 is the reference, on an accelerator too."""
    window = Window(WEIGHTED, PLACE)
    seen = []
    for weight in (0.0, 0.0, 4096.0, 2048.0):
        window.add(MicroBatch({WHOLE_LOSS: number(weight)}))
        seen.append(float(window.coefficient(WHOLE_LOSS)))
    assert [0.0, 0.0, 1.0, 0.5] == seen
    assert 4096.0 == window.reference(WHOLE_LOSS, whole=True)


@pytest.mark.parametrize("number", [float, tensor], ids=["numbers", "tensors"])
@pytest.mark.parametrize("name", ["weighted_mean", "normalized_sum"])
def test_liveness(name: str, number: Any) -> None:
    """A window is live where some weight is above 0."""
    assert not window_of([number(0.0), number(0.0)], RULES[name]).live(WHOLE_LOSS)
    assert window_of([number(0.0), number(2.0)], RULES[name]).live(WHOLE_LOSS)
    assert not window_of([], RULES[name]).live(WHOLE_LOSS)


def test_terms_have_their_own_weights() -> None:
    """Case 9: every named term has its own reference, coefficients and normalizer; a missing one is absent."""
    window = window_of([{"cls": 2.0, "box": 1.0}, {"cls": 2.0, "box": 3.0}, {"cls": 4.0}])
    assert ("box", "cls") == window.terms
    assert (1.0, 2.0) == (window.reference("box", whole=True), window.reference("cls", whole=True))
    assert (0.0, 2.0) == (window.coefficient("box"), window.coefficient("cls"))
    assert [4.0, 8.0] == window.summary(CPU).tolist()[Totals.NORMALIZERS :][:2]


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_unusable_weight_is_remembered(weight: float) -> None:
    """Case 32: an unusable weight is kept as absent and named with its place in the window, for all ranks to raise."""
    window = window_of([2.0, weight, 3.0])
    assert [f"micro-batch 1 of the window: weight {weight!r} is not a finite number >= 0"] == window.problems
    assert [1.0, 0.0, 1.5] == [share.multiplier / 2 for share in window.shares(WHOLE_LOSS, whole=False)]
    assert "a weight or a share is not usable" == totals_of(window, window_of([1.0, 1.0, 1.0])).problem


def test_unusable_weight_of_a_term_is_named() -> None:
    """The message says which of the loss terms has the unusable weight."""
    window = window_of([{"box": -2.0, "cls": 1.0}])
    assert ["micro-batch 0 of the window: loss term 'box': weight -2.0 is not a finite number >= 0"] == window.problems
    assert ("box", "cls") == window.terms


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["weighted_mean", "normalized_sum"])
def test_unusable_weight_on_an_accelerator_is_counted(name: str, weight: float) -> None:
    """A tensor is not looked at when it arrives, but the totals tell."""
    window = window_of([tensor(2.0), tensor(weight)], RULES[name])
    assert [] == window.problems
    assert "a weight or a share is not usable" == totals_of(window, window_of([1.0, 1.0], RULES[name])).problem


def test_weights_are_not_judged_where_they_are_not_used() -> None:
    """A rule without weights looks at none."""
    assert [] == window_of([math.nan], RULES["sum"]).problems


def test_given_problem_is_kept() -> None:
    """A problem found before, when the weight was read, is raised with the window."""
    window = Window(WEIGHTED, PLACE)
    window.add(MicroBatch({WHOLE_LOSS: 7.0}, explicit=True, problem="no number"))
    assert ["micro-batch 0 of the window: no number"] == window.problems
    assert [Share(0.0, 0.0)] == window.shares(WHOLE_LOSS, whole=True)


def test_failure_of_a_rule_is_a_problem() -> None:
    """What a user's rule raises for one weight is that micro-batch's problem, on that rank."""

    def picky(place: Place, weight: Any) -> Share:
        if weight > 3:
            raise RuntimeError("too heavy")
        return Share(weight, weight)

    (problem,) = window_of([1.0, 4.0], resolve_rule(picky)).problems
    assert problem.startswith("micro-batch 1 of the window: the reduction rule ")
    assert "too heavy" in problem


@pytest.mark.parametrize("number", [float, tensor], ids=["numbers", "tensors"])
def test_rule_whose_ratio_depends_on_the_length_is_found_out(number: Any) -> None:
    """A multiplier that changes with the length of the window otherwise than by a factor cannot be accumulated."""

    def drifting(place: Place, weight: Any) -> Share:
        return Share(weight + place.world_size, 1.0)

    rule = resolve_rule(drifting)
    one, two = window_of([number(1.0)], rule), window_of([number(1.0), number(5.0)], rule)
    assert totals_of(one).problem is None
    assert "a weight or a share is not usable" == totals_of(two).problem


@pytest.mark.parametrize("number", [float, tensor], ids=["numbers", "tensors"])
@pytest.mark.parametrize("weights", [[4.0, 1.0], [0.0, 1.0, 2.0], [0.0, 0.0]], ids=str)
def test_rule_that_counts_ranks_may_be_accumulated(weights: list[float], number: Any) -> None:
    """A multiplier that only changes by a factor of the length is fine, whichever micro-batches are absent."""
    window = window_of([number(weight) for weight in weights], CUSTOM)
    assert totals_of(window).problem is None


def test_totals_see_different_terms() -> None:
    """Ranks whose losses have other terms are found out, in any world."""
    alike, other = window_of([{"a": 1.0, "b": 1.0}]), window_of([{"a": 1.0, "c": 1.0}])
    assert totals_of(alike, alike, alike).problem is None
    for windows in ([alike, other], [alike, alike, other], [other, alike, other, alike]):
        assert "the ranks' losses have different terms" == totals_of(*windows).problem


@pytest.mark.parametrize("terms", [9, 10, 11, 12])
def test_summaries_have_one_length_whatever_the_terms(terms: int) -> None:
    """Ranks with different numbers of loss terms, or with a fault, send vectors that can be summed."""
    many = window_of([{f"t{index}": 1.0 for index in range(terms)}])
    assert many.summary(CPU).shape == window_of([1.0]).summary(CPU).shape
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


def test_summary_off_the_cpu_stays_there() -> None:
    """The summary of tensors is put together on their device, without looking at them."""
    for rule in (WEIGHTED, RULES["normalized_sum"], RULES["sum"], CUSTOM):
        weights = [torch.empty((), dtype=torch.float64, device=META) for _ in range(2)]
        summary = window_of(weights, rule).summary(META)
        assert ("meta", torch.float64, 1) == (summary.device.type, summary.dtype, summary.ndim)
