"""What ranks say of a window, and how it travels: one row of numbers from each rank to all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg._support.device import beside, on_device

__all__ = ["NOTHING_TO_COMPARE", "Row", "RowExchange", "exact_sum"]

NOTHING_TO_COMPARE = -1.0
"""The `agreement` of a rank that has no micro-batch: no digest is negative."""


class Row(NamedTuple):
    """What a rank says of its window, in float64."""

    normalizer: float  # the sum of z
    remainder: float  # what rounding took off that sum, so that Z does not depend on which rank added up what
    largest: float  # the largest w
    problems: float  # number of micro-batches with a problem
    agreement: float  # digest of what must be the same on all ranks, or `NOTHING_TO_COMPARE`
    weights: float  # digest of the weights one by one, which ranks that compute one loss together must share


class RowExchange:
    """Every rank's row of numbers, exchanged while this rank goes on. A collective operation; `read` waits for it.

    On a CPU an all-to-all moves the rows: gloo's all-gather and all-reduce of a few numbers go round a ring, and this
    takes one step. On an accelerator the rows travel on a stream beside the model's, so that the host, which reads
    them, waits for the other ranks and not for the forward.
    """

    def __init__(self, row: Sequence[float], device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Begin to exchange a row of float64, of the same length on all ranks; a `group` of None is this rank alone."""
        self.row = list(row)
        self._rows: Tensor | None = None  # of several ranks, once they have come
        self._work: dist.Work | None = None  # on a CPU
        self._copied: torch.Event | None = None  # on an accelerator: the copy to the host
        if group is not None:
            with torch.profiler.record_function("GradAvg: exchange rows"):
                self._begin(device, group)

    def _begin(self, device: torch.device, group: dist.ProcessGroup) -> None:
        """Begin to exchange the row among several ranks."""
        ranks = dist.get_world_size(group)
        if device.type == "cpu":
            sent = torch.tensor(self.row * ranks, dtype=torch.float64)
            self._rows = torch.empty_like(sent)
            self._work = dist.all_to_all_single(self._rows, sent, group=group, async_op=True)
            return
        # The row comes from the host: nothing of the model's stream is needed for it, such as the forward
        # (`test_accelerator.py`: rows wait for no forward).
        with beside(device, waits=False) as stream:
            moved = on_device(torch.tensor(self.row, dtype=torch.float64), device)
            gathered = moved.new_empty(ranks * len(self.row))
            dist.all_gather(list(gathered.view(ranks, -1).unbind()), moved, group=group)
            self._rows = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            self._rows.copy_(gathered, non_blocking=True)
            self._copied = stream.record_event()

    def read(self) -> list[list[float]]:
        """Return the rows of all ranks, in rank order."""
        if self._rows is None:
            return [self.row]
        with torch.profiler.record_function("GradAvg: wait for rows"):
            if self._work is not None:
                self._work.wait()
            if self._copied is not None:
                self._copied.synchronize()
        rows: list[list[float]] = self._rows.view(-1, len(self.row)).tolist()
        return rows


def exact_sum(numbers: Sequence[float]) -> float:
    """Return the correctly rounded sum, which no order of the ranks changes; infinity if it overflows."""
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # beyond float64, or inf - inf
        return math.inf
