"""A module written for `strategy="dp"` of Lightning 1.x trains as it did there, and logs as on one process."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from data_parallel import train
from lightning.pytorch import LightningModule
from ranks import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradavg import GradAvgStrategy


class RankedRegression(LightningModule):
    """In the style of 1.x: a step returns outputs, and `training_step_end` sees those of the whole batch.

    The loss is a root of the mean square error, and the correlation over the batch, so no replica has a part of it.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.losses: list[float] = []
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        prediction: Tensor = self.network(x)[:, 0]
        return prediction

    def loss(self, prediction: Tensor, y: Tensor) -> Tensor:
        error = (prediction - y).square().mean().sqrt()
        a, b = prediction - prediction.mean(), y - y.mean()
        return error - 0.1 * (a * b).mean() / (a.square().mean() * b.square().mean() + 0.01).sqrt()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        prediction = self(x)
        loss = self.loss(prediction, y)  # which training_step_end replaces
        return defaultdict(list, prediction=prediction, y=y, n=len(x), loss=loss)

    def training_step_end(self, outputs: Any) -> Any:
        assert isinstance(outputs, defaultdict)
        loss = self.loss(outputs["prediction"], outputs["y"])
        assert len(outputs["prediction"]) == len(outputs["y"]) == outputs["n"].sum()
        self.losses.append(loss.item())
        self.rows.append(len(outputs["y"]))
        if self._trainer is not None:
            self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(outputs["y"]))
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self(batch[0]), batch[1]), batch_size=len(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def data(seed: int, count: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=draw, dtype=torch.float64)
    return TensorDataset(x, x.sum(dim=1).sin())


def train_loader() -> DataLoader[Any]:
    """Return 3 batches of 16 and one of 11, of which 4 replicas get 3, 3, 3 and 2."""
    return DataLoader(data(1, 59), 16)


def run(model: RankedRegression) -> Any:
    """Body: fit with validation."""
    trainer = make_trainer(GradAvgStrategy(equivalent_to="data_parallel"), max_epochs=3, num_sanity_val_steps=0)
    trainer.fit(model, train_loader(), DataLoader(data(2, 18), 8))
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return {name: value.clone() for name, value in model.state_dict().items()}, metrics, rate, model.losses, model.rows


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_module_of_lightning_1_runs_unchanged(world, world_size):
    """Case 26: the step-end hook sees whole batches, and the weights are those of dp."""
    model = RankedRegression()
    expected = train(model, train_loader(), world_size, epochs=3)
    for weights, metrics, _, losses, rows in world(world_size).run(run, RankedRegression()):
        torch.testing.assert_close(weights, expected.weights, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(losses, expected.losses, rtol=1e-12, atol=1e-12)
        assert [16, 16, 16, 11] * 3 == rows
        assert pytest.approx(losses[-1], rel=1e-6) == metrics["train_loss_step"]
        by_samples = sum(loss * n for loss, n in zip(losses[-4:], rows, strict=False)) / 59
        assert pytest.approx(by_samples, rel=1e-6) == metrics["train_loss_epoch"]


class Plateau(RankedRegression):
    """Logs as modules for dp did, whose only process had nothing to synchronize; the learning rate follows a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.network[1] = nn.Identity()  # batch norm would show how many replicas there are

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


@pytest.mark.parametrize("world_size", [2, 4])
def test_values_logged_without_sync_dist_are_those_of_one_process(world, world_size):
    """Case 26: a module of dp, which had nothing to synchronize, logs the same on every rank, and its rate follows."""
    (state, metrics, rate, *_), *_ = world(1).run(run, Plateau())
    assert rate < 0.05
    for ours, logged, its, *_ in world(world_size).run(run, Plateau()):
        assert {name: pytest.approx(value, rel=1e-6) for name, value in metrics.items()} == logged
        assert rate == its
        torch.testing.assert_close(ours, state, rtol=1e-12, atol=1e-12)
