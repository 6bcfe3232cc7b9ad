"""The window: the micro-batches of one optimizer step, the totals of all ranks, and what both multiply.

Each pair (rank, micro-batch) has a share `(w, z)`, and the gradient is `sum(w * g) / sum(z)`. DDP, FSDP and their like
average over the W ranks, and the training loop divides every loss by a constant N. So, with `Z = sum(z)`,

    a window of one:   the loss carries  (w * N * W) / Z ,  known before its backward;
    a longer window:   each loss carries  w * lift , and the reduced gradient is multiplied by  N * W / Z / lift .

In a longer window no rank waits for the totals before its last backward: they travel during it. The *lift* keeps losses
in their magnitude: a factor of 4096 tokens would overflow float16 activations where the result does not. It is the same
on all ranks. Under a rule with weights it is the inverse of a power of two near the weights of the window before, so
that multiplying by it is exact. Without weights it is what leaves nothing to multiply after a window of one.
"""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from lightning_gradavg.device import Tally, on_device
from lightning_gradavg.place import Place
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.weights import ALWAYS_OR_NEVER, MOST_TERMS, WHOLE_LOSS, MicroBatch
from lightning_gradavg.rules import Rule, Share, powers_of_length, share_of

__all__ = ["Totals", "Window"]

_NOTHING = Share(0.0, 0.0)
_NAMED = (
    "named loss terms need the global weight of each before their backward, and a window of several micro-batches knows"
    " it after its last one. Do not accumulate; or return one loss under reduction='mean', with each term's sum divided"
    " by its count over all ranks, as DETR does: `count = self.trainer.strategy.reduce(count, reduce_op='sum')`,"
    " `loss = world_size * (cls_sum / cls_count + box_sum / box_count)`"
)


class Totals(NamedTuple):
    """What all ranks together know of a window: sums of numbers on the host, or on a device and not waited for.

    Attributes:
        faults: Micro-batches whose weights or shares cannot be used.
        pairs: Micro-batches.
        squares: The squares of the ranks' numbers of micro-batches.
        explicit: Micro-batches whose weight was given.
        signature: A number that stands for the names of a rank's loss terms.
        signatures: The squares of these.
        without_loss: Ranks without loss.
        normalizers: `Z` of each loss term.
        more: Sums of what `Window.exchange` was given.
    """

    faults: Any
    pairs: Any
    squares: Any
    explicit: Any
    signature: Any
    signatures: Any
    without_loss: Any
    normalizers: Any
    more: Any

    @classmethod
    def of(cls, values: Any) -> Totals:
        """Return the sum of the ranks' summaries as what it is."""
        return cls._make([*values[:_HEADER], values[_HEADER:_TERMS_END], values[_TERMS_END:]])

    def problem(self, ranks: int) -> str | None:
        """Return what makes the window unusable, as every rank sees it, or None. On the host."""
        return next((text.format(self) for text, found in _PROBLEMS.items() if found(self, ranks)), None)


_HEADER = len(Totals._fields) - 2
_TERMS_END = _HEADER + MOST_TERMS
_UNKNOWN = Totals.of([0.0] * (_HEADER + 1))

# All ranks have the same number where the square of the sum is W times the sum of the squares. `x * x` is rounded once,
# like the product beside it; `x**2` need not be.
_PROBLEMS: Mapping[str, Callable[[Totals, int], bool]] = {
    "a weight or a share is not usable": lambda all_, _: all_.faults != 0,
    "the ranks' losses have different terms": lambda all_, ranks: (
        all_.signature * all_.signature != ranks * all_.signatures
    ),
    f"a weight was given for {{0.explicit:.0f}} of {{0.pairs:.0f}} micro-batches: {ALWAYS_OR_NEVER}": lambda all_, _: (
        all_.explicit not in (0, all_.pairs)
    ),
}


def _scaled(multiplier: Any, scale: float, normalizer: Any) -> Any:
    """Return `multiplier * N * W / Z`, with `scale = N * W`; 0 where there is nothing to normalize.

    Every scale of the reduction is decided here. In this order it is exactly 1 where all weights are equal.
    """
    if isinstance(normalizer, Tensor):
        return torch.where(normalizer > 0, multiplier * scale / normalizer, 0.0)
    return multiplier * scale / normalizer if normalizer > 0 else 0.0 * multiplier


class Window:
    """This rank's micro-batches since the last reduction.

    Args:
        rule: The reduction rule.
        places: The places of all ranks, in rank order.
        world: The ranks.
        device: Where the gradients are.
        compares: Whether ranks exchange totals even where the rule uses no weight: their windows may have different
            lengths, or they judge steps together.
        afterwards: Whether no loss carries the whole factor of a window of one: the ranks' windows may have different
            lengths, so that no rank knows whether those of all are windows of one; or gradients are float16, in which a
            loss times W may overflow where the result does not.
        in_pieces: Whether some ranks may run several backwards in a step, and others one.

    Attributes:
        known: What all ranks know of the window, once it is exchanged.
        is_alone: Whether its only micro-batch carries the whole factor.
        loss_divisor: What the training loop divides every loss of the window by; None for the window's length.
        terms: The names of the loss terms, sorted.
        missed: Pairs that a mean counts and no rank has, because some ranks are out of batches.
        divided_by: What this rank's gradient of the window was divided by, once the window is closed.
        carries_nothing: Whether losses go into their backward as they are, like those of stock DDP.
    """

    def __init__(
        self,
        rule: Rule,
        places: Sequence[Place],
        world: World,
        device: torch.device,
        *,
        compares: bool = False,
        afterwards: bool = False,
        in_pieces: bool = False,
    ) -> None:
        self.rule, self.places, self.world, self.device = rule, places, world, device
        self.afterwards, self._in_pieces = afterwards, in_pieces
        self._exchanges = rule.uses_weight or compares
        self.loss_divisor: float | None = 1.0
        self.divided_by = 1.0
        self._place = places[world.rank]
        self._next_lift: float | None = None
        self._constant = 0.0
        if not rule.uses_weight:
            self._constant = float(sum(share_of(rule, place, 1.0).normalizer for place in places))
            self._next_lift = 1.0 if afterwards else float(_scaled(1.0, world.size, self._constant))
        self.carries_nothing = not rule.uses_weight and share_of(rule, self._place, 1.0)[0] * self._next_lift == 1
        self._tally: Tally | None = None
        self._unchecked: tuple[Window, Tally] | None = None
        self.known, self.is_alone = _UNKNOWN, False
        self.reset()

    def reset(self) -> None:
        """Begin a window."""
        self.micro_batches: list[MicroBatch] = []
        self._judged: list[tuple[dict[str, Share], str | None]] = []
        self.terms: tuple[str, ...] = ()
        self.missed, self._lift = 0, self._next_lift
        self._explicit, self._lost = 0, False

    def carry(self, micro_batch: MicroBatch, *, last: bool, missed: int = 0, unread: bool = False) -> list[Any]:
        """Add the micro-batch whose backward begins; return what each of its terms carries, None for no gradient.

        Args:
            micro_batch: The micro-batch.
            last: Whether the window ends with it. Then this is a collective operation.
            missed: Ranks that have no such micro-batch.
            unread: Whether its weights may stay on an accelerator.

        Raises:
            ValueError: If it does not fit into the window, or on all ranks, if that of some rank does not.
        """
        begins, named = not self.micro_batches, tuple(micro_batch.weights) != (WHOLE_LOSS,)
        # All ranks must go the same way.
        differing = self._in_pieces if named else self.afterwards
        self.is_alone = begins and last and self.rule.uses_weight and not differing
        if named and not self.is_alone:
            raise ValueError(_NAMED)
        if self.device.type != "cpu" and (named or not (self.is_alone and unread)):
            # A bucket holds all terms, so a term of weight 0 is stopped at its loss.
            micro_batch = micro_batch.read()
        self.add(micro_batch, missed=missed)
        if begins and not self.is_alone and not self._in_pieces:
            self.agree_on_lift(micro_batch)
        if last:
            self.exchange()
        return self.alone(self.totals()) if self.is_alone else self.held()

    def add(self, micro_batch: MicroBatch, *, missed: int = 0) -> tuple[dict[str, Share], str | None]:
        """Append a micro-batch, which some ranks do not have; return its shares, and what is wrong with it."""
        self.micro_batches.append(micro_batch)
        self._judged.append(self._judge(micro_batch))
        self.terms = tuple(sorted({*self.terms, *micro_batch.weights}))
        self.missed += missed
        self._explicit += micro_batch.explicit
        self._lost |= micro_batch.without_loss
        return self._judged[-1]

    @property
    def length(self) -> int:
        """Number of micro-batches."""
        return len(self.micro_batches)

    @property
    def divisor(self) -> float:
        """`N`, what the training loop divided every loss of the window by."""
        return self.length if self.loss_divisor is None else self.loss_divisor

    @property
    def lift(self) -> float:
        """What multipliers are multiplied by while the window's factor is not known."""
        return 1.0 if self._lift is None else self._lift

    def shares(self, term: str) -> list[Share]:
        """Return the shares of one term's micro-batches; one without the term is absent."""
        alone, (w, z) = [shares.get(term, _NOTHING) for shares, _ in self._judged], self._of_length
        return [Share(share.multiplier * w, share.normalizer * z) for share in alone]

    def _judge(self, micro_batch: MicroBatch) -> tuple[dict[str, Share], str | None]:
        """Return a micro-batch's shares in a window of one, and what is wrong with it, as far as weights are read."""
        shares, fault = dict.fromkeys(micro_batch.weights, _NOTHING), micro_batch.problem
        if fault is None:
            for term, weight in micro_batch.weights.items():
                try:
                    _ = self._of_length
                    shares[term] = share_of(self.rule, self._place, weight)
                except ValueError as error:
                    fault = f"loss term {term!r}: {error}" if term else str(error)
        if micro_batch.absent:
            shares = {term: share._replace(multiplier=0.0) for term, share in shares.items()}
        return shares, fault

    @cached_property
    def _powers(self) -> Share:
        return powers_of_length(self.rule, self.places)

    @property
    def _of_length(self) -> Share:
        """What the numbers of shares in a window of one are multiplied by in this one."""
        if self.length <= 1:
            return Share(1.0, 1.0)
        return Share(*(self.length**power for power in self._powers))

    def agree_on_lift(self, first: MicroBatch | None) -> None:
        """Agree on the lift of a first window, by the largest share of its first micro-batch. A collective operation.

        Later it follows from the windows before.
        """
        if self._lift is not None:
            return
        shares = {} if first is None else self._judge(first)[0]
        largest = max((float(share.normalizer) for share in shares.values()), default=0.0)
        (number,) = Tally([largest], "max", self.device, self.world.group).read()
        # Where no rank has any weight, the next window asks again.
        self._lift = self._next_lift = _lift_of(number)

    def held(self) -> list[Any]:
        """Return what each term of the latest micro-batch carries in a longer window; None for no gradient."""
        multipliers = [float(share.multiplier) for share in self._judged[-1][0].values()]
        return [w * self.lift if w > 0 else None for w in multipliers]

    def alone(self, totals: Totals) -> list[Any]:
        """Return what each term of the window's only micro-batch carries: its whole factor, or None for no gradient."""
        scale, multipliers = self.divisor * self.world.size, [w for w, _ in self._judged[0][0].values()]
        of_terms = [(w, self._usable(totals, index)) for index, w in enumerate(multipliers)]
        self.divided_by = of_terms[0][1] / self.world.size
        return [_scaled(w, scale, z) if isinstance(w, Tensor) or w > 0 else None for w, z in of_terms]

    def after(self, totals: Totals) -> Any:
        """Return what the reduced gradient of a longer window is multiplied by."""
        ratio, of_z = self._of_length
        self.divided_by = ratio * self.divisor / self.lift
        scale = self.divisor * self.world.size
        if self.rule.uses_weight:
            return _scaled(ratio, scale / of_z, self._usable(totals, 0)) / self.lift
        normalizer = self._constant * self.length ** (1 + self._powers.normalizer) - self.missed
        return _scaled(ratio, scale, normalizer) / self.lift

    def _usable(self, totals: Totals, index: int) -> Any:
        """Return `Z` of a loss term; 0 where the window is faulty, so that no step is taken on it."""
        z = totals.normalizers[index]
        return z.masked_fill(totals.faults != 0, 0) if isinstance(z, Tensor) else z

    def exchange(self, more: Sequence[float] = ()) -> None:
        """Begin to sum what the ranks know of their windows, where there is need of it. A collective operation.

        Args:
            more: Further numbers to sum, as many on all ranks.
        """
        self._tally = Tally(self._summarized(more), "sum", self.device, self.world.group) if self._exchanges else None

    def _summarized(self, more: Sequence[float] = ()) -> Tensor:
        """Return the float64 vector whose sum over the ranks `Totals` reads."""
        length, judged = self.length, self._judged
        signature = crc32("\0".join(self.terms).encode()) % 2**20
        faults = length - [fault for _, fault in judged].count(None)
        header = [faults, length, length**2, self._explicit, signature, signature**2, self._lost]
        sums, unread = [0.0] * MOST_TERMS, None
        for index, term in enumerate(self.terms if self.rule.uses_weight else ()):
            shares = [shares[term] for shares, _ in judged if term in shares]
            if isinstance(shares[0].normalizer, Tensor):
                (unread,) = shares  # alone in its window
            else:
                sums[index] = float(sum(share.normalizer for share in shares))
        summary = torch.frombuffer(array("d", [*header, *sums, *more]), dtype=torch.float64)
        if self.device.type != "cpu":
            summary = on_device(summary, self.device)
        if unread is not None:
            numbers = torch.stack(unread)
            summary[_HEADER] = unread.normalizer
            summary[0] += ((numbers >= 0) & (numbers < math.inf)).logical_not().sum()
        return summary

    def totals(self) -> Totals:
        """Return what all ranks know, once it is there; zeros where nothing is exchanged. On a CPU it is read.

        Raises:
            ValueError: On all ranks, if the window cannot be used; on an accelerator, which is not waited for, if the
                window before it cannot.
        """
        self.check()
        self.known = _UNKNOWN
        if self._tally is not None and self.device.type == "cpu":
            self.known = self._checked(Totals.of(self._tally.read()))
        elif self._tally is not None:
            self._unchecked = copy.copy(self), self._tally
            self._tally.wait()
            self.known = Totals.of(self._tally.row)
        return self.known

    def check(self) -> Totals:
        """Raise what is wrong with the last window that was exchanged and not read; return its totals.

        Raises:
            ValueError: On all ranks, with what each of them found.
        """
        unchecked, self._unchecked = self._unchecked, None
        if unchecked is None:
            return _UNKNOWN
        window, copied = unchecked
        totals = window._checked(Totals.of(copied.read()))
        self._next_lift = window._next_lift
        return totals

    def _checked(self, totals: Totals) -> Totals:
        """Raise what is wrong with this window, or take the lift of those that follow from its weights."""
        ranks = self.world.size
        problem = totals.problem(ranks)
        if problem is None and totals.pairs**2 != ranks * totals.squares and self.depends_on_length:
            problem = f"the ranks accumulated different numbers of micro-batches, which {self.rule.name!r} depends on"
        if problem is not None:
            found = self.world.gather_objects(self.problems())
            culprits = "".join(f"\n  rank {rank}: {text}" for rank, problems in enumerate(found) for text in problems)
            raise ValueError(f"reduction {self.rule.name!r}: {problem}.{culprits}")
        if self.rule.uses_weight and self._lift is not None:
            self._next_lift = _lift_of(max(totals.normalizers) / totals.pairs) or self._next_lift
        return totals

    @property
    def depends_on_length(self) -> bool:
        """Whether the rule needs to know how many micro-batches the other ranks accumulated."""
        # Without weights `Z` has as many summands as the window is long.
        return self._powers != (0.0, 0.0 if self.rule.uses_weight else -1.0)

    def problems(self) -> list[str]:
        """Return what is wrong with this rank's micro-batches. Reads their weights."""
        self.micro_batches = [each.read() for each in self.micro_batches]
        self._judged = [self._judge(each) for each in self.micro_batches]
        found = enumerate(fault for _, fault in self._judged)
        return [f"micro-batch {index} of the window: {fault}" for index, fault in found if fault is not None]


def _lift_of(number: float) -> float | None:
    """Return the inverse of a power of two above a number, or None for a number that is not finite and above 0."""
    # Between these bounds neither the power nor its inverse is infinite or subnormal.
    return math.ldexp(1.0, -min(max(math.frexp(number)[1], -1022), 1022)) if 0 < number < math.inf else None
