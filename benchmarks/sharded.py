"""What a step of a sharded model costs beside Lightning's ModelParallelStrategy: `python -m benchmarks.sharded`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.report import RESULTS, STOCK, Row, Spread, load, print_table, save
from benchmarks.world import World, in_rounds, joined, quiet_trainer, run, slowest
from lightning_gradavg import GradAvgModelParallelStrategy

STRATEGIES: Mapping[str, Callable[..., Strategy]] = {
    STOCK: ModelParallelStrategy,
    "mean": partial(GradAvgModelParallelStrategy, reduction="mean"),
    "sum": partial(GradAvgModelParallelStrategy, reduction="sum"),
    "weighted_mean": partial(GradAvgModelParallelStrategy, reduction="weighted_mean"),
}
WARM_UP = 3
WIDTH = 1024
"""Of a layer."""
SAMPLES = 64
"""Of a batch."""


class _Blocks(LightningModule):
    """Four blocks of 4 MB, each of them sharded."""

    def __init__(self, *, has_weight: bool) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        self.blocks = nn.Sequential(*blocks)
        self.has_weight = has_weight
        self.times: list[float] = []  # when each step began

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  # torch 2.4 has it elsewhere

        mesh: Any = self.device_mesh
        for part in (*self.blocks, self):
            fully_shard(part, mesh=mesh["data_parallel"])

    def training_step(self, batch: Tensor, _: int) -> Any:
        self.times.append(perf_counter())
        loss = self.blocks(batch).square().mean()
        if self.has_weight:
            return {"loss": loss, "weight": 1 + dist.get_rank()}
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def _seconds(name: str, steps: int, world: World) -> float:
    """Return the seconds of a step, on the slowest rank. A collective operation."""
    model = _Blocks(has_weight=name == "weighted_mean")
    batches: Any = [torch.randn(SAMPLES, WIDTH)] * (WARM_UP + steps + 1)
    strategy = STRATEGIES[name](data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    quiet_trainer(strategy, world).fit(model, DataLoader(batches, batch_size=None))
    (seconds,) = slowest([(model.times[-1] - model.times[WARM_UP]) / steps], world)
    return seconds


def _run_rank(arguments: argparse.Namespace) -> None:
    """Measure; rank 0 saves a row for each strategy."""
    with joined() as world:
        seconds: dict[str, list[float]] = {name: [] for name in STRATEGIES}
        for name, counts in in_rounds(list(STRATEGIES), arguments.rounds):
            of_round = _seconds(name, arguments.steps, world)
            if counts:
                seconds[name].append(of_round)
        if dist.get_rank() == 0:
            save(
                arguments.output,
                [Row({"ranks": dist.get_world_size()}, name, found) for name, found in seconds.items()],
            )


def _print(file: Path) -> None:
    rows = load(file)
    lines = []
    for row in rows:
        ratio = row.ratio(rows)
        assert ratio is not None
        milliseconds = Spread.of([1e3 * value for value in row.seconds])
        lines.append((row.variant, str(row.case["ranks"]), milliseconds.text(2), ratio.text(3)))
    caption = f"A step on the slowest rank: median [quartiles] over {len(rows[0].seconds)} rounds."
    print_table(file, ("variant", "ranks", "ms", "of stock"), lines, caption)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded", description=__doc__.partition(":")[0])
    parser.add_argument("--rounds", type=int, default=20, help="rounds that count; one more is dropped (default: 20)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a round (default: 20)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="ranks on this machine (default: 2)")
    parser.add_argument("--output", type=Path, default=RESULTS / "sharded.json", help="file to write")
    run(_run_rank, parser.parse_args(arguments), _print)


if __name__ == "__main__":
    main(sys.argv[1:])
