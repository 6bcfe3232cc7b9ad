"""What the ranks logged in one evaluation, made complete on each of them: a rank may have had no batch to log from.

Lightning and torchmetrics reduce what is logged key by key and state by state, in the order in which a rank has it. A
rank that lacks a key, or has a shorter list than the others, would leave them waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from torchmetrics import Metric

from lightning_gradavg.lightning_internals import REDUCTIONS, SYNC, neutral, reduce_by
from lightning_gradavg.methods import replaced
from lightning_gradavg.ranks import World

__all__ = ["complete", "gathers_lists"]


def complete(
    results: dict[str, Any], gather: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]], module: LightningModule
) -> None:
    """Add what other ranks logged and this one did not, and put all into one order.

    `gather` returns the neutral value of all that every rank logged and that all ranks reduce, or none, at the end.
    """
    mine = {key: neutral(entry) for key, entry in results.items() if _is_of_all_ranks(entry)}
    everything = {key: entry for of_rank in gather(mine) for key, entry in of_rank.items()}
    ordered = {key: results[key] if key in mine else _taken_over(entry, module) for key, entry in everything.items()}
    rest = {key: entry for key, entry in results.items() if key not in ordered}
    results.clear()
    results.update(ordered | rest)


def _is_of_all_ranks(entry: Any) -> bool:
    # Of a group of its own, or logged by rank 0 alone, the user knows which ranks take part.
    sync = entry.meta.sync
    own = entry.has_reset or sync.rank_zero_only or sync.group is not None
    return not own and (sync.should or not entry.is_tensor)


def _taken_over(entry: Any, module: LightningModule) -> Any:
    """Return another rank's neutral value for this rank's results."""
    reduce_by(entry, module.trainer.strategy.reduce)
    entry.to(module.device)
    if not entry.is_tensor:
        entry.value = module.get_submodule(entry.meta.metric_attribute)  # Lightning logs none that it does not find
    return entry


def gathers_lists(metric: Metric, world: World, alone: Callable[[], bool]) -> AbstractContextManager[None]:
    """Have a metric gather list states of any length, on this rank with any content; nothing where a rank is `alone`.

    Its own way takes lists of one length, or concatenates them, for which an empty one lacks type and shape.
    """

    def synced(metric: Metric, *args: Any, **kwargs: Any) -> None:
        if alone():
            return
        lists = {name: state for name, state in metric.metric_state.items() if isinstance(state, list)}
        others = {name: how for name, how in getattr(metric, REDUCTIONS).items() if name not in lists}
        with replaced(metric, REDUCTIONS, others):
            getattr(type(metric), SYNC)(metric, *args, **kwargs)
        of_ranks = world.gather_objects(move_data_to_device(lists, "cpu")) if lists else []
        for name in lists:
            everything = [item for of_rank in of_ranks for item in of_rank[name]]
            setattr(metric, name, move_data_to_device(everything, metric.device))

    return replaced(metric, SYNC, MethodType(synced, metric))  # of a copy's own, where a metric is cloned
