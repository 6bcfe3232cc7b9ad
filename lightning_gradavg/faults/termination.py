"""How the ranks agree on signals, to end or to be queued again, without waiting for each other at every batch.

Lightning 2.6 has rank 0 broadcast before every batch whether to end, and every rank read that on the host: one more
wait per step, and an idle accelerator. Here all ranks' flags are reduced while a step runs, and read one step later.
All ranks end at the same step, the second one after the signal at the latest, whichever rank received it.

On SLURM's signal to be queued again, Lightning has every rank write a checkpoint in its signal handler, where ranks
wait for each other at different places. Here they do so together, in the same way.
"""

from __future__ import annotations

import logging
import signal
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gradavg._lightning.internals import signal_hooks
from lightning_gradavg._lightning.part import Part, Run
from lightning_gradavg._support.device import Tally
from lightning_gradavg.faults.last_words import TOGETHER

__all__ = ["Termination"]

_log = logging.getLogger(__name__)


class Termination(Part):
    """Takes the place of Lightning's agreement on termination in one fit, until `teardown`."""

    def __init__(self) -> None:
        self._hooks: list[tuple[Any, str]] = []
        self._under_way: Tally | None = None

    def configure_ddp(self, run: Run) -> None:
        """Take its place, before the trainer registers its signal handlers."""
        super().configure_ddp(run)
        self._received, self._under_way = False, None
        # Signals that this rank received, and that all ranks have answered.
        self._requeues = self._requeued = 0
        if run.world.size > 1:
            self._hooks = signal_hooks(run.trainer)
        for (owner, name), ours in zip(self._hooks, (self._agree, self._notice, self._notice_requeue), strict=False):
            setattr(owner, name, ours)

    def teardown(self) -> None:
        """Leave the trainer as it was."""
        hooks, self._hooks = self._hooks, []
        for owner, name in hooks:
            vars(owner).pop(name, None)
        # Every rank began it. In a run that failed there may be no answer, and the error is another.
        with suppress(RuntimeError):
            if dist.is_initialized():
                self._read()

    def _agree(self) -> None:
        """Begin a batch, or raise `SIGTERMException` on all ranks."""
        with torch.profiler.record_function("GradAvg: agree on termination"):
            ends, requeues = self._read()
            # The most, and not the sum: all ranks may receive one signal, at different steps.
            self._under_way = Tally([self._received, self._requeues], "max", self.run.device, self.run.world.group)
        if requeues > self._requeued:
            self._requeued = requeues
            self._requeue(signal.SIGUSR1, None)
        if ends:
            self._end()
            raise SIGTERMException(TOGETHER)

    def _end(self) -> None:
        (connector, _), _ = self._hooks[1:]
        connector.received_sigterm = True

    def _requeue(self, *signalled: Any) -> None:
        """Write a checkpoint and have SLURM queue the job again, as Lightning does."""
        connector, name = self._hooks[2]
        getattr(type(connector), name)(connector, *signalled)

    def _read(self) -> list[int]:
        """Return whether any rank was to end at the batch before, and the most signals to queue again that one had."""
        under_way, self._under_way = self._under_way, None
        return [0, 0] if under_way is None else under_way.read()

    def _notice(self, number: int, frame: FrameType | None) -> None:
        """Take notice of SIGTERM: no collective, which would meet any other one on the other ranks."""
        del frame
        trainer: Trainer = self.run.trainer
        _log.info("rank %d received %s", trainer.global_rank, signal.Signals(number).name)
        launcher: Any = trainer.strategy.launcher
        if launcher is not None and not self._received:
            launcher.kill(number)
        self._received = True
        if self._evaluates:
            self._end()

    @property
    def _evaluates(self) -> bool:
        """Whether the run evaluates, which knows no agreement, in Lightning neither."""
        return bool(self._hooks) and not self.run.trainer.training

    def _notice_requeue(self, number: int, frame: FrameType | None) -> None:
        """Take notice of SLURM's signal: the checkpoint is a matter of all ranks."""
        self._requeues += 1
        if self._evaluates:
            # What was answered here is not to be answered again.
            self._requeued = self._requeues
            self._requeue(number, frame)
