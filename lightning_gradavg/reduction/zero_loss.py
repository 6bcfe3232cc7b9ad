"""A loss of 0 for a rank that has none, so that it joins the other ranks' backward."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["sparse_weights", "zero_loss"]


def sparse_weights(module: nn.Module) -> dict[int, Tensor]:
    """Return the parameters of a module with sparse gradients, by `id`.

    No attribute of a parameter says so. A layer of the user's own with sparse gradients is not found.
    """
    found: dict[int, Tensor] = {}
    for submodule in module.modules():
        if isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)) and submodule.sparse:
            found[id(submodule.weight)] = submodule.weight
    return found


class _ZeroGradients(torch.autograd.Function):
    """A number 0 that depends on all parameters, each with a gradient of 0.

    A loss such as `0 * sum(p.sum() for p in parameters)` would read all parameters, be NaN if one of them is, and give
    an embedding with sparse gradients a dense one, where DDP's reducer waits for a sparse one.
    """

    @staticmethod
    def forward(ctx: Any, sparse: Container[int], *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        ctx.is_sparse = [id(parameter) in sparse for parameter in parameters]
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor] = []
        for parameter, is_sparse in zip(ctx.parameters, ctx.is_sparse, strict=True):
            if is_sparse:
                gradients.append(_no_rows(parameter))
            else:
                gradients.append(torch.zeros_like(parameter))
        return None, *gradients  # None for `sparse`


def _no_rows(parameter: Tensor) -> Tensor:
    """Return a sparse gradient without rows."""
    values = parameter.new_empty((0, *parameter.shape[1:]))
    indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    # The invariants hold by construction; checking them would wait for the device.
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def zero_loss(parameters: Sequence[Tensor], sparse: Container[int]) -> Tensor:
    """Return a loss of 0 that gives every trained parameter a zero gradient, sparse for each `id` in `sparse`."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    loss: Tensor = _ZeroGradients.apply(sparse, *trained)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return loss
