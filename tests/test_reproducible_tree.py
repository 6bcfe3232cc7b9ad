"""The tree by which replicas are added up: its shape depends on their number alone, not on who holds them."""

from __future__ import annotations

import pytest

from lightning_gradavg.reproducible.tree import Fold, subtrees


def summed(leaves: int, ranks: int) -> str:
    """Return the sum of leaves that ranks add up by themselves first, as it is written with brackets."""

    def add(left: str, right: str) -> str:
        return f"({left} {right})"

    whole = Fold(leaves, add)
    each = leaves // ranks
    for rank in range(ranks):
        own = Fold(leaves, add)
        for leaf in range(rank * each, (rank + 1) * each):
            own.push((leaf, leaf + 1), str(leaf))
        assert [span for span, _ in own.nodes] == [*subtrees(leaves, range(rank * each, (rank + 1) * each))]
        for node in own.nodes:
            whole.push(*node)
    ((span, total),) = whole.nodes
    assert (0, leaves) == span
    return total


def literal(start: int, stop: int) -> str:
    """Return the tree over some leaves: the left half is the largest power of two below their number."""
    if stop - start == 1:
        return str(start)
    middle = start + (1 << (stop - start - 1).bit_length() - 1)
    return f"({literal(start, middle)} {literal(middle, stop)})"


@pytest.mark.parametrize(
    ("leaves", "expected"), [(1, "0"), (3, "((0 1) 2)"), (4, "((0 1) (2 3))"), (6, "(((0 1) (2 3)) (4 5))")]
)
def test_the_tree(leaves, expected):
    """Small trees, by hand."""
    assert expected == summed(leaves, 1) == literal(0, leaves)


@pytest.mark.parametrize("leaves", range(1, 65))
def test_any_number_of_ranks_makes_the_same_tree(leaves):
    """Every number of ranks that divides the leaves makes the tree that is written down from its root."""
    expected = literal(0, leaves)
    for ranks in range(1, leaves + 1):
        if leaves % ranks == 0:
            assert expected == summed(leaves, ranks), ranks


@pytest.mark.parametrize(
    ("leaves", "held", "expected"),
    [
        (8, range(4, 8), ((4, 8),)),
        (6, range(3), ((0, 2), (2, 3))),
        (6, range(3, 6), ((3, 4), (4, 6))),
        (10, range(5, 10), ((5, 6), (6, 8), (8, 10))),
    ],
)
def test_subtrees(leaves, held, expected):
    """A rank is left with one sum where its leaves are a subtree, and else with several."""
    assert expected == subtrees(leaves, held)


@pytest.mark.parametrize("height", range(8))
def test_partial_sums_are_few(height):
    """At most as many values wait as the tree is high, and one."""
    fold = Fold(2**height, lambda left, right: left + right)
    waiting = []
    for leaf in range(2**height):
        fold.push((leaf, leaf + 1), 1)
        waiting.append(len(fold.nodes))
    assert [((0, 2**height), 2**height)] == fold.nodes
    assert max(waiting) == max(height, 1)
