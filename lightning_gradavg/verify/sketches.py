"""Sketches: 4096 numbers that stand for a large tensor, and how the tensors of two runs are compared by them.

Half of the numbers of a sketch are elements, half are signed sums over all elements. A sketch is linear, and it changes
if any element does. A tensor of up to 4096 elements is its own sketch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

__all__ = [
    "SKETCHED_ELEMENTS",
    "Difference",
    "Tensors",
    "compare_tensors",
    "filled",
    "flat",
    "gap_between",
    "multiple_of",
    "size_of",
    "sketch",
]

Tensors: TypeAlias = dict[str, Tensor]
"""Sketches by the name of their parameter, buffer, option or value."""

_SKETCHED_NUMBERS = 4096

SKETCHED_ELEMENTS = _SKETCHED_NUMBERS // 2
"""The first numbers of a sketch, which are elements; those behind them are sums."""


def sketch(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as float64 on the CPU, of a large one 2048 of them and 2048 signed sums over all."""
    dense = tensor.detach()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    elements = dense.reshape(-1)
    if elements.numel() <= _SKETCHED_NUMBERS:
        return elements.to(device="cpu", dtype=torch.float64, copy=True)
    half = SKETCHED_ELEMENTS
    pattern = _sketch_pattern(elements.numel(), half)
    signs = pattern.signs.to(elements.device)
    # The elements are rows of `half` numbers. Every row is added to the sums with a sign of its own. One part after the
    # other is converted to float64, so there is never a float64 copy of the whole tensor.
    sums = elements.new_zeros(half, dtype=torch.float64)
    for part, signs_of_rows in zip(elements.split(half * half), signs.split(half), strict=True):
        padding = -len(part) % half
        rows = nn.functional.pad(part.double(), (0, padding)).view(-1, half)
        sums += signs_of_rows @ rows
    kept = elements[pattern.positions.to(elements.device)].double()
    return torch.cat([kept, sums / math.sqrt(len(signs))]).cpu()


class _SketchPattern(NamedTuple):
    positions: Tensor  # of the elements that are kept
    signs: Tensor  # 1 or -1 for each row of elements


@functools.lru_cache(maxsize=64)
def _sketch_pattern(size: int, half: int) -> _SketchPattern:
    """Return the pattern for tensors of this size, the same in all processes."""
    generator = torch.Generator().manual_seed(size)
    positions = torch.randint(size, (half,), generator=generator).sort().values
    rows = math.ceil(size / half)
    signs = torch.randint(2, (rows,), generator=generator).double() * 2 - 1
    return _SketchPattern(positions, signs)


@dataclass(frozen=True)
class Difference:
    """Where a tensor of the run differs from that of one process.

    Attributes:
        name: Its parameter, buffer or value.
        relative: The largest absolute difference over the largest absolute value.
        found: The run's value where they differ most.
        expected: That of one process.
        factor: Run / one process where everything that differs is that multiple, or None.
    """

    name: str
    relative: float
    found: float
    expected: float
    factor: float | None = None


def compare_tensors(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float,
    noise: Mapping[str, Tensor] | None = None,
    *,
    together: bool = True,
) -> list[Difference]:
    """Return the differences of sketches beyond the tolerance, the largest first. A missing tensor is zero.

    Args:
        found: The sketches of the run.
        expected: The sketches of one process.
        tolerance: The largest difference that counts as equal, relative to the largest element of the same tensor.
        noise: What some tensors were computed from, whose rounding they carry; by default the largest of `expected`.
        together: Whether the factor of the first difference must be that of all tensors, or is its own.
    """
    differences = []
    like = {**found, **expected}
    found, expected = filled(found, like), filled(expected, like)
    # What is zero but for rounding, of what both were computed from, would differ by 100 %.
    largest = max((size_of(tensor) for tensor in expected.values()), default=0.0)
    for name in like:
        found_tensor, expected_tensor = found[name], expected[name]
        same = torch.isclose(found_tensor, expected_tensor, rtol=0.0, atol=0.0, equal_nan=True)
        gaps = torch.where(same, 0.0, (found_tensor - expected_tensor).abs().nan_to_num(math.inf, math.inf))
        index = int(gaps.argmax())
        gap = float(gaps[index])
        scale = size_of(expected_tensor)
        magnitude = largest
        if noise and name in noise:
            magnitude = size_of(noise[name])
        rounding = 1e-5 * tolerance * magnitude
        if gap > rounding + tolerance * scale:
            relative = math.inf
            if scale > 0:
                relative = gap / scale
            differences.append(Difference(name, relative, float(found_tensor[index]), float(expected_tensor[index])))
    if not differences:
        return []
    differences.sort(key=lambda difference: -difference.relative)
    first = differences[0]
    if not together:
        like = {first.name: like[first.name]}
    near = 1e4 * tolerance
    factor = multiple_of(flat(found, like), flat(expected, like), near)
    if factor is not None and factor != 0 and abs(factor - 1) > near:
        differences[0] = replace(first, factor=factor)
    return differences


def size_of(tensor: Tensor) -> float:
    """Return the largest absolute value; 0 if it is not finite, so that it widens no tolerance."""
    size = float(tensor.abs().max())
    if not math.isfinite(size):
        return 0.0
    return size


def filled(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensors:
    """Return sketches of the names and sizes of `like`: zeros for a missing one, and NaN for one of another size."""
    sketches = {}
    for name, model in like.items():
        tensor = tensors.get(name)
        if tensor is None:
            sketches[name] = torch.zeros_like(model)
        elif len(tensor) == len(model):
            sketches[name] = tensor
        else:
            sketches[name] = torch.full_like(model, math.nan)
    return sketches


def flat(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensor:
    """Return sketches as one vector in the order of `like`; what is missing is zero."""
    empty = torch.zeros(0, dtype=torch.float64)  # `torch.cat` refuses to join nothing
    return torch.cat([empty, *filled(tensors, like).values()])


def gap_between(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two vectors over the largest element expected."""
    gap = float((found - expected).abs().max())
    largest = float(expected.abs().max())
    if largest:  # NaN, too, which makes the result NaN
        return gap / largest
    if gap:
        return math.inf
    return 0.0


def multiple_of(found: Tensor, expected: Tensor, near: float) -> float | None:
    """Return the factor between two vectors; None if one is no multiple of the other."""
    factor = float(found.dot(expected) / expected.dot(expected))  # by least squares
    if math.isfinite(factor) and gap_between(found, factor * expected) <= near:
        return factor
    return None
