"""`gather`: all ranks' rows for a loss that does not split over samples, with the gradient of every rank's loss.

Rank q computes a loss `l_q` of all ranks' rows `x = [x_0, ..., x_(W-1)]`. The rows of rank r get the plain sum over q
of `dl_q/dx_r`. Where the losses are multiplied by their weights before the backward, as `GradAvgStrategy` and
`GradAvgReducer` do, the reduced gradient is then the gradient of the rule applied to the losses. There is no factor
that `gather` could know better: a rule that weighs gradients after the backward would need `w_q / w_r` here, so
docs/contrastive.md says which losses fit `average_gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_gradavg._support.collectives import Contribution, World
from lightning_gradavg._support.running import running, running_forward
from lightning_gradavg._support.tree import leaves, mapped
from lightning_gradavg.reduction.uncounted import note_exchange

__all__ = ["exchanging_world", "gather", "gather_refused", "require_gather_allowed"]

T = TypeVar("T")


@contextmanager
def gather_refused(reason: str) -> Iterator[None]:
    """Make `gather`, and whatever calls `require_gather_allowed`, an error within the context.

    Used where ranks run a step different numbers of times, so that a collective operation would wait forever.
    """
    with running(replace(running_forward(), refusal=reason)):
        yield


def require_gather_allowed() -> None:
    """Raise a RuntimeError within a forward in which nothing can be exchanged."""
    refusal = running_forward().refusal
    if refusal:
        raise RuntimeError(f"{refusal}.")


def exchanging_world(group: dist.ProcessGroup | None) -> World:
    """Return the world in which ranks exchange where the user names a group, or None for all ranks.

    Within a training step, all ranks have a process group beside that of DDP's buckets (`Forward.world`).
    """
    world = running_forward().world
    if world is not None and group in (None, dist.group.WORLD):
        return world
    return World.of(group)


def gather(tensors: T, *, group: dist.ProcessGroup | None = None) -> T:
    """Return the ranks' tensors concatenated along dimension 0 in rank order, with gradients. Call it on every rank.

    In the backward, the rows of a rank get the sum of the gradients that all ranks' losses have there. Under
    `GradAvgStrategy`, Fabric and `GradAvgReducer` the reduced gradient is that of the rule applied to the ranks'
    losses, for all parameters. `average_gradients` weighs after the backward, so use it with `"mean"` or `"sum"`:
    `docs/contrastive.md` says which loss is right under which rule.

    - Ranks may have different numbers of rows, or none.
    - If any rank's tensor requires grad, the result requires grad on all ranks, and every rank must run its backward
      through it, in the same order if there are several: the backward is a collective operation, too. Gather what
      belongs together in one call; then it suffices to use one of the results. There is no second derivative.
    - Gradients of fewer than 32 bits are summed in float32, in rank order.
    - Under `torch.no_grad`, on all ranks, the result has no gradient.
    - Without an initialized process group, and in a group of one rank, the result is a copy.

    Args:
        tensors: A dense tensor of shape `(rows, ...)` in any memory format, or nested tuples, lists and dicts of such
            tensors. Structure, dtypes and all but the first dimension must be equal on all ranks. Integers have no
            gradient.
        group: The process group; the default group if None.

    Returns:
        New contiguous tensors in the same structure, each of shape `(sum of all ranks' rows, ...)`, dtype and device
        kept.

    Raises:
        ValueError: On all ranks, if an argument is invalid on some rank, if the ranks' arguments don't fit together, or
            if only some ranks run under `torch.no_grad`. On this process alone, if it is no member of `group`.
        RuntimeError: In a training step that ranks run different numbers of times.
    """
    require_gather_allowed()
    if torch.is_inference_mode_enabled():
        # Gloo of torch 2.4 cannot write into tensors that were made in inference mode, as Lightning validates.
        with torch.inference_mode(False), torch.no_grad():
            return gather(tensors, group=group)
    world = exchanging_world(group)
    contribution, agreed = world.agree("gather cannot proceed", lambda: _contribution(tensors))
    local_tensors = list(contribution.tensors.values())
    # What `_contribution` has sent, of all ranks: first the rows of each tensor, then whether each requires grad.
    details_of_tensor = list(zip(*agreed.details, strict=True))
    rows = details_of_tensor[: len(local_tensors)]
    requires_grad = [any(of_ranks) for of_ranks in details_of_tensor[len(local_tensors) :]]
    # A rank without samples computes some that do not count.
    stands_in = running_forward().stands_in
    exchange = _Exchange(world, rows, requires_grad, stands_in)
    # Without a leaf of its own that requires grad, a rank whose tensors need none would not join the backward.
    anchor = torch.zeros((), requires_grad=any(requires_grad))
    apply = cast("Callable[..., tuple[Tensor, ...]]", _Gather.apply)
    begin_of_backward, *gathered = apply(exchange, anchor, *local_tensors)
    # If this rank returns no loss, the backward of 0 must reach the exchange, for which other ranks wait.
    note_exchange("gather", begin_of_backward)
    remaining = iter(gathered)
    result: T = mapped(tensors, lambda _: next(remaining))
    return result


def _contribution(tensors: object) -> Contribution:
    """Return this rank's tensors, checked. The details are the rows of each, and then whether each requires grad."""
    labeled: dict[str, Tensor] = dict(leaves(tensors, "tensors"))
    if not labeled:
        raise ValueError(f"there is no tensor in {tensors!r}: pass at least one")
    with_gradients = torch.is_grad_enabled()
    # What must be equal on all ranks: structure, types, and every shape but the number of rows.
    equal: list[str] = []
    if with_gradients:
        equal.append("with gradients")
    else:
        equal.append("under torch.no_grad")
    for label, tensor in labeled.items():
        _require_rows(label, tensor)
        shape = ", ".join(map(str, ("rows", *tensor.shape[1:])))
        equal.append(f"{label} of shape ({shape}) and {tensor.dtype}")
    if running_forward().stands_in:
        # The samples of this rank do not count, so none of its rows belongs into another rank's loss.
        labeled = {label: tensor[:0] for label, tensor in labeled.items()}
    rows: list[int] = []
    requires_grad: list[int] = []
    for tensor in labeled.values():
        rows.append(len(tensor))
        requires_grad.append(tensor.requires_grad and with_gradients)
    return Contribution(equal, [*rows, *requires_grad], tensors=labeled)


def _require_rows(label: str, value: object) -> None:
    """Raise a TypeError or ValueError unless a value is a dense tensor with a dimension of rows."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{label} must be a tensor, or a tuple, list or dict of tensors; got {value!r} of type"
            f" {type(value).__name__}"
        )
    if hasattr(value, "device_mesh"):  # torch 2.4 has the class `DTensor` elsewhere
        raise ValueError(f"{label} is a DTensor: pass its full_tensor(), or what it holds on this rank, its to_local()")
    if value.layout is not torch.strided or value.is_nested:
        found = f"layout {value.layout}"
        if value.is_nested:
            found = "a nested tensor"
        raise ValueError(f"{label} must be a dense tensor, got {found}")
    if value.ndim == 0:
        raise ValueError(f"{label} has no dimension to concatenate along: pass tensor.reshape(1), one row")


class _Exchange(NamedTuple):
    """What all ranks know about one call of `gather`, and whether this rank's loss counts."""

    world: World
    rows: Sequence[Sequence[int]]  # of each tensor, the rows of every rank
    requires_grad: Sequence[bool]  # of each tensor, whether it does on any rank
    stands_in: bool  # whether this rank has no samples, and so a loss that does not count


class _Gather(torch.autograd.Function):
    """All ranks' rows of several tensors; in the backward every rank gets the gradients of its rows.

    The first output is a number, through which a loss can reach the backward without keeping rows in memory. One
    function for all tensors, so that all ranks run their backwards in one order.
    """

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        size = exchange.world.size
        gathered: list[Tensor] = []
        for tensor, rows in zip(tensors, exchange.rows, strict=True):
            local_rows = _contiguous(tensor)
            sent = torch.cat([local_rows] * size)
            gathered.append(_exchanged(sent, [len(tensor)] * size, rows, exchange.world))
        # The anchor requires grad, so autograd would have every output require it.
        without_gradient: list[Tensor] = []
        for tensor, requires_grad in zip(gathered, exchange.requires_grad, strict=True):
            if not requires_grad:
                without_gradient.append(tensor)
        ctx.mark_non_differentiable(*without_gradient)
        # The backward needs no value. But `torch.utils.checkpoint` computes a forward again only where its backward
        # reads something, and this exchange with it. On a rank without a loss, the backward reads nothing else: so
        # without the anchor, the other ranks would wait for its exchange.
        ctx.save_for_backward(anchor)
        return torch.zeros_like(anchor), *gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018  # a checkpoint computes the forward again here, before this exchange
        exchange: _Exchange = ctx.exchange
        world = exchange.world
        of_local_rows: list[Tensor | None] = []
        for gradient, rows, requires_grad in zip(gradients, exchange.rows, exchange.requires_grad, strict=True):
            if not requires_grad:
                of_local_rows.append(None)
                continue
            sent = gradient
            # The weighed loss of a stand-in sends zeros anyway. A loss that a step differentiates by
            # `torch.autograd.grad` is not weighed, and must not reach other ranks, either.
            if exchange.stands_in:
                sent = torch.zeros_like(gradient)
            parts = _exchanged(_contiguous(sent), rows, [rows[world.rank]] * world.size, world)
            of_local_rows.append(_summed(parts, world.size))
        return None, None, *of_local_rows  # none for the exchange and the anchor


def _contiguous(tensor: Tensor) -> Tensor:
    """Return a tensor that is stored row by row and as it reads: no channels_last, no expanded or conjugate view."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _exchanged(sent: Tensor, rows_to: Sequence[int], rows_from: Sequence[int], world: World) -> Tensor:
    """Send each rank its rows of a contiguous tensor, and return those from each. A collective operation.

    Both are in rank order. They travel as bytes: so every dtype does, on every backend. It is no all-gather, which
    needs as many rows on every rank, nor a reduce-scatter, which on gloo moves twice the bytes, and sums half precision
    in half precision.
    """
    if world.group is None:
        return sent
    received = sent.new_empty(sum(rows_from), *sent.shape[1:])
    row_bytes = math.prod(sent.shape[1:]) * sent.itemsize
    with torch.profiler.record_function("GradAvg: exchange gathered rows"):
        dist.all_to_all_single(
            received.view(-1).view(torch.uint8),
            sent.view(-1).view(torch.uint8),
            [rows * row_bytes for rows in rows_from],
            [rows * row_bytes for rows in rows_to],
            group=world.group,
        )
    return received


def _summed(parts: Tensor, size: int) -> Tensor:
    """Return the sum of equal parts, one from each rank, in no fewer than 32 bits and in rank order."""
    wide = parts.to(torch.promote_types(parts.dtype, torch.float32))
    # One after another: the order of a sum over a dimension is the kernel's, and may depend on the shape.
    first, *others = wide.tensor_split(size)
    return sum(others, first).to(parts.dtype)
