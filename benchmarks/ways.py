"""The ways in which our options send buckets on the network at hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_gradavg.place import Place, node_from_environment
from lightning_gradavg.ranks import World

__all__ = ["FLAT", "NODE_BY_NODE", "WIRE_TYPES", "Way", "live_places", "ways"]

NODE_BY_NODE = "node by node"

FLAT = "flat"

WIRE_TYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Way:
    """A way of buckets.

    Attributes:
        name: What a variant's name ends in.
        options: Those of `GradAvgStrategy` that ask for it.
        exact: Whether numbers travel in float32.
    """

    name: str
    options: Mapping[str, Any]
    exact: bool = True


def live_places() -> tuple[Place, ...]:
    """Return the places of all ranks of the live process group."""
    node = node_from_environment()
    assert node is not None  # torchrun tells
    return World.of(None).places(node)


def ways(places: Sequence[Place], *, nccl: bool) -> Iterator[Way]:
    """Yield every way that is not the plain all-reduce and not another one's.

    Where the nodes have equally many ranks, two or more, gloo goes node by node unless told not to. NCCL lays its own
    ways between nodes.
    """
    nodes = [place.node for place in places]
    on_node = {nodes.count(node) for node in nodes}
    grouped = not nccl and len(set(nodes)) > 1 and len(on_node) == 1 and on_node != {1}
    if grouped:
        yield Way(NODE_BY_NODE, {"node_aware": True})
        yield Way(FLAT, {"node_aware": False})
    for dtype in WIRE_TYPES if len(places) > 1 else ():
        yield Way(f"{dtype} on the wire", {"wire_dtype": dtype}, exact=False)
        if grouped:
            yield Way(f"{dtype} on the wire, {FLAT}", {"wire_dtype": dtype, "node_aware": False}, exact=False)
