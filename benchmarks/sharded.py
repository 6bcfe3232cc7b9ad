"""What a step of a sharded model costs beside Lightning's ModelParallelStrategy: `python -m benchmarks.sharded`.

A round trains once with each strategy, in an order drawn anew, and compares step times with stock's of the same round.
The slower rank counts. What is printed are the median over the rounds and its quartiles; the first round is dropped.
"""

from __future__ import annotations

import argparse
import random
import sys
from functools import partial
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.world import is_rank, joined, slowest, start
from lightning_gradavg import GradAvgModelParallelStrategy

STOCK, WARMUP, WIDTH, ROWS = "stock", 3, 1024, 64


class Blocks(LightningModule):
    """Four blocks of 4 MB, each of them sharded."""

    def __init__(self, *, weighs: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.weighs, self.began = weighs, list[float]()

    def configure_model(self) -> None:  # noqa: D102  # Lightning's, as those that follow
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  # torch 2.4 has it elsewhere

        mesh: Any = self.device_mesh
        for part in (*self.blocks, self):
            fully_shard(part, mesh=mesh["data_parallel"])

    def training_step(self, batch: Tensor, _: int) -> Any:  # noqa: D102  # Lightning's hook
        self.began.append(perf_counter())
        loss = self.blocks(batch).square().mean()
        return {"loss": loss, "weight": 1 + dist.get_rank()} if self.weighs else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:  # noqa: D102  # Lightning's hook
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def step_time(strategy: Any, device: torch.device, steps: int, *, weighs: bool) -> float:
    """Return the seconds of a step, of the slower rank."""
    model, batches = Blocks(weighs=weighs), [torch.randn(ROWS, WIDTH)] * (WARMUP + steps + 1)
    quiet: Any = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"),
        False,
    )
    ranks = dist.get_world_size()
    sharing = strategy(data_parallel_size=ranks, tensor_parallel_size=1)
    kind = "cpu" if device.type == "cpu" else "gpu"
    trainer = Trainer(accelerator=kind, devices=ranks, strategy=sharing, max_epochs=1, **quiet)
    trainer.fit(model, DataLoader(batches, batch_size=None))
    return slowest([(model.began[-1] - model.began[WARMUP]) / steps], device)[0]


def main() -> None:
    """Measure, and print a line for each strategy."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="rounds that count (default: 20)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a round (default: 20)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine (default: 2)")
    chosen = parser.parse_args()
    if not is_rank():
        start("benchmarks.sharded", chosen.ranks, sys.argv[1:])
        return
    rules = ("mean", "sum", "weighted_mean")
    ours = {rule: partial(GradAvgModelParallelStrategy, reduction=rule) for rule in rules}
    strategies: dict[str, Any] = {STOCK: ModelParallelStrategy, **ours}
    times: dict[str, list[float]] = {name: [] for name in strategies}
    draw = random.Random(0)
    with joined() as world:
        for _ in range(chosen.rounds + 1):
            for name in draw.sample(list(strategies), len(strategies)):
                weighs = name == "weighted_mean"
                times[name].append(step_time(strategies[name], world.device, chosen.steps, weighs=weighs))
        for name, of_rounds in times.items() if dist.get_rank() == 0 else ():
            ratios = [mine / stock for mine, stock in zip(of_rounds[1:], times[STOCK][1:], strict=True)]
            low, _, high = quantiles(ratios, n=4)
            line = f"{name:14} {median(of_rounds[1:]) * 1e3:8.2f} ms  {median(ratios):.3f} [{low:.3f}, {high:.3f}]\n"
            sys.stdout.write(line)


if __name__ == "__main__":
    main()
