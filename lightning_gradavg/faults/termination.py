"""How the ranks agree on signals, to end or to be queued again, without waiting for each other at every batch.

Lightning 2.6 has rank 0 broadcast before every batch whether to end, and every rank read that on the host: one more
wait per step, and an idle accelerator. Here all ranks' flags are reduced while a step runs, and read one step later.
All ranks end at the same step, the second one after the signal at the latest, whichever rank received it.

On SLURM's signal to be queued again, Lightning has every rank write a checkpoint in its signal handler, where ranks
wait for each other at different places. Here they do so together, in the same way.

    configure_ddp            takes the place of three methods of Lightning
        _note_sigterm        in a signal handler, on the rank that received SIGTERM
        _note_requeue        in a signal handler, on the rank that received SLURM's signal
        _agree               before each batch, on all ranks: reads the exchange of the batch before, begins another
    teardown                 gives Lightning its methods back, and ends the last exchange
"""

from __future__ import annotations

import logging
import signal
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gradavg._lightning.internals import SignalHooks, signal_hooks
from lightning_gradavg._lightning.part import Part, Run
from lightning_gradavg._support.collectives import ReducedRow
from lightning_gradavg.faults.failure_reports import TOGETHER

__all__ = ["Termination"]

_log = logging.getLogger(__name__)


class _Signals(NamedTuple):
    """What ranks received until a batch: the largest numbers of all ranks."""

    sigterm: int  # 1 if a rank received SIGTERM
    requeues: int  # SLURM's signals that one rank received


class Termination(Part):
    """Takes the place of Lightning's agreement on termination in one fit, until `teardown`."""

    def __init__(self) -> None:
        self._hooks: SignalHooks | None = None
        self._exchange: ReducedRow | None = None  # begun before the last batch

    def configure_ddp(self, run: Run) -> None:
        """Take the place of Lightning's methods, before the trainer registers its signal handlers."""
        super().configure_ddp(run)
        self._received_sigterm = False
        self._received_requeues = 0  # on this rank
        self._answered_requeues = 0  # by all ranks
        self._exchange = None
        if run.world.size == 1:
            return
        self._hooks = signal_hooks(run.trainer)
        if self._hooks is not None:
            methods = (self._agree, self._note_sigterm, self._note_requeue)
            for (owner, name), method in zip(self._hooks, methods, strict=True):
                setattr(owner, name, method)

    def teardown(self) -> None:
        """Leave the trainer as it was."""
        if self._hooks is not None:
            for owner, name in self._hooks:
                vars(owner).pop(name, None)  # the method of the class shows again
        self._hooks = None
        # Every rank began the exchange. In a run that failed there may be no answer, and the error is another.
        with suppress(RuntimeError):
            if dist.is_initialized():
                self._read()

    def _agree(self) -> None:
        """Begin a batch, or raise `SIGTERMException` on all ranks. It replaces `_broadcast_sigterm_tensor`."""
        with torch.profiler.record_function("GradAvg: agree on termination"):
            signals = self._read()
            # The most requeues, and not the sum: all ranks may receive one signal, at different steps.
            row = [self._received_sigterm, self._received_requeues]
            self._exchange = ReducedRow(row, "max", self.run.device, self.run.world.group)
        if signals.requeues > self._answered_requeues:
            self._answered_requeues = signals.requeues
            self._requeue(signal.SIGUSR1, None)
        if signals.sigterm:
            self._end()
            raise SIGTERMException(TOGETHER)

    def _read(self) -> _Signals:
        """Return what all ranks had received before the last batch. It waits for their exchange."""
        exchange = self._exchange
        self._exchange = None
        if exchange is None:
            return _Signals(sigterm=0, requeues=0)
        sigterm, requeues = exchange.read()
        return _Signals(sigterm, requeues)

    def _note_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Note SIGTERM: no collective, which would meet any other one on the other ranks.

        It replaces `_sigterm_notifier_fn`, which hands the signal on to the processes that the launcher started, too.
        """
        del frame
        trainer: Trainer = self.run.trainer
        _log.info("rank %d received %s", trainer.global_rank, signal.Signals(number).name)
        launcher: Any = trainer.strategy.launcher
        if launcher is not None and not self._received_sigterm:
            launcher.kill(number)
        self._received_sigterm = True
        if self._evaluates:
            self._end()

    def _note_requeue(self, number: int, frame: FrameType | None) -> None:
        """Note SLURM's signal: the checkpoint is a matter of all ranks. It replaces `_slurm_sigusr_handler_fn`."""
        self._received_requeues += 1
        if self._evaluates:
            # What is answered here is not to be answered again.
            self._answered_requeues = self._received_requeues
            self._requeue(number, frame)

    @property
    def _evaluates(self) -> bool:
        """Whether the run evaluates. Then no rank agrees before a batch, in Lightning neither."""
        return self._hooks is not None and not self.run.trainer.training

    def _end(self) -> None:
        """Have Lightning end the run as after its own agreement."""
        assert self._hooks is not None
        self._hooks.on_sigterm.owner.received_sigterm = True

    def _requeue(self, number: int, frame: FrameType | None) -> None:
        """Write a checkpoint and have SLURM queue the job again, by Lightning's own method."""
        assert self._hooks is not None
        connector, name = self._hooks.on_requeue
        getattr(type(connector), name)(connector, number, frame)
