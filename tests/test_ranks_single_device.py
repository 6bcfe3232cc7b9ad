"""`equivalent_to="single_device"` on any number of ranks is plain training on one; the digits, under both presets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel import MODELS, Numbers, Rows, Run, assert_same_run, fit, loader, train
from grids import grid
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from ranks import make_trainer
from replicas import Regression, single
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from examples.demo.digits import DigitsClassifier, DigitsData, collate
from lightning_gradavg import GradAvgStrategy


def on_one_device(**options: Any) -> Trainer:
    """Return a quiet Trainer of this process alone, which has no process group."""
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", devices=1, **{**quiet, **options})  # type: ignore[arg-type]  # any options


def approx(value, tolerance=1e-12):
    return pytest.approx(value, rel=tolerance, abs=tolerance)


def fit_all(name: str, dtype: torch.dtype, windows: Sequence[int]) -> Any:
    """Body: 20 optimizer steps in windows of so many loader batches."""
    runs = []
    for accumulate in windows:
        model = MODELS[name](dtype)
        strategy = GradAvgStrategy(equivalent_to="single_device")
        runs.append(fit(model, strategy, max_epochs=accumulate, accumulate_grad_batches=accumulate))
    return dist.get_rank(), runs


@cache
def reference(name: str, dtype: torch.dtype, accumulate: int) -> Run:
    model = MODELS[name](dtype)
    return train(model, loader(model), 1, accumulate=accumulate, epochs=accumulate)


@pytest.mark.parametrize(
    ("name", "world_size"), grid(["plain cnn", "masked", "sparse", "rows"], [1, 2, 3, 4], strength=1)
)
def test_equals_one_process(world, name, world_size):
    windows = (1, 2)
    ranks = world(world_size).run(fit_all, name, torch.float64, windows)
    assert list(range(world_size)) == [rank for rank, _ in ranks]
    for index, accumulate in enumerate(windows):
        expected = reference(name, torch.float64, accumulate)
        assert_same_run([runs[index] for _, runs in ranks], expected, 1e-12, 1e-11)


class WithNumbers(Numbers):
    """A buffer that counts steps, as one device has it."""

    def step_of(self, x: torch.Tensor) -> int:
        return 1


def fit_with_numbers() -> None:
    model = WithNumbers(torch.float64)
    fit(model, GradAvgStrategy(equivalent_to="single_device"))


def test_numbers_of_a_rank_are_refused(world):
    raised = world(3).run_expecting_errors(fit_with_numbers)
    assert ["TypeError"] * 3 == [one.type_name for one in raised]
    assert all("['penalty'] of training_step is one number" in one.message for one in raised)


class CountingRows(Rows):
    """Adds the number of its samples to a buffer, which on one device would be that of all samples."""

    def step_of(self, x: torch.Tensor) -> int:
        return len(x)


def fit_counting() -> None:
    model = CountingRows(torch.float64)
    fit(model, GradAvgStrategy(equivalent_to="single_device"))


def test_buffers_of_a_ranks_samples_are_refused(world):
    raised = world(3).run_expecting_errors(fit_counting)
    assert ["ValueError"] * 3 == [one.type_name for one in raised]
    assert all("seen" in one.message for one in raised)


class Shuffled(LightningModule):
    """Notes the samples, 0 to 5 in batches of 4, in the order of training; its initial weight is a random number."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(()))
        self.samples: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        strategy: Any = self.trainer.strategy
        data = getattr(strategy, "_batches", None)
        self.samples.append([] if data is not None and data.chunk.stand_in else batch[0].tolist())
        return (self.w * batch[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_shuffled(strategy: Any, make: Any = make_trainer) -> Any:
    """Train for 3 epochs on a loader that shuffles by the global generator, as the script was seeded."""
    seed_everything(3, verbose=False)
    model = Shuffled()
    data = TensorDataset(torch.arange(6.0))
    trainer = make(strategy=strategy, max_epochs=3, num_sanity_val_steps=0, logger=False)
    trainer.fit(model, DataLoader(data, 4, shuffle=True), DataLoader(data, 6))
    return model.samples


def fit_shuffled_as(preset: str) -> Any:
    return fit_shuffled(GradAvgStrategy(equivalent_to=preset))  # type: ignore[arg-type]  # a parameter of the test


@pytest.mark.parametrize(("preset", "world_size"), [("data_parallel", 2), ("single_device", 1), ("single_device", 3)])
def test_shuffled_batches_are_those_of_stock_lightning(world, world_size, preset):
    expected = fit_shuffled("auto", on_one_device)
    assert [4, 2] * 3 == [len(batch) for batch in expected]
    ranks = world(world_size).run(fit_shuffled_as, preset)
    assert expected == [[one for part in batch for one in part] for batch in zip(*ranks, strict=True)]


class Normed(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.norm(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def norm_statistics(count: int) -> tuple[float, float, int]:
    """Body: one step on the first of the values 0, 2, 4, 6."""
    model = Normed()
    data = TensorDataset(torch.tensor([[0.0], [2.0], [4.0], [6.0]], dtype=torch.float64)[:count])
    make_trainer(GradAvgStrategy(equivalent_to="single_device"), max_epochs=1).fit(model, DataLoader(data, count))
    kept: Any = model.norm
    return kept.running_mean.item(), kept.running_var.item(), kept.num_batches_tracked.item()


@pytest.mark.parametrize("world_size", [2, 4])
def test_batch_norm_over_all_ranks(world, world_size):
    ranks = world(world_size).run(norm_statistics, 4)
    assert [(approx(0.3), approx(1.5666667, 1e-7), 1)] * world_size == ranks


@pytest.mark.parametrize("world_size", [1, 2])
def test_batch_norm_of_one_value(world, world_size):
    raised = world(world_size).run_expecting_errors(norm_statistics, 1)
    assert ["ValueError"] * world_size == [one.type_name for one in raised]
    assert all("Expected more than 1 value per channel" in one.message for one in raised)


class Digits(DigitsClassifier):
    """The digits example, with its metrics logged in every way, and batch norm if wanted."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        if batch_norm:
            self.network[1], self.network[4] = nn.BatchNorm2d(16), nn.BatchNorm2d(32)
        self.accuracy = nn.ModuleDict(
            {stage: MulticlassAccuracy(10, average="micro") for stage in ("fit", "val", "end")}
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        scores = self.network(images)
        loss = nn.functional.cross_entropy(scores, labels)
        self.accuracy["fit"](scores, labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("train_accuracy", self.accuracy["fit"], on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        scores = self.network(images)
        self.accuracy["val"](scores, labels)
        self.log("val_loss", nn.functional.cross_entropy(scores, labels), sync_dist=True)
        self.log("val_accuracy", self.accuracy["val"])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        scores = self.network(images)
        self.accuracy["end"](scores, labels)
        self.log("test_accuracy", self.accuracy["end"])
        self.log("test_hits", (scores.argmax(dim=1) == labels).double().mean(), sync_dist=True)


class Steps(Callback):
    """Notes the training loss that is logged at each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.losses.append(trainer.callback_metrics["train_loss_step"].item())


NUM_TRAIN = 453  # 7 batches of 64 and one of 5


def fit_digits(batch_norm: bool, *, stock: bool = False) -> Any:
    """Body: train for 2 epochs in float64, validate and test; in stock Lightning on one device, or on all ranks."""
    seed_everything(0, verbose=False)
    data = DigitsData()
    data.setup("fit")
    train_set, held_out = data.samples[:NUM_TRAIN], data.samples[NUM_TRAIN:]
    steps, make = Steps(), on_one_device if stock else make_trainer
    strategy: Any = "auto" if stock else GradAvgStrategy(equivalent_to="single_device")
    options = {"max_epochs": 2, "precision": "64-true", "num_sanity_val_steps": 0, "logger": False}
    trainer = make(strategy=strategy, callbacks=[steps], **options)
    model = Digits(batch_norm)
    # Batches of 64, 64 and 5, and of 64 six times and 3.
    loaders: list[Any] = [DataLoader(part, 64, collate_fn=collate) for part in (held_out[:133], held_out[133:520])]
    order = torch.Generator().manual_seed(1)
    train_loader: Any = DataLoader(train_set, 64, shuffle=True, collate_fn=collate, generator=order)
    trainer.fit(model, train_loader, loaders[0])
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    trainer.test(model, loaders[1], verbose=False)
    metrics |= {name: value.item() for name, value in trainer.callback_metrics.items()}
    return metrics, steps.losses, {name: value.clone() for name, value in model.state_dict().items()}


METRICS = {
    *("train_loss", "train_loss_step", "train_loss_epoch", "train_accuracy"),
    *("val_loss", "val_accuracy", "test_accuracy", "test_hits"),
}


@pytest.mark.parametrize(("world_size", "batch_norm"), [(1, True), (2, False), (3, True)])
def test_digits_do_not_depend_on_the_world(world, world_size, batch_norm):
    metrics, losses, weights = fit_digits(batch_norm, stock=True)
    for ours_metrics, ours_losses, ours_weights in world(world_size).run(fit_digits, batch_norm):
        torch.testing.assert_close(ours_weights, weights, rtol=1e-12, atol=1e-12)
        assert METRICS == set(metrics) == set(ours_metrics)
        assert 16 == len(losses) == len(ours_losses)
        assert [approx(loss) for loss in losses] == ours_losses
        assert {name: approx(value) for name, value in metrics.items()} == ours_metrics


class Halved(Regression):
    """The second half of every batch does not count: on two ranks, one rank's whole chunk."""

    norm = True
    named = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch[0], batch[1]
        kept = y[:, 1] > -90
        error = self(x) - y
        loss, weight = error[kept].square().mean() + error[kept].abs().mean(), kept.sum()
        if self.named:
            return {"loss": {"a": loss, "b": error.abs().mean()}, "weight": {"a": weight, "b": len(x)}}
        return {"loss": loss, "weight": weight}


class NamedHalved(Halved):
    named = True


def fit_halved(kind: type[Regression], accumulate: int) -> Any:
    module = kind()
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(16, size, dtype=torch.float64, generator=generator) for size in (4, 2))
    y[4:8, 1] = y[12:16, 1] = -99.0
    trainer = make_trainer(GradAvgStrategy(**single()), max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=8))
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.filterwarnings("ignore:rank . has a micro-batch of weight 0")
@pytest.mark.parametrize(("kind", "accumulate"), [(Halved, 1), (Halved, 2), (NamedHalved, 1)])
def test_samples_of_weight_zero_stay_in_the_statistics(world, kind, accumulate):
    expected = world(1).run(fit_halved, kind, accumulate)[0]
    for size in (2, 3):
        for state in world(size).run(fit_halved, kind, accumulate):
            torch.testing.assert_close(state, expected, rtol=1e-12, atol=1e-12)


class MLP(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def fit_mlp(split: bool, *, stock: bool = False) -> Any:
    """Body: 20 steps on global batches of 16, whole or with each rank's share of each."""
    draw = torch.Generator().manual_seed(2)
    x, y = torch.randn(64, 8, generator=draw, dtype=torch.float64), torch.randint(4, (64,), generator=draw)
    size = 1 if split or stock else dist.get_world_size()
    mine = torch.arange(64).view(-1, size, 16 // size)[:, 0 if size == 1 else dist.get_rank()].flatten()
    model, strategy = MLP(), "auto" if stock else GradAvgStrategy(split_batches=split)
    options: Any = {"max_epochs": 5, "use_distributed_sampler": False, "logger": False}
    trainer = (on_one_device if stock else make_trainer)(strategy=strategy, **options)
    trainer.fit(model, DataLoader(TensorDataset(x[mine], y[mine]), batch_size=16 // size))
    assert trainer.global_step == 20
    return model.state_dict()


@pytest.mark.parametrize(("world_size", "split"), [(1, False), (2, False), (4, False), (4, True)])
def test_the_mean_over_a_global_batch_is_that_of_one_device(world, world_size, split):
    """Case 3: after 20 steps the weights are those of one device, whose bits one rank has."""
    expected = fit_mlp(split, stock=True)
    first, *others = world(world_size).run(fit_mlp, split)
    tolerance = 0 if world_size == 1 else 1e-12
    torch.testing.assert_close(first, expected, rtol=tolerance, atol=tolerance)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
