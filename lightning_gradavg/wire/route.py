"""The way of a bucket: over which groups of ranks it is scattered and summed, and where it is sent in the wire type.

Bytes that leave a node of `L` ranks, with `M` nodes, `W = L M` ranks and a bucket of `S` bytes:

    ring all-reduce                        2 (W - 1) / W * S
    reduce-scatter over all ranks          2 (W - L) / W * L * S
    hierarchical, in the node first        2 (M - 1) / M * S

and an all-gather follows. So with several ranks on a node the last sends the least, whatever the type. In half the
bytes it sends `(M - 1) / M * S`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gradavg.place import Place

__all__ = ["Hop", "Route", "WireOptions", "bytes_leaving_a_node", "route_of"]

_WIRE_DTYPES = ("bfloat16", "float16")
_WIRE_SCOPES = ("all", "nodes")


@dataclass(frozen=True)
class WireOptions:
    """How a user wants buckets to travel.

    Attributes:
        dtype: What numbers are sent as: `"bfloat16"`, `"float16"`, or None for the type of the gradients.
        scope: `"all"` to send so between any two ranks, `"nodes"` only between nodes.
        node_aware: Whether to sum within each node before anything is sent between nodes; None where it pays.

    Raises:
        ValueError: If a value is unknown, or two contradict each other.
    """

    dtype: str | None = None
    scope: str = "all"
    node_aware: bool | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in _WIRE_DTYPES:
            raise ValueError(
                f"wire_dtype={self.dtype!r} is not one of {', '.join(map(repr, _WIRE_DTYPES))}. Choose one, or None to"
                " send gradients in their own type."
            )
        if self.scope not in _WIRE_SCOPES:
            raise ValueError(f"wire_scope={self.scope!r} is not one of {', '.join(map(repr, _WIRE_SCOPES))}.")
        if self.scope == "nodes" and self.dtype is None:
            raise ValueError("wire_scope='nodes' says where wire_dtype applies, which is not set. Set it as well.")
        if self.node_aware not in (None, True, False):
            raise ValueError(f"node_aware must be True, False, or None for where it pays; got {self.node_aware!r}")

    @property
    def asked_for(self) -> str | None:
        """The option that needs DDP's communication hook, as it was given; None if none does."""
        if self.dtype is not None:
            return f"wire_dtype={self.dtype!r}"
        return "node_aware=True" if self.node_aware else None


@dataclass(frozen=True)
class Hop:
    """One scattering of parts over a group of ranks, each of which sums what it gets.

    Attributes:
        ranks: The members, by their rank in the process group of DDP, in increasing order.
        index: This rank's position among them.
        narrow: Whether parts are sent in the wire type, and not in that of the sum.
    """

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
        return self._parts_below(0)

    def held(self, depth: int) -> slice:
        """Return the parts that this rank has of a bucket that was scattered in the first `depth` hops."""
        start = sum(hop.index * self._parts_below(number + 1) for number, hop in enumerate(self.hops[:depth]))
        return slice(start, start + self._parts_below(depth))

    def _parts_below(self, depth: int) -> int:
        parts = 1
        for hop in self.hops[depth:]:
            parts *= len(hop.ranks)
        return parts


def route_of(options: WireOptions, places: Sequence[Place], rank: int, *, lays_own_ways: bool) -> Route:
    """Return the way of buckets on this rank.

    Args:
        options: What the user asks for.
        places: The places of all ranks, in rank order.
        rank: This rank.
        lays_own_ways: Whether the backend's own all-reduce knows the nodes, as NCCL's does: there it sums gradients in
            their own type unless node_aware=True.

    Raises:
        ValueError: If the wire type would have a node send more than one all-reduce in float32 does.
    """
    on_node: dict[int, list[int]] = defaultdict(list)
    for place in places:
        on_node[place.node].append(place.rank)
    nodes = [on_node[node] for node in sorted(on_node)]
    narrow = options.dtype is not None
    if len(places) == 1 or (options.scope == "nodes" and len(nodes) == 1):
        return Route()
    obstacle = _obstacle(nodes)
    pays = options.node_aware or narrow or not lays_own_ways
    if options.node_aware is not False and obstacle is None and pays:
        mine = on_node[places[rank].node]
        local = mine.index(rank)
        # In the order of a process group, whichever nodes they are on.
        across = sorted(members[local] for members in nodes)
        return Route((Hop(tuple(mine), local, narrow=False), Hop(tuple(across), across.index(rank), narrow=narrow)))
    reason = None
    if options.node_aware:
        reason = f"node_aware=True has no effect: {obstacle}"
    elif options.scope == "nodes" and len(nodes) < len(places):
        cause = obstacle or "node_aware=False"
        reason = f"wire_scope='nodes' has no effect, and all ranks send in {options.dtype}: {cause}"
    if not narrow:
        return Route((), reason)
    _refuse_more_bytes(options, [len(members) for members in nodes])
    return Route((Hop(tuple(range(len(places))), rank, narrow=True),), reason)


def _refuse_more_bytes(options: WireOptions, sizes: Sequence[int]) -> None:
    world = sum(sizes)
    largest = max(sizes, key=lambda size: size * (world - size))
    narrow, ring = largest * (world - largest) / world, 2 * (world - 1) / world
    if narrow > ring:
        raise ValueError(
            f"wire_dtype={options.dtype!r} would have a node of {largest} ranks send {narrow:.3g} times the gradients"
            f" to the other nodes, where one all-reduce in float32 sends {ring:.3g} times: there are nodes of"
            f" {', '.join(map(str, sorted(set(sizes))))} ranks, and node_aware={options.node_aware}. Leave wire_dtype"
            " out; or give all nodes equally many ranks, and leave node_aware out."
        )


def _obstacle(nodes: Sequence[Sequence[int]]) -> str | None:
    """Return why there is no hierarchical all-reduce, or None."""
    sizes = [len(members) for members in nodes]
    if len(nodes) == 1:
        return "all ranks are on one node"
    if len(set(sizes)) > 1:
        return f"the nodes have {', '.join(map(str, sizes))} ranks, and parts are summed by ranks of equal position"
    return "each node has one rank" if sizes[0] == 1 else None


def bytes_leaving_a_node(route: Route, places: Sequence[Place], numbers: int, itemsize: int) -> float:
    """Return the bytes that the first rank's node sends to others for one bucket, headers left out.

    Args:
        route: The way of buckets on the first rank; on the others it is alike.
        places: The places of all ranks, in rank order, with equally many on each node.
        numbers: Numbers in the bucket.
        itemsize: Bytes of a number in the type of the sum; half of it where a hop is narrow.
    """
    node = {place.rank for place in places if place.node == places[0].node}
    size = float(numbers * itemsize)
    if not route.hops:
        world = len(places)
        return 2 * (world - 1) / world * size if len(node) < world else 0.0
    sent = 0.0
    last = route.hops[-1]
    for hop in route.hops:
        others = sum(member not in node for member in hop.ranks)
        part = size / (2 if hop.narrow else 1) / len(hop.ranks)
        back = size / (2 if last.narrow else 1) / len(hop.ranks)
        sent += others * (part + back) * len(node)
        size /= len(hop.ranks)
    return sent
