"""The tree by which replicas are added up: its shape depends on their number alone, not on who holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from lightning_gradavg.ranks import World
from lightning_gradavg.reproducible.sum import Span, TreeSum, add_up, subtrees

T = TypeVar("T")


def tree(start: int, stop: int, leaf: Callable[[int], T], add: Callable[[T, T], T]) -> T:
    """Return the sum of some leaves as it is written down: the left half is the largest power of two below them."""
    if stop - start == 1:
        return leaf(start)
    middle = start + (1 << (stop - start - 1).bit_length() - 1)
    return add(tree(start, middle, leaf, add), tree(middle, stop, leaf, add))


def bracketed(left: str, right: str) -> str:
    return f"({left} {right})"


@pytest.mark.parametrize("leaves", range(1, 65))
def test_any_number_of_ranks_makes_the_same_tree(leaves):
    """A rank adds up its leaves one by one, holds at most as many sums as the tree is high, and is left with few."""
    expected = tree(0, leaves, str, bracketed)
    assert leaves != 6 or expected == "(((0 1) (2 3)) (4 5))"
    for ranks in (number for number in range(1, leaves + 1) if leaves % number == 0):
        whole: dict[Span, str] = {}
        each = leaves // ranks
        for held in (range(rank * each, (rank + 1) * each) for rank in range(ranks)):
            own: dict[Span, str] = {}
            for leaf in held:
                own[leaf, leaf + 1] = str(leaf)
                add_up(own, 0, leaves, bracketed)
                assert ranks > 1 or len(own) <= max((leaves - 1).bit_length(), 1)
            assert [*own] == [*subtrees(leaves, held)]
            whole |= own
        assert add_up(whole, 0, leaves, bracketed)
        assert {(0, leaves): expected} == whole


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
    sums = TreeSum(parameters, replicas=replicas, world=world, bucket_bytes=bucket_bytes)
    each = replicas // world.size
    for _ in range(2):
        for replica in range(world.rank * each, (world.rank + 1) * each):
            sums.add(replica, {id(parameters[index]): one for index, one in of_replica(replica).items()})
        found = sums.gradients(1 / 3)
    return [found.get(id(one)) for one in parameters]


def by_hand(index: int, replicas: int) -> Tensor | None:
    """Return the same of one parameter from the tree as it is written down, in at least 32 bits."""
    like = PARAMETERS[index]
    wide = torch.promote_types(like.dtype, torch.float32)

    def leaf(replica: int) -> Tensor:
        return of_replica(replica).get(index, torch.zeros_like(like)).to(wide)

    return None if index == UNUSED else (tree(0, replicas, leaf, torch.add) * (1 / 3)).to(like.dtype)


RANKS = {4: (1, 2, 4), 6: (1, 2, 3, 6), 12: (1, 2, 3, 4, 6)}


@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**20])
@pytest.mark.parametrize(("replicas", "world_size"), [(count, size) for count in RANKS for size in RANKS[count]])
def test_sums_have_the_same_bits_on_any_ranks(world, world_size, replicas, bucket_bytes):
    expected = [by_hand(index, replicas) for index in range(len(PARAMETERS))]
    for found in world(world_size).run(summed_over_ranks, replicas, bucket_bytes):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def sum_of_negative_zeros() -> list[Tensor]:
    world, parameter = World.of(None), torch.ones(1)
    sums = TreeSum([parameter], replicas=world.size, world=world)
    sums.add(world.rank, {id(parameter): torch.tensor([-0.0])} if world.rank == 0 else {})
    return [*sums.gradients(1.0).values()]


def test_zeros_are_positive(world):
    for size in (1, 2):
        for (total,) in world(size).run(sum_of_negative_zeros):
            assert not total.signbit().any()
