"""What one rank knows of an optimizer step, made comparable, and what the ranks together know.

Every rank packs its measurement into one vector of float64, and makes the same report of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lightning_gradavg.reduction.window import MOST_TERMS, WHOLE_LOSS, Window
from lightning_gradavg.report.noise import GradientSpread
from lightning_gradavg.report.report import TermReport
from lightning_gradavg.rules import Share
from lightning_gradavg.timers import Communication

__all__ = ["SUMMED_LOSSES", "ObservedMicroBatch", "RankMeasurement", "measure_rank", "spread_of", "term_reports"]

_HEADER = 8
_PER_TERM = 4

SUMMED_LOSSES = ("sum", "normalized_sum", "mean_of_node_sums")
"""The rules that are meant for losses that are sums over the samples; every other is for means."""


@dataclass(frozen=True)
class ObservedMicroBatch:
    """What is known of one micro-batch.

    Attributes:
        losses: The undivided loss terms by name, detached.
        samples: Its samples; NaN where the batch does not tell.
    """

    losses: Mapping[str, Tensor]
    samples: float


class RankMeasurement(NamedTuple):
    """What one rank tells the others of an observed step.

    Attributes:
        micro_batches: Length of its window.
        samples: Samples of its window; NaN where a batch does not tell.
        squared_norm: `|g_r|^2`.
        product: `<g_r, g>`; NaN where it was not asked for.
        coefficient: `a_r` of `g ~ sum of a_r l_r`, with `l_r` the mean gradient over the rank's samples; NaN where the
            samples or the gradient are not known.
        batch_size: `b_r`, the samples that `l_r` is the mean over; NaN likewise.
        communication: Seconds that the reduction took, and those before the last gradient; 0 where DDP kept no times.
        terms: Of each loss term: the sum of multiplier times loss, `n_r`, `w_r` and `z_r`.
    """

    micro_batches: float
    samples: float
    squared_norm: float
    product: float
    coefficient: float
    batch_size: float
    communication: Communication
    terms: tuple[tuple[float, float, float, float], ...]

    def pack(self) -> list[float]:
        """Return numbers whose count is the same for any loss."""
        *header, communication, terms = self
        numbers = [*header, *communication, *(number for term in terms for number in term)]
        return numbers + [0.0] * (_HEADER + _PER_TERM * MOST_TERMS - len(numbers))

    @classmethod
    def unpack(cls, numbers: Sequence[float], terms: int) -> RankMeasurement:
        """Return what `pack` packed, of a loss with that many terms."""
        micro_batches, samples, norm, product, coefficient, size, total, overlapped, *rest = numbers
        of_terms = (rest[_PER_TERM * index :][:_PER_TERM] for index in range(terms))
        return cls(
            micro_batches,
            samples,
            norm,
            product,
            coefficient,
            size,
            Communication(total, overlapped),
            tuple((loss, weight, multiplier, normalizer) for loss, weight, multiplier, normalizer in of_terms),
        )


def measure_rank(
    window: Window,
    micro_batches: Sequence[ObservedMicroBatch],
    *,
    divisor: float,
    squared_norm: float,
    product: float,
    communication: Communication,
) -> RankMeasurement:
    """Return one rank's measurement.

    The accumulated gradient is `G = S / D` with `S = sum of w_m g_m` over the window, as in
    `lightning_gradavg.reduction.combine`, and the rank's own gradient is `g_r = S / w_r`, with `w_r` the sum of the
    multipliers for mean losses and their mean for sum losses. With several terms `G` is the rank's summand of `g`
    already.

    Args:
        window: The rank's window.
        micro_batches: What is known of its micro-batches, in order.
        divisor: `D`, what the losses were divided by.
        squared_norm: `|G|^2`.
        product: `<G, g>`; NaN where it was not asked for.
        communication: How long the reduction took.
    """
    summed = window.rule.name in SUMMED_LOSSES
    shares = {
        term: [Share(float(multiplier), float(normalizer)) for multiplier, normalizer in window.shares(term)]
        for term in window.terms
    }
    terms = []
    for term, of_term in shares.items():
        multipliers = [share.multiplier for share in of_term]
        loss = sum(w * float(seen.losses[term]) for w, seen in zip(multipliers, micro_batches, strict=True) if w > 0)
        weight = sum(float(micro_batch.weights.get(term, 0.0)) for micro_batch in window.micro_batches)
        multiplier = sum(multipliers) / (len(multipliers) if summed else 1)
        terms.append((loss, weight, multiplier, sum(share.normalizer for share in of_term)))
    samples = [seen.samples for seen in micro_batches]
    if window.terms == (WHOLE_LOSS,):
        multipliers = [share.multiplier for share in shares[WHOLE_LOSS]]
        own = terms[0][2]
        factor = divisor / own if own > 0 else 0.0
        weights = [float(micro_batch.weights[WHOLE_LOSS]) for micro_batch in window.micro_batches]
        coefficient, batch_size = _mean_gradient(multipliers, weights if window.rule.uses_weight else samples, summed)
    else:
        factor, coefficient, batch_size = float(window.place.world_size), math.nan, math.nan
    return RankMeasurement(
        micro_batches=float(window.length),
        samples=sum(samples),
        # Selected, not multiplied: the gradient of a rank that contributes nothing may be NaN.
        squared_norm=squared_norm * factor**2 if factor else 0.0,
        product=product * factor if factor else 0.0,
        coefficient=coefficient,
        batch_size=batch_size,
        communication=communication,
        terms=tuple(terms),
    )


def _mean_gradient(multipliers: Sequence[float], sizes: Sequence[float], summed: bool) -> tuple[float, float]:
    """Return `a` and `b` of `S = sum of w_m g_m = a l`, with `l` a mean gradient of the variance of `b` samples' mean.

    `g_m` is the mean over the `b_m` samples of a micro-batch, or their sum, `c_m = b_m` times the mean. So
    `a = sum of w_m c_m`, and the variance of `S`, `sum of (w_m c_m)^2 / b_m` times that of one sample, gives
    `b = a^2 / sum of (w_m c_m)^2 / b_m`: the number of samples, where each of them has the same say.
    """
    parts = [(w * (size if summed else 1.0), size) for w, size in zip(multipliers, sizes, strict=True) if w > 0]
    total = sum(part for part, _ in parts)
    if any(size == 0 for _, size in parts):
        return math.nan, math.nan
    variance = sum(part**2 / size for part, size in parts)
    return (total, total**2 / variance) if parts else (0.0, 0.0)


def spread_of(ranks: Sequence[RankMeasurement], squared_norm: float) -> GradientSpread | None:
    """Return what the noise scale is estimated from, or None where the ranks' samples or gradients are not known.

    Args:
        ranks: The measurements of all ranks.
        squared_norm: Of the reduced gradient.
    """
    total = sum(rank.coefficient for rank in ranks)
    if not 0 < total < math.inf:
        return None
    # g Z = sum of w_r g_r = sum of a_r l_r
    norms = (
        rank.squared_norm * (rank.terms[0][2] / rank.coefficient) ** 2 if rank.coefficient > 0 else 0.0
        for rank in ranks
    )
    normalizer = sum(rank.terms[0][3] for rank in ranks)
    return GradientSpread(
        tuple(norms),
        tuple(rank.batch_size for rank in ranks),
        squared_norm * (normalizer / total) ** 2,
        tuple(rank.coefficient / total for rank in ranks),
    )


def term_reports(names: Sequence[str], ranks: Sequence[RankMeasurement]) -> tuple[TermReport, ...]:
    """Return the loss terms of a step from the measurements of all ranks; a loss that nobody has any weight of is 0."""
    reports = []
    for index, name in enumerate(names):
        losses, weights, multipliers, normalizers = zip(*(rank.terms[index] for rank in ranks), strict=True)
        normalizer = sum(normalizers)
        loss = sum(losses) / normalizer if normalizer > 0 else 0.0
        reports.append(TermReport(name, loss, weights, multipliers, normalizer))
    return tuple(reports)
