"""What becomes of a step in which the reduced gradient is not finite, or a rank has no loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_gradavg.lightning_internals import stored
from lightning_gradavg.part import Run
from lightning_gradavg.ranks import by_value
from lightning_gradavg.reduction.window import Totals

__all__ = ["found_in_step"]


def found_in_step(
    totals: Totals, losses: Sequence[Tensor | None], gradients: Mapping[str, Tensor], run: Run
) -> str | None:
    """Return what is not finite, or which rank has no loss, the same on all ranks. The host waits for the gradients.

    Args:
        totals: What all ranks know of the window, on the host.
        losses: Those of its micro-batches that count; None where there is none.
        gradients: The reduced ones, the same on all ranks, by the parameters' names.
        run: The run.
    """
    # Read in one go.
    finite = [stored(gradient).isfinite().all() for gradient in gradients.values()]
    fine = torch.stack(finite).tolist() if finite else []
    bad = next((name for name, is_fine in zip(gradients, fine, strict=True) if not is_fine), None)
    if totals.without_loss == 0 and bad is None:
        return None
    of_ranks = run.world.gather_objects(_fault(losses))
    if not any(of_ranks):
        of_ranks = [f"the gradient of parameter {bad!r} is not finite"] * run.world.size
    return f"optimizer step {run.trainer.global_step}: {by_value(text or 'nothing' for text in of_ranks)}"


def _fault(losses: Sequence[Tensor | None]) -> str | None:
    if None in losses:
        return "training_step returned no loss"
    return None if all(bool(loss.isfinite().all()) for loss in losses if loss is not None) else "the loss is not finite"
