"""Batch norm over the values of all ranks, so that it normalizes a global batch as one process does.

With `x` the values of one channel, `N` of them on all ranks together, sums over all of them, and `dy` the gradient of
the rank's own loss, after Ioffe and Szegedy, "Batch Normalization" (arXiv:1502.03167), section 3,

    m = sum(x) / N ,    v = sum((x - m)^2) / N ,    xhat = (x - m) / sqrt(v + eps) ,    y = gamma * xhat + beta
    dx = gamma / sqrt(v + eps) * (dy - sum(dy) / N - xhat * sum(dy * xhat) / N)

is right where the reduced gradient is the sum over ranks of `d l_r / d theta` times a number that is the same for all.
The gradients of gamma and beta stay those of the rank's own rows, which are summed like all others.

Each forward is a collective, in which m and v follow from the ranks' own, and so is each backward that reaches the
input: all ranks run the same layers in the same order, also ranks without rows, and where `torch.utils.checkpoint` runs
a forward again. Torch's `SyncBatchNorm` runs on no CPU, and has no rows that do not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_gradavg._lightning.internals import BatchNorm
from lightning_gradavg._lightning.methods import replaced
from lightning_gradavg._lightning.user_collectives import ours
from lightning_gradavg._support.collectives import World
from lightning_gradavg.reduction.guard import without_discarded_nan

__all__ = ["count_rows", "synchronized_batch_norm"]


class _Rows:
    """Of the process, not of a thread: `torch.utils.checkpoint` may run a forward again on a thread of autograd."""

    counted = True


def count_rows(*, counted: bool) -> None:
    """Say whether this rank's rows count in synchronized batch norms from here on, also where a forward is repeated.

    Rows that do not count are normalized with the statistics of the other ranks' rows, and have no gradient.
    """
    _Rows.counted = counted


@contextmanager
def synchronized_batch_norm(world: World) -> Iterator[None]:
    """Within the context, have every batch norm of the process that takes a batch's statistics take those of all ranks.

    It stands in for `torch.nn.functional.batch_norm`, which layers with a forward of their own call, too. Ranks may
    have different numbers of rows, or none. Half precision is computed in float32. There is no second derivative.
    """
    of_torch = nn.functional.batch_norm

    def batch_norm(
        input: Tensor,  # noqa: A002  # torch's names
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return of_torch(input, running_mean, running_var, weight, bias, training, momentum, eps)
        normalize: Any = _Normalize.apply
        output: Tensor = normalize(input, weight, bias, _Layer(world, running_mean, running_var, momentum, eps))
        return output

    # A layer of `nn.SyncBatchNorm` would count rows that do not.
    with replaced(nn.SyncBatchNorm, "forward", BatchNorm.forward), replaced(nn.functional, "batch_norm", batch_norm):
        yield


class _Layer(NamedTuple):
    world: World
    running_mean: Tensor | None
    running_var: Tensor | None
    momentum: float
    eps: float

    def move_running_statistics(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        factor = self.momentum * (total > 0).double()  # as in torch, an empty batch leaves them as they are
        unbiased = variance * total / (total - 1).clamp(min=1)
        for running, current in ((self.running_mean, mean), (self.running_var, unbiased)):
            if running is not None:
                running.copy_((1 - factor) * running.double() + factor * current)


class _Normalize(torch.autograd.Function):
    # All ranks save the same number of tensors, whatever they count: checkpoint ends a recomputation by that number.
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor | None, bias: Tensor | None, layer: _Layer) -> Tensor:
        world = layer.world
        shape, dims = _layout(values)
        wide = values.to(_wide(values.dtype))
        n = _Rows.counted * values.shape[0] * math.prod(values.shape[2:])
        mean, variance = wide.new_zeros(2, wide.shape[1])
        if n:  # else they may be NaN, which no factor removes
            mean = wide.mean(dims)
            variance = (wide - mean.view(shape)).square_().mean(dims)  # on CPUs, twice as fast as `var_mean`
        number = torch.full((1,), n, dtype=torch.float64, device=values.device)  # exact, unlike in float32
        row = torch.cat([variance.double(), mean.double(), number])
        of_ranks = row.new_empty(world.size, len(row))
        with ours(), torch.profiler.record_function("GradAvg: exchange batch norm statistics"):
            dist.all_gather(list(of_ranks.unbind()), row, group=world.group)
        total = of_ranks[:, -1].sum()
        if n <= 1 and total.item() == 1:  # only ranks with so few rows wait for an accelerator
            raise ValueError(
                "Expected more than 1 value per channel when training, but the samples of all ranks together have 1."
                " Use larger batches, or drop_last=True."
            )
        shares, (variances, means) = of_ranks[:, -1:] / total.clamp(min=1), of_ranks[:, :-1].chunk(2, dim=1)
        mean = (shares * means).sum(0)
        variance = (shares * (variances + (means - mean).square())).sum(0)
        # Before the tensors are saved, where checkpoint may end a recomputation: so does torch's own batch norm.
        layer.move_running_statistics(mean, variance, total)
        scale, offset = (one if one is None else one.to(wide.dtype) for one in (weight, bias))
        output = nn.functional.batch_norm(
            wide, mean.to(wide.dtype), variance.to(wide.dtype), scale, offset, eps=layer.eps
        )
        ctx.world, ctx.counted = world, _Rows.counted
        ctx.save_for_backward(values, weight, mean, (variance + layer.eps).rsqrt(), total)
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
            sums = without_discarded_nan(sums) if ctx.counted else torch.zeros_like(sums)  # they may be NaN
            with torch.profiler.record_function("GradAvg: exchange batch norm gradients"):
                dist.all_reduce(sums, group=ctx.world.group)
            to_mean, to_deviation = ((part / total.clamp(min=1)).to(wide).view(shape) for part in sums.chunk(2))
            dy = normalized.mul_(-to_deviation).add_(dy).sub_(to_mean)
            scale = inverse if weight is None else inverse * weight.double()
            of_values = (dy * scale.to(wide).view(shape)).to(values.dtype)
        if not ctx.counted:
            return (None,) * 4  # 0 times NaN is NaN
        of_parameters = zip(ctx.needs_input_grad[1:], (of_weight, of_bias), strict=False)
        return of_values, *(one if needed else None for needed, one in of_parameters), None


def _layout(values: Tensor) -> tuple[list[int], list[int]]:
    """Return the shape of one number per channel beside the values, and the other dimensions."""
    return [1, -1, *(1 for _ in values.shape[2:])], [0, *range(2, values.ndim)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    # A sum of ones in half precision stops at 2048 in float16, and at 256 in bfloat16.
    return torch.promote_types(dtype, torch.float32)
