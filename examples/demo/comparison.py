"""How far a run is from the run on one process, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TOLERANCE", "Comparison", "TaskResult", "compare", "losses_difference", "weights_difference"]

TOLERANCE = 1e-5
"""The largest relative difference that a run with GradAvg may have in float32."""


@dataclass(frozen=True)
class TaskResult:
    """What one configuration left of one task.

    Attributes:
        losses: Mean loss of each global batch, float64, one per optimizer step.
        weights: The trained parameters by name.
        metric: The test metric.
        seconds: Wall time of training on rank 0, without the start of processes.
    """

    losses: Tensor
    weights: Mapping[str, Tensor]
    metric: float
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """The largest relative differences of a run to the reference run.

    Attributes:
        weights: Over the parameters, see `weights_difference`.
        losses: Over the steps, see `losses_difference`.
    """

    weights: float
    losses: float

    @property
    def within_tolerance(self) -> bool:
        """Whether both are at most `TOLERANCE`; a NaN is not."""
        return self.weights <= TOLERANCE and self.losses <= TOLERANCE


def weights_difference(reference: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> float:
    """Return the maximum over the parameters of ||w - w_ref|| / ||w_ref||, in float64; NaN if any weight is.

    Raises:
        ValueError: If the two are not the weights of one model.
    """
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    expected = {name: tuple(value.shape) for name, value in reference.items()}
    if shapes != expected:
        raise ValueError(f"the runs trained different models: parameters {shapes}, but {expected} in the reference run")
    ratios = [_ratio((weights[name].double() - w.double()).norm(), w.double().norm()) for name, w in reference.items()]
    return float(torch.stack(ratios).max())


def losses_difference(reference: Tensor, losses: Tensor) -> Tensor:
    """Return |l - l_ref| / |l_ref| of each step, in float64.

    Raises:
        ValueError: If the two have different numbers of steps.
    """
    if losses.shape != reference.shape:
        raise ValueError(
            f"the runs took different numbers of steps: {len(losses)}, but {len(reference)} in the reference run"
        )
    return _ratio((losses.double() - reference.double()).abs(), reference.double().abs())


def compare(reference: TaskResult, result: TaskResult) -> Comparison:
    """Return how far `result` is from `reference`."""
    return Comparison(
        weights=weights_difference(reference.weights, result.weights),
        losses=float(losses_difference(reference.losses, result.losses).max()),
    )


def _ratio(difference: Tensor, reference: Tensor) -> Tensor:
    # 0 / 0 is no difference; anything else over 0 stays infinite.
    return torch.where((difference == 0) & (reference == 0), 0.0, difference / reference)
