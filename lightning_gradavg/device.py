"""Asynchronous copies between host and device and reductions over ranks, and streams, on any accelerator or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["HostCopy", "Tally", "current_stream", "new_stream", "on_device", "rows_of_ranks", "within"]

_ON_HOST = ("cpu", "meta")


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, copied from pinned memory, which nobody waits for."""
    if device.type in _ON_HOST or tensor.device.type not in _ON_HOST:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A copy of a tensor to the host that begins now, on the current stream, and is read later."""

    def __init__(self, tensor: Tensor) -> None:
        self._values, self._event = tensor, None
        if tensor.device.type not in _ON_HOST:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = current_stream(tensor.device).record_event()

    def read(self) -> Any:
        """Return the values as Python numbers, waiting for the copy if it is not there yet."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


def new_stream(device: torch.device) -> torch.Stream | None:
    """Return a stream of an accelerator, if the device is one."""
    return None if device.type in _ON_HOST else torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the current stream of an accelerator; before torch 2.6, which has `torch.accelerator`, of CUDA."""
    module: Any = getattr(torch, "accelerator", torch.cuda)
    return module.current_stream(device)  # type: ignore[no-any-return]


def within(stream: torch.Stream) -> AbstractContextManager[Any]:
    """Launch on a stream inside."""
    # A torch.Stream is a context manager since torch 2.7.
    older: Any = torch.cuda.stream
    return stream if hasattr(stream, "__enter__") else older(stream)


# One, whoever asks: a backend has few.
_side_stream = lru_cache(new_stream)

_OPS: dict[Any, Any] = {max: dist.ReduceOp.MAX, sum: dist.ReduceOp.SUM}


def rows_of_ranks(row: Tensor, group: dist.ProcessGroup | None = None) -> tuple[Tensor, dist.Work]:
    """Begin to give all ranks a short row of each, on the CPU. A collective operation.

    Gloo's all-reduce of a few numbers goes round a ring, twice; this takes one step, and a fifth of the time.
    """
    ranks = dist.get_world_size(group)
    given = row.repeat(ranks)
    found = torch.empty_like(given)
    return found.view(ranks, -1), dist.all_to_all_single(found, given, group=group, async_op=True)


class Tally:
    """Integers of all ranks, reduced element by element while the ranks go on. A collective operation.

    Args:
        row: This rank's.
        reduce: `max` or `sum`.
        device: Where the process group takes tensors from.
    """

    def __init__(self, row: Sequence[int], reduce: Callable[[Sequence[int]], int], device: torch.device) -> None:
        self._reduce, stream = reduce, _side_stream(device)
        tensor = on_device(torch.tensor(row, dtype=torch.int64), device)
        if stream is None:
            self._tensor, self._work = rows_of_ranks(tensor)
            self._copy = None
        else:
            self._tensor = tensor
            self._work = dist.all_reduce(tensor, _OPS[reduce], async_op=True)
            self._copy = self._copied(stream)

    def _copied(self, stream: torch.Stream) -> HostCopy:
        # Not on the stream of the model, which would wait for the other ranks before its forward.
        stream.wait_stream(current_stream(self._tensor.device))
        with within(stream):
            self._work.wait()
            return HostCopy(self._tensor)

    def read(self) -> list[int]:
        """Return the reduced row; a step later nobody waits for it."""
        if self._copy is not None:
            return list(self._copy.read())
        self._work.wait()
        return [self._reduce(column) for column in zip(*self._tensor.tolist(), strict=True)]
