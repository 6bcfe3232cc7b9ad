"""The reduction of a run: what Lightning's loop hands over, weighed before each backward, and what is left after it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_gradavg.lightning_internals import flushes_static_graph, stored
from lightning_gradavg.part import Part, Run
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.accumulation import Accumulation
from lightning_gradavg.reduction.average import average_gradients
from lightning_gradavg.reduction.comm_hook import CommHook
from lightning_gradavg.reduction.nonfinite import NonFinite
from lightning_gradavg.reduction.weigh import WeighedLoss, sparse_weights, zero_loss
from lightning_gradavg.reduction.weights import WHOLE_LOSS, MicroBatch, Weights, misspelt_weight
from lightning_gradavg.reduction.window import Window
from lightning_gradavg.rules import RULES, Rule

__all__ = ["Observer", "Reduction"]


class Observer(Protocol):
    """Looks at an optimizer step: `lightning_gradavg.report.part`, where the methods are documented."""

    def weighed(self, loss: Any, weighed: WeighedLoss, samples: float | None, batch: Any) -> None: ...  # noqa: D102
    def backward(self, loss: WeighedLoss, *, last: bool) -> AbstractContextManager[None]: ...  # noqa: D102
    def reduced(self, window: Window, *, skipped: bool) -> None: ...  # noqa: D102


class Reduction(Part):
    """Weighs each micro-batch's loss, and finishes what DDP averaged.

    Args:
        rule: The reduction rule.
        hook: The user's communication hook, its state and its wrapper.
        nonfinite: What becomes of steps that are not finite, as of `GradAvgStrategy`.
        in_pieces: Returns whether some of so many ranks may run several backwards in a step.
        on_reduced: Called when the gradients of an automatic step are there.

    Attributes:
        window: The window under way.
        pending: The loss whose backward comes next.
        is_manual: Whether the run is one in manual optimization.
        judges: Whether all ranks leave out a step, or raise, as one of them must.
        observer: Looks at the step under way, if any does.
    """

    def __init__(
        self,
        rule: Rule,
        hook: CommHook,
        *,
        nonfinite: str = "propagate",
        in_pieces: Callable[[int], bool] = lambda _: False,
        on_reduced: Callable[[], None] | None = None,
    ) -> None:
        self.rule, self._hook, self._in_pieces, self._on_reduced = rule, hook, in_pieces, on_reduced
        self._judge = None if nonfinite == "propagate" else NonFinite(nonfinite, rank_zero_info)
        self._is_mean, self.judges = rule == RULES["mean"], self._judge is not None
        self.is_stock = self._is_mean and not self.judges
        self._warned: set[str] = set()

    def setup(self, run: Run) -> None:
        """Forget an earlier run."""
        super().setup(run)
        self.is_manual = not run.module.automatic_optimization
        giver = "manual_backward was given" if self.is_manual else "training_step returned"
        self._weights = Weights(self.rule, run.device, giver, self.warn, self._tell_once)
        self.look_at = self._weights.look_at
        self._batch: Any = None
        self._close: Callable[[], None] = lambda: None
        self.observer: Observer | None = None
        self.pending: WeighedLoss | None = None
        self._told: set[str] = set()
        self._terms: tuple[str, ...] = (WHOLE_LOSS,)
        self._explicit = self._holding = self._lost = self._pieces = self._reduces_first = False
        self._missing = 0
        self._frozen: dict[str, nn.Parameter] = {}
        self._parameters: list[nn.Parameter] = []
        self._sparse: list[Tensor] = []
        if self._judge is not None:
            self._judge.reset()

    def configure_ddp(self, run: Run) -> None:
        """Begin a run that trains, and register a communication hook where there is need of one."""
        model, manual, named = run.ddp, self.is_manual, dict(run.ddp.module.named_parameters())
        self._refuse(run)
        world = World.of(None)
        # Of the module itself DDP asks for ".weight", and reduces what only "weight" stands for.
        skipped = {name for name in named if (name if "." in name else f".{name}") in model.parameters_to_ignore}
        ignored, apart = skipped | (named.keys() & model.parameters_to_ignore), list[nn.Parameter]()
        # Now: a user may toggle which parameters require gradients.
        self._reduced = [name for name, one in named.items() if one.requires_grad and name not in skipped]
        self._parameters, self._sparse = list(named.values()), sparse_weights(model)
        if world.size > 1:
            self._frozen = {n: p for n, p in named.items() if not p.requires_grad and n not in ignored}
            apart = [p for n, p in named.items() if n in (skipped if p.requires_grad else ignored)]
        # The very first backward of a static graph must be reduced, or an assertion of torch's reducer fails.
        self._reduces_first = model.static_graph
        self._pieces = self._in_pieces(world.size)
        half = any(one.dtype == torch.float16 and one.requires_grad for one in self._parameters)
        compares = self._judge is not None or (manual and not self._is_mean)
        afterwards = manual or self._pieces or half
        ways = {"compares": compares, "afterwards": afterwards, "in_pieces": self._pieces}
        window = Window(self.rule, run.places, world, run.device, **ways)
        own = Accumulation(window, self._parameters, owned_by_user=manual, apart=apart)
        self.begin(run, own)
        self._hook.register(run, self.rule)

    def begin(self, run: Run, accumulation: Accumulation) -> None:
        """Begin a run that trains."""
        super().configure_ddp(run)
        self.window, self._accumulation, self._close = accumulation.window, accumulation, accumulation.close

    def teardown(self) -> None:
        """Leave the parameters as they were found."""
        self._close()

    def _refuse(self, run: Run) -> None:
        """Raise a ValueError about the first of what cannot be served, which says what to do instead."""
        manual, option = self.is_manual, f"nonfinite={self._judge.policy!r}" if self._judge is not None else ""
        unflushed = run.ddp.static_graph and not flushes_static_graph(run.trainer.strategy)
        scaled = getattr(run.trainer.precision_plugin, "scaler", None) is not None
        refusals = {
            f"{option} checks a step before it is taken, but in manual optimization you take it. Check the"
            " gradients after manual_backward, which are the same on all ranks, or leave it out.": option and manual,
            f"{option} with precision={run.trainer.precision!r}, whose loss scaler makes all ranks skip a step with"
            " a gradient that is not finite. Leave it out, or use another precision.": option and scaled,
            "static_graph=True with manual optimization needs lightning 2.6, which has DDP reduce the first backward."
            " Leave static_graph out, or use a newer lightning.": manual and unflushed,
        }
        for text in (text for text, refused in refusals.items() if refused):
            raise ValueError(text)

    @property
    def sparse(self) -> set[int]:
        """The `id` of those whose gradients are sparse."""
        return set(map(id, self._sparse))

    def hold(self, *, holding: bool) -> bool:
        """Note whether the backwards that follow stay local; return whether DDP must reduce them all the same."""
        self._holding = holding
        return self._reduces_first

    def begin_step(self, batch: Any, missing: int = 0) -> None:
        """Note the batch of a training step, of which `missing` ranks have none, and forget losses without backward.

        Raises:
            RuntimeError: On all ranks, if the rule counts ranks.
        """
        self._batch, self.pending, self._missing = batch, None, missing
        self._accumulation.begin_step()
        if self._is_mean and not self.is_manual:
            return
        if missing > 0 and not self.rule.uses_weight and self.rule.name != "sum":
            raise RuntimeError(
                f"{missing} of {self.run.world.size} ranks have no more batches in this epoch, and"
                f" reduction={self.rule.name!r} counts ranks{' in manual optimization' * self._is_mean}. Use"
                " reduction='weighted_mean', which counts samples, or give all ranks the same number of batches."
            )

    def read(self, output: Any, samples: float | None) -> Any:
        """Return a training step's output with a weighed loss; `samples` as of `Weights.read`.

        In manual optimization it has no loss that Lightning takes.
        """
        if self.is_manual:
            return output
        named = output if isinstance(output, Mapping) else {"loss": output}
        loss, weight = named.get("loss"), named.get("weight")
        if loss is None:
            return self._without_loss(output, counts=samples != 0)
        value = self.add(loss, weight, samples, misspelt_weight(named) if weight is None else None).value
        if value is loss:
            return output
        return {**output, "loss": value} if named is output else value

    def add(self, loss: Any, weight: Any, samples: float | None, problem: str | None = None) -> WeighedLoss:
        """Return a loss, or terms by name, weighed by the backward that runs next; arguments as of `Weights.read`."""
        terms, micro_batch = self._weights.read(loss, weight, self._batch, samples, problem)
        if micro_batch.is_zero:
            terms = self._without_weight(terms, micro_batch)
        plain = self.window.carries_nothing and not micro_batch.absent
        weighed = WeighedLoss.of(terms, micro_batch, plain=plain, sparse=self._sparse)
        if self.observer is not None:
            self.observer.weighed(loss, weighed, samples, self._batch)
        self.pending = weighed
        self._terms, self._explicit = tuple(micro_batch.weights), micro_batch.explicit
        if self._judge is not None and not micro_batch.absent:
            self._judge.note(weighed.value)
        return weighed

    def _without_weight(self, terms: Mapping[str, Tensor], micro_batch: MicroBatch) -> Mapping[str, Tensor]:
        """Return the terms of a loss that does not count, with a graph."""
        if micro_batch.explicit and micro_batch.problem is None and not micro_batch.absent:
            self.warn(
                f"rank {self.run.trainer.global_rank} has a micro-batch of weight 0, which contributes nothing to the"
                " gradient. Further ones are not reported.",
                everywhere=True,
            )
        if not any(term.requires_grad for term in terms.values()):
            terms = dict.fromkeys(terms, self._zero_loss())
            prepare_for_backward(self.run.ddp, terms)
        return terms

    @property
    def _expected(self) -> int:
        """Micro-batches of a full window. In manual optimization only the user knows."""
        return 1 if self.is_manual else self.run.trainer.accumulate_grad_batches

    def _without_loss(self, output: Any, *, counts: bool) -> Any:
        """Return what stands for the loss of a step that has none, for the backward that the other ranks run."""
        if self._judge is not None:
            if counts:
                self._judge.note(None)
        elif self._expected > 1 or self._pieces:
            raise RuntimeError(
                "training_step returned no loss within an accumulation window, which would then not be reduced."
                ' Return {"loss": loss, "weight": 0} for a micro-batch that should not count.'
            )
        elif self.run.world.size == 1 or getattr(self.run.trainer.precision_plugin, "scaler", None) is not None:
            return output  # nobody waits for this rank, or a loss scaler leaves out a step without loss
        self._lost = self._judge is None and counts
        return self._stand_in(
            MicroBatch(dict.fromkeys(self._terms, 0.0), self._explicit, absent=True, without_loss=counts)
        )

    def agree(self, output: Any) -> Any:
        """Return the output of a step that is judged; where some rank has no loss, one that adds nothing.

        All ranks run the backward of a gather or none does, and a rank without loss has none to run.
        """
        if self.run.world.size == 1:
            return output
        mine = self.pending is not None and self.pending.micro_batch.without_loss
        lost, explicit = map(max, zip(*self.run.world.gather_integers([mine, self._explicit]), strict=True))
        if not lost:
            return output
        return self._stand_in(MicroBatch({WHOLE_LOSS: 0.0}, bool(explicit), absent=True, without_loss=mine))

    def fail_together(self, problem: str) -> Tensor:
        """Return a loss whose window ends with an error on all ranks."""
        advice = "Choose a batch size that leaves no rank and no replica a single sample, which batch norm cannot serve"
        return self._stand_in(MicroBatch(dict.fromkeys(self._terms, 0.0), problem=f"{problem} {advice}"))

    def _stand_in(self, micro_batch: MicroBatch) -> Tensor:
        """Return the loss of a micro-batch that has none, and add nothing to any gradient."""
        zero = self._zero_loss()
        prepare_for_backward(self.run.ddp, zero)
        self.pending = WeighedLoss(zero, micro_batch)
        return zero

    def _zero_loss(self) -> Tensor:
        if not self._parameters:
            raise RuntimeError(
                "training_step returned no loss, or a loss without a graph, where the model is sharded: the other ranks"
                ' need this one\'s backward. Return {"loss": loss, "weight": 0}, with a loss of the model\'s output.'
            )
        return zero_loss(self._parameters, self.sparse)

    def agree_on_lift(self) -> None:
        """Agree on what the losses of a step in pieces carry, after its first forward. A collective operation."""
        if self._pieces and self._begins_window:
            self.window.agree_on_lift(None if self.pending is None else self.pending.micro_batch.read())

    @property
    def _begins_window(self) -> bool:
        index: int = self.run.trainer.fit_loop.epoch_loop.batch_idx
        return index % self._expected == 0

    def backward(self, run: Callable[[], None], *, final: bool = True) -> None:
        """Call `run`, which runs the backward of the pending loss: the final one of its step, or one before zero_grad.

        Without an accumulation window that goes on, it ends with the gradients reduced; call `finish` then.
        """
        loss, self.pending, last = self.pending, None, final and not self._holding
        assert loss is not None
        observed = nullcontext() if self.observer is None else self.observer.backward(loss, last=last)
        with observed:
            self._backward(loss, run, last=last, final=final)

    def _backward(self, loss: WeighedLoss, run: Callable[[], None], *, last: bool, final: bool) -> None:
        window = self.window
        if not self.is_manual:
            window.loss_divisor = self._expected
            if window.micro_batches and self._accumulation.pieces == 0 and self._begins_window:
                window.reset()
        else:
            window.loss_divisor = None if self._is_mean else 1.0
        masks = self._hook.masking if self._hook.masks else None
        missed = self._missing if self._is_mean else 0
        with self._accumulation.backward(loss, last=last, final=final, missed=missed, masks=masks):
            run()
        self._reduces_first = False

    def finish(self) -> None:
        """Have the gradients be the reduced ones, once the backward that ends a window has been."""
        skipped = self._reduce()
        if self._on_reduced is not None and not self.is_manual:
            self._on_reduced()
        if self.observer is not None:
            # Gradients from before the window, which are added now, are no part of the report.
            self.observer.reduced(self.window, skipped=skipped)
        self._end_window()

    def _reduce(self) -> bool:
        """Finish the gradients of a window that ended; return whether its step is left out."""
        if not self._accumulation.reduce():
            return False
        if self._judge is not None:
            gradients = ((name, p.grad) for name, p in self.run.module.named_parameters() if p.grad is not None)
            known = self.window.known if self.run.device.type == "cpu" else self.window.check()
            if self._judge.skips(known, gradients, self.run):
                self._leave_out()
                return True
        if self._frozen:
            self._reduce_apart()
        if self._lost:
            self._require_lost()
        return False

    def _end_window(self) -> None:
        self._accumulation.end()

    def _leave_out(self) -> None:
        for parameter in self._parameters:
            if parameter.requires_grad:
                parameter.grad = None  # so an optimizer changes neither it nor its state

    def _require_lost(self) -> None:
        """Leave a step out for which this rank has no loss, as Lightning does, if no other rank has one.

        Raises:
            RuntimeError: If another has, whose gradient would be averaged with nothing.
        """
        self._lost = False
        if any(bool(stored(p.grad).any()) for p in self._parameters if p.requires_grad and p.grad is not None):
            raise RuntimeError(
                f"training_step returned no loss on rank {self.run.world.rank}, and one on others. Return one on all"
                ' ranks, such as {"loss": loss, "weight": 0} under a rule with weights; or have such a step left out by'
                " nonfinite='skip_step'."
            )
        self._leave_out()

    def _reduce_apart(self) -> None:
        """Reduce parameters that were frozen when DDP was built, and belong to none of its buckets."""
        unfrozen = {name: parameter for name, parameter in self._frozen.items() if parameter.requires_grad}
        if unfrozen:
            self._tell_once(
                f"GradAvgStrategy: parameter {next(iter(unfrozen))!r}, which was frozen when training began, trains now"
                f" ({len(unfrozen)} such in all): reduced after the backward, not while it runs, as after another fit()"
            )
            average_gradients(list(unfrozen.values()))

    def on_train_end(self) -> None:
        """Raise what was found out about the last window, which no further one does."""
        self.window.check()

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

    def describe(self) -> str:
        """Return what the line at the start of a run says of the hook."""
        return self._hook.describe()

    def advice(self, exception: BaseException) -> str | None:
        """Return the names of the parameters that DDP only counts when it misses their gradients, and what to do."""
        indices = re.search(r"Parameter indices which did not receive grad for rank (\d+): ([\d ]+)", str(exception))
        if indices is None:
            return None
        unused = ", ".join(self._reduced[int(index)] for index in indices[2].split())
        return (
            f"parameters without gradient on rank {indices[1]}: {unused}. They are not used in the loss that"
            " training_step returns. If that is intended, use GradAvgStrategy(find_unused_parameters=True), or freeze"
            " them with requires_grad_(False)."
        )
