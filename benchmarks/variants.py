"""Everything that is measured side by side."""

from __future__ import annotations

import torch.distributed as dist

from benchmarks.block import Setting, Variant, measure
from benchmarks.plain import BASELINE, COMPUTE, EXCHANGE, plain_variants
from benchmarks.trained import LIGHTNING, trained_variants
from benchmarks.ways import live_places, ways

__all__ = ["BASELINE", "COMPUTE", "EXCHANGE", "LIGHTNING", "Setting", "Variant", "measure", "variants"]


def variants() -> list[Variant]:
    """Return everything that can be measured, or says why not, in the order of the table; the process group is up."""
    found = list(ways(live_places(), nccl=dist.get_backend() == "nccl"))
    return [*plain_variants(found), *trained_variants(found)]
