"""The report of one optimizer step: the numbers of the reduction formula, and the norms on both of its sides.

    g = ( sum over r of  w_r * g_r ) / Z

The formula holds among the reported numbers, where each rank `r` stands for its whole accumulation window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_gradavg.reduction.window import WindowRecord
from lightning_gradavg.rules import Rule

__all__ = ["SUMMED_LOSSES", "RankMeasurement", "StepReport", "known_sum", "measure_rank"]

SUMMED_LOSSES = ("sum", "normalized_sum", "mean_of_node_sums")
"""The rules that are meant for losses that are sums over the samples; every other is for means.

Only the local norms of a report depend on it.
"""


@dataclass(frozen=True)
class StepReport:
    """The numbers of one optimizer step, equal on all ranks and in a rerun.

    Attributes:
        step: `trainer.global_step` before the step.
        rule: Name of the reduction rule.
        formula: The rule in one line of text.
        loss: The loss under the rule, over all ranks and micro-batches, not divided by `accumulate_grad_batches`.
        weights: `n_r` of each rank, summed over the window; the number of micro-batches under a rule without weights.
        multipliers: `w_r` of each rank.
        normalizer: `Z`.
        world_size: Number of ranks that reduce together.
        micro_batches: Length of the window on each rank.
        samples: Samples in the window of each rank; None if unknown.
        gradient_norm: Norm of the reduced gradient `g`, before clipping.
        local_gradient_norms: Norm of each rank's own gradient `g_r`: the weighted mean over its window, or the sum
            under rules for sum losses.
        lr_factors: What `lr_scaling` multiplies the learning rates of each optimizer by in the step.
    """

    step: int
    rule: str
    formula: str
    loss: float
    weights: tuple[float, ...]
    multipliers: tuple[float, ...]
    normalizer: float
    world_size: int
    micro_batches: tuple[int, ...]
    samples: tuple[float | None, ...]
    gradient_norm: float
    local_gradient_norms: tuple[float, ...]
    lr_factors: tuple[float, ...]

    @classmethod
    def of(
        cls,
        rule: Rule,
        ranks: Sequence[RankMeasurement],
        *,
        step: int,
        gradient_norm: float,
        lr_factors: tuple[float, ...],
    ) -> StepReport:
        """Return the report of all ranks' measurements, in rank order. The keywords are attributes of the report."""
        normalizer = sum(rank.normalizer for rank in ranks)
        loss = 0.0
        if normalizer > 0:
            loss = sum(rank.weighed_loss for rank in ranks) / normalizer
        return cls(
            step=step,
            rule=rule.name,
            formula=rule.formula,
            loss=loss,
            weights=tuple(rank.weight for rank in ranks),
            multipliers=tuple(rank.multiplier for rank in ranks),
            normalizer=normalizer,
            world_size=len(ranks),
            micro_batches=tuple(rank.micro_batches for rank in ranks),
            samples=tuple(rank.samples for rank in ranks),
            gradient_norm=gradient_norm,
            local_gradient_norms=tuple(rank.norm for rank in ranks),
            lr_factors=lr_factors,
        )

    @property
    def global_batch_size(self) -> float | None:
        """The samples of the step, over ranks and windows; None where a batch does not tell."""
        return known_sum(self.samples)

    def __str__(self) -> str:
        rows: dict[str, Sequence[float | None]] = {
            "loss": (self.loss,),
            "weights": self.weights,
            "multipliers": self.multipliers,
            "Z": (self.normalizer,),
            "global batch": (self.global_batch_size,),
            "micro-batches": self.micro_batches,
            "gradient norm": (self.gradient_norm,),
            "local gradient norms": self.local_gradient_norms,
            "learning rate factors": self.lr_factors,
        }
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        lines = [f"step {self.step}: reduction={self.rule!r}, gradient = {self.formula}, {ranks}"]
        width = max(len(name) for name in rows)
        for name, values in rows.items():
            text = ", ".join(_text(value) for value in values)
            lines.append(f"  {name:<{width}}  {text}")
        return "\n".join(lines)


def _text(value: float | None) -> str:
    if value is None:
        return "unknown"
    if float(value).is_integer():  # counts of samples and tokens, with all their digits
        return f"{value:.10g}"
    return f"{value:.6g}"


class RankMeasurement(NamedTuple):
    """The numbers that one rank sends to the others about an observed step."""

    micro_batches: int  # length of its window
    samples: float | None  # of its window, if known
    norm: float  # `|g_r|`, of its own gradient
    weighed_loss: float  # sum of multiplier * loss
    weight: float  # `n_r`
    multiplier: float  # `w_r`
    normalizer: float  # `z_r`


def measure_rank(record: WindowRecord, rule: Rule, norm: float) -> RankMeasurement:
    """Return one rank's measurement of a window.

    The gradient that the rank has accumulated before the reduction is `G = S / D`, with `S = sum(w_m * g_m)` over its
    micro-batches. Its own gradient is `g_r = S / w_r`. For mean losses, `w_r` is the sum of the multipliers, so `g_r`
    is their weighted mean. For sum losses, `w_r` is the mean of the multipliers, so `g_r` is the sum over the window.

    Args:
        record: The micro-batches of the window, their shares, and `D`.
        rule: The reduction rule.
        norm: `|G|`.
    """
    multipliers = [float(share.multiplier) for share in record.shares]
    weighed_loss = 0.0
    for multiplier, micro_batch in zip(multipliers, record.micro_batches, strict=True):
        # A loss with multiplier 0, such as a mean over no tokens, may be NaN.
        if multiplier > 0:
            assert micro_batch.loss is not None  # the window keeps losses where the step is observed
            weighed_loss += multiplier * float(micro_batch.loss)
    multiplier = sum(multipliers)
    if rule.name in SUMMED_LOSSES:
        multiplier /= len(multipliers)
    own_norm = 0.0
    if multiplier > 0:
        own_norm = norm * record.local_divisor / multiplier
    return RankMeasurement(
        micro_batches=len(record.micro_batches),
        samples=known_sum([micro_batch.samples for micro_batch in record.micro_batches]),
        norm=own_norm,
        weighed_loss=weighed_loss,
        weight=sum(micro_batch.weight for micro_batch in record.micro_batches),
        multiplier=multiplier,
        normalizer=float(sum(share.normalizer for share in record.shares)),
    )


def known_sum(values: Sequence[float | None]) -> float | None:
    """Return the sum, or None if a value is not known."""
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total
