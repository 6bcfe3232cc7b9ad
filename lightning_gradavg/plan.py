"""From a recipe that works to a cluster: the batches, steps and learning rates of `gradavg plan`.

Three runs stand side by side: the base run, the run of this package that keeps (or names) the global batch, and stock
DDP with the unchanged script. Fields are those of the JSON (docs/api.md): batches in samples, lengths in optimizer
steps, None for what is not known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lightning_gradavg.batches.chunks import chunk_bounds
from lightning_gradavg.rates.scaling import (
    SCALINGS,
    BatchScale,
    as_count,
    as_positive,
    contradictions,
    global_batch_size,
    scale_factor,
    scale_limit,
    scaled_hyperparameters,
    scaled_steps,
)

__all__ = [
    "OPTIMIZERS",
    "Advice",
    "Chunks",
    "Cluster",
    "NoiseAdvice",
    "Outcome",
    "Plan",
    "Recipe",
    "Run",
    "chunks",
    "counted",
    "make_plan",
    "nearest_even_batches",
]

_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"sgd": {}, "adam": _ADAM, "adamw": _ADAM, "rmsprop": {"alpha": 0.99, "eps": 1e-8}}
)
"""The optimizers that a recipe may name, with the defaults of `torch.optim` for what a scaling may change."""

_COUNTS = ("batch_size", "devices", "accumulate_grad_batches", "steps", "epochs", "dataset_size", "warmup_steps")
_WARMUP_EPOCHS = 5  # Goyal et al. 2017, section 2.2


@dataclass(frozen=True)
class Recipe:
    """A training run whose learning rate is known to work.

    Attributes:
        batch_size: The `batch_size` of its `DataLoader`.
        lr: Its learning rate.
        devices: Its DDP ranks, each with its own loader batch. `DataParallel`, which shares one, counts as 1.
        accumulate_grad_batches: Loader batches per optimizer step and rank.
        optimizer: A key of `OPTIMIZERS`; `betas`, `alpha` and `eps` are its own, None for those of `torch.optim`.
        weight_decay: Its weight decay; read for AdamW, whose decay depends on the batch.
        steps: Its length, or `epochs` with `dataset_size`.
        warmup_steps: The warm-up of its schedule.
    """

    batch_size: int
    lr: float
    devices: int = 1
    accumulate_grad_batches: int = 1
    optimizer: str = "sgd"
    betas: tuple[float, float] | None = None
    alpha: float | None = None
    eps: float | None = None
    weight_decay: float | None = None
    steps: int | None = None
    epochs: int | None = None
    dataset_size: int | None = None
    warmup_steps: int | None = None

    def __post_init__(self) -> None:
        as_positive("lr", self.lr)
        given, defaults = self._given, OPTIMIZERS.get(self.optimizer, {})
        known = self.optimizer in OPTIMIZERS
        for name in _COUNTS:
            as_count(name, given.get(name, 1), least=int(name != "warmup_steps"))
        foreign = sorted({"betas", "alpha", "eps"} & given.keys() - defaults.keys())
        users = [user for user in OPTIMIZERS if foreign and foreign[0] in OPTIMIZERS[user]]
        decay = given.get("weight_decay", 0)
        refused = {
            f"optimizer {self.optimizer!r} is not known. Use one of {', '.join(OPTIMIZERS)}.": not known,
            f"{' and '.join(f'{name}={given[name]!r}' for name in foreign)} has no meaning for optimizer"
            f" {self.optimizer!r}. Leave it out, or use one of {', '.join(users)}.": foreign,
            f"eps must be finite and >= 0, got {self.eps!r}.": not 0 <= given.get("eps", 0) < math.inf,
            f"weight_decay must be finite and >= 0, got {decay!r}.": not 0 <= decay < math.inf,
            f"steps={self.steps} and epochs={self.epochs} both give the length. Leave one of them out.": (
                {"steps", "epochs"} <= given.keys()
            ),
            f"epochs={self.epochs} needs the size of the data set to become steps. Give dataset_size.": (
                "epochs" in given and "dataset_size" not in given
            ),
        }
        for message in [message for message, holds in refused.items() if holds]:
            raise ValueError(message)
        if defaults:
            scale_limit(self.hyperparameters)  # raises for smoothing constants that are out of range

    @property
    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step, the base batch."""
        return global_batch_size(
            self.batch_size, world_size=self.devices, accumulate_grad_batches=self.accumulate_grad_batches
        )

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """What a scaling reads of the optimizer's parameter group."""
        defaults = OPTIMIZERS[self.optimizer]
        return {"lr": self.lr, **{name: self._given.get(name, default) for name, default in defaults.items()}}


@dataclass(frozen=True)
class Cluster:
    """Where to train now, on `devices_per_node` devices of each of `nodes` nodes."""

    nodes: int
    devices_per_node: int

    def __post_init__(self) -> None:
        as_count("nodes", self.nodes)
        as_count("devices_per_node", self.devices_per_node)

    @property
    def world_size(self) -> int:  # noqa: D102
        return self.nodes * self.devices_per_node


@dataclass(frozen=True)
class Chunks:
    """How many devices have this many samples of a full global batch, and how many of them they hold at once."""

    samples: int
    devices: int
    micro_batch_size: int


@dataclass(frozen=True)
class Outcome:
    """What one scaling says about one run; nothing applies the weight decay that keeps AdamW's decay per sample."""

    lr_scaling: str
    feasible: bool
    problem: str | None = None
    lr_factor: float | None = None
    hyperparameters: dict[str, Any] | None = None
    weight_decay: float | None = None
    lr_warmup_steps: int | None = None
    largest_global_batch_size: int | None = None


@dataclass(frozen=True)
class Run:
    """One way to run the recipe."""

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


@dataclass(frozen=True)
class Advice:
    """A learning rate that is often recommended for more ranks, and what it does to a mean loss in two runs."""

    text: str
    lr: float
    gradavg: str
    stock_ddp: str


@dataclass(frozen=True)
class NoiseAdvice:
    """What a gradient noise scale in samples says: the limit of linear scaling, and SGD's optimal rates in two runs."""

    noise_scale: float
    linear_scaling_limit: float
    gradavg_lr: float | None
    stock_ddp_lr: float | None


@dataclass(frozen=True)
class Plan:
    """The answer of `gradavg plan`: three runs, common advice judged, and how to write it down."""

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


def counted(count: int, noun: str) -> str:
    """Return "1 node" or "2 nodes"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def nearest_even_batches(size: int, parts: int) -> tuple[int, ...]:
    """Return the batch sizes nearest to `size` that divide evenly by `parts`: `size` itself, or one on each side."""
    below = size - size % parts
    return (size,) if below == size else tuple(filter(None, (below, below + parts)))


def chunks(size: int, devices: int, max_device_batch_size: int | None = None) -> tuple[Chunks, ...]:
    """Return the chunks of a global batch as `torch.chunk` cuts them, equal ones together, largest first."""
    counts = Counter(stop - start for start, stop in chunk_bounds(size, devices))
    pieces = {samples: max(1, -(-samples // (max_device_batch_size or size))) for samples in counts}
    return tuple(Chunks(samples, count, -(-samples // pieces[samples])) for samples, count in counts.items())


def _outcome(name: str, recipe: Recipe, scale: float, warmup: int | None) -> Outcome:
    base = recipe.hyperparameters
    try:
        values = {**base, **scaled_hyperparameters(name, scale, base)}
    except ValueError as error:
        # The limit itself is not feasible, hence the largest integer strictly below it; the base batch always is.
        size = recipe.global_batch_size
        largest = max(math.ceil(scale_limit(base) * size) - 1, size) if "eps" in base else None
        return Outcome(name, feasible=False, problem=str(error), largest_global_batch_size=largest)
    factor, decay = scale_factor(name, scale), recipe.weight_decay if recipe.optimizer == "adamw" else None
    # A derivation of this project: a step decays the weights by lr * decay, and stands for `scale` base steps.
    kept = None if decay is None else decay * scale / factor
    return Outcome(name, True, None, factor, values, kept, warmup if name == "linear" and factor > 1 else None)


def _run(recipe: Recipe, split: tuple[Chunks, ...], *, loader_batch_size: int, shortened: float = 1) -> Run:
    """Return the run whose global batches are split in this way, and whose schedule is shortened by this factor."""
    total = sum(chunk.samples * chunk.devices for chunk in split)
    scale, parts = total / recipe.global_batch_size, total // loader_batch_size
    # Of stock DDP, too: its sampler pads to equal shares, the loader keeps its incomplete last batch, Lightning steps
    # at the end of an epoch whatever the window holds, and a ceiling of ceilings is the ceiling of the product.
    per_epoch = None if recipe.dataset_size is None else -(-recipe.dataset_size // total)
    steps, warmup = (
        None if count is None else scaled_steps(count, shortened) for count in (recipe.steps, recipe.warmup_steps)
    )
    if recipe.epochs is not None and per_epoch is not None:
        steps = recipe.epochs * per_epoch
    gradual = None if per_epoch is None else min(filter(None, (_WARMUP_EPOCHS * per_epoch, steps)))
    return Run(
        world_size=sum(chunk.devices for chunk in split),
        loader_batch_size=loader_batch_size,
        chunks=split,
        accumulate=-(-split[0].samples // split[0].micro_batch_size),
        global_batch_size=total,
        scale=scale,
        steps_per_epoch=per_epoch,
        steps=steps,
        warmup_steps=warmup,
        mean_loss_gradient=f"mean of {parts} means" if parts > 1 else f"mean over {total}",
        # Lightning divides every loss by the window, and DDP the sum over the ranks by their number.
        sum_loss_gradient=f"sum over {total}" + f", {parts} times too small" * (parts > 1),
        sum_loss_divisor=parts,
        scalings=tuple(_outcome(name, recipe, scale, gradual) for name in SCALINGS),
    )


def _stock_ddp_run(recipe: Recipe, world_size: int) -> Run:
    """Return the run of the recipe's script under stock DDP, with nothing in it changed."""
    share = Chunks(recipe.batch_size * recipe.accumulate_grad_batches, world_size, recipe.batch_size)
    return _run(recipe, (share,), loader_batch_size=recipe.batch_size)


def _verdict(factor: float, scale: float) -> str:
    """Return what a learning rate of `factor` times the base value means for a mean loss at this scale."""
    if scale == 1:
        return "right: the base step" if factor == 1 else f"wrong: {factor:.4g} times the base step"
    fitting = (name for name in ("none", "linear", "sqrt") if math.isclose(factor, scale_factor(name, scale)))
    return next((f"fits lr_scaling={name!r}" for name in fitting), "fits no lr_scaling")


def _advice(recipe: Recipe, gradavg: Run, stock: Run) -> tuple[Advice, ...]:
    ratio = gradavg.world_size / recipe.devices
    factors = {
        "keep it": 1.0,
        f"divide it by {ratio:.4g} (ranks)": 1 / ratio,
        f"multiply it by {ratio:.4g} (ranks)": ratio,
        f"multiply it by {math.sqrt(ratio):.4g} (sqrt of ranks)": math.sqrt(ratio),
    }
    return tuple(
        Advice(text, recipe.lr * factor, _verdict(factor, gradavg.scale), _verdict(factor, stock.scale))
        for text, factor in factors.items()
        if ratio != 1
    )


def _noise_advice(recipe: Recipe, gradavg: Run, stock: Run, noise_scale: float) -> NoiseAdvice:
    """Return what eta(B) = eta_max / (1 + B_noise / B), a formula for SGD, says (McCandlish et al. 2018, section 2.2).

    Linear scaling from B0 to B overshoots it by (B + B_noise) / (B0 + B_noise), which stays below 2 up to B = B_noise
    whatever the base batch, and grows without bound beyond: the limit is the noise scale itself.
    """
    noise, base = as_positive("noise_scale", noise_scale), recipe.global_batch_size
    ratios = [(1 + noise / base) / (1 + noise / run.global_batch_size) for run in (gradavg, stock)]
    return NoiseAdvice(noise, noise, *(recipe.lr * ratio if recipe.optimizer == "sgd" else None for ratio in ratios))


def _noise_notes(recipe: Recipe, gradavg: Run, stock: Run, noise: NoiseAdvice) -> Iterator[str]:
    base, limit = recipe.global_batch_size, noise.linear_scaling_limit
    safe = f"linear scaling is safe to a global batch of about {limit:.3g}"
    beyond = f"the base batch of {base} is beyond it, and no linear scaling to a larger batch is safe"
    yield (
        f"Your noise scale is about {noise.noise_scale:.3g}: {safe if base < limit else beyond}. Up to it, linear"
        " scaling overshoots the optimal learning rate of SGD, eta(B) = eta_max / (1 + B_noise / B) (McCandlish et al."
        " 2018, arXiv 1812.06162), by less than 2."
    )
    for name, run, lr in (("GradAvg", gradavg, noise.gradavg_lr), ("stock DDP", stock, noise.stock_ddp_lr)):
        if lr is None:
            yield f"For {recipe.optimizer} there is no such formula: B^a with a between 0.5 and 1 (same paper)."
            return
        if run.scale != 1:
            yield (
                f"{name}, global batch {run.global_batch_size}: by that formula lr {lr:.6g}, where linear scaling says"
                f" {recipe.lr * run.scale:.6g}."
            )


def _notes(recipe: Recipe, base: Run, gradavg: Run, stock: Run, max_device_batch_size: int | None) -> Iterator[str]:
    total, ranks, most, least = gradavg.global_batch_size, gradavg.world_size, gradavg.chunks[0], gradavg.chunks[-1]
    last, parts = (recipe.dataset_size or 0) % total, base.sum_loss_divisor
    twice = contradictions("sum", "linear", BatchScale(total, recipe.global_batch_size)).get("counted_twice")
    decays = {outcome.lr_scaling: outcome.weight_decay for outcome in gradavg.scalings if outcome.weight_decay}
    refused = {
        f"Global batch {run.global_batch_size}: {outcome.problem}": outcome.largest_global_batch_size is not None
        for run in (gradavg, stock)
        for outcome in run.scalings
    }
    notes = {
        f"{counted(total, 'sample')} cannot be shared evenly by {counted(ranks, 'device')}: they are cut as torch.chunk"
        " cuts them, which reduction='weighted_mean' makes exact. Nearest global batches that divide evenly:"
        f" {' and '.join(map(str, nearest_even_batches(total, ranks)))}.": most != least,
        f"{counted(least.devices, 'device')} of {ranks} would get no sample of any global batch:"
        f" {counted(ranks - least.devices, 'device')} would be as fast.": least.samples == 0,
        f"A device holds {most.micro_batch_size} samples at once, and {recipe.batch_size} in the base run. If memory"
        f" does not allow that, give max_device_batch_size={recipe.batch_size}.": (
            max_device_batch_size is None and most.micro_batch_size > recipe.batch_size
        ),
        f"The last global batch of an epoch holds {last} of {counted(total, 'sample')}; its mean is over those.": last,
        f"A sum loss of the base run was divided by {parts} (ranks times window), which reduction='sum' does not do:"
        f" its learning rate is the recipe's divided by {parts}: {recipe.lr / parts:.6g} at scale 1.": parts > 1,
        f"With a sum loss: {twice}": twice,
        **refused,
        "No scaling changes AdamW's weight_decay. To keep the decay per sample it would be"
        f" {', '.join(f'{decay:.6g} with {name!r}' for name, decay in decays.items())}: a derivation of this project,"
        " not of the cited papers.": gradavg.scale != 1 and decays,
        "A loss that is a mean over tokens, or anything else than samples, needs their number as the weight:"
        " training_step returns {'loss': loss, 'weight': number of tokens}.": True,
    }
    return (note for note, holds in notes.items() if holds)


def _code(recipe: Recipe, cluster: Cluster, run: Run, max_device_batch_size: int | None) -> tuple[str, ...]:
    options = {"reduction": "weighted_mean", "split_batches": True, "max_device_batch_size": max_device_batch_size}
    if run.scale != 1:
        # The scaling that was derived for the optimizer, where it is feasible.
        fit = {outcome.lr_scaling: outcome for outcome in run.scalings if outcome.feasible}
        name = next(name for name in ("adam_sde", "sqrt") if name in fit) if recipe.optimizer != "sgd" else "linear"
        options |= {"lr_scaling": name, "base_batch_size": recipe.global_batch_size}
        options |= {"lr_warmup_steps": fit[name].lr_warmup_steps}
    given = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
    return (
        f"DataLoader(dataset, batch_size={run.loader_batch_size})",
        f"Trainer(num_nodes={cluster.nodes}, devices={cluster.devices_per_node}, strategy=GradAvgStrategy({given}))",
    )


def make_plan(
    recipe: Recipe,
    cluster: Cluster,
    *,
    global_batch_size: int | None = None,
    max_device_batch_size: int | None = None,
    noise_scale: float | None = None,
) -> Plan:
    """Return how to run `recipe` on `cluster`, and what stock DDP would make of it.

    Args:
        recipe: The base recipe.
        cluster: Where to train now.
        global_batch_size: Samples of one optimizer step from now on; None keeps the base batch.
        max_device_batch_size: Most samples that a device can hold at once; None for no limit.
        noise_scale: The gradient noise scale in samples (examples/noise_scale.py measures it); None where unknown.

    Raises:
        ValueError: If a number is out of range, or the warm-up of the recipe longer than its steps.
        TypeError: If a number is of another type.
    """
    total = recipe.global_batch_size if global_batch_size is None else as_count("global_batch_size", global_batch_size)
    as_count("max_device_batch_size", 1 if max_device_batch_size is None else max_device_batch_size)
    base, stock = _stock_ddp_run(recipe, recipe.devices), _stock_ddp_run(recipe, cluster.world_size)
    if (base.warmup_steps or 0) > (base.steps or math.inf):
        raise ValueError(f"warmup_steps={base.warmup_steps} is longer than the recipe's {base.steps} steps.")
    gradavg = _run(
        recipe,
        chunks(total, cluster.world_size, max_device_batch_size),
        loader_batch_size=total,
        shortened=total / recipe.global_batch_size,
    )
    noise = None if noise_scale is None else _noise_advice(recipe, gradavg, stock, noise_scale)
    return Plan(
        recipe=recipe,
        cluster=cluster,
        base=base,
        gradavg=gradavg,
        stock_ddp=stock,
        nearest_even_batch_sizes=nearest_even_batches(total, cluster.world_size),
        advice=_advice(recipe, gradavg, stock),
        noise=noise,
        notes=(
            *(_noise_notes(recipe, gradavg, stock, noise) if noise else ()),
            *_notes(recipe, base, gradavg, stock, max_device_batch_size),
        ),
        code=_code(recipe, cluster, gradavg, max_device_batch_size),
    )
