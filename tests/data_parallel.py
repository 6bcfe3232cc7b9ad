"""DataParallel by hand, in plain PyTorch on one process: chunk the batch, call the module on each chunk, take the mean.

The reference of `equivalent_to="data_parallel"`, and with one replica that of `"single_device"`. Of the package it uses
the seeds of the replicas' random numbers alone. What a Trainer made of the same modules is noted by `fit`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import Strategy
from ranks import make_trainer
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from lightning_gradavg.replicas.part import replica_stream

__all__ = ["MODELS", "Run", "assert_same_run", "fit", "loader", "train"]

BATCH_SIZES, SEED = (16, 15, 5, 1), 5
"""Sizes of the loader batches, in turn; 4 replicas get 4 4 4 4, 4 4 4 3, 2 2 1 and 1 samples. The seed of a run."""


@dataclass
class Run:
    """The gradients before each optimizer step; the loss and the buffers of each loader batch; the state in the end."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def note_gradients(self, module: nn.Module) -> None:
        named = module.named_parameters()
        self.gradients.append({name: one.grad.to_dense().clone() for name, one in named if one.grad is not None})

    def note_buffers(self, module: nn.Module) -> None:
        self.buffers.append({name: buffer.clone() for name, buffer in module.named_buffers()})

    def end(self, module: nn.Module) -> Run:
        self.weights = {name: value.clone() for name, value in module.state_dict().items()}
        return self


class Step(nn.Module):
    """Has `functional_call` call a training step."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module.training_step(*args)


def joined(*outputs: Any) -> Any:
    """Return the outputs of all replicas as one, in any structure."""

    def rows(*leaves: Any) -> Any:
        return None if leaves[0] is None else torch.cat([torch.atleast_1d(torch.as_tensor(leaf)) for leaf in leaves])

    return tree_map(rows, *outputs)


def train(module: Any, batches: Iterable[Any], replicas: int, *, epochs: int = 1, accumulate: int = 1) -> Run:
    """Train a module with replicas; windows of loader batches are means by their weights, however short the last."""
    run, optimizer, loader_batches = Run(), module.configure_optimizers(), list(batches)
    step, index = Step(module.train()), 0
    vars(module)["log"] = lambda *_, **__: None
    for _ in range(epochs):
        for start in range(0, len(loader_batches), accumulate):
            total, of_all = torch.zeros(()), 0.0
            for batch_idx, batch in enumerate(loader_batches[start : start + accumulate], start):
                outputs, weights, size = [], [], len(batch if isinstance(batch, Tensor) else batch[0])
                before = {f"module.{name}": buffer.clone() for name, buffer in module.named_buffers()}
                for replica, rows in enumerate(torch.arange(size).chunk(replicas)):
                    # Replica 0's buffers are the module's own.
                    buffers = {name: buffer.clone() for name, buffer in before.items()} if replica else {}
                    part = tree_map(lambda leaf, rows=rows: leaf[rows], batch)
                    with replica_stream(SEED, index, replica, torch.device("cpu")):
                        output = functional_call(step, buffers, (part, batch_idx))
                    outputs.append(output)
                    weights.append(float(output["weight"]) if "weight" in named(output) else len(rows))
                if hasattr(module, "training_step_end"):
                    outputs, weights = [module.training_step_end(joined(*outputs))], [size]
                losses = [weight * named(output)["loss"] for weight, output in zip(weights, outputs, strict=True)]
                loss = torch.stack(losses).sum()
                total, of_all, index = total + loss, of_all + sum(weights), index + 1
                run.losses.append(loss.item() / sum(weights))
                run.note_buffers(module)
            optimizer.zero_grad()
            (total / of_all).backward()
            run.note_gradients(module)
            optimizer.step()
    return run.end(module)


def named(output: Any) -> dict[str, Any]:
    return output if isinstance(output, dict) else {"loss": output}


class Model(LightningModule):
    """A small model on 37 fixed samples; `losses` gets the value of each `training_step_end`, where there is one."""

    lr = 0.05

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.losses: list[float] = []
        self.net = self.build()
        self.to(dtype)

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))

    def draw(self, *size: int) -> Tensor:
        """Return the same random numbers on every call of a size."""
        return torch.randn(37, *size, generator=torch.Generator().manual_seed(sum(size)), dtype=self.dtype)

    def data(self) -> Any:
        return list(zip(self.draw(5), self.draw(4), strict=True))

    def logged(self, loss: Tensor, weight: int) -> Tensor:
        self.log("loss", loss, sync_dist=True, batch_size=weight)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=1e-4)


class CNN(Model):
    """Convolutions with batch norm, dropout, and noise from Python and NumPy; each replica has a loss of its own."""

    dropout = 0.3

    def build(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Dropout(self.dropout)),
            *(nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)),
        )

    def data(self) -> Any:
        return list(zip(self.draw(1, 4, 4), torch.arange(37) % 3, strict=True))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = random.random() + float(np.random.rand()) if self.dropout else 0  # noqa: NPY002  # what users draw from
        loss = (1 + noise) * nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        return self.logged(loss, len(batch[0]))


class PlainCNN(CNN):
    """Without random numbers, which are the ranks' own under single_device."""

    dropout = 0.0


class Masked(Model):
    """Each replica returns the mean over its masked values, and their number as its weight; a buffer counts steps."""

    seen: Tensor

    def build(self) -> nn.Module:
        self.register_buffer("seen", torch.zeros(()))
        return super().build()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, mask = batch[0], batch[1] > batch[1].mean(dim=1, keepdim=True)  # 1 to 3 of 4 values of each sample
        self.seen += 1
        loss = self.net(x)[mask].square().mean() * (1 + self.seen / 1000)  # of the buffer as this replica has it
        return {"loss": self.logged(loss, int(mask.sum())), "weight": mask.sum()}


class Sparse(Model):
    """An embedding with sparse gradients, of which SGD takes no weight decay."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(37, 4, sparse=True), nn.Linear(4, 1))

    def data(self) -> Any:
        return list(torch.arange(37))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.logged(self.net(batch).tanh().square().mean(), len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Point(NamedTuple):
    x: Any
    y: Any


class Rows(Model):
    """The loss is that of nested outputs of all replicas, in which rows meet across replicas; a buffer counts steps."""

    seen: Tensor

    def build(self) -> nn.Module:
        self.register_buffer("seen", torch.zeros(()))
        return super().build()

    def step_of(self, x: Tensor) -> int:
        """Return by how much the buffer grows."""
        return 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += self.step_of(batch[0])
        predicted = self.net(batch[0]) * (1 + self.seen / 1000)  # of the buffer as this replica has it
        return {"points": [Point(predicted[:, 0], (predicted - batch[1],))], "none": None}

    def loss(self, outputs: Any) -> Tensor:
        ((x, (errors,)),) = outputs["points"]
        loss: Tensor = errors.square().mean() + 0.1 * (x[:, None] * x[None]).mean()
        return loss

    def training_step_end(self, outputs: Any) -> Any:
        loss = self.loss(outputs)
        self.losses.append(loss.item())
        return {"loss": loss, "outputs": outputs["points"]}


class NormedRows(Rows):
    """With batch norm, which has several values of each sample."""

    def build(self) -> nn.Module:
        layers: Any = super().build()
        head, *rest = layers
        return nn.Sequential(head, nn.Unflatten(1, (4, 2)), nn.BatchNorm1d(4), nn.Flatten(), *rest)


class Numbers(Rows):
    """A replica has one of some numbers: a square of a mean, and how many samples it has, which the buffer adds up."""

    def step_of(self, x: Tensor) -> int:
        return len(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "penalty": outputs["points"][0].x.mean() ** 2, "count": len(batch[0])}

    def loss(self, outputs: Any) -> Tensor:
        penalty, count = outputs["penalty"], outputs["count"]
        assert len(outputs["points"][0].x) == count.sum()
        order = torch.arange(1, len(penalty) + 1).to(penalty) / len(penalty)
        return super().loss(outputs) + (order * penalty * count).sum() / count.sum()


MODELS: dict[str, type[Model]] = {
    "cnn": CNN,
    "plain cnn": PlainCNN,
    "masked": Masked,
    "sparse": Sparse,
    "rows": Rows,
    "normed rows": NormedRows,
    "numbers": Numbers,
}


def loader(model: Model) -> DataLoader[Any]:
    """Return 20 batches of the sizes above, of all samples in another order each time."""
    order = torch.Generator().manual_seed(3)
    batches = [part.tolist() for _ in range(5) for part in torch.randperm(37, generator=order).split(BATCH_SIZES)]
    return DataLoader(model.data(), batch_sampler=batches)


class Observer(Callback):
    """Notes of a run in a Trainer what `train` notes."""

    def __init__(self) -> None:
        self.run = Run()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.run.note_gradients(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.run.note_buffers(pl_module)
        self.run.losses += [trainer.callback_metrics["loss"].item()] if "loss" in trainer.callback_metrics else []


def fit(model: Model, strategy: Strategy, **options: Any) -> Run:
    """Train a model in a Trainer, in a rank body, and return what this rank saw."""
    observer = Observer()
    make_trainer(strategy, callbacks=[observer], **{"max_epochs": 1, **options}).fit(model, loader(model))
    observer.run.losses = model.losses or observer.run.losses
    return observer.run.end(model)


def assert_same_run(ranks: Sequence[Run], expected: Run, tolerance: float, after: float | None = None) -> None:
    """Assert that all ranks hold the same bits, and that they are those of the reference within the tolerance.

    The tolerance is relative, and absolute below 1; `after` is that of buffers and weights after the first step. What
    is logged is in float32: 1e-6 there at best.
    """
    first, close = ranks[0], torch.testing.assert_close
    for other in ranks[1:]:
        close(vars(other), vars(first), rtol=0, atol=0)
    later = after or tolerance
    close(first.gradients[0], expected.gradients[0], rtol=tolerance, atol=tolerance)
    close(first.buffers[:1], expected.buffers[:1], rtol=tolerance, atol=tolerance)
    close(first.losses, expected.losses, rtol=max(later, 1e-6), atol=max(later, 1e-6))
    for name in ("gradients", "buffers", "weights"):
        close(getattr(first, name), getattr(expected, name), rtol=later, atol=later)
