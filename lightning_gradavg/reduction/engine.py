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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from torch import nn

from lightning_gradavg.reduction.factor import factor_after
from lightning_gradavg.reduction.gradients import ModelGradients
from lightning_gradavg.reduction.guard import DiscardedGradients
from lightning_gradavg.reduction.loss import MicroBatch, WeighedLoss
from lightning_gradavg.reduction.set_aside import EarlierGradients, PieceGradients
from lightning_gradavg.reduction.window import OpenWindows, Window, WindowRecord
from lightning_gradavg.rules import Share

__all__ = ["Engine", "StepFacts", "Stock", "Weighed"]


class StepFacts(NamedTuple):
    """What the training loop says of a training step that begins.

    Attributes:
        begins_window: Whether its batch is the first of an accumulation window; False in manual optimization.
        missing: Number of ranks that have no batch of their own for this step.
        is_manual: Whether optimization is manual: the user ends windows, and Lightning divides losses by nothing.
        divisor: N, what Lightning divides the loss by: `accumulate_grad_batches`; 1 in manual optimization.
        length: Number of the window's batches so far, with that of this step; 1 in manual optimization.
        may_end_early: Whether the window may have fewer than N micro-batches, on some ranks or on all.
    """

    begins_window: bool
    missing: int
    is_manual: bool = False
    divisor: int = 1
    length: int = 1
    may_end_early: bool = False


_NO_STEP = StepFacts(begins_window=False, missing=0)
"""What an engine knows before its first step."""


class Engine(ABC):
    """Reduces the gradients of one run.

    The calls of a training step, in this order. In manual optimization, 2 to 4 come for every `manual_backward`:

    1. `begin_step` when the step begins. L-BFGS evaluates its closure several times: each evaluation begins a step.
    2. `add` for a loss, and `backward` for it. A step in pieces has several of both in turn.
    3. `reduce` after the last backward of the step.
    4. If that ended the window: `record`, if the step is observed, and `close`.
    """

    multiplies = True
    """Whether losses get a factor."""

    @abstractmethod
    def begin_step(self, facts: StepFacts) -> None:
        """Begin a training step, whose batch has arrived."""

    @abstractmethod
    def add(self, loss: WeighedLoss, *, ends_window: bool) -> None:
        """Add the loss of a micro-batch, which ends its window or not. May be a collective operation."""

    @abstractmethod
    def backward(
        self, loss: WeighedLoss, run: Callable[[], None], *, is_last_piece: bool, window_continues: bool
    ) -> None:
        """Call `run` for the backward of the loss that was added.

        Args:
            loss: The loss, whose factor is set.
            run: Runs its backward.
            is_last_piece: Whether it is the last backward of its step.
            window_continues: Whether the window goes on after the step.
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


class _Earlier(Enum):
    """Where the gradients from before a window are, under `Stock`. `_EarlierOfStock` has the table."""

    NOWHERE = "there are none, or nothing can multiply them"
    IN_PLACE = "in the parameters, where the window adds its own to them"
    ASIDE = "set aside, until they are added to those of the window"


class _EarlierOfStock:
    """The gradients from before a window of the plain mean, which its factor must not multiply.

    Lightning has zeroed them, unless the user overrides `optimizer_zero_grad`. Setting them aside changes the last bits
    of a full window, as stock adds to them before it averages (`test_ranks_stock.py`: "kept gradients" in windows). So
    they are set aside only where the window may be multiplied, which the first backward decides:

        | the window                                        | the gradients before it  | become                       |
        |---------------------------------------------------|--------------------------|------------------------------|
        | is one of manual optimization, or has N = 1 and a | not looked at            | NOWHERE                      |
        | batch on every rank: nothing can be multiplied    |                          |                              |
        | is any other                                      | none                     | NOWHERE                      |
        | may end early, by what the loop says              | those of a reduced       | ASIDE                        |
        |                                                   | window                   |                              |
        | may end early                                     | those of a window that   | IN_PLACE: not reduced yet,   |
        |                                                   | an epoch has cut off     | the ranks' still differ      |
        | is full, by what the loop says                    | some                     | IN_PLACE: if it is           |
        |                                                   |                          | multiplied nevertheless, all |
        |                                                   |                          | ranks raise                  |

    The calls: `begin_window`; `look` before the first backward; `require_apart` with the factor; `end_window`.
    """

    def __init__(self) -> None:
        self._where = _Earlier.NOWHERE
        self._gradients: EarlierGradients | None = None  # those that are ASIDE
        self._may_be_unreduced = False  # whether a window was cut off since the last one that was reduced

    def begin_window(self, *, was_cut_off: bool) -> None:
        """Begin a window; those of a skipped step come back. `was_cut_off`: the window before was not reduced."""
        if was_cut_off:
            self._may_be_unreduced = True
        self._add_back()
        self._where = _Earlier.NOWHERE

    def look(self, facts: StepFacts, parameters: Sequence[nn.Parameter]) -> None:
        """Find the gradients from before the window, and set them aside if it may be multiplied."""
        self._where = _Earlier.NOWHERE
        can_be_multiplied = facts.divisor > 1 or facts.may_end_early
        if facts.is_manual or not can_be_multiplied:
            return  # so that such a step does not walk over the parameters
        has_gradients = any(parameter.grad is not None for parameter in parameters)
        if not has_gradients:
            return
        sets_aside = facts.may_end_early and not self._may_be_unreduced
        if not sets_aside:
            self._where = _Earlier.IN_PLACE
            return
        self._where = _Earlier.ASIDE
        self._gradients = EarlierGradients(parameters)

    def require_apart(self, factor: float) -> None:
        """Raise a RuntimeError if the factor of the window would multiply them."""
        # The loop said that the window would be full, so they were not set aside.
        if factor != 1 and self._where == _Earlier.IN_PLACE:
            raise RuntimeError(
                "the accumulation window ended before it was full, although its loader has a length, or some ranks had"
                " no batch in it; and gradients from before it were kept, which would be multiplied, too. Have all"
                " loaders yield as many batches as they say, or zero gradients at the beginning of every window."
            )

    def end_window(self, *, skipped: bool) -> None:
        """End a window that was reduced: add them to its gradients, unless its step is skipped."""
        # The optimizer of a skipped step must see none: they come back in `begin_window`.
        if not skipped:
            self._add_back()
        self._may_be_unreduced = False
        self._where = _Earlier.NOWHERE

    def _add_back(self) -> None:
        if self._gradients is not None:
            self._gradients.add_back()
            self._gradients = None


@dataclass
class _StockWindow:
    """What `Stock` knows of the window that is open."""

    micro_batches: list[MicroBatch] = field(default_factory=list)
    missing: int = 0  # pairs of rank and micro-batch that do not exist
    has_ended: bool = False  # whether its last micro-batch was added


class Stock(Engine):
    """The plain mean, which is what DDP computes: the same bits, memory and errors.

    Two things remain in automatic optimization. Lightning divides every loss by N, so a window of fewer than N
    micro-batches, or one in which some ranks have no batch, is multiplied by the rest once, after its reduction. And a
    rank without a batch runs the backward of a stand-in, whose gradient is discarded.
    """

    # A loss is left as it is, without a node and a hook of ours: `test_ranks_stock.py` counts both.
    multiplies = False

    def __init__(self, model: ModelGradients, world_size: int) -> None:
        """Serve a model that DDP or FSDP averages over so many ranks."""
        self._model = model
        self._world_size = world_size
        self._facts = _NO_STEP
        self._window = _StockWindow()
        self._earlier = _EarlierOfStock()

    def begin_step(self, facts: StepFacts) -> None:
        """Note N. If an epoch has cut a window off, the next one reduces its gradients, unless the user zeroes them."""
        self._facts = facts
        if facts.begins_window:
            self._earlier.begin_window(was_cut_off=not self.is_empty)
            self._window = _StockWindow()

    def add(self, loss: WeighedLoss, *, ends_window: bool) -> None:
        """Count the micro-batch."""
        self._window.micro_batches.append(loss.micro_batch)
        self._window.missing += self._facts.missing
        self._window.has_ended = ends_window

    def backward(
        self,
        loss: WeighedLoss,
        run: Callable[[], None],
        *,
        is_last_piece: bool,
        window_continues: bool,  # noqa: ARG002  # as above
    ) -> None:
        """Run the backward as it is."""
        assert is_last_piece, "a step has several backwards only where ranks share batches, which weighs the mean"
        if len(self._window.micro_batches) == 1:
            self._earlier.look(self._facts, self._model.parameters())
        # A stand-in: the rank has no batch, or no loss. Multiplying its loss by 0 would leave NaN.
        if loss.micro_batch.counts:
            try:
                run()
            except BaseException:
                # A user's loop may go on, as after a batch that did not fit in memory.
                self._window = _StockWindow()
                raise
            return
        discarded = DiscardedGradients(self._model.leaves(), loss.micro_batch)
        try:
            run()
        finally:
            discarded.end()

    def reduce(self) -> bool:
        """Average what DDP does not know, and multiply the gradients of a short window."""
        if not self._window.has_ended:
            return False
        parameters = self._model.parameters()
        factor = self._factor()
        self._earlier.require_apart(factor)
        self._model.finish(parameters, factor)
        return True

    def _factor(self) -> float:
        """Return N / length, or N * W / pairs where some ranks have no batch; 1 in manual optimization."""
        if self._facts.is_manual:
            return 1.0
        # By the loop's count: L-BFGS evaluates its closure several times, with one batch.
        pairs = self._world_size * self._facts.length - self._window.missing
        return factor_after(self._facts.divisor, self._world_size, pairs, lift=1.0)

    def record(self) -> WindowRecord:
        """Return what a report says of the window that was reduced: every pair counts once."""
        shares: list[Share] = []
        for micro_batch in self._window.micro_batches:
            counted = 0.0 if micro_batch.absent else 1.0
            shares.append(Share(counted, counted))
        return WindowRecord(self._window.micro_batches, shares, self._facts.divisor)

    def close(self, *, skipped: bool) -> None:
        """Add the gradients from before the window; those of a skipped step come back when the next one begins."""
        self._earlier.end_window(skipped=skipped)
        self._window = _StockWindow()

    @property
    def is_empty(self) -> bool:
        """Whether the next micro-batch begins a window."""
        return not self._window.micro_batches


class Weighed(Engine):
    """A rule that multiplies: the windows of `reduction.window`, and steps of several backwards.

    A step in pieces has a backward within `training_step` for each piece but the last:

        | backward of      | within `begin_piece` and `end_piece` | its gradients                                      |
        |------------------|--------------------------------------|----------------------------------------------------|
        | an earlier piece | yes                                  | are held by `PieceGradients`                       |
        | the last piece   | no                                   | are added to those of the pieces, which come back  |
    """

    def __init__(self, windows: OpenWindows, pieces: PieceGradients) -> None:
        """Serve a run with its windows."""
        self._windows = windows
        self._pieces = pieces
        self._pieces_of_step = 0  # backwards of the running step that ran within `training_step`
        # The window of the loss that was added last. In manual optimization others may be open, too, but `backward`,
        # `reduce`, `record` and `close` come before the next `add`.
        self._latest: Window | None = None
        self._facts = _NO_STEP

    @property
    def _window(self) -> Window:
        """The window of the loss that was added last."""
        assert self._latest is not None
        return self._latest

    def begin_step(self, facts: StepFacts) -> None:
        """Note N, and abandon what an unfinished step or an epoch has cut off."""
        self._facts = facts
        if self._pieces_of_step > 0:
            # The step before ended its epoch between two pieces, as by StopIteration (`test_ranks_single_device.py`).
            self._pieces.discard()
            self._windows.abandon()
        if facts.begins_window and not self.is_empty:
            # An epoch has cut it off, and its gradients are of this rank alone (`test_window.py`: cut off).
            self._windows.abandon()
        self._pieces_of_step = 0

    def add(self, loss: WeighedLoss, *, ends_window: bool) -> None:
        """Add the loss to its window."""
        self._latest = self._windows.next(loss)
        self._latest.add(loss, ends_window=ends_window, divisor=float(self._facts.divisor), missing=self._facts.missing)

    def backward(
        self,
        loss: WeighedLoss,
        run: Callable[[], None],
        *,
        is_last_piece: bool,
        window_continues: bool,  # noqa: ARG002  # as above
    ) -> None:
        """Run the backward with the factor of the loss; the gradients of pieces stay apart until the last one."""
        if not is_last_piece:
            self._backward_of_piece(loss, run)
            return
        with self._window.abandoned_on_error():
            # Lightning has zeroed gradients since the pieces before, at the beginning of a window.
            if self._windows.options.in_pieces:
                self._join_pieces()
            self._window.begin_backward(loss)
            run()

    def _backward_of_piece(self, loss: WeighedLoss, run: Callable[[], None]) -> None:
        self._pieces_of_step += 1
        with self._window.abandoned_on_error():
            self._pieces.begin_piece()
            try:
                self._window.begin_backward(loss)
                run()
            finally:
                self._pieces.end_piece()
            # `reduce` comes after the last piece alone. The window goes on, so this only removes hooks.
            self._window.end_backward()

    def _join_pieces(self) -> None:
        """Have the parameters hold the gradients of the window so far; Lightning has zeroed those before it, or not."""
        # The window has only the micro-batches of this step, of which this is the last: it began with the step.
        if self._window.length == self._pieces_of_step + 1:
            self._window.set_earlier_aside()
        self._pieces.add_back()
        self._pieces_of_step = 0

    def reduce(self) -> bool:
        """Multiply the reduced gradients."""
        return self._window.end_backward()

    @property
    def ranks_without_loss(self) -> int:
        """Number of ranks whose `training_step` returned no loss, in a window that was reduced."""
        return int(self._window.totals.without_loss)

    def record(self) -> WindowRecord:
        """Return what a report says of the window that was reduced."""
        return self._window.record()

    def close(self, *, skipped: bool) -> None:
        """Add the gradients from before the window."""
        self._window.close(skipped=skipped)

    @property
    def is_empty(self) -> bool:
        """Whether no window is open."""
        return self._windows.are_empty
