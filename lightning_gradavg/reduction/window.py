"""The window: the micro-batches of one optimizer step, and the gradients that they add up to.

The factors that it applies are derived in `reduction.factor`. What it exchanges stands in `reduction.totals`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from torch import Tensor, nn

from lightning_gradavg.reduction.factor import factor_after, factor_before
from lightning_gradavg.reduction.gradients import ModelGradients
from lightning_gradavg.reduction.guard import DiscardedGradients, ReachedParameters
from lightning_gradavg.reduction.lift import Lift, WindowOptions
from lightning_gradavg.reduction.loss import MicroBatch, WeighedLoss
from lightning_gradavg.reduction.set_aside import EarlierGradients
from lightning_gradavg.reduction.totals import (
    STOPPED_TRAINING,
    KnownWeights,
    Totals,
    TotalsExchange,
    must_agree,
    raise_together,
)
from lightning_gradavg.reduction.zeroed import LeftGradients, Zeroed
from lightning_gradavg.rules import Share, in_window, share_of

__all__ = ["OpenWindows", "Window", "WindowRecord", "WindowState"]

_TWO_OPEN = (
    "two windows are open at once, and they share parameters. A window is the micro-batches between two reductions, and"
    " all of them must train the same parameters. End the window of one optimizer by a backward that reduces, outside"
    " of toggle_model(sync_grad=False) or no_sync(), before another one trains some of the same parameters; or give"
    " each optimizer parameters of its own, by toggle_optimizer"
)

_DISJOINT = (
    "two windows are open at once: two losses of one window reach no parameter in common, as those of two optimizers,"
    " and all their parameters require grad, so nothing says which window a loss belongs to. Freeze the parameters of"
    " the other optimizer during each backward, by toggle_optimizer or toggle_model; or end the window of one before"
    " the other begins"
)

_ZEROED_IN_PART = (
    f"the gradients of some parameters were zeroed within a window, and those of others were not: {_TWO_OPEN}"
)


class WindowState(Enum):
    """Where a window is. `Window` has the table of what each state allows."""

    EMPTY = "has no micro-batch"
    ENTERED = "has a loss whose backward has not begun"
    BACKWARD = "runs a backward"
    OPEN = "waits for its next micro-batch"
    REDUCED = "holds the gradients of the rule"


_ALLOWED = {
    WindowState.EMPTY: {WindowState.ENTERED},
    WindowState.ENTERED: {WindowState.BACKWARD},
    WindowState.BACKWARD: {WindowState.OPEN, WindowState.REDUCED},
    WindowState.OPEN: {WindowState.ENTERED},
    WindowState.REDUCED: {WindowState.EMPTY},
}


class WindowRecord(NamedTuple):
    """What a report says of a reduced window, on one rank."""

    micro_batches: Sequence[MicroBatch]
    shares: Sequence[Share]  # of each micro-batch, in a window of this length
    local_divisor: float  # this rank's gradient before the reduction is sum(w * g) over this


@dataclass
class _Contents:
    """What a window holds until it is empty again."""

    # Of its micro-batches, in order.
    micro_batches: list[MicroBatch] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)  # of each micro-batch, in a window of one
    missing: int = 0  # pairs of rank and micro-batch that do not exist; only a mean subtracts them
    # Said with each micro-batch; the latest one counts.
    has_ended: bool = False  # whether the latest micro-batch ends the window
    divisor: float = 1.0  # N
    trained: set[nn.Parameter] = field(default_factory=set)  # that require grad at the latest micro-batch
    # Found once, in this order.
    parameters: Sequence[nn.Parameter] = ()  # whose gradients an optimizer reads
    exchange: TotalsExchange | None = None
    totals: Totals | None = None
    lift: float = 1.0
    # Only where the user ends windows.
    reached: set[Tensor] = field(default_factory=set)  # by the backwards so far
    left: LeftGradients | None = None  # by the last backward, while the window is OPEN


class Window:
    """Weighs the losses of a window, and finishes the gradients that DDP or FSDP has averaged.

    The calls for each micro-batch, in this order:

    1. `add` before the backward. If it ends the window, the ranks begin to exchange their totals.
    2. `begin_backward` sets the factor of the loss. Under a rule with weights, a window of one micro-batch waits for
       the totals here, if all ranks know that it is one. The gradients from before the window are set aside
       (`_sets_earlier_aside` says when), unless the step has several pieces: then `Weighed` does it before the last.
    3. The backward runs. DDP averages if it is the last of the window.
    4. `end_backward`. If the window goes on, it only removes hooks. Else it waits for the totals, if nobody has, and
       multiplies the gradients.
    5. `close` adds the gradients from before the window, and the window is empty.

    After an exception, `abandon` discards the window, and puts the gradients from before it in place of its own. Where
    those were not set aside, the parameters keep the sum of both, and Lightning's loop, which ends, steps on neither.

        | state    | allows                                     |
        |----------|--------------------------------------------|
        | EMPTY    | `add`                                      |
        | ENTERED  | `begin_backward`                           |
        | BACKWARD | `end_backward`                             |
        | OPEN     | `add`; the user may also zero gradients    |
        | REDUCED  | `close`                                    |
        | any      | `abandon`, `abandon_zeroed`                |

    A problem of a rank's micro-batch travels with the totals: all ranks raise one ValueError, before the backward where
    all wait for the totals there, else after it. Where ranks exchange nothing, `add` raises it at once.
    """

    def __init__(self, options: WindowOptions, model: ModelGradients, lift: Lift, known_weights: KnownWeights) -> None:
        """Make an empty window; all windows of a run share `lift` and `known_weights`."""
        self._options = options
        self._model = model
        self._lift = lift
        self._known_weights = known_weights
        self._discarded: DiscardedGradients | None = None  # of the running backward, if its loss does not count
        self._reaching: ReachedParameters | None = None  # of the running backward, in a longer window of a user's loop
        self._earlier: EarlierGradients | None = None  # those from before the window, while they are set aside
        self._clear()

    def _clear(self) -> None:
        # All but `_earlier`: the gradients from before a step that is skipped come back in the next window.
        self.state = WindowState.EMPTY
        self._contents = _Contents()

    # The only place that changes the state, but for `_clear`, which every state allows.
    def _change(self, state: WindowState) -> None:
        assert state in _ALLOWED[self.state], f"a window that {self.state.value} cannot be one that {state.value}"
        self.state = state

    @property
    def length(self) -> int:
        """Number of micro-batches."""
        return len(self._contents.micro_batches)

    @property
    def trained(self) -> set[nn.Parameter]:
        """The parameters that require grad at the latest micro-batch; its loss may reach fewer."""
        return self._contents.trained

    @property
    def totals(self) -> Totals:
        """The totals over all ranks, of a window that has read them."""
        assert self._contents.totals is not None
        return self._contents.totals

    def add(self, loss: WeighedLoss, *, ends_window: bool, divisor: float = 1.0, missing: int = 0) -> None:
        """Add a micro-batch before its backward.

        A collective operation for the last one of a window, if the ranks exchange totals; for the first one of the run,
        which chooses the lift; and for every one under tensor parallelism.

        Args:
            loss: The loss.
            ends_window: Whether the window ends with it.
            divisor: N, what the training loop divides every loss of the window by.
            missing: Number of ranks that have no such micro-batch.
        """
        if self.state == WindowState.ENTERED:
            # Its backward never began, as in a pass of Lightning without backward.
            self.abandon()
        self._change(WindowState.ENTERED)
        self._contents.divisor = divisor
        self._contents.has_ended = ends_window
        self._contents.left = None
        with self.abandoned_on_error():
            if self.length == 0:
                self._add_earlier_back()  # those of a step that was skipped
                self._contents.parameters = self._model.parameters()
            self._append(loss.micro_batch, missing)
            if self.length == 1:
                self._choose_lift()
            self._require_finite_factor()
            # From here on the loss knows its problem: its gradient is discarded, and its backward still runs, as the
            # backwards of other ranks may wait for this one.
            loss.micro_batch = self._contents.micro_batches[-1]
            if not self._exchanges:
                self._require_no_problem()
            elif ends_window:
                # As early as this rank knows its row: Lightning's hooks and `zero_grad` come next, and where the totals
                # are needed afterwards only, the whole backward. Sums are never assumed from earlier windows, which
                # saved up to 5 % of a small step: a correction afterwards multiplied gradients that were kept from
                # before (`cases.py`: "added to gradients that are kept, of another size at last", 6.5 instead of 11).
                self._contents.exchange = TotalsExchange(self._row(), self._options.world, self._options.device)

    @property
    def _exchanges(self) -> bool:
        """Whether ranks exchange totals at the end of the window; the same on all ranks."""
        if not self._options.exchanges:
            return False
        return self._weights_of_ranks is None

    @property
    def _weights_of_ranks(self) -> float | None:
        """`Z` of a window whose loss carries the whole factor, if all ranks know it without an exchange."""
        if not self._has_whole_factor:
            return None
        return self._known_weights.of_ranks(self._contents.micro_batches[-1])

    def _require_no_problem(self) -> None:
        """Raise a ValueError about a problem of the latest micro-batch, which no exchange brings to the other ranks."""
        micro_batch = self._contents.micro_batches[-1]
        if self._weights_of_ranks is not None:
            self._known_weights.require_as_known(micro_batch)
        if micro_batch.problem is not None:
            raise ValueError(f"reduction {self._options.rule.name!r}: {micro_batch.problem}.")

    def _append(self, micro_batch: MicroBatch, missing: int) -> None:
        """Append a micro-batch and its share, with a problem if the window, the model or the rule finds one."""
        micro_batch = self._model.checked(self._checked(micro_batch))
        share = Share(0.0, 0.0)
        if micro_batch.problem is None:
            try:
                share = share_of(self._options.rule, self._options.place, micro_batch.weight)
            except ValueError as error:
                micro_batch = micro_batch._replace(problem=str(error))
        if micro_batch.absent:
            # It adds to Z of a rule without weights, where a missing loss counts as one of 0.
            share = share._replace(multiplier=0.0)
        self._contents.micro_batches.append(micro_batch)
        self._contents.shares.append(share)
        self._contents.missing += missing

    def _checked(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch, with a problem if the window cannot have it."""
        contents, rule = self._contents, self._options.rule
        if self.length == 0 and contents.has_ended and not self._options.user_ends_windows:
            # No other micro-batch to compare with: the most common step does not walk over the parameters.
            return micro_batch
        # A gradient that is accumulated, and whose parameter is then frozen, is unused for DDP: every rank keeps its
        # own, in silence. A parameter that begins to train is right as it is: its sum has fewer terms.
        trained_before = contents.trained
        contents.trained = {parameter for parameter in contents.parameters if parameter.requires_grad}
        if self.length == 0 or micro_batch.problem is not None:
            return micro_batch
        if self._options.refuses_longer_windows:
            return micro_batch._replace(
                problem=f"a share of the reduction rule {rule.name!r} depends on the number of micro-batches in the"
                " window, which is not known before it ends. Do not accumulate, or have the rule use neither"
                " place.world_size nor place.ranks_on_node"
            )
        for parameter in trained_before - contents.trained:
            if parameter.grad is not None:
                return micro_batch._replace(problem=STOPPED_TRAINING)
        return micro_batch

    def _choose_lift(self) -> None:
        """Choose what the losses of this window carry, unless it is the whole factor."""
        if not self._has_whole_factor and not self._lift.is_chosen:
            self._lift.choose(float(self._contents.shares[0].normalizer))

    def _require_finite_factor(self) -> None:
        """Give the latest micro-batch a problem if its weight is too large beside the first ones of the run."""
        contents = self._contents
        micro_batch = contents.micro_batches[-1]
        if micro_batch.problem is not None or self._has_whole_factor:
            return
        multiplier = float(contents.shares[-1].multiplier)
        if not math.isfinite(multiplier * self._lift.value(contents.divisor)):
            contents.micro_batches[-1] = micro_batch._replace(
                problem=f"its multiplier {multiplier:g} overflows when it is scaled by the first weights of the run."
                " Scale the weights so that those of all windows are of similar magnitude"
            )

    def _row(self) -> Totals:
        """Return this rank's row of the exchange of totals."""
        faults = 0
        pairs = 0
        has_missing_loss = False
        for micro_batch in self._contents.micro_batches:
            if micro_batch.problem is not None:
                faults += 1
            if not micro_batch.absent:
                pairs += 1
            if micro_batch.without_loss:
                has_missing_loss = True
        normalizers = [share.normalizer for share in self._contents.shares]
        return Totals.of_rank(
            faults=faults,
            without_loss=has_missing_loss,
            pairs=pairs,
            agreement=must_agree(self._options.rule, self._contents.micro_batches),
            normalizer=float(sum(normalizers)),
        )

    def begin_backward(self, loss: WeighedLoss) -> None:
        """Set the factor of the loss that was added, and discard its gradient if it does not count."""
        self._change(WindowState.BACKWARD)
        with self.abandoned_on_error():
            contents, options = self._contents, self._options
            if self.length == 1 and not options.in_pieces:
                # In pieces, Lightning zeroes gradients between the first backward and the last: `Weighed` sets aside
                # what it leaves.
                self.set_earlier_aside()
            multiplier = float(contents.shares[-1].multiplier)
            if self._has_whole_factor:
                normalizer = self._normalizer_before_backward()
                loss.factor = factor_before(multiplier, contents.divisor, options.world.size, normalizer)
                # A report divides by it: what a loss of multiplier 1 would have carried.
                contents.lift = factor_before(1.0, contents.divisor, options.world.size, normalizer)
            else:
                # A hook on the sum after the reduction would see a bucket, and not which parameters the window trains;
                # so the rest of the factor is a pass over gradients, in `end_backward`.
                contents.lift = self._lift.value(contents.divisor)
                loss.factor = multiplier * contents.lift
            is_alone = contents.has_ended and self.length == 1
            if options.user_ends_windows and not is_alone:
                self._reaching = ReachedParameters(self._model.leaves())
            # A rule may give the share 0 to a weight that is not 0.
            if not loss.micro_batch.counts or multiplier == 0:
                self._discarded = DiscardedGradients(self._model.leaves(), loss.micro_batch)

    def _normalizer_before_backward(self) -> float:
        """Return `Z` of a window of one micro-batch under a rule with weights."""
        weights = self._weights_of_ranks
        if weights is not None:
            return weights
        return self._usable_totals().normalizer

    def _usable_totals(self) -> Totals:
        """Return the totals over all ranks, or raise the same error on all ranks if they are not usable.

        It waits for the other ranks' rows at the first call.
        """
        contents = self._contents
        if contents.totals is None:
            assert contents.exchange is not None
            totals = contents.exchange.read()
            if not totals.is_usable:
                raise_together(totals, self._options.rule, self._options.world, contents.micro_batches)
            self._known_weights.note(totals)
            contents.totals = totals
        return contents.totals

    @property
    def _has_whole_factor(self) -> bool:
        """Whether the only loss of the window carries the whole factor, so that nothing is multiplied afterwards."""
        if not self._options.rule.uses_weight or not self._options.may_wait_before_backward:
            return False
        return self._contents.has_ended and self.length == 1

    def set_earlier_aside(self) -> None:
        """Set aside the gradients from before the window, if they must be told from its own."""
        if not self._sets_earlier_aside:
            return
        contents = self._contents
        if not self._options.user_ends_windows:
            self._earlier = EarlierGradients(contents.parameters)
            return
        # Only of the parameters that it trains: the others may be those of another open window.
        trained = [parameter for parameter in contents.parameters if parameter in contents.trained]
        self._earlier = EarlierGradients(trained)

    @property
    def _sets_earlier_aside(self) -> bool:
        """Whether the gradients from before the window leave the parameters before its first backward.

        The first row that fits counts:

        | window                             | aside | because                                                       |
        |------------------------------------|-------|---------------------------------------------------------------|
        | ranks judge its step               | yes   | a step that is skipped shows the optimizer no gradient, and   |
        |                                    |       | loses none of those                                           |
        | the user ends it                   | yes   | your loop may go on after an exception, with those            |
        | its loss carries the whole factor  | no    | DDP averages the sum of both, and those are the same on all   |
        |                                    |       | ranks                                                         |
        | goes on after this micro-batch     | yes   | an epoch may cut it off, and it is then discarded             |
        | a rule with weights, or float16    | yes   | the reduced gradient is multiplied                            |
        | divided by its length              | yes   | so it is if the window is short                               |
        | of any other rule                  | no    | nothing is multiplied after the reduction                     |
        """
        options = self._options
        if options.judges:
            return True
        if options.user_ends_windows:
            return True
        if self._has_whole_factor:
            return False
        if not self._contents.has_ended:
            return True
        if options.rule.uses_weight or options.has_float16:
            return True
        return options.rule.averages_window

    def end_backward(self) -> bool:
        """Finish the gradients if the last backward of the window ended; return whether it did.

        A collective operation then: ranks wait for their totals, and raise together.
        """
        self._end_discarding()
        with self.abandoned_on_error():
            self._require_common_parameters()
        contents = self._contents
        if not contents.has_ended:
            self._change(WindowState.OPEN)
            if self._options.user_ends_windows:
                # A user's loop may zero gradients before the next micro-batch, and so abandon the window.
                contents.left = LeftGradients(contents.trained)
            return False
        with self.abandoned_on_error():
            self._model.finish(contents.parameters, self._factor_after())
        self._change(WindowState.REDUCED)
        return True

    def _require_common_parameters(self) -> None:
        """Raise a RuntimeError if the micro-batches of the window are those of two losses, on all ranks alike."""
        if self._reaching is None:
            return
        reached = self._reaching.end()
        self._reaching = None
        before = self._contents.reached
        # A loss that reaches none of them, such as one of another model, says nothing about its optimizer.
        if before and reached and before.isdisjoint(reached):
            raise RuntimeError(f"reduction {self._options.rule.name!r}: {_DISJOINT}.")
        before |= reached

    def _factor_after(self) -> float:
        """Return what the reduced gradient is multiplied by."""
        contents, options = self._contents, self._options
        if contents.exchange is not None:
            # Also under a rule without weights: they bring the problems of other ranks.
            self._usable_totals()
        if self._has_whole_factor:
            return 1.0
        if options.rule.uses_weight:
            normalizer = self.totals.normalizer
        else:
            normalizer = self._normalizer_without_weights()
        return factor_after(contents.divisor, options.world.size, normalizer, contents.lift)

    def _normalizer_without_weights(self) -> float:
        """Return `Z` of a rule without weights."""
        normalizer = self._lift.normalizer_without_weights
        if self._options.rule.averages_window:
            normalizer *= self.length
        if self._options.leaves_out_missing_pairs:
            normalizer -= self._contents.missing
        return normalizer

    def record(self) -> WindowRecord:
        """Return what a report says of the window, which is reduced."""
        contents, options = self._contents, self._options
        place = in_window(options.place, self.length)
        shares: list[Share] = []
        # Micro-batches count as further ranks on the node, now that the length of the window is known.
        for micro_batch in contents.micro_batches:
            share = share_of(options.rule, place, micro_batch.weight)
            if micro_batch.absent:
                share = share._replace(multiplier=0.0)
            shares.append(share)
        multiplier = sum(float(share.multiplier) for share in shares)
        multiplier_alone = sum(float(share.multiplier) for share in contents.shares)
        if multiplier_alone == 0:  # and so may be the lift
            return WindowRecord(contents.micro_batches, shares, 0.0)
        ratio = multiplier / multiplier_alone
        return WindowRecord(contents.micro_batches, shares, ratio * contents.divisor / contents.lift)

    def zeroed(self) -> Zeroed:
        """Return which gradients of an open window the user has zeroed since its last backward."""
        if self._contents.left is None:
            return Zeroed.NONE
        return self._contents.left.zeroed()

    def close(self, *, skipped: bool = False) -> None:
        """Add the gradients from before the window to its own, and begin an empty one.

        If the step is `skipped`, the optimizer must see no gradients. They come back when the next window begins.
        """
        self._change(WindowState.EMPTY)
        if not skipped:
            self._add_earlier_back()
        self._clear()

    def abandon(self) -> None:
        """Discard the window and its gradients, and restore those from before it."""
        self._end_discarding()
        if self._reaching is not None:
            self._reaching.end()
            self._reaching = None
        self._model.discard()
        if self._earlier is not None:
            self._earlier.restore()
            self._earlier = None
        self._clear()

    def abandon_zeroed(self) -> None:
        """Abandon an open window whose gradients the user has zeroed, and with them those from before it."""
        self._earlier = None
        self._clear()

    def _end_discarding(self) -> None:
        """Remove the hooks of the running backward that discard gradients."""
        if self._discarded is not None:
            self._discarded.end()
            self._discarded = None

    def _add_earlier_back(self) -> None:
        if self._earlier is not None:
            self._earlier.add_back()
            self._earlier = None

    @contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Abandon the window if something raises: the loop may go on, as after a batch that did not fit in memory."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise


class OpenWindows:
    """The windows of a run. Under a loop of the user's, every optimizer may have one, of parameters of its own.

    Two windows are open at once if a loop accumulates for one optimizer while it accumulates for another, as with
    `toggle_model(sync_grad=False)`. The parameters that require grad say which window a loss belongs to:

        | the loss trains                                   | it belongs to                                      |
        |---------------------------------------------------|----------------------------------------------------|
        | the same parameters as an open window             | that window                                        |
        | parameters of no open window                      | a new window                                       |
        | some of the parameters of an open window          | none: an error on all ranks                        |
        | the same, of which its backward reaches none that | none: an error; nothing was frozen, so two         |
        | the backwards before it have reached              | optimizers look like one                           |
    """

    def __init__(self, options: WindowOptions, model: ModelGradients) -> None:
        """Begin a run without an open window."""
        self.options = options
        self._model = model
        self._lift = Lift(options)
        # Ranks that judge a step learn from its totals which of them have no loss.
        self._known_weights = KnownWeights(options.rule, shares_batches=options.shares_batches and not options.judges)
        self._windows: list[Window] = []

    def next(self, loss: WeighedLoss) -> Window:
        """Return the window that a loss belongs to: an open one, or an empty one.

        If the loss would train parameters of two windows, it gets a problem, which all ranks raise together when the
        window ends.
        """
        if not self.options.user_ends_windows:
            # One optimizer, as Lightning's automatic optimization has, and one window, which is used again.
            if not self._windows:
                self._windows.append(self._new())
            return self._windows[0]
        # Toggling is how Lightning's manual optimization says whose turn it is; a loss does not name its optimizer.
        trained = {parameter for parameter in self._model.parameters() if parameter.requires_grad}
        self._abandon_unfinished(loss)
        for window in self._windows:
            if window.trained == trained:
                return window
        for window in self._windows:
            if not window.trained.isdisjoint(trained):
                loss.micro_batch = loss.micro_batch._replace(problem=_TWO_OPEN)
                return window
        self._windows.append(self._new())
        return self._windows[-1]

    def _abandon_unfinished(self, loss: WeighedLoss) -> None:
        """Abandon the windows that the user goes on from without a reduction, and remove those that are empty.

        If some gradients of a window were zeroed, the loss gets a problem.
        """
        for window in self._windows:
            if window.state == WindowState.ENTERED:
                window.abandon()  # the backward of its loss has never begun
            elif window.state == WindowState.OPEN:
                zeroed = window.zeroed()
                if zeroed == Zeroed.ALL:
                    window.abandon_zeroed()
                elif zeroed == Zeroed.SOME:
                    loss.micro_batch = loss.micro_batch._replace(problem=_ZEROED_IN_PART)
        self._windows = [window for window in self._windows if window.state != WindowState.EMPTY]

    def _new(self) -> Window:
        return Window(self.options, self._model, self._lift, self._known_weights)

    @property
    def are_empty(self) -> bool:
        """Whether no window has a micro-batch."""
        return all(window.state == WindowState.EMPTY for window in self._windows)

    @property
    def are_in_backward(self) -> bool:
        """Whether the backward of a weighed loss runs."""
        return any(window.state == WindowState.BACKWARD for window in self._windows)

    def abandon(self) -> None:
        """Abandon all windows, and restore the gradients from before them."""
        for window in self._windows:
            window.abandon()
