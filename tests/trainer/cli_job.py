"""A module that a config file names; writes what it was trained with."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader


class Job(LightningModule):
    """Toy-S on uneven batches: rank 0 holds 1, 2, 3 and each other one 4."""

    def __init__(self, out: str, loss: str = "mean") -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.out, self.loss = out, loss

    def train_dataloader(self) -> Any:
        x: Any = [torch.tensor([1.0, 2.0, 3.0] if dist.get_rank() == 0 else [4.0], dtype=torch.float64)]
        return DataLoader(x, batch_size=None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = 0.5 * (self.w * batch) ** 2
        return losses.mean() if self.loss == "mean" else losses.sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.w.grad is not None
        strategy: Any = self.trainer.strategy
        seen = {
            "gradient": self.w.grad.item(),
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "strategy": type(strategy).__name__,
            "ddp": {name: str(value) for name, value in strategy._ddp_kwargs.items()},
            "start_method": strategy._start_method,
            "timeout": strategy._timeout.total_seconds(),
            "node_rank": strategy.node_rank,
        }
        Path(self.out, f"rank{dist.get_rank()}.json").write_text(json.dumps(seen))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=float(os.environ.get("JOB_LR", "0.01")))
