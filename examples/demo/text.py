"""A byte-level language model on the docstrings of Python's standard library.

Docstrings have very different lengths. Ranks with equally many docstrings have different numbers of tokens, so the mean
of the ranks' means is not the mean over tokens.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.demo.global_batches import global_batch_loader
from examples.demo.training import Task

__all__ = ["TASK", "ByteLanguageModel", "DocstringData", "docstrings"]

Batch = tuple[Tensor, Tensor]

BOUNDARY = 256
"""The token before the first byte and after the last; tokens 0 to 255 are bytes."""

IGNORED = -100
"""The target of padding: `cross_entropy` leaves it out."""

NUM_TEST = 128


def docstrings(folder: Path) -> Iterator[bytes]:
    """Yield the docstrings of the modules in `folder`, in UTF-8, by file name and then by position in the file."""
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring:
                    yield docstring.encode()


def collate(samples: list[bytes]) -> Batch:
    """Return inputs and targets of shape (len(samples), longest sample + 1), padded; `samples` may be empty."""
    length = max(map(len, samples), default=0) + 1
    inputs = torch.full((len(samples), length), BOUNDARY)
    targets = torch.full((len(samples), length), IGNORED)
    for row, sample in enumerate(samples):
        tokens = torch.tensor(list(sample))
        inputs[row, 1 : len(sample) + 1] = tokens
        targets[row, : len(sample)] = tokens
        targets[row, len(sample)] = BOUNDARY
    return inputs, targets


class DocstringData(LightningDataModule):
    """Docstrings of the running interpreter's standard library, cut to `max_bytes`; 128 of them are for the test.

    By default there are 30 global batches of 32 and one of 9. With two micro-batches per window, the last window has
    one loader batch of 9 samples: chunks of 3, 3, 3 and 0 on 4 ranks.
    """

    def __init__(self, num_train: int = 969, max_bytes: int = 192, global_batch_size: int = 32, seed: int = 0) -> None:
        super().__init__()
        self.num_train = num_train
        self.max_bytes = max_bytes
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.samples: list[bytes] = []

    def setup(self, stage: str) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        wanted = self.num_train + NUM_TEST
        self.samples = [sample[: self.max_bytes] for sample in islice(docstrings(folder), wanted)]
        if len(self.samples) < wanted:
            raise RuntimeError(
                f"{folder} has {len(self.samples)} docstrings, but {wanted} are needed:"
                " run this with a Python whose standard library is there as .py files"
            )
        Random(self.seed).shuffle(self.samples)

    def train_dataloader(self) -> DataLoader[bytes]:
        assert self.trainer is not None
        loader_batch_size = self.global_batch_size // self.trainer.accumulate_grad_batches
        train = self.samples[: self.num_train]
        return global_batch_loader(train, loader_batch_size, collate, self.trainer, shuffle_seed=self.seed)

    def test_dataloader(self) -> DataLoader[bytes]:
        return global_batch_loader(self.samples[self.num_train :], 64, collate, self.trainer)


class ByteLanguageModel(LightningModule):
    """Predicts each byte from those before it, with a GRU."""

    def __init__(self, lr: float = 0.2, width: int = 96) -> None:
        super().__init__()
        self.lr = lr
        self.embedding = nn.Embedding(BOUNDARY + 1, 32)
        self.gru = nn.GRU(32, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BOUNDARY + 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, _ = self.gru(self.embedding(inputs))
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def mean_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the mean loss over valid tokens, in nats, 0 where there are none, and their number."""
        inputs, targets = batch
        num_tokens = (targets != IGNORED).sum()
        logits = self(inputs).flatten(0, 1)
        total = nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / num_tokens.clamp(min=1), num_tokens

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        loss, num_tokens = self.mean_loss(batch)
        self.log("train_loss", loss, batch_size=int(num_tokens), prog_bar=True)
        return {"loss": loss, "weight": num_tokens}

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        loss, num_tokens = self.mean_loss(batch)
        self.log("test_loss", loss, batch_size=int(num_tokens), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


TASK = Task("text", ByteLanguageModel, DocstringData, epochs=2, micro_batches=2, metric="test_loss")
