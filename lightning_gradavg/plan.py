"""From a recipe that works to a cluster: the batches, steps and learning rates of `gradavg plan`.

Three runs stand side by side: the base run, the run of this package that keeps (or names) the global batch, and stock
DDP with the unchanged script. A plan is one dictionary: the JSON of the command, whose tables show the same keys.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch

from lightning_gradavg._support.arguments import as_count
from lightning_gradavg.batches.chunks import even_bounds
from lightning_gradavg.rates.scaling import SCALINGS, Scaling, as_positive, scale_limit, scaled_steps

__all__ = ["OPTIMIZERS", "Recipe", "counted", "make_plan"]

OPTIMIZERS: Mapping[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
_WARMUP_EPOCHS = 5  # Goyal et al. 2017, section 2.2

_Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """A training run whose learning rate is known to work. `gradavg plan --help` describes each field.

    `devices` is `--base-devices`. `betas` and `eps` are those of adam and adamw.
    """

    batch_size: int
    lr: float
    devices: int = 1
    accumulate_grad_batches: int = 1
    optimizer: str = "sgd"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    steps: int | None = None
    dataset_size: int | None = None
    warmup_steps: int | None = None

    def __post_init__(self) -> None:
        as_positive("lr", self.lr)
        for name in ("batch_size", "devices", "accumulate_grad_batches", "steps", "dataset_size"):
            if getattr(self, name) is not None:
                as_count(name, getattr(self, name))
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer {self.optimizer!r} is not known. Use one of {', '.join(OPTIMIZERS)}.")
        if as_count("warmup_steps", self.warmup_steps or 0, least=0) > (self.steps or math.inf):
            raise ValueError(f"warmup_steps={self.warmup_steps} is longer than the recipe's {self.steps} steps.")
        OPTIMIZERS[self.optimizer]([torch.zeros(1)], **self.hyperparameters)  # it raises for what is out of range

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step, the base batch."""
        return self.batch_size * self.devices * self.accumulate_grad_batches

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """What a scaling reads of the optimizer's parameter group."""
        return {"lr": self.lr} | ({} if self.optimizer == "sgd" else {"betas": self.betas, "eps": self.eps})


def counted(count: int, noun: str) -> str:
    """Return "1 node" or "2 nodes"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def _outcome(scaling: Scaling, recipe: Recipe, scale: float, warmup: int | None) -> _Row:
    """Return what one scaling says about one run."""
    base, size, values, problem, largest = recipe.hyperparameters, recipe.global_batch_size, None, None, None
    try:
        values = {**base, **scaling.hyperparameters(scale, base)}
    except ValueError as error:
        # The limit itself is not feasible, hence the largest integer strictly below it; the base batch always is.
        problem, largest = str(error), max(math.ceil(scale_limit(base) * size) - 1, size) if "eps" in base else None
    return {
        "lr_scaling": scaling.name,
        "hyperparameters": values,
        "lr_warmup_steps": warmup if scaling.name == "linear" and scale > 1 else None,
        "problem": problem,
        "largest_global_batch_size": largest,
    }


def _run(recipe: Recipe, chunks: Mapping[int, int], *, loader: int, at_once: int, shortened: float = 1) -> _Row:
    """Return one way to run a recipe; `chunks` says how many devices have so many samples, the largest number first."""
    pieces = {samples: max(1, -(-samples // at_once)) for samples in chunks}
    total = sum(samples * devices for samples, devices in chunks.items())
    scale, parts = total / recipe.global_batch_size, total // loader
    # Of stock DDP, too: its sampler pads to equal shares, the loader keeps its incomplete last batch, Lightning steps
    # at the end of an epoch whatever the window holds, and a ceiling of ceilings is the ceiling of the product.
    per_epoch = None if recipe.dataset_size is None else -(-recipe.dataset_size // total)
    lengths = (recipe.steps, recipe.warmup_steps)
    steps, warmup = (None if count is None else scaled_steps(count, shortened) for count in lengths)
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
        "scalings": [_outcome(scaling, recipe, scale, gradual) for scaling in SCALINGS.values()],
    }


def _notes(recipe: Recipe, ours: _Row, even: list[int], most_at_once: int | None) -> list[str]:
    """Return what the numbers of a plan do not say by themselves."""
    total, ranks, most = ours["global_batch_size"], ours["world_size"], ours["chunks"][0]["micro_batch_size"]
    notes = {
        f"{counted(total, 'sample')} cannot be shared evenly by {counted(ranks, 'device')}: some get one more than"
        " others, which reduction='weighted_mean' makes exact. Nearest global batches that divide evenly:"
        f" {' and '.join(map(str, even))}.": total not in even,
        f"A device holds {most} samples at once, and {recipe.batch_size} in the base run. If memory does not allow"
        f" that, give max_device_batch_size={recipe.batch_size}.": most_at_once is None and most > recipe.batch_size,
        "A loss that is a mean over tokens, or anything else than samples, needs their number as the weight:"
        " training_step returns {'loss': loss, 'weight': number of tokens}.": True,
    }
    return [note for note, holds in notes.items() if holds]


def _code(recipe: Recipe, nodes: int, devices: int, run: _Row, most_at_once: int | None) -> list[str]:
    options = {"reduction": "weighted_mean", "split_batches": True, "max_device_batch_size": most_at_once}
    if run["scale"] != 1:
        # The scaling that was derived for the optimizer, where it is feasible.
        fitting = {each["lr_scaling"]: each["lr_warmup_steps"] for each in run["scalings"] if not each["problem"]}
        name = "linear" if recipe.optimizer == "sgd" else "adam_sde" if "adam_sde" in fitting else "sqrt"
        options |= {"lr_scaling": name, "base_batch_size": recipe.global_batch_size, "lr_warmup_steps": fitting[name]}
    given = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
    return [
        f"DataLoader(dataset, batch_size={run['loader_batch_size']})",
        f"Trainer(num_nodes={nodes}, devices={devices}, strategy=GradAvgStrategy({given}))",
    ]


def make_plan(
    recipe: Recipe,
    *,
    nodes: int = 1,
    devices_per_node: int,
    global_batch_size: int | None = None,
    max_device_batch_size: int | None = None,
) -> dict[str, Any]:
    """Return how to run `recipe` on a cluster, and what stock DDP would make of it, as `gradavg plan --json` prints it.

    Batches are in samples, lengths in optimizer steps, and None is not known:

    - `recipe` and `cluster` repeat the input.
    - `base`, `gradavg` and `stock_ddp` are three runs: the recipe, this package, and stock DDP with the same script.
      Of their `chunks`, each says how many devices have so many samples of a full global batch, and hold at once.
      Of their `scalings`, each says what one `lr_scaling` makes of the hyperparameters, or why it does not fit.
    - `nearest_even_batch_sizes` divide evenly by the ranks.
    - `notes` and `code` are lines of text.

    Args:
        recipe: The base recipe.
        nodes: Number of nodes to train on now.
        devices_per_node: Devices of each of them.
        global_batch_size: Samples of one optimizer step from now on; None keeps the base batch.
        max_device_batch_size: Most samples that a device can hold at once; None for no limit.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If a number is of another type.
    """
    ranks, base_size = (
        as_count("nodes", nodes) * as_count("devices_per_node", devices_per_node),
        recipe.global_batch_size,
    )
    total = base_size if global_batch_size is None else as_count("global_batch_size", global_batch_size)
    at_once = total if max_device_batch_size is None else as_count("max_device_batch_size", max_device_batch_size)
    share, batch = recipe.batch_size * recipe.accumulate_grad_batches, recipe.batch_size
    base, stock = (_run(recipe, {share: each}, loader=batch, at_once=batch) for each in (recipe.devices, ranks))
    chunks = Counter(stop - start for start, stop in even_bounds(total, ranks))
    ours = _run(recipe, chunks, loader=total, at_once=at_once, shortened=total / base_size)
    even = [size for size in sorted({total - total % ranks, total + -total % ranks}) if size]
    return {
        "recipe": asdict(recipe),
        "cluster": {"nodes": nodes, "devices_per_node": devices_per_node},
        "base": base,
        "gradavg": ours,
        "stock_ddp": stock,
        "nearest_even_batch_sizes": even,
        "notes": _notes(recipe, ours, even, max_device_batch_size),
        "code": _code(recipe, nodes, devices_per_node, ours, max_device_batch_size),
    }
