"""A script trains and logs on any number of ranks as in stock Lightning on one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from ranks import make_trainer
from replicas import Normed, Options, data, fit, parallel, single, state_of
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from examples.demo import digits, text
from lightning_gradavg import GradAvgStrategy


class Halved(Normed):
    """The second half of every batch does not count: on two ranks, one rank's whole chunk."""

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


def fit_halved(kind: type[Halved], accumulate: int) -> Any:
    module, loader = kind(), data(16)
    y = loader.dataset[:][1]
    y[4:8, 1] = y[12:16, 1] = -99.0
    fit(module, single(), loader, accumulate_grad_batches=accumulate)
    return state_of(module)


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
        each = nn.functional.cross_entropy(scores, labels, reduction="none")
        for how in ("sum", "max", "min"):
            value = getattr(each, how)()
            self.log(f"train_{how}", value, reduce_fx=how, on_step=True, on_epoch=True, sync_dist=True)
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
    """Notes what is logged at each training step."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        metrics = trainer.callback_metrics
        self.logged.append({name: float(metrics[name]) for name in metrics if name.endswith("_step")})


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
    return model.state_dict(), trainer.global_step, steps.logged, metrics


@cache
def stock(name: str) -> Any:
    return fit_task(name, None)


METRICS = {
    *(f"train_{what}{of}" for what in ("loss", "sum", "max", "min") for of in ("", "_step", "_epoch")),
    "train_accuracy",
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
    state, taken, steps, metrics = stock(name)
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
            assert [pytest.approx(step, rel=1e-12) for step in steps] == rank[2]
