"""Time and memory of `gradavg verify` for a model of 124 million parameters, and of one process that trains it.

Processor seconds count on a machine that does something else, too. The figures are in docs/verify.md. Linux only:
elsewhere no process knows what it shares.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from typing import Any, NamedTuple

import psutil
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["Model", "data", "main", "train"]

_WORDS = 50_257
_WIDTH = 768
_LENGTH = 64
"""Words of a text."""


class Model(LightningModule):
    """A transformer as large as GPT-2: 12 layers of width 768, with tied embeddings, trained with AdamW."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(_WIDTH, 12, 4 * _WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.positions = nn.Embedding(1024, _WIDTH)
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(_WIDTH)

    def training_step(self, batch: Any, *_: Any) -> Tensor:
        """Return the mean loss of the next words."""
        (words,) = batch
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], device=words.device)
        rows = self.words(words) + self.positions.weight[: words.shape[1]]
        rows = self.norm(self.layers(rows, mask=mask, is_causal=True))
        scores = rows[:, :-1] @ self.words.weight.T
        return nn.functional.cross_entropy(scores.transpose(1, 2), words[:, 1:])

    def configure_optimizers(self) -> Any:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def data() -> DataLoader[Any]:
    """Return random texts, two in a batch."""
    words = torch.randint(_WORDS, (16, _LENGTH), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(words), batch_size=2)


def train() -> None:
    """Train two steps in float64 on one process."""
    trainer = Trainer(
        max_steps=2,
        precision="64-true",
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), data())


class _Usage(NamedTuple):
    """What a process and its descendants use."""

    held: int  # bytes; what they share counts once
    seconds: dict[int, float]  # of processors so far, by process


def _usage(root: int) -> _Usage:
    held: int = 0
    seconds: dict[int, float] = {}
    with contextlib.suppress(psutil.Error):  # it has ended
        root_process = psutil.Process(root)
        for process in [root_process, *root_process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds[process.pid] = times.user + times.system
                held += process.memory_full_info().pss
    return _Usage(held, seconds)


def main() -> None:
    """Print what both take."""
    verify = "-m lightning_gradavg verify benchmarks/verified.py:Model --data benchmarks/verified.py:data --steps 2"
    commands = {
        "one process trains": ["-c", "from benchmarks.verified import train; train()"],
        "gradavg verify": verify.split(),
    }
    for name, arguments in commands.items():
        started = time.perf_counter()
        most = 0
        of_processors: dict[int, float] = {}
        with subprocess.Popen([sys.executable, *arguments]) as process:
            while process.poll() is None:
                usage = _usage(process.pid)
                most = max(most, usage.held)
                of_processors |= usage.seconds
                time.sleep(0.2)
        seconds = time.perf_counter() - started
        times = f"{seconds:.0f} s, {sum(of_processors.values()):.0f} s of processors"
        line = f"{name}: exit code {process.returncode}, {times}, {most / 1e9:.1f} GB"
        print(line)  # noqa: T201  # a benchmark prints


if __name__ == "__main__":
    main()
