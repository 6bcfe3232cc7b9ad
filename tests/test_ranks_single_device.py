"""A script trains and logs on any number of ranks as in stock Lightning on one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from data_parallel import Run, assert_same_run, fit, parallel, single
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from examples.demo import digits, text


class Digits(digits.DigitsClassifier):
    """The digits example, with its metrics logged in every way; loads batches of 64, and a short one."""

    samples = 453

    def __init__(self, dtype: torch.dtype) -> None:
        seed_everything(0, verbose=False)  # the order of the samples is drawn after the weights
        super().__init__()
        metrics = {f"{stage}_accuracy": MulticlassAccuracy(10, average="micro") for stage in ("train", "val")}
        self.metrics = nn.ModuleDict(metrics)

    def load(self, start: int, stop: int, **options: Any) -> Any:
        data = digits.DigitsData()
        data.setup("fit")
        return DataLoader(data.samples[start:stop], 64, collate_fn=digits.collate, **options)

    def train_dataloader(self) -> Any:
        return self.load(0, self.samples, shuffle=True)

    def val_dataloader(self) -> Any:
        return self.load(self.samples, self.samples + 133)

    def losses(self, stage: str, batch: Any) -> Tensor:
        """Return the loss of each sample, and log how many are right."""
        images, labels = batch
        scores, name = self.network(images), f"{stage}_accuracy"
        self.metrics[name](scores, labels)
        self.log(name, self.metrics[name], on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(scores, labels, reduction="none")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.losses("train", batch)
        for how in ("mean", "sum", "max", "min"):
            value = getattr(losses, how)()
            self.log(f"train_{how}", value, reduce_fx=how, on_step=True, on_epoch=True, sync_dist=True)
        return losses.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        losses = self.losses("val", batch)
        self.log("val_loss", losses.mean(), sync_dist=True)
        # As of a model that is evaluated in training mode: by the statistics of the batch.
        normed = nn.functional.batch_norm(losses[:, None], None, None, training=True)
        self.log("val_normed", normed.max(), sync_dist=True)


class EvenDigits(Digits):
    """No batch is short; if the sampler is asked for one more after the last, it draws from its generator again."""

    def train_dataloader(self) -> Any:
        return self.load(0, 384, shuffle=True, generator=torch.Generator().manual_seed(1))


class NormedDigits(Digits):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.network[1], self.network[4] = nn.BatchNorm2d(16), nn.BatchNorm2d(32)


class Bytes(text.ByteLanguageModel):
    """The text example: samples of any length, and weights; it does not log."""

    log: Any = Mock()

    def __init__(self, dtype: torch.dtype) -> None:
        seed_everything(0, verbose=False)
        super().__init__()

    def train_dataloader(self) -> Any:
        data = text.DocstringData(105, 96)
        data.setup("fit")
        return DataLoader(data.samples[:105], 16, shuffle=True, collate_fn=text.collate)


OPTIONS: dict[str, Any] = {"max_epochs": 2, "precision": "64-true"}
SPLIT = {"split_batches": True, "reduction": "weighted_mean", "exact_evaluation": True}


@cache
def stock(kind: type[LightningModule]) -> Run:
    return fit(kind, None, **OPTIONS)


@pytest.mark.parametrize(
    ("kind", "world_size", "strategy"),
    [
        (NormedDigits, 1, single()),
        (Digits, 2, single()),
        (NormedDigits, 3, single()),
        (Digits, 2, parallel()),
        (Digits, 1, SPLIT),
        (Digits, 3, SPLIT),
        (EvenDigits, 4, {"split_batches": True, "exact_evaluation": True}),
        (Bytes, 1, SPLIT),
        (Bytes, 2, SPLIT),
        (Bytes, 4, SPLIT | {"max_device_batch_size": 3}),
    ],
    ids=str,
)
def test_a_script_trains_as_in_stock_lightning(world, kind, world_size, strategy):
    """Order, gradients, statistics, losses and metrics are stock Lightning's; those of one rank to the bit."""
    expected, tolerance = stock(kind), 0 if world_size == 1 else 1e-12
    runs = world(world_size).run(fit, kind, strategy, **OPTIONS)
    assert expected.logged[-1].keys() == runs[0].logged[-1].keys()
    if "equivalent_to" not in strategy:  # what training logs is then Lightning's mean over ranks
        logged = [{name: one[name] for name in one if name.startswith("val")} for one in expected.logged]
        expected = replace(expected, logged=logged)
    assert_same_run(runs, expected, tolerance)
