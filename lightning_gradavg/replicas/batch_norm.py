"""Batch norm over the values of all ranks, so that it normalizes a global batch as one process does.

With `x` the values of one channel, `N` of them on all ranks together, sums over all of them, and `dy` the gradient of
the rank's own loss, after Ioffe and Szegedy, "Batch Normalization" (arXiv:1502.03167), section 3,

    m = sum(x) / N ,    v = sum((x - m)^2) / N ,    xhat = (x - m) / sqrt(v + eps) ,    y = gamma * xhat + beta
    dx = gamma / sqrt(v + eps) * (dy - sum(dy) / N - xhat * sum(dy * xhat) / N)

is right where the reduced gradient is the sum over ranks of `d l_r / d theta` times a number that is the same for all.
The gradients of gamma and beta stay those of the rank's own rows, which are summed like all others.

Each forward is two collectives, each backward that reaches the input one: all ranks run the same layers in the same
order, also ranks without rows, and where `torch.utils.checkpoint` runs a forward again.
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
        wide = _wide(values.dtype)
        n = counted * values.shape[0] * math.prod(values.shape[2:])
        number = torch.full((1,), n, dtype=torch.float64, device=values.device)
        reduced = _sum_over_ranks(torch.cat([values.sum(dims, dtype=wide).double(), number]), world, counted)
        total = reduced[-1]
        if n <= 1 and total.item() == 1:  # only ranks with so few rows wait for an accelerator
            raise ValueError(
                "Expected more than 1 value per channel when training, but the samples of all ranks together have 1, on"
                f" this rank in an input of shape {tuple(values.shape)}. Use larger batches, or drop_last=True."
            )
        mean = reduced[:-1] / total.clamp(min=1)
        centered = values.to(wide) - mean.to(wide).view(shape)
        squares = _sum_over_ranks(centered.square().sum(dims).double(), world, counted)
        inverse = (squares / total.clamp(min=1) + norm.eps).rsqrt()
        # Before the tensors are saved, where checkpoint may end a recomputation: so does torch's own batch norm.
        _move_running_statistics(norm, mean, squares, total)
        output = centered.mul_(_scale(inverse, weight).to(wide).view(shape))
        if bias is not None:
            output += bias.to(wide).view(shape)
            ctx.bias_dtype = bias.dtype
        ctx.world, ctx.counted = world, counted
        ctx.save_for_backward(values, weight, mean, inverse, total)
        result: Tensor = output.to(values.dtype)
        return result

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
            sums = _sum_over_ranks(torch.cat([of_bias, of_weight]).double(), ctx.world, ctx.counted)
            if ctx.counted:  # else the statistics do not depend on these values
                to_mean, to_deviation = ((part / total.clamp(min=1)).to(wide).view(shape) for part in sums.chunk(2))
                dy = normalized.mul_(-to_deviation).add_(dy).sub_(to_mean)
            of_values = (dy * _scale(inverse, weight).to(wide).view(shape)).to(values.dtype)
        return (
            of_values,
            of_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            of_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
            *(None, None, None),
        )


def _move_running_statistics(norm: BatchNorm, mean: Tensor, squares: Tensor, total: Tensor) -> None:
    if not (norm.training and norm.track_running_stats):
        return
    factor: float | Tensor = 0.0 if norm.momentum is None else norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            factor = 1 / norm.num_batches_tracked.double()
    factor = factor * (total > 0).double()  # as in torch, an empty batch leaves them as they are
    for running, current in ((norm.running_mean, mean), (norm.running_var, squares / (total - 1).clamp(min=1))):
        if running is not None:
            running.copy_((1 - factor) * running.double() + factor * current)


def _scale(inverse: Tensor, weight: Tensor | None) -> Tensor:
    return inverse if weight is None else inverse * weight.double()


def _sum_over_ranks(vector: Tensor, world: World, counted: bool) -> Tensor:
    """Sum a vector of float64, which keeps counts exact, in place."""
    if not counted:
        vector.zero_()  # it may be NaN, which no factor removes
    if world.group is not None:
        dist.all_reduce(vector, group=world.group)
    return vector


def _layout(values: Tensor) -> tuple[list[int], list[int]]:
    """Return the shape of one number per channel beside the values, and the other dimensions."""
    return [1, -1, *(1 for _ in values.shape[2:])], [0, *range(2, values.ndim)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    # A sum of ones in half precision stops at 2048 in float16, and at 256 in bfloat16.
    return torch.promote_types(dtype, torch.float32)
