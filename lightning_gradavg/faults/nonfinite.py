"""What becomes of a step in which a rank's loss or gradient is no finite number, or that gives no loss on a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gradavg.lightning_internals import stored
from lightning_gradavg.options import Options
from lightning_gradavg.part import Run
from lightning_gradavg.ranks import by_value

__all__ = ["NO_LOSS", "NonFinite", "Verdict", "refuse_unjudged"]

NO_LOSS = "training_step returned no loss"


class Verdict(NamedTuple):
    """What is done with a window, decided by all ranks together.

    Attributes:
        skips: Whether no rank takes the step.
        drops: Whether this rank's micro-batches do not count.
        dropped: Number of micro-batches of all ranks that do not count for this.
        explicit: Whether the others' weights were given by the user.
    """

    skips: bool = False
    drops: bool = False
    dropped: int = 0
    explicit: bool = False


class _Found(NamedTuple):
    """What a rank tells of its window: whether it is bad, its micro-batches that count, and more, as integers."""

    bad: int
    counted: int
    without_loss: int
    explicit: int


class NonFinite:
    """Judges windows, once per optimizer step. The host waits for the gradients.

    Args:
        policy: `"raise"`, `"skip_step"` or `"drop_rank"`.
        tell: Takes what is done about a step, on all ranks.
    """

    def __init__(self, policy: str, tell: Callable[[str], None]) -> None:
        self.policy, self._tell = policy, tell
        self._losses: list[Tensor] = []
        self._counted = 0

    def note(self, loss: Tensor | None) -> None:
        """Note the loss of a micro-batch that counts, or None where there is none."""
        self._counted += 1
        self._losses += [] if loss is None else [loss.detach()]

    def judge(self, gradients: Iterable[tuple[str, Tensor]], run: Run, *, explicit: bool) -> Verdict:
        """Return what is done with the window that ends. A collective operation.

        Args:
            gradients: What this rank accumulated, by the parameters' names.
            run: The run.
            explicit: Whether this rank's weights were given by the user.

        Raises:
            RuntimeError: On all ranks, if a rank has a problem under `"raise"`.
        """
        world, problem = run.world, self._problem(gradients, run.device)
        mine = _Found(problem is not None, self._counted, problem == NO_LOSS, explicit)
        self._losses, self._counted = [], 0
        found = [_Found(*row) for row in world.gather_integers(mine)]
        good = [each for each in found if not each.bad]
        if len(good) == world.size:
            return Verdict()
        # Without a loss on any rank nothing is lost: Lightning's own way to leave a batch out.
        if all(each.without_loss for each in found):
            return Verdict(skips=True)
        problems = by_value(text or "nothing" for text in world.gather_objects(problem))
        what = f"optimizer step {run.trainer.global_step}: {problems}"
        if self.policy == "raise":
            raise RuntimeError(
                f"{what}. With nonfinite='skip_step' all ranks leave such a step out, with 'drop_rank' the rank alone."
            )
        counted = sum(each.counted for each in good)
        skips = self.policy == "skip_step" or counted == 0
        done = "all ranks leave the step out" if skips else "what is no number does not count"
        self._tell(f"GradAvgStrategy: {what}; nonfinite={self.policy!r}: {done}")
        dropped = sum(each.counted for each in found) - counted
        return Verdict(skips, problem is not None, dropped, any(each.explicit for each in good))

    def _problem(self, gradients: Iterable[tuple[str, Tensor]], device: torch.device) -> str | None:
        if len(self._losses) < self._counted:
            return NO_LOSS
        named = [("the loss", loss) for loss in self._losses]
        named += [(f"the gradient of parameter {name!r}", stored(gradient)) for name, gradient in gradients]
        finite = [tensor.isfinite().all().to(device) for _, tensor in named]
        # Read in one go.
        read = torch.stack(finite).tolist() if finite else []
        return next((f"{text} is not finite" for (text, _), fine in zip(named, read, strict=True) if not fine), None)


def refuse_unjudged(options: Options, given: Mapping[str, Any]) -> None:
    """Raise a ValueError where steps are to be judged, and cannot be.

    Args:
        options: What the user's options come to.
        given: The options of the constructor.
    """
    option = f"nonfinite={given['nonfinite']!r}"
    if given["nonfinite"] == "propagate":
        return
    if given["static_graph"]:
        raise ValueError(f"{option} lets DDP see other backwards than the model's: leave static_graph=True out.")
    if given["reproducible"]:
        raise ValueError(f"{option} drops what reproducible=True adds up in one order: leave one of them out.")
    counts_ranks = not options.rule.uses_weight and options.rule.name not in ("mean", "sum")
    if given["nonfinite"] == "drop_rank" and counts_ranks:
        raise ValueError(
            f"{option} leaves ranks out, which reduction={options.rule.name!r} counts. Use 'mean', 'sum' or a rule with"
            " weights, or nonfinite='skip_step'."
        )
