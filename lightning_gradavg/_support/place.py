"""Where a rank stands: its rank, its node, and how many ranks share them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Place", "node_from_environment", "places_on_nodes"]

# torchrun's own variable comes first: its agents may themselves run as tasks of a SLURM job.
_NODE_VARIABLES = ("GROUP_RANK", "SLURM_NODEID", "NODE_RANK")
# The ranks on this node, and in all, by launcher. Open MPI, MPICH and Intel MPI name no node.
_SIZE_VARIABLES = (
    ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),  # torchrun
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("MPI_LOCALNRANKS", "PMI_SIZE"),  # MPICH and Intel MPI
)


@dataclass(frozen=True)
class Place:
    """One rank's position in the process group that reduces the gradient.

    Attributes:
        rank: Index of the rank in its process group, from 0.
        world_size: Number of ranks in the process group.
        node: Index of the node, as the launcher counts them; never a host name.
        ranks_on_node: Number of ranks of the process group on that node.
    """

    rank: int = 0
    world_size: int = 1
    node: int = 0
    ranks_on_node: int = 1


def places_on_nodes(nodes: Sequence[int]) -> tuple[Place, ...]:
    """Return the place of every rank, given its node, in rank order. Nodes may hold different numbers of ranks."""
    ranks_on = Counter(nodes)
    return tuple(Place(rank, len(nodes), node, ranks_on[node]) for rank, node in enumerate(nodes))


def node_from_environment(environ: Mapping[str, str] = os.environ) -> int:
    """Return the node of this process as its launcher counts nodes.

    That is the first of `GROUP_RANK` (torchrun), `SLURM_NODEID` and `NODE_RANK` (Lightning, or set by hand) that is
    set, or 0.

    Raises:
        ValueError: If none is set although the launcher says that there are other nodes, or one is no number.
    """
    for name in _NODE_VARIABLES:
        if name not in environ:
            continue
        node = environ[name]
        if not node:
            return 0  # set to nothing, it is no other node
        try:
            return int(node)
        except ValueError:
            raise ValueError(f"{name}={node!r} is not the index of a node: set it to a number from 0 on") from None
    # Nobody names the node. That is node 0, unless there are ranks on other nodes.
    for name_on_node, name_in_all in _SIZE_VARIABLES:
        ranks_on_node = environ.get(name_on_node)
        ranks_in_all = environ.get(name_in_all)
        if ranks_on_node is None or ranks_in_all is None:
            continue
        if ranks_on_node != ranks_in_all:
            raise ValueError("the launcher does not tell the node: set NODE_RANK to the index of the node, from 0")
    return 0
