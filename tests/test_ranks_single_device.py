"""Training on any number of ranks is stock Lightning's on one: under `single_device`, and where batches are split."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel import MODELS, Numbers, Run, assert_same_run, fit, loader, train
from grids import grid
from lightning.pytorch import Callback, Trainer, seed_everything
from ranks import make_trainer
from replicas import Options, Regression, parallel, single
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from examples.demo import digits, text
from lightning_gradavg import GradAvgStrategy


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
    ("name", "world_size"), grid(["plain cnn", "masked", "sparse", "rows", "normed rows"], [3, 4, 2, 1], strength=1)
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


@pytest.mark.parametrize(("kind", "accumulate"), [(Halved, 1), (Halved, 2), (NamedHalved, 1)])
def test_samples_of_weight_zero_stay_in_the_statistics(world, kind, accumulate):
    expected = world(1).run(fit_halved, kind, accumulate)[0]
    for size in (2, 3):
        for state in world(size).run(fit_halved, kind, accumulate):
            torch.testing.assert_close(state, expected, rtol=1e-12, atol=1e-12)


class Digits(digits.DigitsClassifier):
    """The digits example, with its metrics logged in every way."""

    def __init__(self) -> None:
        super().__init__()
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


class NormedDigits(Digits):
    def __init__(self) -> None:
        super().__init__()
        self.network[1], self.network[4] = nn.BatchNorm2d(16), nn.BatchNorm2d(32)


class Steps(Callback):
    """Notes the training loss that is logged at each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics.get("train_loss_step", 0)))


# A model, its samples, their collation, how many there are, and the size of a global batch; the last one may be short.
TASKS: dict[str, Any] = {
    "digits": (Digits, digits.DigitsData, digits.collate, 453, 64),
    "even digits": (Digits, digits.DigitsData, digits.collate, 448, 64),
    "normed digits": (NormedDigits, digits.DigitsData, digits.collate, 453, 64),
    "text": (text.ByteLanguageModel, lambda: text.DocstringData(105, 96), text.collate, 105, 16),
}


def fit_task(name: str, options: Options | None) -> Any:
    """Body: train for 2 epochs in float64, validate and test; in stock Lightning on one device, or on all ranks."""
    model_class, data_class, collate, count, size = TASKS[name]
    seed_everything(0, verbose=False)
    model, data, steps = model_class(), data_class(), Steps()
    data.setup("fit")
    # Of digits: batches of 64, 64 and 5, and of 64 six times and 3. The order is drawn after the weights.
    order = ((0, count, True), (count, count + 133, False), (count + 133, count + 520, False))
    train_set, val_set, test_set = (
        DataLoader(data.samples[start:stop], size, shuffle=shuffle, collate_fn=collate)
        for start, stop, shuffle in order
    )
    trainer_options: Any = {"max_epochs": 2, "precision": "64-true", "num_sanity_val_steps": 0, "callbacks": [steps]}
    if options is None:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet, **trainer_options)
    else:
        trainer = make_trainer(GradAvgStrategy(**options), **trainer_options)
    evaluates = name != "text"
    trainer.fit(model, train_set, val_set if evaluates else None)
    metrics = trainer.callback_metrics
    if evaluates:
        trainer.test(model, test_set, verbose=False)
        metrics |= trainer.callback_metrics
    return model.state_dict(), trainer.global_step, steps.losses, metrics


@cache
def stock(name: str) -> Any:
    return fit_task(name, None)


METRICS = {
    *("train_loss", "train_loss_step", "train_loss_epoch", "train_accuracy"),
    *("val_loss", "val_accuracy", "test_accuracy", "test_hits"),
}
SPLIT = {"split_batches": True, "reduction": "weighted_mean", "exact_evaluation": True}


@pytest.mark.parametrize(
    ("name", "world_size", "options"),
    [
        ("normed digits", 1, single()),
        ("digits", 2, single()),
        ("normed digits", 3, single()),
        ("digits", 2, parallel(4)),
        ("digits", 1, SPLIT),
        ("digits", 3, SPLIT),
        ("even digits", 4, {"split_batches": True, "exact_evaluation": True}),
        ("text", 1, SPLIT),
        ("text", 2, SPLIT),
        ("text", 4, SPLIT | {"max_device_batch_size": 3}),
    ],
    ids=str,
)
def test_a_script_trains_as_in_stock_lightning(world, name, world_size, options):
    """Order, weights, statistics, losses and metrics are stock Lightning's; the weights of one rank to the bit."""
    state, taken, losses, metrics = stock(name)
    first, *_ = ranks = world(world_size).run(fit_task, name, options)
    tolerance = 0 if world_size == 1 else 1e-12
    torch.testing.assert_close(first[0], state, rtol=tolerance, atol=tolerance)
    for rank in ranks:
        torch.testing.assert_close(rank[0], first[0], rtol=0, atol=0)
        assert taken == rank[1]
        if name != "text":
            assert METRICS == set(metrics) == set(rank[3])
            # Without a preset, what training logs is Lightning's mean over ranks.
            equal = {metric for metric in METRICS if "equivalent_to" in options or not metric.startswith("train")}
            ours, theirs = ({metric: values[metric] for metric in equal} for values in (rank[3], metrics))
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        if "equivalent_to" in options:
            assert [pytest.approx(loss, rel=1e-12) for loss in losses] == rank[2]
