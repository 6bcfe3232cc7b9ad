"""What a rank computes where it has no samples: a step like any other, which leaves no trace.

Whatever it computes, be it NaN, buffers, torchmetrics and logged values are afterwards what they were without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_gradavg.lightning_internals import put_back
from lightning_gradavg.methods import logged_as

__all__ = ["NEUTRAL", "metrics_kept", "reduction_name", "stand_in"]

NEUTRAL: Mapping[str, float] = {"mean": 0.0, "sum": 0.0, "max": float("-inf"), "min": float("inf")}
"""What changes nothing in a value that is put together of several; in a mean, with a size of 0."""


def reduction_name(arguments: Mapping[str, Any]) -> str:
    """Return the name in `NEUTRAL` of how the arguments of `log` put values together; another name if there is none."""
    reduce = arguments.get("reduce_fx", "mean")
    name = reduce if isinstance(reduce, str) else getattr(reduce, "__name__", "")
    return {"avg": "mean", "amax": "max", "amin": "min"}.get(name.lower(), name.lower())


def _neutral(device: torch.device, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Return what is logged instead: what all ranks reduce, with its neutral value, and what one rank logs, not."""
    value, reduction = arguments["value"], reduction_name(arguments)
    if isinstance(value, Metric):
        return arguments
    if not arguments.get("sync_dist", False):
        return None
    if reduction not in NEUTRAL:
        return {**arguments, "batch_size": 0}
    # Of the type that the other ranks send, whose values Lightning makes floating-point.
    dtype = value.dtype if isinstance(value, Tensor) and value.is_floating_point() else torch.get_default_dtype()
    neutral = torch.full((), NEUTRAL[reduction], dtype=dtype, device=device)
    return {**arguments, "value": neutral, "batch_size": 0}


@contextmanager
def stand_in(module: LightningModule) -> Iterator[None]:
    """Run a step whose samples do not count."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with logged_as(module, partial(_neutral, module.device)), metrics_kept(module):
            yield
    finally:
        for buffer, before in buffers:
            # Past autograd, whose backward is still to come: what it computes from the buffers is discarded.
            buffer.data.copy_(before)


@contextmanager
def metrics_kept(module: nn.Module) -> Iterator[None]:
    """Undo, after the context, what was added to the module's torchmetrics within it.

    They still count as updated, and have lists as long as those of the other ranks, with which they are gathered entry
    by entry.
    """
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    kept = [(metric, {name: _copied(state) for name, state in metric.metric_state.items()}) for metric in metrics]
    try:
        yield
    finally:
        for metric, before in kept:
            after = metric.metric_state
            states = {name: _undone(state, after[name]) for name, state in before.items()}
            put_back(metric, states, metric.update_count)


def _copied(state: Any) -> Any:
    return list(state) if isinstance(state, list) else state.clone()


def _undone(before: Any, after: Any) -> Any:
    if not isinstance(after, list):
        return before
    return [*before, *(torch.atleast_1d(item)[:0] for item in after[len(before) :])]
