"""The plain mean without a hook: what DDP and FSDP2 compute themselves, to stock's bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_gradavg.reduction.loss import MicroBatch
from lightning_gradavg.reduction.window import WindowRecord
from lightning_gradavg.rules import Share

__all__ = ["PlainMean"]


@dataclass
class _Contents:
    """What is known of the window that is open."""

    micro_batches: list[MicroBatch] = field(default_factory=list)
    length: int = 1  # number of micro-batches that it will have
    has_ended: bool = False


class PlainMean:
    """Counts the micro-batches of windows whose length is known when they begin. It touches no gradient.

    The calls are those of `Window`. What remains to be done: Lightning divides every loss by N, so the losses of a
    window of fewer micro-batches carry N / length.
    """

    def __init__(self, reduce_unfrozen: Callable[[], None]) -> None:
        """Serve a model; `reduce_unfrozen` averages what its engine does not know, after the last backward."""
        self._reduce_unfrozen = reduce_unfrozen
        self._contents = _Contents()

    @property
    def has_ended(self) -> bool:
        """Whether the last backward of the window has run, and `reduce` comes next."""
        return self._contents.has_ended

    @property
    def is_empty(self) -> bool:
        """Whether the next micro-batch begins a window."""
        return not self._contents.micro_batches

    def add(self, micro_batch: MicroBatch, *, ends: bool, divisor: float, length: int) -> float:
        """Count a micro-batch; return what its loss is multiplied by, 1 in full windows."""
        contents = self._contents
        contents.micro_batches.append(micro_batch)
        contents.length = length
        contents.has_ended = ends
        return divisor / length

    def begin_backward(self, **_: bool) -> None:
        """Do nothing."""

    def end_backward(self) -> None:
        """Do nothing."""

    def reduce(self) -> None:
        """Average what the engine does not know. A collective operation."""
        self._reduce_unfrozen()

    def record(self) -> WindowRecord:
        """Return what a report says of the window: every pair counts once."""
        contents = self._contents
        shares: list[Share] = []
        for micro_batch in contents.micro_batches:
            counted = 1.0
            if micro_batch.absent:
                counted = 0.0
            shares.append(Share(counted, counted))
        # The losses were divided by N, and multiplied by N / length.
        return WindowRecord(contents.micro_batches, shares, float(contents.length))

    def close(self) -> None:
        """Begin an empty window."""
        self._contents = _Contents()

    def abandon(self) -> None:
        """Forget the window. Its gradients stay, as with stock DDP."""
        self._contents = _Contents()
