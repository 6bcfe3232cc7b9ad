"""Modules and data that `gradavg verify` is given by name."""

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


class Classifier(LightningModule):
    """Two layers; `loss` is "mean" or "sum" over the samples."""

    def __init__(self, loss: str = "mean", hidden: int = 8) -> None:
        super().__init__()
        self.loss = loss
        self.model = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y, reduction=self.loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scaled(Classifier):
    """Takes its learning rate from what a launcher sets, and what loads in workers."""

    def configure_optimizers(self) -> Any:
        assert int(os.environ["LOCAL_RANK"]) == self.local_rank
        return torch.optim.SGD(self.parameters(), lr=0.1 * int(os.environ["WORLD_SIZE"]))


class Normed(Classifier):
    """With batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.model.append(nn.BatchNorm1d(3))


class Failing(Classifier):
    """Starts a process on every rank that holds a pipe open, and fails."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with Path(os.environ["PIPE"]).open("w") as pipe:
            subprocess.Popen(["sleep", "600"], stdout=pipe)
        raise ArithmeticError("as planted")


class Data(LightningDataModule):
    """Random samples, the same in every process, which are read in order by a worker that no pickle reaches."""

    def __init__(self, samples: int = 24, batch_size: int = 4) -> None:
        super().__init__()
        self.samples, self.batch_size = samples, batch_size

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(self.samples, 6, generator=generator)
        y = torch.randint(3, (self.samples,), generator=generator)
        return DataLoader(
            TensorDataset(x, y),
            batch_size=self.batch_size,
            num_workers=1,
            collate_fn=lambda rows: tuple(torch.stack(column) for column in zip(*rows, strict=True)),
        )


class Augmented(Data):
    """Adds noise of NumPy's global generator in the worker."""

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        x, y = loader.dataset.tensors
        rows = list(zip(x, y, strict=True))
        return DataLoader(Noisy(rows), self.batch_size, num_workers=1)


class Noisy(list[Any]):
    """Rows, each with noise of its own whenever it is read."""

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x + float(np.random.normal()), y  # noqa: NPY002  # the generator that users' code draws from


class Stream(IterableDataset[Any]):
    """Gives each rank its part, by the variables of the launcher."""

    def __iter__(self) -> Any:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        generator = torch.Generator().manual_seed(3)
        rows = [(torch.randn(6, generator=generator), index % 3) for index in range(24)]
        return iter(rows[rank::ranks])


def stream() -> Any:
    return DataLoader(Stream(), batch_size=4)
