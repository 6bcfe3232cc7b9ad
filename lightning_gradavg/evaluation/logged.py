"""What the ranks logged in one evaluation, made complete on each of them: a rank may have had no batch to log from.

Lightning and torchmetrics reduce what is logged key by key and state by state, in the order in which a rank has it. A
rank that lacks a key, or has an empty list where the others have rows, would leave them waiting.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_gradavg.lightning_internals import MetricInside, neutral_result
from lightning_gradavg.ranks import World

__all__ = [
    "ListState",
    "Logged",
    "complete_results",
    "complete_states",
    "describe_results",
    "describe_states",
]

_FIELDS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx"),
    *("dataloader_idx", "metric_attribute"),
)


class Logged(NamedTuple):
    """What a rank logged under one key, without the value.

    Attributes:
        fields: The fields of Lightning's metadata.
        reduce_fx: Name of the reduction over the steps, and whether it is Python's own instead of torch's.
        synced: Whether it is reduced over the ranks.
        dtypes: Type of each state; empty if a `Metric` was logged, which has its own states.
    """

    fields: dict[str, Any]
    reduce_fx: tuple[str, bool]
    synced: bool
    dtypes: dict[str, torch.dtype]


class ListState(NamedTuple):
    """A list state of a metric on one rank; `dtype` and `shape` are those of its rows.

    Attributes:
        length: Number of elements.
        concatenated: Whether it is concatenated over the ranks; if not, it is gathered element by element.
        dtype: Type of the first element; None if there is none.
        shape: Shape of a row of it.
    """

    length: int
    concatenated: bool
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()


def describe_results(results: Mapping[str, Any]) -> dict[str, Logged]:
    """Return what is computed at the end of the evaluation, and by all ranks or none."""
    logged = {}
    for key, entry in results.items():
        meta = entry.meta
        # Of a group of its own, or logged by rank 0 alone, the user knows which ranks take part.
        if entry.has_reset or not meta.on_epoch or meta.sync.rank_zero_only or meta.sync.group is not None:
            continue
        function: Any = meta.reduce_fx
        dtypes = {name: getattr(entry, name).dtype for name in entry.metric_state} if entry.is_tensor else {}
        logged[key] = Logged(
            {name: getattr(meta, name) for name in _FIELDS},
            (function.__name__, getattr(builtins, function.__name__, None) is function),
            meta.sync.should,
            dtypes,
        )
    return logged


def complete_results(
    results: dict[str, Any], of_ranks: Sequence[Mapping[str, Logged]], module: LightningModule
) -> list[str]:
    """Add what other ranks logged and this one did not, with its neutral value, and put all into one order.

    Args:
        results: Lightning's collection of this rank.
        of_ranks: What `describe_results` returned, in rank order.
        module: The module that logged it.

    Returns:
        The names of values that some rank lacks and that are not reduced over the ranks.
    """
    ordered: dict[str, Any] = {}
    lacking = []
    for key, logged in {key: logged for of_rank in of_ranks for key, logged in of_rank.items()}.items():
        if logged.dtypes and not logged.synced:
            if any(key not in of_rank for of_rank in of_ranks):
                lacking.append(logged.fields["name"])
            continue
        entry = results.get(key)
        ordered[key] = _neutral(logged, module) if entry is None or entry.has_reset else entry
    rest = {key: entry for key, entry in results.items() if key not in ordered}
    results.clear()
    results.update(ordered | rest)
    return lacking


def _neutral(logged: Logged, module: LightningModule) -> Any:
    name, of_python = logged.reduce_fx
    reduce_fx = getattr(builtins if of_python else torch, name)
    reduce, tensor = module.trainer.strategy.reduce, bool(logged.dtypes)
    entry = neutral_result(logged.fields, reduce_fx, reduce, synced=logged.synced, tensor=tensor)
    for state, dtype in logged.dtypes.items():
        setattr(entry, state, getattr(entry, state).to(module.device, dtype))
    if not tensor:
        attribute = entry.meta.metric_attribute
        assert attribute is not None  # Lightning refuses to log a metric that it does not find in the module
        entry.value = module.get_submodule(attribute)
    return entry


def describe_states(metrics: Mapping[str, Metric]) -> dict[str, dict[str, ListState]]:
    """Return the list states of the metrics, as `{metric: {state: description}}`."""
    return {
        name: {
            state: _describe_list(value, concatenated=MetricInside(metric).reductions[state] is dim_zero_cat)
            for state, value in metric.metric_state.items()
            if isinstance(value, list)
        }
        for name, metric in metrics.items()
    }


def _describe_list(value: list[Any], *, concatenated: bool) -> ListState:
    if not value or not isinstance(value[0], torch.Tensor):
        return ListState(len(value), concatenated)
    return ListState(len(value), concatenated, value[0].dtype, tuple(value[0].shape[1:]))


def complete_states(
    metrics: Mapping[str, Metric],
    of_ranks: Sequence[Mapping[str, Mapping[str, ListState]]],
    world: World,
) -> list[Callable[[], None]]:
    """Give the list states of the metrics a form that torchmetrics can gather. A collective operation.

    It cannot gather rows of different types and shapes, which an empty list stands for, nor unconcatenated lists of
    different lengths. The former get a tensor without rows, and the latter are gathered here.

    Args:
        metrics: All metrics of this rank's module, by name.
        of_ranks: What `describe_states` returned, in rank order.
        world: Those ranks.

    Returns:
        What puts the metrics back, to be called when their results are computed.
    """
    changed: list[Callable[[], None]] = []
    for name, states in {name: states for of_rank in of_ranks for name, states in of_rank.items()}.items():
        metric, whole = metrics[name], set()
        # What it remembers of an earlier evaluation is not what the others compute now, waiting for this rank.
        inside = MetricInside(metric)
        inside.forget()
        if not metric.update_called:  # it warns otherwise, although other ranks have updated it
            changed.append(partial(setattr, inside, "updates", 0))
            inside.updates = 1
        for state in states:
            every = [of_rank[name][state] for of_rank in of_ranks if name in of_rank]
            own: Any = getattr(metric, state)
            lacking = len(of_ranks) - len(every)
            sizes = {*(of_state.length for of_state in every), *[0] * lacking}
            if every[0].concatenated:
                filled = next((of_state for of_state in every if of_state.dtype is not None), None)
                if filled is not None:
                    no_rows = torch.empty((0, *filled.shape), dtype=filled.dtype, device=metric.device)
                    setattr(metric, state, [dim_zero_cat([*own, no_rows])])
            elif len(sizes) > 1:
                everything = chain.from_iterable(world.gather_objects(move_data_to_device(own, "cpu")))
                setattr(metric, state, move_data_to_device(list(everything), metric.device))
                whole.add(state)
        if whole:
            reductions = inside.reductions
            changed.append(partial(setattr, inside, "reductions", reductions))
            inside.reductions = {state: how for state, how in reductions.items() if state not in whole}
    return changed
