"""The tree by which replicas are added up: its shape depends on their number alone, not on who holds them."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor

from lightning_gradavg.ranks import World
from lightning_gradavg.reproducible.sum import Span, TreeSum, add_up, subtrees


def bracketed(left: str, right: str) -> str:
    return f"({left} {right})"


def summed(leaves: int, ranks: int) -> str:
    """Return the sum of leaves that ranks add up by themselves first, as it is written with brackets."""
    whole: dict[Span, str] = {}
    each = leaves // ranks
    for rank in range(ranks):
        held, own = range(rank * each, (rank + 1) * each), {}
        for leaf in held:
            own[leaf, leaf + 1] = str(leaf)
            add_up(own, 0, leaves, bracketed)
        assert [*own] == [*subtrees(leaves, held)]
        whole |= own
    assert add_up(whole, 0, leaves, bracketed)
    return whole[0, leaves]


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
    known, waiting = {}, []
    for leaf in range(2**height):
        known[leaf, leaf + 1] = 1
        add_up(known, 0, 2**height, operator.add)
        waiting.append(len(known))
    assert {(0, 2**height): 2**height} == known
    assert max(waiting) == max(height, 1)


PARAMETERS: list[Tensor] = [
    *(torch.zeros(7, 3), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.zeros(())),
    *(torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(0, dtype=torch.bfloat16)),
    *(torch.zeros(11, dtype=torch.complex64), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(5)),
]
UNUSED, SOMETIMES = 2, 7
"""The parameter that no replica uses, and the one that only replicas 1 and 4 use."""


def of_replica(replica: int) -> dict[int, Tensor]:
    """Return gradients whose sum depends on its order; replica 2 has no samples."""
    generator = torch.Generator().manual_seed(replica)
    drawn = [torch.randn(one.shape, generator=generator, dtype=one.dtype) * 10.0**replica for one in PARAMETERS]
    gradients = [one.to(memory_format=torch.channels_last) if one.ndim == 4 else one for one in drawn]
    left_out = {UNUSED} | ({SOMETIMES} if replica not in (1, 4) else set())
    return {index: one for index, one in enumerate(gradients) if replica != 2 and index not in left_out}


def summed_over_ranks(replicas: int, bucket_bytes: int) -> list[Tensor | None]:
    """Body: the sums of all replicas, a third of them, in the second of two windows."""
    world, parameters = World.of(None), [one.clone() for one in PARAMETERS]
    tree = TreeSum(parameters, replicas=replicas, world=world, bucket_bytes=bucket_bytes)
    each = replicas // world.size
    for _ in range(2):
        for replica in range(world.rank * each, (world.rank + 1) * each):
            gradients = {id(parameters[index]): one for index, one in of_replica(replica).items()}
            tree.add(replica, gradients)
        found = tree.gradients(1 / 3)
    return [found.get(id(one)) for one in parameters]


def by_hand(replicas: int) -> list[Tensor | None]:
    """Return the same from the tree as it is written down from its root."""

    def tree(start: int, stop: int) -> list[Tensor]:
        if stop - start == 1:
            mine = of_replica(start)
            filled = [mine.get(index, torch.zeros_like(one)) for index, one in enumerate(PARAMETERS)]
            return [one.to(torch.promote_types(one.dtype, torch.float32)) for one in filled]
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
                assert mine.dtype == like.dtype
                assert torch.equal(mine, right)


def test_zeros_are_positive(world):
    for size in (1, 2):
        for (total,) in world(size).run(sum_of_negative_zeros):
            assert not total.signbit().any()


def sum_of_negative_zeros() -> list[Tensor]:
    world, parameter = World.of(None), torch.ones(1)
    tree = TreeSum([parameter], replicas=world.size, world=world)
    tree.add(world.rank, {id(parameter): torch.tensor([-0.0])} if world.rank == 0 else {})
    return [*tree.gradients(1.0).values()]
