"""Handwritten digits with a small CNN.

The 1797 images of 8 x 8 pixels are the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and
C. Kaynak (UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, CC BY 4.0). A line of the file has the
pixels, 0 to 16, and the digit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.demo.global_batches import global_batch_loader
from examples.demo.training import Task

__all__ = ["TASK", "DigitsClassifier", "DigitsData"]

Sample = tuple[Tensor, int]
Batch = tuple[Tensor, Tensor]

NUM_TRAIN = 1413
"""22 global batches of 64 and one of 5: on 4 ranks the last one has chunks of 2, 2, 1 and 0 images."""


def collate(samples: list[Sample]) -> Batch:
    """Return images of shape (len(samples), 1, 8, 8) and labels; `samples` may be empty, as a chunk may."""
    images = torch.cat([torch.empty(0, 8, 8), *(image[None] for image, _ in samples)])
    return images.unsqueeze(1), torch.tensor([label for _, label in samples], dtype=torch.long)


class DigitsData(LightningDataModule):
    """1413 images for training and 384 for the test, split by a fixed permutation."""

    def __init__(self, global_batch_size: int = 64, seed: int = 0) -> None:
        super().__init__()
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.samples: list[Sample] = []

    def setup(self, stage: str) -> None:
        rows = torch.from_numpy(np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",")).float()
        images = rows[:, :-1].view(-1, 8, 8) / 16 - 0.5
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(self.seed)).tolist()
        self.samples = [(images[i], int(rows[i, -1])) for i in order]

    def train_dataloader(self) -> DataLoader[Sample]:
        train = self.samples[:NUM_TRAIN]
        return global_batch_loader(train, self.global_batch_size, collate, self.trainer, shuffle_seed=self.seed)

    def test_dataloader(self) -> DataLoader[Sample]:
        return global_batch_loader(self.samples[NUM_TRAIN:], 128, collate, self.trainer)


class DigitsClassifier(LightningModule):
    """Two convolutions, decomposable over the samples and smooth, so that only rounding is left to differ.

    Group norm looks at one sample at a time, as batch norm does not. GELU has no kink: where a ReLU's input is within
    rounding of zero, the order of a sum decides whether the gradient passes, and training amplifies that.
    """

    def __init__(self, lr: float = 0.02) -> None:
        super().__init__()
        self.lr = lr
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.GELU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            nn.GroupNorm(4, 32),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        # The mean over the images, and 0 for an empty chunk, whose mean would be NaN.
        loss = nn.functional.cross_entropy(self.network(images), labels, reduction="sum") / max(len(labels), 1)
        self.log("train_loss", loss, batch_size=len(labels), prog_bar=True)
        return loss

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        hits = (self.network(images).argmax(dim=1) == labels).float()
        self.log("test_accuracy", hits.sum() / max(len(labels), 1), batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


TASK = Task("digits", DigitsClassifier, DigitsData, epochs=6, metric="test_accuracy")
