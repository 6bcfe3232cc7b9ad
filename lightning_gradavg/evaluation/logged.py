"""What the ranks logged in one evaluation, made complete on each of them: a rank may have had no batch to log from.

Lightning and torchmetrics reduce what is logged key by key and state by state, in the order in which a rank has it. A
rank that lacks a key, or has a shorter list than the others, would leave them waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from torchmetrics import Metric

from lightning_gradavg.lightning_internals import REDUCTIONS, SYNC, neutral_result
from lightning_gradavg.methods import replaced
from lightning_gradavg.ranks import World

__all__ = ["Logged", "complete", "describe", "gathers_lists"]


class Logged(NamedTuple):
    """What a rank logged under one key: the fields of Lightning's metadata, and whether it is reduced over the ranks.

    `dtypes` has the type of each state; it is empty if a `Metric` was logged, which has its own states.
    """

    fields: dict[str, Any]
    synced: bool
    dtypes: dict[str, torch.dtype]


def describe(results: Mapping[str, Any]) -> dict[str, Logged]:
    """Return what is reduced at the end of the evaluation, by all ranks or none."""
    return {key: _logged(entry) for key, entry in results.items() if _is_of_all_ranks(entry)}


def _is_of_all_ranks(entry: Any) -> bool:
    # Of a group of its own, or logged by rank 0 alone, the user knows which ranks take part.
    sync = entry.meta.sync
    own = entry.has_reset or sync.rank_zero_only or sync.group is not None
    return entry.meta.on_epoch and not own and (sync.should or not entry.is_tensor)


def _logged(entry: Any) -> Logged:
    dtypes = {name: getattr(entry, name).dtype for name in entry.metric_state} if entry.is_tensor else {}
    names = [field.name for field in fields(entry.meta) if not field.name.startswith("_")]
    return Logged({name: getattr(entry.meta, name) for name in names}, entry.meta.sync.should, dtypes)


def complete(results: dict[str, Any], of_ranks: Sequence[Mapping[str, Logged]], module: LightningModule) -> None:
    """Add what other ranks logged and this one did not, and put all into one order."""
    mine = describe(results)
    everything = {key: logged for of_rank in of_ranks for key, logged in of_rank.items()}
    ordered = {key: results[key] if key in mine else _neutral(logged, module) for key, logged in everything.items()}
    ordered |= {key: entry for key, entry in results.items() if key not in ordered}
    results.clear()
    results.update(ordered)


def _neutral(logged: Logged, module: LightningModule) -> Any:
    """Return what adds nothing to the others' values."""
    reduce, tensor = module.trainer.strategy.reduce, bool(logged.dtypes)
    entry = neutral_result(logged.fields, reduce, synced=logged.synced, tensor=tensor)
    for state, dtype in logged.dtypes.items():
        setattr(entry, state, getattr(entry, state).to(module.device, dtype))
    if not tensor:
        attribute = entry.meta.metric_attribute
        assert attribute is not None  # Lightning refuses to log a metric that it does not find in the module
        entry.value = module.get_submodule(attribute)
    return entry


def gathers_lists(metric: Metric, world: World, alone: Callable[[], bool]) -> AbstractContextManager[None]:
    """Have a metric gather list states of any length, on this rank with any content; nothing where a rank is `alone`.

    Its own way takes lists of one length, or concatenates them, for which an empty one lacks type and shape.
    """
    sync = getattr(metric, SYNC)

    def synced(*args: Any, **kwargs: Any) -> None:
        if alone():
            return
        lists = {name: state for name, state in metric.metric_state.items() if isinstance(state, list)}
        others = {name: how for name, how in getattr(metric, REDUCTIONS).items() if name not in lists}
        with replaced(metric, REDUCTIONS, others):
            sync(*args, **kwargs)
        of_ranks = world.gather_objects(move_data_to_device(lists, "cpu")) if lists else []
        for name in lists:
            everything = [item for of_rank in of_ranks for item in of_rank[name]]
            setattr(metric, name, move_data_to_device(everything, metric.device))

    return replaced(metric, SYNC, synced)
