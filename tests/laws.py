"""Laws that reduction rules obey, as assertions on dense gradients: no processes, float64.

A `Pairs` is what the ranks hold side by side: each pair of rank and micro-batch with its gradient, node and weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_gradavg.place import Place, places_on_nodes
from lightning_gradavg.reduction.combine import after_sum, combine, constant_normalizer
from lightning_gradavg.reduction.window import WHOLE_LOSS, MicroBatch, Totals, Window
from lightning_gradavg.rules import RULES, Rule, Share, resolve_rule

__all__ = [
    "CUSTOM",
    "CUSTOM_FREE",
    "EVERY_RULE",
    "NODE_LAYOUTS",
    "WEIGHTED_RULES",
    "Pairs",
    "assert_absent_pairs_contribute_nothing",
    "assert_linear",
    "assert_nothing_is_zero",
    "assert_order_does_not_matter",
    "assert_same",
    "assert_windows_equal_combine",
    "pairs_of",
]

NODE_LAYOUTS = ([0], [0, 0], [0, 1], [0, 0, 1], [0, 0, 0, 1], [1, 0, 2, 0, 1])
SIZE = 4


def root_weighted(place: Place, weight: Any) -> Share:
    """A user's rule: node means, weighted by the square root of the weight, with another normalizer."""
    return Share(weight**0.5 / place.ranks_on_node, weight**0.5)


def half_of_node(place: Place, weight: Any) -> Share:
    """A user's rule that uses no weight."""
    return Share(0.5 / place.ranks_on_node, 1.0)


CUSTOM = resolve_rule(root_weighted)
CUSTOM_FREE = Rule("half_of_node", half_of_node, uses_weight=False, formula="sum(g / 2L) / W")
EVERY_RULE = (*RULES.values(), CUSTOM, CUSTOM_FREE)
WEIGHTED_RULES = tuple(rule for rule in EVERY_RULE if rule.uses_weight)


@dataclass(frozen=True)
class Pairs:
    """Gradients of shape `(pairs, SIZE)`, and the node and weight of every pair."""

    gradients: Tensor
    nodes: tuple[int, ...]
    weights: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.nodes)

    def combined(self, rule: Rule | str) -> Tensor:
        return combine(self.gradients, rule=resolve_rule(rule), nodes=self.nodes, weights=self.weights)

    def at(self, order: Sequence[int]) -> Pairs:
        """The pairs at these indices, in this order."""
        return Pairs(
            self.gradients[list(order)], tuple(self.nodes[i] for i in order), tuple(self.weights[i] for i in order)
        )

    def weighing(self, weights: Sequence[float]) -> Pairs:
        return replace(self, weights=tuple(weights))


def pairs_of(nodes: Sequence[int], seed: int = 0) -> Pairs:
    """Return random pairs on these nodes, all weights above 0."""
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(len(nodes), SIZE, generator=generator, dtype=torch.float64)
    weights = torch.rand(len(nodes), generator=generator, dtype=torch.float64) * 9 + 0.1
    return Pairs(gradients, tuple(nodes), tuple(weights.tolist()))


def assert_same(expected: Tensor, actual: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def assert_linear(rule: Rule, pairs: Pairs) -> None:
    """The reduction of a sum of gradients is the sum of the reductions."""
    other = replace(pairs, gradients=pairs.gradients.flip(0).square())
    both = replace(pairs, gradients=2 * pairs.gradients - 3 * other.gradients)
    assert_same(2 * pairs.combined(rule) - 3 * other.combined(rule), both.combined(rule))


def assert_order_does_not_matter(rule: Rule, pairs: Pairs) -> None:
    """Ranks may be numbered in any order, within and across nodes."""
    expected = pairs.combined(rule)
    for order in (range(len(pairs) - 1, -1, -1), [*range(1, len(pairs)), 0]):
        assert_same(expected, pairs.at(order).combined(rule))
    renamed = replace(pairs, nodes=tuple(7 - node for node in pairs.nodes))
    assert_same(expected, renamed.combined(rule))


def assert_absent_pairs_contribute_nothing(rule: Rule, pairs: Pairs) -> None:
    """The gradient of a pair of weight 0 does not matter, whatever it is."""
    for index in range(len(pairs)):
        weights = [0.0 if i == index else weight for i, weight in enumerate(pairs.weights)]
        results = []
        for garbage in (0.0, math.nan, math.inf):
            gradients = pairs.gradients.clone()
            gradients[index] = garbage
            results.append(Pairs(gradients, pairs.nodes, tuple(weights)).combined(rule))
        assert results[0].isfinite().all()
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


def assert_nothing_is_zero(rule: Rule, pairs: Pairs) -> None:
    """Where no pair has any weight the reduced gradient is 0, although every gradient is NaN."""
    nothing = Pairs(torch.full_like(pairs.gradients, math.nan), pairs.nodes, (0.0,) * len(pairs))
    assert torch.equal(torch.zeros(SIZE, dtype=torch.float64), nothing.combined(rule))


def assert_windows_equal_combine(
    rule: Rule, nodes: Sequence[int], weights: Sequence[Sequence[float]], *, divisor: float, unit: float = 1.0
) -> None:
    """What ranks sum of losses that each multiplied by `w / unit`, scaled afterwards, is `combine` of all pairs.

    Args:
        rule: The rule.
        nodes: The node of every rank.
        weights: `weights[r][m]` is the weight of rank `r`'s micro-batch `m`. Gradients of weight 0 are NaN under a rule
            that uses weights.
        divisor: What the training loop divides every loss by.
        unit: The unit of the multipliers.
    """
    places = places_on_nodes(nodes)
    generator = torch.Generator().manual_seed(1)
    gradients = [[torch.randn(SIZE, generator=generator, dtype=torch.float64) for _ in window] for window in weights]
    summed, windows = torch.zeros(SIZE, dtype=torch.float64), []
    for place, mine, its in zip(places, weights, gradients, strict=True):
        window = Window(rule, places, place.rank)
        for index, weight in enumerate(mine):
            if rule.uses_weight and weight == 0:
                its[index] = torch.full_like(its[index], math.nan)
            given = torch.tensor(weight, dtype=torch.float64)
            multiplier = float(window.add(MicroBatch({WHOLE_LOSS: given}))[WHOLE_LOSS].multiplier)
            if multiplier != 0:
                summed += multiplier / unit * its[index] / divisor
        windows.append(window)
    totals = Totals(torch.stack([window.summary(torch.device("cpu")) for window in windows]).sum(0), len(places))
    assert totals.problem is None
    of_rule = constant_normalizer(rule, places, len(weights[0])) if not rule.uses_weight else totals.normalizer(0)
    scales = {float(after_sum(normalizer=of_rule, divided_by=divisor * unit * window.ratio)) for window in windows}
    expected = combine(
        torch.stack([gradient for its in gradients for gradient in its]),
        rule=rule,
        nodes=[node for node, mine in zip(nodes, weights, strict=True) for _ in mine],
        weights=[weight for mine in weights for weight in mine],
    )
    # One scale for all ranks, and so one after the sum.
    (scale,) = scales
    assert_same(expected, scale * summed)
