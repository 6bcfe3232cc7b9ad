"""What replicas log: one value per batch, that of all replicas together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric, MetricCollection

__all__ = ["ReplicaLog", "logged_of_whole_run", "logged_on_all_ranks_alike", "metrics_kept", "nothing_logged"]

_NEUTRAL = {"mean": 0.0, "sum": 0.0, "max": float("-inf"), "min": float("inf")}


@dataclass
class _Entry:
    """What one name was logged with, in every replica."""

    arguments: dict[str, Any]
    values: list[Tensor] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)

    def weighted_sum(self) -> Tensor:
        weighted = [value.double() * size for value, size in zip(self.values, self.sizes, strict=True)]
        return torch.stack(weighted).sum(0)


class ReplicaLog:
    """Collects what `self.log` is given in a step, and logs it once per batch.

    A mean is weighted by the replicas' samples, or the `batch_size` that was given, over the replicas of this rank and,
    with `sync_dist=True`, of all ranks. A step whose samples do not count adds nothing.

    Args:
        module: The module whose `log` is replaced.
        group: The process group whose ranks share the replicas.
        device: Where the values are reduced.
        whole: Whether values are those of the whole run even without `sync_dist=True`, as on one process.
        own: Whether all replicas of the batch are this rank's.
    """

    def __init__(
        self,
        module: LightningModule,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        whole: bool,
        own: bool = False,
    ) -> None:
        self._module = module
        self._group = group
        self._device = device
        self._whole = whole
        self._shared = not own and dist.get_world_size(group) > 1
        self._samples = 0
        self._entries: dict[str, _Entry] = {}

    @contextmanager
    def collecting(self, batch_samples: int) -> Iterator[None]:
        """Replace the module's `log` within the context, and log what came at its end.

        Args:
            batch_samples: Number of samples of the batch, over all replicas.
        """
        log: Callable[..., None] = self._module.log
        signature = inspect.signature(log)
        self._samples, self._entries = 0, {}

        def collect(*args: Any, **kwargs: Any) -> None:
            arguments = signature.bind(*args, **kwargs).arguments
            if self._whole:
                arguments = _of_whole_run(arguments)
            if isinstance(arguments["value"], (Tensor, int, float)) and _reduction(arguments) in _NEUTRAL:
                self._add(arguments)
            else:
                log(**arguments)

        self._module.log = collect  # type: ignore[method-assign]  # for this step only
        try:
            yield
        finally:
            del self._module.log
        for entry in self._entries.values():
            log(**self._combined(entry, batch_samples))

    def count(self, samples: int) -> None:
        """Say how many samples the replica has that logs from now on: 0 if they do not count."""
        self._samples = samples

    def _add(self, arguments: dict[str, Any]) -> None:
        entry = self._entries.setdefault(arguments["name"], _Entry(arguments))
        value = arguments["value"]
        value = value.detach() if isinstance(value, Tensor) else torch.tensor(value, device=self._device)
        if self._samples == 0:
            value = torch.full_like(value, _NEUTRAL[_reduction(arguments)], dtype=_floating(value.dtype))
        given = arguments.get("batch_size")
        entry.values.append(value)
        entry.sizes.append(self._samples if given is None or self._samples == 0 else given)

    def _combined(self, entry: _Entry, batch_samples: int) -> dict[str, Any]:
        arguments, values = entry.arguments, entry.values
        reduction, size = _reduction(arguments), sum(entry.sizes)
        if reduction == "mean" and arguments.get("sync_dist", False) and self._shared:
            value, share = self._as_equal_share(entry, size, batch_samples)
            return {**arguments, "value": value, "batch_size": share}
        if len(values) == 1:
            value = values[0]
        elif reduction == "mean":
            value = (entry.weighted_sum() / size).to(_floating(values[0].dtype))
        else:
            stacked = torch.stack(values)
            value = stacked.sum(0) if reduction == "sum" else stacked.amax(0) if reduction == "max" else stacked.amin(0)
        return {**arguments, "value": value, "batch_size": size}

    def _as_equal_share(self, entry: _Entry, size: float, batch_samples: int) -> tuple[Tensor, Tensor]:
        """Return a value and a size with which the plain mean over the ranks is the mean over all samples.

        So Lightning takes it of a step's values. With n of N samples on this rank, of W ranks, value times size is that
        of the rank: (v * n * W / N) * (N / W).
        """
        device, world_size = entry.values[0].device, dist.get_world_size(self._group)
        total = torch.tensor(batch_samples, dtype=torch.float64, device=device)
        if entry.arguments.get("batch_size") is not None:
            total = torch.tensor(size, dtype=torch.float64, device=self._device)
            dist.all_reduce(total, group=self._group)
            total = total.to(device)
        share = total / world_size
        return (entry.weighted_sum() / share).to(_floating(entry.values[0].dtype)), share


@contextmanager
def logged_on_all_ranks_alike(module: LightningModule, samples: int, *, counted: bool) -> Iterator[None]:
    """Log within the context values that all ranks have computed of the whole batch.

    Args:
        module: The module.
        samples: Number of samples of the batch.
        counted: Whether this rank is the one whose values enter a sum over the ranks.
    """
    log: Callable[..., None] = module.log
    signature = inspect.signature(log)

    def log_whole(*args: Any, **kwargs: Any) -> None:
        arguments = _of_whole_run({"batch_size": samples, **signature.bind(*args, **kwargs).arguments})
        value = arguments["value"]
        if not counted and arguments["sync_dist"] and _reduction(arguments) == "sum":
            arguments["value"] = value if isinstance(value, (Metric, MetricCollection)) else value * 0
        log(**arguments)

    module.log = log_whole  # type: ignore[method-assign]  # for this step only
    try:
        yield
    finally:
        del module.log


@contextmanager
def logged_of_whole_run(module: LightningModule) -> Iterator[None]:
    """Log within the context the values over all ranks even without `sync_dist=True`, as on one process."""
    log: Callable[..., None] = module.log
    signature = inspect.signature(log)

    def log_synchronized(*args: Any, **kwargs: Any) -> None:
        log(**_of_whole_run(signature.bind(*args, **kwargs).arguments))

    module.log = log_synchronized  # type: ignore[method-assign]  # for this step only
    try:
        yield
    finally:
        del module.log


@contextmanager
def nothing_logged(module: LightningModule) -> Iterator[None]:
    """Log nothing within the context."""

    def ignore(*args: Any, **kwargs: Any) -> None:
        del args, kwargs

    before = vars(module).get("log")
    module.log = ignore  # type: ignore[method-assign]  # for this step only
    try:
        yield
    finally:
        del module.log
        if before is not None:
            module.log = before  # type: ignore[method-assign]  # that of a step under way


@contextmanager
def metrics_kept(module: torch.nn.Module) -> Iterator[None]:
    """Undo, after the context, what was added to the module's torchmetrics within it."""
    kept = []
    for metric in module.modules():
        if isinstance(metric, Metric):
            states = {name: _copied(getattr(metric, name)) for name in metric._defaults}
            kept.append((metric, states))
    try:
        yield
    finally:
        for metric, states in kept:
            for name, state in states.items():
                setattr(metric, name, _undone(state, getattr(metric, name)))
            metric._computed = None


def _of_whole_run(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "sync_dist": not arguments.get("rank_zero_only", False)}


def _copied(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else list(state) if isinstance(state, list) else state


def _undone(before: Any, after: Any) -> Any:
    if not isinstance(after, list):
        return before
    # Of the same length as on other ranks, with which a list is gathered entry by entry.
    return [*before, *(item[:0] if item.ndim > 0 else item.new_empty(0) for item in after[len(before) :])]


def _floating(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def _reduction(arguments: dict[str, Any]) -> str:
    reduce = arguments.get("reduce_fx", "mean")
    name = reduce if isinstance(reduce, str) else getattr(reduce, "__name__", "")
    return {"avg": "mean", "amax": "max", "amin": "min"}.get(name.lower(), name.lower())
