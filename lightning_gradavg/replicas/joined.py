"""The outputs of a rank's pieces as one, with their mean loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from lightning_gradavg._support.tree import leaves, mapped

__all__ = ["join_steps"]


def join_steps(outputs: Sequence[Any], samples: Sequence[int], device: torch.device) -> Any:
    """Join what `training_step` returned for each of this rank's pieces to the one output that Lightning sees.

    Its loss has the value of the mean over the pieces' samples, which callbacks and loggers see. It has the graph of
    the last piece, whose backward Lightning runs: those of the other pieces have run. Tensors are concatenated along
    dimension 0.

    Args:
        outputs: Of each piece: a loss, or a mapping with a loss.
        samples: Number of samples of each piece.
        device: The device of the module.
    """
    if len(outputs) == 1:
        return outputs[0]
    mappings: list[Mapping[str, Any]] = []
    for output in outputs:
        mappings.append(output if isinstance(output, Mapping) else {"loss": output})
    loss: Tensor = mappings[-1]["loss"].clone()
    with torch.no_grad():
        total = torch.zeros_like(loss)
        for mapping, size in zip(mappings, samples, strict=True):
            total = total + mapping["loss"].detach() * size
        loss.copy_(total / sum(samples))  # without grad, so the graph stays that of the clone

    # A name may be missing from some outputs, so the names of all, in the order of their first occurrence.
    names: list[str] = []
    for mapping in mappings:
        for name in mapping:
            if name != "loss" and name not in names:
                names.append(name)
    joined = {name: _join([mapping.get(name) for mapping in mappings], device) for name in names}
    joined["loss"] = loss
    return joined


def _join(outputs: Sequence[object], device: torch.device) -> object:
    """Concatenate outputs of this rank's pieces, with graph. Return them as a list if they do not fit together.

    They may be of any structure. A number becomes one row for each piece. None stays None.
    """
    # Outputs of one structure may still differ in the shape of a row, or in type. They are for callbacks, which then
    # get them one by one: that is no reason to end the run.
    try:
        rows_of_pieces = [_rows(output, device) for output in outputs]
        rows = [torch.cat(parts) for parts in zip(*rows_of_pieces, strict=True)]
        return _with_rows(outputs[0], rows)
    except (TypeError, ValueError, RuntimeError):
        return outputs


def _rows(output: object, device: torch.device) -> list[Tensor]:
    """Return the tensors of an output, each with a dimension to concatenate along. Raise a TypeError about others."""
    found: list[Tensor] = []
    for label, leaf in leaves(output):
        if leaf is None:
            continue
        if not isinstance(leaf, (Tensor, Number)):
            raise TypeError(
                f"output{label}={leaf!r} of type {type(leaf).__name__} cannot be gathered over the replicas: return"
                " tensors, numbers, None, or dicts, lists and tuples of them from training_step."
            )
        tensor = torch.as_tensor(leaf, device=device)
        found.append(torch.atleast_1d(tensor))
    return found


def _with_rows(output: object, rows: Sequence[Tensor]) -> object:
    """Return an output of the same structure with other tensors, in the order of `_rows`. None stays None."""
    remaining = iter(rows)

    def next_rows(leaf: object) -> Tensor | None:
        if leaf is None:
            return None
        return next(remaining)

    return mapped(output, next_rows)
