"""Modules and data that `gradavg verify` is given by name."""

import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from toys import Toy

ROWS = list(torch.arange(1.0, 25.0) / 24)


class Scaled(Toy):
    """Takes its learning rate from what a launcher sets."""

    def configure_optimizers(self) -> Any:
        assert int(os.environ["LOCAL_RANK"]) == self.local_rank
        return torch.optim.SGD(self.parameters(), lr=0.1 * int(os.environ["WORLD_SIZE"]))


class Failing(Toy):
    """Starts a process on every rank that holds a pipe open, and fails."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with Path(os.environ["PIPE"]).open("w") as pipe:
            subprocess.Popen(["sleep", "600"], stdout=pipe)
        raise ArithmeticError("as planted")


class Data(LightningDataModule):
    """Samples that are read in order by a worker, whose `collate_fn` no pickle reaches."""

    def __init__(self, samples: int = 24) -> None:
        super().__init__()
        self.rows = ROWS[:samples]

    def train_dataloader(self) -> Any:
        def collated(rows: list[Tensor]) -> Tensor:
            return torch.stack(rows)

        return DataLoader(self.rows, 4, num_workers=1, collate_fn=collated)


class Stream(IterableDataset[Any]):
    """Gives each rank its part, by the variables of the launcher."""

    def __iter__(self) -> Any:
        return iter(ROWS[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])])


stream = partial(DataLoader, Stream(), 4)
