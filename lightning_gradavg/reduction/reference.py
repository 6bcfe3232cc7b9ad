"""The dense reference of the reduction: every rank and micro-batch side by side, one formula, and no processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gradavg.place import Place, places_on_nodes
from lightning_gradavg.rules import Rule, Share

__all__ = ["combine", "is_number", "rank_factors", "share_of"]


def combine(gradients: Tensor, *, rule: Rule, nodes: Sequence[int], weights: Sequence[float]) -> Tensor:
    """Return the reduced gradient of all (rank, micro-batch) pairs: the executable definition of a rule.

    Args:
        gradients: Shape `(pairs, ...)`, the gradient of every pair's own loss. Non-finite where there was no loss term.
        rule: The reduction rule.
        nodes: The node of every pair.
        weights: The weight of every pair, finite and >= 0. A pair of weight 0 contributes nothing under a rule that
            uses weights.

    Returns:
        Shape `(...)` and the dtype of `gradients`; zeros where no pair has any weight.
    """
    total = torch.zeros_like(gradients[0])
    for gradient, factor in zip(gradients, rank_factors(rule, nodes, weights), strict=True):
        if factor != 0:
            total += factor * gradient
    return total


def rank_factors(rule: Rule, nodes: Sequence[int], weights: Sequence[float]) -> list[float]:
    """Return what the gradient of each rank is multiplied by where all weights are known: `w / Z`, 0 for "discard it".

    Args:
        rule: The reduction rule.
        nodes: The node of every rank.
        weights: The weight of every rank, finite and >= 0; anything if the rule uses none.

    Raises:
        ValueError: If the rule fails, or a multiplier, the normalizer or a factor is not finite and >= 0.
    """
    shares = [share_of(rule, place, weight) for place, weight in zip(places_on_nodes(nodes), weights, strict=True)]
    multipliers = [float(share.multiplier) for share in shares]
    normalizer = float(sum(share.normalizer for share in shares))
    factors = [multiplier / normalizer if normalizer > 0 else 0.0 for multiplier in multipliers]
    if not all(is_number(number) for number in (*multipliers, normalizer, *factors)):
        raise ValueError(
            f"reduction={rule.name!r} gives weights {list(weights)} the multipliers {multipliers} and the normalizer"
            f" {normalizer!r}. Scale the weights so that these, and their quotients, are finite numbers >= 0."
        )
    return factors


def is_number(value: float) -> bool:
    """Return whether a value is one that weights and shares may have: finite and >= 0."""
    return 0 <= value < math.inf


def share_of(rule: Rule, place: Place, weight: Any) -> Share:
    """Return the share of one pair. Weight 0 is an absent pair, for which a rule that uses weights is not asked.

    Args:
        rule: The reduction rule.
        place: Where the pair stands.
        weight: A number; or a 0-dim tensor, which is not looked at, and neither are tensors that the rule returns.

    Raises:
        ValueError: If the rule fails, or returns a number that is not finite and >= 0.
    """
    unread = isinstance(weight, Tensor)
    if rule.uses_weight and not unread and weight == 0:
        return Share(0.0, 0.0)
    try:
        share = Share(*rule.share(place, weight))
        wrong = [
            f"{name}={value!r}"
            for name, value in share._asdict().items()
            if not isinstance(value, Tensor) and not is_number(value)
        ]
    except Exception as error:
        raise ValueError(
            f"the reduction rule {rule.name!r} failed on ({place}, {weight}): {error!r}."
            " A rule is a function (place, weight) -> Share(multiplier, normalizer)."
        ) from error
    if wrong:
        raise ValueError(
            f"the reduction rule {rule.name!r} returned {wrong[0]} for ({place}, weight {weight})."
            " Both numbers of a share must be finite and >= 0."
        )
    if not (rule.uses_weight and unread):
        return share
    numbers = (value if isinstance(value, Tensor) else torch.full_like(weight, float(value)) for value in share)
    # Selected, where it is not the weight itself: what a rule makes of a weight of 0 may be NaN.
    return Share(*(number if number is weight else number.masked_fill(weight == 0, 0) for number in numbers))
