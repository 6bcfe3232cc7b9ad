"""Sketches: 4096 numbers that stand for a large tensor, and how the tensors of two runs are compared by them.

Half of the numbers of a sketch are elements, half are signed sums over all elements. A sketch is linear, and it changes
if any element does. A tensor of up to 4096 elements is its own sketch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

__all__ = [
    "NEGLIGIBLE",
    "Difference",
    "Tensors",
    "compare_tensors",
    "filled",
    "flat",
    "gap_between",
    "gaps_of",
    "multiple_of",
    "size_of",
    "sketch",
]

Tensors: TypeAlias = dict[str, Tensor]
"""Sketches by the name of their parameter, buffer, option or value."""

_SKETCHED_NUMBERS = 4096

_SIGNS = (torch.arange(_SKETCHED_NUMBERS) * 40503 % 65537 % 2 * 2 - 1).double()
"""1 or -1 as if by chance, for each row that is added up. Nothing is drawn: a draw would be that of the run."""

NEGLIGIBLE = 1e-5
"""What is so small beside the tolerance, in relation to the largest element of all tensors, is rounding."""


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
    half = _SKETCHED_NUMBERS // 2
    positions = torch.linspace(0, elements.numel() - 1, half, dtype=torch.float64, device=elements.device).long()
    # The elements are rows of `half` numbers. Every row is added to the sums with a sign of its own. One part after the
    # other is padded and converted to float64, so there is never a copy of the whole tensor.
    sums = elements.new_zeros(half, dtype=torch.float64)
    for part in elements.split(half * half):
        rows = nn.functional.pad(part, (0, -part.numel() % half)).view(-1, half)
        sums += _SIGNS[: len(rows)].to(part.device) @ rows.double()
    return torch.cat([elements[positions].double(), sums * math.sqrt(half / elements.numel())]).cpu()


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


def gaps_of(found: Tensor, expected: Tensor) -> Tensor:
    """Return the absolute differences of the elements: 0 where both are NaN, infinity where one is not finite."""
    same = torch.isclose(found, expected, rtol=0.0, atol=0.0, equal_nan=True)
    return torch.where(same, 0.0, (found - expected).abs().nan_to_num(math.inf, math.inf))


def compare_tensors(
    found: Tensors, expected: Tensors, tolerance: float, rounding: Mapping[str, float] | None = None
) -> list[Difference]:
    """Return the differences of sketches beyond the tolerance, the largest first. A missing tensor is zero.

    Args:
        found: The sketches of the run.
        expected: The sketches of one process.
        tolerance: The largest difference that counts as equal, relative to the largest element of the same tensor.
        rounding: By how much rounding may change an element of each tensor; else next to nothing beside the largest.
    """
    like = {**found, **expected}
    found, expected = filled(found, like), filled(expected, like)
    if rounding is None:
        # What is zero but for rounding, of what both were computed from, would differ by 100 %.
        largest = max((size_of(tensor) for tensor in expected.values()), default=0.0)
        rounding = dict.fromkeys(like, NEGLIGIBLE * tolerance * largest)
    differences = []
    for name in like:
        gaps = gaps_of(found[name], expected[name])
        index = int(gaps.argmax())
        gap = float(gaps[index])
        scale = size_of(expected[name])
        if gap > rounding.get(name, 0.0) + tolerance * scale:
            relative = gap / max(scale, 1e-300)
            differences.append(Difference(name, relative, float(found[name][index]), float(expected[name][index])))
    if not differences:
        return []
    differences.sort(key=lambda difference: -difference.relative)
    differing = {difference.name: like[difference.name] for difference in differences}
    all_expected = flat(expected, differing)
    largest_rounding = max(rounding.get(name, 0.0) for name in differing)
    near = 1e4 * tolerance + largest_rounding / max(size_of(all_expected), 1e-300)
    factor = multiple_of(flat(found, differing), all_expected, near)
    if factor is not None and factor != 0 and abs(factor - 1) > near:
        differences[0] = replace(differences[0], factor=factor)
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
    """Return the largest difference of two vectors over the largest element expected; NaN if that is not finite."""
    gap = float((found - expected).abs().max())
    if gap == 0:
        return gap
    return gap / max(float(expected.abs().max()), 1e-300)


def multiple_of(found: Tensor, expected: Tensor, near: float) -> float | None:
    """Return the factor between two vectors; None if one is no multiple of the other."""
    factor = float(found.dot(expected) / expected.dot(expected))  # by least squares
    if math.isfinite(factor) and gap_between(found, factor * expected) <= near:
        return factor
    return None
