"""The engines of a run: what turns the gradients that DDP averages into those of the rule.

    | engine    | for                                             | between loss and optimizer                         |
    |-----------|-------------------------------------------------|----------------------------------------------------|
    | `Stock`   | the plain mean                                  | nothing; N / length after a short last window      |
    | `Weighed` | a rule with weights, a sum, nodes, `nonfinite=` | a factor on the loss, an exchange of totals if the |
    |           |                                                 | rule has weights, a factor on the gradients        |
    | `Tree`    | `reproducible=True` (`reproducible.engine`)     | all replicas, added up in one order                |

One is chosen when training begins. The reduction calls it in the order of the methods of `Engine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from lightning_gradavg.reduction.factor import factor_after
from lightning_gradavg.reduction.gradients import ModelGradients
from lightning_gradavg.reduction.guard import DiscardedGradients
from lightning_gradavg.reduction.kept import KeptGradients, PieceGradients
from lightning_gradavg.reduction.loss import MicroBatch, WeighedLoss
from lightning_gradavg.reduction.window import OpenWindows, Window, WindowRecord
from lightning_gradavg.rules import Share

__all__ = ["Engine", "StepFacts", "Stock", "Weighed"]


class StepFacts(NamedTuple):
    """What the training loop says of a training step that begins.

    Attributes:
        begins_window: Whether its batch is the first of an accumulation window; False in manual optimization.
        divisor: N, what Lightning divides the loss by: `accumulate_grad_batches`; None in manual optimization, where it
            divides by nothing, and the user ends windows.
        missing: Number of ranks that have no batch of their own for this step.
        length: Number of the window's batches so far, with that of this step.
        may_end_early: Whether the window may have fewer than N micro-batches, on some ranks or on all.
    """

    begins_window: bool
    divisor: int | None
    missing: int
    length: int = 1
    may_end_early: bool = False


class Engine(ABC):
    """Reduces the gradients of one run."""

    multiplies = True
    """Whether losses get a factor."""

    @abstractmethod
    def begin_step(self, facts: StepFacts) -> None:
        """Begin a training step, whose batch has arrived."""

    @abstractmethod
    def add(self, loss: WeighedLoss, *, last: bool) -> None:
        """Add the loss of a micro-batch, the `last` of its window or not. May be a collective operation."""

    @abstractmethod
    def backward(self, loss: WeighedLoss, run: Callable[[], None], *, final: bool, holding: bool) -> None:
        """Call `run` for the backward of the loss that was added.

        Args:
            loss: The loss, whose factor is set.
            run: Runs its backward.
            final: Whether it is the last backward of its step.
            holding: Whether the window goes on after the step.
        """

    @abstractmethod
    def reduce(self) -> bool:
        """Finish the gradients if the backward ended the window; return whether it did."""

    @abstractmethod
    def record(self) -> WindowRecord:
        """Return what a report says of the window that was reduced."""

    @abstractmethod
    def close(self, *, skipped: bool) -> None:
        """End the window that was reduced; `skipped` says whether all ranks skip its step."""

    @property
    def ranks_without_loss(self) -> int:
        """Number of ranks without a loss in a window that was reduced, where ranks judge every step."""
        return 0

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether the next micro-batch begins a window."""


class Stock(Engine):
    """The plain mean, which is what DDP computes: the same bits, memory and errors.

    Two things remain in automatic optimization. Lightning divides every loss by N, so a window of fewer than N
    micro-batches, or one in which some ranks have no batch, is multiplied by the rest once, after its reduction. And a
    rank without a batch runs the backward of another one, whose gradient is discarded.
    """

    multiplies = False

    def __init__(self, model: ModelGradients, world_size: int) -> None:
        """Serve a model that DDP or FSDP averages over so many ranks."""
        self._model = model
        self._world_size = world_size
        self._kept: KeptGradients | None = None  # those from before the window, while they are set aside
        self._facts = StepFacts(begins_window=False, divisor=None, missing=0)
        self._is_last = False
        self._was_cut = False  # whether gradients may be left of a window that no rank has reduced
        self._begin_window()

    def _begin_window(self) -> None:
        self._micro_batches: list[MicroBatch] = []
        self._missed = 0  # pairs of rank and micro-batch that do not exist
        self._kept_in_place = False  # whether gradients from before the window are added up with its own

    def begin_step(self, facts: StepFacts) -> None:
        """Note N. Of a window that an epoch has cut off, stock reduces in the next one what the user does not zero."""
        self._facts = facts
        if facts.begins_window:
            self._was_cut |= not self.is_empty
            if self._kept is not None:
                self._kept.add_back()
                self._kept = None
            self._begin_window()

    def add(self, loss: WeighedLoss, *, last: bool) -> None:
        """Count the micro-batch."""
        self._micro_batches.append(loss.micro_batch)
        self._missed += self._facts.missing
        self._is_last = last

    def backward(self, loss: WeighedLoss, run: Callable[[], None], *, final: bool, holding: bool) -> None:  # noqa: ARG002  # as above
        """Run the backward as it is."""
        assert final, "a step has several backwards only where ranks share batches, which weighs the mean"
        if len(self._micro_batches) == 1:
            self._set_aside()
        # A stand-in: the rank has no batch, or no loss. Multiplying its loss by 0 would leave NaN.
        if loss.micro_batch.counts:
            try:
                run()
            except BaseException:
                self._begin_window()  # a user's loop may go on
                raise
            return
        discarded = DiscardedGradients(self._model.leaves(), loss.micro_batch)
        try:
            run()
        finally:
            discarded.end()

    def _set_aside(self) -> None:
        """Set aside gradients from before the window if it may be multiplied: a full one leaves them as they are."""
        facts = self._facts
        if facts.divisor is None or (facts.divisor == 1 and not facts.may_end_early):
            return  # nothing can be multiplied, so a step does not walk over the parameters
        # Lightning has zeroed them, unless the user overrides `optimizer_zero_grad`. Setting them aside would change
        # the last bits of a full window, as stock adds before it averages (`test_ranks_stock.py`: kept gradients in
        # windows).
        has_gradients = any(parameter.grad is not None for parameter in self._model.parameters())
        # Gradients of a window that was cut off are not reduced yet, and must not be set aside.
        sets_aside = has_gradients and facts.may_end_early and not self._was_cut
        self._kept_in_place = has_gradients and not sets_aside
        if sets_aside:
            self._kept = KeptGradients(self._model.parameters())

    def reduce(self) -> bool:
        """Average what DDP does not know, and multiply the gradients of a short window."""
        if not self._is_last:
            return False
        parameters = self._model.parameters()
        factor = self._factor()
        # Nobody could know, and set the old gradients aside.
        if factor != 1 and self._kept_in_place:
            raise RuntimeError(
                "the accumulation window ended before it was full, although its loader has a length, or some ranks had"
                " no batch in it; and gradients from before it were kept, which would be multiplied, too. Have all"
                " loaders yield as many batches as they say, or zero gradients at the beginning of every window."
            )
        self._model.finish(parameters, factor)
        return True

    def _factor(self) -> float:
        """Return N / length, or N * W / pairs where some ranks have no batch; 1 in manual optimization."""
        divisor = self._facts.divisor
        if divisor is None:
            return 1.0
        # By the loop's count: L-BFGS evaluates its closure several times, with one batch.
        pairs = self._world_size * self._facts.length - self._missed
        return factor_after(divisor, self._world_size, pairs, lift=1.0)

    def record(self) -> WindowRecord:
        """Return what a report says of the window that was reduced: every pair counts once."""
        shares = []
        for micro_batch in self._micro_batches:
            counted = 0.0 if micro_batch.absent else 1.0
            shares.append(Share(counted, counted))
        divisor = 1.0 if self._facts.divisor is None else self._facts.divisor
        return WindowRecord(self._micro_batches, shares, divisor)

    def close(self, *, skipped: bool) -> None:
        """Add the gradients from before the window; those of a skipped step come back when the next one begins."""
        if self._kept is not None and not skipped:
            self._kept.add_back()
            self._kept = None
        self._was_cut = False
        self._begin_window()

    @property
    def is_empty(self) -> bool:
        """Whether the next micro-batch begins a window."""
        return not self._micro_batches


class Weighed(Engine):
    """A rule that multiplies: the windows of `reduction.window`, and steps of several backwards."""

    def __init__(self, windows: OpenWindows, pieces: PieceGradients) -> None:
        """Serve a run with its windows."""
        self._windows = windows
        self._pieces = pieces
        self._pieces_of_step = 0  # backwards of the running step that ran within `training_step`
        self._window: Window | None = None
        self._facts = StepFacts(begins_window=False, divisor=None, missing=0)

    @property
    def _now(self) -> Window:
        assert self._window is not None
        return self._window

    def begin_step(self, facts: StepFacts) -> None:
        """Note N, and give up what an unfinished step or an epoch has cut off."""
        self._facts = facts
        if self._pieces_of_step > 0:
            # The step before ended its epoch between two pieces, as by StopIteration.
            self._pieces.forget()
            self._windows.abandon()
        if facts.begins_window and not self.is_empty:
            self._windows.abandon()
        self._pieces_of_step = 0

    def add(self, loss: WeighedLoss, *, last: bool) -> None:
        """Add the loss to its window."""
        self._window = self._windows.next(loss)
        # Rules that count samples weigh a missing batch as 0; others but the mean refuse such steps.
        missing = self._facts.missing if self._windows.options.rule.name == "mean" else 0
        divisor = 1.0 if self._facts.divisor is None else self._facts.divisor
        self._window.add(loss, last=last, divisor=divisor, missing=missing)

    def backward(self, loss: WeighedLoss, run: Callable[[], None], *, final: bool, holding: bool) -> None:  # noqa: ARG002  # as above
        """Run the backward with the factor of the loss; the gradients of pieces stay apart until the final one."""
        if not final:
            self._backward_of_piece(loss, run)
            return
        with self._now.abandoned_on_error():
            # Lightning has zeroed gradients since the pieces before, at the beginning of a window.
            if self._windows.options.in_pieces:
                self._join_pieces()
            self._now.begin_backward(loss)
            run()

    def _backward_of_piece(self, loss: WeighedLoss, run: Callable[[], None]) -> None:
        self._pieces_of_step += 1
        with self._now.abandoned_on_error():
            self._pieces.begin_piece()
            try:
                self._now.begin_backward(loss)
                run()
            finally:
                self._pieces.end_piece()
            self._now.end_backward()

    def _join_pieces(self) -> None:
        """Have the parameters hold the gradients of the window so far; Lightning has zeroed those before it, or not."""
        if self._now.length == self._pieces_of_step + 1:
            self._now.set_kept_aside()
        self._pieces.add_back()
        self._pieces_of_step = 0

    def reduce(self) -> bool:
        """Multiply the reduced gradients."""
        return self._now.end_backward()

    @property
    def ranks_without_loss(self) -> int:
        """Number of ranks whose `training_step` returned no loss, in a window that was reduced."""
        return int(self._now.totals.without_loss)

    def record(self) -> WindowRecord:
        """Return what a report says of the window that was reduced."""
        return self._now.record()

    def close(self, *, skipped: bool) -> None:
        """Add the gradients from before the window."""
        self._now.close(skipped=skipped)

    @property
    def is_empty(self) -> bool:
        """Whether no window is open."""
        return self._windows.are_empty
