"""Losses whose gradient is multiplied when their backward runs, and gradients that must not count."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from lightning_gradavg.lightning_internals import stored
from lightning_gradavg.reduction.weights import WHOLE_LOSS, MicroBatch

__all__ = ["WeighedLoss", "gradients_discarded", "nan_stopped", "sparse_weights", "weigh_terms", "zero_loss"]


def weigh_terms(coefficients: list[Any], terms: Iterable[Tensor], begin: Callable[[], None] | None = None) -> Tensor:
    """Return the plain sum of 0-dim losses, whose gradients a backward multiplies by coefficients, or stops.

    `begin` is called before it reads them, one per term; None stops its gradient.
    """
    copies = [term.clone() for term in terms]
    total = sum(copies[1:], copies[0])
    if begin is not None and total.grad_fn is not None:
        total.grad_fn.register_prehook(lambda _: begin())
    for index, copy in enumerate(copies):
        if copy.grad_fn is not None:
            copy.grad_fn.register_prehook(partial(_weigh, coefficients, index))
    return total


def _weigh(coefficients: list[Any], index: int, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    (gradient,), value = gradients, coefficients[index]
    return (None if gradient is None or value is None else (gradient * value).to(gradient.dtype),)


class WeighedLoss(NamedTuple):
    """A loss whose terms are weighed when its backward runs."""

    value: Tensor  # the sum of the terms, with graph; not weighed
    micro_batch: MicroBatch
    coefficients: list[Any]  # what the backward multiplies each term by; empty where the loss is not weighed
    terms: Sequence[Tensor] = ()

    @classmethod
    def of(
        cls,
        terms: Mapping[str, Tensor],
        micro_batch: MicroBatch,
        *,
        plain: bool = False,
        sparse: Mapping[int, Tensor] = MappingProxyType({}),
        begin: Callable[[WeighedLoss], None] | None = None,
    ) -> WeighedLoss:
        """Return a loss to be weighed, of which terms that share a weight are one term.

        The graph of a `plain` loss, which carries nothing, stays unchanged. DDP does not take `sparse` gradients that
        are undefined. `begin` is called with the loss when its backward begins.
        """
        losses = list(terms.values())
        if tuple(micro_batch.weights) == (WHOLE_LOSS,):
            losses = [sum(losses[1:], losses[0])]
        value, coefficients = losses[0], [] if plain else [1.0] * len(losses)
        weighed = cls(value, micro_batch, coefficients, losses)
        if not plain:
            # What the graph holds must not hold the graph.
            value = weigh_terms(coefficients, losses, None if begin is None else partial(begin, weighed))
        if sparse and micro_batch.is_zero:
            value = value + zero_loss(list(sparse.values()), sparse).to(value.dtype)
        return weighed._replace(value=value)


def sparse_weights(module: nn.Module) -> dict[int, Tensor]:
    """Return the parameters of a module whose gradients are sparse, which DDP does not take undefined, by `id`."""
    embeddings = (each for each in module.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag)))
    return {id(each.weight): each.weight for each in embeddings if each.sparse}


class _ZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sparse: Container[int], *parameters: Tensor) -> Tensor:
        ctx.like = [(parameter, id(parameter) in sparse) for parameter in parameters]
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(_no_rows(one) if sparse else torch.zeros_like(one) for one, sparse in ctx.like)


def _no_rows(parameter: Tensor) -> Tensor:
    values = parameter.new_empty((0, *parameter.shape[1:]))
    indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    # The invariants hold by construction; looking at them would wait for the device.
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def zero_loss(parameters: Sequence[Tensor], sparse: Container[int]) -> Tensor:
    """Return a loss of 0 that gives every parameter a zero gradient, sparse for each `id` in `sparse`."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    loss: Tensor = _ZeroGradients.apply(sparse, *trained)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return loss


def gradients_discarded(parameters: Iterable[nn.Parameter], *, nan_only: bool) -> list[RemovableHandle]:
    """Replace gradients by zeros before they are accumulated, as 0 times NaN is NaN, until the hooks are removed.

    With `nan_only`, what is not NaN passes: gradients of other ranks' losses, which come through gathers and through
    batch norm over all ranks.
    """

    def zeros(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        kept = gradient.clone()
        numbers = stored(kept)
        numbers.masked_fill_(numbers.isnan() | (not nan_only), 0)
        return kept

    return [parameter.register_hook(zeros) for parameter in parameters if parameter.requires_grad]


def nan_stopped(loss: Tensor, counting: Sequence[Tensor]) -> list[RemovableHandle]:
    """Have functions written in Python see and give 0 for NaN where no terms but those that carry nothing pass through.

    The gradient of such a term is undefined, which torch's own operators pass on. A reentrant checkpoint and a compiled
    module make zeros of it, which a derivative that is infinite makes NaN; and a gather would send that to other ranks.
    """
    handles = []
    for node in _functions_below([loss]) - _functions_below(counting):
        handles += [node.register_prehook(_without_nan), node.register_hook(lambda given, _: _without_nan(given))]
    return handles


def _without_nan(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    # Sparse ones come from losses of zero, or go to a parameter, where NaN is discarded.
    return tuple(each if each is None or each.is_sparse else each.masked_fill(each.isnan(), 0) for each in gradients)


def _functions_below(losses: Iterable[Tensor]) -> set[Any]:
    """Return the functions of a graph that are written in Python."""
    seen, ahead = set(), list[Any](loss.grad_fn for loss in losses)
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [each for each, _ in node.next_functions]
    return {node for node in seen if isinstance(node, BackwardCFunction)}
