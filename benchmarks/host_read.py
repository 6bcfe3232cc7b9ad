"""What one read per window costs on the host: `python -m benchmarks.host_read`.

Under a rule, the host of every rank reads the rows of a window in the first bucket of its last backward, and waits for
the other ranks. An accelerator may then run out of work. Here `weighted_mean` trains as it is; with weights that are
tensors on the device, which the host reads, too; and with a switch of this file alone: the host reads the first rows
of a run, and takes them for those of every later window, which they are, as the weights stay the same. The ranks
exchange the same numbers in all of them. So the ratio to the last one is the cost of the reads.

On GPUs, several ranks share the first one where there are fewer GPUs than ranks. Time is taken over all steps of a
round, between two waits for the device. Rounds and ratios are those of `benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, Strategy
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from benchmarks.block import WARMUP, weight_of_rank
from benchmarks.models import MODELS, Measured
from benchmarks.one_gpu import OneGpu
from benchmarks.report import WIDTH, Spread
from benchmarks.trainer import make_quiet_trainer
from benchmarks.world import World, is_rank, joined, slowest, start
from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.reduction.rows import RowExchange

__all__ = ["VARIANTS", "Variant", "main", "one_read", "seconds_of"]

STEPS_ON_GPU = 50


@contextmanager
def one_read() -> Iterator[None]:
    """Within the context, read the first rows of each length, and return them for those of all others, unread."""
    read = RowExchange.read
    known: dict[int, list[list[float]]] = {}

    def read_once(rows: RowExchange) -> list[list[float]]:
        if len(rows.row) not in known:
            known[len(rows.row)] = read(rows)
        return known[len(rows.row)]

    with mock.patch.object(RowExchange, "read", read_once):
        yield


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        strategy: Makes the strategy.
        reads: What the host reads in a step, as the table says it.
        weight_on_device: Whether the weight is a tensor on the device.
        around: Makes the context of the training.
    """

    strategy: Callable[[], Strategy]
    reads: str
    weight_on_device: bool = False
    around: Callable[[], AbstractContextManager[None]] = nullcontext


def _weighted_mean() -> Strategy:
    return GradAvgStrategy(reduction="weighted_mean")


BASELINE = "weighted_mean, no read"
VARIANTS: Mapping[str, Variant] = {
    "Lightning DDPStrategy": Variant(DDPStrategy, "as stock"),
    BASELINE: Variant(_weighted_mean, "none", around=one_read),
    "weighted_mean": Variant(_weighted_mean, "totals"),
    "weighted_mean, weights on the device": Variant(_weighted_mean, "weight, totals", weight_on_device=True),
}


class _Clock(Callback):
    """Takes the time of the steps after the warm-up, between two waits for the device."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self._last = WARMUP + steps
        self._device = device
        self._times: list[float] = []

    def on_train_batch_start(self, *arguments: Any) -> None:
        """Note the time before the first step that counts, and after the last one."""
        if arguments[-1] in (WARMUP, self._last):
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """The mean time of a step."""
        begin, end = self._times
        return (end - begin) / (self._last - WARMUP)


def _accelerator(world: World) -> Any:
    if world.device.type == "cpu":
        return "cpu"
    if torch.cuda.device_count() < world.ranks_on_node:
        return OneGpu()
    return "gpu"


def seconds_of(variant: Variant, module: Measured, batch: Any, steps: int, world: World) -> float:
    """Train on a batch, and return the mean time of a step on this rank. A collective operation."""
    weight: Any = weight_of_rank()
    if variant.weight_on_device:
        weight = torch.tensor(weight, device=world.device)
    module.weight = weight
    clock = _Clock(steps, world.device)
    trainer = make_quiet_trainer(
        variant.strategy(),
        accelerator=_accelerator(world),
        devices=world.ranks_on_node,
        num_nodes=world.nodes,
        callbacks=[clock],
    )
    batches: Any = [batch] * (WARMUP + steps + 1)
    dist.barrier()
    with variant.around():
        trainer.fit(module, DataLoader(batches, batch_size=None))
    # Between two trainings, not within one.
    gc.collect()
    return clock.seconds


def _measure(model: str, arguments: argparse.Namespace, world: World) -> dict[str, list[float]]:
    """Return the seconds of a step on the slower rank under each variant, one for each round."""
    workload = MODELS[model]
    steps: int
    if arguments.steps is not None:
        steps = arguments.steps
    elif world.device.type == "cpu":
        steps = workload.steps
    else:
        steps = STEPS_ON_GPU
    torch.manual_seed(0)
    module = Measured(workload.model())
    torch.manual_seed(1 + dist.get_rank())
    batch = tuple(part.to(world.device) for part in workload.batch())
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    # With the same seed, all ranks draw the same order.
    generator = random.Random(0)
    for number in range(arguments.rounds + 1):
        for name in generator.sample(list(VARIANTS), len(VARIANTS)):
            seconds_of_rank = seconds_of(VARIANTS[name], module, batch, steps, world)
            (slowest_seconds,) = slowest([seconds_of_rank], world.device)
            # The first round is dropped.
            if number > 0:
                seconds[name].append(slowest_seconds)
    return seconds


def _table(seconds_of_models: Mapping[str, Mapping[str, Sequence[float]]], world: World) -> Table:
    """Return a table of all models and variants."""
    card = "CPU"
    if world.device.type == "cuda":
        ranks = f"{dist.get_world_size()} ranks on {min(torch.cuda.device_count(), world.ranks_on_node)} GPU(s)"
        card = f"{torch.cuda.get_device_name(world.device)}, {ranks}"
    day = datetime.now(timezone.utc).date()
    table = Table(
        title=f"host reads: {card}, torch {torch.__version__}, {day}",
        caption="median [quartiles] over the rounds; times of the slower rank",
    )
    for column in ("model", "variant", "the host reads", "ms", f"of {BASELINE!r}"):
        table.add_column(column, no_wrap=True)
    for model, seconds in seconds_of_models.items():
        for name, variant in VARIANTS.items():
            times = Spread.of([1000 * value for value in seconds[name]])
            ratios = Spread.of_ratios(seconds[name], seconds[BASELINE])
            table.add_row(
                model,
                name,
                variant.reads,
                f"{times.median:.2f} [{times.low:.2f}, {times.high:.2f}]",
                f"{ratios.median:.3f} [{ratios.low:.3f}, {ratios.high:.3f}]",
            )
    return table


def _run_rank(arguments: argparse.Namespace) -> None:
    """Measure all models, and print a table on rank 0."""
    with joined(shares_gpu=True) as world:
        seconds = {model: _measure(model, arguments, world) for model in arguments.models}
        if dist.get_rank() == 0:
            Console(width=WIDTH, markup=False).print(_table(seconds, world))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as a rank, or start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20, help="rounds that count; one more is dropped")
    parser.add_argument("--steps", type=int, default=None, help="timed steps of a round")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parsed = parser.parse_args(arguments)
    if is_rank():
        _run_rank(parsed)
        return
    options = [f"--rounds={parsed.rounds}", "--models", *parsed.models]
    if parsed.steps is not None:
        options.append(f"--steps={parsed.steps}")
    start("benchmarks.host_read", parsed.ranks, options)


if __name__ == "__main__":
    main()
