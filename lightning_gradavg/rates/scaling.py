"""Learning rate and batch size: how the optimizer's hyperparameters follow the global batch.

The *scale* `k = B / B0` is the ratio of the global batch to the base batch. The global batch B is all samples of one
optimizer step, over ranks and window. The base batch B0 is the one that the learning rate was tuned for. A *scaling*
is a choice of the factor `f(k)` of the learning rate. Every scaling assumes a gradient that is a mean over the global
batch: `counted_twice` warns where it is a sum.

Sources: linear and gradual warm-up, Goyal et al. 2017 (arXiv 1706.02677); square root, Krizhevsky 2014 (arXiv
1404.5997); Adam and RMSprop, Malladi et al. 2022 (arXiv 2205.10287).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple, SupportsFloat, TypeAlias

from lightning_gradavg._support.arguments import as_count, did_you_mean

__all__ = [
    "SCALINGS",
    "BatchScale",
    "Hyperparameters",
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

Hyperparameters: TypeAlias = Mapping[str, Any]
"""Values of a parameter group of `torch.optim` by name: floats, tuples of floats, or tensors of one element."""


# Functions, not lambdas: the strategy, and with it its `Scaling`, is pickled for processes that are spawned.
def _unscaled_factor(scale: float) -> float:
    return 1.0


def _linear_factor(scale: float) -> float:
    return scale


def _no_moments(scale: float, base: Hyperparameters) -> Hyperparameters:
    return {}


@dataclass(frozen=True)
class Scaling:
    """How the learning rate follows the scale.

    Attributes:
        name: What messages call it: the `lr_scaling=` name, or the qualified name of a user's function.
        factor: The pure function `scale -> factor`.
        formula: The scaling in one line of text, for messages.
        moments: A pure function of the scale and a parameter group with base values. It returns the scaled smoothing
            constants (`betas` or `alpha`) and `eps` by name, or nothing if the scaling leaves them alone.
        is_named: Whether the name tells it from others; not that of a lambda, a `partial` or a callable object.
    """

    name: str
    factor: ScaleFunction
    formula: str
    moments: Callable[[float, Hyperparameters], Hyperparameters] = _no_moments
    is_named: bool = True

    def at(self, scale: float) -> float:
        """Return the factor of the learning rate; ValueError unless it and the scale are finite and > 0."""
        factor = self.factor(as_positive("scale", scale))
        return as_positive(f"the factor of lr_scaling {self.name!r} at scale {scale:g}", factor)

    def hyperparameters(self, scale: float, base: Hyperparameters, factor: float | None = None) -> dict[str, Any]:
        """Return the scaled values of all hyperparameters that the scaling changes, by name.

        Args:
            scale: The global batch over the base batch.
            base: A parameter group with base values.
            factor: The factor of the learning rate within a warm-up; None for that after it.

        Raises:
            ValueError: If the group has no learning rate, or if `"adam_sde"` meets an optimizer of another kind or a
                scale of `scale_limit` or more.
        """
        if base.get("lr") is None:
            raise ValueError(
                f"lr_scaling={self.name!r} scales the learning rate, but this optimizer has a parameter group without"
                " one: its `lr` is missing or None. Use lr_scaling='none' with it."
            )
        if factor is None:
            factor = self.at(scale)
        return {"lr": base["lr"] * factor, **self.moments(scale, base)}


def resolve_scaling(lr_scaling: str | ScaleFunction) -> Scaling:
    """Return the scaling that `lr_scaling` names, or the one of a user's function."""
    if callable(lr_scaling):
        name = getattr(lr_scaling, "__qualname__", type(lr_scaling).__qualname__)
        is_named = hasattr(lr_scaling, "__qualname__") and not name.endswith("<lambda>")
        return Scaling(name, lr_scaling, f"{name}(k) * lr", is_named=is_named)
    accepted = f"{', '.join(map(repr, SCALINGS))}, or a function scale -> factor"
    if not isinstance(lr_scaling, str):
        raise TypeError(
            f"lr_scaling must be one of {accepted}; got {lr_scaling!r} of type {type(lr_scaling).__name__}."
        )
    if lr_scaling not in SCALINGS:
        hint = did_you_mean(lr_scaling, SCALINGS)
        raise ValueError(f"lr_scaling={lr_scaling!r} is not a scaling.{hint} Use one of {accepted}.")
    return SCALINGS[lr_scaling]


def as_positive(name: str, value: object) -> float:
    """Return the number `value` as a float; ValueError unless it is finite and > 0, TypeError if it is no number."""
    # `True` is a number to Python, and a tensor or a NumPy scalar is one to the user.
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}.")
    number = float(value)
    if not 0 < number < math.inf:  # NaN, too
        raise ValueError(f"{name} must be finite and > 0, got {value!r}.")
    return number


def _as_written(number: float) -> Fraction:
    """Return the shortest decimal that reads back as `number`, exactly.

    With it 1 - 2 * (1 - 0.9) is 0.8, and not 0.8 - 1e-16; and 10 * (1 - 0.9) is 1, the limit of `"adam_sde"` itself,
    and not just below it.
    """
    return Fraction(repr(float(number)))


def _smoothing(base: Hyperparameters) -> dict[str, float]:
    """Return the smoothing constants of an Adam or RMSprop parameter group by the names that messages use.

    | optimizer | its group has | result |
    |---|---|---|
    | Adam and its variants | `betas`, `eps` | `{"beta1": ..., "beta2": ...}` |
    | RMSprop | `alpha`, `eps` | `{"alpha": ...}` |
    | any other | something else | ValueError |
    """
    # `eps` tells them apart from others: ASGD has an `alpha` and Lion has `betas` that mean something else.
    if "eps" in base and "betas" in base:
        return {f"beta{index}": beta for index, beta in enumerate(base["betas"], start=1)}
    if "eps" in base and "alpha" in base:
        return {"alpha": base["alpha"]}
    raise ValueError(
        "lr_scaling='adam_sde' is meant for Adam (betas, eps) and RMSprop (alpha, eps); this optimizer has"
        f" {', '.join(base)}. Use 'linear' or 'sqrt' with it."
    )


def scale_limit(base: Hyperparameters) -> Fraction:
    """Return the scale that `"adam_sde"` must stay below, exactly: 1 / (1 - the smallest smoothing constant).

    At the limit, 1 - k * (1 - beta) is 0 for that constant, and beyond it negative.
    """
    smallest = min(_smoothing(base).values())
    return 1 / (1 - _as_written(smallest))


def _sde_moments(scale: float, base: Hyperparameters) -> Hyperparameters:
    """Return the smoothing constants and `eps` that keep the stochastic differential equation of Adam or RMSprop.

    1 - beta' = k * (1 - beta) for every beta (RMSprop: `alpha`), and eps' = eps / sqrt(k), with eps outside the square
    root as in `torch.optim` (Malladi et al. 2022, arXiv 2205.10287). Together with lr' = sqrt(k) * lr this is their
    rule. Weight decay is not part of it.
    """
    smoothing = _smoothing(base)
    # Without a limit are constants of 1, which torch takes as the `alpha` of RMSprop.
    limit: float | Fraction = math.inf
    if min(smoothing.values()) < 1:
        limit = scale_limit(base)
    # At scale 1 nothing changes, so beta = 0, whose limit is 1, is allowed.
    if _as_written(scale) >= limit and scale != 1:
        name = min(smoothing, key=smoothing.__getitem__)
        raise ValueError(
            f"lr_scaling='adam_sde' is not feasible at scale {scale:g} with {name}={smoothing[name]!r}, for which it"
            f" must stay below {float(limit):g}. Use a smaller global batch, a {name} closer to 1, or"
            " lr_scaling='sqrt'."
        )
    scaled = [float(1 - _as_written(scale) * (1 - _as_written(constant))) for constant in smoothing.values()]
    eps = base["eps"] / math.sqrt(scale)
    if "betas" in base:
        return {"betas": tuple(scaled), "eps": eps}
    return {"alpha": scaled[0], "eps": eps}


SCALINGS: Mapping[str, Scaling] = MappingProxyType(
    {
        "none": Scaling("none", _unscaled_factor, "lr"),
        "linear": Scaling("linear", _linear_factor, "k * lr"),
        "sqrt": Scaling("sqrt", math.sqrt, "sqrt(k) * lr"),
        "adam_sde": Scaling("adam_sde", math.sqrt, "sqrt(k) * lr, 1 - k * (1 - beta), eps / sqrt(k)", _sde_moments),
    }
)
"""The named scalings. k: scale."""


def warmup_factor(factor: float, step: int, warmup_steps: int) -> float:
    """Return the factor of the learning rate after `step` optimizer steps of the gradual warm-up of Goyal et al. 2017.

    It is 1 + (f - 1) * t / T for t < T, then f: the warm-up starts at the base learning rate, not at 0.
    """
    if step >= warmup_steps:
        return factor
    return 1 + (factor - 1) * step / warmup_steps


def scaled_steps(steps: int, scale: float | Fraction) -> int:
    """Return how many steps at `scale` see as many samples as `steps` base steps: steps / k, rounded half up.

    It is at least 1, unless `steps` is 0. The scale is a ratio of batches: of a float, that of the nearest one with a
    base batch of up to a million, so that 5 steps at 10 / 3, which is not a float, are 1.5 steps and rounded to 2.
    """
    as_positive("scale", float(scale))
    exact_scale = Fraction(scale)
    if isinstance(scale, float):
        exact_scale = exact_scale.limit_denominator(10**6)
    rounded = math.floor(as_count("steps", steps, least=0) / exact_scale + Fraction(1, 2))
    if steps > 0:
        return max(rounded, 1)
    return rounded


class BatchScale(NamedTuple):
    """The global batch and the base batch, each the samples of one optimizer step over ranks and window.

    Where the samples are not known, their ratio is: both are then counted in loader batches.
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
    global_batch_size: int | None = None,
) -> BatchScale:
    """Return the global batch of a run, by the batch sizes of all its training loaders, and the base batch.

    With `split_batches` the ranks share each loader batch. Without `base_batch_size` the base run is this script, with
    the same loaders and accumulation, on `base_world_size` ranks. With b the samples that all loaders together give to
    one micro-batch, and N the accumulation:

    | `split_batches` | `base_batch_size` | global batch | base batch |
    |---|---|---|---|
    | False | None | b * N * world_size | b * N * base_world_size |
    | False | given | b * N * world_size | `base_batch_size` |
    | True | None | b * N | b * N |
    | True | given | b * N | `base_batch_size` |

    Args:
        sizes: The batch size of each training loader, None for one that does not tell.
        accumulation: Loader batches per optimizer step.
        world_size: Ranks of this run.
        split_batches: Whether the ranks share each loader batch.
        base_batch_size: The base batch in samples.
        base_world_size: Ranks of the base run.
        global_batch_size: The global batch in samples, where the sizes do not tell it.

    Raises:
        ValueError: If a number is out of range; if `base_world_size` says nothing about the base batch; if
            `base_batch_size` is given and the global batch is not known; or if `global_batch_size` is given without
            it, or is another than the sizes tell.
    """
    base_ranks = as_count("base_world_size", base_world_size)
    if base_ranks > 1 and split_batches and base_batch_size is None:
        raise ValueError(
            f"base_world_size={base_world_size} says nothing about a run with split_batches=True: its global batch"
            " is the loader's batch on any number of ranks. Give base_batch_size, the global batch that the"
            " learning rate was tuned for."
        )
    if base_batch_size is not None:
        as_count("base_batch_size", base_batch_size)
    if global_batch_size is not None:
        as_count("global_batch_size", global_batch_size)
        if base_batch_size is None:
            raise ValueError(
                f"global_batch_size={global_batch_size} is compared with base_batch_size, which is not given. Give"
                " both, or neither: the scale is then the number of ranks over base_world_size."
            )
    size = _samples_of(sizes)
    if size is None and base_batch_size is not None and global_batch_size is None:
        raise ValueError(
            f"base_batch_size={base_batch_size} needs the size of a training batch, but the training loaders have the"
            f" batch sizes {list(sizes)}. Give the loader, its batch sampler or its dataset an attribute `batch_size`,"
            " give the samples of one optimizer step over all ranks by global_batch_size, or use base_world_size."
        )
    # Without a known size, the unit is one loader batch: the ratio is right all the same.
    loader_batch = size if size is not None else 1
    per_rank = loader_batch * accumulation
    if split_batches:
        global_batch = per_rank
        base_batch = per_rank
    else:
        global_batch = per_rank * world_size
        base_batch = per_rank * base_ranks
    if base_batch_size is not None:
        base_batch = base_batch_size
    if global_batch_size is None:
        return BatchScale(global_batch, base_batch, known=size is not None)
    if size is not None and global_batch_size != global_batch:
        raise ValueError(
            f"global_batch_size={global_batch_size}, but the training loaders and the Trainer make {global_batch}"
            " samples of one optimizer step over all ranks. Leave global_batch_size out."
        )
    return BatchScale(global_batch_size, base_batch)


def _samples_of(sizes: Sequence[int | None]) -> int | None:
    """Return the samples that all loaders together give to one micro-batch, or None if one does not tell."""
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    if total == 0:  # no loader is known yet
        return None
    return total


def counted_twice(rule_name: str, scaling: Scaling, scale: float, nodes: int = 1) -> str:
    """Return the warning about a gradient that grows with the batch, as a sum does, beside a scaled learning rate.

    It is "" if either of the two does not change. Rules that `_gradient_growth` does not name are taken for means.
    """
    growth = _gradient_growth(rule_name, scale, nodes)
    factor = scaling.at(scale)
    if growth == 1 or factor == 1:
        return ""
    return (
        f"reduction={rule_name!r} and lr_scaling={scaling.name!r} count the change of the batch twice, at scale"
        f" {scale:g}: the gradient is already {growth:.6g} times the base run's and the learning rate is {factor:.6g}"
        f" times its own, so an SGD step is {growth * factor:.6g} times the base step. Use lr_scaling='none', or a mean"
        " such as 'normalized_sum' (sum losses) or 'weighted_mean'."
    )


def _gradient_growth(rule_name: str, scale: float, nodes: int) -> float:
    """Return the gradient of this run over that of a base run on one node, for samples with equal gradients.

    `test_multipliers_of_a_step_are_those_of_a_toy` computes the same by the rules.
    """
    if rule_name == "sum":
        return scale
    if rule_name == "mean_of_node_sums":  # a sum on each node, which has one of `nodes` parts of the batch
        return scale / nodes
    if rule_name == "sum_of_node_means":
        return nodes
    return 1.0
