"""The reduction of a run: the part of the strategy that reads losses and weights, and has an engine do the rest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_gradavg._lightning.internals import flushes_static_graph, stored
from lightning_gradavg._lightning.part import Part, Run
from lightning_gradavg._support.text import by_value
from lightning_gradavg.reduction.comm_hook import CommHook
from lightning_gradavg.reduction.engine import Engine, StepFacts, Stock, Weighed
from lightning_gradavg.reduction.gradients import ReplicatedGradients
from lightning_gradavg.reduction.kept import KeptGradients, PieceGradients
from lightning_gradavg.reduction.lift import WindowOptions
from lightning_gradavg.reduction.loss import MicroBatch, WeighedLoss, Weights, require_loss
from lightning_gradavg.reduction.window import OpenWindows, WindowRecord
from lightning_gradavg.reduction.zero_loss import sparse_weights, zero_loss
from lightning_gradavg.rules import RULES, Rule, depends_on_length

__all__ = ["Observer", "Reduction"]

_MISSPELT = {"weights", "Weight", "wieght", "weigth"}


class Observer(Protocol):
    """What looks at an observed step: `lightning_gradavg.report.part.Reports`."""

    def samples_of(self, samples: float | None, batch: object) -> float | None:
        """Return the samples of a micro-batch, None if they are not known."""

    def backward(self, *, last: bool) -> Any:
        """Return a context for a backward, the last of its window or not."""

    def reduced(self, record: WindowRecord) -> None:
        """Report a window whose gradients are reduced. A collective operation."""

    def skipped(self) -> None:
        """Observe the next step instead of this one, which all ranks skip."""


class Reduction(Part):
    """Reads the losses and weights of Lightning's loop, and finishes the gradients that DDP averaged.

    The calls of a training step, in this order:

    1. `begin_step`, before `training_step`.
    2. `read` with its output in automatic optimization, once for each piece of the step; `add` in manual optimization,
       with the loss of every `manual_backward`.
    3. `backward` for that loss. In manual optimization 2 to 4 come again for every backward.
    4. `finish`, after the backward: the gradients are those of the rule if it ended the window.

    Attributes:
        judges: Whether ranks check every step together (`nonfinite=`).
        is_stock: Whether the run reduces as stock DDP does.
        pending: The loss whose backward comes next.
        observer: What looks at the running step, or None.
    """

    _engine: Engine

    def __init__(
        self,
        rule: Rule,
        hook: CommHook,
        *,
        nonfinite: str = "propagate",
        in_pieces: Callable[[int], bool] = lambda _: False,
        on_reduced: Callable[[], None] | None = None,
        make_tree: Callable[[Run], Engine] | None = None,
    ) -> None:
        """Reduce by a rule.

        Args:
            rule: The reduction rule.
            hook: The communication hook of DDP.
            nonfinite: As in `GradAvgStrategy`.
            in_pieces: Returns whether a rank may run several backwards per step, given the world size.
            on_reduced: Called after the gradients of an automatic step are reduced.
            make_tree: Makes the engine of a reproducible run.
        """
        self.rule = rule
        self.judges = nonfinite != "propagate"
        self.is_stock = rule == RULES["mean"] and not self.judges
        self._hook = hook
        self._nonfinite = nonfinite
        self._in_pieces = in_pieces
        self._on_reduced = on_reduced
        self._make_tree = make_tree
        self._said: set[str] = set()

    def setup(self, run: Run) -> None:
        """Forget an earlier run."""
        super().setup(run)
        self.is_manual = not run.module.automatic_optimization
        self._weights = Weights(self.rule, self._warn_on_rank_zero, self._inform_on_rank_zero)
        self.look_at = self._weights.look_at
        self.observer: Observer | None = None
        self.pending: WeighedLoss | None = None
        self._batch: Any = None
        self._skips_backward = False  # whether Lightning runs the step without a backward
        self._is_holding = False  # whether the next backwards stay local
        self._is_lost = False  # whether this rank has no loss in the running step, and nobody judges it
        self._has_reduced = False
        self._batch_number = -1  # of the training step before
        self._steps_in_pieces = False
        self._counts_ranks = False
        self._parameters: Sequence[nn.Parameter] = ()
        self._sparse: dict[int, Tensor] = {}
        self._losses: list[Tensor | None] = []  # of the window, under `nonfinite`
        self._kept_of_lost_step: KeptGradients | None = None

    def configure_ddp(self, run: Run) -> None:
        """Begin a run that trains: register a communication hook if it needs one, and choose the engine."""
        named = dict(run.ddp.module.named_parameters())
        ignored = [name for name in named if {name, f".{name}"} & run.ddp.parameters_to_ignore]
        self._refuse(run, ignored)
        self._parameters = list(named.values())
        self._sparse = sparse_weights(run.ddp)
        self._steps_in_pieces = self._in_pieces(run.world.size)
        self._hook.register(run, self.rule)
        self.begin(run, self._choose_engine(run, ignored))

    def begin(self, run: Run, engine: Engine) -> None:
        """Begin a run that trains by an engine."""
        super().configure_ddp(run)
        self._engine = engine
        if self.rule.uses_weight:
            self._counts_ranks = depends_on_length(self.rule, run.places)
        else:
            self._counts_ranks = self.rule.name != "sum"

    def _choose_engine(self, run: Run, ignored: Sequence[str]) -> Engine:
        """Return the engine of a run; `engine` has the table."""
        # The tree sums in its own floor of the package, which this one does not import.
        if self._make_tree is not None:
            return self._make_tree(run)
        frozen: list[nn.Parameter] = []
        if run.world.size > 1:
            for name, parameter in run.ddp.module.named_parameters():
                if not parameter.requires_grad and name not in ignored:
                    frozen.append(parameter)
        model = ReplicatedGradients(self._parameters, frozen=frozen, group=run.world.group)
        if self.is_stock:
            return Stock(model, run.world.size)
        options = WindowOptions(
            rule=self.rule,
            places=run.places,
            world=run.world,
            device=run.device,
            user_ends_windows=self.is_manual,
            in_pieces=self._steps_in_pieces,
            has_float16=any(parameter.dtype == torch.float16 for parameter in self._parameters),
            judges=self.judges,
        )
        return Weighed(OpenWindows(options, model), PieceGradients(self._parameters))

    def _refuse(self, run: Run, ignored: Sequence[str]) -> None:
        """Raise a ValueError if the run cannot be served."""
        option = f"nonfinite={self._nonfinite!r}"
        if self.judges and self.is_manual:
            raise ValueError(
                f"{option} checks a step before it is taken, but in manual optimization you take it. Check the"
                " gradients after manual_backward, which are the same on all ranks, or leave it out."
            )
        if self.judges and _has_scaler(run):
            raise ValueError(
                f"{option} with precision={run.trainer.precision!r}, whose loss scaler makes all ranks skip a step with"
                " a gradient that is not finite. Leave it out, or use another precision."
            )
        if run.ddp.static_graph and run.loop.accumulation > 1:
            self._refuse_windows_of_static_graph()
        if self.is_stock:
            return
        if run.ddp.static_graph and self.is_manual and not flushes_static_graph(run.trainer.strategy):
            raise ValueError(
                "static_graph=True with manual optimization needs lightning 2.6, which has DDP reduce the first"
                " backward. Leave static_graph out, or use a newer lightning."
            )
        if ignored and self.rule != RULES["mean"]:
            raise ValueError(
                f"DDP was told to ignore the parameter {ignored[0]!r}, so only its loss would be weighed. Use"
                " reduction='mean' without split_batches, or Lightning's DDPStrategy."
            )

    def _refuse_windows_of_static_graph(self) -> None:
        raise ValueError(
            f"static_graph=True with reduction={self.rule.name!r} in windows of several micro-batches: DDP treats its"
            " first backward as every step's, and those within a window are not reduced. Leave static_graph out, or do"
            " not accumulate."
        )

    def hold(self, *, holding: bool) -> None:
        """Note whether the following backwards stay local."""
        is_static = self.run.model is not None and self.run.model.static_graph
        # Under the plain mean stock serves a window that is not the first; torch fails an assertion in that.
        is_served = self.is_stock and self._has_reduced
        if holding and is_static and not is_served:
            self._refuse_windows_of_static_graph()
        self._is_holding = holding

    def begin_step(self, batch: Any, missing: int = 0, *, may_miss: bool = False) -> None:
        """Begin a training step with its batch, which `missing` ranks do not have; `may_miss` if that can happen."""
        self._batch = batch
        self.pending = None  # of a step before, which has had no backward
        self._skips_backward = self.run.loop.skips_backward
        if self._kept_of_lost_step is not None:
            self._kept_of_lost_step.add_back()
            self._kept_of_lost_step = None
        if missing > 0:
            self._refuse_missing(missing)
        facts = self._step_facts(missing, may_miss=may_miss)
        if facts.begins_window:
            self._losses = []  # of a window that an epoch cut off
        self._engine.begin_step(facts)

    def _refuse_missing(self, missing: int) -> None:
        """Raise a RuntimeError if the rule counts ranks, and some have no batch."""
        averages = self.rule == RULES["mean"] and not self.is_manual
        if self._counts_ranks and not averages:
            mode = " in manual optimization" if self.rule == RULES["mean"] else ""
            raise RuntimeError(
                f"{missing} of {self.run.world.size} ranks have no more batches in this epoch, and"
                f" reduction={self.rule.name!r} counts ranks{mode}. Use"
                " reduction='weighted_mean', which counts samples, or give all ranks the same number of batches."
            )

    def end_step(self) -> None:
        """Forget the batch, when `training_step` has ended."""
        self._batch = None

    def _step_facts(self, missing: int, *, may_miss: bool) -> StepFacts:
        if self.is_manual:
            return StepFacts(begins_window=False, divisor=None, missing=missing)
        epoch_loop = self.run.trainer.fit_loop.epoch_loop
        divisor: int = self.run.trainer.accumulate_grad_batches
        position = epoch_loop.batch_idx % divisor
        count = self.run.trainer.num_training_batches
        remaining = count - epoch_loop.batch_idx + position
        batch_number: int = epoch_loop.total_batch_idx
        repeats = batch_number == self._batch_number
        self._batch_number = batch_number
        if repeats and divisor > 1 and not self.is_stock:
            raise RuntimeError(
                f"the optimizer evaluates its closure several times, as L-BFGS does, with reduction={self.rule.name!r}"
                f" and accumulate_grad_batches={divisor}: each evaluation adds the last micro-batch once more. Do not"
                " accumulate, or use another optimizer."
            )
        return StepFacts(
            begins_window=position == 0,
            divisor=divisor,
            missing=missing,
            length=position + 1,
            may_end_early=may_miss or remaining < divisor or count == float("inf"),
        )

    def read(self, output: Any, samples: float | None, batch: Any, *, final: bool = True) -> Any:
        """Return the output of a forward of `batch` with a weighed loss.

        Args:
            output: What `training_step` returned.
            samples: The number of samples if the batch does not tell it; 0 if they do not count.
            batch: The batch of the forward.
            final: Whether it is the last forward of the step.
        """
        self._batch = batch
        if self.is_manual or self._skips_backward:  # Lightning runs no backward from it
            return output
        is_named = isinstance(output, Mapping)
        if is_named and "loss" not in output:
            return output  # Lightning says what it lacks
        if not is_named and output is not None and not isinstance(output, Tensor):
            return output  # likewise, what it may be
        named = output if is_named else {"loss": output}
        loss = named.get("loss")
        weight = named.get("weight")
        if loss is None:
            return self._without_loss(output, counts=samples != 0, final=final)
        problem = None
        # A weight under another key would be ignored, and samples counted, in silence.
        misspelt = [key for key in named if key in _MISSPELT]
        if misspelt and weight is None:
            problem = f'the result of training_step has {misspelt[0]!r}: call it "weight"'
        value = self.add(loss, weight, samples, problem=problem, final=final).value
        if value is loss:
            return output
        return {**output, "loss": value} if is_named else value

    def add(
        self, loss: Any, weight: Any, samples: float | None, *, problem: str | None = None, final: bool = True
    ) -> WeighedLoss:
        """Weigh a loss for the next backward; arguments as in `read` and `Weights.read`."""
        loss = require_loss(loss)
        micro_batch = self._weights.read(weight, self._batch, samples, problem)
        if self.observer is not None:
            samples_of_report = self.observer.samples_of(samples, self._batch)
            micro_batch = micro_batch._replace(samples=samples_of_report, loss=loss.detach())
        if micro_batch.weight == 0 and micro_batch.explicit and not (micro_batch.absent or micro_batch.problem):
            self._warn_once(
                f"rank {self.run.world.rank} has a micro-batch of weight 0, which contributes nothing to the gradient."
                " Further ones are not reported.",
                warnings.warn,
            )
        # Such as a sum over no rows. The other ranks still wait for this rank's backward.
        if not micro_batch.counts and not loss.requires_grad:
            loss = self._zero_loss()
        if self.judges and not micro_batch.absent:
            self._losses.append(loss.detach())
        return self._add(WeighedLoss(loss, micro_batch, multiplies=self._engine.multiplies), final=final)

    def _add(self, loss: WeighedLoss, *, final: bool) -> WeighedLoss:
        """Give a loss to the engine early: the ranks' exchange then overlaps with what precedes the backward."""
        self.pending = loss
        self._engine.add(loss, last=final and not self._is_holding)
        return loss

    def _without_loss(self, output: Any, *, counts: bool, final: bool) -> Any:
        """Return a stand-in for a missing loss, so that this rank joins the other ranks' backward.

        Args:
            output: What `training_step` returned.
            counts: Whether the rank has samples in the step.
            final: Whether it is the last forward of the step.
        """
        if self.judges:
            if counts:
                self._losses.append(None)
        elif self.run.trainer.accumulate_grad_batches > 1 or self._steps_in_pieces:
            raise RuntimeError(
                "training_step returned no loss within an accumulation window, which would then not be reduced."
                ' Return {"loss": loss, "weight": 0} for a micro-batch that should not count.'
            )
        elif self.run.world.size == 1 or _has_scaler(self.run):
            return output  # nobody waits for this rank, or a loss scaler skips a step without a loss
        # Whether the other ranks have a loss is seen in the reduced gradient: an exchange in every step would cost the
        # steps of everybody, for one that Lightning hardly allows.
        self._is_lost = counts and not self.judges
        micro_batch = MicroBatch(0.0, absent=True, without_loss=counts)
        if self.observer is not None:
            micro_batch = micro_batch._replace(samples=0.0)
        loss = WeighedLoss(self._zero_loss(), micro_batch, multiplies=False)
        return self._add(loss, final=final).value

    def agree(self, output: Any) -> Any:
        """Return the output of a step under `nonfinite`; if some rank has no loss, a loss of 0 on all ranks.

        All ranks must run the backward of a gather, or none, and a rank without a loss cannot. A collective operation.
        """
        assert self.pending is not None
        micro_batch = self.pending.micro_batch
        world = self.run.world
        if world.size > 1 and any(map(any, world.gather_integers([micro_batch.without_loss]))):
            self.pending = WeighedLoss(self._zero_loss(), micro_batch, multiplies=False)
            return self.pending.value
        return output

    def _zero_loss(self) -> Tensor:
        """Return a loss of 0 that reaches all parameters, with DDP ready for its backward."""
        if not self._parameters:
            raise RuntimeError(
                "training_step returned no loss, or a loss without a graph, where the model is sharded: the other ranks"
                ' need this one\'s backward. Return {"loss": loss, "weight": 0}, with a loss of the model\'s output.'
            )
        if self.run.ddp.static_graph and not self._has_reduced:
            raise RuntimeError(
                "static_graph=True records the graph of the first backward, so the first training_step must return a"
                " loss of the model's output on every rank. Return one, or leave static_graph out."
            )
        zero = zero_loss(self._parameters, self._sparse)
        prepare_for_backward(self.run.ddp, zero)
        return zero

    def backward(self, run: Callable[[], None], *, final: bool = True) -> None:
        """Call `run` for the backward of the pending loss, the `final` one of its step or not."""
        loss = self.pending
        assert loss is not None
        self.pending = None
        if self._is_lost:
            # Gradients from before would be taken for those of other ranks' losses.
            self._kept_of_lost_step = KeptGradients(self._parameters)
        around: Any = nullcontext()
        if self.observer is not None:
            around = self.observer.backward(last=final and not self._is_holding)
        with around:
            self._engine.backward(loss, run, final=final, holding=self._is_holding)
        self._has_reduced = True

    def finish(self) -> None:
        """Finish the gradients after a backward, if it ended a window. May be a collective operation."""
        has_ended = self._engine.reduce()
        skips = has_ended and self._skips()
        if skips:
            self._leave_out()
        # In manual optimization the step's end is that of `training_step`.
        if self._on_reduced is not None and not self.is_manual:
            self._on_reduced()
        if not has_ended:
            return
        if self.observer is not None:
            if skips:
                self.observer.skipped()
            else:
                # The report leaves out gradients from before the window, which are added next.
                self.observer.reduced(self._engine.record())
        self._engine.close(skipped=skips)

    def _skips(self) -> bool:
        """Return whether all ranks skip the step, or raise on all."""
        if self.judges:
            return self._judges_out()
        if self._is_lost:
            self._is_lost = False
            self._require_lost_on_all_ranks()
            return True
        return False

    def _judges_out(self) -> bool:
        """Return whether all ranks skip a step under `nonfinite`, or raise on all. The host waits for the gradients."""
        ranks_without_loss = self._engine.ranks_without_loss
        losses, self._losses = self._losses, []
        if ranks_without_loss == self.run.world.size:
            return True  # as Lightning itself does
        name = self._first_nonfinite()
        if ranks_without_loss == 0 and name is None:
            return False
        faults = self.run.world.gather_objects(_fault(losses))
        if any(faults):
            found = by_value(fault or "nothing" for fault in faults)
        else:
            found = by_value([f"the gradient of parameter {name!r} is not finite"] * self.run.world.size)
        found = f"optimizer step {self.run.trainer.global_step}: {found}"
        if self._nonfinite == "raise":
            raise RuntimeError(
                f"{found}. With nonfinite='skip_step' all ranks skip such a step; a loss of weight 0 leaves one"
                " micro-batch out."
            )
        rank_zero_info(f"GradAvgStrategy: {found}; nonfinite={self._nonfinite!r}: all ranks skip the step")
        return True

    def _first_nonfinite(self) -> str | None:
        """Return the name of the first parameter whose gradient is not finite."""
        names: list[str] = []
        finite: list[Tensor] = []
        with torch.profiler.record_function("GradAvg: check gradients"):
            for name, parameter in self.run.module.named_parameters():
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

    def _leave_out(self) -> None:
        for parameter in self._parameters:
            if parameter.requires_grad:
                parameter.grad = None  # so an optimizer changes neither it nor its state

    def _require_lost_on_all_ranks(self) -> None:
        """Raise a RuntimeError if another rank has a loss in this step. Without any, Lightning skips the step, too."""
        with torch.profiler.record_function("GradAvg: check gradients"):
            for parameter in self._parameters:
                if parameter.requires_grad and parameter.grad is not None and bool(stored(parameter.grad).any()):
                    raise RuntimeError(
                        f"training_step returned no loss on rank {self.run.world.rank}, and one on others. Return one"
                        ' on all ranks, such as {"loss": loss, "weight": 0} under a rule with weights; or have such a'
                        " step left out by nonfinite='skip_step'."
                    )

    def is_at_window_start(self) -> bool:
        """Return whether the next micro-batch begins a window."""
        return self._engine.is_empty

    def _warn_on_rank_zero(self, message: str) -> None:
        self._warn_once(message, rank_zero_warn)

    def _inform_on_rank_zero(self, message: str) -> None:
        self._warn_once(message, rank_zero_info)

    def _warn_once(self, message: str, how: Callable[[str], None]) -> None:
        """Give the user a message once per strategy."""
        if message not in self._said:
            self._said.add(message)
            how(message)

    def describe(self) -> str:
        """Return the start line's words about the hook."""
        return self._hook.describe()


def _has_scaler(run: Run) -> bool:
    """Return whether a loss scaler skips steps."""
    return getattr(run.trainer.precision_plugin, "scaler", None) is not None


def _fault(losses: Sequence[Tensor | None]) -> str | None:
    """Return the problem of a rank's losses, of which None is a missing one."""
    for loss in losses:
        if loss is None:
            return "training_step returned no loss"
    for loss in losses:
        if loss is not None and not bool(loss.isfinite().all()):
            return "the loss is not finite"
    return None
