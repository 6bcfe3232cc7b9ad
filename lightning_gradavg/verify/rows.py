"""The rows of a rank's samples in a tensor of a whole batch, and the numbers by which tensors are compared."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "Layout",
    "Layouts",
    "Numbers",
    "Samples",
    "are_near",
    "as_it_is",
    "layouts_of",
    "numbers_of",
    "rounding_of",
    "rows_from",
]

_ROW = 512
"""Numbers in a row of a large tensor, whose rows are added up with signs."""

Numbers: TypeAlias = tuple[float, ...]
"""What stands for a tensor: 4 elements, 4 signed sums over all of them, and the largest absolute value."""


def numbers_of(tensor: Tensor) -> Numbers:
    """Return what stands for a tensor. But for the last number it is linear, and it changes if any element does."""
    flat = tensor.detach().reshape(-1)
    if flat.dtype != torch.float64:
        flat = flat.double()
    size = flat.numel()
    if size == 0:
        return ()
    pattern = _pattern_of(size)
    elements = flat[pattern.positions.to(flat.device)]
    end_of_rows = size - size % _ROW
    sums = pattern.signs_of_rows.to(flat.device) @ flat[:end_of_rows].view(-1, _ROW)
    sums[: size - end_of_rows] += flat[end_of_rows:]
    sums = (pattern.signs_of_columns.to(flat.device) * sums).view(4, -1).sum(1) / math.sqrt(size)
    smallest, largest = torch.aminmax(flat)  # three times as fast as `vector_norm(flat, inf)`
    return tuple(torch.cat([elements, sums, torch.maximum(-smallest, largest).view(1)]).tolist())


class _Pattern(NamedTuple):
    positions: Tensor  # of the elements that are kept
    signs_of_rows: Tensor
    signs_of_columns: Tensor


@functools.lru_cache(maxsize=64)
def _pattern_of(size: int) -> _Pattern:
    """Return the pattern for tensors of this size, the same in all processes."""
    generator = torch.Generator().manual_seed(size)
    positions = torch.randint(size, (4,), generator=generator)
    signs = torch.randint(2, (size // _ROW + _ROW,), generator=generator).double() * 2 - 1
    return _Pattern(positions, signs[: size // _ROW], signs[size // _ROW :])


def rounding_of(*, double: bool) -> float:
    """Return by how much numbers of equal computations differ at most, relative to the largest of a tensor."""
    if double:
        return 1e-9
    return 1e-4


def are_near(found: Numbers, expected: Numbers, rounding: float, factor: float = 1.0) -> bool:
    """Return whether numbers are those expected times a factor, but for rounding."""
    if len(found) != len(expected):
        return False
    wanted = [factor * number for number in expected]
    if wanted:
        wanted[-1] = abs(wanted[-1])  # the largest absolute value, which the rounding is relative to
    for number, other in zip(found, wanted, strict=True):
        if number == other or (math.isnan(number) and math.isnan(other)):
            continue
        if not abs(number - other) <= rounding * wanted[-1]:  # NaN, too
            return False
    return True


Layout: TypeAlias = Callable[[Tensor], Tensor]
"""Selects the rows of some samples."""


class Layouts(NamedTuple):
    """The ways in which a tensor may have the rows of some samples."""

    likely: list[Layout]  # one of them is right, if the tensor has rows for samples at all
    possible: list[Layout]  # those of a tensor whose sizes may fit by chance


class Samples(NamedTuple):
    """Samples of a batch, which come one after the other."""

    start: int
    number: int
    total: int  # of the batch


def as_it_is(tensor: Tensor) -> Tensor:
    """Return a tensor itself."""
    return tensor


def rows_from(start: int, number: int, tensor: Tensor) -> Tensor:
    """Return so many rows of a tensor."""
    return tensor.narrow(0, start, number)


def layouts_of(shape: Sequence[int], whole: Sequence[int], samples: Samples) -> Layouts:
    """Return how a tensor of shape `whole` may have rows for samples, whose tensor alone is of `shape`.

    | rows | such as |
    |---|---|
    | one or several for each sample, one sample after the other, along dimension 0 or 1 | `(samples * heads, length)` |
    | the first of every sample, then the second | `(length * samples, width)` |
    | and columns, too | `(samples, samples)`, a product of rows with each other |

    Other dimensions may be longer, as of texts that are padded to the longest of the batch, at the end or at the begin.
    More rows for each sample are possible, but not likely: such sizes have the nodes of graphs, too, by chance.
    """
    layouts = Layouts([], [])
    if len(shape) != len(whole):
        return layouts
    for dim in range(min(2, len(shape))):
        if shape[dim] == 0 or shape[dim] % samples.number != 0 or whole[dim] % samples.total != 0:
            continue
        rows = shape[dim] // samples.number
        rows_of_whole = whole[dim] // samples.total
        others_fit = all(shape[other] <= whole[other] for other in range(len(shape)) if other != dim)
        if rows > rows_of_whole or not others_fit:
            continue
        found = layouts.likely
        if rows < rows_of_whole:
            found = layouts.possible
        for at_end in (False, True):
            found.append(functools.partial(_sample_after_sample, dim, rows, shape, samples, at_end))
            if rows_of_whole > 1:
                found.append(functools.partial(_row_after_row, dim, rows, shape, samples, at_end))
    if len(shape) > 1 and shape[0] == shape[1] == samples.number and whole[0] == whole[1] == samples.total:
        layouts.likely.append(functools.partial(_square, samples))
    return layouts


def _sample_after_sample(
    dim: int, rows: int, shape: Sequence[int], samples: Samples, at_end: bool, tensor: Tensor
) -> Tensor:
    by_sample = tensor.unflatten(dim, (samples.total, -1)).narrow(dim, samples.start, samples.number)
    selected = _cut(by_sample, dim + 1, rows, at_end).flatten(dim, dim + 1)
    return _cut_others(selected, dim, shape, at_end)


def _row_after_row(dim: int, rows: int, shape: Sequence[int], samples: Samples, at_end: bool, tensor: Tensor) -> Tensor:
    by_row = tensor.unflatten(dim, (-1, samples.total)).narrow(dim + 1, samples.start, samples.number)
    selected = _cut(by_row, dim, rows, at_end).flatten(dim, dim + 1)
    return _cut_others(selected, dim, shape, at_end)


def _square(samples: Samples, tensor: Tensor) -> Tensor:
    rows = tensor.narrow(0, samples.start, samples.number)
    return rows.narrow(1, samples.start, samples.number)


def _cut(tensor: Tensor, dim: int, length: int, at_end: bool) -> Tensor:
    """Return so many positions along a dimension, the last ones or the first ones."""
    start = 0
    if at_end:
        start = tensor.shape[dim] - length
    return tensor.narrow(dim, start, length)


def _cut_others(tensor: Tensor, dim: int, shape: Sequence[int], at_end: bool) -> Tensor:
    for other, length in enumerate(shape):
        if other != dim:
            tensor = _cut(tensor, other, length, at_end)
    return tensor
