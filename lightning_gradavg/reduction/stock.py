"""The mean that stock DDP accumulates and reduces by itself, without a hook, and what is left to do beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch.distributed as dist
from torch import Tensor, nn

from lightning_gradavg.reduction.average import average_gradients
from lightning_gradavg.reduction.loss import WeighedLoss, gradients_discarded
from lightning_gradavg.reduction.window import MicroBatch

__all__ = ["StockMean"]


class StockMean:
    """Completes short windows, and reduces what DDP does not know. Answers what `Accumulation` does.

    Args:
        parameters: Those of the module.
    """

    on_gather = closed = None
    crosses_ranks = False
    pending = 0

    def __init__(self, parameters: Sequence[nn.Parameter] = ()) -> None:
        self.parameters, self._length = parameters, 0

    def reset(self) -> None:
        """Begin a window."""
        self._length = 0

    def weigh(self, terms: Mapping[str, Tensor], micro_batch: MicroBatch) -> WeighedLoss:
        """Return the sum of the terms."""
        return WeighedLoss.plain(terms, micro_batch)

    def backward(
        self,
        loss: WeighedLoss,
        run: Callable[..., None],
        *,
        last: bool,
        loss_divisor: float,
    ) -> None:
        """Run a micro-batch's backward; the mean of a short window is that over what it has."""
        self._length += 1
        with gradients_discarded(self.parameters) if loss.micro_batch.absent else nullcontext():
            run()
        for parameter in self.parameters if last and self._length < loss_divisor else ():
            if parameter.grad is not None and parameter.requires_grad:
                parameter.grad.mul_(loss_divisor / self._length)

    def reduce_apart(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        """Average gradients that DDP does not know."""
        average_gradients(parameters, group=group)

    def pause(self) -> None:
        """Go on with the window."""

    def finish(self) -> None:
        """End the window."""

    def check(self) -> None:
        """Find nothing to raise."""
