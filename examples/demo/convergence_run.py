"""Train the demo's tasks with every way of sending gradients, on one number of processes.

`python -m examples.demo.convergence_run --devices 2 --output FOLDER` is one number of processes of
`examples.demo.convergence`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook

from examples.demo import digits, text
from examples.demo.comparison import weights_difference
from examples.demo.run_one import LossCurve, ReversedSamples
from examples.demo.training import Task, close_process_group
from lightning_gradavg import GradAvgStrategy, hooks

__all__ = ["OUTCOMES", "WAYS", "Outcome", "SentBytes", "Way", "seeded_tasks"]

OUTCOMES = "outcomes.jsonl"
"""The file of outcomes in the output folder: a line of JSON per run."""

SeededTask = tuple[Task, Callable[[int], LightningDataModule]]


@dataclass(frozen=True)
class Outcome:
    """What one run left.

    Attributes:
        task: Name of the task.
        way: Name of the way of sending.
        seed: Of the initial weights, of the split into training and test, and of the order.
        devices: Number of processes.
        losses: Mean loss of each global batch, one per optimizer step.
        metric: The test metric.
        distance: Of the trained weights from those of the first way with this seed, see `weights_difference`.
        bytes_per_step: What one process sent for the last optimizer step, if an all-reduce is a ring.
    """

    task: str
    way: str
    seed: int
    devices: int
    losses: list[float]
    metric: float
    distance: float
    bytes_per_step: float


@dataclass(frozen=True)
class Way:
    """A way of sending gradients.

    Attributes:
        name: What reports call it.
        hook: The communication hook.
        reverses: Whether the samples of each batch are reversed: the same mathematics in other roundings.
    """

    name: str
    hook: Callable[..., Any] = allreduce_hook
    reverses: bool = False


WAYS = (
    Way("float32"),
    Way("float32, reversed", reverses=True),
    Way("bfloat16", hooks.bfloat16),
    Way("torch's bf16 hook", bf16_compress_hook),
    Way("float16", hooks.float16),
)
"""The first one is what the others are compared with."""


def seeded_tasks(*, quick: bool) -> list[SeededTask]:
    """Return the demo's tasks, shortened, each with what makes its data of a seed; `quick` keeps a few steps."""

    def images(seed: int) -> LightningDataModule:
        return digits.DigitsData(seed=seed)

    def docstrings(seed: int) -> LightningDataModule:
        return text.DocstringData(num_train=105 if quick else 969, max_bytes=16 if quick else 64, seed=seed)

    return [
        (Task("digits", digits.DigitsClassifier, digits.DigitsData, 1 if quick else 4, "test_accuracy"), images),
        (Task("text", text.ByteLanguageModel, text.DocstringData, 1 if quick else 2, "test_loss", 2), docstrings),
    ]


class SentBytes(Callback):
    """Counts what this process sends between optimizer steps.

    An all-reduce of b bytes counts as the 2 (W - 1) / W b of a ring.

    Attributes:
        per_step: Bytes of the last optimizer step.
    """

    def __init__(self) -> None:
        self.per_step = 0.0
        # Appended by several threads.
        self._sent: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.per_step = sum(self._sent)
        self._sent.clear()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count within the context."""
        all_reduce, all_to_all = dist.all_reduce, dist.all_to_all_single

        def counted_all_reduce(tensor: Tensor, *args: Any, **options: Any) -> Any:
            world_size = dist.get_world_size()
            self._sent.append(2 * (world_size - 1) / world_size * tensor.nbytes)
            return all_reduce(tensor, *args, **options)

        def counted_all_to_all(received: Tensor, sent: Tensor, of: Any, to: Any, **options: Any) -> Any:
            self._sent.append(sent.nbytes * (1 - to[dist.get_rank()] / max(sum(to), 1)))
            return all_to_all(received, sent, of, to, **options)

        with (
            patch.object(dist, "all_reduce", counted_all_reduce),
            patch.object(dist, "all_to_all_single", counted_all_to_all),
        ):
            yield


def _train(
    task: Task, data: LightningDataModule, way: Way, seed: int, devices: int
) -> tuple[LightningModule, LossCurve, float, float]:
    """Train and test, and return the module, its losses, the test metric and the bytes of a step."""
    seed_everything(seed, verbose=False)
    curve, sent = LossCurve(), SentBytes()
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=GradAvgStrategy(reduction="weighted_mean", ddp_comm_hook=way.hook),
        max_epochs=task.epochs,
        accumulate_grad_batches=task.micro_batches,
        use_distributed_sampler=False,  # the data module gives each rank its chunks
        deterministic=True,
        callbacks=[curve, sent, *([ReversedSamples()] if way.reverses else [])],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    module = task.model()
    with sent.counting():
        trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    return module, curve, float(trainer.callback_metrics[task.metric]), sent.per_step


def _outcomes(devices: int, seeds: int, *, quick: bool) -> Iterator[tuple[bool, Outcome]]:
    """Yield whether this is rank 0, and the outcome, of every run."""
    for seed in range(seeds):
        for task, data_of in seeded_tasks(quick=quick):
            exact: dict[str, Tensor] = {}
            for way in WAYS:
                module, curve, metric, sent = _train(task, data_of(seed), way, seed, devices)
                weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
                exact = exact or weights
                yield (
                    module.global_rank == 0,
                    Outcome(
                        task=task.name,
                        way=way.name,
                        seed=seed,
                        devices=devices,
                        losses=curve.values.tolist(),
                        metric=metric,
                        distance=weights_difference(exact, weights),
                        bytes_per_step=sent,
                    ),
                )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo's tasks with every way of sending gradients.")
    parser.add_argument("--devices", type=int, required=True, help="number of processes")
    parser.add_argument("--seeds", type=int, required=True, help="runs of each way")
    parser.add_argument("--output", type=Path, required=True, help="folder for the outcomes; it must exist")
    parser.add_argument("--quick", action="store_true", help="a few steps of each task")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for is_global_zero, outcome in _outcomes(arguments.devices, arguments.seeds, quick=arguments.quick):
        if is_global_zero:
            with (arguments.output / OUTCOMES).open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
    close_process_group()


if __name__ == "__main__":
    main()
