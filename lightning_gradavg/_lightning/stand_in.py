"""What a rank computes where it has no samples: a step like any other, which leaves no trace, be it NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_gradavg._lightning.internals import COMPUTED, buffers_of
from lightning_gradavg._lightning.methods import logged_as

__all__ = ["NEUTRAL", "buffers_kept", "metrics_kept", "reduction_name", "stand_in"]

NEUTRAL: Mapping[str, float] = {"mean": 0.0, "sum": 0.0, "max": float("-inf"), "min": float("inf")}
"""By the name of a reduction, the value that changes nothing in it; in a mean, with a batch size of 0."""

_NAME_OF_FUNCTION: Mapping[object, str] = {
    torch.mean: "mean",
    torch.sum: "sum",
    sum: "sum",
    torch.max: "max",
    max: "max",
    torch.min: "min",
    min: "min",
}
"""The functions that Lightning takes for `reduce_fx` (`_Metadata.is_mean_reduction` and the like)."""


def reduction_name(arguments: Mapping[str, object]) -> str | None:
    """Return the name in `NEUTRAL` of how the arguments of `log` put values together; None if Lightning refuses it."""
    reduce_fx = arguments.get("reduce_fx", "mean")
    if not isinstance(reduce_fx, str):
        return _name_of_function(reduce_fx)
    name = reduce_fx.lower()
    if name == "avg":
        return "mean"
    if name in NEUTRAL:
        return name
    return None


def _name_of_function(function: object) -> str | None:
    # Compared by identity, and not looked up: what a user passes need not have a hash.
    for known, name in _NAME_OF_FUNCTION.items():
        if known is function:
            return name
    return None


def _neutral_arguments(arguments: dict[str, object]) -> dict[str, object] | None:
    """Return the arguments of `log` that a stand-in logs instead of its own; None for nothing.

    | the step logs | the stand-in logs |
    |---|---|
    | a torchmetrics `Metric` | the same: its states are restored (`metrics_kept`) |
    | with a `reduce_fx` that Lightning refuses | the same: Lightning raises its error |
    | without `sync_dist` | nothing: this rank's own values do not count |
    | with `sync_dist` | the neutral value, as the other ranks wait for one |
    """
    value = arguments["value"]
    reduction = reduction_name(arguments)
    if isinstance(value, Metric) or reduction is None:
        return arguments
    if not arguments.get("sync_dist", False):
        return None
    neutral_value: Tensor | float = NEUTRAL[reduction]
    # Of the type that the other ranks send. Lightning makes numbers and integers floating-point itself.
    if isinstance(value, Tensor) and value.is_floating_point():
        neutral_value = value.new_full((), NEUTRAL[reduction])
    return {**arguments, "value": neutral_value, "batch_size": 0}


@contextmanager
def stand_in(module: LightningModule) -> Iterator[None]:
    """Run a step whose samples do not count: logged values, metrics and buffers are as without it."""
    with logged_as(module, _neutral_arguments), metrics_kept(module), buffers_kept(module):
        yield


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Undo, after the context, what was written or assigned to the module's buffers within it."""
    mappings = [buffers_of(submodule) for submodule in module.modules()]
    # By their entries: a step may assign a buffer, as in `self.count = self.count + 1`.
    entries_before = [dict(mapping) for mapping in mappings]
    values_before = [_cloned(entries) for entries in entries_before]
    try:
        yield
    finally:
        for mapping, entries, values in zip(mappings, entries_before, values_before, strict=True):
            # What it registers stays: DDP broadcasts as many buffers on each rank as there are.
            mapping.update(entries)
            for name, value in values.items():
                entries[name].data.copy_(value)  # past autograd: the backward may be still to come


def _cloned(buffers: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return copies of the buffers that are there."""
    return {name: buffer.clone() for name, buffer in buffers.items() if buffer is not None}


@contextmanager
def metrics_kept(module: nn.Module, is_merged: Callable[[Metric], bool] = lambda _: False) -> Iterator[None]:
    """Undo, after the context, what was added to the module's torchmetrics within it.

    A metric for which `is_merged` holds is as before. Any other still counts as updated, and has lists as long as those
    of the other ranks, with which torchmetrics gathers them.
    """
    metrics = [submodule for submodule in module.modules() if isinstance(submodule, Metric)]
    states_before = [_copied_states(metric) for metric in metrics]
    attributes_before = [dict(vars(metric)) for metric in metrics]
    try:
        yield
    finally:
        for metric, states, attributes in zip(metrics, states_before, attributes_before, strict=True):
            if is_merged(metric):
                # The number of updates is among them, which only an update changes, or `reset`.
                vars(metric).update(attributes)
            else:
                _add_empty_items(metric, states)
            for name, state in states.items():
                setattr(metric, name, state)
            setattr(metric, COMPUTED, None)


def _add_empty_items(metric: Metric, states: dict[str, Any]) -> None:
    """Add an item without rows to earlier states for each item that was added to them: torchmetrics gathers them so."""
    for name, after in metric.metric_state.items():
        if isinstance(after, list):
            added = after[len(states[name]) :]
            states[name] += [torch.atleast_1d(item)[:0] for item in added]


def _copied_states(metric: Metric) -> dict[str, object]:
    """Return copies of a metric's states: lists of the same items, and clones of tensors."""
    states: dict[str, Any] = {}
    for name, state in metric.metric_state.items():
        if isinstance(state, list):
            states[name] = list(state)
        else:
            states[name] = state.clone()
    return states
