"""The tree by which replicas are added up: its shape depends on their number alone, not on who holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gradavg.ranks import World
from lightning_gradavg.reproducible.sum import Fold, add_gradients, subtrees, sum_over_ranks


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
    assert expected == summed(leaves, 1) == literal(0, leaves)


@pytest.mark.parametrize("leaves", range(1, 65))
def test_any_number_of_ranks_makes_the_same_tree(leaves):
    expected = literal(0, leaves)
    for ranks in range(1, leaves + 1):
        if leaves % ranks == 0:
            assert expected == summed(leaves, ranks), ranks


@pytest.mark.parametrize("height", range(8))
def test_partial_sums_are_few(height):
    fold = Fold(2**height, lambda left, right: left + right)
    waiting = []
    for leaf in range(2**height):
        fold.push((leaf, leaf + 1), 1)
        waiting.append(len(fold.nodes))
    assert [((0, 2**height), 2**height)] == fold.nodes
    assert max(waiting) == max(height, 1)


PARAMETERS: list[Tensor] = [
    *(torch.zeros(7, 3), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.zeros(())),
    *(torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(0, dtype=torch.bfloat16)),
    *(torch.zeros(11, dtype=torch.complex64), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(5)),
]
UNUSED, SOMETIMES = 2, 7
"""The parameter that no replica uses, and the one that only replica 1 uses, and replica 4 if there is one."""


def of_replica(replica: int) -> list[Tensor | None]:
    """Return gradients whose sum depends on its order; replica 2 has no samples."""
    generator = torch.Generator().manual_seed(replica)
    drawn = [torch.randn(one.shape, generator=generator, dtype=one.dtype) * 10.0**replica for one in PARAMETERS]
    gradients = [one.to(memory_format=torch.channels_last) if one.ndim == 4 else one for one in drawn]
    left_out = {UNUSED} | ({SOMETIMES} if replica not in (1, 4) else set())
    return [None if replica == 2 or index in left_out else one for index, one in enumerate(gradients)]


def summed_over_ranks(replicas: int, bucket_bytes: int) -> list[Tensor | None]:
    """Body: the sums of all replicas, a third of them."""
    world = World.of(None)
    fold: Fold[Any] = Fold(replicas, add_gradients)
    each = replicas // world.size
    for replica in range(world.rank * each, (world.rank + 1) * each):
        fold.push((replica, replica + 1), of_replica(replica))
    options: Any = {"replicas": replicas, "world": world, "factor": 1 / 3, "bucket_bytes": bucket_bytes}
    return sum_over_ranks(fold.nodes, PARAMETERS, **options)


def by_hand(replicas: int) -> list[Tensor | None]:
    """Return the same from the tree as it is written down from its root."""

    def tree(start: int, stop: int) -> list[Tensor]:
        if stop - start == 1:
            wide = [torch.promote_types(one.dtype, torch.float32) for one in PARAMETERS]
            filled = zip(of_replica(start), PARAMETERS, wide, strict=True)
            return [(torch.zeros_like(one) if mine is None else mine).to(dtype) for mine, one, dtype in filled]
        middle = start + (1 << (stop - start - 1).bit_length() - 1)
        return [left + right for left, right in zip(tree(start, middle), tree(middle, stop), strict=True)]

    totals = [(total * (1 / 3)).to(one.dtype) for total, one in zip(tree(0, replicas), PARAMETERS, strict=True)]
    return [None if index == UNUSED else total for index, total in enumerate(totals)]


RANKS = {4: (1, 2, 4), 6: (1, 2, 3, 6), 12: (1, 2, 3, 4, 6)}


@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**20])
@pytest.mark.parametrize(("replicas", "world_size"), [(count, size) for count in RANKS for size in RANKS[count]])
def test_sums_have_the_same_bits_on_any_ranks(world, world_size, replicas, bucket_bytes):
    expected = by_hand(replicas)
    for found in world(world_size).run(summed_over_ranks, replicas, bucket_bytes):
        assert [None if one is None else one.dtype for one in expected] == [
            one if one is None else one.dtype for one in found
        ]
        for mine, right, like in zip(found, expected, PARAMETERS, strict=True):
            assert (mine is None) == (right is None)
            if mine is not None and right is not None:
                assert (mine.dtype, mine.stride()) == (like.dtype, like.stride())
                assert torch.equal(mine, right)


def test_zeros_are_positive(world):
    for size in (1, 2):
        for (total,) in world(size).run(sum_of_negative_zeros):
            assert not total.signbit().any()


def sum_of_negative_zeros() -> list[Tensor | None]:
    world = World.of(None)
    gradients = [torch.tensor([-0.0])] if world.rank == 0 else [None]
    return sum_over_ranks(
        [((world.rank, world.rank + 1), gradients)], [torch.ones(1)], replicas=world.size, world=world
    )
