"""The global batch: how large it is, which base batch it stands beside, and what contradicts it.

The samples of one optimizer step are the *global batch*; the one that the learning rate was tuned for is the base
batch. Their ratio, the scale, is all that `scaling` needs to know about a machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_gradavg.rates.scaling import ScaleFunction, Scaling, as_positive, resolve_scaling, scale_factor

__all__ = [
    "BatchScale",
    "Contradiction",
    "batch_scale",
    "contradictions",
    "global_batch_size",
    "nearest_even_batches",
]


@dataclass(frozen=True)
class BatchScale:
    """The global batch and the base batch, both in samples (or both in tokens) per optimizer step.

    Attributes:
        global_batch_size: All samples of one optimizer step, over ranks and window.
        base_batch_size: The global batch that the learning rate was tuned for.
    """

    global_batch_size: int
    base_batch_size: float

    def __post_init__(self) -> None:
        as_positive("global_batch_size", self.global_batch_size)
        as_positive("base_batch_size", self.base_batch_size)

    @property
    def scale(self) -> float:
        """Global batch over base batch."""
        return self.global_batch_size / self.base_batch_size


def _at_least_one(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}.")
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value!r}.")


def global_batch_size(
    loader_batch_size: int, *, world_size: int, accumulate_grad_batches: int = 1, split_batches: bool = False
) -> int:
    """Return the samples of one optimizer step, over ranks and window.

    Args:
        loader_batch_size: The `batch_size` of the `DataLoader`.
        world_size: Ranks that take a batch of their own from the loader.
        accumulate_grad_batches: Loader batches per optimizer step and rank. The micro-batches into which
            `max_device_batch_size` cuts a loader batch do not count: they hold the same samples.
        split_batches: True where all ranks share each loader batch; the world size then does not enter.

    Raises:
        ValueError: If a count is below 1.
        TypeError: If a count is not an int.
    """
    _at_least_one(
        loader_batch_size=loader_batch_size, world_size=world_size, accumulate_grad_batches=accumulate_grad_batches
    )
    return loader_batch_size * accumulate_grad_batches * (1 if split_batches else world_size)


def batch_scale(
    loader_batch_size: int,
    *,
    world_size: int,
    accumulate_grad_batches: int = 1,
    split_batches: bool = False,
    base_batch_size: float | None = None,
    base_world_size: int = 1,
) -> BatchScale:
    """Return the global batch of a run and the base batch that its learning rate was tuned for.

    With `base_batch_size` the scale is global batch / base batch, whatever made the global batch large. Without it, the
    base run is this script, with the same loader and accumulation, on `base_world_size` ranks: where every rank has its
    own loader batch the scale is world_size / base_world_size, and with `split_batches` it is 1, because there the
    global batch does not depend on the number of ranks. Accumulation is part of both batches: only `base_batch_size`
    can say that the base run accumulated differently.

    Args:
        loader_batch_size: The `batch_size` of the `DataLoader`.
        world_size: Ranks of the process group.
        accumulate_grad_batches: Loader batches per optimizer step and rank.
        split_batches: True where all ranks share each loader batch.
        base_batch_size: The global batch that the learning rate was tuned for; wins over `base_world_size`.
        base_world_size: Without `base_batch_size`: the ranks that the learning rate was tuned for.

    Raises:
        ValueError: If a count is below 1, or `base_world_size` is given for a run with `split_batches`, where it could
            not say anything.
        TypeError: If a count is not an int.
    """
    _at_least_one(base_world_size=base_world_size)
    if base_batch_size is None:
        if split_batches and base_world_size != 1:
            raise ValueError(
                f"base_world_size={base_world_size} says nothing about a run with split_batches=True: its global batch"
                " is the loader's batch on any number of ranks. Give base_batch_size, the global batch that the"
                " learning rate was tuned for."
            )
        base_batch_size = global_batch_size(
            loader_batch_size,
            world_size=base_world_size,
            accumulate_grad_batches=accumulate_grad_batches,
            split_batches=split_batches,
        )
    return BatchScale(
        global_batch_size(
            loader_batch_size,
            world_size=world_size,
            accumulate_grad_batches=accumulate_grad_batches,
            split_batches=split_batches,
        ),
        base_batch_size,
    )


def nearest_even_batches(size: int, parts: int) -> tuple[int, ...]:
    """Return the batch sizes nearest to `size` that divide evenly by `parts`: `size` itself, or one on each side of it.

    Where `size` is below `parts` there is only the one above.
    """
    below = size - size % parts
    return (size,) if below == size else tuple(batch for batch in (below, below + parts) if batch)


class Contradiction(NamedTuple):
    """Two choices that are allowed together and rarely meant together.

    Attributes:
        kind: `"counted_twice"`, `"unchanged_batch"` or `"base_above_global"`.
        message: What was chosen, what it does, and what to do instead.
        multiplier: How many times an SGD step is the base step, by the gradient's growth and the learning rate's
            factor.
    """

    kind: str
    message: str
    multiplier: float


def _gradient_growth(rule_name: str, scale: float, nodes: int, base_nodes: int) -> float:
    """Return how many times the reduced gradient is the base run's, for the losses that the rule is meant for."""
    growth = {
        "sum": scale,
        "mean_of_node_sums": scale * base_nodes / nodes,
        "sum_of_node_means": nodes / base_nodes,
    }
    return growth.get(rule_name, 1.0)


def contradictions(
    rule_name: str,
    lr_scaling: str | ScaleFunction | Scaling,
    batch: BatchScale,
    *,
    nodes: int = 1,
    base_nodes: int = 1,
) -> list[Contradiction]:
    """Return what does not fit together in a choice of rule, scaling and batch; nothing for `lr_scaling="none"`.

    A summed gradient grows with the batch by itself: `"sum"` by the scale, `"mean_of_node_sums"` by the batch of a
    node, `"sum_of_node_means"` by the number of nodes. A scaled learning rate then counts the same growth again. Rules
    that are not named here, a user's own among them, are taken to be means.

    Args:
        rule_name: `Rule.name` of the reduction.
        lr_scaling: A key of `SCALINGS`, a function `scale -> factor`, or a `Scaling`.
        batch: What `batch_scale` returns.
        nodes: Nodes of this run.
        base_nodes: Nodes of the base run.
    """
    scaling = resolve_scaling(lr_scaling)
    if scaling.name == "none":
        return []
    scale, factor = batch.scale, scale_factor(scaling, batch.scale)
    growth = _gradient_growth(rule_name, scale, nodes, base_nodes)
    multiplier = growth * factor
    batches = f"global batch {batch.global_batch_size:g}, base batch {batch.base_batch_size:g}"
    found = []
    if growth != 1 and factor != 1:
        found.append(
            Contradiction(
                "counted_twice",
                f"reduction={rule_name!r} and lr_scaling={scaling.name!r} count the change of the batch twice"
                f" ({batches}): the gradient is already {growth:.6g} times the base run's and the learning rate is"
                f" {factor:.6g} times its own, so an SGD step is {multiplier:.6g} times the base step. Use"
                f" lr_scaling='none' with {rule_name!r}, or lr_scaling={scaling.name!r} with a mean such as"
                " 'normalized_sum' (sum losses) or 'weighted_mean'.",
                multiplier,
            )
        )
    if scale == 1:
        effect = "changes nothing" if factor == 1 else f"multiplies the learning rate by {factor:.6g} all the same"
        found.append(
            Contradiction(
                "unchanged_batch",
                f"lr_scaling={scaling.name!r} {effect}: the global batch is the base batch ({batches}). If the learning"
                " rate was tuned for another batch, give it as base_batch_size.",
                multiplier,
            )
        )
    elif scale < 1:
        found.append(
            Contradiction(
                "base_above_global",
                f"the base batch is larger than the global batch ({batches}): lr_scaling={scaling.name!r} multiplies"
                f" the learning rate by {factor:.6g}. If that is not meant, correct base_batch_size or base_world_size:"
                " both speak of the run that the learning rate was tuned for.",
                multiplier,
            )
        )
    return found
