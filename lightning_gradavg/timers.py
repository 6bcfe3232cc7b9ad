"""How long gradients are reduced, by DDP's own timers: by the clock on CPU, by events on an accelerator."""

from __future__ import annotations

from typing import NamedTuple

from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg.lightning_internals import backward_times, time_backwards

__all__ = ["Communication", "DDPTimers"]


class Communication(NamedTuple):
    """How long one rank reduced gradients in one step, in seconds.

    Attributes:
        total: By DDP's timers from the start of the first reduction to the end of the last; by a trace while at least
            one collective ran. Waiting for slower ranks is included.
        overlapped: The part of it in which gradients were computed, too.
    """

    total: float
    overlapped: float

    @property
    def exposed(self) -> float:
        """The rest, which made the step longer."""
        return self.total - self.overlapped


class DDPTimers:
    """Has DDP time reductions. Reading an event waits for it, so no step is timed whose times nobody reads.

    Args:
        model: The wrapper.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model

    def start(self) -> None:
        """Time the next iteration; to be called before its forward."""
        time_backwards(self._model, every=1)

    def read(self) -> Communication:
        """Return the times of the iteration that just ended, 0 where DDP kept none, and time no further ones."""
        times = Communication(*backward_times(self._model))
        self.stop()
        return times

    def stop(self) -> None:
        """Put DDP's usual rate back, before the next forward would read the events of a step that nobody asked for."""
        time_backwards(self._model)
