"""The window: the micro-batches whose gradients one optimizer step reduces, and the totals that the ranks exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar
from zlib import crc32

import torch
from torch import Tensor

from lightning_gradavg.place import Place
from lightning_gradavg.reduction.reduce import share_of
from lightning_gradavg.rules import Rule, Scalar, Share, Weight
from lightning_gradavg.weights import weight_problem

__all__ = ["MOST_TERMS", "WHOLE_LOSS", "MicroBatch", "Totals", "Window"]

WHOLE_LOSS = ""
"""The name of the only loss term of a loss that is one tensor."""

MOST_TERMS = 57
"""The most loss terms of a window: the summary's length must not depend on what a rank found."""

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class MicroBatch:
    """What a rank knows of one micro-batch.

    Attributes:
        weights: The weight of every loss term by name; the one name `WHOLE_LOSS` for an undivided loss.
        explicit: Whether the user gave the weight; otherwise the number of samples was taken.
        absent: Whether its gradient is to be discarded under any rule: it only kept the rank busy.
        problem: Why the weights cannot be used, or None. Raised on all ranks when the window closes.
    """

    weights: Mapping[str, Weight]
    explicit: bool = False
    problem: str | None = None
    absent: bool = False


@dataclass
class Window:
    """This rank's micro-batches since the last reduction.

    Attributes:
        rule: The reduction rule.
        place: This rank's place.
        micro_batches: What was accumulated, in order.
        relative: Whether losses are multiplied relative to this rank's first multiplier, so that mostly nothing is
            multiplied at all. Not so where gradients cross ranks within the backward, as in batch norm over all ranks:
            they must be comparable.
    """

    rule: Rule
    place: Place
    micro_batches: list[MicroBatch] = field(default_factory=list)
    relative: bool = True
    # By term and by the length of the window that the place counts; asked for several times in every step.
    _shares: dict[tuple[str, int], list[Share]] = field(default_factory=dict, repr=False)

    def anew(self) -> Window:
        """Return the window after this one."""
        return Window(self.rule, self.place, relative=self.relative)

    def add(self, micro_batch: MicroBatch) -> None:
        """Append a micro-batch. One with a fault is kept as absent, and its fault remembered."""
        problem = micro_batch.problem
        if problem is None and self.rule.uses_weight:
            faults = ((term, self._fault_of(weight)) for term, weight in micro_batch.weights.items())
            problem = next((f"{_of_term(term)}{fault}" for term, fault in faults if fault), None)
        if problem is not None:
            problem = f"micro-batch {len(self.micro_batches)} of the window: {problem}"
            micro_batch = replace(micro_batch, weights=dict.fromkeys(micro_batch.weights, 0.0), problem=problem)
        self.micro_batches.append(micro_batch)
        self._shares.clear()

    def _fault_of(self, weight: Weight) -> str | None:
        fault = weight_problem(weight)
        if fault is None:
            try:
                share_of(self.rule, self.place.over_window(len(self.micro_batches) + 1), weight)
            except ValueError as error:
                fault = str(error)
        return fault

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the loss terms, sorted."""
        return tuple(sorted({term for micro_batch in self.micro_batches for term in micro_batch.weights}))

    @property
    def problems(self) -> list[str]:
        """The faults found on this rank."""
        return [micro_batch.problem for micro_batch in self.micro_batches if micro_batch.problem is not None]

    def shares(self, term: str, *, whole: bool) -> list[Share]:
        """Return the shares of one term's micro-batches.

        Args:
            term: The loss term. A micro-batch without it is absent.
            whole: Whether the place counts the micro-batches of the window, whose number is only known at its end.
        """
        length = len(self.micro_batches) if whole else 1
        shares = self._shares.get((term, length))
        if shares is None:
            place = self.place.over_window(length) if length > 1 else self.place
            shares = [self._share(micro_batch, term, place) for micro_batch in self.micro_batches]
            self._shares[term, length] = shares
        return shares

    def _share(self, micro_batch: MicroBatch, term: str, place: Place) -> Share:
        share = share_of(self.rule, place, micro_batch.weights.get(term, 0.0))
        return share._replace(multiplier=0.0) if micro_batch.absent else share

    def reference(self, term: str, *, whole: bool) -> Weight:
        """Return the first multiplier of a term that is not 0, or 1: what its losses are relative to.

        While all multipliers so far are 0 it is 1, which changes nothing: they contribute nothing.
        """
        reference: Weight = 1.0
        if not self.relative:
            return reference
        for share in reversed(self.shares(term, whole=whole)):
            if isinstance(share.multiplier, Tensor):
                reference = torch.where(share.multiplier > 0, share.multiplier, reference)
            elif share.multiplier != 0:
                reference = share.multiplier
        return reference

    def coefficient(self, term: str) -> Weight:
        """Return the newest micro-batch's multiplier of a term relative to the reference: 0 means discard it."""
        return self.shares(term, whole=False)[-1].multiplier / self.reference(term, whole=False)

    def live(self, term: str) -> bool | Tensor:
        """Return whether any multiplier of a term is above 0, or others' losses have gradients through this rank."""
        if not self.relative:
            return any(not micro_batch.absent for micro_batch in self.micro_batches)
        multipliers = [share.multiplier for share in self.shares(term, whole=False)]
        tensors = [multiplier > 0 for multiplier in multipliers if isinstance(multiplier, Tensor)]
        if any(not isinstance(multiplier, Tensor) and multiplier > 0 for multiplier in multipliers):
            return True
        return torch.stack(tensors).any() if tensors else False

    def summary(self, device: torch.device, *, flag: bool = False) -> Tensor:
        """Return the float64 vector whose sum over ranks `Totals` reads.

        Args:
            device: Where the ranks' summaries are added up.
            flag: News that travels along.
        """
        terms, count = self.terms, float(len(self.micro_batches))
        signature = float(crc32("\0".join(terms).encode()) % 2**20)
        explicit = float(sum(micro_batch.explicit for micro_batch in self.micro_batches))
        faults: Weight = float(len(self.problems))
        normalizers: list[Weight] = []
        for term in terms:
            shares = self.shares(term, whole=True)
            normalizers.append(_sum(share.normalizer for share in shares))
            faults = faults + self._faults_of_shares(term, shares)
        values: list[Weight] = [faults, count, count**2, explicit, signature, signature**2, float(flag), *normalizers]
        values += [0.0] * (Totals.NORMALIZERS + MOST_TERMS - len(values))
        if device.type == "cpu":
            return torch.tensor([float(value) for value in values], dtype=torch.float64)
        # A tensor made from a list is copied with a wait for the stream; one that is filled is not. Each number that is
        # not 0 is a kernel: about eight.
        summary = torch.zeros(len(values), dtype=torch.float64, device=device)
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                summary[index].copy_(value)
            elif value != 0:
                summary[index].fill_(value)
        return summary

    def _faults_of_shares(self, term: str, shares: Sequence[Share]) -> Weight:
        """Count shares that are no numbers >= 0, or whose ratios depend on the length of the window."""
        faults: Weight = 0.0
        for share in shares:
            for value in share:
                if isinstance(value, Tensor):
                    faults = faults + (~(value.isfinite() & (value >= 0))).double()
        if len(shares) == 1:
            return faults
        before, after = (self.reference(term, whole=whole) for whole in (False, True))
        for early, late in zip(self.shares(term, whole=False), shares, strict=True):
            drift = early.multiplier * after - late.multiplier * before
            allowed = _TOLERANCE * early.multiplier * after
            wrong: Tensor | bool = (drift > allowed) | (-drift > allowed)
            faults = faults + (wrong.double() if isinstance(wrong, Tensor) else float(wrong))
        return faults


@dataclass(frozen=True)
class Totals:
    """The sum of all ranks' summaries, on the host.

    Attributes:
        values: The summed vector.
        world_size: Number of ranks that were summed.
    """

    NORMALIZERS: ClassVar[int] = 7

    values: Sequence[float]
    world_size: int

    @property
    def problem(self) -> str | None:
        """What makes the window unusable as seen by every rank alike, or None."""
        faults, pairs, _, explicit, signature, signatures = self.values[:6]
        if faults != 0:
            return "a weight or a share is not usable"
        if signature**2 != self.world_size * signatures:
            return "the ranks' losses have different terms"
        if explicit not in (0, pairs):
            return (
                f"a weight was given for {explicit:.0f} of {pairs:.0f} micro-batches:"
                ' return "weight" from every training_step (or pass weight= to every manual_backward), or never'
            )
        return None

    @property
    def flagged(self) -> bool:
        """Whether any rank raised its flag."""
        return self.values[6] > 0

    @property
    def uneven(self) -> bool:
        """Whether the ranks accumulated different numbers of micro-batches."""
        _, pairs, squares, *_ = self.values
        return pairs**2 != self.world_size * squares


def _sum(normalizers: Iterable[Scalar]) -> Weight:
    total: Weight = 0.0
    for normalizer in normalizers:
        total = total + (normalizer if isinstance(normalizer, Tensor) else float(normalizer))
    return total


def _of_term(term: str) -> str:
    return f"loss term {term!r}: " if term != WHOLE_LOSS else ""
