"""Everything that is measured side by side."""

from __future__ import annotations

from benchmarks.block import Setting, Variant, measure
from benchmarks.plain import BASELINE, COMPUTE, EXCHANGE, plain_variants
from benchmarks.trained import LIGHTNING, trained_variants
from benchmarks.world import World

__all__ = ["BASELINE", "COMPUTE", "EXCHANGE", "LIGHTNING", "Setting", "Variant", "measure", "variants"]


def variants(world: World) -> list[Variant]:
    """Return everything that can be measured, or says why not, in the order of the table; the process group is up."""
    several_on_nodes = world.nodes > 1 and world.ranks_on_node > 1
    return [*plain_variants(), *trained_variants(several_on_nodes=several_on_nodes)]
