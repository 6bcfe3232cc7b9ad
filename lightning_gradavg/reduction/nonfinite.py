"""What becomes of a step in which a rank's loss or the reduced gradient is not finite, or a rank has no loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lightning_gradavg.lightning_internals import stored
from lightning_gradavg.part import Run
from lightning_gradavg.ranks import by_value
from lightning_gradavg.reduction.window import Totals

__all__ = ["NO_LOSS", "NonFinite"]

NO_LOSS = "training_step returned no loss"


class NonFinite:
    """Judges reduced windows, once per optimizer step, by `"raise"` or `"skip_step"`. The host waits for gradients."""

    def __init__(self, policy: str, tell: Callable[[str], None]) -> None:
        self.policy, self._tell = policy, tell
        self.reset()

    def reset(self) -> None:
        """Forget a window that was not judged."""
        self._losses: list[Tensor | None] = []

    def note(self, loss: Tensor | None) -> None:
        """Note the loss of a micro-batch that counts, or None if there is none."""
        self._losses.append(None if loss is None else loss.detach())

    def problem(self) -> str | None:
        """Return what is wrong with this rank's losses of the window, and forget them."""
        losses, self._losses = self._losses, []
        if any(loss is None for loss in losses):
            return NO_LOSS
        finite = torch.stack([loss.isfinite().all() for loss in losses if loss is not None]) if losses else None
        return None if finite is None or bool(finite.all()) else "the loss is not finite"

    def skips(self, totals: Totals, problem: str | None, gradients: Iterable[tuple[str, Tensor]], run: Run) -> bool:
        """Return whether all ranks skip the step, or raise a RuntimeError on all ranks under `"raise"`.

        Args:
            totals: What all ranks know of the window, on the host.
            problem: What is wrong with this rank's losses.
            gradients: The reduced ones, by the parameters' names.
            run: The run.
        """
        if totals.without_loss == run.world.size:
            return True  # nothing is lost: Lightning's own way to leave a batch out
        if totals.bad == 0:
            problem = _not_finite(gradients)
            if problem is None:
                return False
        problems = by_value(text or "nothing" for text in run.world.gather_objects(problem))
        what = f"optimizer step {run.trainer.global_step}: {problems}"
        if self.policy == "raise":
            raise RuntimeError(
                f"{what}. With nonfinite='skip_step' all ranks skip such a step; a loss of weight 0 leaves one"
                " micro-batch out."
            )
        self._tell(f"GradAvgStrategy: {what}; nonfinite={self.policy!r}: all ranks skip the step")
        return True


def _not_finite(gradients: Iterable[tuple[str, Tensor]]) -> str | None:
    named = list(gradients)
    # Read in one go.
    finite = torch.stack([stored(gradient).isfinite().all() for _, gradient in named]).tolist() if named else []
    bad = [name for (name, _), fine in zip(named, finite, strict=True) if not fine]
    return f"the gradient of parameter {bad[0]!r} is not finite" if bad else None
