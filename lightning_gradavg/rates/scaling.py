"""Learning rate and batch size: what a change of the global batch asks of the optimizer.

The *scale* `k = B / B0` is the ratio of the global batch `B` to the base batch `B0` that the learning rate was tuned
for. It follows the global batch alone: four ranks that split one batch of 16 train at scale 1, and one rank that
accumulates four batches of 16 trains at scale 4. A *scaling* is a choice of the factor `f(k)` of the learning rate.

Sources: linear and gradual warm-up, Goyal et al. 2017 (arXiv 1706.02677); square root, Krizhevsky 2014 (arXiv
1404.5997); Adam and RMSprop, Malladi et al. 2022 (arXiv 2205.10287). All suppose a gradient that is a mean over
the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, TypeAlias

__all__ = [
    "SCALINGS",
    "ScaleFunction",
    "Scaling",
    "as_positive",
    "decoupled_weight_decay",
    "resolve_scaling",
    "scale_factor",
    "scale_limit",
    "scaled_hyperparameters",
    "scaled_steps",
    "warmup_factor",
]

ScaleFunction: TypeAlias = Callable[[float], float]
"""`scale -> factor` of the learning rate. Pure, the same on all ranks; the factor is finite and > 0."""


@dataclass(frozen=True)
class Scaling:
    """How the learning rate follows the scale.

    Attributes:
        name: What messages call it: the `lr_scaling=` name, or the qualified name of a user's function.
        factor: The pure function `scale -> factor`.
        rescales_moments: Whether the optimizer's smoothing (`betas`, `alpha`) and `eps` follow the scale too.
        formula: The scaling in one line of text, for messages.
    """

    name: str
    factor: ScaleFunction
    rescales_moments: bool
    formula: str


def _unscaled(scale: float) -> float:
    return 1.0


def _proportional(scale: float) -> float:
    return scale


SCALINGS: Mapping[str, Scaling] = MappingProxyType(
    {
        scaling.name: scaling
        for scaling in (
            Scaling("none", _unscaled, False, "lr"),
            Scaling("linear", _proportional, False, "k * lr"),
            Scaling("sqrt", math.sqrt, False, "sqrt(k) * lr"),
            Scaling("adam_sde", math.sqrt, True, "sqrt(k) * lr, 1 - k * (1 - beta), eps / sqrt(k)"),
        )
    }
)
"""The named scalings. k: scale."""


def resolve_scaling(lr_scaling: str | ScaleFunction | Scaling) -> Scaling:
    """Return the scaling that `lr_scaling` names or is.

    Args:
        lr_scaling: A key of `SCALINGS`, a function `scale -> factor`, or a `Scaling`.

    Raises:
        ValueError: If `lr_scaling` is a string that names no scaling.
        TypeError: If `lr_scaling` is neither a string, a scaling nor callable.
    """
    if isinstance(lr_scaling, Scaling):
        return lr_scaling
    accepted = f"{', '.join(map(repr, SCALINGS))}, or a function scale -> factor"
    if isinstance(lr_scaling, str):
        try:
            return SCALINGS[lr_scaling]
        except KeyError:
            raise ValueError(f"lr_scaling={lr_scaling!r} is not a scaling. Use one of {accepted}.") from None
    if callable(lr_scaling):
        name = getattr(lr_scaling, "__qualname__", type(lr_scaling).__qualname__)
        return Scaling(name, lr_scaling, False, f"{name}(k) * lr")
    raise TypeError(f"lr_scaling must be one of {accepted}; got {lr_scaling!r} of type {type(lr_scaling).__name__}.")


def as_positive(name: str, value: Any) -> float:
    """Return `value` as a float.

    Raises:
        ValueError: If it is not finite and > 0; the message calls it `name`.
        TypeError: If it is not a number.
    """
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}.")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}.") from None
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be finite and > 0, got {value!r}.")
    return number


def scale_factor(lr_scaling: str | ScaleFunction | Scaling, scale: float) -> float:
    """Return the factor of the learning rate at `scale`.

    Args:
        lr_scaling: A key of `SCALINGS`, a function `scale -> factor`, or a `Scaling`.
        scale: Global batch over base batch, finite and > 0; below 1 the factor lowers the learning rate.

    Raises:
        ValueError: If `scale`, or what a user's function returned for it, is not finite and > 0.
        TypeError: If either is not a number.
    """
    scaling = resolve_scaling(lr_scaling)
    scale = as_positive("scale", scale)
    return as_positive(f"the factor of lr_scaling {scaling.name!r} at scale {scale:g}", scaling.factor(scale))


def _as_written(number: float) -> Fraction:
    # The shortest decimal that reads back as `number`: 1 - 2 * (1 - 0.9) is then 0.8 and not 0.8 - 1e-16, and
    # 10 * (1 - 0.9) is 1, the limit itself, and not just below it.
    return Fraction(repr(float(number)))


def _smoothing(hyperparameters: Mapping[str, Any]) -> dict[str, float]:
    """Return the smoothing constants of an Adam or RMSprop parameter group by the names that messages use."""
    # `eps` must stand beside them: ASGD has an `alpha` and Lion has `betas` that mean something else.
    if "eps" in hyperparameters and "betas" in hyperparameters:
        named = {f"beta{index}": float(beta) for index, beta in enumerate(hyperparameters["betas"], start=1)}
    elif "eps" in hyperparameters and "alpha" in hyperparameters:
        named = {"alpha": float(hyperparameters["alpha"])}
    else:
        raise ValueError(
            "lr_scaling='adam_sde' is meant for Adam (betas, eps) and RMSprop (alpha, eps); this optimizer has"
            f" {', '.join(hyperparameters) or 'neither'}. Use 'linear' or 'sqrt' with it."
        )
    for name, value in named.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value!r}.")
    return named


def scale_limit(hyperparameters: Mapping[str, Any]) -> Fraction:
    """Return the scale that `lr_scaling="adam_sde"` must stay below: 1 / (1 - the smallest smoothing constant).

    Args:
        hyperparameters: An optimizer's parameter group, with `betas` or `alpha`, and `eps`.

    Returns:
        The exact limit, itself infeasible: 10 for `betas=(0.9, 0.999)`, 100 for RMSprop's `alpha=0.99`. Only a limit of
        1 is feasible, because nothing changes there.

    Raises:
        ValueError: If the parameter group is not one of Adam or RMSprop, or a smoothing constant is not in [0, 1).
    """
    return 1 / (1 - _as_written(min(_smoothing(hyperparameters).values())))


def _sde_smoothing(scale: float, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return `betas` or `alpha` at `scale`: 1 - beta' = k * (1 - beta), Malladi et al. 2022."""
    named = _smoothing(hyperparameters)
    exact_scale = _as_written(scale)
    limit = scale_limit(hyperparameters)
    if exact_scale >= limit and exact_scale != 1:
        name, smallest = min(named.items(), key=lambda item: item[1])
        largest = "1" if limit == 1 else f"just below {float(limit):g}"
        raise ValueError(
            f"lr_scaling='adam_sde' is not feasible at scale {scale:g} with {name}={smallest!r}:"
            f" 1 - {scale:g} * (1 - {smallest!r}) is not above 0. The largest feasible scale is {largest}: use a"
            f" smaller global batch, a {name} closer to 1, or lr_scaling='sqrt'."
        )
    scaled = tuple(float(1 - exact_scale * (1 - _as_written(value))) for value in named.values())
    return {"betas": scaled} if "betas" in hyperparameters else {"alpha": scaled[0]}


def scaled_hyperparameters(
    lr_scaling: str | ScaleFunction | Scaling, scale: float, hyperparameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the hyperparameters that `lr_scaling` governs, at `scale`.

    `"adam_sde"` keeps the stochastic differential equation of Adam or RMSprop (Malladi et al. 2022, arXiv 2205.10287):
    lr' = sqrt(k) * lr, 1 - beta' = k * (1 - beta) for every beta (RMSprop: `alpha`), eps' = eps / sqrt(k) with eps
    outside the square root as in `torch.optim`. Weight decay is not part of it: see `decoupled_weight_decay`.

    Applying `k` and then `1 / k` returns the original values to 1e-15 relative. The exception is a smoothing constant
    taken to `k < 1` first: it moves so near to 1 that float64 itself leaves an error of up to 1e-15 / k.

    Args:
        lr_scaling: A key of `SCALINGS`, a function `scale -> factor`, or a `Scaling`.
        scale: Global batch over base batch, finite and > 0.
        hyperparameters: An optimizer's parameter group in base units. `lr` is needed; `"adam_sde"` also needs `betas`
            (Adam) or `alpha` (RMSprop), and `eps`. Other keys are ignored.

    Returns:
        The new values by name: nothing for `"none"`, `lr` for `"linear"`, `"sqrt"` and functions, and `lr`, `eps` and
        `betas` or `alpha` for `"adam_sde"`. At scale 1 the values of a named scaling are the given ones.

    Raises:
        ValueError: If `lr` is missing; if `"adam_sde"` meets an optimizer without smoothing constants, or a scale of
            `scale_limit` or more (the message names the largest feasible scale).
    """
    scaling = resolve_scaling(lr_scaling)
    factor = scale_factor(scaling, scale)
    if scaling.name == "none":
        return {}
    if "lr" not in hyperparameters:
        raise ValueError(
            f"lr_scaling {scaling.name!r} has no 'lr' to scale among"
            f" {', '.join(hyperparameters) or 'no hyperparameters'}. Use lr_scaling='none' with this optimizer."
        )
    scaled: dict[str, Any] = {"lr": hyperparameters["lr"] * factor}
    if scaling.rescales_moments:
        scaled.update(_sde_smoothing(scale, hyperparameters), eps=hyperparameters["eps"] / factor)
    return scaled


def warmup_factor(factor: float, step: int, warmup_steps: int) -> float:
    """Return the factor of the learning rate at optimizer step `step` of the gradual warm-up of Goyal et al. 2017.

    1 + (f - 1) * t / T for t < T, then f: it starts at the base learning rate, not at 0. A factor below 1 is approached
    downwards in the same way.

    Args:
        factor: f, what `scale_factor` returns.
        step: t, the optimizer steps made so far, from 0.
        warmup_steps: T; 0 means no warm-up.

    Raises:
        ValueError: If `step` or `warmup_steps` is negative.
    """
    if step < 0 or warmup_steps < 0:
        raise ValueError(f"step and warmup_steps must be >= 0, got step={step!r} and warmup_steps={warmup_steps!r}.")
    return 1 + (factor - 1) * step / warmup_steps if step < warmup_steps else factor


def scaled_steps(steps: int, scale: float) -> int:
    """Return how many steps at `scale` see as many samples as `steps` base steps: steps / k, rounded half up.

    This holds for everything that is counted in steps: the length of a schedule, its milestones and its warm-up
    (Goyal et al. 2017; Malladi et al. 2022 for SDE time). At least 1, unless `steps` is 0.

    Raises:
        ValueError: If `steps` is negative, or `scale` is not finite and > 0.
    """
    if steps < 0:
        raise ValueError(f"steps must be >= 0, got {steps!r}.")
    exact = steps / _as_written(as_positive("scale", scale))
    return max(math.floor(exact + Fraction(1, 2)), min(steps, 1))


def decoupled_weight_decay(weight_decay: float, scale: float, factor: float) -> float:
    """Return the decoupled weight decay that keeps the decay per sample: weight_decay * k / f.

    A derivation of this project and not in any of the cited papers. An AdamW step decays the weights by
    lr * weight_decay, and one step at scale k stands for k base steps, so lr' * weight_decay' = k * lr * weight_decay.
    With `"linear"` that is the unchanged value, as Goyal et al. 2017 keep it; with `"sqrt"` and `"adam_sde"` it grows
    by sqrt(k).
    """
    return weight_decay * scale / factor
