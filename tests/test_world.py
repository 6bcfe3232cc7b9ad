"""A world of ranks: on which nodes they are, and what they exchange."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist
from ranks import on_ranks

from lightning_gradavg._support.collectives import (
    Agreed,
    Contribution,
    World,
    _end_group,
    _end_group_before_interpreter,
)
from lightning_gradavg._support.place import Place, node_from_environment, places_on_nodes
from lightning_gradavg._support.text import message_of


def alike() -> Contribution:
    rank = dist.get_rank()
    return Contribution(["equal"], [7, 7], 0.1 * rank, rank // 2)


def unlike() -> Contribution:
    return alike()._replace(details=[7, dist.get_rank()])


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
        nodes, weights = [one // 2 for one in ranks], [0.1 * one for one in ranks]
        assert places_on_nodes(nodes) == world.places(rank // 2)
        for bring, details in ((alike, [[7, 7]] * len(ranks)), (unlike, [[7, one] for one in ranks])):
            numbers: list[list[float]] = [[]] * len(ranks)
            assert (bring(), Agreed(nodes, weights, details, numbers)) == world.agree("refused", bring)
    if rank != 1:
        dist.destroy_process_group(group)


def disagree(lines: list[list[str]]) -> None:
    """Body: bring the lines of this rank."""
    World.of(None).agree("refused", lambda: Contribution(lines[dist.get_rank()]))


@pytest.mark.parametrize(
    ("lines", "difference"),
    [
        ([["a", "b"], ["a", "c"]], "b on rank 0; c on rank 1"),
        ([["a", "b"], ["b"]], "a on rank 0; nothing on rank 1"),
        ([["a", "b"], ["b", "a"]], "a on rank 0; b on rank 1"),
        ([["a", "a"], ["a"]], "a on rank 0; nothing on rank 1"),
    ],
    ids=["another line", "no line", "another order", "another number"],
)
def test_the_first_line_that_differs_is_named(world, lines: list[list[str]], difference: str) -> None:
    for error in world(2).run_expecting_errors(disagree, lines):
        assert f"refused: {difference}" in error.message


@on_ranks()
def test_a_process_among_others_settles_once_at_its_exit() -> None:
    """Threads of gloo have a moment for what they do with the interpreter, or they may abort the process."""
    _end_group_before_interpreter.cache_clear()
    with mock.patch("atexit.register") as register:
        World.of(None)
        World.of(None)
    register.assert_called_once_with(_end_group)
    with mock.patch("time.sleep") as sleep, mock.patch("torch.distributed.destroy_process_group") as destroy:
        _end_group()
    sleep.assert_called_once_with(0.1)
    destroy.assert_called_once_with()


def test_places_on_uneven_nodes() -> None:
    assert (Place(0, 4, 0, 3), Place(1, 4, 2, 1), Place(2, 4, 0, 3), Place(3, 4, 0, 3)) == places_on_nodes([0, 2, 0, 0])
    assert () == places_on_nodes([])


@pytest.mark.parametrize(
    ("environ", "node"),
    [
        ({}, 0),
        ({"NODE_RANK": "2"}, 2),
        ({"SLURM_NODEID": "1", "NODE_RANK": "2"}, 1),
        ({"GROUP_RANK": "3", "SLURM_NODEID": "1", "NODE_RANK": "2"}, 3),
        ({"WORLD_SIZE": "4"}, 0),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}, 0),
        ({"MPI_LOCALNRANKS": "4", "PMI_SIZE": "4"}, 0),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "4", "GROUP_RANK": "1"}, 1),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, "set NODE_RANK"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "4"}, "set NODE_RANK"),
        ({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "4"}, "set NODE_RANK"),
        ({"NODE_RANK": "gpu-1"}, "NODE_RANK='gpu-1' is not the index of a node"),
    ],
    ids=str,
)
def test_node_is_what_the_launcher_says(environ: dict[str, str], node: int | str) -> None:
    """Where there are others that it says nothing of, that is an error, whose text the row has; so is a name."""
    if isinstance(node, str):
        with pytest.raises(ValueError, match=node):
            node_from_environment(environ)
    else:
        assert node == node_from_environment(environ)


class UnreadableError(ValueError):
    def __str__(self) -> str:
        raise KeyError("text")


@pytest.mark.parametrize(
    ("error", "text"),
    [(ValueError("a text"), "a text"), (UnreadableError(), "<no text: its __str__ raised KeyError>")],
)
def test_the_text_of_any_exception_can_be_read(error: Exception, text: str) -> None:
    assert text == message_of(error)
