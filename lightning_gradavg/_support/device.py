"""Asynchronous copies between host and device and reductions over ranks, and streams, on any accelerator or none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Tally", "beside", "on_device"]

_ON_HOST = ("cpu", "meta")


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, copied from pinned memory, which nobody waits for."""
    if device.type in _ON_HOST or tensor.device.type not in _ON_HOST:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@lru_cache  # one, whoever asks: a backend has few
def _side_stream(device: torch.device) -> Any:
    return getattr(torch, device.type).Stream(device)


@contextmanager
def beside(device: torch.device, *, waits: bool = True) -> Iterator[Any]:
    """Launch on a stream of an accelerator beside the current one; yield the stream.

    Args:
        device: The accelerator.
        waits: Whether what is launched comes after what the current stream has been given so far. It must, if it uses
            a result of that.
    """
    streams, stream = getattr(torch, device.type), _side_stream(device)
    if waits:
        stream.wait_stream(streams.current_stream(device))
    with streams.stream(stream):
        yield stream


_OPS: dict[str, tuple[Any, Any]] = {"max": (dist.ReduceOp.MAX, torch.amax), "sum": (dist.ReduceOp.SUM, torch.sum)}


class Tally:
    """Numbers of all ranks, reduced (`"max"` or `"sum"`) element by element while they go on. A collective operation.

    On a CPU every rank gets the rows of all: gloo's all-reduce of a few numbers goes round a ring, twice, and this
    takes one step, and a fifth of the time. On an accelerator `row` is reduced, for what is launched after `wait`.
    """

    def __init__(
        self, row: Tensor | Sequence[Any], reduce: str, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        if not isinstance(row, Tensor):
            dtype = torch.float64 if isinstance(row[0], float) else torch.int64
            row = on_device(torch.tensor(row, dtype=dtype), device)
        operation, self._over_ranks = _OPS[reduce]
        self.row, self._copy, self._length, on_cpu = row, row, len(row), device.type in _ON_HOST
        self._work: dist.Work | None = None
        self._event: Any = None
        if on_cpu and group is not None:
            given = row.repeat(dist.get_world_size(group))
            self.row = torch.empty_like(given)
            self._work = dist.all_to_all_single(self.row, given, group=group, async_op=True)
        elif group is not None:
            self._work = dist.all_reduce(row, operation, group=group, async_op=True)
        if not on_cpu:
            # Not on the stream of the model, which would wait for the other ranks before its forward.
            with beside(device) as stream:
                self.wait()
                self._copy = torch.empty(row.shape, dtype=row.dtype, pin_memory=True).copy_(row, non_blocking=True)
                self._event = stream.record_event()

    def wait(self) -> None:
        """Have the current stream wait for the other ranks; on a CPU, wait."""
        if self._work is not None:
            self._work.wait()

    def read(self) -> list[Any]:
        """Return the reduced row; a step later nobody waits for it."""
        if self._event is not None:
            self._event.synchronize()
            return list(self._copy.tolist())
        self.wait()
        return list(self._over_ranks(self.row.view(-1, self._length), 0).tolist())
