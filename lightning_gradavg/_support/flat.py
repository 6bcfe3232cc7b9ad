"""Buckets of tensors, the parts of a flat one, and this rank's part of a DTensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["broadcast_from_first", "buckets_of", "local_part", "views_of"]

_BROADCAST_BYTES = 250 * 2**20  # as DistributedDataParallel broadcasts its buffers


def buckets_of(tensors: Sequence[Tensor], size: int) -> list[list[Tensor]]:
    """Return tensors in buckets of one dtype and device, each filled until it has so many bytes."""
    buckets: list[list[Tensor]] = []
    # The bucket of each dtype and device that is not full, and its bytes.
    filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        if kind not in filling:
            filling[kind] = []
            filled[kind] = 0
            buckets.append(filling[kind])
        filling[kind].append(tensor)
        filled[kind] += tensor.numel() * tensor.element_size()
        if filled[kind] >= size:
            del filling[kind]
    return buckets


def views_of(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a flat tensor in the shapes of others."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, and any other tensor itself."""
    if hasattr(tensor, "to_local"):  # a DTensor, whose module is slow to import
        local: Tensor = tensor.to_local()
        return local
    return tensor


def broadcast_from_first(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Write the tensors of a group's first rank into those of all its ranks, a bucket in each message. Collective."""
    sharing: dist.ProcessGroup | None = group
    if sharing is None:
        sharing = dist.group.WORLD
    assert sharing is not None
    first = dist.get_global_rank(sharing, 0)
    for bucket in buckets_of(tensors, _BROADCAST_BYTES):
        # `data`: unseen by autograd, whatever graph a tensor is part of.
        flat = torch.cat([tensor.data.reshape(-1) for tensor in bucket])
        dist.broadcast(flat, first, group=sharing)
        for tensor, view in zip(bucket, views_of(flat, bucket), strict=True):
            tensor.data.copy_(view)
