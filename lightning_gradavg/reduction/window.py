"""The window: the micro-batches of one optimizer step, and the one number that their gradients are multiplied by.

    gradient = sum(w * g) / Z,  Z = sum(z)        over all pairs of rank and micro-batch

The backwards of a rank add up    sum(w / u * g / N)      N: what the training loop divides losses by
When ranks have added that up, it is multiplied by    N / (Z / u)    the same on all ranks: the *factor*

u is a power of two near the largest weight of the window before (`WeightUnit`): so losses keep their magnitude. Each
loss carries w / u, its *loss factor*.

The weight is on the loss, and not on what ranks send: through `gather` and batch norm over all ranks, a loss has
gradients on other ranks, which must carry the weight of that loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, NoReturn
from zlib import crc32

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_gradavg._lightning.internals import version_of
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.place import Place
from lightning_gradavg._support.text import by_value, on_ranks
from lightning_gradavg.reduction.gradients import Backward, Gradients
from lightning_gradavg.reduction.loss import ALWAYS_OR_NEVER, MicroBatch
from lightning_gradavg.reduction.rows import NOTHING_TO_COMPARE, Row, RowExchange, exact_sum
from lightning_gradavg.rules import Rule, Share, in_window, normalizer_of, share_of

__all__ = ["Ranks", "WeightUnit", "Window", "WindowRecord", "WindowState"]

_OTHER_PARAMETERS = (
    "other parameters train than in the micro-batches before it, so no weight is right for all of them. Freeze and"
    " unfreeze parameters between two windows; and have each optimizer's window end before another one's begins"
)
_SEVERAL_OPTIMIZERS = (
    "several optimizers train in a window of several micro-batches. If each has a loss of its own, no weight is right"
    " for both. Freeze the parameters of the other optimizers, as by toggle_optimizer, or reduce after every backward"
)
_ZEROED_IN_PART = (
    "the gradients of some parameters were zeroed within a window, and those of others were not. Zero all of them,"
    " which gives the window up, or none"
)
_REDUCED_EARLY = (
    "DDP reduced the gradients in a backward within no_sync(): it decides in its forward, and one before was outside of"
    " it whose backward never ran. Run one backward for each forward outside of no_sync()"
)


class Ranks(NamedTuple):
    """The ranks that a run reduces over, and where they stand."""

    world: World
    places: Sequence[Place]  # of all ranks, in rank order
    device: torch.device  # of the model on this rank

    @property
    def place(self) -> Place:
        """The place of this rank."""
        return self.places[self.world.rank]


class WeightUnit:
    """The unit u of the weights that losses carry, so that the largest w / u is between 1/2 and 1.

    4096 tokens times a loss overflow the activations of float16 where the result does not. The unit is the same on all
    ranks, and a power of two, so that dividing by it is exact. So a resumed run, which begins with another u, has the
    bits of one that was not interrupted. Where all weights are equal, their value would be a unit that gives stock's
    bits, but not those of a run that is resumed. Equal weights that are powers of two have stock's bits as it is
    (`test_ranks_stock.py`: equal weights).

    | rule and window                                  | u is chosen by                                           |
    |--------------------------------------------------|----------------------------------------------------------|
    | a rule whose w is no weight, or a reproducible   | nobody: u is 1. A run that is resumed has not seen the   |
    | run                                              | weights before                                           |
    | the first micro-batch of the run                 | an exchange of all ranks, once                           |
    | any window after one in which something counted  | the rows of that window, which hold the largest w        |

    So a first weight that is not typical serves its own window alone, and no rank asks for an exchange alone: ranks may
    have different numbers of micro-batches.
    """

    def __init__(self, rule: Rule, ranks: Ranks, *, is_fixed: bool = False) -> None:
        """Choose nothing yet; `is_fixed` has u stay 1, in a reproducible run."""
        self.is_fixed = is_fixed
        self._follows_weights = rule.multiplier == "n" and not is_fixed  # w is the weight
        self._ranks = ranks
        self._is_chosen = not self._follows_weights
        self._open_windows = 0  # whose losses carry weights in this unit
        self.value = 1.0

    def choose(self, multiplier: float) -> None:
        """Choose u by the multipliers of all ranks, unless it was chosen. A collective operation the first time."""
        if self._is_chosen:
            return
        self._is_chosen = True
        with torch.profiler.record_function("GradAvg: choose unit"):
            rows = RowExchange([multiplier], self._ranks.device, self._ranks.world.group).read()
        self.follow(max(multiplier_of_rank for (multiplier_of_rank,) in rows))

    def hold(self) -> float:
        """Return u for a window that begins, and keep it until `release`: all losses of a window carry the same."""
        self._open_windows += 1
        return self.value

    def release(self) -> None:
        """End the `hold` of a window."""
        self._open_windows -= 1

    def follow(self, largest: float) -> None:
        """Choose u for the next windows by the largest w, unless a window is open or nothing counts."""
        if not self._follows_weights or self._open_windows > 0 or largest == 0:
            return
        _, exponent = math.frexp(largest)
        # Within these bounds the power and its inverse are normal numbers of float64.
        self.value = math.ldexp(1.0, min(max(exponent, -1022), 1022))


class WindowState(Enum):
    """Where a window is."""

    EMPTY = "has no micro-batch"
    WEIGHED = "has a loss whose backward has not begun"
    BACKWARD = "runs a backward"
    OPEN = "waits for its next micro-batch"
    ENDED = "has run its last backward"
    REDUCED = "holds the gradients of the rule"


_NEXT = {
    WindowState.EMPTY: WindowState.WEIGHED,
    WindowState.WEIGHED: WindowState.BACKWARD,
    WindowState.OPEN: WindowState.WEIGHED,
    WindowState.ENDED: WindowState.REDUCED,
    WindowState.REDUCED: WindowState.EMPTY,
}
"""The state after each; after BACKWARD it is OPEN or ENDED. From any state, `abandon` leads to EMPTY."""


class WindowRecord(NamedTuple):
    """What a report says of a reduced window, on one rank."""

    micro_batches: Sequence[MicroBatch]
    shares: Sequence[Share]  # of each micro-batch, in a window of this length
    local_divisor: float  # this rank's gradient before the reduction is sum(w * g) over this


class _Outcome(NamedTuple):
    """What follows from the rows of all ranks; the same on all of them."""

    normalizer: float  # Z
    factor: float  # N / (Z / u)
    raise_fault: Callable[[], NoReturn] | None  # if the rule cannot be applied


class _Reduced(Enum):
    """How far DDP's hook has reduced the gradients of a window. DDP reduces its buckets in order."""

    NO_BUCKET = auto()
    SOME_BUCKETS = auto()  # the next one waits for a parameter without a gradient, or the backward still runs
    ALL_BUCKETS = auto()


@dataclass
class _Contents:
    """What a window holds until it is empty again."""

    micro_batches: list[MicroBatch] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)  # of each micro-batch, as in a window of one
    divisor: float = 1.0  # N
    unit: float = 1.0  # u
    has_ended: bool = False  # whether the latest micro-batch is the last
    parameters: Sequence[nn.Parameter] = ()  # whose gradients an optimizer reads
    trains: list[bool] = field(default_factory=list)  # which of them require grad
    marks: list[_Mark | None] = field(default_factory=list)  # their gradients after the latest backward
    exchange: RowExchange | None = None  # once the last micro-batch is known
    rows: list[Row] | None = None  # of all ranks, once they are read
    outcome: _Outcome | None = None  # of these rows: several buckets, and the end of the window, ask for it
    reduced: _Reduced = _Reduced.NO_BUCKET


class _Mark(NamedTuple):
    """Identifies the values of a gradient."""

    identity: int
    version: int  # counts writes in place


class Window:
    """Weighs the losses of one model, and has its gradients reduced by a rule.

    The calls for each micro-batch, in this order:

    1. `add` before the backward. It returns what the gradient of the loss is multiplied by. With the last micro-batch
       of the window, this rank sends its row, if Z depends on what ranks say or on where a user ends windows.
    2. `begin_backward`. Gradients from before the window leave the parameters in its first backward, and not in `add`:
       Lightning zeroes gradients in between.
    3. The backward runs. In the window's last one, DDP's hook calls `reduces_bucket` for each bucket, and asks for the
       `factor` when the ranks have added up the first. Their rows are there then, as each rank has sent its own before:
       nobody waits where stock does not.
    4. `end_backward`.
    5. After the last one, `reduce`, in which all ranks raise the same ValueError if one of them has a problem; and
       `close`, which adds the gradients from before the window.

    A problem is kept, and travels with the row: raised where it is found, it would leave the other ranks waiting.
    """

    def __init__(
        self,
        rule: Rule,
        ranks: Ranks,
        gradients: Gradients,
        unit: WeightUnit,
        *,
        user_ends_windows: bool = False,
        optimizers: Callable[[], Sequence[Optimizer]] = list,
    ) -> None:
        """Make an empty window.

        Args:
            rule: The reduction rule.
            ranks: The ranks that reduce.
            gradients: Those of the model.
            unit: u; one for all models that a loss may reach.
            user_ends_windows: Whether the user says where a window ends, as in manual optimization and in your own
                loop, and so may give it up by zeroing gradients.
            optimizers: Returns the optimizers of the loop, as far as they are known.
        """
        self._rule = rule
        self._ranks = ranks
        # Lightning ends the windows of all ranks together. Where it does, and Z does not depend on what ranks say, they
        # exchange nothing: a problem is then one of the program, which all of them run.
        self._world = ranks.world
        if rule.normalizer in ("1/L", "1/W") and not user_ends_windows:
            self._world = World()  # of this rank alone
        self._gradients = gradients
        self._unit = unit
        self._user_ends_windows = user_ends_windows
        self._optimizers = optimizers
        self._backward = Backward()  # the running one
        self.state = WindowState.EMPTY
        self._contents = _Contents()

    def _clear(self) -> None:
        if self._contents.micro_batches:
            self._unit.release()
        self.state = WindowState.EMPTY
        self._contents = _Contents()

    def _change(self, state: WindowState) -> None:
        allowed = {_NEXT.get(self.state)}
        if self.state == WindowState.BACKWARD:
            allowed = {WindowState.OPEN, WindowState.ENDED}
        assert state in allowed, f"a window that {self.state.value} cannot be one that {state.value}"
        self.state = state

    @property
    def _is_alone(self) -> bool:
        """Whether there is one rank, on which Lightning says where windows end, and no other model has a window."""
        # Not in a reproducible run, whose bits are those of several ranks.
        return self._ranks.world.size == 1 and not self._user_ends_windows and not self._unit.is_fixed

    @property
    def has_ended(self) -> bool:
        """Whether its last backward has run, and `reduce` comes next."""
        return self.state == WindowState.ENDED

    @property
    def is_empty(self) -> bool:
        """Whether the next micro-batch begins a window."""
        return self.state == WindowState.EMPTY

    def add(self, micro_batch: MicroBatch, *, ends: bool, divisor: float = 1.0) -> float:
        """Add a micro-batch before its backward; return w / u. A collective operation in the first one of a run.

        Args:
            micro_batch: What is known of it.
            ends: Whether the window ends with it.
            divisor: N, what the training loop divides every loss of the window by.
        """
        if self.state == WindowState.WEIGHED:
            self.abandon()  # the backward of that loss never began, as in a pass of Lightning without backward
        problem = self._give_up_if_zeroed()
        contents = self._contents
        is_first = not contents.micro_batches
        if is_first:
            contents.parameters = self._gradients.parameters()
        # No other micro-batch to compare with: the most common step does not walk over the parameters.
        if not (is_first and ends):
            trains = [parameter.requires_grad for parameter in contents.parameters]
            if not is_first and problem is None:
                problem = self._problem_of_parameters(trains)
            contents.trains = trains
        if micro_batch.problem is None:
            micro_batch = micro_batch._replace(problem=problem)
        # Before `hold`: the first weight of a run chooses the unit.
        share, micro_batch = self._weigh(micro_batch)
        if is_first:
            contents.unit = self._unit.hold()
        if is_first and ends and self._is_alone and share.multiplier > 0:
            contents.unit = share.multiplier  # so the loss carries exactly 1, and has the bits of stock
        contents.micro_batches.append(micro_batch)
        contents.shares.append(share)
        contents.divisor = divisor
        contents.has_ended = ends
        self._change(WindowState.WEIGHED)
        if ends:
            contents.exchange = RowExchange(self._row(), self._ranks.device, self._world.group)
        return share.multiplier / contents.unit

    def loss_factor(self, micro_batch: MicroBatch) -> float:
        """Return w / u of a loss that is not added yet: its backward tells which of several models it reaches.

        A collective operation in the first one of a run.
        """
        share, _ = self._weigh(micro_batch)
        return share.multiplier / self._unit.value

    def _weigh(self, micro_batch: MicroBatch) -> tuple[Share, MicroBatch]:
        """Choose the unit by the first weight of a run, a collective operation; return the share of a micro-batch.

        Also return the micro-batch, with its problem if the weight cannot be used.
        """
        # In the backward of a problem the loss counts nothing; its backward still runs, as other ranks may wait for it.
        share = Share(0.0, 0.0)
        if not micro_batch.absent and micro_batch.problem is None:
            try:
                share = share_of(self._rule, self._ranks.place, micro_batch.weight)
            except ValueError as error:
                micro_batch = micro_batch._replace(problem=str(error))
        self._unit.choose(share.multiplier)
        if not math.isfinite(share.multiplier / self._unit.value):
            share = Share(0.0, 0.0)
            micro_batch = micro_batch._replace(
                problem=f"its weight {micro_batch.weight:g} overflows beside the weights of the window before. Scale"
                " the weights so that those of all windows are of similar magnitude"
            )
        return share, micro_batch

    def _give_up_if_zeroed(self) -> str | None:
        """Give up an open window if the user has zeroed all of its gradients; return a problem if only some."""
        if self.state != WindowState.OPEN or not self._user_ends_windows:
            return None
        parameters, marks = self._contents.parameters, self._contents.marks
        marks_now = _marks_of(parameters)
        if marks_now == marks:
            return None
        removed = [before is not None and now is None for before, now in zip(marks, marks_now, strict=True)]
        if any(removed) and any(marks_now):
            return _ZEROED_IN_PART
        # The host reads values, and waits for the device, only if the user has written to gradients.
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not any(bool(gradient.any()) for gradient in gradients):
            self._gradients.abandon(are_zeroed=True)
            self._clear()
        return None

    def _problem_of_parameters(self, trains: list[bool]) -> str | None:
        """Return the problem of a micro-batch that trains other parameters than those before it, or may do so."""
        if trains != self._contents.trains:
            return _OTHER_PARAMETERS
        optimizers = self._optimizers()
        if len(optimizers) <= 1:
            return None
        trained: set[int] = set()
        for parameter, is_trained in zip(self._contents.parameters, trains, strict=True):
            if is_trained:
                trained.add(id(parameter))
        training = 0
        for optimizer in optimizers:
            parameters = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
            if not trained.isdisjoint(parameters):
                training += 1
        if training > 1:
            return _SEVERAL_OPTIMIZERS
        return None

    def _row(self) -> Row:
        """Return what this rank says of the window."""
        contents = self._contents
        present = [micro_batch for micro_batch in contents.micro_batches if not micro_batch.absent]
        normalizers = [share.normalizer for share in contents.shares]
        normalizer = exact_sum(normalizers)
        agreement = NOTHING_TO_COMPARE
        if present:
            agreement = _digest(repr(self._must_agree()))
        return Row(
            normalizer=normalizer,
            remainder=exact_sum([*normalizers, -normalizer]),
            largest=max(share.multiplier for share in contents.shares),
            problems=float(sum(micro_batch.problem is not None for micro_batch in contents.micro_batches)),
            agreement=agreement,
            weights=_digest(repr([micro_batch.weight for micro_batch in contents.micro_batches])),
        )

    def _must_agree(self) -> list[str]:
        """Return what must be the same on all ranks that have a micro-batch, in words."""
        contents = self._contents
        weights = "no weight given"
        if any(micro_batch.explicit for micro_batch in contents.micro_batches):
            weights = "a weight given"
        if self._rule.averages_window:
            weights += f", in a window of {len(contents.micro_batches)}, which {self._rule.name!r} depends on"
        return [weights, f"divided by {contents.divisor:g}", f"in units of {contents.unit:g}"]

    def begin_backward(self, *, is_last_of_step: bool = True, is_in_last_step: bool = True) -> None:
        """Begin the backward of the loss that was added last; arguments as in `Backward`."""
        self._change(WindowState.BACKWARD)
        contents = self._contents
        self._backward = Backward(is_last_of_step, is_in_last_step)
        self._gradients.begin_backward(contents.parameters, self._backward)

    def reduces_bucket(self, *, is_last_bucket: bool) -> bool:
        """Note that DDP reduces a bucket; return whether the backward is that of a weighed loss.

        DDP's hook calls it for each bucket that it reduces, and so in the window's last backward.

        Args:
            is_last_bucket: Whether DDP has reduced all others.
        """
        if self.state != WindowState.BACKWARD:
            return False
        self._contents.reduced = _Reduced.SOME_BUCKETS
        if is_last_bucket:
            self._contents.reduced = _Reduced.ALL_BUCKETS
        return True

    def factor(self) -> float:
        """Return what the sum of a bucket is multiplied by. The first call waits for the rows of all ranks.

        DDP's hook calls it once the ranks have added up, on a thread of gloo, so that no rank waits for rows before it
        sends its gradients. For a fault it returns 0, and `end_backward` or `reduce` raises it: here, on some ranks it
        would be too early.
        """
        if self._contents.exchange is None:
            return 0.0  # `end_backward` raises
        outcome = self._outcome()
        if outcome.raise_fault is not None:
            return 0.0  # `reduce` raises it
        return outcome.factor

    def _outcome(self) -> _Outcome:
        """Return what follows from the rows of all ranks; the first call waits for them."""
        contents = self._contents
        if contents.outcome is None:
            normalizer = self._normalizer()
            factor = self._factor(normalizer)
            contents.outcome = _Outcome(normalizer, factor, self._fault(normalizer, factor))
        return contents.outcome

    def _factor(self, normalizer: float) -> float:
        """Return N / (Z / u); 0 if nothing counts on any rank, and infinity if Z / u is too small for float64."""
        if normalizer == 0:
            return 0.0
        in_units = normalizer / self._contents.unit
        if in_units == 0:
            return math.inf
        return self._contents.divisor / in_units

    def _rows(self) -> list[Row]:
        """Return the rows of all ranks; the first call waits for them."""
        contents = self._contents
        if contents.rows is None:
            assert contents.exchange is not None
            contents.rows = [Row(*row) for row in contents.exchange.read()]
        return contents.rows

    def _normalizer(self) -> float:
        """Return Z."""
        parts: list[float] = []
        for row in self._rows():
            parts += [row.normalizer, row.remainder]
        # The same on all ranks to the last bit, whatever order the backend gathers in: replicas stay replicas.
        counted = exact_sum(parts) / self._gradients.copies
        length = len(self._contents.micro_batches)
        return normalizer_of(self._rule, self._ranks.places, counted, length)

    def _fault(self, normalizer: float, factor: float) -> Callable[[], NoReturn] | None:
        """Return what raises the fault of the window, None if there is none; the same on all ranks."""
        rows = self._rows()
        if any(row.problems for row in rows):
            return self._raise_problems
        if len({row.agreement for row in rows} - {NOTHING_TO_COMPARE}) > 1:
            return self._raise_difference
        copies = self._gradients.copies
        for first in range(0, len(rows), copies):
            if len({row.weights for row in rows[first : first + copies]}) > 1 and self._rule.uses_weight:
                return self._raise_different_weights
        if not math.isfinite(normalizer) or not math.isfinite(factor):
            return self._raise_normalizer
        return None

    # The texts travel only now: one row of numbers per window is what a step without problems pays.

    def _raise_problems(self) -> NoReturn:
        """Raise the problems of all ranks, in whose first line stands the cause: a log shows that line alone."""
        micro_batches = self._contents.micro_batches
        problems: list[str] = []
        for index, micro_batch in enumerate(micro_batches):
            if micro_batch.problem is None:
                continue
            problem = micro_batch.problem
            if len(micro_batches) > 1:
                problem = f"in micro-batch {index} of {len(micro_batches)}, {problem}"
            problems.append(problem)
        # A cause that several ranks share is named once (`test_the_first_line_names_a_cause_once`).
        ranks_of_problem: dict[str, list[int]] = {}
        for rank, problems_of_rank in enumerate(self._world.gather_objects(problems)):
            for problem in problems_of_rank:
                ranks_of_problem.setdefault(problem, []).append(rank)
        lines = []
        for problem, ranks in ranks_of_problem.items():
            where = ""
            if len(ranks) < self._world.size:
                where = f" {on_ranks(ranks)}"
            lines.append(f"{where}: {problem.removesuffix('.')}.")
        found = "\n ".join(lines)
        raise ValueError(f"reduction={self._rule.name!r} cannot be applied{found}")

    def _raise_difference(self) -> NoReturn:
        differing = ""
        for texts_of_ranks in zip(*self._world.gather_objects(self._must_agree()), strict=True):
            if not differing and len(set(texts_of_ranks)) > 1:
                differing = by_value(texts_of_ranks)
        raise ValueError(
            f"reduction={self._rule.name!r}: the ranks' losses differ: {differing}. For weights: {ALWAYS_OR_NEVER}."
        )

    def _raise_different_weights(self) -> NoReturn:
        weights = [micro_batch.weight for micro_batch in self._contents.micro_batches]
        differing = by_value(f"weights {weights}" for weights in self._world.gather_objects(weights))
        raise ValueError(
            f"reduction={self._rule.name!r}: ranks of one tensor-parallel group weigh one batch differently:"
            f" {differing}. Have them read the same batches."
        )

    def _raise_normalizer(self) -> NoReturn:
        normalizer = self._outcome().normalizer
        raise ValueError(
            f"reduction={self._rule.name!r}: the weights add up to {normalizer!r}. Scale them so that their sum, and"
            " its inverse, are finite."
        )

    def end_backward(self) -> None:
        """End a backward that did not raise."""
        contents = self._contents
        if contents.reduced is not _Reduced.NO_BUCKET and not contents.has_ended:
            self.abandon()
            raise RuntimeError(_REDUCED_EARLY)
        self._gradients.end_backward(self._backward)
        if contents.has_ended:
            self._change(WindowState.ENDED)
            return
        self._change(WindowState.OPEN)
        if self._user_ends_windows:
            # A user's loop may zero gradients before the next micro-batch, and so give the window up.
            contents.marks = _marks_of(contents.parameters)

    def reduce(self) -> None:
        """Reduce the gradients after the last backward; raise the same ValueError on all ranks. Collective.

        Also where no bucket has asked for the factor: parameters that DDP does not know may be all that train.
        """
        self._change(WindowState.REDUCED)
        contents = self._contents
        try:
            outcome = self._outcome()
            if outcome.raise_fault is not None:
                outcome.raise_fault()
            in_hook = contents.reduced is _Reduced.ALL_BUCKETS
            self._gradients.reduce(contents.parameters, outcome.factor, in_hook=in_hook)
        except BaseException:
            # The loop may go on, as after a batch that did not fit in memory.
            self.abandon()
            raise

    def record(self) -> WindowRecord:
        """Return what a report says of the window, which is reduced.

        Micro-batches count as further ranks on the node. When they were added, the length of the window was not known:
        their losses carry the multipliers of windows of one, and the local divisor corrects that.
        """
        contents = self._contents
        place = in_window(self._ranks.place, len(contents.micro_batches))
        shares: list[Share] = []
        for micro_batch in contents.micro_batches:
            share = share_of(self._rule, place, micro_batch.weight)
            if micro_batch.absent:
                share = Share(0.0, 0.0)
            shares.append(share)
        multiplier = sum(share.multiplier for share in shares)  # in a window of this length
        multiplier_on_losses = sum(share.multiplier for share in contents.shares)
        if multiplier_on_losses == 0:
            return WindowRecord(contents.micro_batches, shares, 0.0)
        ratio = multiplier / multiplier_on_losses
        return WindowRecord(contents.micro_batches, shares, ratio * contents.divisor * contents.unit)

    def close(self) -> None:
        """Add the gradients from before the window, and begin an empty one. The unit follows the largest weight."""
        self._change(WindowState.EMPTY)
        self._gradients.add_earlier()
        rows = self._rows()
        self._clear()
        self._unit.follow(max(row.largest for row in rows))

    def abandon(self) -> None:
        """Discard the window and its gradients, and restore those from before it."""
        self._gradients.abandon()
        self._clear()


def _marks_of(parameters: Sequence[nn.Parameter]) -> list[_Mark | None]:
    """Return a mark of each gradient, None of a parameter that has none."""
    marks: list[_Mark | None] = []
    for parameter in parameters:
        mark = None
        if parameter.grad is not None:
            mark = _Mark(id(parameter.grad), version_of(parameter.grad))
        marks.append(mark)
    return marks


def _digest(text: str) -> float:
    """Return 32 bits that stand for a text; they are exact in float64."""
    return float(crc32(text.encode()))
