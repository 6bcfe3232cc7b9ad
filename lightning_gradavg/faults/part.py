"""The faults that a run is watched for while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from torch import Tensor

from lightning_gradavg.faults.drift import require_replicas
from lightning_gradavg.faults.last_words import LastWords
from lightning_gradavg.part import Part, Run
from lightning_gradavg.ranks import by_value

__all__ = ["Faults"]

_RUNS = count()
"""Numbers the runs of this process, so that nobody hears what was said in an earlier one."""


class Faults(Part):
    """Has ranks that fail tell the others why, and compares the replicas.

    They are compared when training begins, at the end of every epoch, and every so many steps.

    Args:
        check_every: Optimizer steps from one comparison to the next; None to compare nothing.
        buffers: Whether the ranks hold the same buffers after every step.

    Raises:
        ValueError: If `check_every` is below 1.
    """

    def __init__(self, check_every: int | None, *, buffers: bool) -> None:
        if check_every is not None and check_every < 1:
            raise ValueError(f"check_replicas_every_n_steps must be an integer >= 1, or None, got {check_every}")
        self._check_every, self._buffers = check_every, buffers
        self._checked = (0, 0)
        self._evaluated = False
        self._last_words: LastWords | None = None

    def setup(self, run: Run) -> None:
        """Begin a run, in which ranks hear of each other's errors."""
        super().setup(run)
        number = next(_RUNS)
        self._last_words = LastWords(run.world, number) if run.world.size > 1 else None

    def on_exception(self, exception: BaseException) -> str | None:
        """Tell the other ranks; return what they tell where an exchange with them broke, or None."""
        return None if self._last_words is None else self._last_words.say(exception)

    @property
    def _now(self) -> tuple[int, int]:
        trainer = self.run.trainer
        return trainer.current_epoch, trainer.global_step

    def on_train_start(self) -> None:
        """Compare what a checkpoint or the user has set.

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
        self._check()

    def on_train_batch_start(self) -> None:
        """Compare after an epoch, and where it is due."""
        if self._check_every is None:
            return
        (epoch, step), (checked_epoch, checked_step) = self._now, self._checked
        if epoch != checked_epoch or step - checked_step >= self._check_every:
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
        if self._check_every is None or run.world.size == 1:
            return
        self._checked = self._now
        require_replicas(self._tensors(run), run.ddp.process_group, run.device, self._checked[1])

    def _tensors(self, run: Run) -> Iterator[tuple[str, Tensor]]:
        ignored = run.ddp.parameters_to_ignore
        for name, parameter in run.module.named_parameters():
            if name not in ignored:
                yield f"parameter {name!r}", parameter
        for name, buffer in run.module.named_buffers() if self._buffers and not self._evaluated else ():
            if name not in ignored:
                yield f"buffer {name!r}", buffer
