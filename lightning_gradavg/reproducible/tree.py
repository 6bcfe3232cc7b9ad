"""The binary tree by which the replicas of a step are added up, whichever ranks have them.

A sum of floating-point numbers depends on its order. This order depends on the number of replicas R alone: a node at
height h holds the leaves from i 2^h to (i + 1) 2^h, as far as there are so many, and is the sum of the two nodes below.

    R = 6:   ((0 1) (2 3)) (4 5)

A rank has consecutive leaves and adds up what it can; where they are no whole subtree, it is left with several sums:
of 3 leaves on each of 2 ranks (0 1) and 2, and 3 and (4 5). What the ranks are left with is added up in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

__all__ = ["Fold", "Span", "subtrees"]

T = TypeVar("T")

Span: TypeAlias = tuple[int, int]
"""The leaves of a node: `(start, stop)`, half open."""


class Fold(Generic[T]):
    """Adds up consecutive nodes as far as the tree allows without those that follow, as a binary counter carries.

    Args:
        leaves: Leaves of the tree.
        add: Returns the sum of a left and a right value; it may write into either.

    Attributes:
        nodes: What is added up so far, in order.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self._leaves, self._add = leaves, add
        self.nodes: list[tuple[Span, T]] = []

    def push(self, span: Span, value: T) -> None:
        """Append the node that follows."""
        while self.nodes and self._completes(span):
            (start, _), left = self.nodes.pop()
            span, value = (start, span[1]), self._add(left, value)
        self.nodes.append((span, value))

    def _completes(self, span: Span) -> bool:
        """Return whether a node is the right one of the two below a node, of which the last one so far is the left."""
        start, middle = self.nodes[-1][0]
        size = middle - start
        # A left node is whole: as many leaves as a power of two, from a multiple of that of the node above.
        is_left = size & (size - 1) == 0 and start % (2 * size) == 0
        return is_left and span[1] == min(start + 2 * size, self._leaves)


def subtrees(leaves: int, held: range) -> tuple[Span, ...]:
    """Return the nodes that consecutive leaves add up to by themselves."""
    fold: Fold[None] = Fold(leaves, lambda left, right: None)  # noqa: ARG005  # there is nothing to add
    for leaf in held:
        fold.push((leaf, leaf + 1), None)
    return tuple(span for span, _ in fold.nodes)
