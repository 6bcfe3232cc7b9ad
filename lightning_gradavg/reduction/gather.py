"""`gather`: all ranks' rows for a loss that does not split over samples, with the gradient that the rule means.

Rank q computes a loss `l_q` of all ranks' features `x = [x_0, ..., x_(W-1)]`. What is meant is the gradient of the rule
applied to the losses,

    g = d/dtheta sum over q of  w_q * l_q / Z
      = sum over r of  (dx_r/dtheta)^T  sum over q of  (w_q / Z) * dl_q/dx_r .

Where losses are multiplied by `w_q` before the backward, as under the strategy, what comes back to the rows of rank r
is the plain sum over ranks, the adjoint of the gather. `average_gradients` multiplies each rank's gradient by `w_r / Z`
after the backward, so there it has to be

    sum over q of  (w_q / w_r) * dl_q/dx_r ,

which is the plain sum where all multipliers are equal (mean, sum, normalized sum).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg.arguments import Refusals, refuse
from lightning_gradavg.ranks import Contribution, World, on_ranks
from lightning_gradavg.reduction.average import agreed_factors, checked_weight, unserved
from lightning_gradavg.reduction.sums import SUM_DTYPES, as_matrix, gather_rows
from lightning_gradavg.rules import Rule, RuleFunction, resolve_rule
from lightning_gradavg.tree import leaves, rebuilt

__all__ = ["collectives_refused", "gather", "losses_weighed", "require_allowed", "weigh_losses_from_here"]

T = TypeVar("T")
_Operation: TypeAlias = Callable[[Sequence[Tensor]], Iterable[Tensor]]

_REFUSED: ContextVar[str | None] = ContextVar("refused", default=None)
_WEIGHED: ContextVar[bool] = ContextVar("weighed", default=False)


def gather(
    tensors: T,
    *,
    reduction: str | RuleFunction | Rule = "mean",
    weight: float | Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> T:
    """Return the ranks' tensors concatenated along dimension 0 in rank order, with gradients. Call it on every rank.

    The reduced gradient is that of the rule applied to the ranks' losses, for all parameters. `docs/contrastive.md`
    says which loss is right under which rule. Pass `reduction` and `weight` only with `average_gradients`, the same to
    both, where the rule weights some ranks more than others: `"weighted_mean"` with unequal weights, one vote per node
    on uneven nodes, or a rule of your own. `GradAvgStrategy` and `GradAvgReducer` need neither.

    - Ranks may have different numbers of rows, or none.
    - If any rank's tensor requires grad, the result requires grad on all ranks, and every rank must run its backward
      through it, in the same order if there are several: the backward is a collective operation, too. Gather what
      belongs together in one call; then it suffices to use one of the results.
    - Gradients of fewer than 32 bits are summed in float32, in rank order.
    - Under `torch.no_grad`, on all ranks, the result has no gradient.
    - Without an initialized process group, and in a group of one rank, the result is a copy.

    Args:
        tensors: A dense tensor of shape `(rows, ...)`, or nested tuples, lists and dicts of such tensors. Structure,
            dtypes and all but the first dimension must be equal on all ranks. Integers have no gradient.
        reduction: The rule that reduces the gradients afterwards.
        weight: This rank's weight under a rule that uses weights: a number >= 0 of any type, or a tensor with one
            element, which is copied to the host.
        group: The process group; the default group if None.

    Returns:
        New tensors in the same structure, each of shape `(sum of all ranks' rows, ...)`, dtype and device kept.

    Raises:
        ValueError: On all ranks, if an argument is invalid on some rank, if the ranks' arguments don't fit together, if
            only some ranks run under `torch.no_grad`, or if a rank has rows whose gradient `average_gradients` will
            discard. On this process alone, if it is no member of `group`.
    """
    require_allowed()
    if torch.is_inference_mode_enabled():
        # Gloo of torch 2.4 cannot write into tensors that were made in inference mode, as Lightning validates.
        with torch.inference_mode(False), torch.no_grad():
            return gather(tensors, reduction=reduction, weight=weight, group=group)
    world = World.of(group)
    mine, agreed = world.agree(
        "gather cannot proceed", lambda: _Rows.of(tensors, reduction, weight, world.device_types)
    )
    # Per rank whether it runs with grad, and of each tensor twice its rows plus 1 if it requires grad.
    enabled, *entries = zip(*agreed.details, strict=True)
    rows = [[entry >> 1 for entry in of_leaf] for of_leaf in entries]
    wanted = [any(entry & 1 for entry in of_leaf) for of_leaf in entries]
    factors = [1.0] * world.size if _WEIGHED.get() else agreed_factors(mine.rule, agreed)
    values = [torch.cat(gather_rows(leaf, of_leaf, world)) for leaf, of_leaf in zip(mine.leaves, rows, strict=True)]
    if any(wanted):
        _require_backward(mine.rule, enabled, factors, rows)
        crossing = _Crossing(world, factors, list(compress(rows, wanted)))
        own, gathered = compress(mine.leaves, wanted), compress(values, wanted)
        live = iter(_apply(lambda _: gathered, crossing.sum_back, crossing.send_out, own))
        values = [next(live) if is_wanted else value for value, is_wanted in zip(values, wanted, strict=True)]
    result: T = rebuilt(tensors, iter(values))
    return result


def require_allowed() -> None:
    """Raise a RuntimeError within `collectives_refused`."""
    refused = _REFUSED.get()
    if refused is not None:
        raise RuntimeError(f"{refused}.")


def collectives_refused(reason: str) -> AbstractContextManager[None]:
    """Have `gather` raise a RuntimeError within the context, on every rank that calls it."""
    return _within(_REFUSED, reason)


def losses_weighed(*, weighed: bool = True) -> AbstractContextManager[None]:
    """Say whether losses are multiplied by their weights before the backward, of what `gather` is called for within."""
    return _within(_WEIGHED, weighed)


def weigh_losses_from_here(*, weighed: bool) -> None:
    """Say so from here on, or no longer, where forwards and losses may take turns, or have other contexts."""
    _WEIGHED.set(weighed)


@contextmanager
def _within(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_REFUSED_LEAVES: Refusals = (
    (
        lambda leaf: not isinstance(leaf, Tensor),
        "must be a tensor, or a tuple, list or dict of tensors; got {0!r} of type {0.__class__.__name__}",
    ),
    (
        lambda leaf: leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized,
        "must be a dense tensor, got layout {0.layout} and {0.dtype}",
    ),
    (lambda leaf: leaf.ndim == 0, "has no dimension to concatenate along: pass tensor.reshape(1), one row"),
)


@dataclass(frozen=True)
class _Rows(Contribution):
    """One rank's arguments, checked: the rule, and the tensors in the order of the structure."""

    rule: Rule
    leaves: list[Tensor]

    @classmethod
    def of(cls, tensors: Any, reduction: Any, weight: Any, device_types: Sequence[str] | None) -> _Rows:
        rule, labeled, grad = resolve_rule(reduction), list(leaves(tensors, "tensors")), torch.is_grad_enabled()
        if not labeled:
            raise ValueError(f"there is no tensor in {tensors!r}: pass at least one")
        for label, leaf in labeled:
            refuse(label, leaf, (*_REFUSED_LEAVES, *unserved(device_types)))
        # The rank's own structure counts, and so does every shape but the number of rows.
        shapes = (", ".join(map(str, ("rows", *leaf.shape[1:]))) for _, leaf in labeled)
        equal = [
            f"{label} of shape ({shape}) and {leaf.dtype}" for (label, leaf), shape in zip(labeled, shapes, strict=True)
        ]
        entries = [2 * leaf.shape[0] + (leaf.requires_grad and grad) for _, leaf in labeled]
        number = checked_weight(rule, weight)
        own = [leaf for _, leaf in labeled]
        return cls([f"reduction={rule.name!r}", *equal], [grad, *entries], number, rule, own)


def _require_backward(
    rule: Rule, enabled: Sequence[int], factors: Sequence[float], rows: Sequence[Sequence[int]]
) -> None:
    """Raise where a rank would not join the backward, or its part of the gradient would be discarded afterwards."""
    disabled = [rank for rank, is_enabled in enumerate(enabled) if not is_enabled]
    if disabled:
        raise ValueError(
            f"gather runs under torch.no_grad {on_ranks(disabled)}, but other ranks need a gradient, for which those"
            " would wait forever. Use torch.no_grad on all ranks or on none."
        )
    lost = [rank for rank, factor in enumerate(factors) if factor == 0 and any(of_leaf[rank] for of_leaf in rows)]
    if lost and any(factors):
        raise ValueError(
            f"reduction={rule.name!r} discards the gradient of a rank of weight 0, but there are rows {on_ranks(lost)}"
            " that count in the other ranks' losses. Gather no rows there (tensor[:0]); or use reduction='sum' with"
            " losses that are divided by the count of all ranks."
        )


@dataclass(frozen=True)
class _Crossing:
    """Takes gradients home to the ranks whose rows they are of, and their own gradients out again.

    Attributes:
        world: The ranks.
        factors: Per rank, what its gradient will be multiplied by in the reduction.
        rows: `rows[i][q]`, the rows that rank q has of tensor i.
    """

    world: World
    factors: Sequence[float]
    rows: Sequence[Sequence[int]]

    def sum_back(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the sum over ranks of their gradients of this rank's rows, each times its factor over this rank's."""
        return [self._home(*each) for each in zip(gradients, self.rows, strict=True)]

    def _home(self, gradient: Tensor, rows: Sequence[int]) -> Tensor:
        mine, sent = rows[self.world.rank], as_matrix(gradient)
        received = sent.new_empty(self.world.size * mine, sent.shape[1])
        if self.world.group is None:
            received = sent
        elif sent.shape[1] > 0:
            # Not reduce_scatter: on gloo that moves twice the bytes, and sums half precision in half precision.
            of_all, bytes_sent = received.view(torch.uint8), sent.view(torch.uint8)
            dist.all_to_all_single(of_all, bytes_sent, [mine] * self.world.size, list(rows), group=self.world.group)
        parts = received.view(self.world.size, mine, *gradient.shape[1:])
        total = torch.zeros_like(parts[0], dtype=SUM_DTYPES[gradient.dtype])
        for rank, part in enumerate(parts):
            ratio = self._ratio(rank, self.world.rank)
            if ratio > 0:  # else there is nothing behind its loss, which may be NaN
                total.add_(part.to(total.dtype), alpha=ratio)
        return total.to(gradient.dtype)

    def send_out(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return all ranks' tensors times this rank's factor over that of each: the adjoint of `sum_back`."""
        gathered = [gather_rows(*each, self.world) for each in zip(tensors, self.rows, strict=True)]
        ratios = [self._ratio(self.world.rank, rank) for rank in range(self.world.size)]
        return [torch.cat([_times(*each) for each in zip(blocks, ratios, strict=True)]) for blocks in gathered]

    def _ratio(self, rank: int, other: int) -> float:
        # A rank without factor has no rows: what it receives is empty.
        return self.factors[rank] / self.factors[other] if self.factors[other] else 1.0


class _Linear(torch.autograd.Function):
    """A linear operation, its adjoint, and the adjoint of that, by which backwards of backwards take turns."""

    @staticmethod
    def forward(ctx: Any, operation: _Operation, adjoint: _Operation, back: _Operation, *tensors: Tensor) -> Any:
        ctx.turns = adjoint, back
        return tuple(operation(tensors[1:]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        adjoint, back = ctx.turns
        return None, None, None, None, *_apply(adjoint, back, adjoint, gradients)


def _apply(
    operation: _Operation, adjoint: _Operation, back: _Operation, tensors: Iterable[Tensor]
) -> tuple[Tensor, ...]:
    # Without a leaf of its own that requires grad, a rank whose tensors need none would not join the others' backward.
    anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
    apply: Callable[..., tuple[Tensor, ...]] = _Linear.apply
    return apply(operation, adjoint, back, anchor, *tensors)


def _times(tensor: Tensor, ratio: float) -> Tensor:
    return tensor.to(SUM_DTYPES[tensor.dtype]).mul(ratio).to(tensor.dtype) if ratio else torch.zeros_like(tensor)
