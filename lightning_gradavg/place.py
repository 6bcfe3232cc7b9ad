"""Where a rank stands: its rank, its node, and how many ranks share them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

__all__ = ["Place", "node_from_environment", "places_on_nodes"]

# torchrun's own variable comes first: its agents may themselves run as tasks of a SLURM job.
_NODE_VARIABLES = ("GROUP_RANK", "SLURM_NODEID", "NODE_RANK")
_SIZE_VARIABLES = (
    ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),  # Open MPI names no node
    ("MPI_LOCALNRANKS", "PMI_SIZE"),  # neither do MPICH and Intel MPI
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

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be in [0, world_size={self.world_size}), got {self.rank}")
        if not 1 <= self.ranks_on_node <= self.world_size:
            raise ValueError(f"ranks_on_node must be in [1, world_size={self.world_size}], got {self.ranks_on_node}")

    def over_window(self, micro_batches: int) -> Place:
        """Return the place seen by a rule when every rank accumulated `micro_batches` micro-batches.

        Accumulated micro-batches count as further ranks on the same node, so both `world_size` and
        `ranks_on_node` grow by that factor; `rank` stays that of the process.
        """
        if micro_batches == 1:
            return self
        return replace(
            self,
            world_size=self.world_size * micro_batches,
            ranks_on_node=self.ranks_on_node * micro_batches,
        )


def places_on_nodes(nodes: Sequence[int]) -> tuple[Place, ...]:
    """Return every rank's place, given the node of each rank in rank order.

    Args:
        nodes: `nodes[r]` is the node of rank `r`. Nodes may hold different numbers of ranks, in any order.

    Returns:
        One `Place` per rank, in rank order.
    """
    ranks_on = Counter(nodes)
    return tuple(Place(rank, len(nodes), node, ranks_on[node]) for rank, node in enumerate(nodes))


def node_from_environment(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the node of this process as its launcher counts nodes.

    Args:
        environ: The environment; that of the process by default.

    Returns:
        The value of the first of `GROUP_RANK` (torchrun), `SLURM_NODEID` and `NODE_RANK` (Lightning, or set by hand)
        that is set; 0 if none is set; None if none is set although the launcher says that there are other nodes.

    Raises:
        ValueError: If the variable is not an integer >= 0.
    """
    environ = os.environ if environ is None else environ
    for name in _NODE_VARIABLES:
        value = environ.get(name)
        if value is not None:
            if not (value.isascii() and value.isdigit()):
                raise ValueError(f"the environment variable {name} is the index of the node, from 0; got {value!r}")
            return int(value)
    for on_node, in_all in _SIZE_VARIABLES:
        if on_node in environ and in_all in environ and environ[on_node] != environ[in_all]:
            return None
    return 0
