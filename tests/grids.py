"""Grids of parameters: a few combinations that hold every pair of values, and all others where time does not matter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(*factors: Sequence[Any], strength: int = 2) -> list[tuple[Any, ...]]:
    """Return combinations of one value per factor that hold every combination of `strength` factors' values.

    Greedy and without chance: each time the combination that holds most of what is missing, the first of several.

    Args:
        factors: The values of each parameter.
        strength: 2 for all pairs; 1 for every value once.
    """
    of_columns = list(combinations(range(len(factors)), min(strength, len(factors))))
    held = {
        row: {(columns, *(row[column] for column in columns)) for columns in of_columns}
        for row in product(*(range(len(values)) for values in factors))
    }
    missing, chosen = set[Any]().union(*held.values()), []
    while missing:
        best = max(held, key=lambda row: len(held[row] & missing))
        missing -= held[best]
        chosen.append(best)
    return [tuple(values[index] for values, index in zip(factors, row, strict=True)) for row in sorted(chosen)]


def grid(*factors: Sequence[Any], strength: int = 2) -> list[Any]:
    """Return all combinations for `pytest.mark.parametrize`, those that `covering` leaves out marked `full`."""
    indices = [range(len(values)) for values in factors]
    chosen = covering(*indices, strength=strength)
    return [
        pytest.param(
            *(values[index] for values, index in zip(factors, row, strict=True)),
            marks=() if row in chosen else pytest.mark.full,
        )
        for row in product(*indices)
    ]
