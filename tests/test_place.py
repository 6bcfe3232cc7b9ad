"""Places: which ranks share a node, and which node this process runs on."""

from __future__ import annotations

import pytest

from lightning_gradavg.place import Place, node_from_environment, places_on_nodes


def test_places_on_uneven_nodes() -> None:
    """Every rank knows its node and how many share it, whatever order the nodes come in."""
    assert (Place(0, 4, 0, 3), Place(1, 4, 2, 1), Place(2, 4, 0, 3), Place(3, 4, 0, 3)) == places_on_nodes([0, 2, 0, 0])
    assert () == places_on_nodes([])


def test_a_window_multiplies_ranks() -> None:
    """Micro-batches count as further ranks on the same node, and the rank stays."""
    assert Place(1, 12, 5, 6) == Place(1, 4, 5, 2).over_window(3)
    assert Place() == Place().over_window(1)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_rank_outside_the_world(rank: int, size: int) -> None:
    """A rank outside of its world is an error that quotes both."""
    with pytest.raises(ValueError, match=rf"rank must be in \[0, world_size={size}\), got {rank}"):
        Place(rank, size)


@pytest.mark.parametrize("ranks_on_node", [0, 3])
def test_node_larger_than_the_world(ranks_on_node: int) -> None:
    """A node has between one rank and all of them."""
    with pytest.raises(ValueError, match=rf"ranks_on_node must be in \[1, world_size=2\], got {ranks_on_node}"):
        Place(0, 2, 0, ranks_on_node)


@pytest.mark.parametrize(
    ("environ", "node"),
    [
        ({}, 0),
        ({"NODE_RANK": "2"}, 2),
        ({"SLURM_NODEID": "1", "NODE_RANK": "2"}, 1),
        ({"GROUP_RANK": "3", "SLURM_NODEID": "1", "NODE_RANK": "2"}, 3),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}, 0),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({"MPI_LOCALNRANKS": "4", "PMI_SIZE": "4"}, 0),
        ({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "4"}, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "4", "GROUP_RANK": "1"}, 1),
    ],
    ids=str,
)
def test_node_is_what_the_launcher_says(environ: dict[str, str], node: int | None) -> None:
    """The launcher's own variable counts; where it names no node although there are several, the node is unknown."""
    assert node == node_from_environment(environ)


def test_node_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument the environment of the process is read."""
    monkeypatch.setenv("NODE_RANK", "7")
    assert 7 == node_from_environment()


@pytest.mark.parametrize("value", ["", "-1", "one", "1.0", "²"])
def test_node_that_is_no_index(value: str) -> None:
    """A node that is no integer >= 0 is quoted with the variable's name."""
    with pytest.raises(ValueError, match="NODE_RANK is the index of the node") as caught:
        node_from_environment({"NODE_RANK": value})
    assert repr(value) in str(caught.value)
