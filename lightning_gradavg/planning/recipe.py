"""What `gradavg plan` is asked: the recipe that works, and the cluster that it moves to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lightning_gradavg.rates.scaling import as_positive, global_batch_size

__all__ = ["OPTIMIZERS", "Cluster", "Recipe"]

_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"sgd": {}, "adam": _ADAM, "adamw": _ADAM, "rmsprop": {"alpha": 0.99, "eps": 1e-8}}
)
"""The optimizers that a recipe may name, with the defaults of `torch.optim` for what a scaling may change."""


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}.")


@dataclass(frozen=True)
class Recipe:
    """A training run whose learning rate is known to work.

    Attributes:
        batch_size: The `batch_size` of its `DataLoader`, in samples.
        lr: Its learning rate.
        devices: DDP ranks that it ran on, each with its own loader batch. One process is 1, and so is `DataParallel` on
            any number of GPUs, which shares one loader batch.
        accumulate_grad_batches: Loader batches per optimizer step and rank.
        optimizer: A key of `OPTIMIZERS`.
        betas: Of Adam and AdamW; None for the default of `torch.optim`.
        alpha: Of RMSprop; None for the default of `torch.optim`.
        eps: Of Adam, AdamW and RMSprop; None for the default of `torch.optim`.
        weight_decay: Its weight decay; read for AdamW, whose decay depends on the batch.
        steps: Its optimizer steps; not together with `epochs`.
        epochs: Its epochs; needs `dataset_size`.
        dataset_size: Samples of its data set.
        warmup_steps: Its warm-up, in optimizer steps.

    Raises:
        ValueError: If a value is out of range, or does not belong to the optimizer or beside another one.
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
        for name in ("batch_size", "devices", "accumulate_grad_batches", "steps", "epochs", "dataset_size"):
            value = getattr(self, name)
            if value is not None:
                _check_count(name, value)
        self._check_optimizer()
        self._check_length()

    def _check_optimizer(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer {self.optimizer!r} is not known. Use one of {', '.join(OPTIMIZERS)}.")
        for name in ("betas", "alpha", "eps"):
            value = getattr(self, name)
            if value is not None and name not in OPTIMIZERS[self.optimizer]:
                users = ", ".join(user for user, defaults in OPTIMIZERS.items() if name in defaults)
                raise ValueError(
                    f"{name}={value!r} has no meaning for optimizer {self.optimizer!r}. Leave it out, or use one of"
                    f" {users}."
                )
        beta1, beta2 = self.betas or (None, None)
        for name, value in (("alpha", self.alpha), ("beta1", beta1), ("beta2", beta2)):
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name} must be in [0, 1), got {value!r}.")
        for name in ("eps", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and >= 0, got {value!r}.")

    def _check_length(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"steps={self.steps} and epochs={self.epochs} both give the length. Leave one of them out."
            )
        if self.epochs is not None and self.dataset_size is None:
            raise ValueError(f"epochs={self.epochs} needs the size of the data set to become steps. Give dataset_size.")
        if self.warmup_steps is not None:
            if self.warmup_steps < 0:
                raise ValueError(f"warmup_steps must be an integer >= 0, got {self.warmup_steps!r}.")
            if self.total_steps is not None and self.warmup_steps > self.total_steps:
                raise ValueError(
                    f"warmup_steps={self.warmup_steps} is longer than the recipe's {self.total_steps} steps."
                )

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step, the base batch."""
        return global_batch_size(
            self.batch_size, world_size=self.devices, accumulate_grad_batches=self.accumulate_grad_batches
        )

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps in all, or None where the recipe does not say."""
        return self.steps_on(self.devices)

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """What a scaling reads of the optimizer's parameter group."""
        given = ((name, default, getattr(self, name)) for name, default in OPTIMIZERS[self.optimizer].items())
        return {"lr": self.lr, **{name: default if value is None else value for name, default, value in given}}

    def steps_per_epoch_on(self, world_size: int) -> int | None:
        """Return the optimizer steps per epoch of the unchanged script under stock DDP, or None without `dataset_size`.

        `DistributedSampler` pads to equal shares, the loader keeps its incomplete last batch, and Lightning steps at
        the end of an epoch whatever the window holds.
        """
        if self.dataset_size is None:
            return None
        share = -(-self.dataset_size // world_size)
        loader_batches = -(-share // self.batch_size)
        return -(-loader_batches // self.accumulate_grad_batches)

    def steps_on(self, world_size: int) -> int | None:
        """Return the optimizer steps in all of the unchanged script under stock DDP, or None where it does not say."""
        per_epoch = self.steps_per_epoch_on(world_size)
        return self.steps if self.epochs is None or per_epoch is None else self.epochs * per_epoch


@dataclass(frozen=True)
class Cluster:
    """Where to train now.

    Attributes:
        nodes: Number of nodes.
        devices_per_node: Devices on each of them.

    Raises:
        ValueError: If either is below 1.
    """

    nodes: int
    devices_per_node: int

    def __post_init__(self) -> None:
        _check_count("nodes", self.nodes)
        _check_count("devices_per_node", self.devices_per_node)

    @property
    def world_size(self) -> int:
        """Number of ranks, one per device."""
        return self.nodes * self.devices_per_node
