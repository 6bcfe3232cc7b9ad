"""A module that a config file names; writes what it was trained with."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader


class Job(LightningModule):
    """Toy-S on uneven batches: rank 0 holds 1, 2, 3 and each other one 4."""

    def __init__(self, out: str) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.out = out

    def train_dataloader(self) -> Any:
        x: Any = [torch.tensor([1.0, 2.0, 3.0] if dist.get_rank() == 0 else [4.0], dtype=torch.float64)]
        return DataLoader(x, batch_size=None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (0.5 * (self.w * batch) ** 2).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.w.grad is not None
        node = self.trainer.strategy.node_rank  # type: ignore[attr-defined]  # of parallel strategies
        seen = {
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "node_rank": node,
            "gradient": self.w.grad.item(),
        }
        folder = Path(self.out)
        folder.mkdir(exist_ok=True)
        (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(seen))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)
