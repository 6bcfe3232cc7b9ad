"""What ranks do one by one, over their windows, equals the dense reference, in the corners too: without processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rules import ROOT, WEIGHTED_RULES, every_rule
from torch import Tensor

from lightning_gradavg.place import places_on_nodes
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.reference import combine
from lightning_gradavg.reduction.weights import MOST_TERMS, WHOLE_LOSS, MicroBatch
from lightning_gradavg.reduction.window import Totals, Window, _lift_of
from lightning_gradavg.rules import RULES, Rule, Share

CPU, META = torch.device("cpu"), torch.device("meta")
LAYOUTS = ([0], [0, 0], [0, 1], [0, 0, 1], [1, 0, 2, 0, 1])
WEIGHTS = st.sampled_from([0.0, 0.0, 1.0, 3.0, 0.125, 4096.0, 1e-3])
WEIGHTED = RULES["weighted_mean"]
DIFFER = "the ranks' losses differ in what must be the same"


def batch(weight: Any, *, explicit: bool = True, **given: Any) -> MicroBatch:
    """A micro-batch of this weight, or of one per term."""
    return MicroBatch(weight if isinstance(weight, dict) else {WHOLE_LOSS: weight}, explicit, **given)


def windows_of(
    rule: Rule,
    nodes: Sequence[int],
    micro_batches: Sequence[Sequence[MicroBatch]] = (),
    *,
    divisor: float | None = 1.0,
    lift: float | None = None,
    **options: Any,
) -> list[Window]:
    """Return the windows of all ranks side by side; `lift` is what those before agreed on, under rules with weights."""
    windows = []
    for rank in range(len(nodes)):
        window = Window(rule, places_on_nodes(nodes), World(None, rank, len(nodes)), CPU, **options)
        window.loss_divisor = divisor
        window._next_lift = lift if rule.uses_weight else window._next_lift
        window.reset()
        for micro_batch in micro_batches[rank] if micro_batches else ():
            window.add(micro_batch)
        windows.append(window)
    return windows


def window_of(weights: Sequence[Any], rule: Rule = WEIGHTED, **given: Any) -> Window:
    return windows_of(rule, [0, 0], [[batch(weight, **given) for weight in weights], []])[0]


def exchange(windows: Sequence[Window]) -> None:
    """Have every window know the sum of what all of them know, as an all-reduce would."""
    for window in windows:
        window.exchange()
    summaries = [window._tally.row for window in windows if window._tally is not None]
    for window in windows if summaries else ():
        assert window._tally is not None
        window._tally.row = torch.stack(summaries).sum(0)


def totals_of(*windows: Window) -> Totals:
    return Totals.of(torch.stack([window._summarized() for window in windows]).sum(0))


def assert_windows_equal_combine(
    rule: Rule,
    nodes: Sequence[int],
    weights: Sequence[Sequence[float]],
    *,
    alone: bool = False,
    **options: Any,
) -> None:
    """What an engine averages of losses that carry their factors, and what is multiplied afterwards, is `combine`.

    Gradients of weight 0 are NaN under a rule that uses weights.
    """
    generator = torch.Generator().manual_seed(1)
    pairs: list[tuple[Tensor, int, float]] = []
    windows, gradients = windows_of(rule, nodes, **options), [list[Tensor]() for _ in nodes]
    averaged = torch.zeros(3, dtype=torch.float64)

    def carry(window: Window, carried: Sequence[Any], gradient: Tensor, length: int) -> None:
        (factor,) = carried
        if factor is not None:
            divisor = length if window.loss_divisor is None else window.loss_divisor
            averaged.add_(factor * gradient / divisor / len(nodes))

    for rank, (window, mine) in enumerate(zip(windows, weights, strict=True)):
        for weight in mine:
            gradient = torch.randn(3, generator=generator, dtype=torch.float64)
            if rule.uses_weight and weight == 0:
                gradient.fill_(math.nan)
            pairs.append((gradient, nodes[rank], weight))
            window.add(batch(weight))
            gradients[rank].append(gradient)
            if not alone:
                carry(window, window.carried(last=False), gradient, len(mine))
    exchange(windows)
    if alone:
        for window, (gradient,) in zip(windows, gradients, strict=True):
            carry(window, window.alone(window.totals()), gradient, 1)
    else:
        # One factor for all ranks, as it is multiplied after their average.
        (factor,) = {float(window.after(window.totals())) for window in windows}
        averaged *= factor
    stacked, of_pairs, of_weights = zip(*pairs, strict=True)
    expected = combine(torch.stack(stacked), rule=rule, nodes=of_pairs, weights=of_weights)
    torch.testing.assert_close(averaged, expected, rtol=1e-12, atol=1e-12)


@every_rule
@settings(max_examples=40)
@given(
    layout=st.sampled_from(LAYOUTS),
    length=st.integers(1, 4),
    divisor=st.sampled_from([1.0, 3.0, None]),
    lift=st.sampled_from([None, 1.0, 8192.0, 2.0**-9]),
    afterwards=st.booleans(),
    data=st.data(),
)
def test_windows_equal_the_dense_reference(
    rule: Rule, layout: list[int], length: int, data: st.DataObject, **options: Any
) -> None:
    weights = [data.draw(st.lists(WEIGHTS, min_size=length, max_size=length)) for _ in layout]
    assert_windows_equal_combine(rule, layout, weights, **options)
    if rule.uses_weight:
        assert_windows_equal_combine(rule, layout, [[first] for first, *_ in weights], alone=True, **options)


def test_mean_of_full_windows_and_equal_weights_are_stock() -> None:
    """Nothing is multiplied, so the bits are those of DDP."""
    (window, *_) = windows_of(RULES["mean"], [0, 0, 1], [[batch(1.0)] * 4] * 3, divisor=4.0)
    assert (True, 1.0) == (window.carries_nothing, window.after(window.totals()))
    alone = windows_of(WEIGHTED, [0, 0, 1], [[batch(7.0)]] * 3)
    exchange(alone)
    assert [[1.0]] * 3 == [one.alone(one.totals()) for one in alone]


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
        window.take(batch(weight), last=False)
        assert 1 / unit == window.lift


@given(st.floats(0, exclude_min=True, allow_infinity=False, allow_subnormal=True))
def test_lift_inverts_a_power_of_two_above(weight: float) -> None:
    lift = _lift_of(weight)
    assert lift is not None
    assert (0.5, 0.5) == (math.frexp(lift)[0], math.frexp(1 / lift)[0])
    assert 0 < weight * lift < 4
    if 1e-300 < weight < 1e300:
        assert 0.5 <= weight * lift < 1
    assert [None] * 3 == [_lift_of(number) for number in (-weight, math.nan, math.inf)]


def test_no_step_is_taken_on_a_fault() -> None:
    """Where the totals are not read, as on an accelerator, Z is 0; the error of all ranks comes later."""
    good, bad = windows_of(WEIGHTED, [0, 0], [[batch(1.0)] * 2, [batch(2.0), batch(-1.0)]])
    totals = totals_of(bad, good)
    assert (True, 0.0) == (float(totals.faults) > 0, float(bad._usable(totals, 0)))
    exchange([bad, good])
    for window in (bad, good):
        with pytest.raises(ValueError, match=r"reduction 'weighted_mean': a weight or a share is not usable\."):
            window.totals()


def test_weights_without_fault() -> None:
    for weight in (0.0, -0.0, 5e-324, 1e300):
        assert [] == window_of([weight]).problems()
    for weights in ([4.0, 1.0], [0.0, 1.0, 2.0], [0.0, 0.0]):
        assert [] == window_of(weights, ROOT).problems()
    assert [] == window_of([math.nan], RULES["sum"]).problems()
    given = window_of([7.0], problem="no number")
    assert (["micro-batch 0 of the window: no number"], 1.0) == (given.problems(), float(totals_of(given).faults))
    assert [Share(0.0, 0.0)] == given.shares(WHOLE_LOSS)
    for rule in (RULES["mean"], WEIGHTED):
        absent = window_of([0.0], rule, absent=True)
        assert ([None], None) == (absent.carried(last=False), totals_of(absent).problem)


def test_rounding_makes_no_different_terms() -> None:
    """On 2 to 2000 ranks with equal terms there is no false alarm, and one other rank is seen."""
    summaries = [window_of([{f"term {index}": 1.0}])._summarized() for index in range(20)]
    for ranks in range(2, 2001):
        one, other = summaries[ranks % 20], summaries[(ranks + 1) % 20]
        assert Totals.of(ranks * one).problem is None
        assert DIFFER in str(Totals.of((ranks - 1) * one + other).problem)


@pytest.mark.parametrize("terms", [10, MOST_TERMS])
def test_summaries_have_one_length_whatever_the_terms(terms: int) -> None:
    many = window_of([{f"t{index:02}": 1.0 for index in range(terms)}])
    assert (61,) == many._summarized().shape == window_of([1.0])._summarized().shape
    assert DIFFER in str(totals_of(many, window_of([1.0])).problem)


@pytest.mark.parametrize("rule", WEIGHTED_RULES, ids=lambda rule: rule.name)
def test_nothing_is_read_from_a_weight_on_an_accelerator(rule: Rule) -> None:
    """Shares, the summary and the factor are computed there, without looking at any number."""
    window = Window(rule, places_on_nodes([0, 0]), World(None, 0, 2), META)
    window.add(batch(torch.ones((), dtype=torch.float64, device=META)))
    summary = window._summarized()
    assert ("meta", torch.float64, (61,)) == (summary.device.type, summary.dtype, summary.shape)
    assert ["meta"] == [factor.device.type for factor in window.alone(Totals.of(summary))]
