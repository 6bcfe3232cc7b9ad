"""The outputs of all replicas as one, as `nn.DataParallel` gathers them and Lightning 1.x hands them on."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gradavg.collectives.gather import gather
from lightning_gradavg.data.collated import with_items
from lightning_gradavg.reduction.terms import zero_gradient

__all__ = ["gather_outputs", "join_outputs"]


def join_outputs(outputs: Sequence[Any], device: torch.device) -> Any:
    """Return the outputs of this process's replicas as one, with graph.

    Tensors are concatenated along dimension 0 through dicts, lists, tuples and named tuples. A number, Python's or a
    0-dim tensor, becomes one entry per replica. None stays None.

    Args:
        outputs: What each replica returned, in order; one or more.
        device: Where Python's numbers are put.

    Raises:
        TypeError: If an output is something else, or the replicas' outputs are not alike.
    """
    leaves = [list(_leaves(output, device, "")) for output in outputs]
    labels = [[label for label, _ in of_replica] for of_replica in leaves]
    if any(of_replica != labels[0] for of_replica in labels):
        different = next(of_replica for of_replica in labels if of_replica != labels[0])
        raise TypeError(
            f"the replicas' outputs cannot be gathered: one has {_names(labels[0])}, another {_names(different)}."
            " Return the same structure from every training_step."
        )
    joined = iter([torch.cat([leaf for _, leaf in of_leaf]) for of_leaf in zip(*leaves, strict=True)])
    return _rebuilt(outputs[0], joined)


def gather_outputs(
    outputs: Sequence[Any],
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    counted: bool,
    numbers: bool = True,
    sparse: Container[int] = (),
) -> Any:
    """Return the outputs of all replicas of all ranks as one, in the order of the replicas. A collective operation.

    Every rank can compute the same loss from the result; `gather` brings each row's gradient home.

    Args:
        outputs: What each of this rank's replicas returned, in order. A rank without replicas gives the one output of
            its stand-in, of which the structure is used and no row.
        device: Where Python's numbers are put.
        group: The process group.
        counted: Whether this rank has replicas.
        numbers: Whether numbers may be gathered, too. On one device there would be one, computed from all samples.
        sparse: The `id` of the parameters whose gradients are sparse.

    Raises:
        TypeError: As `join_outputs`.
        ValueError: If the ranks' outputs do not fit together.
    """
    if not numbers:
        _refuse_numbers(outputs[0], "")
    joined = join_outputs(outputs, device)
    leaves = [leaf for _, leaf in _leaves(joined, device, "")]
    if not leaves:
        return joined
    gathered = gather(leaves if counted else _no_rows(leaves, sparse), group=group)
    return _rebuilt(joined, iter(gathered))


class _NoRows(torch.autograd.Function):
    """Tensors of no rows, whose backward gives the parameters below them zero gradients."""

    @staticmethod
    def forward(ctx: Any, like: Sequence[Tensor], sparse: Container[int], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.parameters = [(parameter, id(parameter) in sparse) for parameter in parameters]
        return tuple(leaf.new_empty((0, *leaf.shape[1:])) for leaf in like)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        del grads
        return None, None, *(zero_gradient(parameter, is_sparse) for parameter, is_sparse in ctx.parameters)


def _no_rows(leaves: Sequence[Tensor], sparse: Container[int]) -> list[Tensor]:
    """Return the leaves without their rows.

    The parameters that a replica's outputs depend on get their gradients below the gather, as on the other ranks: where
    they came earlier, this rank would reduce them before the others have left the backward of the gather. A slice of no
    rows would give them gradients, too, but 0 times an infinite derivative is NaN.
    """
    live = [leaf for leaf in leaves if leaf.requires_grad]
    parameters = _parameters_below(live)
    if not parameters:
        return [leaf[:0] for leaf in leaves]
    detached = [leaf.detach() for leaf in live]
    empty = iter(_NoRows.apply(detached, sparse, *parameters))  # type: ignore[no-untyped-call]  # torch's is untyped
    return [next(empty) if leaf.requires_grad else leaf[:0] for leaf in leaves]


def _parameters_below(tensors: Sequence[Tensor]) -> list[nn.Parameter]:
    """Return the leaves that the backward of `tensors` reaches."""
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen, found = set(nodes), {}
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        for below, _ in node.next_functions:
            if below not in seen:
                seen.add(below)
                nodes.append(below)
    return list(found.values())


def _leaves(value: Any, device: torch.device, label: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield label, value.reshape(1) if value.ndim == 0 else value
    elif isinstance(value, Number):
        yield label, torch.tensor([value], device=device)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, device, f"{label}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, device, f"{label}[{index}]")
    elif value is not None:
        raise TypeError(
            f"output{label}={value!r} of type {type(value).__name__} cannot be gathered over the replicas: return"
            " tensors, numbers, None, or dicts, lists and tuples of them from training_step."
        )


def _refuse_numbers(value: Any, label: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_numbers(item, f"{label}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _refuse_numbers(item, f"{label}[{index}]")
    elif isinstance(value, Number) or (isinstance(value, Tensor) and value.ndim == 0):
        raise TypeError(
            f"output{label} of training_step is one number, which each rank has computed from its own samples: on one"
            " device it would be computed from all. Return rows, one per sample, and compute it in training_step_end."
        )


def _rebuilt(value: Any, leaves: Iterator[Tensor]) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        return with_items(value, {key: _rebuilt(item, leaves) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        items = [_rebuilt(item, leaves) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    return next(leaves)


def _names(labels: Sequence[str]) -> str:
    return ", ".join(f"output{label}" for label in labels) or "no tensor"
