"""The reduction of a run, between Lightning's loop, which hands over losses, and what accumulates gradients."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import lightning
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import Optimizer

from lightning_gradavg.lightning_internals import defers_reduction, flushes_static_graph, reduced_parameters, stored
from lightning_gradavg.part import Part, Run
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.accumulation import Accumulation
from lightning_gradavg.reduction.average import average_gradients
from lightning_gradavg.reduction.hooks import OwnGroups, exchange_sum, plain_sum, user_mean
from lightning_gradavg.reduction.loss import (
    WeighedLoss,
    gradients_discarded,
    holds_ignored_targets,
    loss_terms,
    misspelt_weight,
    read_weights,
    zero_loss,
)
from lightning_gradavg.reduction.reducer import BucketSum, Reducer
from lightning_gradavg.reduction.sums import as_real
from lightning_gradavg.reduction.window import WHOLE_LOSS, MicroBatch, Window, as_weight
from lightning_gradavg.rules import RULES, Rule, rule_of_replica_losses
from lightning_gradavg.wire.route import WireOptions

__all__ = ["Judge", "Reduction"]


class Judge(Protocol):
    """Decides together with all ranks what becomes of a window: `lightning_gradavg.faults.nonfinite`."""

    policy: str

    def note(self, loss: Tensor | None) -> None:
        """Note the loss of a micro-batch that counts, or None where there is none."""

    def judge(self, gradients: Iterable[tuple[str, Tensor]], run: Run, *, explicit: bool) -> Any:
        """Return what is done with the window that ends, with attributes `skips`, `drops`, `dropped` and `explicit`."""


class Reduction(Part):
    """Weighs each micro-batch's loss, and reduces the gradients of a window by a rule.

    Stock DDP is the mean; a hook of any kind would change how it divides, and so its bits. So the mean without another
    option has neither hook nor accumulation, and only its short windows are completed.

    Args:
        rule: The reduction rule.
        wire: How buckets travel.
        hook: The user's communication hook, its state and its wrapper.
        timeout: How long a process group waits for a rank.
        crosses_ranks: Whether gradients of one rank's loss reach another within the backward.
        on_weighed: Called with each loss, its weighed form, its samples if they are known, and its batch.
        judge: What is asked of every window before it is reduced, which then begins after the backward; None to reduce
            whatever there is, while the backward runs.
    """

    def __init__(
        self,
        rule: Rule,
        wire: WireOptions,
        hook: tuple[Callable[..., Any] | None, object, Callable[..., Any] | None],
        timeout: timedelta | None,
        *,
        crosses_ranks: bool,
        on_weighed: Callable[..., None],
        judge: Judge | None = None,
    ) -> None:
        self.rule, self._on_weighed = rule, on_weighed
        self._wire, self._hook, self._timeout, self._crosses_ranks = wire, hook, timeout, crosses_ranks
        hooked = hook[0] is not None or hook[2] is not None or wire.asked_for is not None
        self.is_stock = rule == RULES["mean"] and not hooked and judge is None
        self._judge, self.skipped = judge, False
        self.batch: Any = None
        self._accumulation: Accumulation | None = None
        self._own: OwnGroups | None = None
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._reduced: list[str] = []
        self._sparse: set[int] = set()
        self._pending: list[WeighedLoss] = []
        self._withheld = self._unprepared = self._static_graph_seen = False
        self._missing, self._missed, self._lost = 0, list[int](), False
        self._terms: tuple[str, ...] = (WHOLE_LOSS,)
        self._reductions = 0
        self._reductions_at_step: dict[int, int] = {}
        self._end: Callable[[], None] = _nothing
        self._warned: set[str] = set()

    def setup(self, run: Run) -> None:
        """Forget an earlier run."""
        super().setup(run)
        self._accumulation = None
        self._pending, self.batch = [], None
        self._explicit: bool | None = None
        self._told: set[str] = set()
        self._targets_ignored = False
        self._withheld = self._unprepared = self._static_graph_seen = False
        self._missing, self._missed, self._lost, self._terms = 0, [], False, (WHOLE_LOSS,)
        self._reductions, self._reductions_at_step = 0, {}

    def configure_ddp(self, run: Run) -> None:
        """Register the reduction, on CPU as on CUDA, where Lightning would drop a hook without a word."""
        super().configure_ddp(run)
        model, manual = run.ddp, not run.module.automatic_optimization
        if self._judge is not None:
            self._require_judged(run)
        if manual and model.static_graph and not flushes_static_graph(run.trainer.strategy):
            raise ValueError(
                "static_graph=True with manual optimization needs a lightning that starts the reduction of the first"
                f" backward, as 2.6 does; in lightning {lightning.__version__} it would not be reduced."
                " Leave static_graph out, or use a newer lightning."
            )
        named = dict(model.module.named_parameters())
        self._frozen = [(name, p) for name, p in named.items() if not p.requires_grad]
        names = {p: name for name, p in named.items()}
        # Now: a user may toggle which parameters require gradients.
        self._reduced = [names[p] for p in reduced_parameters(model)]
        if self.is_stock and not (model.static_graph and self._accumulates):
            return
        self._sparse = {
            id(layer.weight)
            for layer in model.modules()
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse
        }
        group, trained = model.process_group, [(name, p) for name, p in named.items() if p.requires_grad]
        self._own = OwnGroups(World.of(group), run.device, self._timeout)
        bucket_sum, averages = self._bucket_sum(trained)
        reducer = Reducer(
            self.rule,
            run.places,
            group,
            run.device,
            bucket_sum or plain_sum(group),
            averages=averages,
            windows_may_differ=manual,
        )
        # The frozen ones, too: they may train later.
        self._accumulation = Accumulation(reducer, list(named.values()), preserves_gradients=manual)
        model.register_comm_hook(None, reducer.hook)

    def _require_judged(self, run: Run) -> None:
        """Raise where a step cannot be judged, or need not be."""
        option = f"nonfinite={self._judge.policy!r}" if self._judge is not None else ""
        if not run.module.automatic_optimization:
            raise ValueError(
                f"{option} judges a step before it is taken, which in manual optimization is the user's to take: look"
                " at the gradients after manual_backward, which are the same on all ranks, or leave it out."
            )
        if getattr(run.trainer.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                f"{option} with precision={run.trainer.precision!r}, whose loss scaler has all ranks leave out a step"
                " with a gradient that is not finite. Leave it out, or use another precision."
            )

    def _bucket_sum(self, trained: list[tuple[str, nn.Parameter]]) -> tuple[BucketSum | None, bool]:
        """Return what sums buckets, None for an all-reduce, and whether it averages them."""
        run, (hook, state, wrapper) = self.run, self._hook
        assert self._own is not None
        group = run.ddp.process_group
        if hook is not None or wrapper is not None:
            return user_mean(hook or allreduce_hook, state, wrapper, group, run.device, self._own), True
        if self.is_stock:
            return None, False
        bucket_sum, obstacle = exchange_sum(self._wire, run.places, group, run.device, trained, self._own)
        if obstacle is not None:
            self.warn(obstacle)
        return bucket_sum, False

    @property
    def _accumulates(self) -> bool:
        """Whether a window may have several micro-batches."""
        trainer = self.run.trainer
        return trainer.accumulate_grad_batches > 1 or any(
            isinstance(callback, GradientAccumulationScheduler)
            for callback in trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        )

    @property
    def on_gather(self) -> Callable[[], None] | None:
        """What is told that gradients of a step cross ranks; None where no loss is multiplied before its backward."""
        return None if self._accumulation is None else self._note_crossing

    def _note_crossing(self) -> None:
        assert self._accumulation is not None
        self._accumulation.crosses_ranks = True

    @property
    def sparse(self) -> set[int]:
        """The `id` of those whose gradients are sparse."""
        return self._sparse

    @property
    def closed(self) -> tuple[Window, float] | None:
        """The window that is being reduced, and what its gradients were divided by; None under stock DDP."""
        return None if self._accumulation is None else self._accumulation.reducer.closed

    def prepare_later(self) -> None:
        """Leave it to the last backward of the step to have DDP expect its gradients: the forward has not done it."""
        self._unprepared = True

    def withhold(self) -> Callable[[], None] | None:
        """Keep a micro-batch's gradients local where DDP must run its hook all the same; return what ends that.

        With a static graph DDP must see its first backward, or an assertion of torch's reducer fails; there the hook
        runs, and leaves the buckets as they are. None where DDP may skip its hook.
        """
        model = self.run.model
        if model is None or not model.static_graph or self._accumulation is None or self._static_graph_seen:
            return None
        self._withheld = True

        def end() -> None:
            self._withheld = False

        return end

    def look_at(self, batch: Any) -> None:
        """Look for targets that do not count, before a batch is moved to where reading it would be waited for."""
        if self.rule.uses_weight and not self._explicit and _IGNORED not in self._warned:
            self._targets_ignored = holds_ignored_targets(batch)

    def begin_step(self, batch: Any, missing: int = 0) -> None:
        """Note the batch of a training step, and forget losses whose backward was never run.

        Args:
            batch: The batch.
            missing: Number of ranks that have no batch of their own.

        Raises:
            RuntimeError: On all ranks, if the rule counts those that have none, and cannot be served otherwise.
        """
        self.batch, self._pending, self._missing = batch, [], missing
        by_ranks = not self.rule.uses_weight and self.rule.name != "sum"
        served = self.rule == RULES["mean"] and self.run.module.automatic_optimization
        if missing > 0 and ((by_ranks and not served) or len(self.run.places) < self.run.world.size):
            raise RuntimeError(
                f"{missing} of {self.run.world.size} ranks have no more batches in this epoch, and"
                f" reduction={self.rule.name!r} counts ranks"
                f"{' in manual optimization' * (self.rule == RULES['mean'])}. Use reduction='weighted_mean', which"
                " counts samples and reduces over all ranks, or give all ranks the same number of batches."
            )
        if self._accumulation is not None:
            self._accumulation.crosses_ranks = self._crosses_ranks

    def forward(self) -> AbstractContextManager[Any]:
        """Surround a forward: of a window that is judged first DDP must not expect the gradients of the backward."""
        if self._judge is None or not self.run.ddp.require_backward_grad_sync:
            return nullcontext()
        self._unprepared = True
        return self.run.ddp.no_sync()

    def read(self, output: Any, samples: float | None) -> Any:
        """Return a training step's output with one loss to run the backward from, and remember its weights.

        Args:
            output: What `training_step` returned.
            samples: The number of samples, where it is known; 0 for a batch that does not count.
        """
        named = isinstance(output, Mapping)
        loss, weight = (output.get("loss"), output.get("weight")) if named else (output, None)
        accumulates = self.run.trainer.accumulate_grad_batches > 1
        if loss is None and (self._judge is not None or not (accumulates or self._may_leave_out)):
            return self._without_loss(counts=samples != 0)
        if loss is None:
            if accumulates:
                raise RuntimeError(
                    "training_step returned no loss within an accumulation window, which would then not be reduced."
                    ' Return {"loss": loss, "weight": 0} for a micro-batch that is not to count.'
                )
            return output
        problem = misspelt_weight(output) if named and weight is None else None
        value = self.add(loss, weight, samples, problem).value
        if not named:
            return value
        return output if value is loss else {**output, "loss": value}

    def add(self, loss: Any, weight: Any, samples: float | None, problem: str | None = None) -> WeighedLoss:
        """Return a loss that is weighed by its backward, which is to be run next, or after those added before.

        Args:
            loss: The loss, or its terms by name.
            weight: Its weight, or None.
            samples: The number of samples, where it is known.
            problem: Why it cannot be weighed, for all ranks to raise together.
        """
        terms = loss_terms(loss)
        if weight is not None and not self.rule.uses_weight:
            self.warn(f'a "weight" was given, but reduction={self.rule.name!r} does not use weights: it is ignored.')
        if self._accumulation is None:
            absent = samples == 0
            counted = MicroBatch({WHOLE_LOSS: as_weight(0.0 if absent else 1.0, self.run.device)}, absent=absent)
            weighed = WeighedLoss.plain(terms, counted)
        else:
            micro_batch = read_weights(self.rule, terms, weight, self.batch, self.run.device, samples)
            if self.rule.uses_weight:
                problem = problem or self._note_weight(given=weight is not None)
                micro_batch = replace(micro_batch, problem=problem or micro_batch.problem)
            weighed = self._weighed(self._accumulation, terms, micro_batch)
        self._on_weighed(loss, weighed, samples, self.batch)
        self._pending.append(weighed)
        self._terms = tuple(weighed.micro_batch.weights)
        if self._judge is not None and not weighed.micro_batch.absent:
            self._judge.note(weighed.value)
        return weighed

    @property
    def _may_leave_out(self) -> bool:
        """Whether a rank may run no backward: nobody waits for it, or a loss scaler leaves out a step without loss."""
        return self.run.world.size == 1 or getattr(self.run.trainer.precision_plugin, "scaler", None) is not None

    def _require_lost(self) -> None:
        """Leave a step out for which this rank has no loss, as Lightning does, if no other rank has one.

        Raises:
            RuntimeError: If another has, whose gradient would be averaged with nothing.
        """
        self._lost = False
        trained = [parameter for parameter in self.run.ddp.parameters() if parameter.requires_grad]
        if any(bool(stored(parameter.grad).any()) for parameter in trained if parameter.grad is not None):
            raise RuntimeError(
                f"training_step returned no loss on rank {self.run.world.rank}, and one on others. Return one on all"
                ' ranks, such as {"loss": loss, "weight": 0} under a rule with weights; or have such a step left out by'
                " nonfinite='skip_step', or such a rank by nonfinite='drop_rank'."
            )
        for parameter in trained:
            parameter.grad = None  # an optimizer leaves it as it is, with its state

    def _without_loss(self, *, counts: bool) -> Tensor:
        """Return a loss of a step that has none, for the backward that the other ranks run."""
        if self._judge is not None and counts:
            self._judge.note(None)
        self._lost = self._judge is None and counts
        return self._stand_in(MicroBatch(self._no_weight, explicit=bool(self._explicit), absent=True))

    def _note_weight(self, *, given: bool) -> str | None:
        """Say what stands in for a weight that is not given; return what is wrong where others of the run had one."""
        automatic = self.run.module.automatic_optimization
        if not given and self.rule != rule_of_replica_losses():
            giver = "training_step returned" if automatic else "manual_backward was given"
            self._tell_once(f"GradAvgStrategy: n = samples of the batch, as {giver} no weight")
        if not given and self._targets_ignored:
            self.warn(_IGNORED)
        explicit, self._explicit = self._explicit, given
        if explicit in (None, given):
            return None
        return (
            f"a weight was {'not ' * given}given in the steps before, but {'not ' * (not given)}in this one:"
            ' return "weight" from every training_step (or pass weight= to every manual_backward), or never'
        )

    def _weighed(self, accumulation: Accumulation, terms: Mapping[str, Tensor], micro_batch: MicroBatch) -> WeighedLoss:
        run = self.run
        # Looked at on the host only: an accelerator would be waited for.
        weights = [weight for weight in micro_batch.weights.values() if weight.device.type == "cpu"]
        given = micro_batch.explicit and micro_batch.problem is None and not micro_batch.absent
        if given and any(weight == 0 for weight in weights):
            self.warn(
                f"rank {run.trainer.global_rank} has a micro-batch of weight 0, which contributes nothing to the"
                " gradient. Further ones are not reported.",
                everywhere=True,
            )
        if tuple(micro_batch.weights) != (WHOLE_LOSS,) and run.ddp.static_graph and self._accumulates:
            raise ValueError(
                "static_graph=True needs the same backward in every micro-batch, but named loss terms take one per term"
                " in all but the last of a window. Leave static_graph out, or do not accumulate."
            )
        without_graph = not any(term.requires_grad for term in terms.values())
        if without_graph and all(weight == 0 for weight in micro_batch.weights.values()):
            terms = dict.fromkeys(terms, zero_loss(accumulation.parameters, self._sparse))
            prepare_for_backward(run.ddp, terms)
        weighed = accumulation.weigh(terms, micro_batch)
        if self._sparse and all(weight == 0 for weight in micro_batch.weights.values()):
            # Its gradient is stopped at the loss, but DDP takes no sparse gradient that is undefined.
            sparse = [parameter for parameter in accumulation.parameters if id(parameter) in self._sparse]
            weighed.value = weighed.value + zero_loss(sparse, self._sparse).to(weighed.value.dtype)
        return weighed

    def fail_together(self, problem: str) -> Tensor:
        """Return a loss whose window ends with an error on all ranks."""
        advice = "Batch norm needs two values per channel: choose a batch size that leaves no rank a single sample"
        return self._stand_in(MicroBatch(self._no_weight, problem=f"{problem} {advice}"))

    def _stand_in(self, micro_batch: MicroBatch) -> Tensor:
        """Return the loss of a micro-batch that has none, and add nothing to any gradient."""
        zero = zero_loss(list(self.run.ddp.parameters()), self._sparse)
        if self._judge is None:
            prepare_for_backward(self.run.ddp, zero)
        self._pending = [WeighedLoss(zero, micro_batch)]
        return zero

    @property
    def _no_weight(self) -> dict[str, Tensor]:
        return dict.fromkeys(self._terms, as_weight(0.0, self.run.device))

    def take(self) -> list[WeighedLoss]:
        """Return the losses whose backward is to be run now."""
        pending, self._pending = self._pending, []
        return pending

    @property
    def defers(self) -> bool:
        """Whether the backward that runs now is reduced after it, in Lightning's `post_backward`."""
        return self.run.ddp.static_graph and defers_reduction(self.run.trainer.strategy)

    def ends_window(self, *, final: bool) -> bool:
        """Return whether the next backward, the final one of its step or not, is reduced."""
        model = self.run.model
        return model is not None and model.require_backward_grad_sync and not self._withheld and final

    def backward(
        self, loss: WeighedLoss, root: Tensor, run: Callable[..., None], *, first: bool = True, final: bool = True
    ) -> None:
        """Run the backward of one of a step's losses, the first and the final one or one between.

        Args:
            loss: The loss.
            root: What the backward runs from.
            run: Runs it; takes `retain_graph=True`.
            first: Whether it is the first of its step.
            final: Whether it is the last.
        """
        model, trainer = self.run.ddp, self.run.trainer
        automatic = self.run.module.automatic_optimization
        divisor = trainer.accumulate_grad_batches if automatic else 1
        length = trainer.fit_loop.epoch_loop.batch_idx % divisor + 1
        last = self.ends_window(final=final)
        self._reductions += last
        if final and self._unprepared:
            self._unprepared = False
            if self._judge is None:
                prepare_for_backward(model, root)
        accumulation = self._accumulation
        if automatic and length == 1 and first:
            self._missed, self.skipped = [], False
            if accumulation is not None:
                accumulation.reset()
        self._missed.append(self._missing)
        if accumulation is None:
            with gradients_discarded(model.parameters()) if loss.micro_batch.absent else nullcontext():
                run()
        else:
            if not automatic and self.rule == RULES["mean"]:
                # As in stock DDP, the user divides the losses of a window in manual optimization.
                divisor = accumulation.pending + 1
            now = last and self._judge is None
            accumulation.backward(loss, run, last=now, loss_divisor=divisor)
            self._end = accumulation.finish if now else accumulation.pause
            if last and self._judge is not None:
                self._close_judged(self._judge, accumulation, divisor)
        if last and not self.skipped:
            factor = self._completion(divisor / length if accumulation is None else 1.0)
            if factor != 1:
                _multiply_gradients(model, factor)
            self._reduce_unfrozen()
        self._static_graph_seen = True

    def _close_judged(self, judge: Judge, accumulation: Accumulation, divisor: float) -> None:
        """Reduce a window, all of it or what counts, or leave its step out."""
        run, names = self.run, [name for name, _ in self.run.module.named_parameters()]
        gradients = ((names[index], gradient) for index, gradient in accumulation.held)
        verdict = judge.judge(gradients, run, explicit=bool(self._explicit))
        trained = [parameter for parameter in accumulation.parameters if parameter.requires_grad]
        if verdict.skips:
            self.skipped, self._end = True, _nothing
            accumulation.reset()
            for parameter in trained:
                parameter.grad = None  # an optimizer leaves it as it is, with its state
            return
        if verdict.drops:
            accumulation.drop(explicit=verdict.explicit)
        self._missed[-1] += verdict.dropped
        zero = zero_loss([p for p in trained if p.grad is not None] or trained, self._sparse)
        prepare_for_backward(run.ddp, zero)
        accumulation.close(zero.backward, divisor)
        self._end = accumulation.finish

    def _completion(self, factor: float) -> float:
        """Return what the mean of a window is multiplied by, which was taken over ranks without a batch as well."""
        missed, self._missed = self._missed, []
        if self.rule != RULES["mean"] or not any(missed):
            return factor
        pairs = len(missed) * self.run.world.size
        return factor * pairs / (pairs - sum(missed))

    def end_backward(self) -> None:
        """End a micro-batch, once its gradients are there."""
        end, self._end = self._end, _nothing
        end()
        if self._lost:
            self._require_lost()

    def _reduce_unfrozen(self) -> None:
        """Reduce the gradients of parameters that were frozen when DDP was built, which knows those that were not."""
        unfrozen = {name: parameter for name, parameter in self._frozen if parameter.requires_grad}
        if not unfrozen or (self._accumulation is None and self.run.world.size == 1):
            return
        self._tell_once(
            f"GradAvgStrategy: parameter {next(iter(unfrozen))!r}, which was frozen when training began, trains now"
            f" ({len(unfrozen)} such in all): reduced after the backward, not while it runs, as after another fit()"
        )
        group, parameters = self.run.ddp.process_group, list(unfrozen.values())
        if self._accumulation is None:
            average_gradients(parameters, group=group)
        else:
            self._accumulation.reducer.reduce_apart(parameters, group)

    def require_reduced(self, optimizer: Optimizer) -> None:
        """Compare, of a manual loop, gradients that no manual_backward reduced; a collective operation on them.

        Raises:
            RuntimeError: On all ranks, if the gradients differ: the ranks would drift apart.
        """
        before = self._reductions_at_step.get(id(optimizer), 0)
        self._reductions_at_step[id(optimizer)] = self._reductions
        if before < self._reductions or self.run.world.size == 1:
            return
        gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
        prints = World.of(self.run.ddp.process_group).gather_floats([_fingerprint(gradients)])
        # By their text: what is no number on all ranks is the same.
        different = len(set(map(str, prints))) > 1
        if not different and prints[0] == [0.0]:
            return
        found = f"{type(optimizer).__name__}.step() was called on gradients that were not reduced since its last step"
        if different:
            raise RuntimeError(
                f"{found}, and they differ between the ranks, which would drift apart."
                " In manual optimization call self.manual_backward(loss) instead of loss.backward(), and end every"
                " window with a backward outside of toggle_model(sync_grad=False)."
            )
        self.warn(
            f"{found}. They are the same on all ranks, so nothing drifts apart; reduction={self.rule.name!r} is not"
            " applied to them. Further steps are compared, and only a difference is reported."
        )

    def check(self) -> None:
        """Raise what was found out about the last window, which no further one does: before it is saved, at the end."""
        if self._accumulation is not None:
            self._accumulation.reducer.check()

    def warn(self, message: str, *, everywhere: bool = False) -> None:
        """Warn once in the life of the strategy, on rank 0 or everywhere."""
        if message not in self._warned:
            self._warned.add(message)
            (warnings.warn if everywhere else rank_zero_warn)(message, stacklevel=2)

    def _tell_once(self, message: str) -> None:
        """Tell once in a run, on rank 0."""
        if message not in self._told:
            self._told.add(message)
            rank_zero_info(message)

    def advice(self, exception: BaseException) -> str | None:
        """Return the names of the parameters that DDP only counts when it misses their gradients, and what to do."""
        indices = re.search(r"Parameter indices which did not receive grad for rank (\d+): ([\d ]+)", str(exception))
        if indices is None or not self._reduced:
            return None
        unused = ", ".join(self._reduced[int(index)] for index in indices[2].split())
        return (
            f"parameters without gradient on rank {indices[1]}: {unused}. They are not used in the loss that"
            " training_step returns. If that is meant, use GradAvgStrategy(find_unused_parameters=True), or freeze"
            " them with requires_grad_(False)."
        )

    def teardown(self) -> None:
        """End what runs beside the backward."""
        if self._own is not None:
            self._own.close()
            self._own = None


_IGNORED = (
    "integer tensors of a batch hold -100, the targets that losses of torch leave out, and no weight is given: a loss"
    " then counts by its samples, also those left out. If its mean is over targets, return"
    ' {"loss": loss, "weight": (targets != -100).sum()} from training_step.'
)


def _nothing() -> None:
    """End a backward that ends no window."""


def _fingerprint(gradients: Iterable[Tensor | None]) -> float:
    """Return a number that other gradients hardly have: 0 of none."""
    total = 0.0
    for index, gradient in enumerate(gradients, start=1):
        if gradient is not None:
            numbers = as_real(gradient.coalesce().values() if gradient.is_sparse else gradient).double().flatten()
            # Weighed by position: -1, 1 is another gradient than 1, -1.
            places = torch.linspace(1, 2, numbers.numel(), dtype=numbers.dtype, device=numbers.device)
            total += index * float(torch.dot(numbers, places))
    return total


def _multiply_gradients(module: nn.Module, factor: float) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None and parameter.requires_grad:
            parameter.grad.mul_(factor)
