"""What becomes of a step in which the reduced gradient is not finite, or a rank has no loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lightning_gradavg.lightning_internals import stored
from lightning_gradavg.part import Run
from lightning_gradavg.ranks import by_value
from lightning_gradavg.reduction.window import Totals

__all__ = ["NonFinite"]


class NonFinite:
    """Judges reduced windows, once per optimizer step, by `"raise"` or `"skip_step"`. The host waits for gradients.

    Attributes:
        losses: Those of the window's micro-batches that count; None where there is none.
    """

    def __init__(self, policy: str, tell: Callable[[str], None]) -> None:
        self.policy, self._tell = policy, tell
        self.losses: list[Tensor | None] = []

    def skips(self, totals: Totals, gradients: Mapping[str, Tensor], run: Run) -> bool:
        """Return whether all ranks skip the step, or raise a RuntimeError on all ranks under `"raise"`.

        Args:
            totals: What all ranks know of the window, on the host.
            gradients: The reduced ones, the same on all ranks, by the parameters' names.
            run: The run.
        """
        losses, self.losses = self.losses, []
        if totals.without_loss == run.world.size:
            return True  # nothing is lost: Lightning's own way to leave a batch out
        # Read in one go.
        finite = [stored(gradient).isfinite().all() for gradient in gradients.values()]
        fine = torch.stack(finite).tolist() if finite else []
        bad = next((name for name, is_fine in zip(gradients, fine, strict=True) if not is_fine), None)
        if totals.without_loss == 0 and bad is None:
            return False
        of_ranks = run.world.gather_objects(_fault(losses))
        if not any(of_ranks):
            of_ranks = [f"the gradient of parameter {bad!r} is not finite"] * run.world.size
        what = f"optimizer step {run.trainer.global_step}: {by_value(text or 'nothing' for text in of_ranks)}"
        if self.policy == "raise":
            raise RuntimeError(
                f"{what}. With nonfinite='skip_step' all ranks skip such a step; a loss of weight 0 leaves one"
                " micro-batch out."
            )
        self._tell(f"GradAvgStrategy: {what}; nonfinite={self.policy!r}: all ranks skip the step")
        return True


def _fault(losses: list[Tensor | None]) -> str | None:
    if None in losses:
        return "training_step returned no loss"
    return None if all(bool(loss.isfinite().all()) for loss in losses if loss is not None) else "the loss is not finite"
