"""Autograd pieces that let each loss term's gradient be weighed at the moment of its backward."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradavg.rules import Weight

__all__ = ["Coefficients", "keep_gradients", "weigh_terms", "zero_gradient", "zero_loss"]


class Coefficients:
    """What `weigh_terms` multiplies each term's gradient by; set before every backward.

    Attributes:
        values: One number per term, in the order of the terms. None stops that term's gradient.
    """

    def __init__(self, values: Iterable[Weight | None] = ()) -> None:
        self.values: list[Weight | None] = list(values)


class _WeighTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, coefficients: Coefficients, *terms: Tensor) -> Tensor:
        ctx.coefficients = coefficients
        ctx.like = [(term.dtype, term.shape) for term in terms]
        return sum(terms[1:], terms[0].clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        weighed: list[Tensor | None] = [None]
        for value, (dtype, shape) in zip(ctx.coefficients.values, ctx.like, strict=True):
            if value is None:
                weighed.append(None)
            else:
                weighed.append((grad * value).to(dtype).reshape(shape))
        return tuple(weighed)


def weigh_terms(coefficients: Coefficients, terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of the terms, whose gradients `coefficients` multiplies when the backward runs.

    The value is the plain sum: only gradients are weighed. The backward may run several times with other coefficients
    (`retain_graph=True`).

    Args:
        coefficients: Read at each backward.
        terms: 0-dim losses.
    """
    weighed: Tensor = _WeighTerms.apply(coefficients, *terms)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return weighed


class _ZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sparse: Container[int], *parameters: Tensor) -> Tensor:
        ctx.like = [(parameter, id(parameter) in sparse) for parameter in parameters]
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        del grads
        return None, *(zero_gradient(parameter, sparse) for parameter, sparse in ctx.like)


def zero_gradient(parameter: Tensor, sparse: bool) -> Tensor:
    """Return the gradient of a loss that `parameter` does not change; sparse ones have no entries."""
    if not sparse:
        return torch.zeros_like(parameter)
    indices = torch.empty((1, 0), dtype=torch.long, device=parameter.device)
    values = parameter.new_empty((0, *parameter.shape[1:]))
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def zero_loss(parameters: Sequence[nn.Parameter], sparse: Container[int]) -> Tensor:
    """Return a loss of 0 that gives every parameter a zero gradient, whatever the parameter's value.

    Args:
        parameters: One or more leaves.
        sparse: The `id` of those whose gradients are sparse.
    """
    loss: Tensor = _ZeroGradients.apply(sparse, *parameters)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return loss


@contextmanager
def keep_gradients(parameters: Iterable[nn.Parameter], keep: bool | Tensor) -> Iterator[None]:
    """Replace by zeros every gradient that reaches `parameters` within the context, unless `keep`.

    A gradient is selected and not multiplied: 0 times NaN is NaN.

    Args:
        parameters: Leaves whose gradients are filtered before they are accumulated.
        keep: A 0-dim boolean tensor decides on its own device, without a wait.
    """
    if keep is True:
        yield
        return

    def select(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # of a term that `weigh_terms` stopped
            return None
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            # Not a condition on the CPU, whose copy to an accelerator would be waited for.
            values = gradient.values()
            values = torch.where(keep, values, 0) if isinstance(keep, Tensor) else torch.zeros_like(values)
            return torch.sparse_coo_tensor(
                gradient.indices(), values, gradient.shape, is_coalesced=True, check_invariants=False
            )
        return torch.where(keep, gradient, 0) if isinstance(keep, Tensor) else torch.zeros_like(gradient)

    handles = [parameter.register_hook(select) for parameter in parameters if parameter.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
