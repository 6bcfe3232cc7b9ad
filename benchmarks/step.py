"""What a training step costs under each option, beside Lightning's DDPStrategy: `python -m benchmarks.step`.

One command starts the ranks on this machine, for one number of ranks after the other, measures, and prints one table.
A process that `torchrun` started is a rank; so it runs on several nodes, and `benchmarks.nodes` makes nodes out of
network namespaces. The device is chosen automatically: CPUs with gloo, or GPUs with NCCL.

All variants live in the same processes. `benchmarks/README.md` says how rounds are made and compared.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.models import MODELS, Measured, Samples
from benchmarks.report import RESULTS, Row, Spread, load, print_table, save
from benchmarks.variants import ALL, VARIANTS, Variant, chosen
from benchmarks.world import World, in_rounds, joined, progress, quiet_trainer, run, slowest

__all__ = ["Block", "Setting", "main", "measure", "measure_rounds", "print_steps", "setting_of"]

WARM_UP = 3
"""Steps before the timed ones. DDP rebuilds its buckets after the first."""

SHORT = 4
"""Rounds of the short mode."""


@dataclass(frozen=True)
class Setting:
    """What the variants of a model work with.

    Attributes:
        module: The model, the same object in every variant.
        batch: The number of samples of a rank's batch.
        data: The samples of all ranks, the same on every rank.
        steps: Timed steps of a block.
        world: The ranks.
    """

    module: Measured
    batch: int
    data: Samples
    steps: int
    world: World


class Block(NamedTuple):
    """What a step of one variant took in one round, on this rank."""

    seconds: float
    processor: float  # seconds, user and system, of all threads
    memory: float  # bytes: the most that the GPU held within the block; 0 on CPUs (`benchmarks.start` has theirs)


class _Clock(Callback):
    """Notes when the steps begin that count, and when the last of them has ended."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self._last = WARM_UP + steps
        self._device = device
        self._times: list[float] = []
        self._processor: list[float] = []

    def on_train_batch_start(self, *arguments: Any) -> None:
        """A step begins, which ends the one before."""
        batch_idx = arguments[-1]
        if batch_idx < WARM_UP:
            return
        if batch_idx in (WARM_UP, self._last):
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._processor.append(time.process_time())
        self._times.append(time.perf_counter())

    def block(self) -> Block:
        """Return what was measured."""
        steps = len(self._times) - 1
        began, ended = self._processor
        seconds = statistics.median(after - before for before, after in pairwise(self._times))
        memory = 0
        if self._device.type == "cuda":
            # The host runs ahead of the device, so only both ends tell, between which it does not wait for the clock.
            seconds = (self._times[-1] - self._times[0]) / steps
            memory = torch.cuda.max_memory_allocated(self._device)
        return Block(seconds, (ended - began) / steps, float(memory))


def setting_of(model: str, world: World, steps: int | None) -> Setting:
    """Return a model, with the batches of all ranks; `steps` of a block, or by default the model's."""
    workload = MODELS[model]
    torch.manual_seed(0)
    module = Measured(workload.model()).to(world.device)
    ranks = dist.get_world_size()
    batch = len(workload.batch()[0])
    timed = workload.steps
    if steps is not None:
        timed = steps
    # One batch more, whose begin ends the last step.
    data = Samples(workload.batch, ranks, (WARM_UP + timed + 1) * ranks * batch)
    return Setting(module, batch, data, timed, world)


def measure(variant: Variant, setting: Setting, around: AbstractContextManager[Any] | None = None) -> Block:
    """Train a block of steps. A collective operation.

    Args:
        variant: The way to train.
        setting: What it works with.
        around: The context of the training.
    """
    module = setting.module
    world = setting.world
    ranks = dist.get_world_size()
    module.weight = None
    if variant.weighted:
        module.weight = 3.0 + dist.get_rank()  # another one on each rank, so that none cancels
    if variant.on_device:
        module.weight = torch.tensor(module.weight, device=world.device)
    module.changing = variant.changing
    of_loader: dict[str, Any] = {"batch_size": setting.batch * ranks}
    if not variant.shares_batches:
        of_loader = {"batch_size": setting.batch, "sampler": DistributedSampler(setting.data, shuffle=False)}
    loader = DataLoader(setting.data, pin_memory=world.device.type == "cuda", **of_loader)
    clock = _Clock(setting.steps, world.device)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    trainer = quiet_trainer(variant.strategy(ranks), world, callbacks=[clock])
    if around is None:
        around = nullcontext()
    with around:
        trainer.fit(module, loader)
    for parameter in module.parameters():
        parameter.grad = None
    # Lightning moves the model to the CPU when training ends.
    module.to(world.device)
    return clock.block()


def measure_rounds(
    model: str,
    names: Sequence[str],
    world: World,
    *,
    rounds: int,
    steps: int | None = None,
    contexts: Mapping[str, Any] | None = None,
) -> list[Row]:
    """Measure all rounds of a model; return a row for each variant. A collective operation.

    Args:
        model: The name of the model.
        names: Those of the variants.
        world: The ranks.
        rounds: Rounds that count.
        steps: Timed steps of a block; None for the model's.
        contexts: Of some names, what makes the context of the training; such a name may be of the form "NAME: more".
    """
    setting = setting_of(model, world, steps)
    blocks: dict[str, list[list[float]]] = {name: [] for name in names}
    for name, counts in in_rounds(names, rounds):
        around = None
        if contexts is not None and name in contexts:
            around = contexts[name]()
        block = measure(ALL[name.partition(":")[0]], setting, around)
        of_slowest = slowest(block, world)
        if counts:
            blocks[name].append(of_slowest)
    rows = []
    case = {"ranks": dist.get_world_size(), "nodes": world.nodes, "device": world.device.type, "model": model}
    for name, of_rounds in blocks.items():
        seconds, processor, memory = (list(numbers) for numbers in zip(*of_rounds, strict=True))
        rows.append(Row(case, name, seconds, {"processor": processor, "memory": memory, "steps": setting.steps}))
    progress(f"{model}, {dist.get_world_size()} ranks: measured")
    return rows


def print_steps(file: Path) -> None:
    """Print the table of the steps in a file."""
    rows = load(file)
    lines = []
    for row in rows:
        ratio = row.ratio(rows)
        seconds = Spread.of([1e3 * value for value in row.seconds])
        processor = Spread.of([1e3 * value for value in row.more["processor"]])
        of_stock = "-"
        if ratio is not None:
            of_stock = ratio.text(3)
        lines.append(
            (
                MODELS[row.case["model"]].title,
                row.variant,
                str(row.case["ranks"]),
                str(len(row.seconds)),
                seconds.text(2),
                of_stock,
                processor.text(2),
            )
        )
    caption = "A step on the slowest rank: median [quartiles] over the rounds; ratios are taken within a round."
    print_table(file, ("model", "variant", "ranks", "rounds", "ms", "of stock", "CPU ms"), lines, caption)


@contextmanager
def _profiled(file: Path) -> Iterator[None]:
    """Profile what runs within the context, and write a file that `python -m pstats` reads."""
    with cProfile.Profile() as profile:
        yield
    profile.dump_stats(file)


def _run_rank(arguments: argparse.Namespace) -> None:
    """Measure all models; rank 0 saves them."""
    # Between any two blocks there is a collection, which need not go through what imports have made.
    gc.freeze()
    with joined() as world:
        rounds = arguments.rounds[0]
        if dist.get_world_size() in arguments.ranks:
            rounds = arguments.rounds[arguments.ranks.index(dist.get_world_size())]
        for model in arguments.models:
            contexts = {}
            if arguments.profile is not None and dist.get_rank() == 0:
                arguments.profile.mkdir(parents=True, exist_ok=True)
                for name in arguments.only:
                    contexts[name] = partial(_profiled, arguments.profile / f"{model}, {name}.pstats")
            rows = measure_rounds(model, arguments.only, world, rounds=rounds, steps=arguments.steps, contexts=contexts)
            if dist.get_rank() == 0:
                save(arguments.output, rows)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line, by default that of this process."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step", description="Measure what a training step costs under each option."
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="models to measure (default: all)")
    add("--only", nargs="+", default=list(VARIANTS), metavar="NAME", help=f"variants, beside stock, of {list(ALL)}")
    add("--ranks", type=int, nargs="+", default=[2, 4], help="sizes of the worlds, one after the other (default: 2 4)")
    rounds = "rounds that count, for each of --ranks, or one number for all; one more is dropped (default: 8 3)"
    add("--rounds", type=int, nargs="+", default=[8, 3], help=rounds)
    add("--steps", type=int, default=None, help="timed steps of a round (default: the model's)")
    add("--short", action="store_true", help=f"2 ranks and {SHORT} rounds")
    add("--profile", type=Path, metavar="FOLDER", help="profile rank 0 by cProfile: times are worth nothing then")
    add("--output", type=Path, default=RESULTS / "step.json", help="file to write (default: %(default)s)")
    add("--table", type=Path, metavar="FILE", help="measure nothing, and print the table of a file")
    parsed = parser.parse_args(arguments)
    if parsed.short:
        parsed.ranks = [2]
        parsed.rounds = [SHORT]
    if len(parsed.rounds) == 1:
        parsed.rounds *= len(parsed.ranks)
    if len(parsed.rounds) < len(parsed.ranks):
        parser.error(f"--rounds={parsed.rounds}: give one number, or one for each of --ranks={parsed.ranks}")
    least = min(*parsed.ranks, *parsed.rounds)
    if parsed.steps is not None:
        least = min(least, parsed.steps)
    if least < 1:
        parser.error(
            f"--ranks, --rounds and --steps are 1 or more; got {parsed.ranks}, {parsed.rounds}, {parsed.steps}"
        )
    try:
        parsed.only = chosen(parsed.only)
    except ValueError as error:
        parser.error(str(error))
    return parsed


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or print what was measured."""
    parsed = _parse(arguments)
    if parsed.table is not None:
        print_steps(parsed.table)
        return
    run(_run_rank, parsed, print_steps)


if __name__ == "__main__":
    main(sys.argv[1:])
