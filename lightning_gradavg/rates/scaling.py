"""Learning rate and batch size: what a change of the global batch asks of the optimizer.

The *scale* `k = B / B0` is the ratio of the global batch, all samples of one optimizer step over ranks and window, to
the base batch that the learning rate was tuned for. A *scaling* is a choice of the factor `f(k)` of the learning rate,
for a gradient that is a mean over the global batch.

Sources: linear and gradual warm-up, Goyal et al. 2017 (arXiv 1706.02677); square root, Krizhevsky 2014 (arXiv
1404.5997); Adam and RMSprop, Malladi et al. 2022 (arXiv 2205.10287).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from lightning_gradavg.arguments import did_you_mean

__all__ = [
    "SCALINGS",
    "BatchScale",
    "ScaleFunction",
    "Scaling",
    "as_count",
    "as_positive",
    "batch_scale",
    "contradictions",
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


def _unscaled(scale: float) -> float:  # by name, so that it can be pickled
    return 1.0


SCALINGS: Mapping[str, Scaling] = MappingProxyType(
    {
        "none": Scaling("none", _unscaled, False, "lr"),
        "linear": Scaling("linear", operator.pos, False, "k * lr"),
        "sqrt": Scaling("sqrt", math.sqrt, False, "sqrt(k) * lr"),
        "adam_sde": Scaling("adam_sde", math.sqrt, True, "sqrt(k) * lr, 1 - k * (1 - beta), eps / sqrt(k)"),
    }
)
"""The named scalings. k: scale."""


def resolve_scaling(lr_scaling: str | ScaleFunction | Scaling) -> Scaling:
    """Return the scaling that `lr_scaling` is or names, or of which it is the function."""
    if isinstance(lr_scaling, Scaling):
        return lr_scaling
    if callable(lr_scaling):
        name = getattr(lr_scaling, "__qualname__", type(lr_scaling).__qualname__)
        return Scaling(name, lr_scaling, False, f"{name}(k) * lr")
    accepted = f"{', '.join(map(repr, SCALINGS))}, or a function scale -> factor"
    if not isinstance(lr_scaling, str):
        raise TypeError(
            f"lr_scaling must be one of {accepted}; got {lr_scaling!r} of type {type(lr_scaling).__name__}."
        )
    if lr_scaling not in SCALINGS:
        hint = did_you_mean(lr_scaling, SCALINGS)
        raise ValueError(f"lr_scaling={lr_scaling!r} is not a scaling.{hint} Use one of {accepted}.")
    return SCALINGS[lr_scaling]


def as_positive(name: str, value: Any) -> float:
    """Return the number `value` as a float; ValueError unless it is finite and > 0, TypeError if it is no number."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}.")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{name} must be finite and > 0, got {value!r}.")
    return float(value)


def as_count(name: str, value: Any, least: int = 1) -> int:
    """Return the int `value`; ValueError if it is below `least`, TypeError if it is no int, such as a bool."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer >= {least}, got {value!r} of type {type(value).__name__}.")
    if value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}.")
    return value


def scale_factor(lr_scaling: str | ScaleFunction | Scaling, scale: float) -> float:
    """Return the factor of the learning rate at `scale`; ValueError unless both are finite and > 0."""
    scaling, scale = resolve_scaling(lr_scaling), as_positive("scale", scale)
    return as_positive(f"the factor of lr_scaling {scaling.name!r} at scale {scale:g}", scaling.factor(scale))


def _as_written(number: float) -> Fraction:
    # The shortest decimal that reads back as `number`: 1 - 2 * (1 - 0.9) is then 0.8 and not 0.8 - 1e-16, and
    # 10 * (1 - 0.9) is 1, the limit itself, and not just below it.
    return Fraction(repr(float(number)))


def _smoothing(hyperparameters: Mapping[str, Any]) -> dict[str, float]:
    """Return the smoothing constants of an Adam or RMSprop parameter group by the names that messages use."""
    # `eps` must stand beside them: ASGD has an `alpha` and Lion has `betas` that mean something else.
    if {"eps", "betas"} <= hyperparameters.keys():
        named = {f"beta{index}": float(beta) for index, beta in enumerate(hyperparameters["betas"], start=1)}
    elif {"eps", "alpha"} <= hyperparameters.keys():
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
    """Return the scale that `"adam_sde"` must stay below, exactly: 1 / (1 - the smallest smoothing constant)."""
    return 1 / (1 - _as_written(min(_smoothing(hyperparameters).values())))


def _sde_smoothing(scale: float, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return `betas` or `alpha` at `scale`: 1 - beta' = k * (1 - beta), Malladi et al. 2022."""
    named, limit = _smoothing(hyperparameters), scale_limit(hyperparameters)
    if _as_written(scale) >= limit and scale != 1:
        name, smallest = min(named.items(), key=lambda item: item[1])
        raise ValueError(
            f"lr_scaling='adam_sde' is not feasible at scale {scale:g} with {name}={smallest!r}:"
            f" 1 - {scale:g} * (1 - {smallest!r}) is not above 0. The scale must stay below {float(limit):g}: use a"
            f" smaller global batch, a {name} closer to 1, or lr_scaling='sqrt'."
        )
    scaled = tuple(float(1 - _as_written(scale) * (1 - _as_written(value))) for value in named.values())
    return {"betas": scaled} if "betas" in hyperparameters else {"alpha": scaled[0]}


def scaled_hyperparameters(
    lr_scaling: str | ScaleFunction | Scaling, scale: float, hyperparameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the hyperparameters that `lr_scaling` governs, at `scale`, by name.

    `"adam_sde"` keeps the stochastic differential equation of Adam or RMSprop (Malladi et al. 2022): lr' = sqrt(k) *
    lr, 1 - beta' = k * (1 - beta) for every beta (RMSprop: `alpha`), eps' = eps / sqrt(k) with eps outside the square
    root as in `torch.optim`. Weight decay is not part of it.

    Args:
        lr_scaling: A key of `SCALINGS`, a function `scale -> factor`, or a `Scaling`.
        scale: Global batch over base batch, finite and > 0.
        hyperparameters: An optimizer's parameter group with base values.

    Raises:
        ValueError: If `lr` is missing; if `"adam_sde"` meets an optimizer without smoothing constants, or a scale of
            `scale_limit` or more.
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
    """Return the factor of the learning rate after `step` optimizer steps of the gradual warm-up of Goyal et al. 2017.

    It is 1 + (f - 1) * t / T for t < T, then f: the warm-up starts at the base learning rate, not at 0.
    """
    return 1 + (factor - 1) * step / warmup_steps if step < warmup_steps else factor


def scaled_steps(steps: int, scale: float) -> int:
    """Return how many steps at `scale` see as many samples as `steps` base steps: steps / k, rounded half up.

    It is at least 1, unless `steps` is 0.
    """
    exact = as_count("steps", steps, least=0) / _as_written(as_positive("scale", scale))
    return max(math.floor(exact + Fraction(1, 2)), min(steps, 1))


class BatchScale(NamedTuple):
    """The global batch and the base batch: samples of one optimizer step, over ranks and window."""

    global_batch_size: int
    base_batch_size: int

    @property
    def scale(self) -> float:
        """Global batch over base batch."""
        return self.global_batch_size / self.base_batch_size


def batch_scale(
    loader_batch_size: int,
    *,
    world_size: int,
    accumulate_grad_batches: int = 1,
    split_batches: bool = False,
    base_batch_size: int | None = None,
    base_world_size: int = 1,
) -> BatchScale:
    """Return the global batch of a run and the base batch. With `split_batches` the ranks share each loader batch.

    Without `base_batch_size` the base run is this script, with the same loader and accumulation, on `base_world_size`
    ranks: the scale is world_size / base_world_size, and with `split_batches` 1.

    Raises:
        ValueError: If a count is below 1, or `base_world_size` says nothing because ranks share each batch.
        TypeError: If a count is not an int.
    """
    samples = as_count("loader_batch_size", loader_batch_size)
    samples *= as_count("accumulate_grad_batches", accumulate_grad_batches)
    ranks, base_ranks = as_count("world_size", world_size), as_count("base_world_size", base_world_size)
    if base_ranks > 1 and split_batches and base_batch_size is None:
        raise ValueError(
            f"base_world_size={base_world_size} says nothing about a run with split_batches=True: its global batch"
            " is the loader's batch on any number of ranks. Give base_batch_size, the global batch that the"
            " learning rate was tuned for."
        )
    if split_batches:
        ranks = base_ranks = 1
    base = samples * base_ranks if base_batch_size is None else as_count("base_batch_size", base_batch_size)
    return BatchScale(samples * ranks, base)


def contradictions(
    rule_name: str, lr_scaling: str | ScaleFunction | Scaling, batch: BatchScale, *, nodes: int = 1
) -> dict[str, str]:
    """Return what does not fit together in a choice of rule, scaling and batch: messages by what is wrong.

    `"counted_twice"`: the gradient of a sum grows with the batch, and so does the scaled learning rate. Other rules
    are taken for means, and the base run for one on a single node. `"unchanged_batch"`: there is nothing to scale.
    `"base_above_global"`: the learning rate becomes smaller.
    """
    scaling = resolve_scaling(lr_scaling)
    if scaling.name == "none":
        return {}
    scale, factor = batch.scale, scale_factor(scaling, batch.scale)
    growths = {"sum": scale, "mean_of_node_sums": scale / nodes, "sum_of_node_means": float(nodes)}
    growth = growths.get(rule_name, 1.0)
    batches = f"global batch {batch.global_batch_size}, base batch {batch.base_batch_size}"
    found = {}
    if 1 not in (growth, factor):
        found["counted_twice"] = (
            f"reduction={rule_name!r} and lr_scaling={scaling.name!r} count the change of the batch twice ({batches}):"
            f" the gradient is already {growth:.6g} times the base run's and the learning rate is {factor:.6g} times"
            f" its own, so an SGD step is {growth * factor:.6g} times the base step. Use lr_scaling='none', or a mean"
            " such as 'normalized_sum' (sum losses) or 'weighted_mean'."
        )
    if scale == factor == 1:
        found["unchanged_batch"] = (
            f"lr_scaling={scaling.name!r} changes nothing: the global batch is the base batch ({batches}). If the"
            " learning rate was tuned for another batch, give it as base_batch_size."
        )
    if scale < 1:
        found["base_above_global"] = (
            f"the base batch is larger than the global batch ({batches}): lr_scaling={scaling.name!r} multiplies the"
            f" learning rate by {factor:.6g}. If that is not intended, correct base_batch_size or base_world_size."
        )
    return found
