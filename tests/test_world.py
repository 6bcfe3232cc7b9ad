"""A world of ranks: what they exchange, and how messages name them."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks

from lightning_gradavg.place import node_from_environment, places_on_nodes
from lightning_gradavg.ranks import Agreed, Contribution, World, _end, _end_in_order, by_value, digest
from lightning_gradavg.ranks import on_ranks as in_words


@given(weight=st.floats(0, allow_infinity=False), details=st.lists(st.integers()))
def test_what_a_rank_brings_survives_the_exchange(weight: float, details: list[int]) -> None:
    """A weight keeps its last bit, and a rank that is alone agrees with itself."""
    mine = Contribution(["equal"], details, weight)
    assert (mine, Agreed([0], [weight], [details])) == World().agree("refused", lambda: mine)


def agreed(case: str) -> Any:
    """Body: what the ranks agree on, of which rank 1 brings something else."""

    def bring() -> Contribution:
        rank = dist.get_rank()
        if case == "failing" and rank != 1:
            raise KeyError(f"rank {rank}")
        if case == "misplaced" and rank == 1:
            os.environ["NODE_RANK"] = "first"
        equal = ["same", "b" if case == "unlike" and rank == 1 else "a"]
        return Contribution(equal, [7, rank % 2 if case == "uneven" else 0], 0.1, node_from_environment())

    return World.of(None).agree("refused", bring)[1]


def test_ranks_agree(world: Any) -> None:
    """Every rank knows the nodes, weights and details of all, whether details differ or not."""
    assert [([0] * 3, [0.1] * 3, [[7, 0]] * 3)] * 3 == world(3).run(agreed, "even")
    assert [([0] * 3, [0.1] * 3, [[7, 0], [7, 1], [7, 0]])] * 3 == world(3).run(agreed, "uneven")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("failing", "refused, on rank 0: KeyError: 'rank 0'; on rank 2: KeyError: 'rank 2'."),
        ("misplaced", "refused, on rank 1: invalid literal for int() with base 10: 'first'"),
        ("unlike", "refused: a on ranks 0, 2; b on rank 1. Pass the same, in the same order, on all ranks."),
    ],
)
def test_ranks_raise_together(world: Any, case: str, message: str) -> None:
    """What any rank meets, and what differs, is one ValueError on all ranks."""
    raised = world(3).run_expecting_errors(agreed, case)
    assert ["ValueError"] * 3 == [one.type_name for one in raised]
    assert all(one.message.startswith(message) for one in raised)


def test_ranks_in_words() -> None:
    """Messages say which ranks hold which value, and shorten long lists of ranks; a digest is a 64-bit integer."""
    assert digest("a") == digest("a") != digest("b")
    assert all(-(2**63) <= digest(str(number)) < 2**63 for number in range(100))
    assert "on rank 3" == in_words([3])
    assert "on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 504 more" == in_words(range(512))
    assert "a on rank 0; b on ranks 1, 2" == by_value("abb")


@on_ranks(3)
def test_exchanges() -> None:
    """Every rank gets the rows of all in rank order, the value of the first, and everybody's place."""
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    worlds = {World.of(None): [0, 1, 2], (World() if rank == 1 else World.of(group)): [1] if rank == 1 else [0, 2]}
    for world, ranks in worlds.items():
        assert (world.rank, world.size) == (ranks.index(rank), len(ranks))
        assert [[2**60 + one] for one in ranks] == world.gather_integers([2**60 + rank])
        assert [[0.1 * one] for one in ranks] == world.gather_floats([0.1 * rank])
        assert [{"rank": one} for one in ranks] == world.gather_objects({"rank": rank})
        assert ranks[0] == world.from_first(rank)
        assert places_on_nodes([one // 2 for one in ranks]) == world.places(rank // 2)
    if rank != 1:
        dist.destroy_process_group(group)


@on_ranks()
def test_a_process_among_others_settles_once_at_its_exit() -> None:
    """Threads of gloo have a moment for what they do with the interpreter, or they may abort the process."""
    World.of(None)
    assert _end_in_order.cache_info().currsize == 1
    with mock.patch("time.sleep") as sleep, mock.patch("torch.distributed.destroy_process_group") as destroy:
        _end()
    assert [mock.call(0.1)] == sleep.call_args_list
    destroy.assert_called_once_with()
