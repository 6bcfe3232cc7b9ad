"""From a recipe to a cluster: the batches, steps and learning rates of `gradavg plan`.

Three runs stand side by side: the base run of the recipe, the run of this package that keeps (or names) the global
batch, and what stock DDP does with the unchanged script. Everything here is arithmetic on integers and on `scaling`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_gradavg.planning.noise import linear_scaling_limit, optimal_lr_ratio
from lightning_gradavg.planning.recipe import Cluster, Recipe
from lightning_gradavg.planning.runs import Run, gradavg_run, stock_ddp_run
from lightning_gradavg.rates.scaling import BatchScale, contradictions, nearest_even_batches, scale_factor

__all__ = ["Advice", "NoiseAdvice", "Plan", "make_plan"]


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
class NoiseAdvice:
    """What a measured gradient noise scale says about the learning rate; see `lightning_gradavg.planning.noise`.

    Attributes:
        noise_scale: The noise scale, in samples.
        linear_scaling_limit: The largest global batch that linear scaling is called safe to.
        gradavg_lr: The optimal learning rate of SGD at the global batch of the run of this package, if that of the
            recipe is optimal at the base batch; None for other optimizers, which the formula is not about.
        stock_ddp_lr: Likewise at the global batch of stock DDP.
    """

    noise_scale: float
    linear_scaling_limit: float
    gradavg_lr: float | None
    stock_ddp_lr: float | None


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
        noise: What the measured noise scale says, or None where none was given.
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
    noise: NoiseAdvice | None
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


def _noise_advice(recipe: Recipe, gradavg: Run, stock: Run, noise_scale: float) -> NoiseAdvice:
    def lr(run: Run) -> float | None:
        if recipe.optimizer != "sgd":
            return None
        return recipe.lr * optimal_lr_ratio(noise_scale, run.global_batch_size, recipe.global_batch_size)

    return NoiseAdvice(noise_scale, linear_scaling_limit(noise_scale), lr(gradavg), lr(stock))


def _noise_notes(recipe: Recipe, gradavg: Run, stock: Run, noise: NoiseAdvice) -> list[str]:
    limit, base = noise.linear_scaling_limit, recipe.global_batch_size
    verdict = (
        f"linear scaling is safe to a global batch of about {limit:.3g}"
        if base < limit
        else f"the base batch of {base} is beyond it, and no linear scaling to a larger batch is safe"
    )
    source = (
        "By eta(B) = eta_max / (1 + B_noise / B) (McCandlish et al. 2018, arXiv 1812.06162) it overshoots the optimal"
        " learning rate of SGD by less than 2 up to the noise scale, and by ever more beyond."
    )
    notes = [f"Your noise scale is about {noise.noise_scale:.3g}: {verdict}. {source}"]
    if recipe.optimizer != "sgd":
        notes.append(
            f"For {recipe.optimizer} there is no such formula; the optimal learning rate then grows like B^a with a"
            " between 0.5 and 1 (same paper), and stops to grow near the noise scale, too."
        )
    for name, run, lr in (("GradAvg", gradavg, noise.gradavg_lr), ("stock DDP", stock, noise.stock_ddp_lr)):
        if lr is not None and run.scale != 1:
            notes.append(
                f"{name}, global batch {run.global_batch_size}: by that formula lr {lr:.6g}, where linear scaling says"
                f" {recipe.lr * run.scale:.6g}."
            )
    return notes


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
    found = contradictions("sum", "linear", BatchScale(total, recipe.global_batch_size))
    if "counted_twice" in found:
        notes.append(f"With a sum loss: {found['counted_twice']}")
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
    noise_scale: float | None = None,
) -> Plan:
    """Return how to run `recipe` on `cluster`, and what stock DDP would have made of it.

    Args:
        recipe: The base recipe.
        cluster: Where to train now.
        global_batch_size: Samples of one optimizer step from now on; None keeps the base batch.
        max_device_batch_size: Most samples that a device can hold at once; None for no limit.
        noise_scale: The gradient noise scale in samples, as `GradientNoiseScale` measures it; None if it is not known.

    Raises:
        ValueError: If `global_batch_size` or `max_device_batch_size` is below 1, or `noise_scale` not finite and > 0.
    """
    for name, value in (("global_batch_size", global_batch_size), ("max_device_batch_size", max_device_batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}.")
    total = recipe.global_batch_size if global_batch_size is None else global_batch_size
    gradavg = gradavg_run(recipe, cluster.world_size, total, max_device_batch_size)
    stock = stock_ddp_run(recipe, cluster.world_size)
    noise = None if noise_scale is None else _noise_advice(recipe, gradavg, stock, noise_scale)
    noise_notes = [] if noise is None else _noise_notes(recipe, gradavg, stock, noise)
    return Plan(
        recipe=recipe,
        cluster=cluster,
        base=stock_ddp_run(recipe, recipe.devices),
        gradavg=gradavg,
        stock_ddp=stock,
        nearest_even_batch_sizes=nearest_even_batches(total, cluster.world_size),
        advice=_advice(recipe, gradavg, stock),
        noise=noise,
        notes=(*noise_notes, *_notes(recipe, gradavg, stock, max_device_batch_size)),
        code=_code(recipe, cluster, gradavg, max_device_batch_size),
    )
