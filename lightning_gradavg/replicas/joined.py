"""What replicas log and return, as one: one value per batch, that of all replicas, and their outputs side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from numbers import Number
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_gradavg.device import on_device
from lightning_gradavg.methods import logged_as
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.gather import gather
from lightning_gradavg.reduction.loss import zero_loss
from lightning_gradavg.stand_in import reduction_name
from lightning_gradavg.tree import leaves, mapped

__all__ = ["ReplicaLog", "gather_outputs", "join_steps", "of_whole_run"]


def of_whole_run(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what `log` was given, for a value over all ranks even without `sync_dist=True`, as on one process."""
    return {**arguments, "sync_dist": not arguments.get("rank_zero_only", False)}


_COMBINED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda values, sizes: (values * sizes).sum() / sizes.sum(),
    "sum": lambda values, _: values.sum(),
    "max": lambda values, _: values.max(),
    "min": lambda values, _: values.min(),
}
"""Several values as one, by how `log` puts values together, with how much each of them stands for."""


class _Logged(NamedTuple):
    """What a name was logged with: a value in float64, the type it had, and the samples or `batch_size` behind it."""

    arguments: dict[str, Any]
    dtype: torch.dtype
    value: Tensor
    size: float


def _combined(parts: Sequence[_Logged]) -> _Logged:
    """Return parts that were logged under one name as one."""
    first, *more = parts
    if not more:
        return first
    values, sizes = torch.stack([part.value for part in parts]), [part.size for part in parts]
    combine = _COMBINED[first.arguments["reduce_fx"]]
    return first._replace(value=combine(values, values.new_tensor(sizes)), size=sum(sizes))


class ReplicaLog:
    """Collects what `self.log` is given in a step, and logs it once per batch.

    A mean is weighted by the replicas' samples, or the `batch_size` that was given. With `sync_dist=True`, or `whole`,
    a value is that of the replicas of all ranks, also on a rank that has not logged the name. What stands for no
    samples is not logged, be it NaN.
    """

    def __init__(self, module: LightningModule, world: World, *, whole: bool) -> None:
        self._module, self._world, self._whole = module, world, whole
        self._parts = defaultdict[str, list[_Logged]](list)
        self.samples = 0  # of what is logged now; 0 if they do not count

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect within the context, and log what came at its end. A collective operation."""
        self._parts.clear()
        with logged_as(self._module, self._collect):
            yield
        own = {name: _combined(parts) for name, parts in self._parts.items()}
        for logged in {**own, **self._of_all_ranks(own)}.values():
            value = on_device(logged.value, self._module.device).to(logged.dtype)
            # In float64, as sizes add up over an epoch; filled, as the host would wait for a copy.
            size = torch.full((), logged.size, dtype=torch.float64, device=value.device)
            self._module.log(**{**logged.arguments, "value": value, "batch_size": size})

    def _collect(self, arguments: dict[str, Any]) -> dict[str, Any] | None:
        arguments = of_whole_run(arguments) if self._whole else arguments
        value, reduction = arguments["value"], reduction_name(arguments)
        if not isinstance(value, (Tensor, Number)) or reduction not in _COMBINED:
            return arguments
        value = torch.as_tensor(value, device=self._module.device).detach().squeeze()
        dtype = value.dtype if value.dtype.is_floating_point else torch.get_default_dtype()
        given = arguments.get("batch_size") if self.samples and reduction == "mean" else None
        size = float(self.samples if given is None else given)
        if size > 0:
            arguments = {**arguments, "value": None, "reduce_fx": reduction}
            self._parts[arguments["name"]].append(_Logged(arguments, dtype, value.double(), size))
        return None

    def _of_all_ranks(self, own: Mapping[str, _Logged]) -> dict[str, _Logged]:
        """Return what some rank has logged for all of them, as one value of each name."""
        if self._world.size == 1:
            return {}
        shared = [logged for logged in own.values() if logged.arguments.get("sync_dist", False)]
        # On the host, in one copy; there is nothing left to synchronize.
        values = torch.stack([logged.value for logged in shared]).cpu() if shared else ()
        mine = [
            logged._replace(value=value, arguments={**logged.arguments, "rank_zero_only": True})
            for logged, value in zip(shared, values, strict=True)
        ]
        parts = defaultdict[str, list[_Logged]](list)
        for logged in chain.from_iterable(self._world.gather_objects(mine)):
            parts[logged.arguments["name"]].append(logged)
        return {name: _combined(each) for name, each in parts.items()}


def join_steps(outputs: Sequence[Any], samples: Sequence[int], device: torch.device) -> Any:
    """Return what a step's pieces returned as one, with the mean loss, whose backward is that of the last piece."""
    if len(outputs) == 1:
        return outputs[0]
    named = [output if isinstance(output, Mapping) else {"loss": output} for output in outputs]
    loss = named[-1]["loss"].clone()
    with torch.no_grad():
        total = sum(one["loss"].detach() * size for one, size in zip(named, samples, strict=True))
        loss.copy_(total / sum(samples))
    keys = dict.fromkeys(key for one in named for key in one if key != "loss")
    return {key: _joined([one.get(key) for one in named], device) for key in keys} | {"loss": loss}


def _joined(outputs: Sequence[Any], device: torch.device) -> Any:
    """Return the outputs of this rank's pieces as one, with graph; as a list if they do not fit together.

    Tensors are concatenated along dimension 0, in any structure. A number becomes one entry per piece. None stays.
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
