"""A module and a data module that `gradavg verify` is given by name."""

import sys
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradavg import GradAvgStrategy, GradAvgVerifier


class Classifier(LightningModule):
    """Two layers; `loss` is "mean" or "sum" over the samples."""

    def __init__(self, loss: str = "mean") -> None:
        super().__init__()
        self.loss = loss
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y, reduction=self.loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Summed(Classifier):
    """With a sum loss."""

    def __init__(self) -> None:
        super().__init__("sum")


class Failing(Classifier):
    """Fails on every process."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise ArithmeticError("as planted")


class Data(LightningDataModule):
    """Random samples, the same in every process, which are read in order."""

    def __init__(self, samples: int = 24, batch_size: int = 4) -> None:
        super().__init__()
        self.samples, self.batch_size = samples, batch_size

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(self.samples, 6, generator=generator)
        y = torch.randint(3, (self.samples,), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=self.batch_size)


def fit(loss: str, on_difference: Any) -> None:
    """Train for real, on two processes that the Trainer starts, with the verifier as a callback."""
    verifier = GradAvgVerifier(2, on_difference=on_difference)
    trainer = Trainer(
        strategy=GradAvgStrategy(split_batches=True),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[verifier],
    )
    trainer.fit(Classifier(loss), Data())
    equal = verifier.report is not None and verifier.report.equal
    # One write, because the ranks share the output.
    sys.stdout.write(f"rank {trainer.global_rank}: {trainer.global_step} steps, equal {equal}\n")


if __name__ == "__main__":
    fit(sys.argv[1], sys.argv[2])
