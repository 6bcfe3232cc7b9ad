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
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.report import Spread
from benchmarks.world import is_rank, joined, slowest, start
from lightning_gradavg import GradAvgStrategy

__all__ = ["main"]

WINDOWS = (1, 2, 4)
WARMUP = 2
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "Lightning DDPStrategy": DDPStrategy,
    "GradAvg weighted_mean": lambda: GradAvgStrategy(reduction="weighted_mean"),
}


class _Sleep(torch.autograd.Function):
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
    def __init__(self, begin: int) -> None:
        self._begin, self.begun = begin, 0.0

    def on_train_batch_start(self, *rest: Any) -> None:
        """Begin to count."""
        if rest[-1] == self._begin:
            self.begun = time.perf_counter()


def _seconds(strategy: Strategy, times: list[float], window: int) -> float:
    """Return the mean time of an optimizer step on this rank."""
    clock = _Clock(WARMUP * window)
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=window,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[clock],
    )
    trainer.fit(_Sleeper(), DataLoader(torch.tensor(times).split(1), batch_size=None))
    return (time.perf_counter() - clock.begun) / (len(times) // window - WARMUP)


def _measure(given: argparse.Namespace, device: torch.device) -> None:
    order = random.Random(0)
    for window in WINDOWS:
        found: dict[str, list[float]] = {name: [] for name in STRATEGIES}
        for number in range(given.rounds):
            draw = random.Random(f"{number} {window} {dist.get_rank()}")
            times = [draw.lognormvariate(0, 0.5) * given.seconds for _ in range((given.steps + WARMUP) * window)]
            for name in order.sample(list(STRATEGIES), len(STRATEGIES)):
                found[name] += slowest([_seconds(STRATEGIES[name](), times, window)], device)
        stock, ours = found.values()
        low, median, high = Spread.of([mine / its for mine, its in zip(ours, stock, strict=True)])
        if dist.get_rank() == 0:
            line = f"{window}: {1000 * Spread.of(stock)[1]:.0f} ms under stock; {median:.3f} [{low:.3f}, {high:.3f}]"
            print(f"windows of {line} of that", flush=True)  # noqa: T201  # a benchmark prints


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="timed optimizer steps of a round")
    parser.add_argument("--seconds", type=float, default=0.03, help="median of a micro-batch")
    given = parser.parse_args()
    if is_rank():
        with joined() as world:
            _measure(given, world.device)
        return
    options = [f"--{name}={value}" for name, value in vars(given).items()]
    start("benchmarks.windows", given.ranks, options)


if __name__ == "__main__":
    main()
