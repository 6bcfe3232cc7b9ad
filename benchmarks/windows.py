"""What a window costs where micro-batches take another time on every rank: `python -m benchmarks.windows`.

Each rank sleeps instead of computing, a third of a micro-batch in the forward and the rest in the backward. The times
are drawn for every rank and micro-batch. Nobody waits for a processor, so eight ranks fit on two cores. In every round
Lightning's `DDPStrategy` and `weighted_mean` run with the same times, in a random order. A ratio compares their mean
times of an optimizer step within the round.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.report import Spread
from benchmarks.trainer import make_quiet_trainer
from benchmarks.world import is_rank, joined, slowest, start
from lightning_gradavg import GradAvgStrategy

__all__ = ["main"]

WINDOWS = (1, 2, 4)
WARMUP = 2
STOCK = "Lightning DDPStrategy"
OURS = "GradAvg weighted_mean"
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    STOCK: DDPStrategy,
    OURS: lambda: GradAvgStrategy(reduction="weighted_mean"),
}


class _Sleep(torch.autograd.Function):
    """Sleeps in the forward and in the backward, and passes values and gradients on."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds / 3)
        return grads[0], None


class _Sleeper(LightningModule):
    """Its batches are times, and its weight is the time: longer micro-batches have more terms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)

    def training_step(self, batch: Tensor) -> dict[str, Any]:
        loss = self.layer(torch.ones(256)).square().mean()
        return {"loss": _Sleep.apply(loss, float(batch)), "weight": float(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class _Clock(Callback):
    """Notes the time when a batch begins."""

    def __init__(self, first_batch: int) -> None:
        self._first_batch = first_batch
        self.started = 0.0

    def on_train_batch_start(self, *arguments: Any) -> None:
        """Note the time if the batch is the first one that counts."""
        batch_idx = arguments[-1]
        if batch_idx == self._first_batch:
            self.started = time.perf_counter()


def _seconds(strategy: Strategy, times: list[float], window: int) -> float:
    """Return the mean time of an optimizer step on this rank."""
    clock = _Clock(WARMUP * window)
    trainer = make_quiet_trainer(
        strategy,
        accelerator="cpu",
        devices=dist.get_world_size(),
        accumulate_grad_batches=window,
        callbacks=[clock],
    )
    trainer.fit(_Sleeper(), DataLoader(torch.tensor(times).split(1), batch_size=None))
    steps = len(times) // window - WARMUP
    return (time.perf_counter() - clock.started) / steps


def _measure(arguments: argparse.Namespace, device: torch.device) -> None:
    """Measure windows of each length, and print a line for each on rank 0."""
    # With the same seed, all ranks draw the same order; times have another seed on every rank.
    generator = random.Random(0)
    for window in WINDOWS:
        seconds: dict[str, list[float]] = {name: [] for name in STRATEGIES}
        for number in range(arguments.rounds):
            generator_of_times = random.Random(f"{number} {window} {dist.get_rank()}")
            times = []
            for _ in range((arguments.steps + WARMUP) * window):
                times.append(generator_of_times.lognormvariate(0, 0.5) * arguments.seconds)
            for name in generator.sample(list(STRATEGIES), len(STRATEGIES)):
                (slowest_seconds,) = slowest([_seconds(STRATEGIES[name](), times, window)], device)
                seconds[name].append(slowest_seconds)
        stock = Spread.of(seconds[STOCK])
        ratio = Spread.of_ratios(seconds[OURS], seconds[STOCK])
        if dist.get_rank() == 0:
            print(  # noqa: T201  # a benchmark prints
                f"windows of {window}: {1000 * stock.median:.0f} ms under stock;"
                f" {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] of that",
                flush=True,
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="timed optimizer steps of a round")
    parser.add_argument("--seconds", type=float, default=0.03, help="median of a micro-batch")
    arguments = parser.parse_args()
    if is_rank():
        with joined() as world:
            _measure(arguments, world.device)
        return
    options = [f"--{name}={value}" for name, value in vars(arguments).items()]
    start("benchmarks.windows", arguments.ranks, options)


if __name__ == "__main__":
    main()
