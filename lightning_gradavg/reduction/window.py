"""The window: the micro-batches whose gradients one optimizer step reduces, and the totals that the ranks exchange.

Weights are 0-dim tensors: on the host those that were given there, and where the gradients are those of an accelerator,
which nothing here reads, so that the host does not wait. The window's shares are stacked once, so that its bookkeeping
costs the same number of kernels whatever its length.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from lightning_gradavg.device import on_device
from lightning_gradavg.place import Place
from lightning_gradavg.reduction.combine import depends_on_window, is_number, share_of, unit_above, window_ratio
from lightning_gradavg.rules import Rule, Share

__all__ = ["MOST_TERMS", "WHOLE_LOSS", "MicroBatch", "Totals", "Window", "as_weight"]

WHOLE_LOSS = ""
"""The name of the only loss term of a loss that is one tensor."""

MOST_TERMS = 58
"""The most loss terms of a window: the summary's length must not depend on what a rank found."""

_HEADER = 6
_TOLERANCE = 1e-9


def as_weight(value: Any, device: torch.device) -> Tensor:
    """Return `value` as a detached 0-dim float64 tensor, where it is: on the host or on `device`. Waits for nothing.

    Args:
        value: An int, a float, a NumPy scalar, or a tensor with one element, of any dtype and on any device.
        device: Where the gradients are.

    Raises:
        TypeError: If `value` is not one number.
    """
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
        raise TypeError(f"a weight is one number, got a tensor of shape {tuple(value.shape)} and {value.dtype}")
    if isinstance(value, Tensor) and value.device.type != "cpu":
        # A copy, as on the host: the user may count on in the same tensor.
        return value.detach().reshape(()).to(device=device, dtype=torch.float64, non_blocking=True, copy=True)
    value = value.detach() if isinstance(value, Tensor) else value
    if isinstance(value, (str, bytes)):
        raise TypeError(f"a weight is one number, got {value!r} of type {type(value).__name__}")
    try:
        return torch.tensor(float(value), dtype=torch.float64)
    except OverflowError:
        raise TypeError(f"a weight is one number, got {type(value).__name__} too large for a float") from None
    except (TypeError, ValueError):
        raise TypeError(f"a weight is one number, got {value!r} of type {type(value).__name__}") from None


@dataclass(frozen=True)
class MicroBatch:
    """What a rank knows of one micro-batch.

    Attributes:
        weights: The weight of every loss term by name; the one name `WHOLE_LOSS` for an undivided loss.
        explicit: Whether the user gave the weight; otherwise the number of samples was taken.
        problem: Why the weights cannot be used, or None. Raised on all ranks when the window closes.
        absent: Whether its gradient is to be discarded under any rule: it only kept the rank busy.
        replica: The replica whose samples it has, from 0, over all ranks; noted where it is asked for.
    """

    weights: Mapping[str, Tensor]
    explicit: bool = False
    problem: str | None = None
    absent: bool = False
    replica: int = 0

    def shares(self, rule: Rule, place: Place) -> dict[str, Share]:
        """Return the share of every loss term; NaN, which is found in the totals, where the rule fails."""
        try:
            shares = {term: share_of(rule, place, weight) for term, weight in self.weights.items()}
        except ValueError:
            shares = dict.fromkeys(self.weights, Share(math.nan, math.nan))
        if self.problem is not None:
            return dict.fromkeys(shares, _NOTHING)
        return {term: share._replace(multiplier=0.0) for term, share in shares.items()} if self.absent else shares


class Window:
    """This rank's micro-batches since the last reduction.

    Args:
        rule: The reduction rule.
        places: The places of all ranks, in rank order.
        rank: This rank.

    Attributes:
        unit: What multipliers are divided by before a loss is multiplied; None where it follows the weights.
        sums: Numbers that the summary has for normalizers: one for each loss term.
    """

    unit: float | None = None
    sums = MOST_TERMS

    def __init__(self, rule: Rule, places: Sequence[Place], rank: int) -> None:
        self.rule, self.places, self.rank = rule, tuple(places), rank
        self.micro_batches: list[MicroBatch] = []
        self._alone: list[dict[str, Share]] = []
        self._depends_on_length = depends_on_window(rule, self.places)

    def anew(self) -> Window:
        """Return the window after this one."""
        following = copy.copy(self)
        following.micro_batches, following._alone = [], []
        return following

    def add(self, micro_batch: MicroBatch) -> dict[str, Share]:
        """Append a micro-batch, and return the share of each of its loss terms as far as it is known now."""
        shares = micro_batch.shares(self.rule, self.places[self.rank])
        self.micro_batches.append(micro_batch)
        self._alone.append(shares)
        return shares

    def drop(self, *, explicit: bool) -> None:
        """Let none of the micro-batches count.

        Args:
            explicit: Whether the weights of other ranks were given by the user.
        """
        dropped, self.micro_batches, self._alone = self.micro_batches, [], []
        for each in dropped:
            nothing = {term: torch.zeros_like(weight) for term, weight in each.weights.items()}
            self.add(MicroBatch(nothing, explicit, absent=True))

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
        return self.places[self.rank].over_window(max(self.length, 1))

    def shares(self, term: str) -> list[Share]:
        """Return the shares of one term's micro-batches at the end of the window; one without the term is absent."""
        whole = self._alone
        if self.length > 1 and (self._depends_on_length or not self.rule.uses_weight):
            whole = [micro_batch.shares(self.rule, self.place) for micro_batch in self.micro_batches]
        return [shares.get(term, _NOTHING) for shares in whole]

    @property
    def ratio(self) -> float:
        """What multipliers are at the end of the window, relative to what they were when losses were multiplied.

        NaN where there is no such number, which `problems` tells of.
        """
        try:
            depends = self._depends_on_length and self.length > 1
            return window_ratio(self.rule, self.places, self.length) if depends else 1.0
        except ValueError:
            return math.nan

    def problems(self) -> list[str]:
        """Return the faults of this rank's weights and shares. Reads them."""
        found = []
        for index, micro_batch in enumerate(self.micro_batches):
            judged = micro_batch.weights.items() if self.rule.uses_weight else ()
            faults = (micro_batch.problem, *(self._fault(*item) for item in judged))
            found += [f"micro-batch {index} of the window: {fault}" for fault in faults if fault is not None][:1]
        return found

    def _fault(self, term: str, weight: Tensor) -> str | None:
        number, of_term = float(weight), f"loss term {term!r}: " if term != WHOLE_LOSS else ""
        if not is_number(number):
            return f"{of_term}weight {number!r} is not a finite number >= 0"
        try:
            alone, whole = (share_of(self.rule, place, number) for place in (self.places[self.rank], self.place))
            ratio = window_ratio(self.rule, self.places, self.length)
        except ValueError as error:
            return f"{of_term}{error}"
        if abs(whole.multiplier - ratio * alone.multiplier) > _TOLERANCE * whole.multiplier:
            return (
                f"{of_term}the multiplier of weight {number:g} follows the length of the window by a factor of its own"
            )
        return None

    def summary(self, device: torch.device) -> Tensor:
        """Return the float64 vector whose sum over ranks `Totals` reads.

        Args:
            device: Where the ranks' summaries are added up.
        """
        terms, length = self.terms, self.length
        signature = crc32("\0".join(terms).encode()) % 2**20
        explicit = sum(micro_batch.explicit for micro_batch in self.micro_batches)
        faults = sum(micro_batch.problem is not None for micro_batch in self.micro_batches)
        header = [faults, length, length * length, explicit, signature, signature * signature]
        summary = torch.tensor([*header, *([0] * self.sums)], dtype=torch.float64)
        if not (self.rule.uses_weight and terms):
            return on_device(summary, device)
        # Shape (terms, micro-batches, 2).
        shares = _stacked([self.shares(term) for term in terms], device)
        summary = on_device(summary, shares.device)
        usable = (shares >= 0) & (shares < math.inf)
        if self._depends_on_length and length > 1:
            alone = _stacked([[shares.get(term, _NOTHING) for shares in self._alone] for term in terms], device)
            drift = (shares - self.ratio * alone)[..., 0].abs()
            usable &= (drift <= _TOLERANCE * shares[..., 0])[..., None]
        sums = self.summed(shares[..., 1])
        summary[_HEADER : _HEADER + len(sums)] = sums
        summary[0] += usable.logical_not().sum()
        return on_device(summary, device)

    def summed(self, normalizers: Tensor) -> Tensor:
        """Return what the summary has of normalizers, shape `(terms, micro-batches)`: the sum of each term."""
        return normalizers.sum(1)

    def totals(self, values: Any) -> Totals:
        """Return the ranks' summaries, added up, as what they are."""
        return Totals(values, len(self.places))


_NOTHING = Share(0.0, 0.0)


def _stacked(shares: Sequence[Sequence[Share]], device: torch.device) -> Tensor:
    """Return the numbers of all shares in one tensor of shape `(len(shares), len(shares[0]), 2)`.

    On the host where all of them are there: a rank's summary is then sent to its device as a whole.
    """
    values = [value for of_term in shares for share in of_term for value in share]
    # A rule may return a number, or a tensor of another type.
    numbers = [value if _is_weight(value) else as_weight(value, device) for value in values]
    if any(number.device.type != "cpu" for number in numbers):
        numbers = [on_device(number, device) for number in numbers]
    return torch.stack(numbers).view(len(shares), -1, 2)


def _is_weight(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float64 and value.ndim == 0


class Totals(NamedTuple):
    """The sum of all ranks' summaries: of a window that is being reduced, and on the host later.

    Attributes:
        values: The summed vector.
        world_size: Number of ranks that were summed.
    """

    values: Any
    world_size: int

    def normalizer(self, index: int) -> Any:
        """Return Z of a term by its index; 0 where the window is faulty, so that nothing is stepped on."""
        faults, total = self.values[0], self.total(index)
        return total.masked_fill(faults != 0, 0) if isinstance(total, Tensor) else total * (faults == 0)

    @property
    def normalizers(self) -> Any:
        """What the summaries have of normalizers."""
        return self.values[_HEADER:]

    def total(self, index: int) -> Any:
        """Return the sum of a term's normalizers."""
        return self.normalizers[index]

    def unit_after(self, unit: float) -> float:
        """Return the unit of a later window: above this one's mean weight, or `unit` where it has none. On the host."""
        totals, pairs = self.normalizers, self.values[1]
        return unit_above([total / pairs for total in totals]) if max(totals) > 0 else unit

    @property
    def problem(self) -> str | None:
        """What makes the window unusable as seen by every rank alike, or None. On the host."""
        faults, pairs, _, explicit, signature, signatures = self.values[:_HEADER]
        if faults != 0:
            return "a weight or a share is not usable"
        # x * x is rounded once, as the product on the other side is; x**2 need not be.
        if signature * signature != self.world_size * signatures:
            return "the ranks' losses have different terms"
        if explicit not in (0, pairs):
            return (
                f"a weight was given for {explicit:.0f} of {pairs:.0f} micro-batches:"
                ' return "weight" from every training_step (or pass weight= to every manual_backward, or to what does'
                " the backward in your own loop), or never"
            )
        return None

    @property
    def uneven(self) -> bool:
        """Whether the ranks accumulated different numbers of micro-batches. On the host."""
        _, pairs, squares, *_ = self.values
        return bool(pairs * pairs != self.world_size * squares)
