"""Modules and data that `gradavg verify` is given by name."""

import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

RANDOM = torch.Generator().manual_seed(3)
ROWS = list(zip(torch.randn(24, 6, generator=RANDOM), torch.randint(3, (24,), generator=RANDOM), strict=True))


class Classifier(LightningModule):
    """Two layers; `loss` is "mean" or "sum" over the samples."""

    def __init__(self, loss: str = "mean", hidden: int = 8) -> None:
        super().__init__()
        self.loss = loss
        self.model = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1], reduction=self.loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scaled(Classifier):
    """Takes its learning rate from what a launcher sets."""

    def configure_optimizers(self) -> Any:
        assert int(os.environ["LOCAL_RANK"]) == self.local_rank
        return torch.optim.SGD(self.parameters(), lr=0.1 * int(os.environ["WORLD_SIZE"]))


class Failing(Classifier):
    """Starts a process on every rank that holds a pipe open, and fails."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with Path(os.environ["PIPE"]).open("w") as pipe:
            subprocess.Popen(["sleep", "600"], stdout=pipe)
        raise ArithmeticError("as planted")


class Noisy(list[Any]):
    """Rows, with noise of NumPy's global generator whenever one is read."""

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x + float(np.random.normal()), y  # noqa: NPY002  # the generator that users' code draws from


class Data(LightningDataModule):
    """Samples that are read in order by a worker, whose `collate_fn` no pickle reaches."""

    def __init__(self, samples: int = 24, kind: Any = list) -> None:
        super().__init__()
        self.rows = kind(ROWS[:samples])

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 4, num_workers=1, collate_fn=lambda rows: tuple(default_collate(rows)))


class Stream(IterableDataset[Any]):
    """Gives each rank its part, by the variables of the launcher."""

    def __iter__(self) -> Any:
        return iter(ROWS[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])])


stream, augmented = partial(DataLoader, Stream(), 4), partial(Data, kind=Noisy)
