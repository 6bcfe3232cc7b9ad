"""What becomes of a step in which the reduced gradient is not finite, or a rank has no loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lightning_gradavg.lightning_internals import stored
from lightning_gradavg.part import Run
from lightning_gradavg.ranks import by_value
from lightning_gradavg.reduction.window import Totals

__all__ = ["NonFinite"]

_NO_LOSS = "training_step returned no loss"


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

    def skips(self, totals: Totals, gradients: Iterable[tuple[str, Tensor]], run: Run) -> bool:
        """Return whether all ranks skip the step, or raise a RuntimeError on all ranks under `"raise"`.

        Args:
            totals: What all ranks know of the window, on the host.
            gradients: The reduced ones, the same on all ranks, by the parameters' names.
            run: The run.
        """
        losses, self._losses = self._losses, []
        if totals.without_loss == run.world.size:
            return True  # nothing is lost: Lightning's own way to leave a batch out
        of_gradients = _not_finite(gradients)
        if totals.without_loss == 0 and of_gradients is None:
            return False
        of_losses = run.world.gather_objects(_problem(losses))
        found = (text or "nothing" for text in of_losses) if any(of_losses) else [of_gradients] * run.world.size
        what = f"optimizer step {run.trainer.global_step}: {by_value(found)}"
        if self.policy == "raise":
            raise RuntimeError(
                f"{what}. With nonfinite='skip_step' all ranks skip such a step; a loss of weight 0 leaves one"
                " micro-batch out."
            )
        self._tell(f"GradAvgStrategy: {what}; nonfinite={self.policy!r}: all ranks skip the step")
        return True


def _problem(losses: Sequence[Tensor | None]) -> str | None:
    if any(loss is None for loss in losses):
        return _NO_LOSS
    return None if all(bool(loss.isfinite().all()) for loss in losses if loss is not None) else "the loss is not finite"


def _not_finite(gradients: Iterable[tuple[str, Tensor]]) -> str | None:
    named = list(gradients)
    # Read in one go.
    finite = torch.stack([stored(gradient).isfinite().all() for _, gradient in named]).tolist() if named else []
    bad = [name for (name, _), fine in zip(named, finite, strict=True) if not fine]
    return f"the gradient of parameter {bad[0]!r} is not finite" if bad else None
