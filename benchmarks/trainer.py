"""The Trainer of a benchmark: it trains, and does nothing beside that."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

__all__ = ["make_quiet_trainer"]


def make_quiet_trainer(strategy: Strategy, **options: Any) -> Trainer:
    """Return a Trainer without logger, checkpoints, progress bar, summary, and a sampler of Lightning's.

    Args:
        strategy: The strategy.
        options: Further options of the Trainer, such as `accelerator`, `devices`, `num_nodes` and `callbacks`. It
            trains for one epoch unless they say otherwise.
    """
    options.setdefault("max_epochs", 1)
    return Trainer(
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )
