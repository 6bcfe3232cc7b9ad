"""Modules to run as replicas, a Trainer's run of them, and the assertion that the number of ranks does not show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from ranks import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradavg import GradAvgStrategy

__all__ = [
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


class Regression(LightningModule):
    """A regression in float64 that logs its loss, perhaps with batch norm, and with further parts at its end."""

    norm = False

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 5)
        self.n = nn.BatchNorm1d(5) if self.norm else nn.Identity()
        self.b = nn.Linear(5, 2)
        self.parts = nn.ModuleDict(parts)
        self.build()
        self.double()

    def build(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(torch.tanh(self.n(self.a(x))))
        for part in self.parts.values():
            result = part(result)
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


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


def data(samples: int = 22, batch_size: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(samples, size, dtype=torch.float64, generator=generator) for size in (4, 2))
    return DataLoader(TensorDataset(x, y), batch_size)


def fit(module: LightningModule, strategy: Options, loader: Any = None, *validation: Any, **options: Any) -> Any:
    """Train, by default two epochs whose last batch is a short one, and return the Trainer."""
    torch.manual_seed(5)
    trainer = make_trainer(GradAvgStrategy(**strategy), **{"max_epochs": 2, **options})
    trainer.fit(module, loader or data(), *validation)
    return trainer


def outcome(kind: type[Regression], strategy: Options, **options: Any) -> Any:
    """Body: the weights, buffers and logged values of a run."""
    module = kind()
    metrics = fit(module, strategy, **options).callback_metrics
    return state_of(module), {name: float(value) for name, value in metrics.items()}


def assert_same(world: Any, sizes: Any, *arguments: Any, **options: Any) -> None:
    """Assert that weights, buffers and logs are those of one rank."""
    state, metrics = world(1).run(outcome, *arguments, **options)[0]
    for size in sizes:
        for other, logged in world(size).run(outcome, *arguments, **options):
            torch.testing.assert_close(other, state, rtol=1e-12, atol=1e-12)
            assert logged == pytest.approx(metrics, rel=1e-12)
