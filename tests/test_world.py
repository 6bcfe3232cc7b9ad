"""A world of ranks: what they exchange, and how messages name them."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_gradavg.place import node_from_environment, places_on_nodes
from lightning_gradavg.ranks import Agreed, Contribution, World, _settle_at_exit, by_value, digest, on_ranks


@given(weight=st.floats(0, allow_infinity=False), details=st.lists(st.integers()))
def test_what_a_rank_brings_survives_the_exchange(weight: float, details: list[int]) -> None:
    """A weight keeps its last bit, and a rank that is alone agrees with itself."""
    mine = Contribution(["equal"], details, weight)
    assert (mine, Agreed([0], [weight], [details])) == World().agree("refused", lambda: mine)


def agree(case: str) -> Any:
    """Body: bring something, on rank 1 something else."""
    rank = dist.get_rank()
    if case == "failing" and rank != 1:
        raise KeyError(f"rank {rank}")
    if case == "misplaced" and rank == 1:
        os.environ["NODE_RANK"] = "first"
    equal = ["same", "b" if case == "unlike" and rank == 1 else "a"]
    return Contribution(equal, [7, rank % 2 if case == "uneven" else 0], 0.1, node_from_environment())


def agreed(case: str) -> Any:
    """Body: what the ranks agree on."""
    mine, others = World.of(None).agree("refused", partial(agree, case))
    assert mine.details == others.details[dist.get_rank()]
    return others


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
    assert "on rank 3" == on_ranks([3])
    assert "on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 504 more" == on_ranks(range(512))
    assert "a on rank 0; b on ranks 1, 2" == by_value("abb")


def exchange() -> Any:
    """Body: every exchange, of the default group and of one of two ranks."""
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    mine = World.of(group) if rank != 1 else World()
    worlds = (World.of(None), mine)
    try:
        return [
            (
                *(world.rank, world.size),
                *(world.gather_integers([2**60 + rank]), world.gather_floats([0.1 * rank])),
                *(world.gather_objects({"rank": rank}), world.from_first(rank), world.places(rank // 2)),
            )
            for world in worlds
        ]
    finally:
        if rank != 1:
            dist.destroy_process_group(group)


def test_exchanges(world: Any) -> None:
    """Every rank gets the rows of all in rank order, the value of the first, and everybody's place."""

    def expected(rank: int, ranks: list[int]) -> Any:
        rows, floats = [[2**60 + one] for one in ranks], [[0.1 * one] for one in ranks]
        objects, places = [{"rank": one} for one in ranks], places_on_nodes([one // 2 for one in ranks])
        return rank, len(ranks), rows, floats, objects, ranks[0], places

    assert [
        [expected(0, [0, 1, 2]), expected(0, [0, 2])],
        [expected(1, [0, 1, 2]), expected(0, [1])],
        [expected(2, [0, 1, 2]), expected(1, [0, 2])],
    ] == world(3).run(exchange)


def settles() -> int:
    """Body: how often the process waits at its exit."""
    World.of(None)
    return _settle_at_exit.cache_info().currsize


def test_a_process_among_others_waits_once_at_its_exit(world):
    """Threads of gloo have a moment for what they do with the interpreter, or they may abort the process."""
    with mock.patch("atexit.register") as register:
        _settle_at_exit.cache_clear()
        _settle_at_exit()
        _settle_at_exit()
        _settle_at_exit.cache_clear()
    assert [mock.call(time.sleep, 0.1)] == register.call_args_list
    assert [1, 1] == world(2).run(settles)
