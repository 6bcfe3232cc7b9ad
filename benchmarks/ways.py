"""The ways in which our options send buckets on the network at hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from lightning_gradavg.place import Place, node_from_environment
from lightning_gradavg.ranks import gather_places
from lightning_gradavg.wire.options import WIRE_DTYPES, WireOptions
from lightning_gradavg.wire.route import Route, route_of

__all__ = ["FLAT", "NODE_BY_NODE", "Way", "live_places", "ways"]

NODE_BY_NODE = "node by node"

FLAT = "flat"


@dataclass(frozen=True)
class Way:
    """A way of buckets.

    Attributes:
        name: What a variant's name ends in.
        wire: The options that ask for it.
        places: Of all ranks.
        obstacle: Why it is not to be had here, or which other way it would be; None if neither.
    """

    name: str
    wire: WireOptions
    places: Sequence[Place] = ()
    obstacle: str | None = None

    @property
    def options(self) -> Mapping[str, Any]:
        """The same options by the names that `GradAvgStrategy` has for them."""
        wire = self.wire
        return MappingProxyType({"wire_dtype": wire.dtype, "wire_scope": wire.scope, "node_aware": wire.node_aware})


def live_places() -> tuple[Place, ...]:
    """Return the places of all ranks of the live process group."""
    node = node_from_environment()
    assert node is not None  # torchrun tells
    return gather_places(node, None)


def ways(places: Sequence[Place] | None = None, *, nccl: bool | None = None) -> Iterator[Way]:
    """Yield every way that is not the plain all-reduce.

    Where the nodes have equally many ranks, two or more, gloo goes node by node unless told not to. A wire type then
    applies between nodes, so that `wire_scope="nodes"` changes nothing.

    Args:
        places: Of all ranks; by default those of the live process group.
        nccl: Whether the backend is NCCL; by default that of the live process group.
    """
    places = live_places() if places is None else places
    nccl = dist.get_backend() == "nccl" if nccl is None else nccl

    def route(wire: WireOptions) -> Route:
        # Whatever the rank, the kind of the route is the same.
        return route_of(wire, places, 0, nccl=nccl)

    def way(name: str, wire: WireOptions, other: Way | None = None) -> Way:
        found = route(wire)
        obstacle = found.reason
        if obstacle is None and other is not None and found == route(other.wire):
            obstacle = f"the same as {other.name} on these nodes"
        elif obstacle is None and other is None and not found.hops:
            obstacle = "there is one rank"
        return Way(name, wire, places, obstacle)

    plain = Way("the plain all-reduce", WireOptions(node_aware=False))
    yield way(NODE_BY_NODE, WireOptions(node_aware=True), plain)
    yield way(FLAT, WireOptions(node_aware=False), Way("what is chosen by itself", WireOptions()))
    for dtype in WIRE_DTYPES:
        on_wire = way(f"{dtype} on the wire", WireOptions(dtype))
        yield on_wire
        yield way(f"{dtype} on the wire, {FLAT}", WireOptions(dtype, node_aware=False), on_wire)
        between = way(f"{dtype} between nodes", WireOptions(dtype, "nodes"), on_wire)
        alone = not route(between.wire).hops
        yield replace(between, obstacle="all ranks are on one node" if alone else between.obstacle)
