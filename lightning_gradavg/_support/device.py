"""Streams of an accelerator, and copies to it that the host does not wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["beside", "on_device"]

_ON_HOST = ("cpu", "meta")
"""The types of devices without streams, to and from which copies are synchronous."""


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. The host does not wait for a copy to an accelerator."""
    if device.type in _ON_HOST or tensor.device.type not in _ON_HOST:
        return tensor.to(device)
    # Only from pinned memory is a non-blocking copy asynchronous.
    return tensor.pin_memory().to(device, non_blocking=True)


# One stream per device, whoever asks: a backend has few, and further ones share their queues.
@lru_cache
def _side_stream(device: torch.device) -> Any:
    return getattr(torch, device.type).Stream(device)


@contextmanager
def beside(device: torch.device, *, waits: bool = True) -> Iterator[Any]:
    """Within the context, launch on a second stream of an accelerator; yield that stream.

    Args:
        device: The accelerator.
        waits: Whether the second stream waits for what the current stream has been given so far. It must wait if the
            context uses a result of that.
    """
    backend = getattr(torch, device.type)  # torch.cuda, torch.xpu, ...
    side_stream = _side_stream(device)
    if waits:
        side_stream.wait_stream(backend.current_stream(device))
    with backend.stream(side_stream):
        yield side_stream
