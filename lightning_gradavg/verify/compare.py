"""How far apart two sets of tensors are, and which combination of its parts a whole is.

Nothing here guesses. Every way of combining gradients that is seen in practice predicts a result, and it holds where
the prediction is what was seen.

Rounding is told by its pattern. The difference of two computations that round differently is small and points anywhere;
that of a wrong factor or a wrong weight points along the gradients themselves, however small it is. So a difference
beyond the tolerance is rounding only if it is small for the precision, *and* the gradients explain little of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from lightning_gradavg.verify.record import RunFacts, Tensors

__all__ = ["FLOOR", "RIGHT", "Difference", "Parts", "Tolerance", "differences", "is_rounding", "matches"]

FLOOR = 0.1
"""Tensors smaller than this part of the largest in a set are measured against that part of it.

A gradient that is zero but for rounding, as of a bias before batch norm, would otherwise differ by 100 %."""

RIGHT = ("samples", "weights", "sum", "mean")
"""What a gradient of a batch can be of those of its parts; all other combinations are mistakes."""

# Most numbers of bfloat16 are numbers of float16, too, but not the other way round.
_WIRES = {"bf16 wire": torch.bfloat16, "fp16 wire": torch.float16}
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
        tf32 = facts.device != "cpu" and facts.settings["tf32"]
        limits = [
            (2e-2, 1e-1, types & {torch.float16, torch.bfloat16}),
            (1e-5, 5e-2, "16" in facts.precision or facts.settings["matmul"] != "highest" or tf32),
            (1e-10, 1e-8, types == {torch.float64}),
            (1e-5, 1e-3, True),
        ]
        known, loose, _ = next(each for each in limits if each[-1])
        return cls(exact or known, loose)


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
    limits, regular = torch.finfo(dtype), value != 0 and math.isfinite(value)
    return float(limits.eps * (2.0 ** math.floor(math.log2(abs(value))) if regular else limits.tiny))


def factor_between(found: Tensor, expected: Tensor, tolerance: float) -> float | None:
    """Return `c` where `found = c * expected` within a relative tolerance and `c` is neither 0 nor 1; else None."""
    found, expected = found.double().reshape(-1), expected.double().reshape(-1)
    factor = float(found.dot(expected) / expected.dot(expected))  # NaN of zeros, which is near nothing
    named = factor != 0 and abs(factor - 1) > tolerance and relative_gap(factor * expected, found) <= tolerance
    return factor if named else None


def differences(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float,
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    slack: Mapping[str, Tensor] = MappingProxyType({}),
) -> list[Difference]:
    """Return the differences of all tensors, in the order of `expected`. A missing tensor counts as zeros.

    Args:
        found: Those of the run.
        expected: Those of the reference.
        tolerance: Within it, a factor is a factor.
        dtypes: The types that the tensors were computed in, where these are sketches.
        slack: Values of which 2 ulps are taken off every difference: what `found` was computed from by subtraction.
    """
    least = FLOOR * max(map(_largest_finite, expected.values()), default=0.0)

    def difference(name: str, zeros: Tensor) -> Difference:
        a, b, dtype = found.get(name, zeros), expected.get(name, zeros), dtypes.get(name, zeros.dtype)
        if a.shape != b.shape:
            return Difference(name, math.inf, math.inf, math.nan, math.nan)
        x, y = (_padded(each.double()) for each in (a, b))
        gap = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs()).nan_to_num(math.inf, math.inf)
        rounding = 2 * ulp_of(_largest_finite(slack[name]), dtype) if name in slack else 0.0
        gap = (gap - rounding).clamp(min=0.0)
        index, scale = int(gap.argmax()), max(_largest_finite(b), least)
        largest = float(gap[index])
        relative = _ratio(largest, scale)
        factor = factor_between(a, b, 10 * tolerance) if relative > tolerance else None
        return Difference(name, relative, largest / ulp_of(scale, dtype), float(x[index]), float(y[index]), factor)

    return [difference(name, torch.zeros_like(tensor)) for name, tensor in {**expected, **found}.items()]


def first_beyond(found: Sequence[Difference], limit: float) -> Difference | None:
    """Return the first difference beyond a limit, with a factor only if all beyond it have the same."""
    beyond = [each for each in found if each.relative > limit]
    factors = [each.factor or math.nan for each in beyond]  # none is 0
    same = all(math.isclose(factor, factors[0], rel_tol=_NEAR) for factor in factors)
    return next((replace(each, factor=each.factor if same else None) for each in beyond), None)


def _padded(tensor: Tensor) -> Tensor:
    """Return the elements and a zero, so that there is a largest one of none, too."""
    return nn.functional.pad(tensor.reshape(-1), (0, 1))


def _largest_finite(tensor: Tensor) -> float:
    values = _padded(tensor.double().abs())
    return float(torch.where(values.isfinite(), values, 0.0).max())


def _ratio(part: float, whole: float) -> float:
    if whole > 0:
        return part / whole
    return math.inf if part else 0.0


def flattened(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensor:
    """Return sketches as one vector in the order of `like`; what is missing is zero."""
    pieces = [tensors.get(name, torch.zeros_like(tensor)).double().reshape(-1) for name, tensor in like.items()]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *pieces])


def relative_gap(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of an element over the largest element expected."""
    return _ratio(float(_padded(found - expected).abs().max()), float(_padded(expected).abs().max()))


def is_rounding(found: Tensor, expected: Tensor, along: Iterable[Tensor], tolerance: Tolerance) -> bool:
    """Return whether two vectors differ by nothing but rounding.

    Args:
        found: What was seen.
        expected: What was predicted.
        along: What a difference that is no rounding points along, beside `expected` itself.
        tolerance: The limits in this precision.
    """
    gap, columns = relative_gap(found, expected), torch.stack([expected, *along], 1)
    if gap <= tolerance.exact or not gap <= tolerance.loose or len(found) < 8 * columns.shape[1]:
        return gap <= tolerance.exact
    rest, scaled = found - expected, columns / columns.abs().amax(0).clamp(min=torch.finfo(torch.float64).tiny)
    # The columns may be multiples of each other, as of ranks with the same samples.
    explained = scaled @ torch.linalg.lstsq(scaled, rest.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    return float(explained.square().sum()) < _EXPLAINED * float(rest.square().sum())


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
    number, present = len(parts.ranks), sorted(set(parts.ranks))
    lengths = [parts.ranks.count(rank) for rank in parts.ranks]
    found = {
        "mean": [1 / number] * number,
        "sum": [1.0] * number,
        "mean of the ranks' means": [1 / (len(present) * length) for length in lengths],
        "configured window": [1 / (parts.world_size * parts.accumulation)] * number,
        "divided twice": [1 / (number * parts.world_size)] * number,
        "multiplied": [parts.world_size / number] * number,
    }
    for name, counts in (("samples", parts.samples), ("weights", parts.weights)):
        if counts is not None and sum(counts) > 0:
            found[name] = [count / sum(counts) for count in counts]
            found[f"sum over {name}"] = [1 / sum(counts)] * number
            found[f"{name}, divided twice"] = [count / sum(counts) / parts.world_size for count in counts]
    for rank in present[: len(present) * (len(present) > 1)]:
        found[f"rank {rank} alone"] = [(other == rank) / parts.ranks.count(rank) for other in parts.ranks]
    return found


def combined(gradients: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return the combination of the rows of `gradients`; a row with coefficient 0 is left out, whatever it holds."""
    weights = torch.tensor(coefficients, dtype=torch.float64)
    return weights[weights != 0] @ gradients.double()[weights != 0]


def matches(target: Tensor, gradients: Tensor, parts: Parts, tolerance: Tolerance) -> list[str]:
    """Return the hypotheses whose combination of `gradients`, shape `(parts, elements)`, is `target`."""
    predicted = {name: combined(gradients, shares) for name, shares in combinations(parts).items()}
    exact = [name for name, found in predicted.items() if relative_gap(target, found) <= tolerance.exact]
    return exact or [name for name, found in predicted.items() if is_rounding(target, found, gradients, tolerance)]


def _shares(target: Tensor, gradients: Tensor, tolerance: Tolerance) -> Tensor:
    """Return the coefficients with which the parts make up `target`; NaN if none do, or many could."""
    number, scale = len(gradients), float(gradients.abs().max())
    unknown = torch.full((number,), math.nan, dtype=torch.float64)
    regular = len(target) > number and math.isfinite(scale) and scale > 0 and bool(torch.isfinite(target).all())
    if not regular or int(torch.linalg.matrix_rank(gradients, rtol=1e-6)) < number:
        return unknown
    shares = torch.linalg.lstsq(gradients.T / scale, (target / scale).unsqueeze(1)).solution.squeeze(1)
    near = Tolerance(10 * tolerance.exact, tolerance.loose)
    return shares if is_rounding(target, gradients.T @ shares, gradients, near) else unknown


def implied_shares(target: Tensor, gradients: Tensor, tolerance: Tolerance) -> list[float] | None:
    """Return the shares, >= 0 with sum 1, with which the parts make up `target`; None if none do or many could.

    Found by least squares where there are more elements than parts, and accepted only if what is left over is rounding:
    a loss that is a mean over terms has such shares, the parts of all terms that each micro-batch holds.
    """
    shares, limit = _shares(target, gradients, tolerance), 10 * tolerance.exact
    # A function of a mean that is no mean itself has such shares, too, but their sum is not quite 1.
    near = limit if relative_gap(gradients.T @ shares, target) <= limit else tolerance.loose
    return shares.tolist() if float(shares.min()) >= -near and abs(float(shares.sum()) - 1) <= near else None


def clipped_to(target: Tensor, gradients: Tensor, fair: Sequence[float], tolerance: Tolerance) -> float | None:
    """Return the norm that every part was clipped to before they were combined with the shares `fair`, or None.

    Each part's coefficient is then its share times what clipping multiplied it by: 1 for a gradient below the norm, and
    for all others what makes them as long as it.
    """
    scales = _shares(target, gradients, tolerance) / torch.tensor(fair, dtype=torch.float64)
    lengths, cut = scales * gradients.norm(dim=1), scales < 1 - _NEAR
    norm = float(lengths.max())
    fits = bool(cut.any()) and float(scales.max()) < 1 + _NEAR and float(lengths[cut].min()) > norm * (1 - _NEAR)
    return norm if fits else None


def rounded_on_the_wire(found: Tensors, gradients: Sequence[Tensors], parts: Parts, tolerance: float) -> str | None:
    """Return the wire on which a combination of `gradients` becomes `found`, or None.

    A wire rounds the summands and perhaps the sum: either the result is a number of the narrow type in every element,
    or it is the combination of rounded summands.
    """
    like = {name: each[:_ELEMENTS] for name, each in found.items()}
    cut = [{name: each[:_ELEMENTS] for name, each in tensors.items()} for tensors in gradients]
    target, rows = flattened(like, like), torch.stack([flattened(tensors, like) for tensors in cut])
    predicted = [combined(rows, shares) for shares in combinations(parts).values()]
    for name, dtype in _WIRES.items():
        sent = [combined(rows.to(dtype).double(), shares) for shares in combinations(parts).values()]
        narrow, most = torch.equal(target.to(dtype).double(), target), 4 * torch.finfo(dtype).eps * len(rows)
        for exact, rounded in zip(predicted, sent, strict=True):
            if tolerance < relative_gap(target, exact) <= most and (
                narrow or relative_gap(target, rounded) <= tolerance
            ):
                return name
    return None
