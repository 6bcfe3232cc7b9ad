"""Asynchronous copies between host and device and reductions over ranks, and streams, on any accelerator or none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["HostCopy", "Tally", "current_stream", "new_stream", "on_device", "within"]

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


class Tally:
    """Integers of all ranks, reduced element by element while the ranks go on. A collective operation."""

    def __init__(self, row: Sequence[int], op: Any, device: torch.device) -> None:
        self._tensor = on_device(torch.tensor(row, dtype=torch.int64), device)
        self._work = dist.all_reduce(self._tensor, op, async_op=True)
        stream = _side_stream(device)
        self._copy = None if stream is None else self._copied(stream)

    def _copied(self, stream: torch.Stream) -> HostCopy:
        # Not on the stream of the model, which would wait for the other ranks before its forward.
        stream.wait_stream(current_stream(self._tensor.device))
        with within(stream):
            self._work.wait()
            return HostCopy(self._tensor)

    def read(self) -> list[int]:
        """Return the reduced row; a step later nobody waits for it."""
        if self._copy is None:
            self._work.wait()
        return list((self._copy or HostCopy(self._tensor)).read())
