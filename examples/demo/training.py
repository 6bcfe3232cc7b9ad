"""How a task of the demo is described and trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy

from lightning_gradavg import GradAvgStrategy

__all__ = ["STRATEGIES", "Task", "close_process_group", "make_strategy", "train"]

STRATEGIES = ("auto", "ddp", "gradavg")


@dataclass(frozen=True)
class Task:
    """A model, data whose global batch is the same on every number of processes, and how long to train.

    Attributes:
        name: What reports call it.
        model: Builds the module.
        data: Builds the data module.
        epochs: Passes over the data.
        metric: What the module logs in the test.
        micro_batches: Micro-batches of one optimizer step on several processes. One process takes the global batch
            whole.
    """

    name: str
    model: Callable[[], LightningModule]
    data: Callable[[], LightningDataModule]
    epochs: int
    metric: str
    micro_batches: int = 1


def make_strategy(name: str) -> str | Strategy:
    """Return what `Trainer` takes as its strategy: `auto` and `ddp` are Lightning's, `gradavg` is ours."""
    if name == "gradavg":
        return GradAvgStrategy(reduction="weighted_mean")
    return name


def train(task: Task, strategy: str, devices: int, callbacks: Sequence[Callback] = ()) -> tuple[LightningModule, float]:
    """Train and test on `devices` processes of this machine, and return the module and the test metric.

    Lightning starts the other processes by running this script again, so every process comes through here.
    """
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=make_strategy(strategy),
        max_epochs=task.epochs,
        accumulate_grad_batches=1 if devices == 1 else task.micro_batches,
        use_distributed_sampler=False,  # the data module gives each rank its chunks
        deterministic=True,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    module = task.model()
    data = task.data()
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    return module, float(trainer.callback_metrics[task.metric])


def close_process_group() -> None:
    """End the process group, if there is one; the last thing that a process does.

    Lightning does so for NCCL only, and an interpreter that exits while threads of gloo run sometimes aborts with
    "terminate called without an active exception".
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
