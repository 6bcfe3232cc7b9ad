"""What replicas return, as one: their mean loss, and their outputs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg._support.tree import leaves, mapped
from lightning_gradavg.reduction.gather import gather
from lightning_gradavg.reduction.zero_loss import zero_loss

__all__ = ["gather_outputs", "join_steps"]


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
