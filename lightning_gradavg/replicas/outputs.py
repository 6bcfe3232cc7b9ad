"""The outputs of all replicas as one, as `nn.DataParallel` gathers them and Lightning 1.x hands them on."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gradavg.reduction.gather import gather
from lightning_gradavg.reduction.weigh import zero_loss
from lightning_gradavg.tree import leaves, mapped

__all__ = ["gather_outputs", "join_outputs", "require_rows"]


def join_outputs(outputs: Sequence[Any], device: torch.device) -> Any:
    """Return the outputs of this process's replicas as one, with graph.

    Tensors are concatenated along dimension 0, in any structure. A number becomes one entry per replica. None stays.
    """
    rows = [_rows(output, device) for output in outputs]
    different = next((of_replica for of_replica in rows if of_replica.keys() != rows[0].keys()), None)
    if different is not None:
        raise TypeError(
            f"the replicas' outputs cannot be gathered: one has {_names(rows[0])}, another {_names(different)}."
            " Return the same structure from every training_step."
        )
    return _with_rows(outputs[0], [torch.cat([of_replica[label] for of_replica in rows]) for label in rows[0]])


def gather_outputs(
    output: Any,
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    counted: bool,
    sparse: Container[int] = (),
) -> Any:
    """Return the outputs of all replicas of all ranks as one, in the order of the replicas. A collective operation.

    Every rank can compute the same loss from the result; `gather` brings each row's gradient home.

    Args:
        output: What this rank's replica returned; without one, its stand-in, of which the structure is used and no row.
        device: Where Python's numbers are put.
        group: The process group.
        counted: Whether this rank has a replica.
        sparse: The `id` of the parameters whose gradients are sparse.
    """
    rows = list(_rows(output, device).values())
    if not rows:
        return output
    return _with_rows(output, gather(rows if counted else _no_rows(rows, sparse), group=group))


def require_rows(output: Any) -> None:
    """Raise a TypeError where a step's output is a number, which one device would compute from all samples."""
    for label, leaf in leaves(output):
        if isinstance(leaf, Number) or (isinstance(leaf, Tensor) and leaf.ndim == 0):
            raise TypeError(
                f"output{label} of training_step is one number, which each rank has computed from its own samples: on"
                " one device it would be computed from all. Return rows, one per sample, and compute it in"
                " training_step_end."
            )


def _rows(value: Any, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of an output by their places, each with a dimension to concatenate along."""
    found = {}
    for label, leaf in leaves(value):
        if isinstance(leaf, Tensor):
            found[label] = leaf.reshape(1) if leaf.ndim == 0 else leaf
        elif isinstance(leaf, Number):
            found[label] = torch.tensor([leaf], device=device)
        elif leaf is not None:
            raise TypeError(
                f"output{label}={leaf!r} of type {type(leaf).__name__} cannot be gathered over the replicas: return"
                " tensors, numbers, None, or dicts, lists and tuples of them from training_step."
            )
    return found


def _with_rows(value: Any, rows: Sequence[Tensor]) -> Any:
    """Return an output of the same structure with other tensors."""
    remaining = iter(rows)
    return mapped(value, lambda leaf: None if leaf is None else next(remaining))


def _names(labels: Iterable[str]) -> str:
    return ", ".join(f"output{label}" for label in labels) or "no tensor"


def _no_rows(rows: Sequence[Tensor], sparse: Container[int]) -> list[Tensor]:
    """Return the tensors without their rows.

    The parameters below the outputs get a gradient of zero through the gather, when the other ranks' parameters get
    theirs: earlier, this rank would reduce them while the others are in the backward of the gather. A slice of no rows
    is not enough, as 0 times an infinite derivative is NaN.
    """
    parameters = _parameters_below([tensor for tensor in rows if tensor.requires_grad])
    zero = zero_loss(parameters, sparse) if parameters else 0.0
    return [tensor.detach()[:0] + zero if tensor.requires_grad else tensor[:0] for tensor in rows]


def _parameters_below(tensors: Sequence[Tensor]) -> list[nn.Parameter]:
    """Return the leaves that the backward of `tensors` reaches."""
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen, found = set(nodes), {}
    while nodes:
        node = nodes.pop()
        if (variable := getattr(node, "variable", None)) is not None:
            found[id(variable)] = variable
        below = {next_node for next_node, _ in getattr(node, "next_functions", ())} - seen
        seen |= below
        nodes += below
    return list(found.values())
