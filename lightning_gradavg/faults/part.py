"""The faults that a run is watched for while it trains."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from itertools import count

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_gradavg._lightning.part import Part, Run
from lightning_gradavg._support.arguments import as_count_or_none
from lightning_gradavg._support.collectives import Contribution, World
from lightning_gradavg.faults.drift import Drift, require_replicas
from lightning_gradavg.faults.last_words import LastWords, is_broken_exchange

__all__ = ["Faults"]

_log = logging.getLogger(__name__)

_RUNS = count()
"""Numbers the runs of this process, so that nobody hears what was said in an earlier one."""


class Faults(Part):
    """Has ranks that fail tell the others why, and compares the ranks' progress and replicas.

    It compares replicas, with `buffers` where ranks hold the same after every step, when training begins, at the end of
    every epoch, and every so many steps; never if `every` is None. In manual optimization, where it is easy to step on
    gradients that nobody reduced, it counts batches instead, as ranks may step at different times, and compares after
    1, 2, 4, 8, ... of them, too.
    """

    def __init__(self, every: int | None, *, buffers: bool) -> None:
        self._every = as_count_or_none("check_replicas_every_n_steps", every) or math.inf
        self._buffers = buffers
        self._last_words: LastWords | None = None
        self._error: BaseException | None = None
        self._apart: bool | None = None

    def begin(self, trainer: Trainer) -> None:
        """Begin a run, in which ranks hear of each other's errors. Nothing failed yet, and no hook was called."""
        self._trainer = trainer
        self._error = None
        self._apart = None
        if dist.is_initialized():
            self._last_words = LastWords(World.of(None), next(_RUNS))

    def setup(self, run: Run) -> None:
        """Begin to compare the replicas of a run."""
        super().setup(run)
        self._batches, self._compares_buffers = 0, self._buffers

    def configure_ddp(self, run: Run) -> None:
        """Begin a run that trains, and remember the parameters that DDP knows."""
        super().configure_ddp(run)
        self._wrapped = {_named(name) for name, _ in run.module.named_parameters()}

    def interrupt(self, exception: BaseException) -> None:
        """Note the exception that ends the run. It stays noted until the next run begins, for what is called after."""
        if self._error is None:
            self._error = exception

    def ends_apart(self) -> bool:
        """Return whether the run ended by an exception that other ranks do not share: do not wait for them.

        The first call of an interrupted run waits some seconds for the others to tell how they end.
        """
        if self._last_words is None or self._error is None:
            return False
        if self._apart is None:
            self._apart = not self._last_words.ends_equal(self._error, self._trainer.global_step)
            if self._apart:
                _log.warning(
                    "rank %d ends, and the other ranks do not end with it: it exchanges nothing with them any more,"
                    " and writes no checkpoint",
                    dist.get_rank(),
                )
        return self._apart

    def on_exception(self, exception: BaseException) -> str | None:
        """Tell the other ranks; return what they tell if an exchange with them broke. The first to fail logs a line."""
        if self._last_words is None:
            return None
        self.interrupt(exception)
        first = self._last_words.say(exception, self._trainer.global_step)
        told = self._last_words.listen() if is_broken_exchange(exception) else None
        if first:
            line = f"rank {dist.get_rank()} ended with {type(exception).__name__}: {exception}".partition("\n")[0]
            _log.error("GradAvgStrategy: %s", told or line)
        return told

    def on_train_start(self) -> None:
        """Compare the progress and the replicas that a checkpoint or the user has set, or raise on all ranks."""
        trainer = self.run.trainer
        begins = [f"training begins after {trainer.global_step} steps and {trainer.current_epoch} epochs"]
        refusal = "the ranks resume from different checkpoints (give them one ckpt_path in a folder that all nodes see)"
        self.run.world.agree(refusal, lambda: Contribution(begins), RuntimeError)
        self._check()

    def on_train_batch_start(self) -> None:
        """Compare the replicas after an epoch, and when they are due."""
        if self._moment != self._checked:
            self._check()
        self._batches += 1
        self._compares_buffers = self._buffers

    @property
    def _done(self) -> tuple[int, str, int]:
        """What was done, in which unit, and what changes where a comparison is due early."""
        if self.run.module.automatic_optimization:
            return self.run.trainer.global_step, "optimizer steps", 0
        return self._batches, "batch(es)", self._batches.bit_length()

    @property
    def _moment(self) -> tuple[float, ...]:
        """What changes when a comparison is due."""
        count, _, early = self._done
        return self.run.trainer.current_epoch, count // self._every, early

    def on_evaluation_start(self) -> None:
        """Compare buffers before ranks evaluate different batches, which may change those of a module that trains."""
        if self._compares_buffers and self.run.model is not None:
            self._check()
        self._compares_buffers = False

    def on_train_end(self) -> None:
        """Compare the replicas after the last epoch."""
        self._check()

    def _check(self) -> None:
        run, self._checked = self.run, self._moment
        if self._every < math.inf and run.world.size > 1:
            count, unit, _ = self._done
            require_replicas(self._tensors(), f"{count} {unit}", self._drift_of)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        ignored = self.run.ddp.parameters_to_ignore
        for name, parameter in self.run.module.named_parameters():
            if name not in ignored:
                yield _named(name), parameter
        if self._compares_buffers:
            for name, buffer in self.run.module.named_buffers():
                if name not in ignored:
                    yield f"buffer {name!r}", buffer

    def _drift_of(self, tensor: str) -> Drift:
        """Return what the run shows about a tensor that drifted apart, named as `_tensors` names it."""
        parameters = {_named(name): parameter for name, parameter in self.run.module.named_parameters()}
        if tensor not in parameters:
            return Drift(is_buffer=True)
        trains = [name for name, parameter in parameters.items() if parameter.requires_grad]
        missing = [name for name in trains if parameters[name].grad is None]
        if self.run.ddp.find_unused_parameters or self.run.ddp.static_graph:
            missing = []
        zeroed = len(missing) == len(trains)
        return Drift(
            is_new=tensor not in self._wrapped,
            is_frozen=not parameters[tensor].requires_grad,
            is_manual=not self.run.module.automatic_optimization,
            trained=self._batches > 0,
            unused=missing[0] if missing and not zeroed else None,
            zeroed=zeroed,
        )


def _named(parameter: str) -> str:
    return f"parameter {parameter!r}"
