"""The faults that a run is watched for: ranks that fail, and replicas that differ."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from enum import Enum, auto
from itertools import count
from typing import NamedTuple

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_gradavg._lightning.internals import require_reduced
from lightning_gradavg._lightning.part import Part, Run
from lightning_gradavg._support.arguments import as_count_or_none
from lightning_gradavg._support.collectives import Contribution, World
from lightning_gradavg.faults.drift import Drift, require_replicas
from lightning_gradavg.faults.failure_reports import FailureReports, is_broken_exchange, text_of

__all__ = ["Faults"]

_log = logging.getLogger(__name__)

_RUNS = count()
"""Numbers the runs of this process, so that nobody reads what was reported in an earlier one."""


class _Ending(Enum):
    """How a run ends on this rank; `Faults` has the table."""

    NONE = auto()
    INTERRUPTED = auto()
    TOGETHER = auto()
    APART = auto()


class _Done(NamedTuple):
    """What the run has done."""

    number: int
    unit: str
    early: int  # a number that changes whenever a comparison is due early, before `every` of them


class Faults(Part):
    """Has ranks that fail tell the others why, and compares the ranks' progress and replicas.

    It compares replicas when training begins, at the end of every epoch, and every so many steps; never if `every` is
    None. In manual optimization it counts batches instead, as ranks may step at different times. There it is easy to
    step on gradients that nobody reduced, so it also compares after 1, 2, 4, 8, ... batches.

    The ending of a run:

    | state | the run | `ends_apart` |
    |---|---|---|
    | NONE | goes on, or ended without an exception; `begin` leads here | False |
    | INTERRUPTED | ended by an exception (`interrupt`) | asks the others: becomes TOGETHER or APART |
    | TOGETHER | all ranks ended by an exception of this type at the same step | False |
    | APART | the other ranks did not end with this one | True |

    Args:
        every: Optimizer steps between two comparisons, or None for no comparison at all.
        buffers: Whether buffers are compared, too: where ranks must hold equal ones after every step.
    """

    def __init__(self, every: int | None, *, buffers: bool) -> None:
        every = as_count_or_none("check_replicas_every_n_steps", every)
        self._every: float = math.inf if every is None else every
        self._buffers = buffers
        self._reports: FailureReports | None = None  # of a run of several processes
        self._ending = _Ending.NONE
        self._error: BaseException | None = None  # that interrupted the run

    def begin(self, trainer: Trainer) -> None:
        """Begin a run, in which ranks learn of each other's errors. Nothing failed yet, and no hook was called.

        `Collectives.setup_environment` calls this, before `setup`: a hook of the user's may fail in between.
        """
        self._trainer = trainer
        self._ending = _Ending.NONE
        self._error = None
        if dist.is_initialized():
            self._reports = FailureReports(World.of(None), next(_RUNS))

    def setup(self, run: Run) -> None:
        """Begin any run: no batch was trained on, and ranks hold equal buffers."""
        super().setup(run)
        self._batches = 0
        self._compares_buffers = self._buffers

    def configure_ddp(self, run: Run) -> None:
        """Begin a run that trains; remember the parameters that the module has when DDP wraps it."""
        super().configure_ddp(run)
        self._wrapped = {_named(name) for name, _ in run.module.named_parameters()}

    def interrupt(self, exception: BaseException) -> None:
        """Note the exception that ends the run, the first one of the run.

        `Interruption` calls this before all other callbacks, and `on_exception` again. Until the next run begins,
        `ends_apart` answers for this exception.
        """
        if self._ending is _Ending.NONE:
            self._ending = _Ending.INTERRUPTED
            self._error = exception

    def ends_apart(self) -> bool:
        """Return whether the run ended by an exception that other ranks do not share: do not wait for them.

        Every collective of the strategy (`Collectives`) asks this first. The first call of an interrupted run waits
        some seconds for the others to tell how they end.
        """
        if self._reports is None:
            return False
        if self._ending is _Ending.INTERRUPTED:
            assert self._error is not None
            if self._reports.ends_equal(self._error, self._trainer.global_step):
                self._ending = _Ending.TOGETHER
            else:
                self._ending = _Ending.APART
                _log.warning(
                    "rank %d ends, and the other ranks do not end with it: it exchanges nothing with them any more,"
                    " and writes no checkpoint",
                    dist.get_rank(),
                )
        return self._ending is _Ending.APART

    def on_exception(self, exception: BaseException) -> str | None:
        """Report an exception to the other ranks; return what they report if it is a broken exchange, else None.

        Of the ranks, the first that fails logs a line. The strategy's `on_exception` calls this.
        """
        if self._reports is None:
            return None
        self.interrupt(exception)
        is_first = self._reports.report(exception, self._trainer.global_step)
        reports_of_others = None
        if is_broken_exchange(exception):
            reports_of_others = self._reports.read()
        if is_first:
            line = reports_of_others
            if line is None:
                line, _, _ = f"rank {dist.get_rank()} failed with {text_of(exception)}".partition("\n")
            _log.error("GradAvgStrategy: %s", line)
        return reports_of_others

    def on_train_start(self) -> None:
        """Compare the progress and the replicas that a checkpoint or the user has set, or raise on all ranks."""
        trainer = self.run.trainer
        progress = [f"training begins after {trainer.global_step} steps and {trainer.current_epoch} epochs"]
        refusal = "the ranks resume from different checkpoints (give them one ckpt_path in a folder that all nodes see)"
        self.run.world.agree(refusal, lambda: Contribution(progress), RuntimeError)
        self._check()

    def on_train_batch_start(self) -> None:
        """Compare the replicas if an epoch has ended since the last comparison, or one is due."""
        if self._moment != self._checked_moment:
            self._check()
        self._batches += 1
        self._compares_buffers = self._buffers  # the step makes them equal again

    @property
    def _done(self) -> _Done:
        """What was done so far: optimizer steps, or batches in manual optimization."""
        if self.run.module.automatic_optimization:
            return _Done(self.run.trainer.global_step, "optimizer steps", 0)
        # The number of bits changes at 1, 2, 4, 8, ...
        return _Done(self._batches, "batch(es)", self._batches.bit_length())

    @property
    def _moment(self) -> tuple[float, ...]:
        """A tuple that changes whenever a comparison is due."""
        done = self._done
        return self.run.trainer.current_epoch, done.number // self._every, done.early

    def on_evaluation_start(self) -> None:
        """Compare replicas and buffers before an evaluation; buffers may then differ until the next step.

        An evaluation step may change them, and ranks evaluate different batches.
        """
        if self.run.model is not None:
            # DDP raises in its next forward. A rank would exchange before it, while others wait in a bucket.
            require_reduced(self.run.model)
        if self._compares_buffers and self.run.model is not None:
            self._check()
        self._compares_buffers = False

    def on_train_end(self) -> None:
        """Compare the replicas after the last epoch."""
        self._check()

    def _check(self) -> None:
        """Raise a RuntimeError on all ranks if their replicas differ, and note the moment. A collective operation."""
        self._checked_moment = self._moment
        run = self.run
        if self._every < math.inf and run.world.size > 1:
            done = self._done
            require_replicas(self._tensors(), f"{done.number} {done.unit}", self._drift_of)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what must be equal on all ranks, with the name that an error gives it."""
        ignored = self.run.ddp.parameters_to_ignore
        for name, parameter in self.run.module.named_parameters():
            if name not in ignored:
                yield _named(name), parameter
        if self._compares_buffers:
            for name, buffer in self.run.module.named_buffers():
                if name not in ignored:
                    yield f"buffer {name!r}", buffer

    def _drift_of(self, tensor: str) -> Drift:
        """Return what the run shows about a tensor that drifted apart, named as `_tensors` names it. Collective.

        `require_replicas` calls this on all ranks, for its error.
        """
        parameters = {_named(name): parameter for name, parameter in self.run.module.named_parameters()}
        if tensor not in parameters:
            return Drift(is_buffer=True)
        rates: list[float] = []
        for optimizer in self.run.trainer.optimizers:
            rates += [float(group["lr"]) for group in optimizer.param_groups]
        rates_of_ranks = self.run.world.gather_objects(rates)
        if all(rates_of_rank == rates for rates_of_rank in rates_of_ranks):
            rates_of_ranks = []  # no cause
        trainable = [name for name, parameter in parameters.items() if parameter.requires_grad]
        without_gradient = [name for name in trainable if parameters[name].grad is None]
        if self.run.ddp.find_unused_parameters or self.run.ddp.static_graph:
            without_gradient = []  # DDP knows which parameters a backward leaves out
        # `zero_grad` has set all to None: which of them a backward left out does not show.
        all_zeroed = len(without_gradient) == len(trainable)
        unused = None
        if without_gradient and not all_zeroed:
            unused = without_gradient[0]
        return Drift(
            is_new=tensor not in self._wrapped,
            is_frozen=not parameters[tensor].requires_grad,
            is_manual=not self.run.module.automatic_optimization,
            trained=self._batches > 0,
            unused=unused,
            zeroed=all_zeroed,
            rates=rates_of_ranks,
        )


def _named(parameter: str) -> str:
    """Return what an error calls the parameter of a name."""
    return f"parameter {parameter!r}"
