"""Grids hold what they promise, in few combinations, the same on every run."""

from __future__ import annotations

from itertools import combinations, product

from grids import covering, grid
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 2))
def test_covering_holds_every_combination(sizes, strength):
    factors = [[f"{name}{index}" for index in range(size)] for name, size in zip("abcd", sizes, strict=False)]
    chosen = covering(*factors, strength=strength)
    for of_pair in combinations(range(len(factors)), strength if len(factors) > 1 else 1):
        wanted = set(product(*(factors[column] for column in of_pair)))
        assert wanted == {tuple(row[column] for column in of_pair) for row in chosen}
    assert len(chosen) == len(set(chosen))
    assert chosen == covering(*factors, strength=strength)


def test_what_is_left_out_is_marked():
    """A grid holds the whole product in order, and marks what `make test` leaves out."""
    params = grid("ab", "cd", "ef")
    assert list(product("ab", "cd", "ef")) == [param.values for param in params]
    assert {("a", "c", "e"), ("a", "d", "f"), ("b", "c", "f"), ("b", "d", "e")} == {
        param.values for param in params if not param.marks
    }
    assert {"full"} == {mark.name for param in params for mark in param.marks}
