"""The gradient noise scale: what squared gradient norms say about batch sizes and learning rates.

`B_noise = tr(Sigma) / |G|^2`, with `Sigma` the covariance of the gradients of single samples and `G` their mean
(McCandlish, Kaplan, Amodei and the OpenAI Dota Team 2018, arXiv 1812.06162, where it is called the simple noise scale).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_gradavg.rates.scaling import as_positive

__all__ = ["GradientSpread", "NoiseEstimate", "estimate_noise", "linear_scaling_limit", "optimal_lr_ratio"]

_ROUNDING = 1e-6


@dataclass(frozen=True)
class GradientSpread:
    """Squared norms of the ranks' mean gradients beside that of their combination, all of one optimizer step.

    Attributes:
        squared_local_norms: `|l_r|^2`, with `l_r` the mean gradient over the samples of rank `r`.
        batch_sizes: `b_r`, the samples (or tokens) that `l_r` is the mean over. A rank with 0 is left out.
        squared_global_norm: `|g|^2` with `g = sum over r of p_r * l_r`.
        fractions: `p_r`, with a sum of 1; by default `b_r / sum(b)`, which makes `g` the mean over all samples.

    Raises:
        ValueError: If the lengths differ, a batch size is negative, or the fractions do not add up to 1.
    """

    squared_local_norms: tuple[float, ...]
    batch_sizes: tuple[float, ...]
    squared_global_norm: float
    fractions: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        ranks = len(self.squared_local_norms)
        for name, values in (("batch_sizes", self.batch_sizes), ("fractions", self.fractions)):
            if values is not None and len(values) != ranks:
                raise ValueError(f"{name} has {len(values)} values for {ranks} squared_local_norms; give one per rank.")
        if any(not size >= 0 for size in self.batch_sizes):
            raise ValueError(f"batch_sizes must be >= 0, got {list(self.batch_sizes)}.")
        if self.fractions is not None and not abs(sum(self.fractions) - 1) < _ROUNDING:
            raise ValueError(
                f"fractions must add up to 1, got {list(self.fractions)} with the sum {sum(self.fractions)!r}."
            )


class NoiseEstimate(NamedTuple):
    """Unbiased estimates of one step; both may be negative on a single step.

    Attributes:
        trace: Of `tr(Sigma)`.
        squared_gradient: Of `|G|^2`.
    """

    trace: float
    squared_gradient: float


def estimate_noise(spread: GradientSpread) -> NoiseEstimate | None:
    """Return what one step says about `tr(Sigma)` and `|G|^2`, or None where it says nothing.

    With `l_r` a mean over `b_r` independent samples, `E|l_r|^2 = |G|^2 + tr(Sigma)/b_r`. So, with
    `A = sum of p_r |l_r|^2` and `N = |sum of p_r l_r|^2`,

        E A = |G|^2 + tr(Sigma) * sum of p_r/b_r ,        E N = |G|^2 + tr(Sigma) * sum of p_r^2/b_r ,

    which is solved for the two unknowns. This is a derivation of this project. With `p_r = b_r/B` over W' ranks it is
    `tr = (A - N) B/(W' - 1)` and `|G|^2 = (W' N - A)/(W' - 1)`, and with equal shards the estimator of appendix A.1 of
    arXiv 1812.06162, with the local gradient for the small batch and the reduced one for the big batch.

    Returns:
        The estimates; None with fewer than two ranks that have samples, or where a norm is not finite.
    """
    total = sum(spread.batch_sizes)
    fractions = spread.fractions
    if fractions is None:
        fractions = tuple(size / total for size in spread.batch_sizes) if total > 0 else ()
    ranks = [
        (fraction, size, norm)
        for fraction, size, norm in zip(fractions, spread.batch_sizes, spread.squared_local_norms, strict=False)
        if fraction > 0
    ]
    # A gradient of no samples is no mean of samples.
    if any(size == 0 for _, size, _ in ranks) or len(ranks) < 2:  # noqa: PLR2004  # one mean has no spread
        return None
    mean_of_squares = sum(fraction * norm for fraction, _, norm in ranks)
    small = sum(fraction / size for fraction, size, _ in ranks)
    big = sum(fraction**2 / size for fraction, size, _ in ranks)
    trace = (mean_of_squares - spread.squared_global_norm) / (small - big)
    squared_gradient = spread.squared_global_norm - trace * big
    finite = abs(trace) < float("inf") and abs(squared_gradient) < float("inf")
    return NoiseEstimate(trace, squared_gradient) if finite else None


def optimal_lr_ratio(noise_scale: float, batch_size: float, base_batch_size: float) -> float:
    """Return the optimal learning rate of SGD at a batch size over the one at the base batch size.

    `eta(B) = eta_max / (1 + B_noise / B)` (arXiv 1812.06162, section 2.2), so the ratio is
    `(1 + B_noise/B0) / (1 + B_noise/B)`: nearly `B/B0` while both are far below the noise scale, nearly 1 far above. It
    is the gain of AdaScale SGD (Johnson et al. 2020, arXiv 2007.05105) at a scale of `B/B0`.

    Args:
        noise_scale: `B_noise`, in the unit of the batch sizes.
        batch_size: `B`.
        base_batch_size: `B0`, the batch size that the learning rate was tuned for.

    Raises:
        ValueError: If one of them is not finite and > 0.
    """
    noise = as_positive("noise_scale", noise_scale)
    batch, base = as_positive("batch_size", batch_size), as_positive("base_batch_size", base_batch_size)
    return (1 + noise / base) / (1 + noise / batch)


def linear_scaling_limit(noise_scale: float) -> float:
    """Return the largest global batch that linear scaling of the learning rate is called safe to: `B_noise` itself.

    Linear scaling from `B0` to `B` overshoots `optimal_lr_ratio` by the factor `(B + B_noise) / (B0 + B_noise)`, which
    stays below 2 up to `B = B_noise` whatever the base batch, and grows without bound beyond. It is also where a larger
    batch stops to pay: training at `B_noise` takes twice the fewest possible steps and twice the fewest possible
    samples (arXiv 1812.06162, section 2.3).

    Raises:
        ValueError: If `noise_scale` is not finite and > 0.
    """
    return as_positive("noise_scale", noise_scale)
