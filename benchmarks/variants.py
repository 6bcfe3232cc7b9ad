"""The ways to train that benchmarks compare: Lightning's own strategy, and ours with its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, Strategy

from benchmarks.report import STOCK
from lightning_gradavg import GradAvgStrategy, hooks

__all__ = ["ALL", "OTHERS", "VARIANTS", "Variant", "chosen"]


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        strategy: Makes the strategy for a number of replicas.
        weighted: Whether the training step returns a weight, another one on each rank.
        changing: Whether the weight changes from step to step.
        shares_batches: Whether all ranks share each batch of the loader, of which each loads its own samples.
        on_device: Whether the weight is a tensor on the device, which the host must read.
    """

    strategy: Callable[[int], Strategy]
    weighted: bool = False
    changing: bool = False
    shares_batches: bool = False
    on_device: bool = False


def _stock(replicas: int, **options: Any) -> Strategy:
    del replicas
    return DDPStrategy(**options)


def _ours(replicas: int, **options: Any) -> Strategy:
    del replicas
    return GradAvgStrategy(**options)


def _replicated(replicas: int, **options: Any) -> Strategy:
    return GradAvgStrategy(num_replicas=replicas, **options)


_weighted_mean = partial(_ours, reduction="weighted_mean")

VARIANTS: Mapping[str, Variant] = {
    STOCK: Variant(_stock),
    "mean": Variant(_ours),
    "sum": Variant(partial(_ours, reduction="sum")),
    "weighted_mean": Variant(_weighted_mean, weighted=True),
    "weighted_mean, weights that change": Variant(_weighted_mean, weighted=True, changing=True),
    "single_device": Variant(partial(_ours, equivalent_to="single_device"), shares_batches=True),
    "data_parallel": Variant(partial(_replicated, equivalent_to="data_parallel"), shares_batches=True),
    "reproducible": Variant(partial(_replicated, reproducible=True), shares_batches=True),
}
"""What every table has."""

OTHERS: Mapping[str, Variant] = {
    "stock, bucket views": Variant(partial(_stock, gradient_as_bucket_view=True)),
    "mean, bucket views": Variant(partial(_ours, gradient_as_bucket_view=True)),
    "weighted_mean, no bucket views": Variant(partial(_weighted_mean, gradient_as_bucket_view=False), weighted=True),
    "weighted_mean, weights on the device": Variant(_weighted_mean, weighted=True, on_device=True),
    "split_batches": Variant(partial(_ours, split_batches=True), shares_batches=True),
    "exact_evaluation": Variant(partial(_ours, exact_evaluation=True)),
    "stock, bfloat16": Variant(partial(_stock, ddp_comm_hook=hooks.bfloat16)),  # on CPUs, Lightning ignores the hook
    **{
        f"weighted_mean, {name}": Variant(partial(_weighted_mean, ddp_comm_hook=getattr(hooks, name)), weighted=True)
        for name in hooks.__all__
    },
}
"""What some tables have, and `--only` names."""

ALL: Mapping[str, Variant] = {**VARIANTS, **OTHERS}


def chosen(names: Sequence[str]) -> list[str]:
    """Return the names of variants, and stock, with which all are compared.

    Raises:
        ValueError: If there is no variant of a name.
    """
    unknown = [name for name in names if name not in ALL]
    if unknown:
        raise ValueError(f"--only={unknown} names no variant; there are {list(ALL)}")
    return [STOCK, *(name for name in names if name != STOCK)]
