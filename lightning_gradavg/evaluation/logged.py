"""What the ranks logged in one evaluation, made complete on each of them: a rank may have had no batch to log from.

Lightning and torchmetrics reduce what is logged key by key and state by state, in the order in which a rank has it. A
rank that lacks a key, or has an empty list where the others have rows, would leave them waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from itertools import chain
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_gradavg.lightning_internals import COMPUTED, REDUCTIONS, UPDATES, neutral_result
from lightning_gradavg.ranks import World

__all__ = ["Described", "ListState", "Logged", "complete", "complete_states", "describe"]


class Logged(NamedTuple):
    """What a rank logged under one key: the fields of Lightning's metadata, and whether it is reduced over the ranks.

    `dtypes` has the type of each state; it is empty if a `Metric` was logged, which has its own states.
    """

    fields: dict[str, Any]
    synced: bool
    dtypes: dict[str, torch.dtype]


class ListState(NamedTuple):
    """A list state of a metric on one rank; `no_rows` is without rows, of the type and shape of its first tensor."""

    length: int = 0
    no_rows: torch.Tensor | None = None


class Described(NamedTuple):
    """What a rank has logged, by key, and the list states of the metrics that it updated, by metric and state."""

    results: dict[str, Logged]
    states: dict[str, dict[str, ListState]]


def describe(results: Mapping[str, Any], updated: Mapping[str, Metric]) -> Described:
    """Return what is computed at the end of the evaluation, and by all ranks or none."""
    logged = {key: _logged(entry) for key, entry in results.items() if _is_of_all_ranks(entry)}
    states = {
        name: {state: _list_state(value) for state, value in metric.metric_state.items() if isinstance(value, list)}
        for name, metric in updated.items()
    }
    return Described(logged, states)


def _is_of_all_ranks(entry: Any) -> bool:
    # Of a group of its own, or logged by rank 0 alone, the user knows which ranks take part.
    sync = entry.meta.sync
    return entry.meta.on_epoch and not (entry.has_reset or sync.rank_zero_only or sync.group is not None)


def _logged(entry: Any) -> Logged:
    dtypes = {name: getattr(entry, name).dtype for name in entry.metric_state} if entry.is_tensor else {}
    names = [field.name for field in fields(entry.meta) if not field.name.startswith("_")]
    return Logged({name: getattr(entry.meta, name) for name in names}, entry.meta.sync.should, dtypes)


def _list_state(value: list[Any]) -> ListState:
    tensors = [torch.atleast_1d(item)[:0].cpu() for item in value[:1] if isinstance(item, torch.Tensor)]
    return ListState(len(value), *tensors)


def complete(
    results: dict[str, Any],
    metrics: Mapping[str, Metric],
    of_ranks: Sequence[Described],
    module: LightningModule,
    world: World,
) -> tuple[list[str], ExitStack]:
    """Add what other ranks logged and this one did not, and put all into one order. A collective operation.

    Returns:
        The names of values that some rank lacks and that are not reduced over the ranks; and what puts the metrics
        back, to be closed when their results are computed.
    """
    put_back = complete_states(metrics, [each.states for each in of_ranks], world)
    ordered: dict[str, Any] = {}
    lacking = []
    for key, logged in {key: logged for each in of_ranks for key, logged in each.results.items()}.items():
        if logged.synced or not logged.dtypes:
            entry = results.get(key)
            ordered[key] = _neutral(logged, module) if entry is None or entry.has_reset else entry
        elif any(key not in each.results for each in of_ranks):
            lacking.append(logged.fields["name"])
    whole = ordered | {key: entry for key, entry in results.items() if key not in ordered}
    results.clear()
    results.update(whole)
    return lacking, put_back


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


def complete_states(
    metrics: Mapping[str, Metric], of_ranks: Sequence[Mapping[str, Mapping[str, ListState]]], world: World
) -> ExitStack:
    """Give the list states of the metrics a form that torchmetrics can gather. A collective operation.

    It cannot gather rows of different types and shapes, which an empty list stands for, nor unconcatenated lists of
    different lengths. The former get a tensor without rows, and the latter are gathered here.

    Returns:
        What puts the metrics back.
    """
    put_back = ExitStack()
    for name, states in {name: states for of_rank in of_ranks for name, states in of_rank.items()}.items():
        metric, reductions = metrics[name], getattr(metrics[name], REDUCTIONS)
        # What it remembers of an earlier evaluation is not what the others compute now, waiting for this rank.
        setattr(metric, COMPUTED, None)
        if not metric.update_called:  # it warns otherwise, although other ranks have updated it
            put_back.callback(setattr, metric, UPDATES, 0)
            setattr(metric, UPDATES, 1)
        put_back.callback(setattr, metric, REDUCTIONS, reductions)
        reduced_there = dict(reductions)
        for state in states:
            every = [of_rank.get(name, {}).get(state, ListState()) for of_rank in of_ranks]
            own: Any = getattr(metric, state)
            if reductions[state] is dim_zero_cat:
                no_rows = [each.no_rows.to(metric.device) for each in every if each.no_rows is not None][:1]
                setattr(metric, state, [dim_zero_cat([*own, *no_rows])] if no_rows else own)
            elif len({each.length for each in every}) > 1:
                everything = chain.from_iterable(world.gather_objects(move_data_to_device(own, "cpu")))
                setattr(metric, state, move_data_to_device(list(everything), metric.device))
                del reduced_there[state]
        setattr(metric, REDUCTIONS, reduced_there)
    return put_back
