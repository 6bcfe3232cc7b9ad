"""What replicas log and return, as one: one value per batch, that of all replicas, and their outputs side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from numbers import Number
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_gradavg.device import on_device
from lightning_gradavg.faults.last_words import is_broken_exchange
from lightning_gradavg.methods import logged_as
from lightning_gradavg.ranks import World, digest
from lightning_gradavg.reduction.gather import gather
from lightning_gradavg.reduction.weigh import zero_loss
from lightning_gradavg.stand_in import NEUTRAL, reduction_name
from lightning_gradavg.tree import leaves, mapped

__all__ = ["ReplicaLog", "gather_outputs", "join_outputs", "of_whole_run"]


def of_whole_run(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what `log` was given, for a value over all ranks even without `sync_dist=True`, as on one process."""
    return {**arguments, "sync_dist": not arguments.get("rank_zero_only", False)}


Part = tuple[Tensor, float]
"""A value in float64, and how much it stands for: the number of samples, or the `batch_size` that was given."""

_COMBINED: dict[str, Callable[[Sequence[Part]], Tensor]] = {
    "mean": lambda parts: torch.stack([value * size for value, size in parts]).sum() / sum(size for _, size in parts),
    "sum": lambda parts: torch.stack([value for value, _ in parts]).sum(),
    "max": lambda parts: torch.stack([value for value, _ in parts]).max(),
    "min": lambda parts: torch.stack([value for value, _ in parts]).min(),
}


class _Entry(NamedTuple):
    """What one name was logged with: everything but the value, the type of that, and the parts that make it up."""

    arguments: dict[str, Any]
    dtype: torch.dtype
    parts: list[Part]

    def combined(self) -> Part:
        """Return the value of the parts that count; what does not count may be NaN."""
        reduction, counted = reduction_name(self.arguments), [part for part in self.parts if part[1]]
        if len(counted) == 1:
            return counted[0]
        value = _COMBINED[reduction](counted) if counted else torch.tensor(NEUTRAL[reduction], dtype=torch.float64)
        return value, sum(size for _, size in counted)


class ReplicaLog:
    """Collects what `self.log` is given in a step, and logs it once per batch.

    A mean is weighted by the replicas' samples, or the `batch_size` that was given. With `sync_dist=True`, or `whole`,
    a value is that of the replicas of all ranks. What does not count adds nothing, nor does a rank that has not logged
    a name that another has.
    """

    def __init__(self, module: LightningModule, world: World, *, whole: bool) -> None:
        self._module, self._world, self._whole = module, world, whole
        self._entries: dict[str, _Entry] = {}
        self.samples = 0  # of what is logged now; 0 if they do not count

    @contextmanager
    def collecting(self, *, joined: bool) -> Iterator[None]:
        """Collect within the context, and log what came at its end. A collective operation.

        With `joined`, for ranks that exchange nothing within the context, an exception of one is an error of all.
        """
        self._entries = {}
        try:
            with logged_as(self._module, self._collect):
                yield
        except Exception as error:
            if joined and not is_broken_exchange(error):
                with suppress(RuntimeError):
                    self._share(f"{type(error).__name__}: {error}")
            raise
        self._share()
        for entry in self._entries.values():
            value, size = entry.combined()
            value = on_device(value, self._module.device).to(entry.dtype)
            # In float64, as sizes add up over an epoch; filled, as the host would wait for a copy.
            number = torch.full((), size, dtype=torch.float64, device=value.device)
            self._module.log(**{**entry.arguments, "value": value, "batch_size": number})

    def _collect(self, arguments: dict[str, Any]) -> dict[str, Any] | None:
        arguments = of_whole_run(arguments) if self._whole else arguments
        value, size = arguments["value"], arguments.get("batch_size")
        if not isinstance(value, (Tensor, Number)) or reduction_name(arguments) not in _COMBINED:
            return arguments
        value = torch.as_tensor(value, device=self._module.device).detach().squeeze()
        dtype = value.dtype if value.dtype.is_floating_point else torch.get_default_dtype()
        if size is None or self.samples == 0 or reduction_name(arguments) != "mean":
            size = self.samples
        entry = self._entries.setdefault(arguments["name"], _Entry({**arguments, "value": None}, dtype, []))
        entry.parts.append((value.double(), float(size)))
        return None

    def _share(self, failure: str | None = None) -> None:
        """Have all ranks log the same, one part of each of them, or raise a RuntimeError on all if one has failed."""
        if self._world.size == 1:
            return
        own = {name: entry for name, entry in self._entries.items() if entry.arguments.get("sync_dist", False)}
        rows = self._world.gather_integers([digest("\0".join(sorted(own))), failure is not None])
        if failure is not None or len(set(map(tuple, rows))) > 1:
            named = {name: entry._replace(parts=[]) for name, entry in own.items()}
            failures, of_ranks = zip(*self._world.gather_objects((failure, named)), strict=True)
            if any(failures):
                said = (f"rank {rank} ended with {text}" for rank, text in enumerate(failures) if text is not None)
                raise RuntimeError("; ".join(said))
            own = {name: entry for of_rank in of_ranks for name, entry in of_rank.items()} | own
        if not own:
            return
        mine = [own[name].combined() for name in sorted(own)]
        values = torch.stack([value.to(self._module.device) for value, _ in mine])
        table = self._world.gather_floats([*values.tolist(), *(size for _, size in mine)])
        for index, (name, entry) in enumerate(sorted(own.items())):
            # There is nothing left to synchronize.
            arguments = {**entry.arguments, "rank_zero_only": True}
            parts = [(torch.tensor(row[index], dtype=torch.float64), row[index + len(mine)]) for row in table]
            self._entries[name] = _Entry(arguments, entry.dtype, parts)


def join_outputs(outputs: Sequence[Any], device: torch.device) -> Any:
    """Return the outputs of this rank's replicas as one, with graph; as a list if they do not fit together.

    Tensors are concatenated along dimension 0, in any structure. A number becomes one entry per replica. None stays.
    """
    try:
        rows = zip(*(_rows(output, device) for output in outputs), strict=True)
        return _with_rows(outputs[0], [torch.cat(parts) for parts in rows])
    except (TypeError, ValueError, RuntimeError):
        return outputs


def gather_outputs(
    output: Any,
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    counted: bool,
    numbers: bool,
    sparse: Sequence[Tensor],
) -> Any:
    """Return the outputs of all ranks' replicas as one, in their order. A collective operation.

    Every rank can compute the same loss from the result; `gather` brings each row's gradient home. Of an output that is
    not `counted` only the structure is used. `numbers` says whether a replica may return one.
    """
    rows = _rows(output, device, numbers=numbers)
    own = rows if counted else [_no_rows(each, sparse) for each in rows]
    return _with_rows(output, gather(own, group=group)) if rows else output


def _rows(output: Any, device: torch.device, *, numbers: bool = True) -> list[Tensor]:
    """Return the tensors of an output, each with a dimension to concatenate along."""
    found = []
    for label, leaf in leaves(output):
        if leaf is None:
            continue
        if not isinstance(leaf, (Tensor, Number)):
            raise TypeError(
                f"output{label}={leaf!r} of type {type(leaf).__name__} cannot be gathered over the replicas: return"
                " tensors, numbers, None, or dicts, lists and tuples of them from training_step."
            )
        row = torch.as_tensor(leaf, device=device)
        if row.ndim == 0 and not numbers:
            raise TypeError(
                f"output{label} of training_step is one number, which each rank has computed from its own samples: on"
                " one device it would be computed from all. Return rows, one per sample, and compute it in"
                " training_step_end."
            )
        found.append(torch.atleast_1d(row))
    return found


def _with_rows(value: Any, rows: Sequence[Tensor]) -> Any:
    """Return an output of the same structure with other tensors."""
    remaining = iter(rows)
    return mapped(value, lambda leaf: None if leaf is None else next(remaining))


def _no_rows(rows: Tensor, sparse: Sequence[Tensor]) -> Tensor:
    """Return a tensor without its rows, through which the backward of the gather reaches the parameters below.

    Their gradient is undefined, as 0 times an infinite derivative is NaN, or zero, where DDP does not take that.
    """
    none = rows[:0]
    if none.grad_fn is None:
        return none
    none.grad_fn.register_prehook(lambda _: (None,))
    return none + zero_loss(sparse, set(map(id, sparse))) if sparse else none
