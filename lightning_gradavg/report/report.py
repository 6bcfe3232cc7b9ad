"""What was observed of one optimizer step: the numbers of the reduction formula, and the norms on both of its sides.

    g = ( sum over r of  w_r * g_r ) / Z

The multipliers `w_r`, the local gradients `g_r` and the normalizer `Z` are reported so that this formula holds among
them, over the ranks and with the whole accumulation window of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_gradavg.report.noise import GradientSpread
from lightning_gradavg.timers import Communication

__all__ = ["StepReport", "TermReport"]

_VALUES_SHOWN = 16


@dataclass(frozen=True)
class TermReport:
    """One loss term of a step.

    Attributes:
        name: Its name; empty for a loss that is one tensor.
        loss: Its value under the rule, over all ranks and micro-batches, not divided for the accumulation.
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
    """What was observed of one optimizer step, the same on all ranks. As text it has no times: a rerun prints it again.

    Attributes:
        step: `trainer.global_step` before the step.
        rule: Name of the reduction rule.
        formula: The rule in one line of text.
        terms: The loss terms, by name.
        world_size: Number of ranks that reduce together.
        micro_batches: Length of the window on each rank.
        samples: Samples in the window of each rank; None where a batch does not tell.
        gradient_norm: Norm of the reduced gradient `g`, before clipping.
        local_gradient_norms: Norm of each rank's own gradient `g_r`: of the mean over its window, each micro-batch with
            its multiplier, or of the sum under the rules that are meant for sum losses. Where the loss has several
            terms there is no such gradient: it is that of the rank's summand of `g`, times the number of ranks.
        cosines: Of the angle between each rank's own gradient and the reduced one; None where they were not asked for,
            NaN where a norm is 0.
        learning_rates: In force at the step, of every parameter group of every optimizer.
        lr_scale: What `lr_scaling` multiplies the learning rate by after the warm-up.
        communication: Of each rank's last backward, by DDP's timers; None where DDP kept no times.
        spread: What the noise scale is estimated from; None where the batch sizes or the local gradients are not known.
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
    cosines: tuple[float, ...] | None
    learning_rates: tuple[float, ...]
    lr_scale: float
    communication: tuple[Communication, ...] | None
    spread: GradientSpread | None

    @property
    def loss(self) -> float:
        """The loss under the rule, over all ranks and micro-batches; the sum of its terms."""
        return sum(term.loss for term in self.terms)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the ranks.

        Raises:
            ValueError: If the loss has several terms.
        """
        return self._only_term.weights

    @property
    def normalizer(self) -> float:
        """The normalizer `Z`.

        Raises:
            ValueError: If the loss has several terms.
        """
        return self._only_term.normalizer

    @property
    def global_batch_size(self) -> float | None:
        """The samples of the step, over ranks and windows; None where a batch does not tell."""
        return None if None in self.samples else sum(filter(None, self.samples))

    @property
    def _only_term(self) -> TermReport:
        if len(self.terms) != 1:
            names = ", ".join(repr(term.name) for term in self.terms)
            raise ValueError(
                f"the loss has {len(self.terms)} terms with weights of their own, {names}: read `terms` of the report."
            )
        return self.terms[0]

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        lines = [f"step {self.step}: reduction={self.rule!r}, g = {self.formula}, {ranks}"]
        rows: list[tuple[str, str]] = []
        for term in self.terms:
            of_term = f" of {term.name}" if term.name else ""
            rows += [
                (f"loss{of_term}", _number(term.loss)),
                (f"weights{of_term}", _numbers(term.weights)),
                (f"multipliers{of_term}", _numbers(term.multipliers)),
                (f"Z{of_term}", _number(term.normalizer)),
            ]
        size = self.global_batch_size
        rows += [
            ("global batch", "unknown" if size is None else f"{_number(size)} samples"),
            ("micro-batches", _numbers(self.micro_batches)),
            ("gradient norm", _number(self.gradient_norm)),
            ("local gradient norms", _numbers(self.local_gradient_norms)),
        ]
        if self.cosines is not None:
            rows.append(("cosines to the gradient", _numbers(self.cosines)))
        rows.append(("learning rates", _numbers(self.learning_rates)))
        width = max(len(name) for name, _ in rows)
        lines += [f"  {name:<{width}}  {text}" for name, text in rows]
        return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.10g}" if float(value).is_integer() else f"{value:.6g}"


def _numbers(values: Iterable[float]) -> str:
    values = tuple(values)
    if len(values) <= _VALUES_SHOWN:
        return ", ".join(map(_number, values))
    return f"{_number(min(values))} to {_number(max(values))}, {len(values)} values"
