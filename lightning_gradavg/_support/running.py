"""What is known of the forward that runs: which samples count in it, and what it has exchanged with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from lightning_gradavg._support.collectives import World

__all__ = ["OF_A_LOOP", "Forward", "running", "running_forward"]


@dataclass(frozen=True)
class Forward:
    """One forward of a training step, and its backward: of a rank's batch, or of one piece of it.

    Attributes:
        samples: The samples of this rank that count: 0 of a stand-in; None where only their batch tells the number.
        ranks_without_samples: The ranks that have no samples in the step.
        world: The ranks that exchange within it; None in a loop of the user's own, or in a run of one rank.
        normalizes_over_ranks: Whether batch norm takes the statistics of all ranks.
        refusal: Why nothing can be exchanged within it; "" if it can.
        in_backward: Returns the context in which its backward runs: checkpoints compute parts of it again there.
        exchanged: What the backward of the forward must reach: a tensor without data for each exchange that has a
            backward. A loss that is missing reaches them all (`reduction.uncounted.zero_loss`).
        hidden_exchanges: The exchanges of the forward whose backward no tensor reaches, in words.
    """

    samples: float | None = None
    ranks_without_samples: Sequence[int] = ()
    world: World | None = None
    normalizes_over_ranks: bool = False
    refusal: str = ""
    in_backward: Callable[[], AbstractContextManager[None]] = nullcontext
    exchanged: list[Tensor] = field(default_factory=list)
    hidden_exchanges: list[str] = field(default_factory=list)

    @property
    def stands_in(self) -> bool:
        """Whether this rank has no samples, and computes some that do not count."""
        return self.samples == 0

    def forget_exchanges(self) -> None:
        """Free the graph of what was exchanged."""
        self.exchanged.clear()
        self.hidden_exchanges.clear()


OF_A_LOOP = Forward()
"""Where no training step of a strategy runs: everything counts. It keeps no exchanges."""


class _Process:
    """State of the process, not of a thread as a context variable is.

    Backwards run on threads of autograd, and with them what `torch.utils.checkpoint` computes again
    (`test_ranks_batch_norm.py` runs its backwards on a thread).
    """

    forward = OF_A_LOOP


def running_forward() -> Forward:
    """Return the forward that runs, or whose backward does."""
    return _Process.forward


@contextmanager
def running(forward: Forward) -> Iterator[None]:
    """Run a forward, or its backward, within the context."""
    outer = _Process.forward
    _Process.forward = forward
    try:
        yield
    finally:
        _Process.forward = outer
