"""How far apart two sets of tensors are: relative to their size, in ulps, and as a factor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FLOOR", "Difference", "differences", "factor_between", "ulp_of"]

FLOOR = 0.1
"""Tensors smaller than this part of the largest in a set are measured against that part of it.

A gradient that is zero but for rounding, as of a bias before batch norm, would otherwise differ by 100 %."""


@dataclass(frozen=True)
class Difference:
    """Where one tensor of the run differs from the reference.

    Attributes:
        name: Its parameter or buffer.
        relative: Largest absolute difference of an element over the largest absolute value; infinite where one of the
            two is not finite.
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
    *,
    tolerance: float,
    slack: Mapping[str, Tensor] | None = None,
) -> list[Difference]:
    """Return the differences of all tensors, in the order of `expected`. A missing tensor counts as zeros.

    Args:
        found: Those of the run.
        expected: Those of the reference.
        tolerance: Within it, a factor is a factor.
        slack: Values of which 2 ulps are taken off every difference: what `found` was computed from by subtraction.
    """
    names = list(dict.fromkeys([*expected, *found]))
    scale = max((_largest(tensor) for tensor in expected.values()), default=0.0)
    result = []
    for name in names:
        one, other = found.get(name), expected.get(name)
        some = one if one is not None else other
        assert some is not None
        a = torch.zeros_like(some) if one is None else one
        b = torch.zeros_like(some) if other is None else other
        if a.numel() == 0:
            continue
        if a.shape != b.shape:
            result.append(Difference(name, math.inf, math.inf, math.nan, math.nan))
            continue
        result.append(_difference(name, a, b, max(_largest(b), FLOOR * scale), tolerance, slack))
    return result


def _difference(
    name: str, a: Tensor, b: Tensor, scale: float, tolerance: float, slack: Mapping[str, Tensor] | None
) -> Difference:
    dtype = a.dtype
    x, y = a.double().reshape(-1), b.double().reshape(-1)
    same = (x == y) | (x.isnan() & y.isnan())
    gap = torch.where(same, 0.0, (x - y).abs())
    gap = torch.where(gap.isfinite(), gap, math.inf)
    if slack is not None and name in slack:
        gap = (gap - 2 * ulp_of(_largest(slack[name]), dtype)).clamp(min=0.0)
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
