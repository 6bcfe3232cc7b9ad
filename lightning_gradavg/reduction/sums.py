"""Sums of gradients over the ranks, in no fewer than 32 bits: dense ones by one all-reduce, sparse ones gathered.

Half precision is summed in float32: a sum of float16 overflows and a pre-divided one underflows where the result does
neither, and bfloat16 loses bits at every addition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_gradavg.lightning_internals import sparse_parts
from lightning_gradavg.ranks import World

__all__ = ["SUM_DTYPES", "BucketSum", "as_real", "done", "plain_sum", "sum_sparse", "zero_gradient"]

SUM_DTYPES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
}
"""The dtypes that a gradient may have, and the dtype that each is summed in."""


BucketSum: TypeAlias = Callable[[dist.GradBucket], Future[Tensor]]
"""Begins the sum of a bucket over the ranks; the future holds it in the bucket's memory or in memory of its own."""


def done(value: Tensor) -> Future[Tensor]:
    """Return the future of a tensor that is there."""
    future: Future[Tensor] = Future() if value.device.type == "cpu" else Future(devices=[value.device])
    future.set_result(value)
    return future


def as_real(tensor: Tensor) -> Tensor:
    """Return a view of real numbers: a complex product would make NaN of an infinite part, its factor's being 0."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def plain_sum(group: dist.ProcessGroup | None) -> BucketSum:
    """Return an all-reduce: the sum of a bucket in the dtype of sums, in its memory if it has that."""

    def start(bucket: dist.GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        if buffer.is_sparse:
            return done(_sparse_sums([buffer], World.of(group))[0])
        wide = buffer.to(SUM_DTYPES[buffer.dtype])
        future: Future[Any] = dist.all_reduce(wide, group=group, async_op=True).get_future()
        # Each backend returns something else: gloo a list of tensors, a later release perhaps the tensor.
        return future.then(lambda _: wide)

    return start


def sum_sparse(gradients: Sequence[Tensor], world: World, factor: float = 1.0) -> list[Tensor]:
    """Return `sum over ranks of factor * gradient` of every sparse gradient, coalesced, in the dtype of the gradient.

    Every rank gathers the others' entries and adds them in rank order: gloo and NCCL agree on no sparse collective.

    Args:
        gradients: COO tensors, coalesced or not; the same shapes, sparse dimensions and dtypes, in the same order, on
            all ranks. The number of entries may differ.
        world: The ranks.
        factor: What this rank's gradients are multiplied by; 0 discards them, whatever they hold.
    """
    totals = _sparse_sums(gradients, world, factor)
    return [total.to(gradient.dtype) for total, gradient in zip(totals, gradients, strict=True)]


def _sparse_sums(gradients: Sequence[Tensor], world: World, factor: float = 1.0) -> list[Tensor]:
    if not gradients:
        return []
    wide = [_scaled(gradient, factor) for gradient in gradients]
    counts = zip(*world.gather_integers([len(sparse_parts(tensor)[1]) for tensor in wide]), strict=True)
    return [_gathered(tensor, of_tensor, world.group) for tensor, of_tensor in zip(wide, counts, strict=True)]


def _scaled(gradient: Tensor, factor: float) -> Tensor:
    """Return the gradient scaled and coalesced, with nothing added up in fewer than 32 bits."""
    indices, values = sparse_parts(gradient)
    if factor == 0:
        indices, values = indices[:, :0], values[:0]
    values = values.to(SUM_DTYPES[values.dtype], copy=True).resolve_conj().resolve_neg()
    as_real(values).mul_(factor)
    return _coo(indices, values, gradient.shape).coalesce()


def _gathered(tensor: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of all ranks' entries, each padded to the longest on the way."""
    if group is None or max(counts) == 0:
        return tensor
    indices, values = (
        torch.cat([part[:count] for part, count in zip(_padded_rows(rows, counts, group), counts, strict=True)])
        for rows in (tensor.indices().t(), tensor.values())
    )
    return _coo(indices.t(), values, tensor.shape).coalesce()


def _padded_rows(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    received = [torch.empty_like(padded) for _ in counts]
    if padded.numel() > 0:
        dist.all_gather([as_real(one) for one in received], as_real(padded), group=group)
    return received


def zero_gradient(parameter: Tensor, sparse_dim: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """Return the gradient of a loss that `parameter` does not change; with sparse dimensions it has no entries."""
    if sparse_dim == 0:
        return torch.zeros_like(parameter, dtype=dtype)
    values = parameter.new_empty((0, *parameter.shape[sparse_dim:]), dtype=dtype)
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=parameter.device)
    return _coo(indices, values, parameter.shape)


def _coo(indices: Tensor, values: Tensor, shape: torch.Size, *, coalesced: bool | None = None) -> Tensor:
    # The invariants hold by construction; looking at them would wait for the device.
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=coalesced)
