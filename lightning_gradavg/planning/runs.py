"""One way to run a recipe: batches, steps, what becomes of the gradient, and what every scaling says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lightning_gradavg.planning.recipe import Recipe
from lightning_gradavg.rates.scaling import (
    SCALINGS,
    BatchScale,
    decoupled_weight_decay,
    scale_factor,
    scale_limit,
    scaled_hyperparameters,
    scaled_steps,
)

__all__ = ["Chunks", "Outcome", "Run", "chunks", "gradavg_run", "stock_ddp_run"]

WARMUP_EPOCHS = 5  # Goyal et al. 2017, section 2.2


@dataclass(frozen=True)
class Chunks:
    """Devices that hold the same number of samples of a full global batch.

    Attributes:
        samples: Samples per optimizer step on each of these devices.
        devices: How many devices.
        micro_batch_size: Most samples that such a device holds at once.
    """

    samples: int
    devices: int
    micro_batch_size: int


@dataclass(frozen=True)
class Outcome:
    """What one scaling says about one run.

    Attributes:
        lr_scaling: The name of the scaling.
        feasible: Whether the scaling can be applied.
        problem: Why not, or None.
        lr_factor: Factor of the learning rate, or None.
        hyperparameters: The optimizer's values under the scaling, or None.
        weight_decay: For AdamW whose weight decay is known, the value that keeps the decay per sample; else None. It is
            not part of any scaling and nothing applies it: see `decoupled_weight_decay`.
        lr_warmup_steps: Steps of the gradual warm-up from the base to the scaled learning rate (Goyal et al. 2017: five
            epochs), for `"linear"` above scale 1 where the size of the data set is known; else None.
        largest_global_batch_size: Where a smaller global batch would be feasible, the largest one; else None.
    """

    lr_scaling: str
    feasible: bool
    problem: str | None
    lr_factor: float | None
    hyperparameters: dict[str, Any] | None
    weight_decay: float | None
    lr_warmup_steps: int | None
    largest_global_batch_size: int | None


@dataclass(frozen=True)
class Run:
    """One way to run the recipe.

    Attributes:
        world_size: Number of ranks.
        loader_batch_size: The `batch_size` of the `DataLoader`.
        chunks: Samples per device and optimizer step.
        accumulate: Micro-batches per optimizer step and device.
        global_batch_size: Samples per optimizer step.
        scale: Global batch over the base run's.
        steps_per_epoch: Optimizer steps per epoch, or None where the size of the data set is not known.
        steps: Optimizer steps in all, or None where the recipe does not say.
        warmup_steps: Warm-up steps of the schedule, or None where the recipe does not say.
        mean_loss_gradient: What the optimizer sees when each loss is a mean.
        sum_loss_gradient: What the optimizer sees when each loss is a sum.
        sum_loss_divisor: How many times the gradient of a sum loss is too small.
        scalings: What each scaling says.
    """

    world_size: int
    loader_batch_size: int
    chunks: tuple[Chunks, ...]
    accumulate: int
    global_batch_size: int
    scale: float
    steps_per_epoch: int | None
    steps: int | None
    warmup_steps: int | None
    mean_loss_gradient: str
    sum_loss_gradient: str
    sum_loss_divisor: int
    scalings: tuple[Outcome, ...]


def chunks(size: int, devices: int, max_device_batch_size: int | None = None) -> tuple[Chunks, ...]:
    """Return the chunks of a global batch as `torch.chunk` cuts them, equal ones together, largest first.

    Args:
        size: Samples of the global batch.
        devices: Number of devices.
        max_device_batch_size: Most samples that a device may hold at once; None for no limit.
    """
    longest = -(-size // devices)
    full, rest = divmod(size, longest)
    counted = ((longest, full), (rest, int(rest > 0)), (0, devices - full - int(rest > 0)))
    return tuple(
        Chunks(samples, count, _even_share(samples, max_device_batch_size or longest))
        for samples, count in counted
        if count
    )


def _even_share(samples: int, limit: int) -> int:
    """Return the size of the largest of as few even parts of `samples` as keep to `limit`."""
    parts = -(-samples // limit)
    return -(-samples // parts) if parts else 0


def _outcome(lr_scaling: str, recipe: Recipe, scale: float, steps_per_epoch: int | None, steps: int | None) -> Outcome:
    base = recipe.hyperparameters
    try:
        values = {**base, **scaled_hyperparameters(lr_scaling, scale, base)}
    except ValueError as error:
        # The limit itself is not feasible, hence the largest integer strictly below it; the base batch always is.
        below = math.ceil(scale_limit(base) * recipe.global_batch_size) - 1 if "eps" in base else None
        largest = None if below is None else max(below, recipe.global_batch_size)
        return Outcome(
            lr_scaling=lr_scaling,
            feasible=False,
            problem=str(error),
            lr_factor=None,
            hyperparameters=None,
            weight_decay=None,
            lr_warmup_steps=None,
            largest_global_batch_size=largest,
        )
    factor = scale_factor(lr_scaling, scale)
    decay = None
    if recipe.optimizer == "adamw" and recipe.weight_decay is not None:
        decay = decoupled_weight_decay(recipe.weight_decay, scale, factor)
    warmup = None
    if lr_scaling == "linear" and factor > 1 and steps_per_epoch is not None:
        warmup = WARMUP_EPOCHS * steps_per_epoch
        warmup = warmup if steps is None else min(warmup, steps)
    return Outcome(
        lr_scaling=lr_scaling,
        feasible=True,
        problem=None,
        lr_factor=factor,
        hyperparameters=values,
        weight_decay=decay,
        lr_warmup_steps=warmup,
        largest_global_batch_size=None,
    )


def stock_ddp_run(recipe: Recipe, world_size: int) -> Run:
    """Return the recipe's script under stock DDP on `world_size` ranks, with nothing in it changed."""
    window = recipe.accumulate_grad_batches
    parts = world_size * window
    batch = BatchScale(recipe.batch_size * parts, recipe.global_batch_size)
    total = batch.global_batch_size
    steps_per_epoch, steps = recipe.steps_per_epoch_on(world_size), recipe.steps_on(world_size)
    return Run(
        world_size=world_size,
        loader_batch_size=recipe.batch_size,
        chunks=(Chunks(recipe.batch_size * window, world_size, recipe.batch_size),),
        accumulate=window,
        global_batch_size=total,
        scale=batch.scale,
        steps_per_epoch=steps_per_epoch,
        steps=steps,
        warmup_steps=recipe.warmup_steps,
        mean_loss_gradient=f"mean over {total}" if parts == 1 else f"mean of {parts} means",
        # Lightning divides every loss by the window, and DDP the sum over the ranks by their number.
        sum_loss_gradient=f"sum over {total}" if parts == 1 else f"sum over {total}, {parts} times too small",
        sum_loss_divisor=parts,
        scalings=tuple(_outcome(name, recipe, batch.scale, steps_per_epoch, steps) for name in SCALINGS),
    )


def gradavg_run(recipe: Recipe, world_size: int, global_batch: int, max_device_batch_size: int | None) -> Run:
    """Return the recipe with `split_batches=True`: `global_batch` samples per optimizer step, split over the ranks."""
    scale = BatchScale(global_batch, recipe.global_batch_size).scale
    split = chunks(global_batch, world_size, max_device_batch_size)
    per_epoch = None if recipe.dataset_size is None else -(-recipe.dataset_size // global_batch)
    if recipe.epochs is not None and per_epoch is not None:
        steps: int | None = recipe.epochs * per_epoch
    else:
        steps = None if recipe.steps is None else scaled_steps(recipe.steps, scale)
    return Run(
        world_size=world_size,
        loader_batch_size=global_batch,
        chunks=split,
        accumulate=-(-split[0].samples // split[0].micro_batch_size),
        global_batch_size=global_batch,
        scale=scale,
        steps_per_epoch=per_epoch,
        steps=steps,
        warmup_steps=None if recipe.warmup_steps is None else scaled_steps(recipe.warmup_steps, scale),
        mean_loss_gradient=f"mean over {global_batch}",
        sum_loss_gradient=f"sum over {global_batch}",
        sum_loss_divisor=1,
        scalings=tuple(_outcome(name, recipe, scale, per_epoch, steps) for name in SCALINGS),
    )
