"""The faults that a run is watched for while it trains."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from itertools import count

from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor

from lightning_gradavg.faults.drift import require_replicas
from lightning_gradavg.faults.last_words import LastWords
from lightning_gradavg.part import Part, Run
from lightning_gradavg.ranks import by_value

__all__ = ["ComparedReplicas", "Faults", "faults_of"]

_log = logging.getLogger(__name__)

_RUNS = count()
"""Numbers the runs of this process, so that nobody hears what was said in an earlier one."""


class Faults(Part):
    """Has ranks that fail tell the others why, and compares where they go on from."""

    _last_words: LastWords | None = None
    _apart: bool | None = None

    def setup(self, run: Run) -> None:
        """Begin a run, in which ranks hear of each other's errors."""
        super().setup(run)
        number = next(_RUNS)
        self._last_words = LastWords(run.world, number) if run.world.size > 1 else None
        self._apart = None

    def ends_apart(self) -> bool:
        """Return whether the run ends by an exception that other ranks do not end by: these are waited for in vain."""
        error = sys.exc_info()[1]
        if self._last_words is None or error is None or self.run.trainer.state.status != TrainerStatus.INTERRUPTED:
            return False
        if self._apart is None:
            self._apart = not self._last_words.alike(error, self.run.trainer.global_step)
            if self._apart:
                rank = self.run.world.rank
                _log.warning("rank %d writes no checkpoint at its end: the other ranks do not end alike", rank)
        return self._apart

    def on_exception(self, exception: BaseException) -> str | None:
        """Tell the other ranks; return what they tell where an exchange with them broke, or None."""
        return None if self._last_words is None else self._last_words.say(exception)

    def on_train_start(self) -> None:
        """Compare the steps that a checkpoint has set.

        Raises:
            RuntimeError: On all ranks, if some go on from another step: they would end apart, and be waited for.
        """
        rows = self.run.world.gather_integers([self.run.trainer.global_step, self.run.trainer.current_epoch])
        if len({tuple(row) for row in rows}) > 1:
            found = by_value(f"{step} steps and {epoch} epochs" for step, epoch in rows)
            raise RuntimeError(
                f"the ranks do not go on from one checkpoint: training begins after {found}. Give all ranks the same"
                " ckpt_path, in a folder that all nodes see."
            )


class ComparedReplicas(Faults):
    """Compares the replicas, too: when training begins, at the end of every epoch, and every so many steps.

    Args:
        every: Optimizer steps from one comparison to the next.
        buffers: Whether the ranks hold the same buffers after every step.
    """

    def __init__(self, every: int, *, buffers: bool) -> None:
        self._every, self._buffers = every, buffers
        self._checked = 0, 0
        self._evaluated = False

    def on_train_start(self) -> None:
        """Compare what a checkpoint or the user has set."""
        super().on_train_start()
        self._check()

    def on_train_batch_start(self) -> None:
        """Compare after an epoch, and where it is due."""
        epoch, step = self._checked
        trainer = self.run.trainer
        if trainer.current_epoch != epoch or trainer.global_step - step >= self._every:
            self._check()
        self._evaluated = False

    def on_evaluation_start(self) -> None:
        """Note that ranks have batches of their own, which a module in training mode may leave in its buffers."""
        self._evaluated = True

    def on_train_end(self) -> None:
        """Compare after the last epoch."""
        self._check()

    def _check(self) -> None:
        run = self.run
        self._checked = run.trainer.current_epoch, run.trainer.global_step
        if run.world.size > 1:
            require_replicas(self._tensors(run), run.ddp.process_group, run.device, run.trainer.global_step)

    def _tensors(self, run: Run) -> Iterator[tuple[str, Tensor]]:
        alike = self._buffers and not self._evaluated
        kinds = [("parameter", run.module.named_parameters()), ("buffer", run.module.named_buffers())][: 1 + alike]
        named = ((kind, *each) for kind, tensors in kinds for each in tensors)
        return ((f"{kind} {name!r}", one) for kind, name, one in named if name not in run.ddp.parameters_to_ignore)


def faults_of(check_every: int | None, *, buffers: bool) -> Faults:
    """Return what watches a run, which compares the replicas unless `check_every` is None.

    Raises:
        ValueError: If it is below 1.
    """
    if check_every is None:
        return Faults()
    if check_every < 1:
        raise ValueError(f"check_replicas_every_n_steps must be an integer >= 1, or None, got {check_every}")
    return ComparedReplicas(check_every, buffers=buffers)
