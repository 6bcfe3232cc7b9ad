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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from lightning_gradavg._support.arguments import as_count, did_you_mean

__all__ = [
    "SCALINGS",
    "BatchScale",
    "ScaleFunction",
    "Scaling",
    "as_positive",
    "batch_scale",
    "counted_twice",
    "resolve_scaling",
    "scale_limit",
    "scaled_steps",
    "warmup_factor",
]

ScaleFunction: TypeAlias = Callable[[float], float]
"""`scale -> factor` of the learning rate. Pure, the same on all ranks; the factor is finite and > 0."""


def _unscaled(scale: float) -> float:  # by name, so that it can be pickled
    return 1.0


def _nothing(scale: float, base: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Scaling:
    """How the learning rate follows the scale.

    Attributes:
        name: What messages call it: the `lr_scaling=` name, or the qualified name of a user's function.
        factor: The pure function `scale -> factor`.
        formula: The scaling in one line of text, for messages.
        moments: The pure function of the scale and a parameter group with base values that returns the optimizer's
            smoothing (`betas`, `alpha`) and `eps`, by name, as far as they follow the scale too.
    """

    name: str
    factor: ScaleFunction
    formula: str
    moments: Callable[[float, Mapping[str, Any]], Mapping[str, Any]] = _nothing

    def at(self, scale: float) -> float:
        """Return the factor of the learning rate; ValueError unless it and the scale are finite and > 0."""
        factor = self.factor(as_positive("scale", scale))
        return as_positive(f"the factor of lr_scaling {self.name!r} at scale {scale:g}", factor)

    def hyperparameters(self, scale: float, base: Mapping[str, Any], factor: float | None = None) -> dict[str, Any]:
        """Return what the scaling governs of a parameter group with base values, by name.

        In a warm-up the learning rate has a factor of its own.

        Raises:
            ValueError: If `"adam_sde"` meets an optimizer of another kind, or a scale of `scale_limit` or more.
        """
        return {"lr": base["lr"] * (self.at(scale) if factor is None else factor), **self.moments(scale, base)}


def resolve_scaling(lr_scaling: str | ScaleFunction) -> Scaling:
    """Return the scaling that `lr_scaling` names, or of which it is the function."""
    if callable(lr_scaling):
        name = getattr(lr_scaling, "__qualname__", type(lr_scaling).__qualname__)
        return Scaling(name, lr_scaling, f"{name}(k) * lr")
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


def _as_written(number: float) -> Fraction:
    # The shortest decimal that reads back as `number`: 1 - 2 * (1 - 0.9) is then 0.8 and not 0.8 - 1e-16, and
    # 10 * (1 - 0.9) is 1, the limit itself, and not just below it.
    return Fraction(repr(float(number)))


def _smoothing(base: Mapping[str, Any]) -> dict[str, float]:
    """Return the smoothing constants of an Adam or RMSprop parameter group by the names that messages use."""
    # `eps` must stand beside them: ASGD has an `alpha` and Lion has `betas` that mean something else.
    if "eps" not in base or not {"betas", "alpha"} & base.keys():
        raise ValueError(
            "lr_scaling='adam_sde' is meant for Adam (betas, eps) and RMSprop (alpha, eps); this optimizer has"
            f" {', '.join(base)}. Use 'linear' or 'sqrt' with it."
        )
    betas = {f"beta{index}": beta for index, beta in enumerate(base.get("betas", ()), start=1)}
    return betas or {"alpha": base["alpha"]}


def scale_limit(base: Mapping[str, Any]) -> Fraction:
    """Return the scale that `"adam_sde"` must stay below, exactly: 1 / (1 - the smallest smoothing constant)."""
    return 1 / (1 - _as_written(min(_smoothing(base).values())))


def _sde_moments(scale: float, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return what keeps the stochastic differential equation of Adam or RMSprop (Malladi et al. 2022).

    lr' = sqrt(k) * lr, 1 - beta' = k * (1 - beta) for every beta (RMSprop: `alpha`), eps' = eps / sqrt(k) with eps
    outside the square root as in `torch.optim`. Weight decay is not part of it.
    """
    named, limit = _smoothing(base), scale_limit(base)
    if _as_written(scale) >= limit and scale != 1:
        name, smallest = min(named.items(), key=lambda item: item[1])
        raise ValueError(
            f"lr_scaling='adam_sde' is not feasible at scale {scale:g} with {name}={smallest!r}, for which it must stay"
            f" below {float(limit):g}. Use a smaller global batch, a {name} closer to 1, or lr_scaling='sqrt'."
        )
    scaled = tuple(float(1 - _as_written(scale) * (1 - _as_written(value))) for value in named.values())
    return {**({"betas": scaled} if "betas" in base else {"alpha": scaled[0]}), "eps": base["eps"] / math.sqrt(scale)}


SCALINGS: Mapping[str, Scaling] = MappingProxyType(
    {
        "none": Scaling("none", _unscaled, "lr"),
        "linear": Scaling("linear", operator.pos, "k * lr"),
        "sqrt": Scaling("sqrt", math.sqrt, "sqrt(k) * lr"),
        "adam_sde": Scaling("adam_sde", math.sqrt, "sqrt(k) * lr, 1 - k * (1 - beta), eps / sqrt(k)", _sde_moments),
    }
)
"""The named scalings. k: scale."""


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
    """The global batch and the base batch: samples of one optimizer step, over ranks and window.

    Where no loader tells its batch size they are not `known`, but their ratio is.
    """

    global_batch_size: int
    base_batch_size: int
    known: bool = True

    @property
    def scale(self) -> float:
        """Global batch over base batch."""
        return self.global_batch_size / self.base_batch_size


def batch_scale(
    sizes: Sequence[int | None],
    accumulation: int = 1,
    *,
    world_size: int,
    split_batches: bool = False,
    base_batch_size: int | None = None,
    base_world_size: int = 1,
) -> BatchScale:
    """Return the global batch of a run, by the batch sizes of all its training loaders, and the base batch.

    With `split_batches` the ranks share each loader batch. Without `base_batch_size` the base run is this script, with
    the same loader and accumulation, on `base_world_size` ranks: the scale is world_size / base_world_size, and with
    `split_batches` 1.
    """
    base_ranks = as_count("base_world_size", base_world_size)
    if base_ranks > 1 and split_batches and base_batch_size is None:
        raise ValueError(
            f"base_world_size={base_world_size} says nothing about a run with split_batches=True: its global batch"
            " is the loader's batch on any number of ranks. Give base_batch_size, the global batch that the"
            " learning rate was tuned for."
        )
    size = sizes[0] if len({*sizes}) == 1 else None
    if size is None and base_batch_size is not None:
        raise ValueError(
            f"base_batch_size={base_batch_size} needs the size of a training batch, but the training loaders have the"
            f" batch sizes {list(sizes)}. Give the loader, its batch sampler or its dataset an attribute `batch_size`,"
            " or use base_world_size."
        )
    if split_batches:
        world_size = base_ranks = 1
    samples = (size or 1) * accumulation
    base = samples * base_ranks if base_batch_size is None else as_count("base_batch_size", base_batch_size)
    return BatchScale(samples * world_size, base, known=size is not None)


def counted_twice(rule_name: str, scaling: Scaling, scale: float, nodes: int = 1) -> str:
    """Return the warning of a gradient that grows with the batch, as a sum does, beside a scaled learning rate, or "".

    Other rules are taken for means, and the base run for one on a single node.
    """
    growths = {"sum": scale, "mean_of_node_sums": scale / nodes, "sum_of_node_means": float(nodes)}
    growth, factor = growths.get(rule_name, 1.0), scaling.at(scale)
    if 1 in (growth, factor):
        return ""
    return (
        f"reduction={rule_name!r} and lr_scaling={scaling.name!r} count the change of the batch twice, at scale"
        f" {scale:g}: the gradient is already {growth:.6g} times the base run's and the learning rate is {factor:.6g}"
        f" times its own, so an SGD step is {growth * factor:.6g} times the base step. Use lr_scaling='none', or a mean"
        " such as 'normalized_sum' (sum losses) or 'weighted_mean'."
    )
