"""Places: which ranks share a node, and which node this process runs on."""

from __future__ import annotations

import pytest

from lightning_gradavg.place import Place, node_from_environment, places_on_nodes


def test_places_on_uneven_nodes() -> None:
    """Every rank knows its node and how many share it, whatever order the nodes come in."""
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
    ],
    ids=str,
)
def test_node_is_what_the_launcher_says(environ: dict[str, str], node: int) -> None:
    """The launcher's own variable counts."""
    assert node == node_from_environment(environ)


@pytest.mark.parametrize(
    ("of_node", "of_all"),
    [
        ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
        ("MPI_LOCALNRANKS", "PMI_SIZE"),
    ],
)
def test_a_node_that_no_launcher_tells(of_node: str, of_all: str) -> None:
    with pytest.raises(ValueError, match="set NODE_RANK"):
        node_from_environment({of_node: "2", of_all: "4"})
