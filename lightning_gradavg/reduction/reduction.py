"""The reduction of a run: weighs the losses of Lightning's loop, and finishes the gradients after the backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_gradavg.lightning_internals import flushes_static_graph, stored
from lightning_gradavg.part import Part, Run
from lightning_gradavg.ranks import by_value
from lightning_gradavg.reduction.comm_hook import CommHook
from lightning_gradavg.reduction.weights import WHOLE_LOSS, MicroBatch, WeighedLoss, Weights, sparse_weights, zero_loss
from lightning_gradavg.reduction.window import Accumulation
from lightning_gradavg.rules import RULES, Rule

__all__ = ["Reduction"]

_MISSPELT = {"weights", "Weight", "wieght", "weigth"}


class Reduction(Part):
    """Weighs each micro-batch's loss, and finishes the gradients that DDP averaged.

    `in_pieces` returns whether a rank may run several backwards per step, given the world size. `on_reduced` is called
    after the gradients of an automatic step are reduced.
    """

    window: Accumulation

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
        self._nonfinite, self.judges = nonfinite, nonfinite != "propagate"
        self._is_mean = rule == RULES["mean"]
        self.is_stock = self._is_mean and not self.judges
        self._said: set[str] = set()

    def setup(self, run: Run) -> None:
        """Forget an earlier run."""
        super().setup(run)
        self.is_manual = not run.module.automatic_optimization
        self._weights = Weights(self.rule, run.device, self.warn, lambda text: self.warn(text, rank_zero_info))
        self.look_at = self._weights.look_at
        self._batch: Any = None
        self._close: Callable[[], None] = lambda: None
        self.observer: Any = None  # of the current step: `lightning_gradavg.report.part.Reports`
        self.pending: WeighedLoss | None = None  # whose backward comes next
        self._terms: tuple[str, ...] = (WHOLE_LOSS,)
        self._holding = self._lost = self._pieces = self._reduces_first = False
        self._parameters: list[nn.Parameter] = []
        self._sparse: dict[int, Tensor] = {}
        self._losses: list[Tensor | None] = []  # of the window, under `nonfinite`

    def configure_ddp(self, run: Run) -> None:
        """Begin a run that trains, and register a communication hook if it needs one."""
        model, manual, named = run.ddp, self.is_manual, dict(run.ddp.module.named_parameters())
        self._refuse(run, [name for name in named if {name, f".{name}"} & model.parameters_to_ignore])
        self._parameters, self._sparse = list(named.values()), sparse_weights(model)
        reduced = named.keys() - model.parameters_to_ignore if run.world.size > 1 else ()
        # An assertion of torch's reducer fails unless the very first backward of a static graph is reduced.
        self._reduces_first = model.static_graph
        self._pieces = self._in_pieces(run.world.size)
        half = any(one.dtype == torch.float16 and one.requires_grad for one in self._parameters)
        window = Accumulation(
            *(self.rule, run.places, run.world, run.device),
            parameters=self._parameters,
            owned_by_user=manual,
            frozen=[one for name, one in named.items() if not one.requires_grad and name in reduced],
            mask=self._hook.register(run, self.rule),
            compares=self.judges or (manual and not self._is_mean),
            afterwards=manual or self._pieces or half,
        )
        self.begin(run, window)

    def begin(self, run: Run, window: Accumulation) -> None:
        """Begin a run that trains."""
        super().configure_ddp(run)
        self.window, self._close = window, window.close
        self.window.loss_divisor = None if self._is_mean else 1.0

    def teardown(self) -> None:
        """Remove the window's hooks from the parameters."""
        self._close()

    def _refuse(self, run: Run, ignored: list[str]) -> None:
        """Raise a ValueError if the run cannot be served."""
        manual, judges, option = self.is_manual, self.judges, f"nonfinite={self._nonfinite!r}"
        unflushed = run.ddp.static_graph and not flushes_static_graph(run.trainer.strategy)
        scaled = getattr(run.trainer.precision_plugin, "scaler", None) is not None
        refusals = {
            f"{option} checks a step before it is taken, but in manual optimization you take it. Check the"
            " gradients after manual_backward, which are the same on all ranks, or leave it out.": judges and manual,
            f"{option} with precision={run.trainer.precision!r}, whose loss scaler makes all ranks skip a step with"
            " a gradient that is not finite. Leave it out, or use another precision.": judges and scaled,
            "static_graph=True with manual optimization needs lightning 2.6, which has DDP reduce the first backward."
            " Leave static_graph out, or use a newer lightning.": manual and unflushed,
            f"DDP was told to ignore the parameter {''.join(ignored[:1])!r}, so only its loss would be weighed. Use"
            " reduction='mean' without split_batches, or Lightning's DDPStrategy.": ignored and not self._is_mean,
        }
        if found := [text for text, refused in refusals.items() if refused]:
            raise ValueError(found[0])

    def hold(self, *, holding: bool) -> bool:
        """Note whether the following backwards stay local; return whether DDP must reduce them anyway."""
        self._holding = holding
        return self._reduces_first

    def begin_step(self, batch: Any, missing: int = 0) -> None:
        """Note the batch of a training step, which `missing` ranks don't have, and drop losses without a backward."""
        self._batch, self.pending = batch, None
        self._skips_backward = self.run.loop.skips_backward
        self.window.begin_step(anew=not self.is_manual and self._begins_window)
        if not self.is_manual:
            self.window.loss_divisor = self._expected
            self.window.missing = missing if self._is_mean else 0
        if missing > 0 and (self.is_manual or not self._is_mean) and self._counts_ranks:
            raise RuntimeError(
                f"{missing} of {self.run.world.size} ranks have no more batches in this epoch, and"
                f" reduction={self.rule.name!r} counts ranks{' in manual optimization' * self._is_mean}. Use"
                " reduction='weighted_mean', which counts samples, or give all ranks the same number of batches."
            )

    @property
    def _counts_ranks(self) -> bool:
        return self.window.depends_on_length if self.rule.uses_weight else self.rule.name != "sum"

    def read(self, output: Any, samples: float | None, batch: Any) -> Any:
        """Return the output of a forward of `batch` with a weighed loss; `samples` as in `Weights.read`."""
        self._batch = batch
        if self.is_manual or self._skips_backward:  # Lightning runs no backward from it
            return output
        named = output if isinstance(output, Mapping) else {"loss": output}
        loss, weight = named.get("loss"), named.get("weight")
        if loss is None:
            return self._without_loss(output, counts=samples != 0)
        misspelt = [key for key in named if key in _MISSPELT] if weight is None else []
        problem = f'the result of training_step has {misspelt[0]!r}: call it "weight"' if misspelt else None
        value = self.add(loss, weight, samples, problem).value
        if value is loss:
            return output
        return {**output, "loss": value} if named is output else value

    def add(self, loss: Any, weight: Any, samples: float | None, problem: str | None = None) -> WeighedLoss:
        """Weigh a loss, or its terms by name, for the next backward; arguments as in `Weights.read`."""
        terms, micro_batch = self._weights.read(loss, weight, self._batch, samples, problem)
        self._terms = tuple(micro_batch.weights)
        counts_nothing = micro_batch.is_zero
        if counts_nothing and micro_batch.explicit and not (micro_batch.absent or micro_batch.problem):
            self.warn(
                f"rank {self.run.world.rank} has a micro-batch of weight 0, which contributes nothing to the gradient."
                " Further ones are not reported.",
                warnings.warn,
            )
        if counts_nothing and not any(term.requires_grad for term in terms.values()):
            terms = dict.fromkeys(terms, self._zero_loss())
        plain = self.window.carries_nothing and not micro_batch.absent
        weighed = WeighedLoss.of(terms, micro_batch, plain=plain)
        if self.observer is not None:
            self.observer.weighed(samples, self._batch)
        if self.judges and not micro_batch.absent:
            self._losses.append(weighed.value.detach())
        return self._pend(weighed)

    def _pend(self, loss: WeighedLoss) -> WeighedLoss:
        """Add a loss to the window early: the ranks' exchange then overlaps with what precedes the backward."""
        self.pending = loss
        self.window.enter(loss, last=not self._holding and not self._pieces)
        return loss

    @property
    def _expected(self) -> int:
        return self.run.trainer.accumulate_grad_batches

    def _without_loss(self, output: Any, *, counts: bool) -> Any:
        """Return a stand-in for a missing loss, so that this rank joins the other ranks' backward."""
        if self.judges:
            self._losses += [None] * counts
        elif self._expected > 1 or self._pieces:
            raise RuntimeError(
                "training_step returned no loss within an accumulation window, which would then not be reduced."
                ' Return {"loss": loss, "weight": 0} for a micro-batch that should not count.'
            )
        elif self.run.world.size == 1 or getattr(self.run.trainer.precision_plugin, "scaler", None) is not None:
            return output  # nobody waits for this rank, or a loss scaler skips a step without a loss
        self._lost = counts and not self.judges
        return self._stand_in(absent=True, without_loss=counts)

    def agree(self, output: Any) -> Any:
        """Return the output of a step under `nonfinite`; if some rank has no loss, a loss of 0 on all ranks.

        All ranks must run the backward of a gather, or none, and a rank without a loss cannot.
        """
        assert self.pending is not None
        micro_batch = self.pending.micro_batch
        if self.run.world.size > 1 and any(map(any, self.run.world.gather_integers([micro_batch.without_loss]))):
            self.pending = WeighedLoss(self._zero_loss(), micro_batch, [])
            return self.pending.value
        return output

    def _stand_in(self, **known: Any) -> Tensor:
        """Return a loss that adds nothing to any gradient."""
        micro_batch = MicroBatch(dict.fromkeys(self._terms, 0.0), **known)
        return self._pend(WeighedLoss(self._zero_loss(), micro_batch, [])).value

    def _zero_loss(self) -> Tensor:
        """Return a loss of 0 that reaches all parameters, with DDP ready for its backward."""
        if not self._parameters:
            raise RuntimeError(
                "training_step returned no loss, or a loss without a graph, where the model is sharded: the other ranks"
                ' need this one\'s backward. Return {"loss": loss, "weight": 0}, with a loss of the model\'s output.'
            )
        if self._reduces_first:
            raise RuntimeError(
                "static_graph=True records the graph of the first backward, so the first training_step must return a"
                " loss of the model's output on every rank. Return one, or leave static_graph out."
            )
        zero = zero_loss(self._parameters, self._sparse)
        prepare_for_backward(self.run.ddp, zero)
        return zero

    @property
    def _begins_window(self) -> bool:
        index: int = self.run.trainer.fit_loop.epoch_loop.batch_idx
        return index % self._expected == 0

    def backward(self, run: Callable[[], None], *, final: bool = True) -> None:
        """Call `run` for the backward of the pending loss, the `final` one of its step or not."""
        loss, self.pending, last = self.pending, None, final and not self._holding
        assert loss is not None
        with nullcontext() if self.observer is None else self.observer.backward(loss, last=last):
            self._backward(loss, run, last=last, final=final)
        self._reduces_first = False

    def _backward(self, loss: WeighedLoss, run: Callable[[], None], *, last: bool, final: bool) -> None:
        self.window.backward(loss, run, last=last, final=final)

    def finish(self) -> None:
        """Finish the gradients after a backward, if it ended a window."""
        skipped = self._reduce()
        if self._on_reduced is not None and not self.is_manual:
            self._on_reduced()
        if self.observer is not None:
            # The report leaves out gradients from before the window, which are added next.
            self.observer.reduced(self.window, skipped=skipped)
        self._end_window()

    def _reduce(self) -> bool:
        """Finish the gradients of an ended window; return whether all ranks skip its step."""
        if not self.window.reduce():
            return False
        if self.judges and self._is_left_out():
            self._leave_out()
            return True
        if self._lost:
            self._require_lost()
        return False

    def _end_window(self) -> None:
        self.window.end()

    def _is_left_out(self) -> bool:
        """Return whether all ranks skip the step, or raise on all. The host waits for the gradients."""
        totals, losses, self._losses = self.window.check(), self._losses, []
        if totals.without_loss == self.run.world.size:
            return True  # as Lightning itself does
        gradients = {name: p.grad for name, p in self.run.module.named_parameters() if p.grad is not None}
        # One wait for the device instead of one per parameter.
        finite = [stored(gradient).isfinite().all() for gradient in gradients.values()]
        read = torch.stack(finite).tolist() if finite else []
        bad = [name for name, fine in zip(gradients, read, strict=True) if not fine]
        if totals.without_loss == 0 and not bad:
            return False
        of_ranks = self.run.world.gather_objects(_fault(losses))
        if not any(of_ranks):
            of_ranks = [f"the gradient of parameter {bad[0]!r} is not finite"] * self.run.world.size
        found = f"optimizer step {self.run.trainer.global_step}: {by_value(text or 'nothing' for text in of_ranks)}"
        if self._nonfinite == "raise":
            raise RuntimeError(
                f"{found}. With nonfinite='skip_step' all ranks skip such a step; a loss of weight 0 leaves one"
                " micro-batch out."
            )
        rank_zero_info(f"GradAvgStrategy: {found}; nonfinite={self._nonfinite!r}: all ranks skip the step")
        return True

    def _leave_out(self) -> None:
        for parameter in self._parameters:
            if parameter.requires_grad:
                parameter.grad = None  # so an optimizer changes neither it nor its state

    def _require_lost(self) -> None:
        """Skip a step for which no rank has a loss, as Lightning does; raise if another rank has one."""
        self._lost = False
        if any(bool(stored(p.grad).any()) for p in self._parameters if p.requires_grad and p.grad is not None):
            raise RuntimeError(
                f"training_step returned no loss on rank {self.run.world.rank}, and one on others. Return one on all"
                ' ranks, such as {"loss": loss, "weight": 0} under a rule with weights; or have such a step left out by'
                " nonfinite='skip_step'."
            )
        self._leave_out()

    def on_train_end(self) -> None:
        """Raise the error of the last window, if it was not read yet."""
        self.window.check()

    def warn(self, message: str, how: Callable[[str], None] = rank_zero_warn) -> None:
        """Tell the user something once per strategy, by default on rank 0."""
        if message not in self._said:
            self._said.add(message)
            how(message)

    def describe(self) -> str:
        """Return the start line's words about the hook."""
        return self._hook.describe()


def _fault(losses: Sequence[Tensor | None]) -> str | None:
    """Return the problem of a rank's losses, of which None is a missing one."""
    if None in losses:
        return "training_step returned no loss"
    return None if all(bool(loss.isfinite().all()) for loss in losses if loss is not None) else "the loss is not finite"
