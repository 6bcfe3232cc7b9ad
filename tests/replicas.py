"""Modules to run as replicas, a Trainer's run of them, and the assertion that the number of ranks does not show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from ranks import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_gradavg import GradAvgStrategy

__all__ = [
    "Classifier",
    "ClassifierEnd",
    "Manual",
    "Normed",
    "Options",
    "Regression",
    "RegressionEnd",
    "assert_same",
    "data",
    "fit",
    "outcome",
    "parallel",
    "single",
    "state_of",
]

Options = Mapping[str, Any]


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def parallel(replicas: int = 4, **options: Any) -> dict[str, Any]:
    return {"equivalent_to": "data_parallel", "num_replicas": replicas, **options}


def single(**options: Any) -> dict[str, Any]:
    return {"equivalent_to": "single_device", **options}


class Classifier(LightningModule):
    """Batch norm and a linear layer; the loss of each replica, in float64."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)
        self.parts = nn.ModuleDict(parts)
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.rows = SumMetric()
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.norm(inputs))
        for part in self.parts.values():
            outputs = part(outputs)
        return outputs

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self(inputs), labels)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ClassifierEnd(Classifier):
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        return {"logits": self(batch[0]), "labels": batch[1]}

    def training_step_end(self, outputs: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs["logits"], outputs["labels"])


def data(samples: int = 24, batch_size: int = 8, *, shuffle: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (samples,), generator=generator)
    return DataLoader(TensorDataset(inputs, labels), batch_size=batch_size, shuffle=shuffle)


def fit(module: LightningModule, strategy: Options, loader: Any = None, **options: Any) -> Any:
    trainer = make_trainer(GradAvgStrategy(**strategy), **{"max_epochs": 1, **options})
    trainer.fit(module, data() if loader is None else loader)
    return trainer


class Regression(LightningModule):
    """A regression, with batch norm where `norm` is true."""

    norm = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 5)
        self.n = nn.BatchNorm1d(5) if self.norm else nn.Identity()
        self.b = nn.Linear(5, 2)
        self.build()
        self.double()

    def build(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(torch.tanh(self.n(self.a(x))))
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def outcome(kind: type[Regression], strategy: Options, batch_size: int = 8, samples: int = 22, **options: Any) -> Any:
    """Body: the weights, buffers and logged values of two epochs, whose last batch is a short one."""
    module = kind()
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(samples, size, dtype=torch.float64, generator=generator) for size in (4, 2))
    torch.manual_seed(5)
    trainer = make_trainer(GradAvgStrategy(**strategy), **{"max_epochs": 2, **options})
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=batch_size))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return state, {name: float(value) for name, value in trainer.callback_metrics.items()}


def assert_same(world: Any, sizes: Any, *arguments: Any, **options: Any) -> None:
    """Assert that weights, buffers and logs are those of one rank."""
    state, metrics = world(1).run(outcome, *arguments, **options)[0]
    for size in sizes:
        for other, logged in world(size).run(outcome, *arguments, **options):
            torch.testing.assert_close(other, state, rtol=1e-12, atol=1e-12)
            assert logged == pytest.approx(metrics, rel=1e-12)


class Normed(Regression):
    norm = True


class Manual(Normed):
    def build(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class RegressionEnd(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]), batch[1]

    def training_step_end(self, outputs: Any) -> Tensor:
        return nn.functional.mse_loss(*outputs)
