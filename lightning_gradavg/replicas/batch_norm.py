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

import math
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_gradavg.lightning_internals import BatchNorm, require_dimensions
from lightning_gradavg.ranks import World

__all__ = ["count_rows", "restore_batch_norm", "synchronize_batch_norm", "unsynchronizable_batch_norms"]


class _Rows:
    """Of the process, not of a thread: `torch.utils.checkpoint` may run a forward again on a thread of autograd."""

    counted = True


def count_rows(*, counted: bool) -> None:
    """Say whether this rank's rows count in synchronized batch norms from here on, also where a forward is repeated.

    Rows that do not count are normalized with the statistics of the other ranks' rows, and have no gradient.
    """
    _Rows.counted = counted


def synchronize_batch_norm(module: nn.Module) -> list[str]:
    """Let every batch norm in training mode normalize over the values of all ranks; return the layers' names.

    Only their attribute `forward` is set. Copies of `copy.deepcopy` are synchronized, too; pickled ones are not. Ranks
    may have different numbers of rows, or none. Half precision is computed in float32. There is no second derivative.
    """
    names = {name: norm for name, norm in _batch_norms(module).items() if _forward_of(norm) in _FORWARDS}
    for norm in names.values():
        vars(norm)["forward"] = MethodType(forward, norm)
    return [*names]


def restore_batch_norm(module: nn.Module) -> None:
    """Undo `synchronize_batch_norm` and `count_rows`."""
    count_rows(counted=True)
    for norm in _batch_norms(module).values():
        if _forward_of(norm) is forward:
            del vars(norm)["forward"]


def unsynchronizable_batch_norms(module: nn.Module) -> list[str]:
    """Return the names of the batch norms that have a forward of their own, which cannot be synchronized."""
    return [name for name, norm in _batch_norms(module).items() if _forward_of(norm) not in _FORWARDS]


def _batch_norms(module: nn.Module) -> dict[str, BatchNorm]:
    return {name: norm for name, norm in module.named_modules() if isinstance(norm, BatchNorm)}


def _forward_of(norm: nn.Module) -> Any:
    return getattr(norm.forward, "__func__", norm.forward)


def forward(self: BatchNorm, input: Tensor) -> Tensor:  # noqa: A002  # torch's names, which a pickled layer looks up
    """Run a synchronized batch norm."""
    world = World.of(None)
    if not self.training or world.group is None:
        return BatchNorm.forward(self, input)
    require_dimensions(self, input)
    normalize: Any = _Normalize.apply
    output: Tensor = normalize(input, self.weight, self.bias, self, world)
    return output


_FORWARDS = (BatchNorm.forward, nn.SyncBatchNorm.forward, forward)


class _Normalize(torch.autograd.Function):
    # All ranks save the same number of tensors, whatever they count: checkpoint ends a recomputation by that number.
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weight: Tensor | None, bias: Tensor | None, norm: BatchNorm, world: World
    ) -> Tensor:
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
        _move_running_statistics(norm, mean, variance, total)
        scale, offset = (one if one is None else one.to(wide.dtype) for one in (weight, bias))
        output = nn.functional.batch_norm(
            wide, mean.to(wide.dtype), variance.to(wide.dtype), scale, offset, eps=norm.eps
        )
        ctx.world, ctx.counted = world, _Rows.counted
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
            dist.all_reduce(sums, group=ctx.world.group)
            to_mean, to_deviation = ((part / total.clamp(min=1)).to(wide).view(shape) for part in sums.chunk(2))
            dy = normalized.mul_(-to_deviation).add_(dy).sub_(to_mean)
            scale = inverse if weight is None else inverse * weight.double()
            of_values = (dy * scale.to(wide).view(shape)).to(values.dtype)
        if not ctx.counted:
            return (None,) * 5  # 0 times NaN is NaN
        of_parameters = (None if weight is None else one.to(weight.dtype) for one in (of_weight, of_bias))
        return of_values, *of_parameters, None, None


def _move_running_statistics(norm: BatchNorm, mean: Tensor, variance: Tensor, total: Tensor) -> None:
    if norm.track_running_stats:
        count = norm.get_buffer("num_batches_tracked").add_(1)
        factor = 1 / count.double() if norm.momentum is None else norm.momentum
        factor = factor * (total > 0).double()  # as in torch, an empty batch leaves them as they are
        unbiased = variance * total / (total - 1).clamp(min=1)
        for name, current in (("running_mean", mean), ("running_var", unbiased)):
            running = norm.get_buffer(name)
            running.copy_((1 - factor) * running.double() + factor * current)


def _layout(values: Tensor) -> tuple[list[int], list[int]]:
    """Return the shape of one number per channel beside the values, and the other dimensions."""
    return [1, -1, *(1 for _ in values.shape[2:])], [0, *range(2, values.ndim)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    # A sum of ones in half precision stops at 2048 in float16, and at 256 in bfloat16.
    return torch.promote_types(dtype, torch.float32)
