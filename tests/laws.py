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
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.reference import combine
from lightning_gradavg.reduction.weights import WHOLE_LOSS, MicroBatch
from lightning_gradavg.reduction.window import Window
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
    "exchange",
    "pairs_of",
    "windows_of",
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


def windows_of(
    rule: Rule,
    nodes: Sequence[int],
    micro_batches: Sequence[Sequence[MicroBatch]],
    *,
    divisor: float | None = 1.0,
    lift: float | None = None,
    afterwards: bool = False,
    missed: int = 0,
) -> list[Window]:
    """Return the windows of all ranks, side by side in one process, as after their last forward.

    Args:
        rule: The rule.
        nodes: The node of every rank.
        micro_batches: `micro_batches[r]` are those of rank `r`.
        divisor: What the training loop divides every loss by; None for the length of the window.
        lift: What the windows before agreed on, under a rule that uses weights.
        afterwards: As of `Window`.
        missed: Ranks that have no last micro-batch.
    """
    windows = []
    for rank, mine in enumerate(micro_batches):
        world = World(None, rank, len(nodes))
        window = Window(rule, places_on_nodes(nodes), world, torch.device("cpu"), afterwards=afterwards)
        window.loss_divisor = divisor
        if rule.uses_weight:
            window._next_lift = lift
        window.reset()
        for index, micro_batch in enumerate(mine):
            window.add(micro_batch, missed=missed * (index == len(mine) - 1))
        windows.append(window)
    return windows


def exchange(windows: Sequence[Window]) -> None:
    """Have every window know the sum of what all of them know, as an all-reduce would."""
    for window in windows:
        window.exchange()
    summaries = [window._summary for window in windows if window._summary is not None]
    for window in windows if summaries else ():
        window._summary = torch.stack(summaries).sum(0)


def assert_windows_equal_combine(
    rule: Rule,
    nodes: Sequence[int],
    weights: Sequence[Sequence[float]],
    *,
    alone: bool = False,
    missing: Sequence[int] = (),
    **of_windows: Any,
) -> None:
    """What DDP averages of losses that each carry their factor, and what is left to multiply, is `combine`.

    Args:
        rule: The rule.
        nodes: The node of every rank.
        weights: `weights[r][m]` is the weight of rank `r`'s micro-batch `m`. Gradients of weight 0 are NaN under a rule
            that uses weights.
        alone: Whether windows are of one micro-batch, and their losses carry the whole factor.
        missing: Ranks that have no last micro-batch.
        of_windows: Arguments of `windows_of`.
    """
    generator = torch.Generator().manual_seed(1)
    gradients = [[torch.randn(SIZE, generator=generator, dtype=torch.float64) for _ in mine] for mine in weights]
    batches = [[MicroBatch({WHOLE_LOSS: weight}) for weight in mine] for mine in weights]
    for rank, mine in enumerate(weights):
        for index, weight in enumerate(mine):
            if rank in missing and index == len(mine) - 1:
                batches[rank][index] = MicroBatch({WHOLE_LOSS: 0.0}, absent=True)
            elif weight != 0 or not rule.uses_weight:
                continue
            gradients[rank][index].fill_(math.nan)
    windows = windows_of(rule, nodes, [[] for _ in nodes], missed=len(missing), **of_windows)
    averaged = torch.zeros(SIZE, dtype=torch.float64)
    for window, of_rank, its in zip(windows, batches, gradients, strict=True):
        for index, (micro_batch, gradient) in enumerate(zip(of_rank, its, strict=True)):
            window.add(micro_batch, missed=len(missing) * (index == len(its) - 1))
            if not alone:
                carry(averaged, window, window.held(), gradient, len(its))
    exchange(windows)
    if alone:
        for window, (gradient,) in zip(windows, gradients, strict=True):
            carry(averaged, window, window.alone(window.totals()), gradient, 1)
    else:
        # One factor for all ranks, as it is multiplied after their average.
        (factor,) = {float(window.after(window.totals())) for window in windows}
        averaged *= factor
    present = [
        (gradient, node, weight)
        for node, mine, of_rank, its in zip(nodes, weights, batches, gradients, strict=True)
        for weight, micro_batch, gradient in zip(mine, of_rank, its, strict=True)
        if not micro_batch.absent
    ]
    stacked, of_pairs, of_weights = zip(*present, strict=True)
    assert_same(combine(torch.stack(stacked), rule=rule, nodes=of_pairs, weights=of_weights), averaged)


def carry(averaged: Tensor, window: Window, carried: Sequence[Any], gradient: Tensor, length: int) -> None:
    """Add to DDP's average the gradient of a loss that the training loop divided, and that carries a factor."""
    (factor,) = carried
    if factor is not None:
        divisor = length if window.loss_divisor is None else window.loss_divisor
        averaged += factor * gradient / divisor / len(window.places)
