"""From a recipe that works to a cluster: the batches, steps and learning rates of `gradavg plan`.

Three runs stand side by side: the base run, the run of this package that keeps (or names) the global batch, and stock
DDP with the unchanged script. A plan is one dictionary: the JSON of the command, whose tables show the same keys.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from lightning_gradavg.batches.chunks import chunk_bounds
from lightning_gradavg.rates.scaling import (
    SCALINGS,
    as_count,
    as_positive,
    counted_twice,
    scale_limit,
    scaled_steps,
)

__all__ = ["OPTIMIZERS", "Cluster", "Recipe", "counted", "make_plan"]

_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"sgd": {}, "adam": _ADAM, "adamw": _ADAM, "rmsprop": {"alpha": 0.99, "eps": 1e-8}}
)
"""The optimizers that a recipe may name, with the defaults of `torch.optim` for what a scaling may change."""

_COUNTS = ("batch_size", "devices", "accumulate_grad_batches", "steps", "epochs", "dataset_size", "warmup_steps")
_WARMUP_EPOCHS = 5  # Goyal et al. 2017, section 2.2

_Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """A training run whose learning rate is known to work. `gradavg plan --help` describes each field.

    `devices` is `--base-devices`. Of the optimizer's own options, None stands for the default of `torch.optim`.
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
        given, own = self._given, OPTIMIZERS.get(self.optimizer, {})
        for name in _COUNTS:
            as_count(name, given.get(name, 1), least=int(name != "warmup_steps"))
        foreign = [name for name in ("betas", "alpha", "eps") if name in given and name not in own]
        users = ", ".join(user for user in OPTIMIZERS if {*foreign} & {*OPTIMIZERS[user]})
        unknown, both = self.optimizer not in OPTIMIZERS, {"steps", "epochs"} <= given.keys()
        refused = {
            f"optimizer {self.optimizer!r} is not known. Use one of {', '.join(OPTIMIZERS)}.": unknown,
            f"{' and '.join(f'{name}={given[name]!r}' for name in foreign)} has no meaning for optimizer"
            f" {self.optimizer!r}. Leave it out, or use one of {users}.": foreign,
            f"eps must be finite and >= 0, got {self.eps!r}.": not 0 <= given.get("eps", 0) < math.inf,
            f"weight_decay must be finite and >= 0, got {self.weight_decay!r}.": (
                not 0 <= given.get("weight_decay", 0) < math.inf
            ),
            f"steps={self.steps} and epochs={self.epochs} both give the length. Leave one of them out.": both,
            f"epochs={self.epochs} needs the size of the data set to become steps. Give dataset_size.": (
                "epochs" in given and "dataset_size" not in given
            ),
        }
        for message in (message for message, holds in refused.items() if holds):
            raise ValueError(message)
        if own:
            scale_limit(self.hyperparameters)  # raises for smoothing constants that are out of range

    @property
    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step, the base batch."""
        return self.batch_size * self.devices * self.accumulate_grad_batches

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """What a scaling reads of the optimizer's parameter group."""
        return {"lr": self.lr, **{name: self._given.get(name, by) for name, by in OPTIMIZERS[self.optimizer].items()}}


@dataclass(frozen=True)
class Cluster:
    """Where to train now, on `devices_per_node` devices of each of `nodes` nodes."""

    nodes: int
    devices_per_node: int

    def __post_init__(self) -> None:
        for name, count in vars(self).items():
            as_count(name, count)


def counted(count: int, noun: str) -> str:
    """Return "1 node" or "2 nodes"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def _outcome(name: str, recipe: Recipe, scale: float, warmup: int | None) -> _Row:
    """Return what one scaling says about one run."""
    base, size, problem, largest = recipe.hyperparameters, recipe.global_batch_size, None, None
    factor, decay = SCALINGS[name].at(scale), recipe.weight_decay if recipe.optimizer == "adamw" else None
    try:
        values = {**base, **SCALINGS[name].hyperparameters(scale, base)}
    except ValueError as error:
        # The limit itself is not feasible, hence the largest integer strictly below it; the base batch always is.
        problem, largest = str(error), max(math.ceil(scale_limit(base) * size) - 1, size) if "eps" in base else None
    fits = problem is None
    return {
        "lr_scaling": name,
        "feasible": fits,
        "problem": problem,
        "lr_factor": factor if fits else None,
        "hyperparameters": values if fits else None,
        # A derivation of this project: a step decays the weights by lr * decay, and stands for `scale` base steps.
        "weight_decay": decay * scale / factor if fits and decay is not None else None,
        "lr_warmup_steps": warmup if fits and name == "linear" and factor > 1 else None,
        "largest_global_batch_size": largest,
    }


def _run(recipe: Recipe, chunks: Mapping[int, int], *, loader: int, at_once: int, shortened: float = 1) -> _Row:
    """Return one way to run a recipe.

    Args:
        recipe: The recipe.
        chunks: How many devices have so many samples of a global batch, the largest number of samples first.
        loader: The loader's batch size.
        at_once: Most samples that a device computes at once.
        shortened: By what the lengths of the recipe are divided.
    """
    pieces = {samples: max(1, -(-samples // at_once)) for samples in chunks}
    total = sum(samples * devices for samples, devices in chunks.items())
    scale, parts = total / recipe.global_batch_size, total // loader
    # Of stock DDP, too: its sampler pads to equal shares, the loader keeps its incomplete last batch, Lightning steps
    # at the end of an epoch whatever the window holds, and a ceiling of ceilings is the ceiling of the product.
    per_epoch = None if recipe.dataset_size is None else -(-recipe.dataset_size // total)
    steps, warmup = (
        None if count is None else scaled_steps(count, shortened) for count in (recipe.steps, recipe.warmup_steps)
    )
    if recipe.epochs is not None and per_epoch is not None:
        steps = recipe.epochs * per_epoch
    gradual = None if per_epoch is None else min(filter(None, (_WARMUP_EPOCHS * per_epoch, steps)))
    return {
        "world_size": sum(chunks.values()),
        "loader_batch_size": loader,
        "chunks": [
            {"samples": samples, "devices": devices, "micro_batch_size": -(-samples // pieces[samples])}
            for samples, devices in chunks.items()
        ],
        "accumulate": max(pieces.values()),
        "global_batch_size": total,
        "scale": scale,
        "steps_per_epoch": per_epoch,
        "steps": steps,
        "warmup_steps": warmup,
        "mean_loss_gradient": f"mean of {parts} means" if parts > 1 else f"mean over {total}",
        # Lightning divides every loss by the window, and DDP the sum over the ranks by their number.
        "sum_loss_gradient": f"sum over {total}" + f", {parts} times too small" * (parts > 1),
        "sum_loss_divisor": parts,
        "scalings": [_outcome(name, recipe, scale, gradual) for name in SCALINGS],
    }


def _verdict(factor: float, run: _Row) -> str:
    """Return what a learning rate of `factor` times the base value means for a mean loss in a run."""
    if run["scale"] == 1:
        return "right: the base step" if factor == 1 else f"wrong: {factor:.4g} times the base step"
    fitting = (name for name in ("none", "linear", "sqrt") if math.isclose(factor, SCALINGS[name].at(run["scale"])))
    return next((f"fits lr_scaling={name!r}" for name in fitting), "fits no lr_scaling")


def _noise(recipe: Recipe, noise: float, ours: _Row, stock: _Row) -> _Row:
    """Return what eta(B) = eta_max / (1 + B_noise / B), a formula for SGD, says (McCandlish et al. 2018, section 2.2).

    Linear scaling from B0 to B overshoots it by (B + B_noise) / (B0 + B_noise), which stays below 2 up to B = B_noise
    whatever the base batch, and grows without bound beyond: the limit is the noise scale itself.
    """
    most = recipe.lr * (1 + noise / recipe.global_batch_size) if recipe.optimizer == "sgd" else None
    lrs = [most and most / (1 + noise / run["global_batch_size"]) for run in (ours, stock)]
    return {"noise_scale": noise, "linear_scaling_limit": noise, "gradavg_lr": lrs[0], "stock_ddp_lr": lrs[1]}


def _notes(recipe: Recipe, plan: _Row, most_at_once: int | None) -> list[str]:
    """Return what the numbers of a plan do not say by themselves."""
    ours, stock, noise = plan["gradavg"], plan["stock_ddp"], plan["noise"] or {}
    total, ranks, most, least = ours["global_batch_size"], ours["world_size"], ours["chunks"][0], ours["chunks"][-1]
    base, last, parts = recipe.global_batch_size, (recipe.dataset_size or 0) % total, plan["base"]["sum_loss_divisor"]
    twice = counted_twice("sum", SCALINGS["linear"], total / base)
    decays = {each["lr_scaling"]: each["weight_decay"] for each in ours["scalings"] if each["weight_decay"]}
    limit = noise.get("linear_scaling_limit", math.nan)
    safe = f"linear scaling is safe to a global batch of about {limit:.3g}"
    beyond = f"the base batch of {base} is beyond it, and no linear scaling to a larger batch is safe"
    by_formula = {"GradAvg": (ours, noise.get("gradavg_lr")), "stock DDP": (stock, noise.get("stock_ddp_lr"))}
    notes = {
        f"Your noise scale is about {limit:.3g}: {safe if base < limit else beyond}. Up to it, linear scaling"
        " overshoots the optimal learning rate of SGD, eta(B) = eta_max / (1 + B_noise / B) (McCandlish et al. 2018,"
        " arXiv 1812.06162), by less than 2.": noise,
        f"For {recipe.optimizer} there is no such formula: B^a with a between 0.5 and 1 (same paper).": (
            noise and recipe.optimizer != "sgd"
        ),
        **{
            f"{name}, global batch {run['global_batch_size']}: by that formula lr {lr or 0:.6g}, where linear scaling"
            f" says {recipe.lr * run['scale']:.6g}.": lr is not None and run["scale"] != 1
            for name, (run, lr) in by_formula.items()
        },
        f"{counted(total, 'sample')} cannot be shared evenly by {counted(ranks, 'device')}: they are cut as torch.chunk"
        " cuts them, which reduction='weighted_mean' makes exact. Nearest global batches that divide evenly:"
        f" {' and '.join(map(str, plan['nearest_even_batch_sizes']))}.": most != least,
        f"{counted(least['devices'], 'device')} of {ranks} would get no sample of any global batch:"
        f" {counted(ranks - least['devices'], 'device')} would be as fast.": least["samples"] == 0,
        f"A device holds {most['micro_batch_size']} samples at once, and {recipe.batch_size} in the base run. If memory"
        f" does not allow that, give max_device_batch_size={recipe.batch_size}.": (
            most_at_once is None and most["micro_batch_size"] > recipe.batch_size
        ),
        f"The last global batch of an epoch holds {last} of {counted(total, 'sample')}; its mean is over those.": last,
        f"A sum loss of the base run was divided by {parts} (ranks times window), which reduction='sum' does not do:"
        f" its learning rate is the recipe's divided by {parts}: {recipe.lr / parts:.6g} at scale 1.": parts > 1,
        f"With a sum loss: {twice}": twice,
        **{
            f"Global batch {run['global_batch_size']}: {each['problem']}": each["largest_global_batch_size"] is not None
            for run in (ours, stock)
            for each in run["scalings"]
        },
        "No scaling changes AdamW's weight_decay. To keep the decay per sample it would be"
        f" {', '.join(f'{decay:.6g} with {name!r}' for name, decay in decays.items())}: a derivation of this project,"
        " not of the cited papers.": ours["scale"] != 1 and decays,
        "A loss that is a mean over tokens, or anything else than samples, needs their number as the weight:"
        " training_step returns {'loss': loss, 'weight': number of tokens}.": True,
    }
    return [note for note, holds in notes.items() if holds]


def _code(recipe: Recipe, cluster: Cluster, run: _Row, most_at_once: int | None) -> list[str]:
    options = {"reduction": "weighted_mean", "split_batches": True, "max_device_batch_size": most_at_once}
    if run["scale"] != 1:
        # The scaling that was derived for the optimizer, where it is feasible.
        warmups = {each["lr_scaling"]: each["lr_warmup_steps"] for each in run["scalings"] if each["feasible"]}
        name = "linear" if recipe.optimizer == "sgd" else "adam_sde" if "adam_sde" in warmups else "sqrt"
        options |= {"lr_scaling": name, "base_batch_size": recipe.global_batch_size, "lr_warmup_steps": warmups[name]}
    given = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
    return [
        f"DataLoader(dataset, batch_size={run['loader_batch_size']})",
        f"Trainer(num_nodes={cluster.nodes}, devices={cluster.devices_per_node}, strategy=GradAvgStrategy({given}))",
    ]


def make_plan(
    recipe: Recipe,
    cluster: Cluster,
    *,
    global_batch_size: int | None = None,
    max_device_batch_size: int | None = None,
    noise_scale: float | None = None,
) -> dict[str, Any]:
    """Return how to run `recipe` on `cluster`, and what stock DDP would make of it, as `gradavg plan --json` prints it.

    Batches are in samples, lengths in optimizer steps, and None is not known:

    - `recipe` and `cluster` repeat the input.
    - `base`, `gradavg` and `stock_ddp` are three runs: the recipe, this package, and stock DDP with the same script.
      Of their `chunks`, each says how many devices have so many samples of a full global batch, and hold at once.
      Of their `scalings`, each says what one `lr_scaling` makes of the hyperparameters, or why it does not fit. Nothing
      applies its `weight_decay`, which keeps AdamW's decay per sample.
    - `nearest_even_batch_sizes` divide evenly by the ranks.
    - `advice` judges common advice for another number of ranks, for mean losses.
    - `noise` has the limit of linear scaling and SGD's optimal rates, where the noise scale is given.
    - `notes` and `code` are lines of text.

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
    base_size, ranks = recipe.global_batch_size, cluster.nodes * cluster.devices_per_node
    total = base_size if global_batch_size is None else as_count("global_batch_size", global_batch_size)
    at_once = total if max_device_batch_size is None else as_count("max_device_batch_size", max_device_batch_size)
    share, batch = recipe.batch_size * recipe.accumulate_grad_batches, recipe.batch_size
    base, stock = (_run(recipe, {share: each}, loader=batch, at_once=batch) for each in (recipe.devices, ranks))
    if (base["warmup_steps"] or 0) > (base["steps"] or math.inf):
        raise ValueError(f"warmup_steps={base['warmup_steps']} is longer than the recipe's {base['steps']} steps.")
    chunks = Counter(stop - start for start, stop in chunk_bounds(total, ranks))
    ours = _run(recipe, chunks, loader=total, at_once=at_once, shortened=total / base_size)
    ratio = ranks / recipe.devices
    factors = {
        "keep it": 1.0,
        f"divide it by {ratio:.4g} (ranks)": 1 / ratio,
        f"multiply it by {ratio:.4g} (ranks)": ratio,
        f"multiply it by {math.sqrt(ratio):.4g} (sqrt of ranks)": math.sqrt(ratio),
    }
    plan: _Row = {
        "recipe": asdict(recipe),
        "cluster": asdict(cluster),
        "base": base,
        "gradavg": ours,
        "stock_ddp": stock,
        "nearest_even_batch_sizes": [size for size in sorted({total - total % ranks, total + -total % ranks}) if size],
        "advice": [
            {"text": text, "lr": recipe.lr * by, "gradavg": _verdict(by, ours), "stock_ddp": _verdict(by, stock)}
            for text, by in factors.items()
            if ratio != 1
        ],
        "noise": None if noise_scale is None else _noise(recipe, as_positive("noise_scale", noise_scale), ours, stock),
    }
    plan["notes"] = _notes(recipe, plan, max_device_batch_size)
    plan["code"] = _code(recipe, cluster, ours, max_device_batch_size)
    return plan
