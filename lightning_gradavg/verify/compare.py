"""How far apart two sets of tensors are, and which combination of its parts a whole is.

Nothing here guesses. Every way of combining gradients that is seen in practice predicts a result, and it holds where the
prediction is what was seen.

Rounding is told by its pattern. The difference of two computations that round differently is small and points anywhere;
that of a wrong factor or a wrong weight points along the gradients themselves, however small it is. So a difference
beyond the tolerance is rounding only if it is small for the precision, *and* the gradients explain little of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gradavg.verify.record import RunFacts, Tensors

__all__ = [
    "FLOOR",
    "RIGHT",
    "Difference",
    "Parts",
    "Tolerance",
    "apart",
    "clipped_to",
    "combinations",
    "combined",
    "differences",
    "factor_between",
    "flattened",
    "implied_shares",
    "is_rounding",
    "matches",
    "relative_gap",
    "rounded_on_the_wire",
    "ulp_of",
]

FLOOR = 0.1
"""Tensors smaller than this part of the largest in a set are measured against that part of it.

A gradient that is zero but for rounding, as of a bias before batch norm, would otherwise differ by 100 %."""

# Most numbers of bfloat16 are numbers of float16, too, but not the other way round.
_WIRES = {"bf16 wire": torch.bfloat16, "fp16 wire": torch.float16}
RIGHT = ("samples", "weights", "sum", "mean")
"""What a gradient of a batch can be of those of its parts; all other combinations are mistakes."""

_EXPLAINED = 0.5  # of the energy of a difference; that of noise over n elements is about columns / n
_NEAR = 1e-3  # of a factor that is 1
_ELEMENTS = 2048  # of a sketch of 4096 numbers; the others are sums


@dataclass(frozen=True)
class Tolerance:
    """What rounding stays below.

    Attributes:
        exact: Between computations of the same numbers in the same order, and for sums of few gradients.
        loose: Between a batch and its parts, where the difference has the pattern of rounding.
    """

    exact: float
    loose: float

    @classmethod
    def of(cls, facts: RunFacts, exact: float | None) -> Tolerance:
        """Return the tolerance of a run in its precision.

        Raises:
            ValueError: If `exact` is given and not a relative difference > 0.
        """
        if exact is not None and not 0 < exact < math.inf:
            raise ValueError(f"tolerance is a relative difference > 0, got {exact}")
        types = {dtype for dtype in facts.dtypes.values() if dtype.is_floating_point}
        if types & {torch.float16, torch.bfloat16}:
            return cls(exact or 2e-2, 1e-1)
        if "16" in facts.precision or facts.settings["matmul"] != "highest":
            return cls(exact or 1e-5, 5e-2)
        return cls(exact or 1e-10, 1e-8) if types == {torch.float64} else cls(exact or 1e-5, 1e-3)


@dataclass(frozen=True)
class Difference:
    """Where one tensor of the run differs from the reference.

    Attributes:
        name: Its parameter, buffer or output.
        relative: Largest absolute difference of an element over the largest absolute value; infinite where one of the
            two is not finite. Of tensors with more than 4096 elements, over 2048 of them and 2048 signed sums over all.
        ulps: The same difference in units in the last place of that largest value.
        found: The run's value where they differ most.
        expected: The reference's value there.
        factor: Run / reference where the whole tensor is that multiple of it, or None.
    """

    name: str
    relative: float
    ulps: float
    found: float
    expected: float
    factor: float | None = None


def ulp_of(value: float, dtype: torch.dtype) -> float:
    """Return the distance of a number of `dtype` from the next larger one."""
    if not dtype.is_floating_point:
        return 1.0
    limits = torch.finfo(dtype)
    if value == 0 or not math.isfinite(value):
        return limits.tiny * limits.eps
    return float(limits.eps * 2.0 ** math.floor(math.log2(abs(value))))


def factor_between(found: Tensor, expected: Tensor, tolerance: float) -> float | None:
    """Return `c` where `found = c * expected` within a relative tolerance and `c` is neither 0 nor 1; else None."""
    found, expected = found.double().reshape(-1), expected.double().reshape(-1)
    size = float(expected.dot(expected))
    if found.numel() == 0 or size == 0 or not torch.isfinite(found).all() or not math.isfinite(size):
        return None
    factor = float(found.dot(expected)) / size
    rest = float((found - factor * expected).abs().max())
    if factor == 0 or rest > tolerance * float(found.abs().max()) or abs(factor - 1) <= tolerance:
        return None
    return factor


def differences(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float,
    dtypes: Mapping[str, torch.dtype] | None = None,
    slack: Mapping[str, Tensor] | None = None,
) -> list[Difference]:
    """Return the differences of all tensors, in the order of `expected`. A missing tensor counts as zeros.

    Args:
        found: Those of the run.
        expected: Those of the reference.
        tolerance: Within it, a factor is a factor.
        dtypes: The types that the tensors were computed in, where these are sketches.
        slack: Values of which 2 ulps are taken off every difference: what `found` was computed from by subtraction.
    """
    scale = max((_largest(tensor) for tensor in expected.values()), default=0.0)
    result = []
    for name in dict.fromkeys([*expected, *found]):
        one, other = found.get(name), expected.get(name)
        some = one if one is not None else other
        assert some is not None
        a = torch.zeros_like(some) if one is None else one
        b = torch.zeros_like(some) if other is None else other
        dtype = (dtypes or {}).get(name, a.dtype)
        rounding = 2 * ulp_of(_largest(slack[name]), dtype) if slack is not None and name in slack else 0.0
        if a.shape != b.shape:
            result.append(Difference(name, math.inf, math.inf, math.nan, math.nan))
        elif a.numel() > 0:
            result.append(_difference(name, a, b, max(_largest(b), FLOOR * scale), tolerance, dtype, rounding))
    return result


def _difference(
    name: str, a: Tensor, b: Tensor, scale: float, tolerance: float, dtype: torch.dtype, rounding: float
) -> Difference:
    x, y = a.double().reshape(-1), b.double().reshape(-1)
    same = (x == y) | (x.isnan() & y.isnan())
    gap = torch.where(same, 0.0, (x - y).abs())
    gap = (torch.where(gap.isfinite(), gap, math.inf) - rounding).clamp(min=0.0)
    index = int(gap.argmax())
    largest = float(gap[index])
    relative = 0.0 if largest == 0 else largest / scale if scale > 0 else math.inf
    ulps = 0.0 if largest == 0 else largest / ulp_of(scale, dtype)
    factor = factor_between(a, b, 10 * tolerance) if relative > tolerance else None
    return Difference(name, relative, ulps, float(x[index]), float(y[index]), factor)


def _largest(tensor: Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    values = tensor.double().abs()
    return float(torch.where(values.isfinite(), values, 0.0).max())


def apart(first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Difference | None:
    """Return the first tensor that is not the same bits in both, or None."""
    for name in dict.fromkeys([*first, *other]):
        a, b = first.get(name), other.get(name)
        if a is None or b is None or not (a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())):
            found = differences({name: b} if b is not None else {}, {name: a} if a is not None else {}, 0.0)
            return found[0] if found else None
    return None


def flattened(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensor:
    """Return sketches as one vector in the order of `like`; what is missing is zero."""
    pieces = [tensors.get(name, torch.zeros_like(tensor)).double().reshape(-1) for name, tensor in like.items()]
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.float64)


def relative_gap(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of an element over the largest element expected."""
    if found.numel() == 0:
        return 0.0
    gap, scale = float((found - expected).abs().max()), float(expected.abs().max())
    return 0.0 if gap == 0 else gap / scale if scale > 0 else math.inf


def is_rounding(found: Tensor, expected: Tensor, along: Iterable[Tensor], tolerance: Tolerance) -> bool:
    """Return whether two vectors differ by nothing but rounding.

    Args:
        found: What was seen.
        expected: What was predicted.
        along: What a difference that is no rounding points along, beside `expected` itself.
        tolerance: The limits in this precision.
    """
    gap = relative_gap(found, expected)
    if gap <= tolerance.exact:
        return True
    columns = torch.stack([expected, *along], 1)
    if not gap <= tolerance.loose or len(found) < 8 * columns.shape[1]:
        return False
    rest = found - expected
    return float(_projected(rest, columns).square().sum()) < _EXPLAINED * float(rest.square().sum())


def _projected(vector: Tensor, columns: Tensor) -> Tensor:
    scaled = columns / columns.abs().amax(0).clamp(min=torch.finfo(torch.float64).tiny)
    # The columns may be multiples of each other, as of ranks with the same samples.
    return scaled @ torch.linalg.lstsq(scaled, vector.unsqueeze(1), driver="gelsd").solution.squeeze(1)


@dataclass(frozen=True)
class Parts:
    """What is known of the micro-batches of one step.

    Attributes:
        ranks: The rank of each.
        samples: The number of samples of each; None where it is not known.
        weights: The weight that the user gave each, or None.
        world_size: The number of ranks.
        accumulation: What the training loop divided every loss by.
    """

    ranks: tuple[int, ...]
    samples: tuple[int, ...] | None
    weights: tuple[float, ...] | None
    world_size: int = 1
    accumulation: int = 1


def combinations(parts: Parts) -> dict[str, list[float]]:
    """Return the coefficient of every part under every hypothesis."""
    number = len(parts.ranks)
    lengths = [parts.ranks.count(rank) for rank in parts.ranks]
    present = len(set(parts.ranks))
    found = {
        "mean": [1 / number] * number,
        "sum": [1.0] * number,
        "mean of the ranks' means": [1 / (present * length) for length in lengths],
        "configured window": [1 / (parts.world_size * parts.accumulation)] * number,
        "divided twice": [1 / (number * parts.world_size)] * number,
        "multiplied": [parts.world_size / number] * number,
    }
    for name, counts in (("samples", parts.samples), ("weights", parts.weights)):
        total = float(sum(counts)) if counts is not None else 0.0
        if counts is not None and total > 0:
            found[name] = [count / total for count in counts]
            found[f"sum over {name}"] = [1 / total] * number
            found[f"{name}, divided twice"] = [count / total / parts.world_size for count in counts]
    for rank in sorted(set(parts.ranks)):
        if present > 1:
            length = parts.ranks.count(rank)
            found[f"rank {rank} alone"] = [1 / length if other == rank else 0.0 for other in parts.ranks]
    return found


def combined(gradients: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return the combination of the rows of `gradients`; a row with coefficient 0 is left out, whatever it holds."""
    total = torch.zeros_like(gradients[0])
    for gradient, coefficient in zip(gradients, coefficients, strict=True):
        if coefficient != 0:
            total += coefficient * gradient
    return total


def matches(target: Tensor, gradients: Tensor, parts: Parts, tolerance: Tolerance) -> list[str]:
    """Return the hypotheses whose combination of `gradients`, shape `(parts, elements)`, is `target`."""
    predicted = {name: combined(gradients, shares) for name, shares in combinations(parts).items()}
    gaps = {name: relative_gap(target, prediction) for name, prediction in predicted.items()}
    exact = [name for name, gap in gaps.items() if gap <= tolerance.exact]
    if exact:
        return exact
    return [name for name in gaps if is_rounding(target, predicted[name], gradients, tolerance)]


def _shares(target: Tensor, gradients: Tensor, tolerance: Tolerance) -> Tensor | None:
    number, size = gradients.shape
    if size <= number or not (torch.isfinite(gradients).all() and torch.isfinite(target).all()):
        return None
    scale = float(gradients.abs().max())
    if scale == 0 or int(torch.linalg.matrix_rank(gradients, rtol=1e-6)) < number:
        return None
    shares = torch.linalg.lstsq(gradients.T / scale, (target / scale).unsqueeze(1)).solution.squeeze(1)
    near = Tolerance(10 * tolerance.exact, tolerance.loose)
    return shares if is_rounding(target, gradients.T @ shares, gradients, near) else None


def implied_shares(target: Tensor, gradients: Tensor, tolerance: Tolerance) -> list[float] | None:
    """Return the shares, >= 0 with sum 1, with which the parts make up `target`; None if none do or many could.

    Found by least squares where there are more elements than parts, and accepted only if what is left over is rounding:
    a loss that is a mean over terms has such shares, the parts of all terms that each micro-batch holds.
    """
    shares = _shares(target, gradients, tolerance)
    if shares is None:
        return None
    # A function of a mean that is no mean itself has such shares, too, but their sum is not quite 1.
    exact = relative_gap(gradients.T @ shares, target) <= 10 * tolerance.exact
    near = 10 * tolerance.exact if exact else tolerance.loose
    if float(shares.min()) < -near or abs(float(shares.sum()) - 1) > near:
        return None
    return [float(share) for share in shares]


def clipped_to(target: Tensor, gradients: Tensor, fair: Sequence[float], tolerance: Tolerance) -> float | None:
    """Return the norm that every part was clipped to before they were combined with the shares `fair`, or None.

    Each part's coefficient is then its share times what clipping multiplied it by: 1 for a gradient below the norm, and
    for all others what makes them as long as it.
    """
    shares = _shares(target, gradients, tolerance)
    if shares is None:
        return None
    scales = shares / torch.tensor(fair, dtype=torch.float64)
    lengths = scales * gradients.norm(dim=1)
    cut = lengths[scales < 1 - _NEAR]
    unlike = cut.numel() == 0 or float(cut.max() - cut.min()) > _NEAR * float(cut.max())
    too_long = float(scales.max()) > 1 + _NEAR or float(lengths.max()) > float(cut.max() if cut.numel() else 0) * (
        1 + _NEAR
    )
    return None if unlike or too_long else float(cut[0])


def rounded_on_the_wire(found: Tensors, gradients: Sequence[Tensors], parts: Parts, tolerance: float) -> str | None:
    """Return the wire on which a combination of `gradients` becomes `found`, or None.

    A wire rounds the summands and perhaps the sum: either the result is a number of the narrow type in every element,
    or it is the combination of rounded summands.
    """

    def elements(tensors: Tensors) -> Tensor:
        return torch.cat([tensors.get(name, torch.zeros_like(each))[:_ELEMENTS] for name, each in found.items()])

    target, rows = elements(found), torch.stack([elements(gradient) for gradient in gradients])
    for name, dtype in _WIRES.items():
        eps = torch.finfo(dtype).eps
        for coefficients in combinations(parts).values():
            exact = combined(rows, coefficients)
            if not tolerance < relative_gap(target, exact) <= 4 * eps * len(parts.ranks):
                continue
            narrow = torch.equal(target.to(dtype).double(), target)
            if narrow or relative_gap(target, combined(rows.to(dtype).double(), coefficients)) <= tolerance:
                return name
    return None
