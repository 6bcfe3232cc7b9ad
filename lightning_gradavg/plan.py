"""From a recipe that works to a cluster: the batches, steps and learning rates of `gradavg plan`.

Three runs stand side by side: the base run, the run of this package that keeps (or names) the global batch, and stock
DDP with the unchanged script. A plan is one dictionary: the JSON of the command, whose tables show the same keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, TypedDict

import torch

from lightning_gradavg._support.arguments import as_count
from lightning_gradavg.rates.scaling import SCALINGS, Scaling, as_positive, scale_limit, scaled_steps

__all__ = ["OPTIMIZERS", "Recipe", "counted", "make_plan"]

OPTIMIZERS: Mapping[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
_UNCHANGED = Fraction(1)
_WARMUP_EPOCHS = 5  # Goyal et al. 2017 (arXiv 1706.02677), section 2.2


# The parts of a plan, as `gradavg plan --json` prints them. None is what is not known.
class _Chunk(TypedDict):
    samples: int  # of a full global batch, on each of these devices
    devices: int
    micro_batch_size: int  # most samples that one of them holds at once


class _Outcome(TypedDict):
    """What one `lr_scaling` makes of the hyperparameters of a run."""

    lr_scaling: str
    hyperparameters: dict[str, Any] | None  # None if the scaling does not fit
    lr_warmup_steps: int | None
    problem: str | None  # why it does not fit
    largest_global_batch_size: int | None  # that fits; None if no batch does


class _Run(TypedDict):
    """One way to run a recipe."""

    world_size: int
    loader_batch_size: int
    chunks: list[_Chunk]
    accumulate: int  # micro-batches of the device that has most
    global_batch_size: int
    scale: float
    steps_per_epoch: int | None
    steps: int | None
    warmup_steps: int | None  # of the recipe's own schedule
    mean_loss_gradient: str  # what the gradient is if the loss of a loader batch is a mean
    sum_loss_gradient: str  # and if it is a sum
    scalings: list[_Outcome]


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
        as_count("batch_size", self.batch_size)
        as_count("devices", self.devices)
        as_count("accumulate_grad_batches", self.accumulate_grad_batches)
        if self.steps is not None:
            as_count("steps", self.steps)
        if self.dataset_size is not None:
            as_count("dataset_size", self.dataset_size)
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer {self.optimizer!r} is not known. Use one of {', '.join(OPTIMIZERS)}.")
        if self.warmup_steps is not None:
            as_count("warmup_steps", self.warmup_steps, least=0)
            if self.steps is not None and self.warmup_steps > self.steps:
                raise ValueError(f"warmup_steps={self.warmup_steps} is longer than the recipe's {self.steps} steps.")
        # The optimizer raises for what is out of range.
        OPTIMIZERS[self.optimizer]([torch.zeros(1)], **self.hyperparameters)

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step, the base batch."""
        return self.batch_size * self.devices * self.accumulate_grad_batches

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """What a scaling reads of the optimizer's parameter group."""
        if self.optimizer == "sgd":
            return {"lr": self.lr}
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps}


def counted(count: int, noun: str) -> str:
    """Return "1 node" or "2 nodes"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}s"


def _outcome(scaling: Scaling, recipe: Recipe, scale: float, warmup: int | None) -> _Outcome:
    """Return what one scaling says about a run at some scale; `warmup` is the length of the gradual warm-up."""
    base = recipe.hyperparameters
    outcome = _Outcome(
        lr_scaling=scaling.name,
        hyperparameters=None,
        lr_warmup_steps=None,
        problem=None,
        largest_global_batch_size=None,
    )
    # The gradual warm-up belongs to the linear scaling of Goyal et al.; a smaller batch needs none.
    if scaling.name == "linear" and scale > 1:
        outcome["lr_warmup_steps"] = warmup
    try:
        outcome["hyperparameters"] = {**base, **scaling.hyperparameters(scale, base)}
    except ValueError as error:
        # Only `"adam_sde"` refuses: every batch of an optimizer that is not Adam, and a scale at or beyond its limit.
        outcome["problem"] = str(error)
        if "eps" in base:
            outcome["largest_global_batch_size"] = _largest_feasible_batch(recipe)
    return outcome


def _largest_feasible_batch(recipe: Recipe) -> int:
    """Return the largest global batch that `"adam_sde"` allows: the largest integer strictly below its limit."""
    base_batch = recipe.global_batch_size
    limit = scale_limit(recipe.hyperparameters) * base_batch  # exact, a fraction
    # At the base batch the scale is 1, which is always feasible.
    return max(math.ceil(limit) - 1, base_batch)


def _ceil_divide(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _run(
    recipe: Recipe, devices_with: Mapping[int, int], *, loader: int, at_once: int, shortened: Fraction = _UNCHANGED
) -> _Run:
    """Return one way to run a recipe.

    Args:
        recipe: The recipe.
        devices_with: How many devices have so many samples of the global batch, by the samples, most samples first.
        loader: The loader's `batch_size`.
        at_once: Most samples that a device holds at once.
        shortened: What lengths in steps are divided by.
    """
    chunks = []
    accumulate = 1
    total = 0
    for samples, devices in devices_with.items():
        micro_batches = max(1, _ceil_divide(samples, at_once))  # of a device without samples: 1, of none
        micro_batch_size = _ceil_divide(samples, micro_batches)
        chunks.append(_Chunk(samples=samples, devices=devices, micro_batch_size=micro_batch_size))
        accumulate = max(accumulate, micro_batches)
        total += samples * devices
    scale = total / recipe.global_batch_size

    steps_per_epoch = None
    if recipe.dataset_size is not None:
        # Of stock DDP, too: its sampler pads to equal shares, the loader keeps its incomplete last batch, Lightning
        # steps at the end of an epoch whatever the window holds, and a ceiling of ceilings is the ceiling of the
        # product.
        steps_per_epoch = _ceil_divide(recipe.dataset_size, total)
    steps = None
    if recipe.steps is not None:
        steps = scaled_steps(recipe.steps, shortened)
    warmup_steps = None
    if recipe.warmup_steps is not None:
        warmup_steps = scaled_steps(recipe.warmup_steps, shortened)
    gradual_warmup = None
    if steps_per_epoch is not None:
        gradual_warmup = _WARMUP_EPOCHS * steps_per_epoch
        if steps is not None:
            gradual_warmup = min(gradual_warmup, steps)

    # Lightning divides every loss by the window, and DDP the sum over the ranks by their number: by `parts` in all,
    # which are the loader batches of a step.
    parts = total // loader
    mean_loss_gradient = f"mean over {total}"
    sum_loss_gradient = f"sum over {total}"
    if parts > 1:
        mean_loss_gradient = f"mean of {parts} means"
        sum_loss_gradient = f"sum over {total}, {parts} times too small"
    return {
        "world_size": sum(devices_with.values()),
        "loader_batch_size": loader,
        "chunks": chunks,
        "accumulate": accumulate,
        "global_batch_size": total,
        "scale": scale,
        "steps_per_epoch": steps_per_epoch,
        "steps": steps,
        "warmup_steps": warmup_steps,
        "mean_loss_gradient": mean_loss_gradient,
        "sum_loss_gradient": sum_loss_gradient,
        "scalings": [_outcome(scaling, recipe, scale, gradual_warmup) for scaling in SCALINGS.values()],
    }


def _notes(recipe: Recipe, run: _Run, even_sizes: Sequence[int], max_device_batch_size: int | None) -> list[str]:
    """Return what the numbers of a plan do not say by themselves."""
    notes = []
    total = run["global_batch_size"]
    if total not in even_sizes:
        notes.append(
            f"{counted(total, 'sample')} cannot be shared evenly by {counted(run['world_size'], 'device')}: some get"
            " one more than others, which is exact, as the mean is over samples. Nearest global batches that divide"
            f" evenly: {' and '.join(map(str, even_sizes))}."
        )
    if recipe.accumulate_grad_batches > 1:
        notes.append(
            f"The {recipe.accumulate_grad_batches} batches that the base run accumulates are one batch here, which the"
            " devices share: leave accumulate_grad_batches out. The loss is then one mean over it, and not the mean of"
            " their means."
        )
    most_at_once = run["chunks"][0]["micro_batch_size"]  # the first chunk is the largest
    if max_device_batch_size is None and most_at_once > recipe.batch_size:
        notes.append(
            f"A device holds {most_at_once} samples at once, and {recipe.batch_size} in the base run. If memory does"
            f" not allow that, give max_device_batch_size={recipe.batch_size}."
        )
    notes.append(
        "A loss that is a mean over tokens, or anything else than samples, needs their number as the weight:"
        " training_step returns {'loss': loss, 'weight': number of tokens}."
    )
    return notes


def _code(recipe: Recipe, nodes: int, devices: int, run: _Run, max_device_batch_size: int | None) -> list[str]:
    """Return the lines of Python that make a run."""
    options: dict[str, Any] = {"equivalent_to": "single_device"}
    if max_device_batch_size is not None:
        # The preset refuses batch norm that would see a batch in pieces, and a plan does not know the model.
        options = {"split_batches": True, "max_device_batch_size": max_device_batch_size}
    if run["scale"] != 1:
        outcome = _fitting_outcome(recipe, run)
        options["lr_scaling"] = outcome["lr_scaling"]
        options["base_batch_size"] = recipe.global_batch_size
        options["lr_warmup_steps"] = outcome["lr_warmup_steps"]
    arguments = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
    return [
        f"DataLoader(dataset, batch_size={run['loader_batch_size']})",
        f"Trainer(num_nodes={nodes}, devices={devices}, strategy=GradAvgStrategy({arguments}))",
    ]


def _fitting_outcome(recipe: Recipe, run: _Run) -> _Outcome:
    """Return the outcome of the scaling that was derived for the recipe's optimizer, where it is feasible.

    That is `"linear"` for SGD. For Adam it is `"adam_sde"`, and beyond its limit `"sqrt"`, which has the same learning
    rate.
    """
    outcomes = {outcome["lr_scaling"]: outcome for outcome in run["scalings"]}
    if recipe.optimizer == "sgd":
        return outcomes["linear"]
    if outcomes["adam_sde"]["problem"] is None:
        return outcomes["adam_sde"]
    return outcomes["sqrt"]


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
    ranks = as_count("nodes", nodes) * as_count("devices_per_node", devices_per_node)
    base_size = recipe.global_batch_size
    total = base_size
    if global_batch_size is not None:
        total = as_count("global_batch_size", global_batch_size)
    at_once = total
    if max_device_batch_size is not None:
        at_once = as_count("max_device_batch_size", max_device_batch_size)

    # The base run and stock DDP: every device has a loader of its own, and accumulates its batches.
    per_device = recipe.batch_size * recipe.accumulate_grad_batches
    base = _run(recipe, {per_device: recipe.devices}, loader=recipe.batch_size, at_once=recipe.batch_size)
    stock = _run(recipe, {per_device: ranks}, loader=recipe.batch_size, at_once=recipe.batch_size)
    # This package: one loader batch is the global batch, which the devices share. Larger chunks come first.
    samples, with_one_more = divmod(total, ranks)
    devices_with = {samples: ranks - with_one_more}
    if with_one_more > 0:
        devices_with = {samples + 1: with_one_more, **devices_with}
    gradavg = _run(recipe, devices_with, loader=total, at_once=at_once, shortened=Fraction(total, base_size))

    next_smaller = total - total % ranks
    next_larger = total + -total % ranks
    even_sizes = sorted({next_smaller, next_larger} - {0})  # one size if `total` is even itself
    return {
        "recipe": asdict(recipe),
        "cluster": {"nodes": nodes, "devices_per_node": devices_per_node},
        "base": base,
        "gradavg": gradavg,
        "stock_ddp": stock,
        "nearest_even_batch_sizes": even_sizes,
        "notes": _notes(recipe, gradavg, even_sizes, max_device_batch_size),
        "code": _code(recipe, nodes, devices_per_node, gradavg, max_device_batch_size),
    }
