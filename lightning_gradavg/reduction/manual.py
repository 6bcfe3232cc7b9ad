"""Steps of a manual loop on gradients that no `manual_backward` reduced: the ranks would drift apart unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gradavg.ranks import World, on_ranks
from lightning_gradavg.reduction.sums import as_real

__all__ = ["ManualSteps"]


class ManualSteps:
    """Notes steps on gradients that were not reduced, and compares them where all ranks are, whichever stepped so."""

    def __init__(self, world: World, rule: str, warn: Callable[[str], None]) -> None:
        self._world, self._rule, self._warn = world, rule, warn
        self._batches = self._reductions = 0
        self._reductions_at_step: dict[int, int] = {}
        # Of steps since the last comparison: how many, a number of their gradients, and the optimizer of the last.
        self._noted, self._stepped = [0.0, 0.0], ""

    def begin_batch(self) -> None:
        """Compare at the first batches of a run and then ever more seldom, as it takes a wait for the other ranks."""
        if self._batches & (self._batches - 1) == 0:
            self.compare()
        self._batches += 1

    def note_reduction(self) -> None:
        """Note that a window was reduced."""
        self._reductions += 1

    def note_step(self, optimizer: Optimizer) -> None:
        """Note a step on gradients that no `manual_backward` reduced since the optimizer's last one."""
        before = self._reductions_at_step.get(id(optimizer), 0)
        self._reductions_at_step[id(optimizer)] = self._reductions
        if before < self._reductions or self._world.size == 1:
            return
        found = _number_of(parameter.grad for group in optimizer.param_groups for parameter in group["params"])
        if found != 0:
            steps, total = self._noted
            self._noted = [steps + 1, total + (steps + 1) * found]
            self._stepped = type(optimizer).__name__

    def compare(self) -> None:
        """Compare the steps that were noted. A collective operation.

        Raises:
            RuntimeError: On all ranks, if their gradients differ: the ranks would drift apart.
        """
        stepped = self._stepped
        found = self._world.gather_objects((str(self._noted), stepped))  # as texts: NaN equals NaN
        self._noted, self._stepped = [0.0, 0.0], ""
        noted, names = zip(*found, strict=True)
        what = f"{max(names)}.step() was called on gradients that were not reduced since its last step"
        if len(set(noted)) > 1:
            where = on_ranks([rank for rank, name in enumerate(names) if name])
            raise RuntimeError(
                f"{what}, and they differ between the ranks, which would drift apart: it was called {where}."
                " In manual optimization call self.manual_backward(loss) instead of loss.backward(), end every"
                " window with a backward outside of toggle_model(sync_grad=False), and step on all ranks."
            )
        if stepped:
            self._warn(
                f"{what}. They are the same on all ranks, so nothing drifts apart; reduction={self._rule!r} is not"
                " applied to them. Further steps are compared, and only a difference is reported."
            )


def _number_of(gradients: Iterable[Tensor | None]) -> float:
    """Return a number that other gradients hardly have; 0 for none."""
    total = 0.0
    for index, gradient in enumerate(gradients, start=1):
        if gradient is not None:
            numbers = as_real(gradient.coalesce().values() if gradient.is_sparse else gradient).double().flatten()
            # Weighed by position: -1, 1 is another gradient than 1, -1.
            places = torch.linspace(1, 2, numbers.numel(), dtype=numbers.dtype, device=numbers.device)
            total += index * float(torch.dot(numbers, places))
    return total
