"""One block of training steps: what a variant works with, and how its time is taken."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.models import Measured

__all__ = ["WARMUP", "Block", "Clock", "Setting", "Variant", "measure", "weight_of_rank"]

WARMUP = 3
"""Steps before the timed ones. DDP rebuilds its buckets after the first."""


@dataclass
class Setting:
    """What a variant works with.

    Attributes:
        module: The model, the same object in every variant.
        batch: This rank's batch, on the device: the input and the target.
        device: Where both are.
        steps: Timed steps of a block.
        nodes: Number of nodes.
    """

    module: Measured
    batch: tuple[Tensor, Tensor]
    device: torch.device
    steps: int
    nodes: int


@dataclass(frozen=True)
class Block:
    """The timed steps of one variant in one round, on this rank.

    Attributes:
        seconds: Median time of a step.
        processor: Processor seconds of a step, user and system, of all threads.
        sent: Bytes that the interface sent, per step.
    """

    seconds: float
    processor: float
    sent: float


class Clock:
    """Takes the time between successive calls of `tick`, the first `WARMUP` intervals left out.

    Args:
        steps: Intervals to time.
        device: Waited for at each tick.
        sent: Returns the bytes sent since the machine began.
    """

    def __init__(self, steps: int, device: torch.device, sent: Callable[[], int]) -> None:
        self._steps = steps
        self._device = device
        self._sent = sent
        self._times: list[float] = []
        self._counters: list[tuple[float, int]] = []

    def tick(self) -> None:
        """A step begins, which ends the one before."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._times.append(time.perf_counter())
        if len(self._times) - 1 in (WARMUP, WARMUP + self._steps):
            self._counters.append((time.process_time(), self._sent()))

    def block(self) -> Block:
        """Return what was measured.

        Raises:
            RuntimeError: If the variant did not tick once before each step and once after the last.
        """
        ticks = WARMUP + self._steps + 1
        if len(self._times) != ticks:
            raise RuntimeError(f"a variant ticked {len(self._times)} times instead of {ticks}")
        (processor, sent), (processor_after, sent_after) = self._counters
        return Block(
            statistics.median(after - before for before, after in pairwise(self._times[WARMUP:])),
            (processor_after - processor) / self._steps,
            (sent_after - sent) / self._steps,
        )


@dataclass(frozen=True)
class Variant:
    """One way of reducing gradients.

    Attributes:
        name: What the table calls it.
        run: Trains for `WARMUP + setting.steps` steps, ticking once before each and once after the last.
        in_lightning: Whether Lightning's Trainer runs it.
    """

    name: str
    run: Callable[[Setting, Clock], None]
    in_lightning: bool = False


def weight_of_rank() -> float:
    """Return this rank's weight under rules that use weights: another one on each rank, so that none cancels."""
    return 3.0 + dist.get_rank()


def measure(variant: Variant, setting: Setting, sent: Callable[[], int]) -> Block:
    """Run one block of a variant, beginning on all ranks together."""
    clock = Clock(setting.steps, setting.device, sent)
    dist.barrier()
    try:
        variant.run(setting, clock)
    finally:
        for parameter in setting.module.parameters():
            parameter.grad = None
        gc.collect()
    return clock.block()
