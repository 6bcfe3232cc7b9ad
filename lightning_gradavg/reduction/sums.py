"""Sums of gradients over the ranks, in no fewer than 32 bits, by one all-reduce for each bucket.

Half precision is summed in float32: a sum of float16 overflows and a pre-divided one underflows where the result does
neither, and bfloat16 loses bits at every addition.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg.lightning_internals import copy_each, views_of
from lightning_gradavg.ranks import World

__all__ = ["SUM_DTYPES", "as_real", "exchange_rows", "gather_rows", "sum_dense", "writable"]

_NARROW = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
SUM_DTYPES = {**dict.fromkeys(_NARROW, torch.float32), **{dtype: dtype for dtype in _WIDE}}
"""The dtypes that a gradient may have, and the dtype that each is summed in."""

# From this size on a gradient is a bucket of its own, usually without a copy: one more collective is cheaper than
# copying 1 MiB into a bucket and back.
SINGLE_BYTES = 2**20


def as_real(tensor: Tensor) -> Tensor:
    """Return a view of real numbers: a complex product would make NaN of an infinite part, its factor's being 0."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def writable(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a parameter's gradient: zeros where it has none, a copy where it cannot be written in place."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter, dtype=dtype)
    # After `expand`, elements share memory.
    repeats = not gradient.is_contiguous() and 0 in gradient.stride()
    if not (repeats or gradient.is_conj() or gradient.is_neg()):
        return gradient
    return gradient.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def sum_dense(gradients: Sequence[Tensor], factor: float, world: World) -> None:
    """Replace every gradient by `sum over ranks of factor * gradient`, in place; 0 discards them, whatever they hold.

    They are `writable`, and have the same shapes and dtypes, in the same order, on all ranks; strides may differ.
    """
    storages = Counter(gradient.untyped_storage().data_ptr() for gradient in gradients)
    buckets = [(members, _flat(members, storages)) for members in _partition(gradients)]
    works = []
    for _, flat in buckets:
        if factor == 0:
            flat.zero_()
        elif factor != 1:
            as_real(flat).mul_(factor)
        if world.group is not None:
            works.append(dist.all_reduce(as_real(flat), group=world.group, async_op=True))
    for work in works:
        work.wait()
    for members, flat in buckets:
        if flat is not members[0]:
            copy_each(members, views_of(flat, members))


def _flat(members: list[Tensor], storages: Counter[int]) -> Tensor:
    """Return the memory that a bucket is summed in: that of its only gradient, or a copy of them all."""
    first, dtype = members[0], SUM_DTYPES[members[0].dtype]
    # What holds more than one gradient could be read half-summed, were it reduced in place.
    alone = len(members) == storages[first.untyped_storage().data_ptr()] == 1
    if alone and dtype == first.dtype and first.is_contiguous():
        return first
    flat = torch.empty(sum(gradient.numel() for gradient in members), dtype=dtype, device=first.device)
    copy_each(views_of(flat, members), members)
    return flat


def _partition(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Cut gradients into buckets. Depends on nothing but their order, shapes, dtypes and which share a device."""
    buckets: dict[Any, list[Tensor]] = {}
    for index, gradient in enumerate(gradients):
        dtype = SUM_DTYPES[gradient.dtype]
        alone = gradient.numel() * dtype.itemsize >= SINGLE_BYTES
        if gradient.numel() > 0:
            buckets.setdefault(index if alone else (dtype, gradient.device), []).append(gradient)
    return list(buckets.values())


def gather_rows(tensor: Tensor, rows: Sequence[int], world: World) -> list[Tensor]:
    """Return the rows of every rank, of which each has `rows[rank]`, by one collective.

    They travel as bytes, each rank's padded to the longest: so every dtype does, on every backend.
    """
    mine = _as_matrix(tensor)
    slots = mine.new_empty(world.size, max(rows), mine.shape[1])
    slots[world.rank, : len(mine)] = mine
    if world.group is not None and slots.numel() > 0:
        sent = slots.view(torch.uint8)
        dist.all_gather(list(sent.unbind()), sent[world.rank].clone(), group=world.group)
    return [slot[:n].view(n, *tensor.shape[1:]) for slot, n in zip(slots, rows, strict=True)]


def exchange_rows(tensor: Tensor, to: Sequence[int], of: Sequence[int], world: World) -> Tensor:
    """Send so many of a tensor's rows to each rank, in order, and return what comes, `of[rank]` rows from each."""
    sent = _as_matrix(tensor)
    received = sent.new_empty(sum(of), sent.shape[1])
    if world.group is None:
        received = sent.clone()
    elif sent.shape[1] > 0:
        # Not reduce_scatter: on gloo that moves twice the bytes, and sums half precision in half precision.
        of_all, mine = received.view(torch.uint8), sent.view(torch.uint8)
        dist.all_to_all_single(of_all, mine, list(of), list(to), group=world.group)
    return received.view(len(received), *tensor.shape[1:])


def _as_matrix(tensor: Tensor) -> Tensor:
    """Return a tensor's rows with one further dimension, contiguous, so that they can be viewed as bytes."""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    width = math.prod(whole.shape[1:])
    # One expanded element is contiguous with a stride of 0, which cannot be viewed as bytes.
    return whole.as_strided((len(whole), width), (width, 1))
