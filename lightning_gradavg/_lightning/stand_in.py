"""What a rank computes where it has no samples: a step like any other, which leaves no trace, be it NaN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_gradavg._lightning.internals import restore_metric
from lightning_gradavg._lightning.methods import logged_as

__all__ = ["NEUTRAL", "STANDS_IN", "metrics_kept", "reduction_name", "stand_in", "uncounted"]

STANDS_IN: ContextVar[bool] = ContextVar("stands_in", default=False)
"""Whether a step runs whose samples do not count: `gather` then brings no rows of this rank to other ranks' losses."""

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


def reduction_name(arguments: Mapping[str, Any]) -> str | None:
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


def _neutral_arguments(arguments: dict[str, Any]) -> dict[str, Any] | None:
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
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with logged_as(module, _neutral_arguments), uncounted(module):
            yield
    finally:
        for buffer, before in buffers:
            buffer.data.copy_(before)  # past autograd: the backward is still to come, and is discarded


@contextmanager
def uncounted(module: nn.Module) -> Iterator[None]:
    """Bring no rows to what other ranks gather, and add nothing to the module's torchmetrics."""
    token = STANDS_IN.set(True)
    try:
        with metrics_kept(module):
            yield
    finally:
        STANDS_IN.reset(token)


@contextmanager
def metrics_kept(module: nn.Module) -> Iterator[None]:
    """Undo, after the context, what was added to the module's torchmetrics within it.

    They still count as updated, and have lists as long as those of the other ranks, with which they are gathered.
    """
    metrics = [submodule for submodule in module.modules() if isinstance(submodule, Metric)]
    states_before = [_copied_states(metric) for metric in metrics]
    try:
        yield
    finally:
        for metric, states in zip(metrics, states_before, strict=True):
            for name, after in metric.metric_state.items():
                if isinstance(after, list):
                    # torchmetrics gathers a list item by item, so an item without rows stands for each new one.
                    added = after[len(states[name]) :]
                    states[name] += [torch.atleast_1d(item)[:0] for item in added]
            restore_metric(metric, states, metric.update_count)


def _copied_states(metric: Metric) -> dict[str, Any]:
    """Return copies of a metric's states: lists of the same items, and clones of tensors."""
    states: dict[str, Any] = {}
    for name, state in metric.metric_state.items():
        if isinstance(state, list):
            states[name] = list(state)
        else:
            states[name] = state.clone()
    return states
