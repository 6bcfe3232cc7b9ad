"""The dense reference of the reduction, and the one decision of how a rank scales its gradient before the sum.

`combine` is the definition: every rank and micro-batch side by side, one formula. The reducer computes the same with
collectives. Each rank accumulates its own gradient, multiplies it by one factor, and the ranks' products are summed:

    g = sum over r of  factor_r * G_r ,    factor_r = N * ref_r / Z ,    G_r = sum over m of (w_rm / ref_r) * g_rm / N

`N` is the constant that the training loop already divided every loss by, and `ref_r` the first multiplier of the
rank's window, so that losses keep their magnitude whatever the unit of the weights (a factor of 4096 tokens on the loss
would overflow float16 activations that the exact result does not overflow).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gradavg.place import Place, places_on_nodes
from lightning_gradavg.rules import Rule, Share, Weight

__all__ = ["combine", "constant_normalizer", "depends_on_window", "share_of", "window_factor"]


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
    places = places_on_nodes(nodes)
    shares = [share_of(rule, place, weight) for place, weight in zip(places, weights, strict=True)]
    normalizer = float(sum(share.normalizer for share in shares))
    total = torch.zeros_like(gradients[0])
    if normalizer == 0:
        return total
    for gradient, share in zip(gradients, shares, strict=True):
        if share.multiplier != 0:
            total += float(share.multiplier) * gradient
    return total / normalizer


def share_of(rule: Rule, place: Place, weight: Weight) -> Share:
    """Return the share of one pair. Weight 0 is an absent pair, for which a rule that uses weights is not asked."""
    if rule.uses_weight and not isinstance(weight, Tensor) and weight == 0:
        return Share(0.0, 0.0)
    try:
        multiplier, normalizer = rule.share(place, weight)
        wrong = {
            name: value
            for name, value in (("multiplier", multiplier), ("normalizer", normalizer))
            if not isinstance(value, Tensor) and not 0 <= value < float("inf")
        }
    except Exception as error:
        raise ValueError(
            f"the reduction rule {rule.name!r} failed on ({place}, {weight}): {error!r}."
            " A rule is a function (place, weight) -> Share(multiplier, normalizer)."
        ) from error
    for name, value in wrong.items():
        raise ValueError(
            f"the reduction rule {rule.name!r} returned {name}={value!r} for ({place}, weight {weight})."
            " Both numbers of a share must be finite and >= 0."
        )
    if rule.uses_weight and isinstance(weight, Tensor):
        absent = weight == 0
        multiplier, normalizer = (
            value.masked_fill(absent, 0)
            for value in (
                part if isinstance(part, Tensor) else torch.full_like(weight, float(part))
                for part in (multiplier, normalizer)
            )
        )
    return Share(multiplier, normalizer)


def constant_normalizer(rule: Rule, places: Sequence[Place], micro_batches: int) -> float:
    """Return Z of a rule that uses no weight, every rank having accumulated `micro_batches` micro-batches."""
    shares = (share_of(rule, place.over_window(micro_batches), 1.0) for place in places)
    return float(micro_batches * sum(share.normalizer for share in shares))


def depends_on_window(rule: Rule, places: Sequence[Place]) -> bool:
    """Return whether the rule needs to know how many micro-batches the other ranks accumulated."""
    one, two = ([share_of(rule, place.over_window(length), 1.0) for place in places] for length in (1, 2))
    if any(a.multiplier != b.multiplier for a, b in zip(one, two, strict=True)):
        return True
    if rule.uses_weight:
        return any(a.normalizer != b.normalizer for a, b in zip(one, two, strict=True))
    return constant_normalizer(rule, places, 1) != constant_normalizer(rule, places, 2)


def window_factor(*, reference: Weight, normalizer: Weight, live: bool | Tensor, loss_divisor: float) -> Weight:
    """Return what a rank multiplies its accumulated gradient by before the sum over ranks.

    This is the only place where a scale of the reduction is decided.

    Args:
        reference: `ref_r`, the multiplier that the rank's losses are relative to; > 0.
        normalizer: `Z`, summed over all pairs; >= 0.
        live: Whether this rank has any multiplier above 0 in the window.
        loss_divisor: `N`, what the training loop already divided every loss of the window by.

    Returns:
        `N * ref_r / Z`, or 0 where the rank or the whole window has nothing, which means: discard the gradient.
        Products with NaN are NaN, so a gradient is discarded by selection and never by multiplication.
    """
    if isinstance(reference, Tensor) or isinstance(normalizer, Tensor) or isinstance(live, Tensor):
        some = torch.as_tensor(normalizer > 0) & torch.as_tensor(live)
        return torch.where(some, loss_divisor * reference / normalizer, 0.0)
    if not live or normalizer == 0:
        return 0.0
    return loss_divisor * reference / normalizer
