"""Metrics of torchmetrics over ranks that update them different numbers of times, or never.

Torchmetrics sends each state on its own, and takes for granted that every rank has updated a metric, as often as the
others. Where the batches of a loader are shared out one by one, that does not hold. Here the ranks send all states of a
metric at once, with its number of updates, and each rank merges them:

| state  | reduction | merged over the ranks that have updated the metric                   |
|--------|-----------|----------------------------------------------------------------------|
| list   | any       | the elements in rank order, of any number, shape and type            |
| tensor | "cat"     | concatenated                                                         |
| tensor | "mean"    | weighted by the updates of each rank, as torchmetrics weighs batches |
| tensor | any other | stacked, and reduced as torchmetrics does it                         |

What belongs to a metric follows from the call of its `compute`. Where a metric is held does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_mean
from torchmetrics.wrappers import Running

from lightning_gradavg._lightning.internals import REDUCTIONS, SYNC
from lightning_gradavg._lightning.methods import replaced
from lightning_gradavg._support.collectives import World
from lightning_gradavg.reduction.gather import require_gather_allowed

__all__ = ["is_merged", "merged_over_ranks", "running_refused"]


def merged_over_ranks(
    owner: Metric | type[Metric], world: World, computed: MutableMapping[int, Metric] | None = None
) -> AbstractContextManager[None]:
    """Within the context, have one metric, or those of a class, merge their states as the table of this module says.

    A metric that has an exchange of its own keeps it: one with a `process_group` or a `dist_sync_fn`, or of a class
    outside of torchmetrics that overrides the method that exchanges.

    Args:
        owner: The metric, or the class.
        world: The ranks.
        computed: Gets the metrics whose states are merged, by their identity.
    """

    def sync(
        metric: Metric, dist_sync_fn: object = None, process_group: object = None, *args: Any, **kwargs: Any
    ) -> None:
        if dist_sync_fn is not None or process_group is not None or _has_own_exchange(metric):
            stock(metric, dist_sync_fn, process_group, *args, **kwargs)
            return

        def merge(*_: Any, **__: Any) -> None:
            require_gather_allowed()
            if computed is not None:
                computed[id(metric)] = metric
            _merge_states(metric, world)

        # Torchmetrics' method decides whether to exchange, and keeps the states of this rank. Replaced on the metric,
        # the exchange is ours in subclasses of torchmetrics, too: that of detection metrics takes equal lengths for
        # granted.
        with replaced(metric, SYNC, merge):
            stock(metric, dist_sync_fn, process_group, *args, **kwargs)

    stock: Any = Metric.sync
    if isinstance(owner, Metric):
        # Bound to the metric, so that a copy of the metric gets a method of its own.
        return replaced(owner, "sync", MethodType(sync, owner))
    return replaced(owner, "sync", sync)


def is_merged(metric: Metric) -> bool:
    """Return whether `merged_over_ranks` serves a metric: it has no exchange of its own."""
    return metric.dist_sync_fn is None and not _has_own_exchange(metric)


def _has_own_exchange(metric: Metric) -> bool:
    exchange = getattr(type(metric), SYNC)
    return metric.process_group is not None or not exchange.__module__.startswith("torchmetrics.")


class _StatesOfRank(NamedTuple):
    """What a rank sends of a metric."""

    updates: int
    states: dict[str, Any]  # on the CPU


def _merge_states(metric: Metric, world: World) -> None:
    """Replace the states of a metric by those of all ranks. A collective operation."""
    local = _StatesOfRank(metric.update_count, move_data_to_device(metric.metric_state, "cpu"))
    # By pickle: list states may hold anything.
    ranks = [rank for rank in world.gather_objects(local) if rank.updates > 0]
    for name in metric.metric_state:
        states = [rank.states[name] for rank in ranks]
        if len(states) == 1:
            # As on one process, where torchmetrics reduces nothing.
            setattr(metric, name, move_data_to_device(states[0], metric.device))
        elif len(states) > 1:
            reduction = getattr(metric, REDUCTIONS)[name]
            merged = _merged(states, [rank.updates for rank in ranks], reduction)
            setattr(metric, name, move_data_to_device(merged, metric.device))


def _merged(states: list[Any], updates: list[int], reduction: Callable[[Any], Any] | None) -> Any:
    """Return one state of several ranks as one. The module has the table."""
    if isinstance(states[0], list):
        merged: Any = [element for state in states for element in state]
        # `dim_zero_cat` raises for an empty list.
        if not merged:
            return merged
    elif reduction is dim_zero_cat:
        merged = states
    else:
        merged = torch.stack(states)
        if reduction is dim_zero_mean:
            # In 32 bits or more: 16 may hold neither the number of updates nor its product with a value.
            wide = merged.to(torch.promote_types(merged.dtype, torch.float32))
            mean = torch.tensordot(wide.new_tensor(updates), wide, dims=1) / sum(updates)
            if merged.is_floating_point():
                mean = mean.to(merged.dtype)
            return mean
    if reduction is None:
        return merged
    return reduction(merged)


_RUNNING = (
    "{} is updated in an evaluation step. It is the value of the last batches of the loader, but under exact evaluation"
    " other ranks have some of these. Use the metric that it wraps, over all batches."
)


def running_refused() -> AbstractContextManager[None]:
    """Within the context, make it an error to update or compute a `Running` metric."""

    def refuse(running: nn.Module) -> Metric:
        raise RuntimeError(_RUNNING.format(type(running).__name__))

    # Whatever it does, it reads the metric that it wraps. Replacing `update` on the class would change nothing: every
    # instance keeps its own, which `Metric.__init__` has wrapped.
    return replaced(Running, "base_metric", property(refuse))
