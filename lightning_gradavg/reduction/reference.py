"""The dense reference of the reduction: every pair of rank and micro-batch side by side, one formula, no processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gradavg._support.place import places_on_nodes
from lightning_gradavg.rules import Rule, is_number, normalizer_of, share_of

__all__ = ["combine", "rank_factors"]


def combine(gradients: Tensor, *, rule: Rule, nodes: Sequence[int], weights: Sequence[float]) -> Tensor:
    """Return the reduced gradient of gradients of shape `(pairs, ...)`: the executable definition of a rule.

    Under a rule that uses weights, a pair of weight 0 contributes nothing, whatever its gradient. The result is 0 where
    no pair has any weight.
    """
    # One pair after another, without a matrix product, whose order of additions and precision are the kernel's.
    total = torch.zeros_like(gradients[0])
    for gradient, factor in zip(gradients, rank_factors(rule, nodes, weights), strict=True):
        # Selected, not multiplied: 0 times NaN is NaN.
        if factor != 0:
            total += factor * gradient
    return total


def rank_factors(rule: Rule, nodes: Sequence[int], weights: Sequence[float]) -> list[float]:
    """Return what the gradient of each rank is multiplied by where all weights are known: `w / Z`, 0 for "discard it".

    Raises:
        ValueError: If a weight, a multiplier, the normalizer or a factor is not finite and >= 0.
    """
    # Ranks stand for pairs here: the micro-batches of a window count as further ranks on their node (`rules`).
    places = places_on_nodes(nodes)
    multipliers: list[float] = []
    normalizers: list[float] = []
    for place, weight in zip(places, weights, strict=True):
        share = share_of(rule, place, weight)
        multipliers.append(share.multiplier)
        normalizers.append(share.normalizer)
    normalizer = normalizer_of(rule, places, sum(normalizers))
    factors: list[float] = []
    for multiplier in multipliers:
        if normalizer > 0:
            factors.append(multiplier / normalizer)
        else:
            factors.append(0.0)
    for number in (*multipliers, normalizer, *factors):
        if not is_number(number):
            raise ValueError(
                f"reduction={rule.name!r} gives weights {list(weights)} the multipliers {multipliers} and the"
                f" normalizer {normalizer!r}. Scale the weights so that these, and their quotients, are finite numbers"
                " >= 0."
            )
    return factors
