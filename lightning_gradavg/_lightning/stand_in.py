"""What a rank computes where it has no samples: a step like any other, which leaves no trace, be it NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_gradavg._lightning.internals import put_back
from lightning_gradavg._lightning.methods import logged_as

__all__ = ["NEUTRAL", "STANDS_IN", "metrics_kept", "reduction_name", "stand_in", "uncounted"]

STANDS_IN: ContextVar[bool] = ContextVar("stands_in", default=False)
"""Whether a step runs whose samples do not count: no rows of theirs belong into another rank's loss."""

NEUTRAL: Mapping[str, float] = {"mean": 0.0, "sum": 0.0, "max": float("-inf"), "min": float("inf")}
"""What changes nothing in a value that is put together of several; in a mean, with a size of 0."""


_FUNCTIONS: Sequence[tuple[Callable[..., Any], str]] = (
    (torch.mean, "mean"),
    (torch.sum, "sum"),
    (sum, "sum"),
    (torch.max, "max"),
    (max, "max"),
    (torch.min, "min"),
    (min, "min"),
)
"""The functions that Lightning takes for `reduce_fx`."""


def reduction_name(arguments: Mapping[str, Any]) -> str | None:
    """Return the name in `NEUTRAL` of how the arguments of `log` put values together; None if Lightning refuses it."""
    reduce = arguments.get("reduce_fx", "mean")
    if not isinstance(reduce, str):
        return next((name for function, name in _FUNCTIONS if function is reduce), None)
    name = reduce.lower()
    if name == "avg":
        return "mean"
    return name if name in NEUTRAL else None


def _neutral(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Return what is logged instead: what all ranks reduce, with its neutral value, and what one rank logs, not."""
    value, reduction = arguments["value"], reduction_name(arguments)
    if isinstance(value, Metric) or reduction is None:
        return arguments
    if not arguments.get("sync_dist", False):
        return None
    neutral = NEUTRAL[reduction]
    # Of the type that the other ranks send, whose values Lightning makes floating-point.
    typed = isinstance(value, Tensor) and value.is_floating_point()
    return {**arguments, "value": value.new_full((), neutral) if typed else neutral, "batch_size": 0}


@contextmanager
def stand_in(module: LightningModule) -> Iterator[None]:
    """Run a step whose samples do not count."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with logged_as(module, _neutral), uncounted(module):
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
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    kept: list[dict[str, Any]] = [
        {name: list(state) if isinstance(state, list) else state.clone() for name, state in metric.metric_state.items()}
        for metric in metrics
    ]
    try:
        yield
    finally:
        for metric, before in zip(metrics, kept, strict=True):
            for name, after in metric.metric_state.items():
                if isinstance(after, list):
                    before[name] += [torch.atleast_1d(item)[:0] for item in after[len(before[name]) :]]
            put_back(metric, before, metric.update_count)
