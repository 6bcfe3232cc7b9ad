"""A module written for `strategy="dp"` of Lightning 1.x: unchanged, it trains and validates as it did there."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from data_parallel import joined, train
from lightning.pytorch import LightningModule
from ranks import make_trainer
from replicas import Options, RegressionEnd, assert_same, parallel, single
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradavg import GradAvgStrategy


class RankedRegression(LightningModule):
    """In the style of 1.x: steps return outputs, and the `..._step_end` hooks see those of the whole batch.

    The loss is a root of the mean square error, and the correlation over the batch, so no replica has a part of it.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.train_losses: list[float] = []
        self.rows: dict[str, list[int]] = {"training": [], "validation": [], "test": []}

    def forward(self, x: Tensor) -> Tensor:
        prediction: Tensor = self.network(x)[:, 0]
        return prediction

    def loss(self, outputs: Any) -> Tensor:
        prediction, y = outputs["prediction"], outputs["y"]
        error = (prediction - y).square().mean().sqrt()
        a, b = prediction - prediction.mean(), y - y.mean()
        return error - 0.1 * (a * b).mean() / (a.square().mean() * b.square().mean() + 0.01).sqrt()

    def shared_step(self, batch: Any) -> Any:
        x, y = batch
        return {"prediction": self(x), "y": y, "n": len(x)}

    def shared_step_end(self, stage: str, outputs: Any) -> Tensor:
        assert len(outputs["prediction"]) == len(outputs["y"]) == outputs["n"].sum()
        self.rows[stage].append(len(outputs["y"]))
        return self.loss(outputs)

    def how(self, outputs: Any) -> dict[str, Any]:
        """Return how values are logged."""
        return {"sync_dist": True, "batch_size": len(outputs["y"])}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.shared_step(batch)

    def training_step_end(self, outputs: Any) -> Any:
        loss = self.shared_step_end("training", outputs)
        self.train_losses.append(loss.item())
        if self._trainer is not None:
            self.log("train_loss", loss, on_step=True, on_epoch=True, **self.how(outputs))
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.shared_step(batch)

    def validation_step_end(self, outputs: Any) -> None:
        self.log("val_loss", self.shared_step_end("validation", outputs), **self.how(outputs))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.shared_step(batch)

    def test_step_end(self, outputs: Any) -> None:
        self.log("test_loss", self.shared_step_end("test", outputs), **self.how(outputs))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class LocalLoss(RankedRegression):
    """The same, with a loss in the output of `training_step` that `training_step_end` replaces."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.shared_step(batch)
        return {**outputs, "loss": self.loss(outputs)}


MODULES: dict[str, type[RankedRegression]] = {"outputs": RankedRegression, "local loss": LocalLoss}


def data(seed: int, count: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=draw, dtype=torch.float64)
    return TensorDataset(x, x.sum(dim=1).sin())


def train_loader() -> DataLoader[Any]:
    """Return 3 batches of 16 and one of 11, of which 4 replicas get 3, 3, 3 and 2."""
    return DataLoader(data(1, 59), 16)


def run_module(name: str) -> Any:
    """Body: fit with validation, and test."""
    model = MODULES[name]()
    trainer = make_trainer(GradAvgStrategy(equivalent_to="data_parallel"), max_epochs=3, num_sanity_val_steps=0)
    trainer.fit(model, train_loader(), DataLoader(data(2, 18), 8))
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.test(model, DataLoader(data(3, 5), 4), verbose=False)
    metrics |= {name: value.item() for name, value in trainer.callback_metrics.items()}
    return weights, metrics, model.train_losses, model.rows


def evaluated(model: RankedRegression, dataset: TensorDataset, batch_size: int, replicas: int) -> float:
    """Return the mean, by samples, of the losses over whole batches of the joined outputs of the replicas."""
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in DataLoader(dataset, batch_size):
            parts = zip(*(column.chunk(replicas) for column in batch), strict=True)
            outputs = joined(*(model.shared_step(part) for part in parts))
            total += model.loss(outputs).item() * len(batch[0])
            count += len(batch[0])
    return total / count


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODULES)
def test_module_of_lightning_1_runs_unchanged(world, name, world_size):
    """Case 26: the step-end hooks see whole batches in fit, validation and test, and the weights are those of dp."""
    model = MODULES[name]()
    expected = train(model, train_loader(), world_size, epochs=3)
    val_loss, test_loss = evaluated(model, data(2, 18), 8, world_size), evaluated(model, data(3, 5), 4, world_size)
    ranks = world(world_size).run(run_module, name)
    for stage, sizes in {"validation": [8, 8, 2] * 3, "test": [4, 1]}.items():
        # Each batch is one rank's, whole.
        assert sorted(sizes) == sorted(size for rank in ranks for size in rank[3][stage])
    for weights, metrics, losses, rows in ranks:
        torch.testing.assert_close(weights, expected.weights, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(losses, expected.losses, rtol=1e-12, atol=1e-12)
        assert [16, 16, 16, 11] * 3 == rows["training"]
        assert pytest.approx(val_loss, rel=1e-6) == metrics["val_loss"]
        assert pytest.approx(test_loss, rel=1e-6) == metrics["test_loss"]
        assert pytest.approx(expected.losses[-1], rel=1e-6) == metrics["train_loss_step"]
        by_samples = sum(loss * n for loss, n in zip(expected.losses[-4:], rows["training"], strict=False)) / 59
        assert pytest.approx(by_samples, rel=1e-6) == metrics["train_loss_epoch"]


class Plateau(RankedRegression):
    """Logs as modules for dp did, whose only process had nothing to synchronize; the learning rate follows a metric."""

    def how(self, outputs: Any) -> dict[str, Any]:
        return {"batch_size": len(outputs["y"])}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.01)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def run_plateau() -> Any:
    """Body: 6 epochs, each validated."""
    model = Plateau()
    # Without batch norm, which would show how many replicas there are.
    model.network[1] = nn.Identity()
    trainer = make_trainer(GradAvgStrategy(equivalent_to="data_parallel"), max_epochs=6, num_sanity_val_steps=0)
    trainer.fit(model, train_loader(), DataLoader(data(2, 18), 8))
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return metrics, trainer.optimizers[0].param_groups[0]["lr"], weights


@pytest.mark.parametrize("world_size", [2, 4])
def test_values_logged_without_sync_dist_are_those_of_one_process(world, world_size):
    """Case 26: a module of dp, which had nothing to synchronize, logs the same on every rank, and its rate follows."""
    metrics, lr, weights = world(1).run(run_plateau)[0]
    assert lr < 0.05
    for ours_metrics, ours_lr, ours_weights in world(world_size).run(run_plateau):
        assert {name: pytest.approx(value, rel=1e-6) for name, value in metrics.items()} == ours_metrics
        assert lr == ours_lr
        torch.testing.assert_close(ours_weights, weights, rtol=1e-12, atol=1e-12)


class Defaults(RegressionEnd):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return defaultdict(list, outputs=self(batch[0]), targets=batch[1])

    def training_step_end(self, outputs: Any) -> Tensor:
        assert isinstance(outputs, defaultdict)
        return nn.functional.mse_loss(outputs["outputs"], outputs["targets"])


def test_outputs_keep_their_type(world):
    """Gathered outputs are of the mapping's own type."""
    assert_same(world, (2,), Defaults, {"equivalent_to": "data_parallel"})


class Evaluated(RegressionEnd):
    """Uses a layer in the hook after its validation step."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.a(batch[0])

    def validation_step_end(self, outputs: Tensor) -> None:
        self.log("value", self.b(outputs).float().mean())


def validate_mixed(strategy: Options) -> float:
    module = Evaluated().float()
    x = torch.linspace(-1, 1, 40).reshape(10, 4)
    trainer = make_trainer(GradAvgStrategy(**strategy), precision="bf16-mixed")
    trainer.validate(module, DataLoader(TensorDataset(x), batch_size=4), verbose=False)
    return float(trainer.callback_metrics["value"])


@pytest.mark.parametrize("strategy", [parallel(), single()], ids=str)
def test_hooks_of_evaluation_run_in_the_precision_of_the_step(world, strategy):
    """`validation_step_end` runs under the autocast of `validation_step`."""
    expected = world(1).run(validate_mixed, strategy)[0]
    assert world(2).run(validate_mixed, strategy) == pytest.approx([expected] * 2, rel=1e-6)
