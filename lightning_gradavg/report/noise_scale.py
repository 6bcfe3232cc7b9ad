"""The gradient noise scale as a torchmetrics metric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_gradavg.report.noise import GradientSpread, estimate_noise

__all__ = ["GradientNoiseScale"]


class GradientNoiseScale(Metric):
    """The gradient noise scale `B_noise = tr(Sigma) / |G|^2`, in samples or whatever else the batch sizes count.

    Batches far below it give gradients that are mostly noise, batches far above it gain little from being larger
    (McCandlish et al. 2018, arXiv 1812.06162). It is estimated from squared norms that data-parallel training has at
    hand, with shards of any sizes: see `lightning_gradavg.report.noise.estimate_noise`. Numerator and denominator are
    averaged over the updates separately, since the mean of their ratios is biased.

    A step that says nothing (fewer than two ranks with samples, or a norm that is not finite) is left out, and counted
    in `skipped`. `compute()` is NaN where nothing was measured, and where one of the two averages is not above 0: then
    the noise of the estimate is larger than what it is to measure, and more steps are needed.

    Args:
        decay: None for the plain mean over all updates; a number in [0, 1) for an exponential moving average that keeps
            that part of the past at each update, as the noise scale grows during training. Both averages have the same
            correction for their start, which the ratio does not see.
        **options: Those of `torchmetrics.Metric`.

    Attributes:
        skipped: Number of updates that said nothing.

    Raises:
        ValueError: If `decay` is not in [0, 1).
    """

    # With `forward`, a moving average must see its updates one after another, not merged from two states.
    full_state_update = True
    is_differentiable = False
    higher_is_better = None
    plot_lower_bound = 0.0

    trace: Tensor
    squared_gradient: Tensor
    skipped: Tensor

    def __init__(self, decay: float | None = None, **options: Any) -> None:
        super().__init__(**options)
        if decay is not None and not 0 <= decay < 1:
            raise ValueError(f"decay must be None or in [0, 1), got {decay!r}.")
        self.decay = decay
        # Ranks that saw other steps are added up: numerators and denominators stay in proportion.
        for name in ("trace", "squared_gradient"):
            zero = torch.zeros((), dtype=torch.float64)
            self.add_state(name, zero, dist_reduce_fx="sum", persistent=True)
        self.add_state("skipped", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum", persistent=True)

    def update(
        self,
        squared_local_norms: Sequence[float] | Tensor,
        batch_sizes: Sequence[float] | Tensor,
        squared_global_norm: float | Tensor,
        fractions: Sequence[float] | Tensor | None = None,
    ) -> None:
        """Add one optimizer step.

        Args:
            squared_local_norms: Shape `(ranks,)`: `|l_r|^2` of each rank's mean gradient over its samples, before the
                reduction, without loss scale.
            batch_sizes: Shape `(ranks,)`: the samples of each rank, over its whole window; 0 for a rank without.
            squared_global_norm: `|g|^2` of the combined mean gradient, in the same unit.
            fractions: Shape `(ranks,)`: how much of each local gradient is in the combined one, with a sum of 1; None
                for the mean over all samples.

        Raises:
            ValueError: If the lengths differ, a batch size is negative, or the fractions do not add up to 1.
        """
        estimate = estimate_noise(
            GradientSpread(
                _floats(squared_local_norms),
                _floats(batch_sizes),
                float(squared_global_norm),
                None if fractions is None else _floats(fractions),
            )
        )
        if estimate is None:
            self.skipped += 1
            return
        kept, new = (1.0, 1.0) if self.decay is None else (self.decay, 1 - self.decay)
        self.trace = kept * self.trace + new * estimate.trace
        self.squared_gradient = kept * self.squared_gradient + new * estimate.squared_gradient

    def compute(self) -> Tensor:
        """Return the noise scale, a 0-dim float64 tensor; NaN where it cannot be told."""
        known = (self.trace > 0) & (self.squared_gradient > 0)
        return torch.where(known, self.trace / self.squared_gradient, torch.nan)

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add the steps of another noise scale to this one's.

        Args:
            incoming_state: The other metric, or its states by name.

        Raises:
            ValueError: If this is a moving average, whose steps come one after another.
        """
        if self.decay is not None:
            raise ValueError(f"a moving average (decay={self.decay!r}) has no other one to merge: leave decay out.")
        for name in self.metric_state:
            state = incoming_state[name] if isinstance(incoming_state, dict) else getattr(incoming_state, name)
            setattr(self, name, getattr(self, name) + state)
        self._computed = None
        self._update_count += 1

    def plot(self, val: Tensor | Sequence[Tensor] | None = None, ax: Any = None) -> Any:
        """Plot one value or several on a matplotlib axis, as every metric of torchmetrics does.

        Args:
            val: What `compute` or `forward` returned, or a list of such values; by default what `compute` returns now.
            ax: The axis; by default a new one.

        Returns:
            The figure and the axis.
        """
        return self._plot(val, ax)


def _floats(values: Sequence[float] | Tensor) -> tuple[float, ...]:
    return tuple(values.tolist() if isinstance(values, Tensor) else map(float, values))
