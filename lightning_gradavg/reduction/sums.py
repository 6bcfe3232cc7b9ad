"""Buckets scaled and summed over the ranks by one all-reduce each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_gradavg.rules import Weight

__all__ = ["keep", "scale", "sum_scaled", "unchanged"]

_HALF_PRECISION = (torch.float16, torch.bfloat16)


def keep(promise: Future[Any], done: Future[Tensor]) -> None:
    """Keep a promise with what a future holds, once it is done."""
    try:
        promise.set_result(done.value())
    except Exception as error:  # noqa: BLE001 - whatever it is belongs to the backward that waits for the bucket
        promise.set_exception(error)


def unchanged(buffer: Tensor) -> Future[Tensor]:
    """Return a bucket as the result of its own reduction."""
    future: Future[Tensor] = Future()
    future.set_result(buffer)
    return future


def scale(buffer: Tensor, factor: Weight) -> None:
    """Multiply a bucket in place; a factor of 0 discards it, non-finite numbers included."""
    if isinstance(factor, Tensor):
        buffer.mul_(factor).masked_fill_(factor == 0, 0)
    elif factor == 0:
        buffer.zero_()
    elif factor != 1:
        buffer.mul_(factor)


def sum_scaled(buffer: Tensor, factor: Weight, group: dist.ProcessGroup | None) -> Future[Tensor]:
    """Return the sum over ranks of a bucket times each rank's factor.

    Half precision is summed in float32: a sum of float16 overflows and a pre-divided one underflows where the result
    does neither, and bfloat16 loses bits at every addition.
    """
    if buffer.is_sparse:
        return _sum_scaled_sparse(buffer, factor, group)
    wide = buffer.float() if buffer.dtype in _HALF_PRECISION else buffer
    scale(wide, factor)
    future = dist.all_reduce(wide, group=group, async_op=True).get_future()
    result: Future[Tensor] = future.then(
        lambda done: done.value()[0] if wide is buffer else buffer.copy_(done.value()[0])
    )
    return result


def _sum_scaled_sparse(buffer: Tensor, factor: Weight, group: dist.ProcessGroup | None) -> Future[Tensor]:
    values = buffer._values().clone()
    scale(values, factor)
    scaled = torch.sparse_coo_tensor(buffer._indices(), values, buffer.shape, check_invariants=False).coalesce()
    future = dist.all_reduce(scaled, group=group, async_op=True).get_future()
    result: Future[Tensor] = future.then(lambda done: done.value()[0])
    return result
