"""The dense reference of the reduction: every pair of rank and micro-batch side by side, one formula, no processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gradavg._support.place import places_on_nodes
from lightning_gradavg.rules import Rule, is_number, share_of

__all__ = ["combine", "rank_factors"]


def combine(gradients: Tensor, *, rule: Rule, nodes: Sequence[int], weights: Sequence[float]) -> Tensor:
    """Return the reduced gradient of gradients of shape `(pairs, ...)`: the executable definition of a rule.

    Under a rule that uses weights, a pair of weight 0 contributes nothing, whatever its gradient. The result is 0 where
    no pair has any weight.
    """
    total = torch.zeros_like(gradients[0])
    for gradient, factor in zip(gradients, rank_factors(rule, nodes, weights), strict=True):
        if factor != 0:
            total += factor * gradient
    return total


def rank_factors(rule: Rule, nodes: Sequence[int], weights: Sequence[float]) -> list[float]:
    """Return what the gradient of each rank is multiplied by where all weights are known: `w / Z`, 0 for "discard it".

    Raises:
        ValueError: If the rule fails, or a multiplier, the normalizer or a factor is not finite and >= 0.
    """
    shares = [share_of(rule, place, weight) for place, weight in zip(places_on_nodes(nodes), weights, strict=True)]
    multipliers = [float(share.multiplier) for share in shares]
    normalizer = float(sum(share.normalizer for share in shares))
    factors = [multiplier / normalizer if normalizer > 0 else 0.0 for multiplier in multipliers]
    if not all(map(is_number, (*multipliers, normalizer, *factors))):
        raise ValueError(
            f"reduction={rule.name!r} gives weights {list(weights)} the multipliers {multipliers} and the normalizer"
            f" {normalizer!r}. Scale the weights so that these, and their quotients, are finite numbers >= 0."
        )
    return factors
