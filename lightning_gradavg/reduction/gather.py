"""`gather`: all ranks' rows for a loss that does not split over samples, with the gradient that the rule means.

Rank q computes a loss `l_q` of all ranks' features `x = [x_0, ..., x_(W-1)]`. The gradient of the rule applied to these
losses is that of the rule applied to gradients if the rows of rank r get `sum over q of (w_q / w_r) * dl_q/dx_r`. Where
losses are multiplied by `w_q` before the backward, as under the strategy, that is the plain sum over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_gradavg.own_collectives import ours
from lightning_gradavg.ranks import Contribution, World, on_ranks
from lightning_gradavg.reduction.average import Refusals, checked_weight, refuse
from lightning_gradavg.reduction.reference import rank_factors
from lightning_gradavg.rules import Rule, RuleFunction, resolve_rule
from lightning_gradavg.stand_in import STANDS_IN
from lightning_gradavg.tree import leaves, mapped

__all__ = ["WITHIN", "gather", "losses_weighed", "require_allowed"]

T = TypeVar("T")

WITHIN: ContextVar[str | None] = ContextVar("within", default=None)
"""None where losses are not weighed, "" where they are, and there else why `gather` is refused."""


@ours()
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
      belongs together in one call; then it suffices to use one of the results. There is no second derivative.
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
    mine, agreed = world.agree("gather cannot proceed", lambda: _brought(tensors, resolve_rule(reduction), weight))
    rule = resolve_rule(reduction)
    of_ranks, count = list(zip(*agreed.details, strict=True)), len(mine.tensors)
    rows, wanted = of_ranks[:count], list(map(any, of_ranks[count:]))
    factors = rank_factors(rule, agreed.nodes, agreed.weights) if WITHIN.get() is None else [1.0] * world.size
    lost = [rank for rank, factor in enumerate(factors) if factor == 0 and any(of_leaf[rank] for of_leaf in rows)]
    if any(wanted) and any(factors) and lost:
        raise ValueError(
            f"reduction={rule.name!r} discards the gradient of a rank of weight 0, but there are rows {on_ranks(lost)}"
            " that count in the other ranks' losses. Gather no rows there (tensor[:0]); or use reduction='sum' with"
            " losses that are divided by the count of all ranks."
        )
    # A rank without factor has no rows: what it would receive is empty.
    ratios = [factor / factors[world.rank] if factors[world.rank] else 1.0 for factor in factors]
    # Without a leaf of its own that requires grad, a rank whose tensors need none would not join the backward.
    anchor, apply = torch.zeros((), requires_grad=any(wanted)), cast("Any", _Gather.apply)
    gathered = iter(apply(world, rows, wanted, ratios, anchor, *mine.tensors.values()))
    result: T = mapped(tensors, lambda _: next(gathered))
    return result


def require_allowed() -> None:
    """Raise a RuntimeError within `losses_weighed(refused=...)`."""
    if WITHIN.get():
        raise RuntimeError(f"{WITHIN.get()}.")


@contextmanager
def losses_weighed(*, refused: str = "") -> Iterator[None]:
    """Say that losses are multiplied by their weights before the backward, or why `gather` must be an error within."""
    token = WITHIN.set(refused)
    try:
        yield
    finally:
        WITHIN.reset(token)


_REFUSED_LEAVES: Refusals = (
    (
        lambda leaf: not isinstance(leaf, Tensor),
        "must be a tensor, or a tuple, list or dict of tensors; got {0!r} of type {0.__class__.__name__}",
    ),
    (
        lambda leaf: leaf.layout is not torch.strided,
        "must be a dense tensor, got layout {0.layout}",
    ),
    (lambda leaf: leaf.ndim == 0, "has no dimension to concatenate along: pass tensor.reshape(1), one row"),
)


def _brought(tensors: Any, rule: Rule, weight: Any) -> Contribution:
    """Return one rank's arguments, checked; of all tensors the rows, and then whether they require grad."""
    labeled, grad = dict(leaves(tensors, "tensors")), torch.is_grad_enabled()
    if not labeled:
        raise ValueError(f"there is no tensor in {tensors!r}: pass at least one")
    # The rank's own structure counts, and so does every shape but the number of rows.
    equal = [f"reduction={rule.name!r}", "with gradients" if grad else "under torch.no_grad"]
    for label, leaf in labeled.items():
        refuse(label, leaf, _REFUSED_LEAVES)
        equal.append(f"{label} of shape ({', '.join(map(str, ('rows', *leaf.shape[1:])))}) and {leaf.dtype}")
    if STANDS_IN.get():
        labeled = {label: leaf[:0] for label, leaf in labeled.items()}
    tensors = labeled.values()
    details = [*map(len, tensors), *(leaf.requires_grad and grad for leaf in tensors)]
    return Contribution(equal, details, checked_weight(rule, weight), rule.node, labeled)


class _Gather(torch.autograd.Function):
    """All ranks' rows of several tensors; its gradients go home, times the factor of each rank over this one's.

    One function for all of them, so that all ranks run their backwards in one order.
    """

    @staticmethod
    def forward(ctx: Any, world: World, rows: Any, wanted: Any, ratios: Any, _anchor: Any, *tensors: Tensor) -> Any:
        ctx.given = world, rows, wanted, ratios
        gathered = [
            _exchanged([tensor] * world.size, [len(tensor)] * world.size, of_leaf, world)
            for tensor, of_leaf in zip(tensors, rows, strict=True)
        ]
        ctx.mark_non_differentiable(*(each for each, is_wanted in zip(gathered, wanted, strict=True) if not is_wanted))
        return tuple(gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        world, rows, wanted, ratios = ctx.given
        home = [
            _summed(_exchanged([gradient], of_leaf, [of_leaf[world.rank]] * world.size, world), ratios)
            if is_wanted
            else None
            for gradient, of_leaf, is_wanted in zip(gradients, rows, wanted, strict=True)
        ]
        return *[None] * 5, *home


def _exchanged(tensors: list[Tensor], to: Sequence[int], of: Sequence[int], world: World) -> Tensor:
    """Send so many rows of some tensors, one after another, to each rank in order, and return `of[rank]` from each.

    They travel as bytes: so every dtype does, on every backend. It is no all-gather, which needs as many rows on every
    rank, nor a reduce-scatter, which on gloo moves twice the bytes, and sums half precision in half precision.
    """
    sent = torch.cat(tensors)  # row by row in its own memory, stored as it reads
    if world.group is None:
        return sent
    received, row = sent.new_empty(sum(of), *sent.shape[1:]), math.prod(sent.shape[1:]) * sent.itemsize
    dist.all_to_all_single(
        received.view(-1).view(torch.uint8),
        sent.view(-1).view(torch.uint8),
        [rows * row for rows in of],
        [rows * row for rows in to],
        group=world.group,
    )
    return received


def _summed(parts: Tensor, ratios: Sequence[float]) -> Tensor:
    """Return the sum of a part from each rank, times its ratio, in no fewer than 32 bits and in rank order."""
    wide = parts.to(torch.promote_types(parts.dtype, torch.float32)).tensor_split(len(ratios))
    # Where the ratio is 0 there is nothing behind the loss, which may be NaN. This rank's own is 1.
    first, *others = (part * ratio for part, ratio in zip(wide, ratios, strict=True) if ratio > 0)
    return sum(others, first).to(parts.dtype)
