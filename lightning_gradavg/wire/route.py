"""The way of a bucket: over which groups of ranks it is scattered and summed, and where it is sent in the wire type."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gradavg.place import Place
from lightning_gradavg.wire.options import WireOptions

__all__ = ["Hop", "Route", "route_of"]


@dataclass(frozen=True)
class Hop:
    """One scattering of parts over a group of ranks, each of which sums what it gets.

    Attributes:
        name: What the group is called, the same on its members and on no others.
        ranks: The members, by their rank in the process group of DDP.
        index: This rank's position among them.
        narrow: Whether parts are sent in the wire type, and not in that of the gradients.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    narrow: bool


@dataclass(frozen=True)
class Route:
    """How a bucket travels.

    Attributes:
        hops: What it goes through until each rank holds one part of the sum. It is gathered on the way back, in the
            type of the last hop. None for one all-reduce in the type of the gradients.
        reason: Why it is not what was asked for, or None.
    """

    hops: tuple[Hop, ...] = ()
    reason: str | None = None

    @property
    def parts(self) -> int:
        """Number of parts that a bucket is cut into: one for each rank."""
        parts = 1
        for hop in self.hops:
            parts *= len(hop.ranks)
        return parts

    def held(self, depth: int) -> slice:
        """Return the parts that this rank has of a bucket that was scattered in the first `depth` hops."""
        start, length = 0, self.parts
        for hop in self.hops[:depth]:
            length //= len(hop.ranks)
            start += hop.index * length
        return slice(start, start + length)


def route_of(options: WireOptions, places: Sequence[Place], rank: int, *, nccl: bool) -> Route:
    """Return the way of buckets on this rank.

    Summing within the nodes first pays where several ranks share a node's link to other nodes: per node,
    `2 (M - 1) / M` buckets cross the links of M nodes instead of `2 (W - 1) / W` or more.

    Args:
        options: What the user asks for.
        places: The places of all ranks, in rank order.
        rank: This rank.
        nccl: Whether the backend is NCCL, which lays its own ways between nodes.
    """
    on_node: dict[int, list[int]] = defaultdict(list)
    for place in places:
        on_node[place.node].append(place.rank)
    nodes = [on_node[node] for node in sorted(on_node)]
    if len(places) == 1 or (options.scope == "nodes" and len(nodes) == 1):
        return Route()
    obstacle = _obstacle(nodes, nccl=nccl)
    if options.node_aware is not False and obstacle is None:
        mine = on_node[places[rank].node]
        local, at = mine.index(rank), nodes.index(mine)
        return Route(
            (
                Hop(f"node{at}", tuple(mine), local, narrow=False),
                Hop(f"across{local}", tuple(members[local] for members in nodes), at, narrow=options.dtype is not None),
            )
        )
    reason = None
    if options.node_aware:
        reason = f"node_aware=True has no effect: {obstacle}"
    elif options.scope == "nodes" and len(nodes) < len(places):
        cause = obstacle or "node_aware=False"
        reason = f"wire_scope='nodes' has no effect, and all ranks send in {options.dtype}: {cause}"
    if options.dtype is None:
        return Route(reason=reason)
    return Route((Hop("all", tuple(range(len(places))), rank, narrow=True),), reason)


def _obstacle(nodes: Sequence[Sequence[int]], *, nccl: bool) -> str | None:
    """Return why ranks are not summed node by node, or None."""
    sizes = [len(members) for members in nodes]
    if nccl:
        return "NCCL lays its own ways within and between nodes"
    if len(nodes) == 1:
        return "all ranks are on one node"
    if len(set(sizes)) > 1:
        return f"the nodes have {', '.join(map(str, sizes))} ranks, and parts are summed by ranks of equal position"
    return "each node has one rank" if sizes[0] == 1 else None
