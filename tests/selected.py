"""A job for which case 25 selects a strategy: Toy-S on uneven batches, which writes what it was trained with.

`python selected.py OUT STRATEGY` trains it on two processes, with a strategy by its registered name or an instance by
its rule.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from toys import Toy, loader

from examples.demo.training import close_process_group
from lightning_gradavg import GradAvgStrategy

__all__ = ["QUIET", "Job"]

_SWITCHES = ("logger", "use_distributed_sampler", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
QUIET: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, **dict.fromkeys(_SWITCHES, False)}
"""Options of a Trainer."""


class Job(Toy):
    """Rank 0 holds 1, 2, 3 and each other one 4."""

    def __init__(self, out: str) -> None:
        super().__init__("s")
        self.out = Path(out)

    def train_dataloader(self) -> Any:
        return loader([[1.0, 2.0, 3.0] if dist.get_rank() == 0 else [4.0]])

    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        of_ddp = [strategy._ddp_kwargs.get(name) for name in ("bucket_cap_mb", "static_graph")]
        found = [dist.get_rank(), dist.get_world_size(), strategy.node_rank, type(strategy).__name__]
        found += [strategy._timeout.total_seconds(), *of_ddp, self.seen.gradients[0].item()]
        (self.out / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    out, name = sys.argv[1:]
    strategy: Any = name if name.startswith("gradavg") else GradAvgStrategy(reduction=name)
    Trainer(strategy=strategy, **QUIET).fit(Job(out))
    close_process_group()
