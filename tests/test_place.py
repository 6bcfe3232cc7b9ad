"""Places: which ranks share a node, and which node this process runs on."""

from __future__ import annotations

import pytest

from lightning_gradavg.place import Place, node_from_environment, places_on_nodes


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
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "4"}, None),
    ],
    ids=str,
)
def test_node_is_what_the_launcher_says(environ: dict[str, str], node: int | None) -> None:
    """Where there are others that it says nothing of, that is an error."""
    if node is None:
        with pytest.raises(ValueError, match="set NODE_RANK"):
            node_from_environment(environ)
    else:
        assert node == node_from_environment(environ)
