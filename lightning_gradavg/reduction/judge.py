"""`nonfinite=`: all ranks decide together whether an optimizer step is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_gradavg._lightning.internals import stored
from lightning_gradavg._lightning.part import Run
from lightning_gradavg._support.text import by_value

__all__ = ["Judge"]


class Judge:
    """Decides after the reduction whether all ranks skip a step, or raise.

        | ranks without a loss | the reduced gradient | the step                                                   |
        |----------------------|----------------------|------------------------------------------------------------|
        | all                  | is 0                 | is skipped without a word, as Lightning does itself        |
        | none                 | is finite            | is taken                                                   |
        | none                 | is not finite        | is skipped with a message, or all ranks raise (`"raise"`)  |
        | some                 | whatever             | the same                                                   |

    All ranks have the same reduced gradient and the same count of losses, so they decide alike without an exchange. One
    follows only to name what is wrong. The calls: `begin_window`, `note_loss` for each micro-batch, `skips`.
    """

    def __init__(self, nonfinite: str, run: Run, inform: Callable[[str], None]) -> None:
        """Judge the steps of a run; `nonfinite` is `"raise"` or `"skip_step"`, `inform` gives the user a message."""
        self._nonfinite = nonfinite
        self._run = run
        self._inform = inform
        self._losses: list[Tensor | None] = []  # of the window so far, on this rank

    def begin_window(self) -> None:
        """Forget the losses of a window that an epoch cut off."""
        self._losses = []

    def note_loss(self, loss: Tensor | None) -> None:
        """Note the loss of a micro-batch, None if `training_step` returned none."""
        if loss is None:
            self._losses.append(None)
        else:
            # Its value is read only in a step whose gradient is not finite: reading it now would wait for the forward.
            self._losses.append(loss.detach())

    def skips(self, ranks_without_loss: int) -> bool:
        """Return whether all ranks skip the step, or raise a RuntimeError on all. The host waits for the gradients."""
        losses = self._losses
        self._losses = []
        # The rows of the table, from the top.
        if ranks_without_loss == self._run.world.size:
            return True
        # The sum over ranks is not finite wherever one rank's gradient is not, so each rank reads its own copy.
        name = self._first_nonfinite()
        if ranks_without_loss == 0 and name is None:
            return False
        found = f"optimizer step {self._run.trainer.global_step}: {self._found(losses, name)}"
        if self._nonfinite == "raise":
            raise RuntimeError(
                f"{found}. With nonfinite='skip_step' all ranks skip such a step; a loss of weight 0 leaves one"
                " micro-batch out."
            )
        self._inform(f"GradAvgStrategy: {found}; nonfinite={self._nonfinite!r}: all ranks skip the step")
        return True

    def _first_nonfinite(self) -> str | None:
        """Return the name of the first parameter whose gradient is not finite."""
        names: list[str] = []
        finite: list[Tensor] = []
        with torch.profiler.record_function("GradAvg: check gradients"):
            for name, parameter in self._run.module.named_parameters():
                if parameter.grad is not None:
                    names.append(name)
                    finite.append(stored(parameter.grad).isfinite().all())
            if not finite:
                return None
            # One wait for the device instead of one for each parameter.
            for name, is_finite in zip(names, torch.stack(finite).tolist(), strict=True):
                if not is_finite:
                    return name
        return None

    def _found(self, losses: Sequence[Tensor | None], name: str | None) -> str:
        """Return what is wrong with the losses of the ranks, or else with a gradient. A collective operation."""
        world = self._run.world
        fault_of_rank: list[str | None] = world.gather_objects(_fault(losses))
        # If all losses are finite, the gradient is to blame: a derivative may be infinite, or the sum may overflow.
        if any(fault_of_rank):
            return by_value(fault or "nothing" for fault in fault_of_rank)
        return by_value([f"the gradient of parameter {name!r} is not finite"] * world.size)


def _fault(losses: Sequence[Tensor | None]) -> str | None:
    """Return what is wrong with a rank's losses, or None."""
    # A missing loss first: it is the cause where both are found.
    for loss in losses:
        if loss is None:
            return "training_step returned no loss"
    for loss in losses:
        if loss is not None and not bool(loss.isfinite().all()):
            return "the loss is not finite"
    return None
