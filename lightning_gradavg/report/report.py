"""What was observed of one optimizer step: the numbers of the reduction formula, and the norms on both of its sides.

    g = ( sum over r of  w_r * g_r ) / Z

The formula holds among the reported numbers, where each rank `r` stands for its whole accumulation window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lightning_gradavg.reduction.weights import WHOLE_LOSS
from lightning_gradavg.reduction.window import Window
from lightning_gradavg.rules import Share

__all__ = ["SUMMED_LOSSES", "RankMeasurement", "StepReport", "TermReport", "known_sum", "measure_rank"]

SUMMED_LOSSES = ("sum", "normalized_sum", "mean_of_node_sums")
"""The rules that are meant for losses that are sums over the samples; every other is for means."""


@dataclass(frozen=True)
class TermReport:
    """One loss term of a step.

    Attributes:
        name: Its name; empty for a loss that is one tensor.
        loss: Its value under the rule, over all ranks and micro-batches, not divided by `accumulate_grad_batches`.
        weights: `n_r` per rank, summed over the window; the number of micro-batches under a rule without weights.
        multipliers: `w_r` per rank.
        normalizer: `Z`.
    """

    name: str
    loss: float
    weights: tuple[float, ...]
    multipliers: tuple[float, ...]
    normalizer: float


@dataclass(frozen=True)
class StepReport:
    """The numbers of one optimizer step, equal on all ranks and in a rerun.

    Attributes:
        step: `trainer.global_step` before the step.
        rule: Name of the reduction rule.
        formula: The rule in one line of text.
        terms: The loss terms, by name.
        world_size: Number of ranks that reduce together.
        micro_batches: Length of the window on each rank.
        samples: Samples in the window of each rank; None if unknown.
        gradient_norm: Norm of the reduced gradient `g`, before clipping.
        local_gradient_norms: Norm of each rank's own gradient `g_r`: the weighted mean over its window, or the sum
            under rules for sum losses. With several terms: of the rank's summand of `g`, times the number of ranks.
        learning_rates: The rates of the step, for every parameter group of every optimizer.
        lr_scale: The factor of `lr_scaling` after the warm-up.
    """

    step: int
    rule: str
    formula: str
    terms: tuple[TermReport, ...]
    world_size: int
    micro_batches: tuple[int, ...]
    samples: tuple[float | None, ...]
    gradient_norm: float
    local_gradient_norms: tuple[float, ...]
    learning_rates: tuple[float, ...]
    lr_scale: float

    @classmethod
    def of(cls, window: Window, ranks: Sequence[RankMeasurement], **facts: Any) -> StepReport:
        """Return the report of all ranks' measurements; `facts` are the remaining attributes."""
        micro_batches, samples, norms, of_ranks = zip(*ranks, strict=True)
        terms = zip(window.terms, zip(*of_ranks, strict=True), strict=True)
        return cls(
            rule=window.rule.name,
            formula=window.rule.formula,
            terms=tuple(_term(name, rows) for name, rows in terms),
            world_size=len(ranks),
            micro_batches=micro_batches,
            samples=samples,
            local_gradient_norms=norms,
            **facts,
        )

    @property
    def loss(self) -> float:
        """The loss under the rule, over all ranks and micro-batches; the sum of its terms."""
        return sum(term.loss for term in self.terms)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the ranks. A ValueError if the loss has several terms."""
        (term,) = self.terms
        return term.weights

    @property
    def normalizer(self) -> float:
        """The normalizer `Z`. A ValueError if the loss has several terms."""
        (term,) = self.terms
        return term.normalizer

    @property
    def global_batch_size(self) -> float | None:
        """The samples of the step, over ranks and windows; None where a batch does not tell."""
        return known_sum(self.samples)

    def __str__(self) -> str:
        rows: dict[str, Sequence[float | None]] = {}
        for term in self.terms:
            of = f" of {term.name}" if term.name else ""
            rows |= {f"loss{of}": (term.loss,), f"weights{of}": term.weights}
            rows |= {f"multipliers{of}": term.multipliers, f"Z{of}": (term.normalizer,)}
        rows |= {
            "global batch": (self.global_batch_size,),
            "micro-batches": self.micro_batches,
            "gradient norm": (self.gradient_norm,),
            "local gradient norms": self.local_gradient_norms,
            "learning rates": self.learning_rates,
        }
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        lines = [f"step {self.step}: reduction={self.rule!r}, g = {self.formula}, {ranks}"]
        width = max(map(len, rows))
        return "\n".join(lines + [f"  {name:<{width}}  {', '.join(map(_text, row))}" for name, row in rows.items()])


def _text(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.10g}" if float(value).is_integer() else f"{value:.6g}"


class RankMeasurement(NamedTuple):
    """What one rank tells the others of an observed step, in float64."""

    micro_batches: int  # length of its window
    samples: float | None  # of its window, if known
    norm: float  # `|g_r|`
    terms: tuple[tuple[float, ...], ...]  # for each loss term the sum of multiplier * loss, `n_r`, `w_r` and `z_r`


def measure_rank(
    window: Window, losses: Sequence[Sequence[Tensor]], samples: float | None, norm: float
) -> RankMeasurement:
    """Return one rank's measurement, from the terms of its micro-batches and the norm of its accumulated gradient.

    That gradient is `G = S / D` with `S = sum(w_m * g_m)` over the window and `D` what the window divided by. The
    rank's own gradient is `g_r = S / w_r`, where `w_r` is the sum of the multipliers for mean losses and their mean for
    sum losses. With several terms `G` already is the rank's summand of `g` times the number of ranks.
    """
    terms = []
    for index, name in enumerate(window.terms):
        shares = [Share(*map(float, share)) for share in window.shares(name)]
        multipliers = [share.multiplier for share in shares]
        loss = sum(w * float(of_terms[index]) for w, of_terms in zip(multipliers, losses, strict=True) if w > 0)
        loss *= window.length if window.loss_divisor is None else 1
        weight = sum(float(micro_batch.weights.get(name, 0.0)) for micro_batch in window.micro_batches)
        multiplier = sum(multipliers) / (len(multipliers) if window.rule.name in SUMMED_LOSSES else 1)
        terms.append((loss, weight, multiplier, sum(share.normalizer for share in shares)))
    if window.terms == (WHOLE_LOSS,):
        own = terms[0][2]
        # Selected, not multiplied: the gradient of a rank that contributes nothing may be NaN.
        norm = norm * float(window.divided_by) / own if own > 0 else 0.0
    return RankMeasurement(window.length, samples, norm, tuple(terms))


def known_sum(values: Sequence[float | None]) -> float | None:
    """Return the sum; None where a value is not known."""
    return None if None in values else sum(value for value in values if value is not None)


def _term(name: str, ranks: Sequence[Sequence[float]]) -> TermReport:
    """Return a loss term from the measurements of all ranks; one that nobody has any weight of is 0."""
    losses, weights, multipliers, normalizers = zip(*ranks, strict=True)
    normalizer = sum(normalizers)
    return TermReport(name, sum(losses) / normalizer if normalizer > 0 else 0.0, weights, multipliers, normalizer)
