"""The exchange of totals: what the micro-batches of a window add up to over all ranks.

Every rank sends one row of six numbers, and every rank gets the rows of all. So a fault on one rank is seen by all in
the same exchange, and all raise the same error. The host reads the rows once per window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, NoReturn
from zlib import crc32

import torch

from lightning_gradavg.device import GatheredRows
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.loss import MicroBatch
from lightning_gradavg.rules import Rule, is_number

__all__ = ["ALWAYS_OR_NEVER", "Totals", "TotalsExchange", "exact_sum", "must_agree", "raise_together"]

ALWAYS_OR_NEVER = (
    'return "weight" from every training_step (or pass weight= to every manual_backward, or to what does the backward'
    " in your own loop), or never"
)


class Totals(NamedTuple):
    """The totals of a window. One rank's row has the same fields."""

    faults: float  # micro-batches with a problem
    without_loss: float  # ranks whose `training_step` returned no loss
    pairs: float  # pairs of rank and micro-batch that are not absent
    lowest_digest: float  # of what must be the same on all ranks; infinity if nothing counts
    highest_digest: float  # of the same; minus infinity if nothing counts
    normalizer: float  # Z

    @classmethod
    def of_rank(cls, *, faults: int, without_loss: bool, pairs: int, agreement: str, normalizer: float) -> Totals:
        """Return the row of one rank; `agreement` is the text that must be the same on all ranks with a pair."""
        digest = float(crc32(agreement.encode()))
        lowest, highest = (digest, digest) if pairs > 0 else (math.inf, -math.inf)
        return cls(faults, without_loss, pairs, lowest, highest, normalizer)

    @classmethod
    def over(cls, rows: Sequence[Sequence[float]]) -> Totals:
        """Return the totals of all ranks' rows."""
        faults, without_loss, pairs, lowest, highest, normalizers = zip(*rows, strict=True)
        return cls(
            faults=sum(faults),
            without_loss=sum(without_loss),
            pairs=sum(pairs),
            lowest_digest=min(lowest),
            highest_digest=max(highest),
            normalizer=exact_sum(normalizers),
        )

    @property
    def agree(self) -> bool:
        """Whether what must be the same on all ranks is the same."""
        return self.highest_digest <= self.lowest_digest

    @property
    def is_usable(self) -> bool:
        """Whether the gradients can be reduced."""
        return self.faults == 0 and self.agree and is_number(self.normalizer)


class TotalsExchange:
    """One exchange of totals that is under way. A collective operation; `read` waits for the other ranks."""

    def __init__(self, row: Totals, world: World, device: torch.device) -> None:
        """Begin to exchange this rank's row, while the rank goes on."""
        with torch.profiler.record_function("GradAvg: exchange totals"):
            self._rows = GatheredRows(row, device, world.group)

    def read(self) -> Totals:
        """Return the totals of all ranks."""
        with torch.profiler.record_function("GradAvg: wait for totals"):
            return Totals.over(self._rows.read())


def must_agree(rule: Rule, micro_batches: Sequence[MicroBatch]) -> str:
    """Return what must be the same on all ranks with a micro-batch that is not absent, in words."""
    is_given = any(micro_batch.explicit for micro_batch in micro_batches)
    text = "one loss, a weight given" if is_given else "one loss, no weight given"
    length = len(micro_batches)
    if length > 1 and rule.averages_window:
        text += f", in a window of {length}, which {rule.name!r} depends on"
    return text


def raise_together(totals: Totals, rule: Rule, world: World, micro_batches: Sequence[MicroBatch]) -> NoReturn:
    """Raise the same ValueError on all ranks about totals that are not usable. A collective operation.

    Args:
        totals: The totals over all ranks.
        rule: The reduction rule.
        world: The ranks.
        micro_batches: Those of this rank.
    """
    texts: list[str] = []
    if totals.faults > 0:
        headline = "the gradients of a window cannot be reduced"
        for index, micro_batch in enumerate(micro_batches):
            if micro_batch.problem is not None:
                texts.append(f"micro-batch {index} of the window: {micro_batch.problem}")
    elif not totals.agree:
        headline = f"the ranks' losses differ in what must be the same. For weights: {ALWAYS_OR_NEVER}"
        texts.append(must_agree(rule, micro_batches))
    else:
        headline = f"the weights add up to {totals.normalizer!r}. Scale them so that their sum is finite"
    lines = [f"reduction {rule.name!r}: {headline}."]
    for rank, texts_of_rank in enumerate(world.gather_objects(texts)):
        for text in texts_of_rank:
            lines.append(f"rank {rank}: {text}")
    raise ValueError("\n  ".join(lines))


def exact_sum(numbers: Sequence[float]) -> float:
    """Return the correctly rounded sum, which no order of the ranks changes; infinity if it overflows."""
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # beyond float64, or inf - inf
        return math.inf
