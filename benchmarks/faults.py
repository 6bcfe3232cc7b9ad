"""What it costs that every run is watched for faults, on the demo's language model: `python -m benchmarks.faults`.

As `benchmarks.monitor`: rounds with and without, in pairs, in one run. With it, every step asks whether a comparison of
the replicas is due, and the last of a round makes one. By default one comes every 1000 steps: divide its cost by that.
`--stream` adds what a stream adds to every step: that ranks tell each other that they have a batch.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from benchmarks.monitor import Rounds, batches, report
from examples.demo.text import ByteLanguageModel
from examples.demo.training import close_process_group
from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.device import Tally
from lightning_gradavg.faults.part import ComparedReplicas
from lightning_gradavg.part import Run
from lightning_gradavg.ranks import World

__all__ = ["main"]


class _Watched(Callback):
    """Does in a step what is done in every run with a stream.

    Args:
        steps: Steps from one comparison of the replicas to the next.
        streams: Whether ranks tell each other of batches.
    """

    def __init__(self, steps: int, *, streams: bool) -> None:
        self._steps, self._streams = steps, streams
        self._each = ComparedReplicas(10**9, buffers=False)
        self._due = ComparedReplicas(1, buffers=False)
        self._tally: Tally | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch."""
        strategy: Any = trainer.strategy
        assert isinstance(strategy.model, DistributedDataParallel)
        run = Run(trainer, pl_module, strategy.root_device, World.of(None), strategy.model)
        self._each.run = self._due.run = run

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Ask whether a comparison is due, and tell the others of a batch."""
        self._each.on_train_batch_start()
        if self._streams:
            self._tally = Tally([1, 0], dist.ReduceOp.SUM, self._each.run.device)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read what the others told, and compare the replicas at the end of a round."""
        if self._tally is not None:
            self._tally.read()
        if (batch_idx + 1) % self._steps == 0:
            self._due.on_train_end()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure what is watched for in every run.")
    parser.add_argument("--devices", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument("--pairs", type=int, default=16, help="pairs of rounds that count (default: 16)")
    parser.add_argument("--steps", type=int, default=50, help="steps of a round (default: 50)")
    parser.add_argument("--stream", action="store_true", help="with what a stream adds to every step")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    rounds = Rounds(_Watched(arguments.steps, streams=arguments.stream), arguments.steps)
    trainer = Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy=GradAvgStrategy(reduction="weighted_mean", check_replicas_every_n_steps=None),
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=[rounds],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    loader = batches(trainer.global_rank, arguments.steps, 2 * (arguments.pairs + 1))
    trainer.fit(ByteLanguageModel(lr=0.01), loader)
    if trainer.is_global_zero:
        print(report(rounds.rounds, arguments.steps, "all that is watched for"))  # noqa: T201  # a benchmark prints
    close_process_group()


if __name__ == "__main__":
    main()
