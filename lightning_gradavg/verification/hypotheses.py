"""What the gradients of the parts could have been combined to: every way of combining them that is seen in practice.

Nothing here guesses. Each hypothesis predicts a gradient, and it holds where the prediction is the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gradavg.verification.records import Tensors

__all__ = ["Parts", "combinations", "flattened", "implied_shares", "matches", "relative_gap", "rounded_on_the_wire"]

# Most numbers of bfloat16 are numbers of float16, too, but not the other way round.
WIRES = {"bf16 wire": torch.bfloat16, "fp16 wire": torch.float16}


@dataclass(frozen=True)
class Parts:
    """What is known of the micro-batches of one step.

    Attributes:
        ranks: The rank of each.
        samples: The number of samples of each.
        weights: The weight that the user gave each, or None.
        world_size: The number of ranks.
        accumulation: What the training loop divided every loss by.
    """

    ranks: tuple[int, ...]
    samples: tuple[int, ...]
    weights: tuple[float, ...] | None
    world_size: int
    accumulation: int


def flattened(gradient: Mapping[str, Tensor], like: Tensors) -> Tensor:
    """Return the gradient as one float64 vector in the order of `like`; what is missing is zero."""
    pieces = [
        gradient[name].double().reshape(-1) if name in gradient else torch.zeros(tensor.numel(), dtype=torch.float64)
        for name, tensor in like.items()
    ]
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.float64)


def combinations(parts: Parts) -> dict[str, list[float]]:
    """Return the coefficient of every part under every hypothesis."""
    number = len(parts.ranks)
    lengths = [parts.ranks.count(rank) for rank in parts.ranks]
    present = len(set(parts.ranks))
    samples, weights = list(map(float, parts.samples)), parts.weights
    found = {
        "mean": [1 / number] * number,
        "sum": [1.0] * number,
        "samples": _normalized(samples, sum(samples)),
        "mean of the ranks' means": [1 / (present * length) for length in lengths],
        "configured window": [1 / (parts.world_size * parts.accumulation)] * number,
        "divided twice": [1 / (number * parts.world_size)] * number,
        "samples, divided twice": _normalized(samples, sum(samples) * parts.world_size),
        "sum over samples": _normalized([1.0] * number, sum(samples)),
    }
    if weights is not None and sum(weights) > 0:
        found["weights"] = _normalized(weights, sum(weights))
        found["sum over weights"] = _normalized([1.0] * number, sum(weights))
        found["weights, divided twice"] = _normalized(weights, sum(weights) * parts.world_size)
    for rank in sorted(set(parts.ranks)):
        length = parts.ranks.count(rank)
        if present > 1:
            found[f"rank {rank} alone"] = [1 / length if other == rank else 0.0 for other in parts.ranks]
    return found


def _normalized(values: Sequence[float], total: float) -> list[float]:
    return [value / total if total else 0.0 for value in values]


def combined(gradients: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return the combination of the rows of `gradients`; a row with coefficient 0 is left out, whatever it holds."""
    total = torch.zeros_like(gradients[0])
    for gradient, coefficient in zip(gradients, coefficients, strict=True):
        if coefficient != 0:
            total += coefficient * gradient
    return total


def relative_gap(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of an element over the largest element expected."""
    if found.numel() == 0:
        return 0.0
    gap, scale = float((found - expected).abs().max()), float(expected.abs().max())
    return 0.0 if gap == 0 else gap / scale if scale > 0 else float("inf")


def matches(target: Tensor, gradients: Tensor, parts: Parts, tolerance: float) -> list[str]:
    """Return the hypotheses whose combination of `gradients`, shape `(parts, elements)`, is `target`."""
    return [
        name
        for name, coefficients in combinations(parts).items()
        if relative_gap(target, combined(gradients, coefficients)) <= tolerance
    ]


def implied_shares(target: Tensor, gradients: Tensor, tolerance: float) -> list[float] | None:
    """Return the shares, >= 0 with sum 1, with which the parts make up `target`; None if none do or many could.

    Found by least squares where there are more elements than parts, and accepted only if what is left over is rounding:
    a loss that is a mean over terms has such shares, the parts of all terms that each micro-batch holds.
    """
    number, size = gradients.shape
    if size <= number or not (torch.isfinite(gradients).all() and torch.isfinite(target).all()):
        return None
    scale = float(gradients.abs().max())
    if scale == 0 or int(torch.linalg.matrix_rank(gradients, rtol=1e-6)) < number:
        return None
    shares = torch.linalg.lstsq(gradients.T / scale, (target / scale).unsqueeze(1)).solution.squeeze(1)
    if relative_gap(gradients.T @ shares, target) > tolerance:
        return None
    loose = max(1e-3, 100 * tolerance)
    if float(shares.min()) < -loose or abs(float(shares.sum()) - 1) > loose:
        return None
    return [float(share) for share in shares]


def rounded_on_the_wire(found: Tensor, gradients: Tensor, parts: Parts, tolerance: float) -> str | None:
    """Return the wire on which a combination of `gradients` becomes `found`, or None.

    A wire rounds the summands and perhaps the sum: either the result is a number of the narrow type in every element,
    or it is the combination of rounded summands.
    """
    for name, dtype in WIRES.items():
        eps = torch.finfo(dtype).eps
        for coefficients in combinations(parts).values():
            exact = combined(gradients, coefficients)
            if not tolerance < relative_gap(found, exact) <= 4 * eps * len(parts.ranks):
                continue
            narrow = torch.equal(found.to(dtype).double(), found)
            scaled = combined(gradients.to(dtype).double(), coefficients)
            if narrow or relative_gap(found, scaled) <= tolerance:
                return name
    return None
