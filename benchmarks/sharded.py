"""What a step of a sharded model costs beside Lightning's ModelParallelStrategy: `python -m benchmarks.sharded`.

A round trains once with each strategy, in an order drawn anew, and compares step times with stock's of the same round.
The slower rank counts. What is printed are the median over the rounds and its quartiles; the first round is dropped.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.trainer import make_quiet_trainer
from benchmarks.world import is_rank, joined, slowest, start
from lightning_gradavg import GradAvgModelParallelStrategy

STOCK = "stock"
# Our strategies, by their rule.
RULES = ("mean", "sum", "weighted_mean")
WARMUP = 3
# Of a layer, and of a batch.
WIDTH = 1024
ROWS = 64


class Blocks(LightningModule):
    """Four blocks of 4 MB, each of them sharded."""

    def __init__(self, *, has_weight: bool) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        self.blocks = nn.Sequential(*blocks)
        self.has_weight = has_weight
        # When each step began.
        self.times: list[float] = []

    def configure_model(self) -> None:  # noqa: D102  # Lightning's, as those that follow
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  # torch 2.4 has it elsewhere

        mesh: Any = self.device_mesh
        for part in (*self.blocks, self):
            fully_shard(part, mesh=mesh["data_parallel"])

    def training_step(self, batch: Tensor, _: int) -> Any:  # noqa: D102  # Lightning's hook
        self.times.append(perf_counter())
        loss = self.blocks(batch).square().mean()
        if self.has_weight:
            return {"loss": loss, "weight": 1 + dist.get_rank()}
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:  # noqa: D102  # Lightning's hook
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def measure_step(
    make_strategy: Callable[..., Strategy], device: torch.device, steps: int, *, has_weight: bool
) -> float:
    """Return the seconds of a step, of the slower rank. A collective operation."""
    model = Blocks(has_weight=has_weight)
    batches: Any = [torch.randn(ROWS, WIDTH)] * (WARMUP + steps + 1)
    ranks = dist.get_world_size()
    trainer = make_quiet_trainer(
        make_strategy(data_parallel_size=ranks, tensor_parallel_size=1),
        accelerator="cpu" if device.type == "cpu" else "gpu",
        devices=ranks,
    )
    trainer.fit(model, DataLoader(batches, batch_size=None))
    (seconds,) = slowest([(model.times[-1] - model.times[WARMUP]) / steps], device)
    return seconds


def measure(rounds: int, steps: int) -> None:
    """Measure as a rank, and print a line for each strategy on rank 0."""
    strategies: dict[str, Callable[..., Strategy]] = {STOCK: ModelParallelStrategy}
    for rule in RULES:
        strategies[rule] = partial(GradAvgModelParallelStrategy, reduction=rule)
    seconds: dict[str, list[float]] = {name: [] for name in strategies}
    # With the same seed, all ranks draw the same order.
    generator = random.Random(0)
    with joined() as world:
        for number in range(rounds + 1):
            for name in generator.sample(list(strategies), len(strategies)):
                has_weight = name == "weighted_mean"
                step = measure_step(strategies[name], world.device, steps, has_weight=has_weight)
                # The first round is dropped.
                if number > 0:
                    seconds[name].append(step)
        if dist.get_rank() > 0:
            return
        for name, seconds_of_rounds in seconds.items():
            ratios = [ours / stock for ours, stock in zip(seconds_of_rounds, seconds[STOCK], strict=True)]
            low, _, high = quantiles(ratios, n=4)
            milliseconds = 1e3 * median(seconds_of_rounds)
            sys.stdout.write(f"{name:14} {milliseconds:8.2f} ms  {median(ratios):.3f} [{low:.3f}, {high:.3f}]\n")


def main() -> None:
    """Measure as a rank, or start the ranks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="rounds that count (default: 20)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a round (default: 20)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine (default: 2)")
    arguments = parser.parse_args()
    if is_rank():
        measure(arguments.rounds, arguments.steps)
    else:
        start("benchmarks.sharded", arguments.ranks, sys.argv[1:])


if __name__ == "__main__":
    main()
