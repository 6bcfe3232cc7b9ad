"""The reduction of a run, between Lightning's loop, which hands over losses, and what accumulates gradients."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import lightning
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_gradavg.lightning_internals import defers_reduction, flushes_static_graph, reduced_parameters, stored
from lightning_gradavg.part import Part, Run
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.accumulation import Accumulation
from lightning_gradavg.reduction.hooks import OwnGroups, exchange_sum, user_mean
from lightning_gradavg.reduction.loss import (
    NoWeights,
    WeighedLoss,
    Weights,
    loss_terms,
    misspelt_weight,
    sparse_weights,
    zero_loss,
)
from lightning_gradavg.reduction.manual import ManualSteps
from lightning_gradavg.reduction.reducer import BucketSum, Reducer
from lightning_gradavg.reduction.stock import StockMean
from lightning_gradavg.reduction.sums import plain_sum
from lightning_gradavg.reduction.window import WHOLE_LOSS, MicroBatch, Window, as_weight
from lightning_gradavg.rules import RULES, Rule
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

    Attributes:
        batch: That of the training step under way.
        look_at: Looks at a batch before it is moved, as `Weights` says.
        skipped: Whether the step of the last window is left out.
        manual: What is told of the steps of a manual loop; None in automatic optimization.
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
        self.is_stock = rule == RULES["mean"] and (hook[0], hook[2], wire.asked_for, judge) == (None, None, None, None)
        self._judge = judge
        self._gradients: StockMean | Accumulation = StockMean()
        self._own: OwnGroups | None = None
        self._warned: set[str] = set()

    def setup(self, run: Run) -> None:
        """Forget an earlier run."""
        super().setup(run)
        self.batch: Any = None
        self._gradients = StockMean()
        self._frozen: dict[str, nn.Parameter] = {}
        self._reduced: list[str] = []
        self._sparse: list[Tensor] = []
        self._pending: list[WeighedLoss] = []
        self._end: Callable[[], None] = self._gradients.pause
        weights_of = Weights if self.rule.uses_weight else NoWeights
        giver = "training_step returned" if run.module.automatic_optimization else "manual_backward was given"
        self._weights = weights_of(self.rule, run.device, giver, self.warn, self._tell_once)
        self.look_at = self._weights.look_at
        self._withheld = self._withholds = self._unprepared = False
        self._told: set[str] = set()
        self._missing, self._missed = 0, list[int]()
        self._lost = self.skipped = False
        self._terms: tuple[str, ...] = (WHOLE_LOSS,)
        self.manual: ManualSteps | None = None

    def configure_ddp(self, run: Run) -> None:
        """Register the reduction, on CPU as on CUDA, where Lightning would drop a hook without a word."""
        super().configure_ddp(run)
        self._model = model = run.ddp
        manual = not run.module.automatic_optimization
        if self._judge is not None:
            self._require_judged(run)
        if manual and model.static_graph and not flushes_static_graph(run.trainer.strategy):
            raise ValueError(
                "static_graph=True with manual optimization needs a lightning that starts the reduction of the first"
                f" backward, as 2.6 does; in lightning {lightning.__version__} it would not be reduced."
                " Leave static_graph out, or use a newer lightning."
            )
        if manual:
            self.manual = ManualSteps(World.of(model.process_group), self.rule.name, self.warn)
        named = dict(model.module.named_parameters())
        names = {p: name for name, p in named.items()}
        # Now: a user may toggle which parameters require gradients.
        self._reduced = [names[p] for p in reduced_parameters(model)]
        self._gradients = StockMean(list(named.values()))
        stock = self.is_stock and not (model.static_graph and self._accumulates)
        if not stock or len(run.places) > 1:
            self._frozen = {name: p for name, p in named.items() if not p.requires_grad}
        if stock:
            return
        self._withholds = model.static_graph
        self._sparse = sparse_weights(model)
        trained = [(name, p) for name, p in named.items() if p.requires_grad]
        self._own = OwnGroups(World.of(model.process_group), run.device, self._timeout)
        # The frozen ones, too: they may train later.
        accumulation = self._gradients = self._accumulate(self._own, list(named.values()), trained)
        model.register_comm_hook(None, accumulation.reducer.hook)

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

    def _accumulate(
        self, own: OwnGroups, parameters: list[nn.Parameter], trained: list[tuple[str, nn.Parameter]]
    ) -> Accumulation:
        """Return what accumulates and reduces the gradients of a run. A collective operation."""
        run, manual = self.run, not self.run.module.automatic_optimization
        group = run.ddp.process_group
        bucket_sum, averages = self._bucket_sum(own, trained)
        reducer = Reducer(
            self.rule,
            run.places,
            group,
            run.device,
            bucket_sum or plain_sum(group),
            averages=averages,
            windows_may_differ=manual,
        )
        return Accumulation(reducer, parameters, preserves_gradients=manual)

    def _bucket_sum(self, own: OwnGroups, trained: list[tuple[str, nn.Parameter]]) -> tuple[BucketSum | None, bool]:
        """Return what sums buckets, None for an all-reduce, and whether it averages them."""
        run, (hook, state, wrapper) = self.run, self._hook
        group = run.ddp.process_group
        if hook is not None or wrapper is not None:
            return user_mean(hook or allreduce_hook, state, wrapper, group, run.device, own), True
        if self.is_stock:
            return None, False
        bucket_sum, obstacle = exchange_sum(self._wire, run.places, group, run.device, trained, own)
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
        return self._gradients.on_gather

    @property
    def sparse(self) -> set[int]:
        """The `id` of those whose gradients are sparse."""
        return set(map(id, self._sparse))

    @property
    def closed(self) -> tuple[Window, float] | None:
        """The window that is being reduced, and what its gradients were divided by; None under stock DDP."""
        return self._gradients.closed

    def prepare_later(self) -> None:
        """Leave it to the last backward of the step to have DDP expect its gradients: the forward has not done it."""
        self._unprepared = True

    def withhold(self) -> Callable[[], None] | None:
        """Keep a micro-batch's gradients local where DDP must run its hook all the same; return what ends that.

        With a static graph DDP must see its first backward, or an assertion of torch's reducer fails; there the hook
        runs, and leaves the buckets as they are. None where DDP may skip its hook.
        """
        self._withheld = self._withholds
        return self._release if self._withheld else None

    def _release(self) -> None:
        self._withheld = False

    def begin_step(self, batch: Any, missing: int = 0) -> None:
        """Note the batch of a training step, and forget losses whose backward was never run.

        Args:
            batch: The batch.
            missing: Number of ranks that have no batch of their own.

        Raises:
            RuntimeError: On all ranks, if the rule counts those that have none, and cannot be served otherwise.
        """
        self.batch, self._pending, self._missing = batch, [], missing
        if missing > 0:
            self._require_served(missing)
        if self.manual is not None:
            self.manual.begin_batch()
        self._gradients.crosses_ranks = self._crosses_ranks

    def _require_served(self, missing: int) -> None:
        """Raise where ranks without a batch cannot be left out of the reduction."""
        by_ranks = not self.rule.uses_weight and self.rule.name != "sum"
        completed = self.rule == RULES["mean"] and self.run.module.automatic_optimization
        if (by_ranks and not completed) or len(self.run.places) < self.run.world.size:
            raise RuntimeError(
                f"{missing} of {self.run.world.size} ranks have no more batches in this epoch, and"
                f" reduction={self.rule.name!r} counts ranks"
                f"{' in manual optimization' * (self.rule == RULES['mean'])}. Use reduction='weighted_mean', which"
                " counts samples and reduces over all ranks, or give all ranks the same number of batches."
            )

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
        named = output if isinstance(output, Mapping) else {"loss": output}
        loss = named.get("loss")
        accumulates = self.run.trainer.accumulate_grad_batches > 1
        if loss is None and (self._judge is not None or not (accumulates or self._may_leave_out)):
            return self._without_loss(counts=samples != 0)
        if loss is None and accumulates:
            raise RuntimeError(
                "training_step returned no loss within an accumulation window, which would then not be reduced."
                ' Return {"loss": loss, "weight": 0} for a micro-batch that is not to count.'
            )
        if loss is None:
            return output
        value = self.add(loss, named.get("weight"), samples, misspelt_weight(named)).value
        if value is loss:
            return output
        return {**output, "loss": value} if named is output else value

    def add(self, loss: Any, weight: Any, samples: float | None, problem: str | None = None) -> WeighedLoss:
        """Return a loss that is weighed by its backward, which is to be run next, or after those added before.

        Args:
            loss: The loss, or its terms by name.
            weight: Its weight, or None.
            samples: The number of samples, where it is known.
            problem: Why it cannot be weighed, for all ranks to raise together.
        """
        terms = loss_terms(loss)
        micro_batch = self._weights.read(terms, weight, self.batch, samples, problem)
        weighed = self._weighed(terms, micro_batch)
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
        return self._stand_in(MicroBatch(self._no_weight, explicit=bool(self._weights.explicit), absent=True))

    def _weighed(self, terms: Mapping[str, Tensor], micro_batch: MicroBatch) -> WeighedLoss:
        # Looked at on the host only: an accelerator would be waited for.
        weights = [weight for weight in micro_batch.weights.values() if weight.device.type == "cpu"]
        given = micro_batch.explicit and micro_batch.problem is None and not micro_batch.absent
        if given and any(weight == 0 for weight in weights):
            self.warn(
                f"rank {self.run.trainer.global_rank} has a micro-batch of weight 0, which contributes nothing to the"
                " gradient. Further ones are not reported.",
                everywhere=True,
            )
        if WHOLE_LOSS not in micro_batch.weights and self.run.ddp.static_graph and self._accumulates:
            raise ValueError(
                "static_graph=True needs the same backward in every micro-batch, but named loss terms take one per term"
                " in all but the last of a window. Leave static_graph out, or do not accumulate."
            )
        without_graph = not any(term.requires_grad for term in terms.values())
        # Weights are asked only where it matters, which may wait.
        idle = (self._sparse or without_graph) and all(weight == 0 for weight in micro_batch.weights.values())
        if idle and without_graph:
            terms = dict.fromkeys(terms, self._zero_loss(self._gradients.parameters))
            prepare_for_backward(self.run.ddp, terms)
        weighed = self._gradients.weigh(terms, micro_batch)
        if idle and self._sparse:
            # Its gradient is stopped at the loss, but DDP takes no sparse gradient that is undefined.
            weighed.value = weighed.value + self._zero_loss(self._sparse).to(weighed.value.dtype)
        return weighed

    def _zero_loss(self, parameters: Sequence[Tensor]) -> Tensor:
        return zero_loss(parameters, self.sparse)

    def fail_together(self, problem: str) -> Tensor:
        """Return a loss whose window ends with an error on all ranks."""
        advice = "Batch norm needs two values per channel: choose a batch size that leaves no rank a single sample"
        return self._stand_in(MicroBatch(self._no_weight, problem=f"{problem} {advice}"))

    def _stand_in(self, micro_batch: MicroBatch) -> Tensor:
        """Return the loss of a micro-batch that has none, and add nothing to any gradient."""
        zero = self._zero_loss(self._gradients.parameters)
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
        return final and self._model.require_backward_grad_sync and not self._withheld

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
        trainer, gradients = self.run.trainer, self._gradients
        last = self.ends_window(final=final)
        if last and self.manual is not None:
            self.manual.note_reduction()
        if final and self._unprepared:
            self._unprepared = False
            if self._judge is None:
                prepare_for_backward(self._model, root)
        divisor = 1
        if self.run.module.automatic_optimization:
            divisor = trainer.accumulate_grad_batches
            if first and trainer.fit_loop.epoch_loop.batch_idx % divisor == 0:
                gradients.reset()
                self._missed, self.skipped = [], False
        elif self.rule == RULES["mean"]:
            # As in stock DDP, the user divides the losses of a window in manual optimization.
            divisor = gradients.pending + 1
        self._missed.append(self._missing)
        now = last and self._judge is None
        gradients.backward(loss, run, last=now, loss_divisor=divisor)
        self._end = gradients.finish if now else gradients.pause
        if last and self._judge is not None:
            self._close_judged(self._judge, divisor)
        if last and not self.skipped:
            self._complete()
            if self._frozen:
                self._reduce_unfrozen()
        self._withholds = False

    def _close_judged(self, judge: Judge, divisor: float) -> None:
        """Reduce a window, all of it or what counts, or leave its step out."""
        run, accumulation, names = self.run, self._gradients, [name for name, _ in self.run.module.named_parameters()]
        assert isinstance(accumulation, Accumulation)
        gradients = ((names[index], gradient) for index, gradient in accumulation.held)
        verdict = judge.judge(gradients, run, explicit=bool(self._weights.explicit))
        trained = [parameter for parameter in accumulation.parameters if parameter.requires_grad]
        if verdict.skips:
            self.skipped, self._end = True, StockMean().pause
            accumulation.reset()
            for parameter in trained:
                parameter.grad = None  # an optimizer leaves it as it is, with its state
            return
        if verdict.drops:
            accumulation.drop(explicit=verdict.explicit)
        self._missed[-1] += verdict.dropped
        zero = self._zero_loss([p for p in trained if p.grad is not None] or trained)
        prepare_for_backward(run.ddp, zero)
        accumulation.close(zero.backward, divisor)
        self._end = accumulation.finish

    def _complete(self) -> None:
        """Multiply the mean of a window that was taken over ranks without a batch as well."""
        missed, self._missed = self._missed, []
        if self.rule != RULES["mean"] or not any(missed):
            return
        pairs = len(missed) * self.run.world.size
        for parameter in self._gradients.parameters:
            if parameter.grad is not None and parameter.requires_grad:
                parameter.grad.mul_(pairs / (pairs - sum(missed)))

    def end_backward(self) -> None:
        """End a micro-batch, once its gradients are there."""
        self._end()
        if self._lost:
            self._require_lost()

    def _reduce_unfrozen(self) -> None:
        """Reduce the gradients of parameters that were frozen when DDP was built, which knows those that were not."""
        unfrozen = {name: parameter for name, parameter in self._frozen.items() if parameter.requires_grad}
        if unfrozen:
            self._tell_once(
                f"GradAvgStrategy: parameter {next(iter(unfrozen))!r}, which was frozen when training began, trains now"
                f" ({len(unfrozen)} such in all): reduced after the backward, not while it runs, as after another fit()"
            )
            self._gradients.reduce_apart(list(unfrozen.values()), self._model.process_group)

    def check(self) -> None:
        """Raise what was found out about the last window, which no further one does: before it is saved, at the end."""
        if self.manual is not None:
            self.manual.compare()
        self._gradients.check()

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
        if indices is None:
            return None
        unused = ", ".join(self._reduced[int(index)] for index in indices[2].split())
        return (
            f"parameters without gradient on rank {indices[1]}: {unused}. They are not used in the loss that"
            " training_step returns. If that is meant, use GradAvgStrategy(find_unused_parameters=True), or freeze"
            " them with requires_grad_(False)."
        )

    def teardown(self) -> None:
        """End what runs beside the backward."""
        self.manual = None
        if self._own is not None:
            self._own.close()
            self._own = None
