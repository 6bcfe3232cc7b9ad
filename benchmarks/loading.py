"""What an epoch takes whose samples are slow to load, under each option that splits: `python -m benchmarks.loading`.

A sample takes a while to load, in which the processor is free, as when it is read from a disk: so some ranks on few
cores do not wait for each other. `collate_fn` is the user's own. Stock Lightning has a `DistributedSampler`, and each
rank a batch of its own; all others share the same global batch. A dataset counts the samples that it loads, in workers,
too.

In the first batch of a run, every rank loads one sample twice more, which the ranks compare. Under a preset, rank 0
also loads that batch as a whole. So the table has the first epoch beside the fastest of the later ones.

One command starts the ranks on this machine, for one number of ranks after the other, and each world prints its table.
In a round, each variant trains once, in an order drawn anew; the first round is dropped. Rounds and ratios are those of
`benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, Strategy
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.models import MODELS, Measured
from benchmarks.report import WIDTH, Spread
from benchmarks.trainer import make_quiet_trainer
from benchmarks.world import World, is_rank, joined, slowest, start
from lightning_gradavg import GradAvgStrategy

__all__ = ["STOCK", "STRATEGIES", "Epoch", "epochs_of", "main"]

REPLICAS = 4
EPOCHS = 4
"""The first one, and later ones, of which the fastest counts: other programs only add to a time."""

STOCK = "Lightning DDPStrategy"
STRATEGIES: Mapping[str, Callable[[], Strategy]] = {
    STOCK: DDPStrategy,
    "split_batches": partial(GradAvgStrategy, split_batches=True),
    "single_device": partial(GradAvgStrategy, equivalent_to="single_device"),
    "data_parallel": partial(GradAvgStrategy, equivalent_to="data_parallel"),
    f"num_replicas={REPLICAS}": partial(GradAvgStrategy, split_batches=True, num_replicas=REPLICAS),
    f"reproducible, num_replicas={REPLICAS}": partial(GradAvgStrategy, reproducible=True, num_replicas=REPLICAS),
}


class _SlowSamples(Dataset[Any]):
    """Samples of a classifier that take a while to load.

    Attributes:
        loaded: How many were loaded, by this process and its workers.
    """

    def __init__(self, size: int, seconds: float) -> None:
        self.loaded = torch.multiprocessing.Value("l", 0)
        self._size = size
        self._seconds = seconds

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self._seconds)
        with self.loaded.get_lock():
            self.loaded.value += 1
        return torch.full((16,), index / self._size), index % 16


def _collate(samples: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Be a `collate_fn` of the user's own, which nothing can be known of."""
    inputs = [of_sample for of_sample, _ in samples]
    targets = [target for _, target in samples]
    return torch.stack(inputs), torch.tensor(targets)


class Epoch(NamedTuple):
    """One epoch of training on this rank."""

    seconds: float  # the first one from the call of `fit` on
    processor: float  # seconds, user and system, of all threads of this process, without its workers
    loaded: int  # samples, by this rank and its workers


class _Epochs(Callback):
    """Notes at the end of each epoch what it took."""

    def __init__(self, data: _SlowSamples) -> None:
        self.epochs: list[Epoch] = []
        self._data = data
        self._began = time.perf_counter()
        self._processor_before = time.process_time()
        self._loaded_before = 0

    def on_train_epoch_end(self, *_: Any) -> None:
        """An epoch ends, and the next one begins."""
        now = time.perf_counter()
        processor = time.process_time()
        loaded = self._data.loaded.value
        epoch = Epoch(now - self._began, processor - self._processor_before, loaded - self._loaded_before)
        self.epochs.append(epoch)
        self._began = now
        self._processor_before = processor
        self._loaded_before = loaded


def epochs_of(name: str, arguments: argparse.Namespace, workers: int, world: World) -> list[Epoch]:
    """Train under a strategy; return the epochs of this rank. A collective operation."""
    data = _SlowSamples(arguments.batch * arguments.batches, arguments.milliseconds / 1000)
    of_loader: dict[str, Any] = {"batch_size": arguments.batch, "shuffle": True}
    if name == STOCK:
        batch_of_rank = arguments.batch // dist.get_world_size()
        of_loader = {"batch_size": batch_of_rank, "sampler": DistributedSampler(data)}
    loader = DataLoader(data, num_workers=workers, collate_fn=_collate, **of_loader)
    torch.manual_seed(0)
    module = Measured(MODELS["layer"].model())
    gc.collect()
    dist.barrier()
    clock = _Epochs(data)
    trainer = make_quiet_trainer(
        STRATEGIES[name](),
        max_epochs=EPOCHS,
        accelerator="cpu" if world.device.type == "cpu" else "gpu",
        devices=world.ranks_on_node,
        num_nodes=world.nodes,
        callbacks=[clock],
    )
    trainer.fit(module, loader)
    return clock.epochs


class _Round(NamedTuple):
    """One training, over all ranks."""

    seconds: list[float]  # of each epoch, on the slowest rank
    processor: list[float]  # seconds of each epoch, likewise
    loaded: list[list[int]]  # of each epoch, by each rank

    @property
    def later(self) -> float:
        """The seconds of the fastest epoch but the first."""
        return min(self.seconds[1:])


def _measure(arguments: argparse.Namespace, workers: int, world: World) -> dict[str, list[_Round]]:
    """Return the rounds of each variant that count."""
    rounds: dict[str, list[_Round]] = {name: [] for name in STRATEGIES}
    # With the same seed, all ranks draw the same order.
    generator = random.Random(0)
    for number in range(arguments.rounds + 1):
        for name in generator.sample(list(STRATEGIES), len(STRATEGIES)):
            epochs = epochs_of(name, arguments, workers, world)
            seconds = slowest([epoch.seconds for epoch in epochs], world.device)
            processor = slowest([epoch.processor for epoch in epochs], world.device)
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, [epoch.loaded for epoch in epochs])
            loaded = [list(of_epoch) for of_epoch in zip(*of_ranks, strict=True)]
            # The first round is dropped.
            if number > 0:
                rounds[name].append(_Round(seconds, processor, loaded))
        if dist.get_rank() == 0:
            sys.stderr.write(f"{workers} workers: round {number} of {arguments.rounds}\n")
    return rounds


def _table(found: Mapping[int, Mapping[str, Sequence[_Round]]], arguments: argparse.Namespace) -> Table:
    """Return a table of all numbers of workers and variants."""
    day = datetime.now(timezone.utc).date()
    table = Table(
        title=f"{dist.get_world_size()} ranks, {arguments.batches} batches of {arguments.batch} samples of"
        f" {arguments.milliseconds:g} ms, {arguments.rounds} rounds, torch {torch.__version__}, {day}",
        caption="median [quartiles] over the rounds; times of the slowest rank",
    )
    table.add_column("workers", justify="right")
    table.add_column("variant", no_wrap=True)
    columns = ("first epoch, s", "later, s", "of stock", "CPU ms per batch", "loaded first, by rank", "later, by rank")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for workers, rounds in found.items():
        stock = [of_round.later for of_round in rounds[STOCK]]
        for name in STRATEGIES:
            first = Spread.of([of_round.seconds[0] for of_round in rounds[name]])
            seconds = [of_round.later for of_round in rounds[name]]
            later = Spread.of(seconds)
            ratio = Spread.of_ratios(seconds, stock)
            processor = Spread.of([min(of_round.processor[1:]) for of_round in rounds[name]])
            loaded = rounds[name][-1].loaded  # the same in every round
            table.add_row(
                str(workers),
                name,
                f"{first.median:.2f}",
                f"{later.median:.2f} [{later.low:.2f}, {later.high:.2f}]",
                f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
                f"{1000 * processor.median / arguments.batches:.1f}",
                " ".join(map(str, loaded[0])),
                " ".join(map(str, loaded[-1])),
            )
    return table


def _run_rank(arguments: argparse.Namespace) -> None:
    """Measure with all numbers of workers, and print a table on rank 0."""
    with joined() as world:
        found = {workers: _measure(arguments, workers, world) for workers in arguments.workers}
        if dist.get_rank() == 0:
            Console(width=WIDTH, markup=False).print(_table(found, arguments))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loading", description="Measure an epoch whose samples are slow to load."
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4], help="sizes of the worlds, one after the other (default: 2 4)")
    add("--workers", type=int, nargs="+", default=[0, 2], help="workers of each rank (default: 0 2)")
    add("--milliseconds", type=float, default=20.0, help="what a sample takes to load (default: 20)")
    add("--batch", type=int, default=32, help="samples of a global batch (default: 32)")
    add("--batches", type=int, default=8, help="global batches of an epoch (default: 8)")
    add("--rounds", type=int, default=4, help="rounds that count; one more is dropped (default: 4)")
    parsed = parser.parse_args(arguments)
    if min(*parsed.ranks, parsed.batch, parsed.batches, parsed.rounds) < 1:
        parser.error("--ranks, --batch, --batches and --rounds are 1 or more")
    for ranks in parsed.ranks:
        if parsed.batch % ranks != 0:
            parser.error(f"--batch={parsed.batch} is no multiple of {ranks} ranks, so stock cannot have the same batch")
    return parsed


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as a rank, or start the ranks."""
    parsed = _parse(arguments)
    if is_rank():
        _run_rank(parsed)
        return
    if arguments is None:
        arguments = sys.argv[1:]
    for ranks in parsed.ranks:
        start("benchmarks.loading", ranks, arguments)


if __name__ == "__main__":
    main()
