"""The plain mean without a hook: what DDP and FSDP2 compute themselves, to stock's bits."""

from __future__ import annotations

from collections.abc import Callable

from lightning_gradavg.reduction.loss import MicroBatch
from lightning_gradavg.reduction.window import WindowRecord
from lightning_gradavg.rules import Share

__all__ = ["PlainMean"]


class PlainMean:
    """Counts the micro-batches of windows whose length is known when they begin. It touches no gradient.

    `Reduction` calls it as it calls a `Window`, which weighs losses: so it has the same methods, of which some do
    nothing. Here the engine averages the gradients, and one thing remains to be done. Lightning divides every loss by N
    (`accumulate_grad_batches`), so the losses of a window of fewer micro-batches are multiplied by N / length.

    Attributes:
        reduce: What reduces the parameters that the engine does not know. It is called after a window's last backward.
        has_ended: Whether the micro-batch that was added last ends the window; asked after its backward.
    """

    def __init__(self, reduce: Callable[[], None]) -> None:
        """Serve a model; `reduce`, a collective operation, averages what its engine does not know after a window."""
        self.reduce = reduce
        self.close()

    def close(self) -> None:
        """Begin an empty window."""
        self._micro_batches: list[MicroBatch] = []
        self._length = 1  # number of micro-batches that it will have
        self.has_ended = False

    def abandon(self) -> None:
        """Forget the window. Its gradients stay, as with stock DDP."""
        self.close()

    @property
    def is_empty(self) -> bool:
        """Whether the next micro-batch begins a window."""
        return not self._micro_batches

    def add(self, micro_batch: MicroBatch, *, ends: bool, divisor: float, length: int) -> float:
        """Count a micro-batch; return what its loss is multiplied by, 1 in full windows.

        Args:
            micro_batch: What is known of it.
            ends: Whether the window ends with it.
            divisor: N.
            length: How many micro-batches the window will have.
        """
        self._micro_batches.append(micro_batch)
        self._length = length
        self.has_ended = ends
        return divisor / length

    def begin_backward(self, **_: bool) -> None:
        """Do nothing: the gradients stay where stock has them."""

    def end_backward(self) -> None:
        """Do nothing, likewise."""

    def record(self) -> WindowRecord:
        """Return what a report says of the window: every micro-batch counts once, w = z = 1."""
        shares: list[Share] = []
        for micro_batch in self._micro_batches:
            counted = float(not micro_batch.absent)
            shares.append(Share(counted, counted))
        # The losses were divided by N, and multiplied by N / length: so this rank's gradient is a sum over the length.
        return WindowRecord(self._micro_batches, shares, float(self._length))
