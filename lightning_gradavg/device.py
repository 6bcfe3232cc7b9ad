"""Copies between host and device and sums over ranks that nobody waits for, and streams, on any accelerator or none."""

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
    """Return a tensor on a device. A copy from ordinary memory would be waited for, one from pinned is not."""
    if device.type in _ON_HOST or tensor.device.type not in _ON_HOST:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """The values of a tensor, as the current stream finds it, on their way to the host: begun now and read later."""

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
    """Return a stream of an accelerator; None for a device that has none."""
    return None if device.type in _ON_HOST else torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream that an accelerator's operators are launched on now."""
    # torch.accelerator came with torch 2.6. Before, CUDA is the only accelerator that is served.
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
    """Integers of all ranks, put together element by element while the ranks go on. A collective operation.

    Args:
        row: This rank's.
        op: What is kept of them.
        device: Where the process group takes tensors from.
    """

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
        """Return the row of all ranks, which is long there a step later."""
        if self._copy is None:
            self._work.wait()
        return list((self._copy or HostCopy(self._tensor)).read())
