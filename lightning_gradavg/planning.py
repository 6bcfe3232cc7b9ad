"""From a recipe to a cluster: the batches, steps and learning rates of `gradavg plan`.

Three runs stand side by side: the base run of the recipe, the run of this package that keeps (or names) the global
batch, and what stock DDP does with the unchanged script. Everything here is arithmetic on integers and on `scaling`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_gradavg.global_batch import BatchScale, contradictions, nearest_even_batches
from lightning_gradavg.recipe import Cluster, Recipe
from lightning_gradavg.runs import Run, gradavg_run, stock_ddp_run
from lightning_gradavg.scaling import scale_factor

__all__ = ["Advice", "Plan", "make_plan"]


@dataclass(frozen=True)
class Advice:
    """A learning rate that threads recommend for more devices, and what it does to a mean loss.

    Attributes:
        text: The advice.
        lr: The learning rate it gives.
        gradavg: What that means with the global batch of the run of this package.
        stock_ddp: What that means with the global batch of stock DDP.
    """

    text: str
    lr: float
    gradavg: str
    stock_ddp: str


@dataclass(frozen=True)
class Plan:
    """The answer of `gradavg plan`: three runs, the advice found in threads, and how to write it down.

    Attributes:
        recipe: The base recipe.
        cluster: Where to train now.
        base: The base run.
        gradavg: The run of this package.
        stock_ddp: The unchanged script under stock DDP on the cluster.
        nearest_even_batch_sizes: The global batch, or the nearest ones that divide evenly among the devices.
        advice: Learning rates found in threads; empty where the number of ranks did not change.
        notes: What does not fit into a table.
        code: The `DataLoader` and the `Trainer` of the run of this package, with one feasible `lr_scaling`.
    """

    recipe: Recipe
    cluster: Cluster
    base: Run
    gradavg: Run
    stock_ddp: Run
    nearest_even_batch_sizes: tuple[int, ...]
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]
    code: tuple[str, ...]


def _verdict(factor: float, scale: float) -> str:
    if scale == 1:
        if math.isclose(factor, 1):
            return "right: the base step"
        size = f"{factor:.4g} times too large" if factor > 1 else f"{1 / factor:.4g} times too small"
        return f"wrong: steps {size}"
    named = [name for name in ("none", "linear", "sqrt") if math.isclose(factor, scale_factor(name, scale))]
    return f"lr_scaling={named[0]!r}" if named else "no scaling"


def _advice(recipe: Recipe, gradavg: Run, stock: Run) -> tuple[Advice, ...]:
    ratio = gradavg.world_size / recipe.devices
    if ratio == 1:
        return ()
    factors = {
        "keep it": 1.0,
        f"divide it by {ratio:.4g} (ranks)": 1 / ratio,
        f"multiply it by {ratio:.4g} (ranks)": ratio,
        f"multiply it by {math.sqrt(ratio):.4g} (sqrt of ranks)": math.sqrt(ratio),
    }
    return tuple(
        Advice(text, recipe.lr * factor, _verdict(factor, gradavg.scale), _verdict(factor, stock.scale))
        for text, factor in factors.items()
    )


def _epoch_notes(dataset_size: int, gradavg: Run, stock: Run) -> list[str]:
    notes = []
    last = dataset_size % gradavg.global_batch_size
    if last:
        notes.append(
            f"The last global batch of an epoch holds {last} of {gradavg.global_batch_size} samples; its mean is over"
            f" those {last}."
        )
    padding = -dataset_size % stock.world_size
    if padding:
        notes.append(f"Stock DDP repeats {padding} sample(s) per epoch: equal shares for {stock.world_size} ranks.")
    if dataset_size < stock.global_batch_size:
        notes.append(
            f"The data set of {dataset_size} samples does not fill one global batch of stock DDP"
            f" ({stock.global_batch_size}): its real scale is smaller than the one shown."
        )
    return notes


def _notes(recipe: Recipe, gradavg: Run, stock: Run, max_device_batch_size: int | None) -> tuple[str, ...]:
    total, ranks, split = gradavg.global_batch_size, gradavg.world_size, gradavg.chunks
    notes = []
    if len(split) > 1:
        even = " and ".join(map(str, nearest_even_batches(total, ranks)))
        notes.append(
            f"{total} samples do not divide evenly by {ranks} devices: chunks as torch.chunk cuts them, made exact by"
            f" reduction='weighted_mean'. Nearest global batches that divide evenly: {even}."
        )
    if split[-1].samples == 0:
        idle = split[-1].devices
        notes.append(f"Devices without a sample of any global batch: {idle} of {ranks}. {ranks - idle} are as fast.")
    if max_device_batch_size is None and split[0].micro_batch_size > recipe.batch_size:
        notes.append(
            f"A device holds {split[0].micro_batch_size} samples at once, and {recipe.batch_size} in the base run. If"
            f" memory does not allow that, give max_device_batch_size={recipe.batch_size}."
        )
    if recipe.dataset_size is not None:
        notes += _epoch_notes(recipe.dataset_size, gradavg, stock)
    parts = recipe.devices * recipe.accumulate_grad_batches
    if parts > 1:
        notes.append(
            f"A sum loss of the base run was divided by {parts} (ranks times window); reduction='sum' does not do that,"
            f" so its learning rate is the recipe's divided by {parts}: {recipe.lr / parts:.6g} at scale 1."
        )
    twice = contradictions("sum", "linear", BatchScale(total, recipe.global_batch_size))
    notes += [f"With a sum loss: {found.message}" for found in twice if found.kind == "counted_twice"]
    for run in {run.global_batch_size: run for run in (gradavg, stock)}.values():
        notes += [
            f"Global batch {run.global_batch_size}: {outcome.problem}"
            for outcome in run.scalings
            if outcome.largest_global_batch_size is not None
        ]
    if gradavg.scale != 1 and gradavg.scalings[0].weight_decay is not None:
        decays = ", ".join(
            f"{outcome.weight_decay:.6g} with {outcome.lr_scaling!r}"
            for outcome in gradavg.scalings
            if outcome.weight_decay is not None
        )
        notes.append(
            f"No scaling changes AdamW's weight_decay. To keep the decay per sample it would be {decays}: a derivation"
            " of this project, not of the cited papers."
        )
    return tuple(notes)


def _code(recipe: Recipe, cluster: Cluster, run: Run, max_device_batch_size: int | None) -> tuple[str, ...]:
    options = ["reduction='weighted_mean'", "split_batches=True"]
    if max_device_batch_size is not None:
        options.append(f"max_device_batch_size={max_device_batch_size}")
    if run.scale != 1:
        # The scaling that was derived for the optimizer, where it is feasible.
        fit = {outcome.lr_scaling: outcome for outcome in run.scalings if outcome.feasible}
        name = "linear" if recipe.optimizer == "sgd" else "adam_sde" if "adam_sde" in fit else "sqrt"
        options += [f"lr_scaling={name!r}", f"base_batch_size={recipe.global_batch_size}"]
        if fit[name].lr_warmup_steps is not None:
            options.append(f"lr_warmup_steps={fit[name].lr_warmup_steps}")
    strategy = f"GradAvgStrategy({', '.join(options)})"
    return (
        f"DataLoader(dataset, batch_size={run.loader_batch_size})",
        f"Trainer(num_nodes={cluster.nodes}, devices={cluster.devices_per_node}, strategy={strategy})",
    )


def make_plan(
    recipe: Recipe,
    cluster: Cluster,
    *,
    global_batch_size: int | None = None,
    max_device_batch_size: int | None = None,
) -> Plan:
    """Return how to run `recipe` on `cluster`, and what stock DDP would have made of it.

    Args:
        recipe: The base recipe.
        cluster: Where to train now.
        global_batch_size: Samples of one optimizer step from now on; None keeps the base batch.
        max_device_batch_size: Most samples that a device can hold at once; None for no limit.

    Raises:
        ValueError: If `global_batch_size` or `max_device_batch_size` is below 1.
    """
    for name, value in (("global_batch_size", global_batch_size), ("max_device_batch_size", max_device_batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}.")
    total = recipe.global_batch_size if global_batch_size is None else global_batch_size
    gradavg = gradavg_run(recipe, cluster.world_size, total, max_device_batch_size)
    stock = stock_ddp_run(recipe, cluster.world_size)
    return Plan(
        recipe=recipe,
        cluster=cluster,
        base=stock_ddp_run(recipe, recipe.devices),
        gradavg=gradavg,
        stock_ddp=stock,
        nearest_even_batch_sizes=nearest_even_batches(total, cluster.world_size),
        advice=_advice(recipe, gradavg, stock),
        notes=_notes(recipe, gradavg, stock, max_device_batch_size),
        code=_code(recipe, cluster, gradavg, max_device_batch_size),
    )
