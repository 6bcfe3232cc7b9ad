"""Train every task of the demo in one configuration and save what the demo compares.

`python -m examples.demo.run_one --strategy ddp --devices 2 --output FOLDER` is one configuration, on two processes.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from torch import Tensor

from examples.demo import digits, text
from examples.demo.training import STRATEGIES, Task, close_process_group, train

__all__ = ["LossCurve", "ReversedSamples", "tasks"]


def tasks(*, quick: bool) -> list[Task]:
    """Return the tasks of the demo; `quick` keeps one epoch of each, with little and short text."""
    if not quick:
        return [digits.TASK, text.TASK]
    few = partial(text.DocstringData, num_train=3 * 32 + 9, max_bytes=48)
    return [replace(digits.TASK, epochs=1), replace(text.TASK, epochs=1, data=few)]


class LossCurve(Callback):
    """The mean loss of each global batch, over all ranks and micro-batches, each weighted by its count.

    Attributes:
        values: After `fit`, a float64 tensor with one mean loss per optimizer step, the same on all ranks.
    """

    def __init__(self) -> None:
        self.values = torch.empty(0, dtype=torch.float64)
        self._batches: list[tuple[int, float, float]] = []
        self._step = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Read before the batch, the step is the same for all micro-batches of a window.
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        count = float(len(batch[0]))
        if "weight" in outputs:
            count = float(outputs["weight"])
        # The logged loss, because that in `outputs` was divided for the accumulation.
        self._batches.append((self._step, float(trainer.callback_metrics["train_loss"]), count))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sums = torch.zeros(2, trainer.global_step, dtype=torch.float64)
        for step, loss, count in self._batches:
            sums[:, step] += torch.tensor([loss * count, count], dtype=torch.float64)
        total = trainer.strategy.reduce(sums, reduce_op="sum")
        assert isinstance(total, Tensor)
        self.values = total[0] / total[1]


class ReversedSamples(Callback):
    """Reverses the samples of each batch: the same mathematics, rounded differently."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        for tensor in batch:
            tensor.copy_(tensor.flip(0))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train every task of the demo in one configuration.")
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    parser.add_argument("--devices", type=int, required=True, help="number of processes")
    parser.add_argument("--output", type=Path, required=True, help="folder for the result; it must exist")
    parser.add_argument("--reversed", action="store_true", help="reverse the samples of each batch")
    parser.add_argument("--quick", action="store_true", help="one short epoch of each task")
    arguments = parser.parse_args()

    results = {}
    is_global_zero = True
    for task in tasks(quick=arguments.quick):
        curve = LossCurve()
        timer = Timer()
        callbacks: list[Callback] = [curve, timer]
        if arguments.reversed:
            callbacks.append(ReversedSamples())
        module, metric = train(task, arguments.strategy, arguments.devices, callbacks)
        results[task.name] = {
            "losses": curve.values,
            "weights": {name: parameter.detach() for name, parameter in module.named_parameters()},
            "metric": metric,
            "seconds": timer.time_elapsed("train"),
        }
        is_global_zero = module.global_rank == 0
    if is_global_zero:
        torch.save(results, arguments.output / "results.pt")
    close_process_group()


if __name__ == "__main__":
    main()
