"""What replicas log: one value per batch, that of all replicas together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

__all__ = ["ReplicaLog", "logged_of_whole_run", "logged_on_all_ranks_alike", "metrics_kept", "nothing_logged"]

_NEUTRAL = {"mean": 0.0, "sum": 0.0, "max": float("-inf"), "min": float("inf")}


_HEADER = 2
_SIZES = 62  # what modules log seldom has more names; then there is a second exchange


@dataclass
class _Entry:
    """What one name was logged with, in every replica."""

    arguments: dict[str, Any]
    values: list[Tensor] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)

    def weighted_sum(self) -> Tensor:
        # Selected and not multiplied: the value of a replica that does not count may be NaN.
        weighted = [value.double() * size if size else torch.zeros_like(value, dtype=torch.float64) for value, size in self]
        return torch.stack(weighted).sum(0)

    def __iter__(self) -> Iterator[tuple[Tensor, float]]:
        return zip(self.values, self.sizes, strict=True)


class ReplicaLog:
    """Collects what `self.log` is given in a step, and logs it once per batch.

    A mean is weighted by the replicas' samples, or the `batch_size` that was given, over the replicas of this rank and,
    with `sync_dist=True`, of all ranks. A step whose samples do not count adds nothing, and neither does a rank that
    has not logged a name that another has.

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
    def collecting(self) -> Iterator[None]:
        """Replace the module's `log` within the context, and log what came at its end. A collective operation."""
        self._samples, self._entries = 0, {}
        with _replaced_log(self._module, self._collect) as log:
            yield
            entries, self._entries = self._entries, {}
        if self._shared:
            self._agree(entries)
        for entry in entries.values():
            log(**self._combined(entry))

    def count(self, samples: int) -> None:
        """Say how many samples the replica has that logs from now on: 0 if they do not count."""
        self._samples = samples

    def _collect(self, log: Callable[..., None], arguments: dict[str, Any]) -> None:
        if self._whole:
            arguments = _of_whole_run(arguments)
        if not isinstance(arguments["value"], (Tensor, int, float)) or _reduction(arguments) not in _NEUTRAL:
            log(**arguments)
            return
        entry = self._entries.setdefault(arguments["name"], _Entry(arguments))
        value = arguments["value"]
        value = value.detach() if isinstance(value, Tensor) else torch.tensor(value, device=self._device)
        if self._samples == 0:
            value = torch.full_like(value, _NEUTRAL[_reduction(arguments)], dtype=_floating(value.dtype))
        given = arguments.get("batch_size")
        entry.values.append(value)
        entry.sizes.append(self._samples if given is None or self._samples == 0 else given)

    def _agree(self, entries: dict[str, _Entry]) -> None:
        """Have all ranks log the same names, in the same order, and know how much each stands for on all ranks."""
        synchronized = {name: one for name, one in sorted(entries.items()) if one.arguments.get("sync_dist", False)}
        for attempt in range(2):
            signature = float(crc32("\0".join(synchronized).encode()) % 2**20)
            sizes = [float(sum(entry.sizes)) for entry in synchronized.values()]
            sizes += [0.0] * (_SIZES - len(sizes))
            totals = torch.tensor([signature, signature**2, *sizes], dtype=torch.float64, device=self._device)
            head, rest = totals[: _HEADER + _SIZES], totals[_HEADER + _SIZES :]
            dist.all_reduce(head, group=self._group)
            known = head.tolist()
            if known[0] ** 2 == dist.get_world_size(self._group) * known[1]:
                if len(rest) > 0:
                    dist.all_reduce(rest, group=self._group)
                self._totals = dict(zip(synchronized, [*known[_HEADER:], *rest.tolist()], strict=False))
                break
            assert attempt == 0
            synchronized = self._complete(synchronized)
        kept = {name: entry for name, entry in entries.items() if name not in synchronized}
        entries.clear()
        entries.update({**synchronized, **kept})

    def _complete(self, entries: dict[str, _Entry]) -> dict[str, _Entry]:
        """Add what other ranks have logged, as what changes nothing."""
        mine = [{**entry.arguments, "value": None} for entry in entries.values()]
        every: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(every, mine, group=self._group)
        for arguments in (arguments for of_rank in every for arguments in of_rank):
            if arguments["name"] not in entries:
                neutral = torch.tensor(_NEUTRAL[_reduction(arguments)], device=self._device)
                entries[arguments["name"]] = _Entry({**arguments, "value": neutral}, [neutral], [0.0])
        return dict(sorted(entries.items()))

    def _combined(self, entry: _Entry) -> dict[str, Any]:
        arguments, values = entry.arguments, entry.values
        reduction, size = _reduction(arguments), sum(entry.sizes)
        dtype = _floating(values[0].dtype)
        if reduction == "mean" and self._shared and arguments.get("sync_dist", False):
            # Lightning takes the plain mean over the ranks of a step's value. With n of N samples on this rank, of W,
            # that of v * n * W / N is the mean over all samples; and times N / W, as in an epoch, it is v * n.
            share = self._totals[arguments["name"]] / dist.get_world_size(self._group)
            size_of_rank = torch.tensor(share, dtype=torch.float64, device=values[0].device)
            value = entry.weighted_sum() / (share or 1.0)
            return {**arguments, "value": value.to(dtype), "batch_size": size_of_rank}
        if len(values) == 1:
            value = values[0]
        elif reduction == "mean":
            value = (entry.weighted_sum() / (size or 1.0)).to(dtype)
        else:
            stacked = torch.stack(values)
            value = stacked.sum(0) if reduction == "sum" else stacked.amax(0) if reduction == "max" else stacked.amin(0)
        return {**arguments, "value": value, "batch_size": size}


@contextmanager
def _replaced_log(
    module: LightningModule, replacement: Callable[[Callable[..., None], dict[str, Any]], None]
) -> Iterator[Callable[..., None]]:
    """Have `module.log` call `replacement` with what it replaces and its arguments by name, within the context."""
    own: Any = vars(module).get("log")
    log: Callable[..., None] = module.log

    def replaced(*args: Any, **kwargs: Any) -> None:
        # Whatever the signature of a user's own `log`, it hands on what Lightning's takes.
        replacement(log, dict(_SIGNATURE.bind(*args, **kwargs).arguments))

    module.log = replaced  # type: ignore[method-assign]  # for this step only
    try:
        yield log
    finally:
        del module.log
        if own is not None:
            module.log = own  # type: ignore[method-assign]  # the user's own, or that of a step under way


_LOG = inspect.signature(LightningModule.log)
_SIGNATURE = _LOG.replace(parameters=list(_LOG.parameters.values())[1:])


@contextmanager
def logged_on_all_ranks_alike(module: LightningModule, samples: int, *, counted: bool) -> Iterator[None]:
    """Log within the context values that all ranks have computed of the whole batch.

    Args:
        module: The module.
        samples: Number of samples of the batch.
        counted: Whether this rank is the one whose values enter a sum over the ranks.
    """

    def log_whole(log: Callable[..., None], arguments: dict[str, Any]) -> None:
        arguments = _of_whole_run(arguments)
        if arguments.get("batch_size") is None:
            arguments["batch_size"] = samples
        value = arguments["value"]
        summed = arguments["sync_dist"] and _reduction(arguments) == "sum"
        if summed and not counted and isinstance(value, (Tensor, int, float)):
            arguments["value"] = torch.zeros_like(value) if isinstance(value, Tensor) else 0.0
        log(**arguments)

    with _replaced_log(module, log_whole):
        yield


@contextmanager
def logged_of_whole_run(module: LightningModule) -> Iterator[None]:
    """Log within the context the values over all ranks even without `sync_dist=True`, as on one process."""

    def log_synchronized(log: Callable[..., None], arguments: dict[str, Any]) -> None:
        log(**_of_whole_run(arguments))

    with _replaced_log(module, log_synchronized):
        yield


@contextmanager
def nothing_logged(module: LightningModule) -> Iterator[None]:
    """Log nothing within the context."""

    def ignore(log: Callable[..., None], arguments: dict[str, Any]) -> None:
        del log, arguments

    with _replaced_log(module, ignore):
        yield


@contextmanager
def metrics_kept(module: torch.nn.Module, *, alike: bool = True) -> Iterator[None]:
    """Undo, after the context, what was added to the module's torchmetrics within it.

    Args:
        module: The module.
        alike: Whether the metrics must still count as updated, and have lists as long as those of the other ranks, with
            which they are reduced.
    """
    kept = []
    for metric in module.modules():
        if isinstance(metric, Metric):
            states = {name: _copied(getattr(metric, name)) for name in metric._defaults}
            kept.append((metric, states, metric._update_count))
    try:
        yield
    finally:
        for metric, states, updates in kept:
            for name, state in states.items():
                setattr(metric, name, _undone(state, getattr(metric, name)) if alike else state)
            metric._update_count = metric._update_count if alike else updates
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
