"""How the ranks of a run agree to end on SIGTERM, without a wait for each other at every batch.

Lightning 2.6 has rank 0 broadcast at the begin of every batch whether it is to end, and every rank read that on the
host. So the ranks wait for each other once more per step, and an accelerator runs empty. Here the flags of all ranks
are added up while a step runs, and the sum is read one step later, when it is long there: all ranks end at the same
step, at the latest the second one to begin after the signal, whichever rank received it. Where a step exchanges the
totals of its weights anyway, the flags travel with them, and cost nothing; on an accelerator these are read a step
later, and it is the third.
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
from torch import Tensor

from lightning_gradavg.reduction.reducer import Reducer

__all__ = ["Termination"]

_BROADCAST = "_broadcast_sigterm_tensor"
_NOTIFIER = "_sigterm_notifier_fn"

_log = logging.getLogger(__name__)


class _Flag:
    """The sum of all ranks' flags, on its way to the host."""

    def __init__(self, raised: bool, device: torch.device) -> None:
        flag = torch.full((1,), int(raised), dtype=torch.int32, device=device)
        self._value: Tensor = flag
        self._work = dist.all_reduce(flag, async_op=True)
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            assert self._work is not None
            self._work.wait()  # of the stream, not of the host
            copy = torch.empty(1, dtype=torch.int32, pin_memory=True)
            self._value = copy.copy_(flag, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> bool:
        if self._event is not None:
            self._event.synchronize()
        elif self._work is not None:
            self._work.wait()
        return bool(self._value.item())


class Termination:
    """Takes the place of Lightning's agreement on termination in one trainer, until `remove`.

    Args:
        trainer: The trainer, before it registers its signal handlers.
        device: Where the collectives of the process group work.
        reducer: What exchanges totals over the same ranks, perhaps not in every step; or None.
    """

    def __init__(self, trainer: Trainer, device: torch.device, reducer: Reducer | None = None) -> None:
        self._trainer = trainer
        self._device = device
        self._reducer = reducer
        self._exchanged = 0
        self._received = False
        self._under_way: _Flag | None = None
        self._loop: Any = trainer.fit_loop.epoch_loop
        self._connector: Any = trainer._signal_connector
        setattr(self._loop, _BROADCAST, self._agree)
        setattr(self._connector, _NOTIFIER, self._notice)

    @staticmethod
    def applies_to(trainer: Trainer) -> bool:
        """Return whether the trainer's ranks agree on termination as those of lightning 2.6 do."""
        loop, connector = type(trainer.fit_loop.epoch_loop), type(getattr(trainer, "_signal_connector", None))
        return hasattr(loop, _BROADCAST) and hasattr(connector, _NOTIFIER)

    def remove(self) -> None:
        """Leave the trainer as it was."""
        for owner, name in ((self._loop, _BROADCAST), (self._connector, _NOTIFIER)):
            vars(owner).pop(name, None)
        # Every rank began it.
        flag, self._under_way = self._under_way, None
        if flag is not None and dist.is_initialized():
            flag.read()

    def _agree(self) -> None:
        """Begin a batch, or raise `SIGTERMException` on all ranks."""
        before, self._under_way = self._under_way, None
        if not self._travels():
            self._under_way = _Flag(self._received, self._device)
        raised = before is not None and before.read()
        if raised or (self._reducer is not None and self._reducer.flagged):
            self._connector.received_sigterm = True
            raise SIGTERMException

    def _travels(self) -> bool:
        """Return whether the batch before this one exchanged totals, the same on all ranks, and the flags with them."""
        if self._reducer is None:
            return False
        before, self._exchanged = self._exchanged, self._reducer.exchanged
        return self._exchanged > before

    def _notice(self, number: int, frame: FrameType | None) -> None:
        """Take notice of SIGTERM: no collective, which would meet any other one on the other ranks."""
        del frame
        _log.info("rank %d received %s", self._trainer.global_rank, signal.Signals(number).name)
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self._received:
            launcher.kill(number)
        self._received = True
        if self._reducer is not None:
            self._reducer.flag = True
        if not self._trainer.training:
            # Evaluation knows no agreement, in Lightning neither.
            self._connector.received_sigterm = True
