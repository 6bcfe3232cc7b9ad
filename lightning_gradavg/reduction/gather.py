"""`gather`: all ranks' rows for a loss that does not split over samples, with the gradient that the rule means.

Rank q computes a loss `l_q` of all ranks' features `x = [x_0, ..., x_(W-1)]`. What is meant is the gradient of the rule
applied to the losses,

    g = d/dtheta sum over q of  w_q * l_q / Z
      = sum over r of  (dx_r/dtheta)^T  sum over q of  (w_q / Z) * dl_q/dx_r .

The strategy multiplies each rank's loss by `w_q` before its backward, and the sum over ranks by `1/Z` after it: what
comes back to the rows of rank r is then the plain sum over ranks, the adjoint of the gather. `average_gradients`
multiplies each rank's gradient by `w_r / Z` after the backward, so there it has to be

    sum over q of  (w_q / w_r) * dl_q/dx_r ,

which is the plain sum where all multipliers are equal (mean, sum, normalized sum).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import compress
from operator import not_
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg.ranks import Contribution, World, by_rank, on_ranks
from lightning_gradavg.reduction.average import agreed_factors, checked_weight
from lightning_gradavg.reduction.sums import SUM_DTYPES
from lightning_gradavg.rules import Rule, RuleFunction, resolve_rule
from lightning_gradavg.tree import leaves, rebuilt

__all__ = ["collectives_refused", "gather", "losses_weighed", "require_allowed", "weigh_losses_from_here"]

T = TypeVar("T")

_REFUSED: ContextVar[str | None] = ContextVar("refused", default=None)
_ON_GATHER: ContextVar[Callable[[], None] | None] = ContextVar("on_gather", default=None)


def gather(
    tensors: T,
    *,
    reduction: str | RuleFunction | Rule = "mean",
    weight: float | Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> T:
    """Return the ranks' tensors concatenated along dimension 0 in rank order, with gradient. Call it on every rank.

    The reduced gradient is that of the rule applied to the ranks' losses, in all parameters alike.
    `docs/contrastive.md` says which loss is right under which rule. `reduction` and `weight` matter only with
    `average_gradients`, where the rule multiplies the gradients of some ranks by more than those of others:
    `"weighted_mean"` with unequal weights, one vote per node on uneven nodes, or a rule of your own. There pass what
    `average_gradients` gets. In a `training_step` under `GradAvgStrategy` leave both out, or pass them: it knows.

    - Ranks may bring different numbers of rows, or none.
    - If any rank's tensor requires grad, the result requires grad on all ranks, and every rank must run its backward
      through it, in the same order if there are several: the backward is a collective operation, too. Gather what
      belongs together in one call; then it is enough that one of the results is used.
    - Gradients of fewer than 32 bits are summed in float32. The order of the sum is that of the ranks.
    - Under `torch.no_grad`, on all ranks, the result has no gradient, and there is no backward.
    - Without an initialized process group, and in a group of one rank, the result is a copy.

    Args:
        tensors: A dense tensor of shape `(rows, ...)`, or tuples, lists and dicts of such, nested in any way. All ranks
            bring the same structure, dtypes and shapes beyond the rows. Any dtype; integers have no gradient.
        reduction: The rule that reduces the gradients afterwards.
        weight: This rank's weight under a rule that uses weights: a number >= 0 of any type, or a tensor with one
            element, which is copied to the host.
        group: The process group; the default group if None.

    Returns:
        New tensors in the same structure, each of shape `(sum of all ranks' rows, ...)`, dtype and device kept.

    Raises:
        ValueError: On all ranks alike, if an argument is not usable on some rank, if the ranks' arguments do not fit
            together, if only some ranks run under `torch.no_grad`, or if a rank has rows whose gradient
            `average_gradients` will discard. On this process alone, if it is not a member of `group`.
    """
    require_allowed()
    if torch.is_inference_mode_enabled():
        # Gloo of torch 2.4 cannot write into tensors that were made in inference mode, as Lightning validates.
        with torch.inference_mode(False), torch.no_grad():
            return gather(tensors, reduction=reduction, weight=weight, group=group)
    world = World.of(group)
    mine, agreed = world.agree(
        "gather cannot proceed", lambda: _Rows.of(tensors, reduction, weight, world.device_types), _difference
    )
    disabled = [rank for rank, (enabled, *_) in enumerate(agreed.details) if not enabled]
    # Per rank, of each tensor twice its rows plus 1 if it requires grad.
    entries = [of_rank for _, *of_rank in agreed.details]
    rows = [[entry >> 1 for entry in of_rank] for of_rank in entries]
    wanted = [any(entry & 1 for entry in of_leaf) for of_leaf in zip(*entries, strict=True)]
    if any(wanted) and disabled:
        raise ValueError(
            f"gather runs under torch.no_grad {on_ranks(disabled)}, but other ranks need a gradient, for which those"
            " would wait for ever. Use torch.no_grad on all ranks or on none."
        )
    factors = agreed_factors(mine.rule, agreed)
    if any(wanted):
        on_gather = _ON_GATHER.get()
        if on_gather is None:
            _require_kept(mine.rule, factors, [any(of_rank) for of_rank in rows])
        else:
            factors = [1.0] * world.size
            on_gather()
    if world.size == 1:
        gathered = tuple(leaf.clone() for leaf in mine.leaves)
    else:
        gathered = _apply(_Gather, mine.leaves, _Exchange(world, rows, factors), wanted, False)
    result: T = rebuilt(tensors, iter(gathered))
    return result


def require_allowed() -> None:
    """Raise a RuntimeError within `collectives_refused`."""
    refused = _REFUSED.get()
    if refused is not None:
        raise RuntimeError(f"{refused}.")


def collectives_refused(reason: str) -> AbstractContextManager[None]:
    """Have `gather` raise a RuntimeError within the context, on every rank that calls it."""
    return _within(_REFUSED, reason)


def losses_weighed(on_gather: Callable[[], None] | None) -> AbstractContextManager[None]:
    """Say that losses are multiplied by their weights before the backward, of what `gather` is called for within.

    Args:
        on_gather: Called when gradients will cross ranks. None where losses are not multiplied, which changes nothing.
    """
    return _within(_ON_GATHER, on_gather)


def weigh_losses_from_here(on_gather: Callable[[], None] | None) -> None:
    """Say so from here on, or with None no longer, where forwards and losses may take turns, or have other contexts."""
    _ON_GATHER.set(on_gather)


@contextmanager
def _within(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@dataclass(frozen=True)
class _Rows(Contribution):
    """One rank's arguments, checked.

    Attributes:
        rule: The reduction rule.
        leaves: The tensors in the order of the structure.
    """

    rule: Rule
    leaves: list[Tensor]

    @classmethod
    def of(cls, tensors: Any, reduction: Any, weight: Any, device_types: Sequence[str] | None) -> _Rows:
        rule = resolve_rule(reduction)
        labeled = list(leaves(tensors, "tensors"))
        if not labeled:
            raise ValueError(f"there is no tensor in {tensors!r}: pass at least one")
        for label, leaf in labeled:
            _check(label, leaf, device_types)
        if len({leaf.device for _, leaf in labeled}) > 1:
            devices = ", ".join(f"{label} on {leaf.device}" for label, leaf in labeled)
            raise ValueError(f"the tensors of one call must be on one device, got {devices}")
        if rule.uses_weight and weight is None:
            raise ValueError(
                f"reduction={rule.name!r}, {rule.formula}, needs a weight: pass the same weight= as for the loss"
            )
        number = checked_weight(weight) if rule.uses_weight else None
        # The rank's own structure counts, and so does every shape but the number of rows.
        shapes = [f"(rows, {', '.join(map(str, leaf.shape[1:]))})" for _, leaf in labeled]
        forms = "; ".join(
            f"{label} of shape {shape} and {leaf.dtype}" for shape, (label, leaf) in zip(shapes, labeled, strict=True)
        )
        grad, own = torch.is_grad_enabled(), [leaf for _, leaf in labeled]
        entries = [2 * leaf.shape[0] + (leaf.requires_grad and grad) for leaf in own]
        return cls(f"{forms}, reduction={rule.name!r}", [grad, *entries], number, rule, own)


def _difference(descriptions: Sequence[str]) -> str:
    return (
        f"the ranks call gather differently: {by_rank(descriptions)}."
        " Pass the same structure, dtypes, shapes beyond dimension 0 and reduction= on all ranks."
    )


def _require_kept(rule: Rule, factors: Sequence[float], present: Sequence[bool]) -> None:
    """Raise where other ranks' losses need the gradient of rows whose rank will have its gradient discarded."""
    lost = [rank for rank, factor in enumerate(factors) if factor == 0 and present[rank]]
    if lost and any(factors):
        raise ValueError(
            f"reduction={rule.name!r} discards the gradient of a rank of weight 0, but there are rows {on_ranks(lost)}"
            " that count in the other ranks' losses. Gather no rows there (tensor[:0]); or use reduction='sum' with"
            " losses that are divided by the count of all ranks."
        )


def _check(label: str, leaf: Any, device_types: Sequence[str] | None) -> None:
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"{label} must be a tensor, or a tuple, list or dict of tensors; got {leaf!r} of type {type(leaf).__name__}"
        )
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
        raise ValueError(f"{label} must be a dense tensor, got layout {leaf.layout} and {leaf.dtype}")
    if leaf.ndim == 0:
        raise ValueError(f"{label} has no dimension to concatenate along: pass tensor.reshape(1), one row")
    if device_types is not None and leaf.device.type not in device_types:
        raise ValueError(
            f"{label} is on {leaf.device}, but the process group serves {', '.join(device_types)}: move it"
        )


@dataclass(frozen=True)
class _Exchange:
    """Moves rows between ranks and back, as bytes: every dtype travels, on every backend.

    Attributes:
        world: The ranks.
        rows: `rows[q][i]`, the rows that rank q has of tensor i.
        factors: Per rank, what its gradient will be multiplied by in the reduction, as far as it differs.
    """

    world: World
    rows: Sequence[Sequence[int]]
    factors: Sequence[float]

    def of(self, wanted: Sequence[bool]) -> _Exchange:
        """Return the exchange of some of the tensors."""
        return replace(self, rows=[list(compress(of_rank, wanted)) for of_rank in self.rows])

    def gather(self, tensors: Sequence[Tensor], *, weigh: bool = False) -> list[Tensor]:
        """Return the ranks' tensors along dimension 0; with `weigh`, the adjoint of `sum_back`.

        Args:
            tensors: This rank's rows of every tensor.
            weigh: Whether to multiply the rows of rank r by this rank's factor over that of rank r.
        """
        mine = _pack(tensors)
        sizes = [_bytes(tensors, of_rank) for of_rank in self.rows]
        slots = mine.new_empty(self.world.size, max(sizes))
        padded = torch.cat([mine, mine.new_zeros(max(sizes) - len(mine))])
        if max(sizes) > 0:
            dist.all_gather(list(slots.unbind()), padded, group=self.world.group)
        blocks = [_unpack(slot[:size], tensors, n) for slot, size, n in zip(slots, sizes, self.rows, strict=True)]
        if weigh:
            blocks = [
                [_times(block, self._ratio(self.world.rank, rank)) for block in of_rank]
                for rank, of_rank in enumerate(blocks)
            ]
        return [torch.cat(of_leaf) for of_leaf in zip(*blocks, strict=True)]

    def sum_back(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the sum over ranks of their gradients of this rank's rows, each times its factor over this rank's.

        Args:
            gradients: This rank's gradients of all ranks' rows.
        """
        cut = [gradient.split([of_rank[i] for of_rank in self.rows]) for i, gradient in enumerate(gradients)]
        send = torch.cat([_pack(blocks) for blocks in zip(*cut, strict=True)])
        mine = self.rows[self.world.rank]
        size, sizes = _bytes(gradients, mine), [_bytes(gradients, of_rank) for of_rank in self.rows]
        received = send.new_empty(self.world.size * size)
        # Not reduce_scatter: on gloo that moves twice the bytes, and sums half precision in half precision.
        dist.all_to_all_single(received, send, [size] * self.world.size, sizes, group=self.world.group)
        totals = [
            gradient.new_zeros((n, *gradient.shape[1:]), dtype=_wide(gradient))
            for gradient, n in zip(gradients, mine, strict=True)
        ]
        for rank, block in enumerate(received.view(self.world.size, size)):
            ratio = self._ratio(rank, self.world.rank)
            if ratio == 0:  # nothing behind its loss, which may be NaN
                continue
            for total, part in zip(totals, _unpack(block, gradients, mine), strict=True):
                total.add_(part.to(total.dtype), alpha=ratio)
        return [total.to(gradient.dtype) for total, gradient in zip(totals, gradients, strict=True)]

    def _ratio(self, rank: int, other: int) -> float:
        # A rank without factor has no rows: what it receives is empty.
        return self.factors[rank] / self.factors[other] if self.factors[other] else 1.0


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: _Exchange, wanted: Sequence[bool], weigh: bool, _anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.wanted = exchange, wanted
        gathered = exchange.gather(tensors, weigh=weigh)
        ctx.mark_non_differentiable(*compress(gathered, map(not_, wanted)))
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # What needs no gradient on any rank stays out of it.
        wanted = ctx.wanted
        home = iter(_apply(_SumBack, list(compress(gradients, wanted)), ctx.exchange.of(wanted)))
        return None, None, None, None, *(next(home) if is_wanted else None for is_wanted in wanted)


class _SumBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, _anchor: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(exchange.sum_back(gradients))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_apply(_Gather, gradients, ctx.exchange, [True] * len(gradients), True)


def _apply(function: type[torch.autograd.Function], tensors: Sequence[Tensor], *settings: Any) -> tuple[Tensor, ...]:
    """Apply a function with an anchor before its tensors.

    Without a leaf of its own that requires grad, a rank whose tensors need no gradient would not join the backward of
    the others.
    """
    anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
    outputs: tuple[Tensor, ...] = function.apply(*settings, anchor, *tensors)
    return outputs


def _wide(tensor: Tensor) -> torch.dtype:
    return SUM_DTYPES.get(tensor.dtype, tensor.dtype)


def _bytes(like: Sequence[Tensor], rows: Sequence[int]) -> int:
    return sum(n * math.prod(leaf.shape[1:]) * leaf.element_size() for leaf, n in zip(like, rows, strict=True))


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of the tensors, one after the other."""
    whole = [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    # One expanded element is contiguous with a stride of 0, which cannot be viewed as bytes.
    return torch.cat([tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in whole])


def _unpack(data: Tensor, like: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
    """Return the tensors that `_pack` made bytes of, with the dtypes and shapes of `like` apart from the rows."""
    tensors, start = [], 0
    for leaf, n in zip(like, rows, strict=True):
        stop = start + _bytes([leaf], [n])
        # A copy, because a slice may start where no number of this dtype may.
        tensors.append(data[start:stop].clone().view(leaf.dtype).reshape(n, *leaf.shape[1:]))
        start = stop
    return tensors


def _times(tensor: Tensor, ratio: float) -> Tensor:
    return tensor.to(_wide(tensor)).mul(ratio).to(tensor.dtype) if ratio else torch.zeros_like(tensor)
