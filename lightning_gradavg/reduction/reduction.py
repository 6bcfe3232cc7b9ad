"""The reduction of a run: the part of the strategy that reads losses and weights, and has an engine do the rest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg._lightning.internals import flushes_static_graph
from lightning_gradavg._lightning.part import Part, Run
from lightning_gradavg.reduction.comm_hook import CommHook
from lightning_gradavg.reduction.engine import Engine, StepFacts, Stock, Weighed
from lightning_gradavg.reduction.gradients import ReplicatedGradients
from lightning_gradavg.reduction.judge import Judge
from lightning_gradavg.reduction.lift import WindowOptions
from lightning_gradavg.reduction.loss import MicroBatch, WeighedLoss, Weights, require_loss
from lightning_gradavg.reduction.missing_loss import RUN_NUMBERS, StepWithoutLoss
from lightning_gradavg.reduction.set_aside import PieceGradients
from lightning_gradavg.reduction.window import OpenWindows, WindowRecord
from lightning_gradavg.reduction.zero_loss import sparse_weights, zero_loss
from lightning_gradavg.rules import RULES, Rule, depends_on_length

__all__ = ["Observer", "Reduction"]

_MISSPELT = {"weights", "Weight", "wieght", "weigth"}


class Observer(Protocol):
    """What looks at an observed step: `lightning_gradavg.report.part.Reports`."""

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
        in_pieces: Callable[[int], bool] | None = None,
        on_reduced: Callable[[], None] | None = None,
        shares_batches: bool = False,
        make_tree: Callable[[Run], Engine] | None = None,
    ) -> None:
        """Reduce by a rule.

        Args:
            rule: The reduction rule.
            hook: The communication hook of DDP.
            nonfinite: As in `GradAvgStrategy`.
            in_pieces: Returns whether a rank may run several backwards per step, given the world size; None if it never
                does.
            on_reduced: Called after the gradients of an automatic step are reduced.
            shares_batches: Whether ranks share each loader batch.
            make_tree: Makes the engine of a reproducible run.
        """
        self.rule = rule
        self.judges = nonfinite != "propagate"
        self.is_stock = rule == RULES["mean"] and not self.judges
        self._hook = hook
        self._nonfinite = nonfinite
        self._in_pieces = in_pieces
        self._on_reduced = on_reduced
        self._shares_batches = shares_batches
        self._make_tree = make_tree
        self._said: set[str] = set()

    def setup(self, run: Run) -> None:
        """Forget an earlier run."""
        # A strategy may serve several runs, as a learning-rate search before `fit`: nothing of an earlier one may stay.
        super().setup(run)
        self.is_manual = not run.module.automatic_optimization
        self._weights = Weights(self.rule, self._warn_on_rank_zero, self._inform_on_rank_zero)
        self.look_at = self._weights.look_at
        self.observer: Observer | None = None
        self.pending: WeighedLoss | None = None
        # Of the running step.
        self._batch: object = None
        self._samples_of_ranks: float | None = None
        self._skips_backward = False  # whether Lightning runs it without a backward
        self._window_continues = False  # whether the next backwards stay local
        self._without: StepWithoutLoss | None = None  # if this rank has no loss in it, and nobody judges it
        # Of the run so far.
        self._has_reduced = False  # whether DDP has seen a backward, which a static graph records
        self._batch_number = -1  # of the training step before
        self._step_number = 0
        # Of the run, from `configure_ddp` and `begin` on.
        self._run_number = -1
        self._steps_in_pieces = False
        self._counts_ranks = False
        self._parameters: Sequence[nn.Parameter] = ()
        self._sparse: dict[int, Tensor] = {}
        self._judge: Judge | None = None  # under `nonfinite`

    def configure_ddp(self, run: Run) -> None:
        """Begin a run that trains: register a communication hook if it needs one, and choose the engine."""
        named = dict(run.ddp.module.named_parameters())
        ignored = _ignored(run.ddp, list(named))
        self._refuse(run, ignored)
        self._parameters = list(named.values())
        self._sparse = sparse_weights(run.ddp)
        if self._in_pieces is not None:
            self._steps_in_pieces = self._in_pieces(run.world.size)
        self._hook.register(run, self.rule)
        self.begin(run, self._choose_engine(run, ignored))

    def begin(self, run: Run, engine: Engine) -> None:
        """Begin a run that trains by an engine."""
        super().configure_ddp(run)
        self._engine = engine
        self._run_number = next(RUN_NUMBERS)
        if self.judges:
            self._judge = Judge(self._nonfinite, run, rank_zero_info)
        # A user's function of weights is tried at several places; named rules with weights count no ranks.
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
            # Frozen ones, too: they may train later (`test_ranks_steps.py`: a float16 parameter that trains later).
            has_float16=any(parameter.dtype == torch.float16 for parameter in self._parameters),
            judges=self.judges,
            shares_batches=self._shares_batches,
        )
        return Weighed(OpenWindows(options, model), PieceGradients(self._parameters))

    def _refuse(self, run: Run, ignored: Sequence[str]) -> None:
        """Raise a ValueError if the run cannot be served."""
        option = f"nonfinite={self._nonfinite!r}"
        # Here and not when the strategy is made: these depend on the module, the Trainer and DDP.
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
        # Also under the plain mean: stock DDP fails an assertion of its reducer in the first window.
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

    def set_window_continues(self, *, continues: bool) -> None:
        """Note whether the window goes on after the following backwards, which then stay local."""
        is_static = self.run.model is not None and self.run.model.static_graph
        # Under the plain mean stock serves a window that is not the first; torch fails an assertion in that.
        is_served = self.is_stock and self._has_reduced
        if continues and is_static and not is_served:
            self._refuse_windows_of_static_graph()
        self._window_continues = continues

    def begin_step(self, batch: object, missing: int = 0, *, may_miss: bool = False) -> None:
        """Begin a training step with its batch, which `missing` ranks do not have; `may_miss` if that can happen."""
        self._batch = batch
        self._samples_of_ranks = None
        self._step_number += 1
        self.pending = None  # of a step before, which has had no backward
        self._skips_backward = self.run.loop.skips_backward
        if self._without is not None:
            self._without.end()
            self._without = None
        if missing > 0:
            self._refuse_missing(missing)
        facts = self._step_facts(missing, may_miss=may_miss)
        if facts.begins_window and self._judge is not None:
            self._judge.begin_window()
        self._engine.begin_step(facts)

    def _refuse_missing(self, missing: int) -> None:
        """Raise a RuntimeError if the rule counts ranks, and some have no batch."""
        if not self._counts_ranks:
            return
        mode = ""
        if self.rule == RULES["mean"]:
            # It counts pairs, and knows how many there are where Lightning says where a window ends.
            if not self.is_manual:
                return
            mode = " in manual optimization"
        raise RuntimeError(
            f"{missing} of {self.run.world.size} ranks have no more batches in this epoch, and"
            f" reduction={self.rule.name!r} counts ranks{mode}. Use"
            " reduction='weighted_mean', which counts samples, or give all ranks the same number of batches."
        )

    def end_step(self) -> None:
        """Forget the batch, when `training_step` has ended."""
        # Else its memory lasts until the next one, as no batch of stock does (`test_ranks_stock.py`: a batch is freed).
        self._batch = None

    def _step_facts(self, missing: int, *, may_miss: bool) -> StepFacts:
        """Return what the loop says of the step.

        Lightning counts windows by the index of the batch in its epoch, and ends the last one with the epoch
        (`_TrainingEpochLoop._should_accumulate`):

            | the window of the step             | may end early, because                                       |
            |------------------------------------|--------------------------------------------------------------|
            | is one of N batches                | some ranks may have no batch in it (`may_miss`)              |
            | is what remains of the epoch       | fewer than N batches remain                                  |
            | is of a loader without a length    | the epoch may end at any batch                               |
            | is of manual optimization          | never: the user ends it, and Lightning divides by nothing    |
        """
        if self.is_manual:
            return StepFacts(begins_window=False, missing=missing, is_manual=True)
        epoch_loop = self.run.trainer.fit_loop.epoch_loop
        divisor: int = self.run.trainer.accumulate_grad_batches
        batch_index: int = epoch_loop.batch_idx
        position = batch_index % divisor
        batches_of_epoch = self.run.trainer.num_training_batches
        remaining = batches_of_epoch - (batch_index - position)  # from the first batch of the window on
        self._refuse_repeated_batch(epoch_loop.total_batch_idx, divisor)
        may_end_early = False
        if may_miss or remaining < divisor or batches_of_epoch == float("inf"):
            may_end_early = True
        return StepFacts(
            begins_window=position == 0,
            missing=missing,
            divisor=divisor,
            length=position + 1,
            may_end_early=may_end_early,
        )

    def _refuse_repeated_batch(self, batch_number: int, divisor: int) -> None:
        """Raise a RuntimeError if a batch comes again within a window, where losses are weighed."""
        # Under the plain mean this is stock's business, which adds it up again (`test_ranks_stock.py`: L-BFGS).
        is_repeated = batch_number == self._batch_number
        self._batch_number = batch_number
        if is_repeated and divisor > 1 and not self.is_stock:
            raise RuntimeError(
                f"the optimizer evaluates its closure several times, as L-BFGS does, with reduction={self.rule.name!r}"
                f" and accumulate_grad_batches={divisor}: each evaluation adds the last micro-batch once more. Do not"
                " accumulate, or use another optimizer."
            )

    def read(
        self,
        output: object,
        samples: float | None,
        batch: object,
        *,
        samples_of_ranks: float | None = None,
        is_last_piece: bool = True,
    ) -> object:
        """Return the output of a forward of `batch` with a weighed loss.

            | `training_step` returned                  | becomes                                                   |
            |-------------------------------------------|-----------------------------------------------------------|
            | anything, and Lightning runs no backward  | itself                                                    |
            | what Lightning refuses                    | itself: the error is Lightning's                          |
            | None, or a dict whose loss is None        | a loss of 0, or what `_without_loss` says                 |
            | a loss                                    | the weighed loss                                          |
            | a dict with a loss                        | a copy of it with the weighed loss                        |

        Args:
            output: What `training_step` returned.
            samples: The number of samples if the batch does not tell it; 0 if they do not count.
            batch: The batch of the forward.
            samples_of_ranks: The number of samples of all ranks, as in `MicroBatch`.
            is_last_piece: Whether it is the last forward of the step.
        """
        self._batch = batch
        self._samples_of_ranks = samples_of_ranks
        if self.is_manual or self._skips_backward:
            return output
        if isinstance(output, Mapping):
            if "loss" not in output:
                return output  # `ClosureResult.from_training_step_output` raises a MisconfigurationException
            return self._read_dict(output, samples, is_last_piece=is_last_piece)
        if output is None:
            return self._without_loss(output, counts=samples != 0, is_last_piece=is_last_piece)
        if not isinstance(output, Tensor):
            return output  # the same
        return self.add(output, None, samples, is_last_piece=is_last_piece).value

    def _read_dict(self, output: Mapping[str, object], samples: float | None, *, is_last_piece: bool) -> object:
        """Return a dict that `training_step` returned, with its loss weighed."""
        loss = output["loss"]
        weight = output.get("weight")
        if loss is None:
            return self._without_loss(output, counts=samples != 0, is_last_piece=is_last_piece)
        problem = None
        if weight is None:
            problem = _misspelt_weight(output)
        weighed = self.add(loss, weight, samples, problem=problem, is_last_piece=is_last_piece)
        if weighed.value is loss:
            return output
        return {**output, "loss": weighed.value}

    def add(
        self,
        loss: object,
        weight: object,
        samples: float | None,
        *,
        problem: str | None = None,
        is_last_piece: bool = True,
    ) -> WeighedLoss:
        """Weigh a loss for the next backward; arguments as in `read` and `Weights.read`."""
        loss = require_loss(loss)
        micro_batch = self._weights.read(weight, self._batch, samples, problem)
        micro_batch = micro_batch._replace(samples_of_ranks=self._samples_of_ranks)
        self._warn_of_weight_0(micro_batch)
        # Such as a sum over no rows. The other ranks still wait for this rank's backward.
        if not micro_batch.counts and not loss.requires_grad:
            loss = self._zero_loss()
        if self._judge is not None and not micro_batch.absent:
            self._judge.note_loss(loss)
        weighed = WeighedLoss(loss, micro_batch, multiplies=self._engine.multiplies)
        self._add_to_engine(weighed, is_last_piece=is_last_piece)
        return weighed

    def _warn_of_weight_0(self, micro_batch: MicroBatch) -> None:
        """Warn once on each rank where the user gives a weight of 0, which may come of a mistake in counting."""
        if micro_batch.absent or micro_batch.problem is not None:
            return
        if micro_batch.explicit and micro_batch.weight == 0:
            self._warn_once(
                f"rank {self.run.world.rank} has a micro-batch of weight 0, which contributes nothing to the gradient."
                " Further ones are not reported.",
                warnings.warn,
            )

    def _add_to_engine(self, loss: WeighedLoss, *, is_last_piece: bool) -> None:
        """Give a loss to the engine early: the ranks' exchange then overlaps with what precedes the backward."""
        self.pending = loss
        self._engine.add(loss, ends_window=self._ends_window(is_last_piece=is_last_piece))

    def _ends_window(self, *, is_last_piece: bool) -> bool:
        """Return whether the window ends with a micro-batch, the last piece of its step or not."""
        if self._window_continues:
            return False
        return is_last_piece

    def _without_loss(self, output: object, *, counts: bool, is_last_piece: bool) -> object:
        """Return a loss of 0 for a missing loss, so that this rank joins the other ranks' backward.

            | the run                                          | the step                                           |
            |--------------------------------------------------|----------------------------------------------------|
            | judges steps                                     | is judged                                          |
            | has windows of several micro-batches, or pieces  | is refused: who skips a part of a window?          |
            | has one rank                                     | is skipped by Lightning: nobody waits              |
            | has a loss scaler                                | is skipped by it                                   |
            | is any other                                     | `StepWithoutLoss` has the table                    |

        Args:
            output: What `training_step` returned.
            counts: Whether the rank has samples in the step.
            is_last_piece: Whether it is the last forward of the step.
        """
        if self._judge is None:
            if self.run.trainer.accumulate_grad_batches > 1 or self._steps_in_pieces:
                raise RuntimeError(
                    "training_step returned no loss within an accumulation window, which would then not be reduced."
                    ' Return {"loss": loss, "weight": 0} for a micro-batch that should not count.'
                )
            if self.run.world.size == 1 or _has_scaler(self.run):
                return output
        zero = self._zero_loss()
        if self._judge is None:
            key = f"{self._run_number}/{self._step_number}"
            self._without = StepWithoutLoss(self.run, key, self._parameters, counts=counts)
        elif counts:
            self._judge.note_loss(None)
        micro_batch = MicroBatch(0.0, absent=True, without_loss=counts, samples_of_ranks=self._samples_of_ranks)
        weighed = WeighedLoss(zero, micro_batch, multiplies=False)
        self._add_to_engine(weighed, is_last_piece=is_last_piece)
        return weighed.value

    def agree(self, output: object) -> object:
        """Return the output of a step under `nonfinite`; if some rank has no loss, a loss of 0 on all ranks.

        All ranks must run the backward of a gather, or none, and a rank without a loss cannot. A collective operation.
        """
        # The totals say it, too, but once per window, and their reading raises what is wrong with a weight: in a window
        # of several micro-batches each backward needs to know, and where totals are read after the backward, this would
        # move the wait for them before it. Two ways for a number that costs one exchange of 8 bytes are not worth it.
        assert self.pending is not None
        micro_batch = self.pending.micro_batch
        if self.run.world.size == 1:
            return output
        rows = self.run.world.gather_integers([micro_batch.without_loss])
        if not any(is_without_loss for (is_without_loss,) in rows):
            return output
        self.pending = WeighedLoss(self._zero_loss(), micro_batch, multiplies=False)
        return self.pending.value

    def _zero_loss(self) -> Tensor:
        """Return a loss of 0 that reaches all parameters, with DDP ready for its backward."""
        # A sharded model has none here: the hooks with which FSDP2 reduces are on what its forward returns
        # (`FSDPState._register_pre_backward_hook`), which a loss of 0 does not come from.
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
        # As Lightning's `DDPStrategy.pre_backward` does in manual optimization. DDP's `_post_forward` has prepared the
        # reducer for the graph of another output, or of none.
        prepare_for_backward(self.run.ddp, zero)
        return zero

    def backward(self, run: Callable[[], None], *, is_last_piece: bool = True) -> None:
        """Call `run` for the backward of the pending loss, the last one of its step or not."""
        loss = self.pending
        assert loss is not None
        self.pending = None
        if self._without is not None:
            self._without.begin_backward()
        self._engine.backward(loss, run, is_last_piece=is_last_piece, window_continues=self._window_continues)
        self._has_reduced = True

    def finish(self) -> None:
        """Finish the gradients after a backward, if it ended a window. May be a collective operation."""
        has_ended = self._engine.reduce()
        is_skipped = False
        if has_ended:
            is_skipped = self._skips()
        if is_skipped:
            self._remove_gradients()
        # In manual optimization the step's end is that of `training_step`.
        if self._on_reduced is not None and not self.is_manual:
            self._on_reduced()
        if not has_ended:
            return
        if self.observer is not None:
            if is_skipped:
                self.observer.skipped()
            else:
                # The report leaves out gradients from before the window, which are added next.
                self.observer.reduced(self._engine.record())
        self._engine.close(skipped=is_skipped)

    def _skips(self) -> bool:
        """Return whether all ranks skip the step of a window that was reduced, or raise."""
        if self._judge is not None:
            return self._judge.skips(self._engine.ranks_without_loss)
        if self._without is not None:
            return self._without.is_skipped()
        return False

    def _remove_gradients(self) -> None:
        """Set the gradients to None, so that an optimizer changes neither parameters nor its state."""
        # Zeros would not do: momentum and weight decay move a parameter whose gradient is 0.
        for parameter in self._parameters:
            if parameter.requires_grad:
                parameter.grad = None

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


def _ignored(model: DistributedDataParallel, names: Sequence[str]) -> list[str]:
    """Return the names of the parameters that DDP leaves to each rank."""
    # `_build_params_for_reducer` of DDP joins the names of module and parameter by a dot, also at the top, where the
    # module's name is empty (`test_ranks_steps.py`: OwnPart).
    ignored: list[str] = []
    for name in names:
        if name in model.parameters_to_ignore or f".{name}" in model.parameters_to_ignore:
            ignored.append(name)
    return ignored


def _has_scaler(run: Run) -> bool:
    """Return whether a loss scaler skips steps."""
    return getattr(run.trainer.precision_plugin, "scaler", None) is not None


def _misspelt_weight(output: Mapping[str, object]) -> str | None:
    """Return the problem that the weight stands under another key, where it would be ignored in silence."""
    for key in output:
        if key in _MISSPELT:
            return f'the result of training_step has {key!r}: call it "weight"'
    return None
