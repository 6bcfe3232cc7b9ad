"""Batch norm over the values of all ranks, so that it normalizes a global batch as one process does.

With `x` the values of one channel, `N` of them on all ranks together, sums over all of them, and `dy` the gradient of
the rank's own loss, after Ioffe and Szegedy, "Batch Normalization" (arXiv:1502.03167), section 3,

    m = sum(x) / N ,    v = sum((x - m)^2) / N ,    xhat = (x - m) / sqrt(v + eps) ,    y = gamma * xhat + beta
    dx = gamma / sqrt(v + eps) * (dy - sum(dy) / N - xhat * sum(dy * xhat) / N)

is right where the reduced gradient is the sum over ranks of `d l_r / d theta` times a number that is the same for all.
The gradients of gamma and beta stay those of the rank's own rows, which are summed like all others.

Each forward is a collective operation, and so is each backward that reaches the input. So all ranks must run the same
layers in the same order. That includes ranks without samples, and what `torch.utils.checkpoint` runs again.

Why not `nn.SyncBatchNorm`: it runs on no CPU, and it would count the rows of a stand-in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_gradavg._lightning.internals import BatchNorm
from lightning_gradavg._lightning.methods import replaced
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.running import running_forward
from lightning_gradavg.reduction.gather import require_gather_allowed
from lightning_gradavg.reduction.uncounted import note_exchange

__all__ = ["synchronized_batch_norm"]

_stock_batch_norm = nn.functional.batch_norm


def _batch_norm(
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
        return _stock_batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    require_gather_allowed()
    forward = running_forward()
    assert forward.world is not None
    layer = _Layer(forward.world, not forward.stands_in, running_mean, running_var, momentum, eps)
    normalize: Any = _Normalize.apply
    output: Tensor
    output, begin_of_backward = normalize(input, weight, bias, layer)
    note_exchange("batch norm over all ranks", begin_of_backward)
    return output


@cache  # `torch.compile` compiles anew where it sees another function
def _untraced() -> Callable[..., Tensor]:
    """Return `_batch_norm` as compiled code calls it: as it is, since tracing fails at its exchanges."""
    untraced: Callable[..., Tensor] = torch.compiler.disable(_batch_norm)
    return untraced


@contextmanager
def synchronized_batch_norm() -> Iterator[None]:
    """Within the context, of a forward or its backward, normalize by the statistics of all ranks.

    Any other forward takes the statistics of its batch, as in torch: one rank alone may run it, such as a callback that
    draws images. The rows of a stand-in are normalized with the statistics of the other ranks' rows, and have no
    gradient.

    It replaces `torch.nn.functional.batch_norm`, not the forward of torch's layers, so it also serves layers with a
    forward of their own that call the function. Ranks may have different numbers of rows, or none. Half precision is
    computed in float32. There is no second derivative.
    """
    # `nn.SyncBatchNorm.forward` raises on CPUs. On accelerators it would count the rows of a stand-in.
    with replaced(nn.SyncBatchNorm, "forward", BatchNorm.forward), replaced(nn.functional, "batch_norm", _untraced()):
        yield


class _Statistics(NamedTuple):
    """Statistics over the rows of all ranks that count, in float64."""

    mean: Tensor  # of each channel
    variance: Tensor  # of each channel, divided by the number of values
    number: Tensor  # of values per channel; 0-dim, so that no host waits for it


class _Layer(NamedTuple):
    """What a call of batch norm is given besides its input and parameters."""

    world: World
    rows_count: bool  # False of a stand-in
    running_mean: Tensor | None
    running_var: Tensor | None
    momentum: float
    eps: float

    def update_running_statistics(self, statistics: _Statistics) -> None:
        # An empty batch leaves them as they are, as in torch.
        factor = self.momentum * (statistics.number > 0).double()
        unbiased = statistics.variance * statistics.number / (statistics.number - 1).clamp(min=1)
        if self.running_mean is not None:
            self.running_mean.copy_((1 - factor) * self.running_mean.double() + factor * statistics.mean)
        if self.running_var is not None:
            self.running_var.copy_((1 - factor) * self.running_var.double() + factor * unbiased)


class _Normalize(torch.autograd.Function):
    """The formulas at the top of this file.

    Its second output is 0. A loss that is missing reaches this backward through it, and so takes part in the exchange,
    without a gradient of the size of the first output (`note_exchange`).
    """

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weight: Tensor | None, bias: Tensor | None, layer: _Layer
    ) -> tuple[Tensor, Tensor]:
        wide = values.to(_wide(values.dtype))
        statistics = _statistics_of_all_ranks(wide, layer)
        # Before the tensors are saved, as in torch's own batch norm: `torch.utils.checkpoint` ends a recomputation
        # early, once it has saved as many tensors as the first forward.
        layer.update_running_statistics(statistics)
        output = nn.functional.batch_norm(
            wide,
            statistics.mean.to(wide.dtype),
            statistics.variance.to(wide.dtype),
            None if weight is None else weight.to(wide.dtype),
            None if bias is None else bias.to(wide.dtype),
            eps=layer.eps,
        )
        ctx.world = layer.world
        ctx.rows_count = layer.rows_count
        # All ranks save the same number of tensors, also where no rows count. Else a recomputation would end at
        # another layer than on the other ranks, and run another number of collectives.
        inverse_deviation = (statistics.variance + layer.eps).rsqrt()
        ctx.save_for_backward(values, weight, statistics.mean, inverse_deviation, statistics.number)
        return output.to(values.dtype), wide.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, mean, inverse_deviation, number = ctx.saved_tensors
        values_need_gradient, weight_needs_gradient, bias_needs_gradient, _ = ctx.needs_input_grad
        shape, dimensions = _layout(values)
        wide = _wide(values.dtype)
        gradient = gradients[0].to(wide)
        normalized = (values.to(wide) - mean.to(wide).view(shape)).mul_(inverse_deviation.to(wide).view(shape))
        bias_sum = gradient.sum(dimensions)
        weight_sum = (gradient * normalized).sum(dimensions)
        values_gradient: Tensor | None = None
        if values_need_gradient:
            # The parentheses of dx at the top of this file, of which both sums are over all ranks.
            sums = torch.cat([bias_sum, weight_sum]).double()
            if not ctx.rows_count:
                sums = torch.zeros_like(sums)  # not times 0: they may be NaN
            with torch.profiler.record_function("GradAvg: exchange batch norm gradients"):
                dist.all_reduce(sums, group=ctx.world.group)
            mean_gradient, mean_product = (sums / number.clamp(min=1)).to(wide).chunk(2)
            centered = normalized.mul_(-mean_product.view(shape)).add_(gradient).sub_(mean_gradient.view(shape))
            scale = inverse_deviation
            if weight is not None:
                scale = inverse_deviation * weight.double()
            values_gradient = (centered * scale.to(wide).view(shape)).to(values.dtype)
        if not ctx.rows_count:
            # None, as 0 times NaN is NaN: what comes before this layer may have an infinite derivative.
            return None, None, None, None
        # Torch refuses a gradient of a parameter that the layer does not have.
        weight_gradient = weight_sum if weight_needs_gradient else None
        bias_gradient = bias_sum if bias_needs_gradient else None
        return values_gradient, weight_gradient, bias_gradient, None


def _statistics_of_all_ranks(values: Tensor, layer: _Layer) -> _Statistics:
    """Return the statistics of all rows that count. A collective operation.

    The variance is that of the ranks' own variances and means, which does not cancel as `mean(x^2) - mean(x)^2` does
    (`test_ranks_batch_norm.py::test_the_variance_does_not_cancel`).
    """
    shape, dimensions = _layout(values)
    local_number = 0
    if layer.rows_count:
        local_number = values.shape[0] * math.prod(values.shape[2:])
    if local_number > 0:
        local_mean = values.mean(dimensions)
        # On CPUs, twice as fast as `torch.var_mean`.
        local_variance = (values - local_mean.view(shape)).square_().mean(dimensions)
    else:
        # The mean of no rows is NaN, and so may be rows that do not count. A share of 0 would not remove that.
        local_mean = local_variance = values.new_zeros(values.shape[1])

    # One row for each rank: variances, means, and the number of values, which float64 holds exactly.
    number = torch.full((1,), local_number, dtype=torch.float64, device=values.device)
    row = torch.cat([local_variance.double(), local_mean.double(), number])
    rows = row.new_empty(layer.world.size, len(row))
    with torch.profiler.record_function("GradAvg: exchange batch norm statistics"):
        dist.all_gather(list(rows.unbind()), row, group=layer.world.group)
    numbers = rows[:, -1:]
    variances, means = rows[:, :-1].chunk(2, dim=1)

    total = numbers.sum()
    # Only ranks with so few values read the total, so that the others do not wait for an accelerator.
    if local_number <= 1 and total.item() == 1:
        raise ValueError(
            "Expected more than 1 value per channel when training, but the samples of all ranks together have 1."
            " Use larger batches, or drop_last=True."
        )
    shares = numbers / total.clamp(min=1)
    mean = (shares * means).sum(0)
    variance = (shares * (variances + (means - mean).square())).sum(0)
    return _Statistics(mean, variance, total)


def _layout(values: Tensor) -> tuple[list[int], list[int]]:
    """Return the shape in which one number per channel meets the values, and the dimensions other than the channel."""
    shape = [1, -1, *[1] * (values.ndim - 2)]
    dimensions = [0, *range(2, values.ndim)]
    return shape, dimensions


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type to sum in. A sum of ones stops at 2048 in float16, and at 256 in bfloat16."""
    return torch.promote_types(dtype, torch.float32)
