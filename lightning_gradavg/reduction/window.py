"""The window: the micro-batches of one optimizer step, the totals of all ranks, and what both multiply.

Each pair (rank, micro-batch) has a share `(w, z)`, and the gradient is `sum(w * g) / sum(z)`. DDP, FSDP and their like
average over the W ranks, and the training loop divides every loss by a constant N. So, with `Z = sum(z)`,

    a window of one:   the loss carries  (w * N * W) / Z ,  known before its backward;
    a longer window:   each loss carries  w / u ,           and the reduced gradient is multiplied by  u * N * W / Z .

In a longer window no rank waits for the totals before its last backward: they travel during it. The *unit* `u` keeps
losses in their magnitude, since a factor of 4096 tokens would overflow float16 activations where the result does not.
It is the same on all ranks. Under a rule with weights it is a power of two near the weights of the window before, so
that multiplying by it is exact. Without weights it is what leaves nothing to multiply after a full window.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg.device import HostCopy, on_device
from lightning_gradavg.place import Place
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.reference import is_number, share_of
from lightning_gradavg.reduction.weights import MOST_TERMS, WHOLE_LOSS, MicroBatch, as_weight
from lightning_gradavg.rules import Rule, Share

__all__ = ["Totals", "Window", "unit_above"]

_NOTHING = Share(0.0, 0.0)
_TOLERANCE = 1e-9


class Totals(NamedTuple):
    """What all ranks together know of a window: numbers on the host, or on the device and not waited for.

    Attributes:
        faults: Micro-batches whose weights or shares cannot be used.
        pairs: Number of micro-batches.
        squares: The sum of the squares of the ranks' numbers of micro-batches.
        explicit: Micro-batches whose weight was given.
        signature: A number of the names of the loss terms, summed, and
        signatures: its square, summed.
        bad: Ranks on which something is not finite, or that have no loss.
        without_loss: Ranks that have no loss.
        normalizers: `Z` of each loss term.
    """

    faults: Any
    pairs: Any
    squares: Any
    explicit: Any
    signature: Any
    signatures: Any
    bad: Any
    without_loss: Any
    normalizers: Any

    @classmethod
    def of(cls, values: Any) -> Totals:
        """Return the sum of the ranks' summaries as what it is."""
        header: list[Any] = [values[index] for index in range(_HEADER)]
        return cls._make([*header, values[_HEADER:]])

    @classmethod
    def unknown(cls) -> Totals:
        """Return those of no micro-batch."""
        return cls.of([0.0] * (_HEADER + 1))

    def usable(self, terms: int) -> list[Any]:
        """Return `Z` of each loss term; 0 where the window is faulty, so that nothing is stepped on."""
        of_terms = [self.normalizers[index] for index in range(terms)]
        return [z.masked_fill(self.faults != 0, 0) if isinstance(z, Tensor) else z for z in of_terms]

    def problem(self, world_size: int) -> str | None:
        """Return what makes the window unusable, as every rank sees it, or None. On the host."""
        if self.faults != 0:
            return "a weight or a share is not usable"
        # x * x is rounded once, as the product on the other side is; x**2 need not be.
        if self.signature * self.signature != world_size * self.signatures:
            return "the ranks' losses have different terms"
        if self.explicit not in (0, self.pairs):
            return (
                f"a weight was given for {self.explicit:.0f} of {self.pairs:.0f} micro-batches:"
                ' return "weight" from every training_step (or pass weight= to every manual_backward, or to what does'
                " the backward in your own loop), or never"
            )
        return None


_HEADER = len(Totals._fields) - 1


def unit_above(number: float) -> float:
    """Return a power of two above a number, as a unit for its like; 1 where it is not above 0."""
    # Between these bounds neither the power nor its reciprocal is infinite or subnormal.
    return math.ldexp(1.0, min(max(math.frexp(number)[1], -1022), 1022)) if 0 < number < math.inf else 1.0


def window_ratio(rule: Rule, places: Sequence[Place], length: int) -> float:
    """Return what multipliers are in a window of that length, relative to what they are in one of a single micro-batch.

    A rule sees the length of the window in its place, and the length is known when the losses were multiplied: so the
    ratio must be the same for all ranks, as it is for every named rule.

    Raises:
        ValueError: If it is not, or the rule fails.
    """
    ratios = set()
    for place in places:
        alone, of_window = (share_of(rule, place.over_window(n), 1.0).multiplier for n in (1, length))
        ratios.add(float(of_window / alone) if alone else 1.0)
    low, high = min(ratios), max(ratios)
    if not math.isclose(low, high, rel_tol=_TOLERANCE):
        raise ValueError(
            f"the reduction rule {rule.name!r} gives some ranks multipliers {low:g} times, and others {high:g} times as"
            f" large in a window of {length} micro-batches as in one of 1. Micro-batches count as further ranks on the"
            " node: multipliers may follow their number by one factor only. Do not accumulate, or use a rule whose"
            " multipliers do so."
        )
    return low


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
        compares: Whether ranks tell each other of their windows even where the rule uses no weight: their lengths may
            differ, or what is not finite decides about the step.

    Attributes:
        micro_batches: Those of the window.
        expected: Micro-batches that a full window has.
        in_pieces: Whether a rank may have several pairs of each.
        narrow: Whether gradients are float16, in which a loss times W may overflow where the result does not: losses
            then carry what is near 1, and the rest is multiplied afterwards.
        lengths_differ: Whether the ranks' windows may have different lengths, so that a rank cannot tell from its own
            whether those of all are windows of one.
        loss_divisor: What the training loop divides every loss of the window by; None for its length, as users do.
        missed: Pairs that a mean counts and no rank has, as some ranks are out of batches.
        bad: Whether something of this rank is not finite.
        divided_by: What this rank's gradient of the window was divided by, once the window is closed.
    """

    def __init__(
        self, rule: Rule, places: Sequence[Place], world: World, device: torch.device, *, compares: bool = False
    ) -> None:
        self.rule, self.places, self.world, self.device = rule, tuple(places), world, device
        self.narrow = self.lengths_differ = False
        self.exchanges = rule.uses_weight or compares
        self.expected, self.divided_by, self.in_pieces = 1, 1.0, False
        self.loss_divisor: float | None = 1.0
        self._unit: float | None = None
        self._next_unit: float | None = None
        self._summary: Tensor | None = None
        self._work: dist.Work | None = None
        self._unchecked: tuple[Window, HostCopy] | None = None
        self._ratios: dict[int, float] = {}
        self._constants: dict[int, float] = {}
        self.reset()

    def reset(self) -> None:
        """Begin a window."""
        self.micro_batches: list[MicroBatch] = []
        self._shares: list[dict[str, Share]] = []
        self.bad, self.missed, self._unit = False, 0, self._next_unit

    def add(self, micro_batch: MicroBatch, *, missed: int) -> None:
        """Append a micro-batch, which some ranks do not have."""
        self.micro_batches.append(micro_batch)
        self._shares.append({term: self._share(micro_batch, term, self._alone) for term in micro_batch.weights})
        self.missed += missed

    @property
    def length(self) -> int:
        """Number of micro-batches."""
        return len(self.micro_batches)

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the loss terms, sorted."""
        return tuple(sorted({term for micro_batch in self.micro_batches for term in micro_batch.weights}))

    @property
    def place(self) -> Place:
        """This rank's place as the rule sees it at the end of the window."""
        return self._alone.over_window(max(self.length, 1))

    @property
    def _alone(self) -> Place:
        return self.places[self.world.rank]

    def shares(self, term: str) -> list[Share]:
        """Return the shares of one term's micro-batches at the end of the window; one without the term is absent."""
        if self.length == 1:
            return [self._shares[0].get(term, _NOTHING)]
        return [self._share(each, term, self.place) for each in self.micro_batches]

    def _share(self, micro_batch: MicroBatch, term: str, place: Place) -> Share:
        """Return a share; NaN, which the totals tell of, where the rule fails."""
        if micro_batch.problem is not None or term not in micro_batch.weights:
            return _NOTHING
        try:
            share = share_of(self.rule, place, micro_batch.weights[term])
        except ValueError:
            return Share(math.nan, math.nan)
        return share._replace(multiplier=0.0) if micro_batch.absent else share

    def _ratio(self, length: int) -> float:
        if length not in self._ratios:
            self._ratios[length] = window_ratio(self.rule, self.places, length)
        return self._ratios[length]

    def _constant(self, length: int) -> float:
        """Return Z of a rule that uses no weight, every rank having accumulated so many micro-batches."""
        if length not in self._constants:
            shares = (share_of(self.rule, place.over_window(length), 1.0) for place in self.places)
            self._constants[length] = float(length * sum(share.normalizer for share in shares))
        return self._constants[length]

    @property
    def lift(self) -> float:
        """`1 / u`: what multipliers are multiplied by where the window's factor is not known yet."""
        if self.rule.uses_weight or self.narrow:
            return 1.0 / (self._unit or 1.0)
        scale = self.expected * self.world.size
        return float(_scaled(self._ratio(self.expected), scale, self._constant(self.expected)))

    @property
    def carries_nothing(self) -> bool:
        """Whether losses go into their backward as they are, as those of stock DDP do."""
        return not self.rule.uses_weight and float(share_of(self.rule, self._alone, 1.0).multiplier) * self.lift == 1

    @property
    def divisor(self) -> float:
        """`N`, what the training loop divided every loss of the window by."""
        return self.length if self.loss_divisor is None else self.loss_divisor

    def agree_on_unit(self, first: MicroBatch | None) -> None:
        """Agree on the unit of a first window, by the largest weight of its first micro-batch. A collective operation.

        From then on it follows from the windows before.
        """
        if self._unit is not None or not self.rule.uses_weight:
            return
        weights = () if first is None else (self._share(first, term, self._alone) for term in first.weights)
        largest = max((float(share.normalizer) for share in weights), default=0.0)
        number = on_device(torch.tensor([largest], dtype=torch.float64).nan_to_num(0, 0, 0), self.device)
        if self.world.group is not None:
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self.world.group)
        # Where no rank has any weight yet, the next window asks again.
        self._unit = self._next_unit = unit_above(float(number)) if float(number) > 0 else None

    def held(self) -> list[Any]:
        """Return what each term of the latest micro-batch carries in a longer window; None for no gradient."""
        multipliers = [share.multiplier for share in self._shares[-1].values()]
        # A multiplier that is no number is a fault, which the totals tell.
        return [float(w) * self.lift if 0 < w < math.inf else None for w in multipliers]

    def alone(self, totals: Totals) -> list[Any]:
        """Return what each term of the window's only micro-batch carries: its whole factor, or None for no gradient."""
        scale, multipliers = self.divisor * self.world.size, [share.multiplier for share in self._shares[0].values()]
        of_terms = list(zip(multipliers, totals.usable(len(multipliers)), strict=True))
        self.divided_by = of_terms[0][1] / self.world.size
        return [_scaled(w, scale, z) if isinstance(w, Tensor) or w > 0 else None for w, z in of_terms]

    def after(self, totals: Totals) -> Any:
        """Return what the reduced gradient of a longer window is multiplied by."""
        ratio, lift = self._ratio(self.length), self.lift
        self.divided_by = ratio * self.divisor / lift
        normalizer = totals.usable(1)[0] if self.rule.uses_weight else self._constant(self.length) - self.missed
        return _scaled(ratio, self.divisor * self.world.size, normalizer) / lift

    def exchange(self) -> None:
        """Begin to sum what the ranks know of their windows. A collective operation, where there is need of it."""
        self._summary = self._work = None
        if self.exchanges:
            self._summary = self._summarized()
            if self.world.group is not None:
                self._work = dist.all_reduce(self._summary, group=self.world.group, async_op=True)

    def _summarized(self) -> Tensor:
        """Return the float64 vector whose sum over the ranks `Totals` reads."""
        terms, length = self.terms, self.length
        signature = crc32("\0".join(terms).encode()) % 2**20
        of_terms = [self.shares(term) for term in terms] if self.rule.uses_weight else []
        faults = sum(map(self._faulty, range(length)))
        counts = [length, length**2, sum(each.explicit for each in self.micro_batches), signature, signature**2]
        lost = any(each.without_loss for each in self.micro_batches)
        header, unread = [faults, *counts, self.bad or lost, lost], []
        sums = [sum(share.normalizer for share in shares) for shares in of_terms]
        if any(isinstance(number, Tensor) for shares in of_terms for share in shares for number in share):
            # Alone in its window, whose weights the host has not read.
            unread = [as_weight(number, self.device) for shares in of_terms for share in shares for number in share]
            sums = [0.0] * len(sums)
        numbers = [*header, *map(float, sums), *([0.0] * (MOST_TERMS - len(sums)))]
        summary = on_device(torch.tensor(numbers, dtype=torch.float64), self.device)
        if unread:
            here = [on_device(torch.as_tensor(number, dtype=torch.float64), self.device) for number in unread]
            shares = torch.stack(here).view(-1, 2)
            summary[_HEADER : _HEADER + len(shares)] = shares[:, 1]
            summary[0] += ((shares >= 0) & (shares < math.inf)).logical_not().sum()
        return summary

    def totals(self) -> Totals:
        """Return what all ranks know, once it is there; nothing where nothing is exchanged. On a CPU it is read.

        Raises:
            ValueError: On all ranks, if the window cannot be used; on an accelerator, which is not waited for, if the
                window before it cannot.
        """
        self.check()
        if self._summary is None:
            return Totals.unknown()
        if self._work is not None:
            self._work.wait()
        if self.device.type == "cpu":
            return self._checked(Totals.of(self._summary.tolist()))
        self._unchecked = copy.copy(self), HostCopy(self._summary)
        return Totals.of(self._summary)

    def check(self) -> Totals:
        """Raise what is wrong with the last window that was exchanged: also when training ends, or before it is saved.

        Returns:
            The totals that were looked at.

        Raises:
            ValueError: On all ranks, with what each of them found.
        """
        unchecked, self._unchecked = self._unchecked, None
        if unchecked is None:
            return Totals.unknown()
        window, copied = unchecked
        totals = window._checked(Totals.of(copied.read()))
        self._next_unit = window._next_unit
        return totals

    def _checked(self, totals: Totals) -> Totals:
        """Raise what is wrong with this window, or take the unit of those that follow from its weights."""
        ranks = self.world.size
        problem = totals.problem(ranks)
        if problem is None and totals.pairs**2 != ranks * totals.squares and self.depends_on_length:
            problem = f"the ranks accumulated different numbers of micro-batches, which {self.rule.name!r} depends on"
        if problem is not None:
            found = self.world.gather_objects(self.problems())
            culprits = "".join(f"\n  rank {rank}: {text}" for rank, problems in enumerate(found) for text in problems)
            raise ValueError(f"reduction {self.rule.name!r}: {problem}.{culprits}")
        largest = max(totals.normalizers)
        if self._unit is not None and 0 < largest < math.inf:
            self._next_unit = unit_above(largest / totals.pairs)
        return totals

    @property
    def depends_on_length(self) -> bool:
        """Whether the rule needs to know how many micro-batches the other ranks accumulated."""
        one, two = ([share_of(self.rule, place.over_window(n), 1.0) for place in self.places] for n in (1, 2))
        if self.rule.uses_weight:
            return one != two
        multiplied = [share.multiplier for share in one] != [share.multiplier for share in two]
        return multiplied or self._constant(1) != self._constant(2)

    def problems(self) -> list[str]:
        """Return the faults of this rank's weights and shares. Reads them."""
        found = enumerate(self._problem(each.read()) for each in self.micro_batches)
        return [f"micro-batch {index} of the window: {fault}" for index, fault in found if fault is not None]

    def _faulty(self, index: int) -> bool:
        """Return whether something is wrong with a micro-batch, as far as the host has read its weights."""
        weights = self.micro_batches[index].weights.values() if self.rule.uses_weight else ()
        numbers = [*weights, *(number for share in self._shares[index].values() for number in share)]
        usable = any(isinstance(number, Tensor) for number in numbers) or all(map(is_number, numbers))
        # What a longer window makes of its share is looked at in full.
        longer = self.length > 1 and self._problem(self.micro_batches[index]) is not None
        return self.micro_batches[index].problem is not None or not usable or longer

    def _problem(self, micro_batch: MicroBatch) -> str | None:
        """Return what is wrong with a micro-batch, as far as the host has read its weights."""
        judged = micro_batch.weights.items() if self.rule.uses_weight else ()
        faults = (self._fault(*item) for item in judged if not isinstance(item[1], Tensor))
        return micro_batch.problem or next((fault for fault in faults if fault is not None), None)

    def _fault(self, term: str, weight: float) -> str | None:
        of_term = f"loss term {term!r}: " if term != WHOLE_LOSS else ""
        if not is_number(weight):
            return f"{of_term}weight {weight!r} is not a finite number >= 0"
        try:
            alone, whole = (float(share_of(self.rule, place, weight).multiplier) for place in (self._alone, self.place))
            ratio = self._ratio(self.length)
        except ValueError as error:
            return f"{of_term}{error}"
        if abs(whole - ratio * alone) > _TOLERANCE * whole:
            return (
                f"{of_term}the multiplier of weight {weight:g} follows the length of the window by a factor of its own"
            )
        return None
