"""The report of one optimizer step: what its window knows of the reduction formula.

g = ( sum over r of  w_r * g_r ) / Z
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepReport"]


@dataclass(frozen=True)
class StepReport:
    """The numbers of one optimizer step. But for the weight, they are equal on all ranks.

    Attributes:
        step: `trainer.global_step` before the step.
        rule: Name of the reduction rule.
        formula: The rule in one line of text.
        weight: This rank's weight, summed over the window; the number of micro-batches under a rule without weights.
        normalizer: `Z`.
        gradient_norm: Norm of the reduced gradient `g`, before clipping.
        lr_factors: What `lr_scaling` multiplies the learning rates of each optimizer by in the step.
    """

    step: int
    rule: str
    formula: str
    weight: float
    normalizer: float
    gradient_norm: float
    lr_factors: tuple[float, ...]

    def __str__(self) -> str:
        factors = ", ".join(_text(factor) for factor in self.lr_factors)
        return "\n".join(
            [
                f"step {self.step}: reduction={self.rule!r}, gradient = {self.formula}",
                f"  weight of this rank   {_text(self.weight)}",
                f"  Z                     {_text(self.normalizer)}",
                f"  gradient norm         {_text(self.gradient_norm)}",
                f"  learning rate factor  {factors}",
            ]
        )


def _text(value: float) -> str:
    if value.is_integer():  # counts of samples and tokens, with all their digits
        return f"{value:.10g}"
    return f"{value:.6g}"
