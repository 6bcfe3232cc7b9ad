"""What was observed of one optimizer step: the numbers of the reduction formula, and the norms on both of its sides.

    g = ( sum over r of  w_r * g_r ) / Z

The formula holds among the reported numbers, where each rank `r` stands for its whole accumulation window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lightning_gradavg.reduction.weights import WHOLE_LOSS
from lightning_gradavg.reduction.window import Window
from lightning_gradavg.rules import Share

__all__ = ["SUMMED_LOSSES", "ObservedMicroBatch", "RankMeasurement", "StepReport", "TermReport", "measure_rank"]

SUMMED_LOSSES = ("sum", "normalized_sum", "mean_of_node_sums")
"""The rules that are meant for losses that are sums over the samples; every other is for means."""

_VALUES_SHOWN = 16


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
        return self._only_term.weights

    @property
    def normalizer(self) -> float:
        """The normalizer `Z`. A ValueError if the loss has several terms."""
        return self._only_term.normalizer

    @property
    def global_batch_size(self) -> float | None:
        """The samples of the step, over ranks and windows; None where a batch does not tell."""
        return _known_sum(self.samples)

    @property
    def _only_term(self) -> TermReport:
        if len(self.terms) != 1:
            names = ", ".join(repr(term.name) for term in self.terms)
            raise ValueError(
                f"the loss has {len(self.terms)} terms with weights of their own, {names}: read `terms` of the report."
            )
        return self.terms[0]

    def __str__(self) -> str:
        size = self.global_batch_size
        rows: list[tuple[str, Any]] = []
        for term in self.terms:
            values = {"loss": term.loss, "weights": term.weights, "multipliers": term.multipliers, "Z": term.normalizer}
            rows += [(f"{name} of {term.name}" if term.name else name, value) for name, value in values.items()]
        rows += [
            ("global batch", "unknown" if size is None else f"{_number(size)} samples"),
            ("micro-batches", self.micro_batches),
            ("gradient norm", self.gradient_norm),
            ("local gradient norms", self.local_gradient_norms),
            ("learning rates", self.learning_rates),
        ]
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        lines = [f"step {self.step}: reduction={self.rule!r}, g = {self.formula}, {ranks}"]
        width = max(len(name) for name, _ in rows)
        return "\n".join(lines + [f"  {name:<{width}}  {_text(value)}" for name, value in rows])


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    values = tuple(value) if isinstance(value, Iterable) else (value,)
    if len(values) <= _VALUES_SHOWN:
        return ", ".join(map(_number, values))
    return f"{_number(min(values))} to {_number(max(values))}, {len(values)} values"


def _number(value: float) -> str:
    return f"{value:.10g}" if float(value).is_integer() else f"{value:.6g}"


@dataclass(frozen=True)
class ObservedMicroBatch:
    """The undivided loss terms of one micro-batch, by name, and its samples if known."""

    losses: Mapping[str, Tensor]
    samples: float | None


class RankMeasurement(NamedTuple):
    """What one rank tells the others of an observed step, in float64.

    Attributes:
        micro_batches: Length of its window.
        samples: Samples of its window, if known.
        norm: `|g_r|`.
        terms: For each loss term the sum of multiplier times loss, `n_r`, `w_r` and `z_r`.
    """

    micro_batches: int
    samples: float | None
    norm: float
    terms: tuple[tuple[float, ...], ...]


def measure_rank(window: Window, micro_batches: Sequence[ObservedMicroBatch], norm: float) -> RankMeasurement:
    """Return one rank's measurement, from the norm of its accumulated gradient.

    That gradient is `G = S / D` with `S = sum(w_m * g_m)` over the window and `D` what the window divided by. The
    rank's own gradient is `g_r = S / w_r`, where `w_r` is the sum of the multipliers for mean losses and their mean for
    sum losses. With several terms `G` already is the rank's summand of `g` times the number of ranks.
    """
    terms = []
    for name in window.terms:
        shares = [Share(*map(float, share)) for share in window.shares(name)]
        multipliers = [share.multiplier for share in shares]
        loss = sum(w * float(seen.losses[name]) for w, seen in zip(multipliers, micro_batches, strict=True) if w > 0)
        loss *= window.length if window.loss_divisor is None else 1
        weight = sum(float(micro_batch.weights.get(name, 0.0)) for micro_batch in window.micro_batches)
        multiplier = sum(multipliers) / (len(multipliers) if window.rule.name in SUMMED_LOSSES else 1)
        terms.append((loss, weight, multiplier, sum(share.normalizer for share in shares)))
    if window.terms == (WHOLE_LOSS,):
        own = terms[0][2]
        # Selected, not multiplied: the gradient of a rank that contributes nothing may be NaN.
        norm = norm * float(window.divided_by) / own if own > 0 else 0.0
    samples = [seen.samples for seen in micro_batches]
    return RankMeasurement(window.length, _known_sum(samples), norm, tuple(terms))


def _known_sum(values: Sequence[float | None]) -> float | None:
    return None if None in values else sum(value for value in values if value is not None)


def _term(name: str, ranks: Sequence[Sequence[float]]) -> TermReport:
    """Return a loss term from the measurements of all ranks; one that nobody has any weight of is 0."""
    losses, weights, multipliers, normalizers = zip(*ranks, strict=True)
    normalizer = sum(normalizers)
    return TermReport(name, sum(losses) / normalizer if normalizer > 0 else 0.0, weights, multipliers, normalizer)
