"""DataParallel by hand, in plain PyTorch on one process: chunk the batch, call the module on each chunk, take the mean.

The reference of `equivalent_to="data_parallel"`, and with one replica that of `"single_device"`. Of the package it uses
the seeds of the replicas' random numbers alone. What a Trainer makes of the same modules is noted by `fit`.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from ranks import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradavg import GradAvgStrategy, gather
from lightning_gradavg._support.random_state import drawing_from, stream_key

Options = Mapping[str, Any]
SAMPLES, SEED, BATCH_SIZES = 37, 5, (16, 15, 5, 1)
"""The seed of a run, and sizes of its batches, in turn; 4 replicas get 4 4 4 4, 4 4 4 3, 2 2 1 and 1 samples."""


def parallel(replicas: int | None = 4, **options: Any) -> dict[str, Any]:
    return {"equivalent_to": "data_parallel", "num_replicas": replicas, **options}


def single(**options: Any) -> dict[str, Any]:
    return {"equivalent_to": "single_device", **options}


@dataclass
class Run:
    """The gradients before each optimizer step; buffers and logged values after each batch, and in the end."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def note_gradients(self, module: nn.Module) -> None:
        self.gradients.append(copied((name, one.grad) for name, one in module.named_parameters()))

    def note_batch(self, module: nn.Module, logged: Mapping[str, Any]) -> None:
        self.buffers.append(copied(module.named_buffers()))
        self.logged.append({name: float(value) for name, value in logged.items()})

    def end(self, module: nn.Module, logged: Mapping[str, Any]) -> Run:
        self.note_batch(module, logged)
        self.weights = copied(module.state_dict().items())
        return self


def copied(named: Iterable[tuple[str, Tensor | None]]) -> dict[str, Tensor]:
    return {name: one.detach().to_dense().cpu().clone() for name, one in named if one is not None}


def train(module: Any, batches: Iterable[Any], replicas: int, accumulate: int = 1) -> Run:
    """Train a module with replicas; windows of loader batches are means by their weights, however short the last."""
    run = Run()
    optimizer = module.train().configure_optimizers()
    loader_batches = list(batches)
    index = 0
    shared = {id(parameter): parameter for parameter in module.parameters()}
    vars(module)["log"] = lambda *_, **__: None
    for start in range(0, len(loader_batches), accumulate):
        window = list[tuple[Tensor, float]]()
        for batch_idx, batch in enumerate(loader_batches[start : start + accumulate], start):
            chunks = torch.arange(len(batch[0])).chunk(replicas)
            outputs = []
            # Replica 0's buffers are the module's own, and the parameters are those of all.
            modules = [module, *(copy.deepcopy(module, dict(shared)) for _ in chunks[1:])]
            for replica, rows in enumerate(chunks):
                with drawing_from(stream_key(SEED, "forward", index, replica)):
                    outputs.append(modules[replica].training_step([leaf[rows] for leaf in batch], batch_idx))
            sizes = list(map(len, chunks))
            losses = [weighed(output, size) for output, size in zip(outputs, sizes, strict=True)]
            window += losses
            run.note_batch(module, {"loss": mean(losses).item()})
            index += 1
        optimizer.zero_grad()
        mean(window).backward()
        run.note_gradients(module)
        optimizer.step()
    return run.end(module, {})


def weighed(output: Any, size: int) -> tuple[Tensor, float]:
    """Return a loss and its weight, by default the number of its samples."""
    named = output if isinstance(output, dict) else {"loss": output}
    return named["loss"], float(named.get("weight", size))


def mean(losses: Sequence[tuple[Tensor, float]]) -> Tensor:
    counted = [(weight * loss, weight) for loss, weight in losses if weight > 0]  # one of weight 0 may be NaN
    return torch.stack([loss for loss, _ in counted]).sum() / sum(weight for _, weight in counted)


class Model(LightningModule):
    """A regression on 37 fixed samples; `load` are arguments of `loader`."""

    normed = manual = False
    load: Options = MappingProxyType({})

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        os.environ.pop("PL_GLOBAL_SEED", None)  # of another test: it would be that of the replicas
        self.automatic_optimization = not self.manual
        self.net: Any = self.build()
        self.to(dtype)

    def build(self) -> nn.Module:
        norm = nn.Unflatten(1, (3, 11)), nn.BatchNorm1d(3), nn.Flatten()
        return nn.Sequential(nn.Linear(13, 33), *norm[: 3 * self.normed], nn.Tanh(), nn.Linear(33, 4))

    def draw(self, *size: int) -> Tensor:
        """Return the same random numbers on every call of a size."""
        generator = torch.Generator().manual_seed(sum(size))
        return torch.randn(SAMPLES, *size, generator=generator, dtype=torch.float64).to(self.dtype)

    def data(self) -> tuple[Tensor, Tensor]:
        return self.draw(13), self.draw(4)

    def loader(self, sizes: Sequence[int] = BATCH_SIZES, times: int = 1, **options: Any) -> DataLoader[Any]:
        """Return batches of these sizes, several times, of samples in another order each time."""
        draw = torch.Generator().manual_seed(71)  # some replicas have no weight, and each batch has some
        orders = [torch.randperm(SAMPLES, generator=draw)[: sum(sizes)] for _ in range(times)]
        batches = [part.tolist() for order in orders for part in order.split([*sizes])]
        return DataLoader(TensorDataset(*self.data()), batch_sampler=batches, **options)

    def train_dataloader(self) -> Any:
        return self.loader(**self.load)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def loss_of(self, x: Tensor, y: Tensor) -> Any:
        return (self(x) - y).square().mean()

    def weight_of(self, x: Tensor, y: Tensor) -> Any:
        """Return what a step says of its weight; by default nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(*batch)
        weight = self.weight_of(*batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=weight)
        return loss if weight is None else {"loss": loss, "weight": weight}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class CNN(Model):
    """Convolutions, channels last, with batch norm, dropout, and noise from Python and NumPy."""

    def build(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(3, 7, 3, padding=1), nn.BatchNorm2d(7), nn.Tanh(), nn.Dropout(0.3)),
            *(nn.Conv2d(7, 9, 3, stride=2, padding=1), nn.BatchNorm2d(9), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)),
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing there

    def data(self) -> tuple[Tensor, Tensor]:
        return self.draw(3, 4, 4), torch.arange(SAMPLES) % 3

    def loss_of(self, x: Tensor, y: Tensor) -> Any:
        noise = random.random() + float(np.random.rand())  # noqa: NPY002  # what users draw from
        return (1 + noise) * nn.functional.cross_entropy(self(x), y)


class ByHand(CNN):
    manual = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self._trainer is not None:  # the reference steps by itself
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


class Sparse(Model):
    def build(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(SAMPLES, 5, sparse=True), nn.Linear(5, 1))

    def data(self) -> tuple[Tensor, Tensor]:
        return torch.arange(SAMPLES), self.draw(1)


class Normed(Model):
    """With batch norm, and a buffer that counts steps and shows in what is predicted."""

    normed = True
    seen: Tensor

    def build(self) -> nn.Module:
        self.register_buffer("seen", torch.zeros(()))
        return super().build()

    def forward(self, x: Tensor) -> Any:
        self.seen += 1
        return super().forward(x) * (1 + self.seen / 1000)


class Masked(Normed):
    """The mean over some values, none of some samples; hardly a sum of the weights is exact."""

    def loss_of(self, x: Tensor, y: Tensor) -> Any:
        return (self(x) - y)[y > 0.5].square().mean()

    def weight_of(self, x: Tensor, y: Tensor) -> Any:
        return 0.1 * (y > 0.5).sum().double()


class Terms(Masked):
    """Two terms, of which one counts no values of some samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        terms: Any = super().training_step(batch, batch_idx)
        size = self(batch[0]).abs().mean()
        return {"loss": {"a": terms["loss"], "b": size}, "weight": {"a": terms["weight"], "b": len(batch[0])}}


class Point(NamedTuple):
    x: Any
    y: Any


class Rows(Normed):
    """The loss is that of the rows of all ranks, in which rows meet across ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        predicted = self(batch[0])
        x, errors = gather([predicted[:, 0], predicted - batch[1]])
        loss = errors.square().mean() + 0.1 * (x[:, None] * x[None]).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


MODELS: dict[str, type[Model]] = {each.__name__.lower(): each for each in (CNN, ByHand, Sparse, Masked, Terms, Rows)}


class Observer(Callback):
    """Notes of a run in a Trainer what `train` notes, and all that was logged."""

    def __init__(self) -> None:
        self.run = Run()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.run.note_gradients(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.run.note_batch(pl_module, trainer.callback_metrics)


def fit(
    kind: Callable[[torch.dtype], LightningModule],
    strategy: Options | None,
    dtype: torch.dtype = torch.float64,
    *,
    load: Options | None = None,
    callbacks: Sequence[Callback] = (),
    resumed: str | None = None,
    **options: Any,
) -> Run:
    """Body: train a model in a Trainer, and return what this rank saw; without a strategy, in stock Lightning."""
    model = kind(dtype)
    observer = Observer()
    vars(model).update({} if load is None else {"load": load})
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, "callbacks": [observer, *callbacks], **options}
    trainer = make_trainer("auto" if strategy is None else GradAvgStrategy(**strategy), **options)
    trainer.fit(model, ckpt_path=resumed)
    return observer.run.end(model, trainer.callback_metrics)


def assert_same_run(ranks: Sequence[Run], expected: Run, tolerance: float, after: float | None = None) -> None:
    """Assert that all ranks hold the same bits, and that they are those of the reference within the tolerance.

    The tolerance is relative, and absolute below 1; `after` is that of all but the first step. What is logged is in
    float32: 1e-6 there at best. The reference by hand logs its loss alone.
    """
    first = ranks[0]
    close = torch.testing.assert_close
    for other in ranks[1:]:
        close(vars(other), vars(first), rtol=0, atol=0)
    later = after or tolerance
    for name in ("gradients", "buffers"):
        close(getattr(first, name)[0], getattr(expected, name)[0], rtol=tolerance, atol=tolerance)
    for name in ("gradients", "buffers", "weights"):
        close(getattr(first, name), getattr(expected, name), rtol=later, atol=later)
    for logged, right in zip(first.logged, expected.logged, strict=True):
        close({name: logged[name] for name in right}, right, rtol=max(later, 1e-6), atol=max(later, 1e-6))
