"""Batch norm over the values of all ranks, so that it normalizes a global batch as one process does.

With `x` the values of one channel, `N` of them on all ranks together, sums over all of them, and `dy` the gradient of
the rank's own loss, after Ioffe and Szegedy, "Batch Normalization" (arXiv:1502.03167), section 3,

    m = sum(x) / N ,    v = sum((x - m)^2) / N ,    xhat = (x - m) / sqrt(v + eps) ,    y = gamma * xhat + beta
    dx = gamma / sqrt(v + eps) * (dy - sum(dy) / N - xhat * sum(dy * xhat) / N)

is right where the reduced gradient is the sum over ranks of `d l_r / d theta` times a number that is the same for all.
The gradients of gamma and beta stay those of the rank's own rows, which are summed like all others.

Each forward is a collective, in which m and v follow from the ranks' own, and so is each backward that reaches the
input: all ranks run the same layers in the same order, also ranks without rows, and where `torch.utils.checkpoint` runs
a forward again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_gradavg.lightning_internals import BatchNorm, in_backward, require_dimensions
from lightning_gradavg.ranks import World

__all__ = ["not_counted", "restore_batch_norm", "synchronize_batch_norm", "unsynchronizable_batch_norms"]

_FORWARDS = (BatchNorm.forward, nn.SyncBatchNorm.forward)

_counted: ContextVar[bool] = ContextVar("counted", default=True)


def synchronize_batch_norm(module: nn.Module, group: dist.ProcessGroup | None = None) -> list[str]:
    """Let every batch norm of a module normalize over the values of all ranks. Call it on every rank.

    It applies where a batch norm uses the statistics of the batch; in evaluation a rank normalizes its own batch. Only
    the layers' attribute `forward` is set. Copies of `copy.deepcopy` are synchronized, too; pickled ones are not.
    Ranks may have different numbers of rows, or none. Half precision is computed in float32. There is no second
    derivative.

    Args:
        module: The model, the same on all ranks.
        group: The process group; the default group if None.

    Returns:
        The names of the synchronized layers. Those that `unsynchronizable_batch_norms` names are left alone.

    Raises:
        ValueError: From a forward, on all ranks, if all ranks together have one value per channel.
    """
    world = World.of(group)
    names = []
    for name, norm in _batch_norms(module):
        if _forward_of(norm) in _FORWARDS:
            vars(norm)["forward"] = _Synchronized(norm, module, world)
            names.append(name)
    return names


def restore_batch_norm(module: nn.Module) -> None:
    """Undo `synchronize_batch_norm`."""
    for norm in module.modules():
        if isinstance(vars(norm).get("forward"), _Synchronized):
            del vars(norm)["forward"]


def unsynchronizable_batch_norms(module: nn.Module) -> list[str]:
    """Return the names of the batch norms that have a forward of their own, which cannot be synchronized."""
    return [name for name, norm in _batch_norms(module) if _forward_of(norm) not in _FORWARDS]


def _batch_norms(module: nn.Module) -> list[tuple[str, BatchNorm]]:
    return [(name, norm) for name, norm in module.named_modules() if isinstance(norm, BatchNorm)]


@contextmanager
def not_counted() -> Iterator[None]:
    """Inside, let this rank's rows count for nothing in synchronized batch norms, on this thread.

    They are normalized with the statistics of the other ranks' rows. Enter it around the forward. What
    `torch.utils.checkpoint` runs again in the backward counts as the forward before it did.
    """
    token = _counted.set(False)
    try:
        yield
    finally:
        _counted.reset(token)


def _forward_of(norm: nn.Module) -> Callable[..., Any]:
    own = vars(norm).get("forward")
    forward: Callable[..., Any] = type(norm).forward if own is None or isinstance(own, _Synchronized) else own
    return getattr(forward, "__func__", forward)


class _Synchronized:
    """The forward of a synchronized batch norm. While `model` is not in training mode, it is the layer's own."""

    def __init__(self, norm: BatchNorm, model: nn.Module, world: World) -> None:
        self.norm, self.model, self.world = norm, model, world
        self.counted = True

    def __deepcopy__(self, memo: dict[int, Any]) -> _Synchronized:
        # A process group cannot be copied, and the copy of a layer must not copy the model that it is part of.
        return _Synchronized(copy.deepcopy(self.norm, memo), memo.get(id(self.model), self.model), self.world)

    def __reduce__(self) -> tuple[Any, ...]:
        # As a bound method, so that whoever loads the layer needs neither a process group nor this package.
        return getattr, (self.norm, "forward")

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name, by which callers may pass it
        norm = self.norm
        # A forward within a backward is a recomputation, perhaps on a thread of autograd without the context.
        if not in_backward():
            self.counted = _counted.get()
        of_batch = norm.training or (norm.running_mean is None and norm.running_var is None and self.model.training)
        if not of_batch or (self.world.group is None and self.counted):
            return BatchNorm.forward(norm, input)
        require_dimensions(norm, input)
        if input.shape[1] != norm.num_features and (norm.affine or norm.track_running_stats):
            raise ValueError(
                f"a batch norm of {norm.num_features} channels got an input of shape {tuple(input.shape)}:"
                f" pass num_features={input.shape[1]} to the layer"
            )
        normalize: Any = _Normalize.apply
        output: Tensor = normalize(input, norm.weight, norm.bias, norm, self.world, self.counted)
        return output


class _Normalize(torch.autograd.Function):
    # All ranks save the same number of tensors, whatever they count: checkpoint ends a recomputation by that number.
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: BatchNorm,
        world: World,
        counted: bool,
    ) -> Tensor:
        shape, dims = _layout(values)
        wide = values.to(_wide(values.dtype))
        n = counted * values.shape[0] * math.prod(values.shape[2:])
        mean, variance = wide.new_zeros(2, wide.shape[1])
        if n:  # else they may be NaN, which no factor removes
            mean = wide.mean(dims)
            variance = (wide - mean.view(shape)).square_().mean(dims)  # on CPUs, twice as fast as `var_mean`
        number = torch.full((1,), n, dtype=torch.float64, device=values.device)  # exact, unlike in float32
        of_ranks = _rows_of_ranks(torch.cat([variance.double(), mean.double(), number]), world)
        total = of_ranks[:, -1].sum()
        if n <= 1 and total.item() == 1:  # only ranks with so few rows wait for an accelerator
            raise ValueError(
                "Expected more than 1 value per channel when training, but the samples of all ranks together have 1, on"
                f" this rank in an input of shape {tuple(values.shape)}. Use larger batches, or drop_last=True."
            )
        shares, (variances, means) = of_ranks[:, -1:] / total.clamp(min=1), of_ranks[:, :-1].chunk(2, dim=1)
        mean = (shares * means).sum(0)
        variance = (shares * (variances + (means - mean).square())).sum(0)
        # Before the tensors are saved, where checkpoint may end a recomputation: so does torch's own batch norm.
        _move_running_statistics(norm, mean, variance, total)
        scale, offset = (one if one is None else one.to(wide.dtype) for one in (weight, bias))
        output = nn.functional.batch_norm(
            wide, mean.to(wide.dtype), variance.to(wide.dtype), scale, offset, eps=norm.eps
        )
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.world, ctx.counted = world, counted
        ctx.save_for_backward(values, weight, mean, (variance + norm.eps).rsqrt(), total)
        return output.to(values.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, mean, inverse, total = ctx.saved_tensors
        shape, dims = _layout(values)
        wide = _wide(values.dtype)
        dy = gradients[0].to(wide)
        normalized = (values.to(wide) - mean.to(wide).view(shape)).mul_(inverse.to(wide).view(shape))
        of_bias, of_weight = dy.sum(dims), (dy * normalized).sum(dims)
        of_values = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([of_bias, of_weight]).double()
            sums = sums if ctx.counted else torch.zeros_like(sums)  # they may be NaN
            if ctx.world.group is not None:
                dist.all_reduce(sums, group=ctx.world.group)
            if ctx.counted:  # else the statistics do not depend on these values
                to_mean, to_deviation = ((part / total.clamp(min=1)).to(wide).view(shape) for part in sums.chunk(2))
                dy = normalized.mul_(-to_deviation).add_(dy).sub_(to_mean)
            scale = inverse if weight is None else inverse * weight.double()
            of_values = (dy * scale.to(wide).view(shape)).to(values.dtype)
        return (
            of_values,
            of_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            of_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
            *(None, None, None),
        )


def _move_running_statistics(norm: BatchNorm, mean: Tensor, variance: Tensor, total: Tensor) -> None:
    if not (norm.training and norm.track_running_stats):
        return
    factor: float | Tensor = 0.0 if norm.momentum is None else norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            factor = 1 / norm.num_batches_tracked.double()
    factor = factor * (total > 0).double()  # as in torch, an empty batch leaves them as they are
    unbiased = variance * total / (total - 1).clamp(min=1)
    for running, current in ((norm.running_mean, mean), (norm.running_var, unbiased)):
        if running is not None:
            running.copy_((1 - factor) * running.double() + factor * current)


def _rows_of_ranks(row: Tensor, world: World) -> Tensor:
    rows = row.new_empty(world.size, len(row))
    if world.group is None:
        return rows.copy_(row)
    dist.all_gather(list(rows.unbind()), row, group=world.group)
    return rows


def _layout(values: Tensor) -> tuple[list[int], list[int]]:
    """Return the shape of one number per channel beside the values, and the other dimensions."""
    return [1, -1, *(1 for _ in values.shape[2:])], [0, *range(2, values.ndim)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    # A sum of ones in half precision stops at 2048 in float16, and at 256 in bfloat16.
    return torch.promote_types(dtype, torch.float32)
