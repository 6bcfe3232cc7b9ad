"""The reduction of a run whose bits do not depend on the number of ranks.

Every backward stays on its rank. A replica's gradient is what its own micro-batches of the window add up to, one after
another; its weight multiplies the loss as it is, as a unit would follow from weights that a resumed run has not seen.
After the last backward of a window all replicas are added up by the tree. Their weights travel with the totals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_gradavg.part import Run
from lightning_gradavg.reduction.reduction import Reduction
from lightning_gradavg.reduction.weights import WHOLE_LOSS, WeighedLoss
from lightning_gradavg.reproducible.sum import Gradients, TreeSum

__all__ = ["TreeReduction"]


class TreeReduction(Reduction):
    """Reduces the gradients of so many replicas of each loader batch in one order on any number of ranks."""

    def __init__(self, *given: Any, replicas: int, **named: Any) -> None:
        super().__init__(*given, **named)
        self._replicas = replicas

    def configure_ddp(self, run: Run) -> None:
        """Begin a run that trains. Number each rank's replicas."""
        super().configure_ddp(run)
        each, rank = self._replicas // run.world.size, run.world.rank
        self._held = range(rank * each, (rank + 1) * each)
        self._trained: list[nn.Parameter] = []
        self._forget()

    def _forget(self) -> None:
        self.window.reset()
        self._leaves: dict[int, Gradients] = {}
        self._normalizers = [0.0] * self._replicas
        self._ends = False

    def _pend(self, loss: WeighedLoss) -> WeighedLoss:
        """Multiply losses by their weights as they are: the backward adds them to the window."""
        self.pending = loss
        return loss

    def begin_step(self, batch: Any, missing: int = 0) -> None:
        """Note the batch of a training step, of which the rank's first replica comes next."""
        super().begin_step(batch, missing)
        self._position = 0

    def _backward(self, loss: WeighedLoss, run: Callable[[], None], *, last: bool, final: bool) -> None:  # noqa: ARG002  # as above
        """Run the backward of the rank's next replica, and keep its gradients apart."""
        window, replica = self.window, self._held[self._position]
        if self._position == 0 and self._begins_window:
            self._forget()
        self._position += 1
        self._ends = last
        if tuple(loss.micro_batch.weights) != (WHOLE_LOSS,):
            raise ValueError(
                "reproducible=True serves one weight for the whole loss, got one for each of"
                f" {', '.join(map(repr, loss.micro_batch.weights))}. Return one number, or leave reproducible out."
            )
        micro_batch = window.add(loss.micro_batch.read())
        (share,) = micro_batch.shares.values()
        nothing = micro_batch.absent or micro_batch.problem is not None
        loss.coefficients[:] = [None if nothing or share.multiplier == 0 else float(share.multiplier)]
        kept = self._gradients()
        self._set_gradients({} if nothing else self._leaves.get(replica, {}))
        try:
            run()
            if not nothing:
                self._leaves[replica] = self._gradients()
                self._normalizers[replica] += float(share.normalizer)
        finally:
            self._set_gradients(kept)
        if not self._holding:
            # It is complete. The loader batch at the end of the window may have no samples of those behind it.
            for complete in self._held[self._position - 1 :] if self._ends else (replica,):
                self._add_leaf(complete)
        if self._ends:
            window.exchange(self._normalizers)

    def _add_leaf(self, replica: int) -> None:
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        if replica == self._held[0] and [*map(id, trained)] != [*map(id, self._trained)]:
            self._trained = trained
            self._sum = TreeSum(trained, replicas=self._replicas, world=self.run.world)
        self._sum.add(replica, self._leaves.pop(replica, {}))

    def _gradients(self) -> Gradients:
        return {id(one): one.grad for one in self._parameters if one.grad is not None}

    def _set_gradients(self, gradients: Mapping[int, Tensor]) -> None:
        for parameter in self._parameters:
            parameter.grad = gradients.get(id(parameter))

    def _reduce(self) -> bool:
        if not self._ends:
            return False
        totals = self.window.totals()
        total = math.fsum(totals.more) if self.rule.uses_weight else 1.0  # exactly rounded, so that no order shows
        self.window.divided_by = float(self.window.divisor)
        sums = self._sum.gradients(self.window.divisor / total if total > 0 else 0.0)
        kept = self._gradients()
        for key in kept.keys() & sums.keys():
            sums[key].add_(kept[key])
        self._set_gradients({**kept, **sums})
        if self._lost:
            self._require_lost()
        return False

    def _end_window(self) -> None:
        if self._ends:
            self._forget()
