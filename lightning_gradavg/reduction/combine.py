"""The dense reference of the reduction, and the one decision of how a sum over the ranks is scaled.

`combine` is the definition: every rank and micro-batch side by side, one formula. The reducer computes the same with
collectives. A rank's losses are multiplied by what it knows, its own multipliers, before their backward; what only all
ranks together know is the same for all, and is multiplied after the sum:

    g = N u / Z * sum over r of G_r ,        G_r = sum over m of (w_rm / u) * g_rm / N

`N` is the constant that the training loop already divided every loss by. The *unit* `u` is a power of two near the
weights of an earlier window, the same on all ranks: losses keep their magnitude whatever the unit of the weights, since
a factor of 4096 tokens on the loss would overflow float16 activations that the exact result does not overflow; and to
multiply by it and to divide by it is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gradavg.place import Place, places_on_nodes
from lightning_gradavg.rules import Rule, Share

__all__ = [
    "after_sum",
    "combine",
    "constant_normalizer",
    "depends_on_window",
    "is_number",
    "rank_factors",
    "share_of",
    "unit_above",
    "window_ratio",
]


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
    shares = _shares(rule, nodes, weights)
    normalizer = float(sum(share.normalizer for share in shares))
    total = torch.zeros_like(gradients[0])
    for gradient, share in zip(gradients, shares, strict=True):
        if share.multiplier != 0 and normalizer != 0:
            total += float(share.multiplier) * gradient
    return total / (normalizer or 1.0)


def after_sum(*, normalizer: Any, divided_by: Any) -> Any:
    """Return what the sum over the ranks is multiplied by; 0 where there is nothing to normalize.

    This is the only place where a scale of the reduction is decided.

    Args:
        normalizer: `Z`, summed over all pairs; >= 0.
        divided_by: What gradients were divided by before the sum: `N u`, times the ratio of `window_ratio`. A rank that
            knows `Z` beforehand passes its multiplier, which its gradient lacks.

    Returns:
        `N u / Z`: a float, or a 0-dim tensor where `normalizer` is one.
    """
    if isinstance(normalizer, Tensor):
        return torch.where(normalizer > 0, divided_by / normalizer, 0.0)
    return divided_by / normalizer if normalizer > 0 else 0.0


def unit_above(numbers: Iterable[float]) -> float:
    """Return a power of two above the largest of some numbers, as a unit for them; 1 where none is above 0.

    Args:
        numbers: What is not finite is passed over.
    """
    largest = max((number for number in numbers if math.isfinite(number)), default=0.0)
    # Between these bounds neither the power nor its reciprocal is infinite or subnormal.
    return math.ldexp(1.0, min(max(math.frexp(largest)[1], -1022), 1022)) if largest > 0 else 1.0


def rank_factors(rule: Rule, nodes: Sequence[int], weights: Sequence[float]) -> list[float]:
    """Return what each rank multiplies its gradient by where all weights are known: `w_r / Z`, 0 for "discard it".

    Args:
        rule: The reduction rule.
        nodes: The node of every rank.
        weights: The weight of every rank, finite and >= 0; anything if the rule uses none.

    Raises:
        ValueError: If the rule fails, or a multiplier, the normalizer or a factor is not finite and >= 0.
    """
    shares = _shares(rule, nodes, weights)
    multipliers = [float(share.multiplier) for share in shares]
    normalizer = float(sum(share.normalizer for share in shares))
    factors = [after_sum(normalizer=normalizer, divided_by=multiplier) for multiplier in multipliers]
    if not all(is_number(number) for number in (*multipliers, normalizer, *factors)):
        raise ValueError(
            f"reduction={rule.name!r} gives weights {list(weights)} the multipliers {multipliers} and the normalizer"
            f" {normalizer!r}. Scale the weights so that these, and their quotients, are finite numbers >= 0."
        )
    return factors


def _shares(rule: Rule, nodes: Sequence[int], weights: Sequence[float]) -> list[Share]:
    return [share_of(rule, place, weight) for place, weight in zip(places_on_nodes(nodes), weights, strict=True)]


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


def constant_normalizer(rule: Rule, places: Sequence[Place], micro_batches: int) -> float:
    """Return Z of a rule that uses no weight, every rank having accumulated `micro_batches` micro-batches."""
    shares = (share_of(rule, place.over_window(micro_batches), 1.0) for place in places)
    return float(micro_batches * sum(share.normalizer for share in shares))


def window_ratio(rule: Rule, places: Sequence[Place], micro_batches: int) -> float:
    """Return what multipliers are in a window of that length, relative to what they are in one of a single micro-batch.

    A rule sees the length of the window in the place, and the length is only known at the window's end, when losses
    have been multiplied: so the ratio must be the same for all ranks, as it is for every named rule.

    Raises:
        ValueError: If it is not.
    """
    ratios = set()
    for place in places:
        alone, of_window = (share_of(rule, place.over_window(length), 1.0).multiplier for length in (1, micro_batches))
        ratios.add(float(of_window / alone) if alone else 1.0)
    low, high = min(ratios), max(ratios)
    if not math.isclose(low, high, rel_tol=1e-9):
        raise ValueError(
            f"the reduction rule {rule.name!r} gives some ranks multipliers {low:g} times, and others {high:g} times as"
            f" large in a window of {micro_batches} micro-batches as in one of 1. Micro-batches count as further ranks"
            " on the node: multipliers may follow their number by one factor only. Do not accumulate, or use a rule"
            " whose multipliers do so."
        )
    return low


def depends_on_window(rule: Rule, places: Sequence[Place]) -> bool:
    """Return whether the rule needs to know how many micro-batches the other ranks accumulated."""
    one, two = ([share_of(rule, place.over_window(length), 1.0) for place in places] for length in (1, 2))
    if rule.uses_weight or any(a.multiplier != b.multiplier for a, b in zip(one, two, strict=True)):
        return one != two
    return constant_normalizer(rule, places, 1) != constant_normalizer(rule, places, 2)
