"""How the ranks of a run agree to end on SIGTERM, without a wait for each other at every batch.

Lightning 2.6 has rank 0 broadcast at the begin of every batch whether it is to end, and every rank read that on the
host. So the ranks wait for each other once more per step, and an accelerator runs empty. Here the flags of all ranks
are added up while a step runs, and the sum is read one step later, when it is long there: all ranks end at the same
step, at the latest the second one to begin after the signal, whichever rank received it.
"""

from __future__ import annotations

import logging
import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gradavg.device import HostCopy, current_stream, new_stream, on_device, within
from lightning_gradavg.lightning_internals import SigtermHooks
from lightning_gradavg.part import Part, Run

__all__ = ["Termination"]

_log = logging.getLogger(__name__)


class Termination(Part):
    """Takes the place of Lightning's agreement on termination in one fit, until `teardown`."""

    def __init__(self) -> None:
        self._hooks: SigtermHooks | None = None
        self._under_way: tuple[dist.Work, torch.Tensor, HostCopy | None] | None = None

    def configure_ddp(self, run: Run) -> None:
        """Take its place, before the trainer registers its signal handlers."""
        super().configure_ddp(run)
        self._received, self._under_way = False, None
        self._stream = new_stream(run.device)
        if run.world.size > 1:
            self._hooks = SigtermHooks.of(run.trainer)
        if self._hooks is not None:
            self._hooks.replace(self._agree, self._notice)

    def teardown(self) -> None:
        """Leave the trainer as it was."""
        hooks, self._hooks = self._hooks, None
        if hooks is None:
            return
        hooks.restore()
        # Every rank began it.
        if dist.is_initialized():
            self._read()

    def _agree(self) -> None:
        """Begin a batch, or raise `SIGTERMException` on all ranks."""
        raised = self._read()
        self._under_way = self._send()
        if raised:
            assert self._hooks is not None
            self._hooks.received = True
            raise SIGTERMException

    def _send(self) -> tuple[dist.Work, torch.Tensor, HostCopy | None]:
        """Begin to add up the flags of all ranks."""
        device = self.run.device
        flag = on_device(torch.tensor([self._received], dtype=torch.int32), device)
        work = dist.all_reduce(flag, async_op=True)
        if self._stream is None:
            return work, flag, None
        # Not the stream of the model, which would wait for the other ranks before its forward.
        self._stream.wait_stream(current_stream(device))
        with within(self._stream):
            work.wait()
            return work, flag, HostCopy(flag)

    def _read(self) -> bool:
        """Return whether any rank's flag of the batch before was up; false before there is one."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return False
        work, flag, copy = under_way
        if copy is None:
            work.wait()
            copy = HostCopy(flag)
        return bool(copy.read()[0])

    def _notice(self, number: int, frame: FrameType | None) -> None:
        """Take notice of SIGTERM: no collective, which would meet any other one on the other ranks."""
        del frame
        trainer: Trainer = self.run.trainer
        _log.info("rank %d received %s", trainer.global_rank, signal.Signals(number).name)
        launcher: Any = trainer.strategy.launcher
        if launcher is not None and not self._received:
            launcher.kill(number)
        self._received = True
        if not trainer.training and self._hooks is not None:
            # Evaluation knows no agreement, in Lightning neither.
            self._hooks.received = True
