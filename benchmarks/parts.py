"""Where the time of a step goes under a strategy of this package: `python -m benchmarks.parts`.

It takes the mean time of the package's functions in a step of `benchmarks.step`, on rank 0. A function contains those
that it calls, so the rows of a column do not add up; the first row is the whole step. Taking the time costs some.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from benchmarks.block import WARMUP, Clock, Setting, Variant
from benchmarks.models import MODELS
from benchmarks.report import WIDTH
from benchmarks.step import setting_of
from benchmarks.trained import trained_variants
from benchmarks.world import is_rank, joined, start
from lightning_gradavg import GradAvgStrategy
from lightning_gradavg._support import random_state  # noqa: PLC2701  # its functions call each other
from lightning_gradavg.batches import order, progress, streams
from lightning_gradavg.batches.progress import TrainingIterator
from lightning_gradavg.reduction.reduction import Reduction
from lightning_gradavg.reproducible.sum import TreeSum

__all__ = ["PARTS", "STEP", "VARIANTS", "main", "milliseconds_of", "print_parts"]

VARIANTS = ("GradAvg mean", "GradAvg single_device", "GradAvg mean, reproducible")

PARTS: Mapping[str, tuple[tuple[Any, str], ...]] = {
    "read the batch": ((TrainingIterator, "__next__"),),
    "  digest of the indices": ((order, "data_digest"),),
    "training_step, with Lightning's and DDP's": ((GradAvgStrategy, "training_step"),),
    "  of it the user's": (),  # the model is not known yet
    "  read loss and weight": ((Reduction, "read"),),
    "random states, read and restored": (
        *((random_state, name) for name in ("random_state", "seed_generators", "restore_random_state")),
        *((streams, name) for name in ("random_state", "restore_random_state", "same_random_state")),
        (progress, "random_state"),
    ),
    "backward": ((Reduction, "backward"),),
    "  add a replica to the tree": ((TreeSum, "add"),),
    "after the backward": ((Reduction, "finish"),),
    "  sum of all replicas": ((TreeSum, "gradients"),),
}
"""What is timed: of each row, the functions, by owner and name."""

STEP = "step"
_OF_USER = "  of it the user's"


class _Timers:
    """The time that functions take while `run` is set.

    Attributes:
        seconds: By row of `PARTS`.
        run: Whether the time counts.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.run = False

    def timed(self, function: Callable[..., Any], row: str) -> Callable[..., Any]:
        """Return a function whose time counts for a row."""

        def timing(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if self.run:
                    self.seconds[row] += time.perf_counter() - begin

        return timing

    @contextmanager
    def installed(self, module: type[Any]) -> Iterator[None]:
        """Take the time of all functions of `PARTS`, and of the `training_step` of a class."""
        with ExitStack() as replaced:
            for row, functions in {**PARTS, _OF_USER: ((module, "training_step"),)}.items():
                for owner, name in functions:
                    timing = self.timed(getattr(owner, name), row)
                    replaced.enter_context(mock.patch.object(owner, name, timing))
            yield


class _CountingClock(Clock):
    """A clock that has timers run in the steps that count."""

    def __init__(self, timers: _Timers, setting: Setting) -> None:
        super().__init__(setting.steps, setting.device, _no_bytes)
        self._timers = timers
        self._steps = setting.steps
        self._ticks = 0
        self._began = 0.0  # when the running step began

    @override
    def tick(self) -> None:
        counts = WARMUP <= self._ticks < WARMUP + self._steps
        now = time.perf_counter()
        if self._timers.run:
            self._timers.seconds[STEP] += now - self._began
        self._timers.run = counts
        self._began = now
        self._ticks += 1
        super().tick()


def _no_bytes() -> int:
    return 0


def milliseconds_of(variant: Variant, setting: Setting) -> dict[str, float]:
    """Train by a variant; return the milliseconds per step of each row and of the step. A collective operation."""
    timers = _Timers()
    clock = _CountingClock(timers, setting)
    dist.barrier()
    with timers.installed(type(setting.module)):
        variant.run(setting, clock)
    milliseconds = {}
    for row in (STEP, *PARTS):
        milliseconds[row] = 1000 * timers.seconds[row] / setting.steps
    return milliseconds


def print_parts(title: str, parts_of_variants: Mapping[str, Mapping[str, float]]) -> None:
    """Print a table of milliseconds, with a column for each variant."""
    table = Table("milliseconds per step", title=title)
    for name in parts_of_variants:
        table.add_column(name, justify="right")
    for row in (STEP, *PARTS):
        cells = []
        for parts in parts_of_variants.values():
            cells.append(f"{parts[row]:.2f}" if parts[row] else "-")
        table.add_row(row, *cells)
    Console(width=WIDTH).print(table)


def _run_rank(arguments: argparse.Namespace) -> None:
    """Measure all models and variants; on rank 0, print a table for each model."""
    with joined() as world:
        variants = {variant.name: variant for variant in trained_variants(several_on_nodes=False)}
        for model in arguments.models:
            setting = setting_of(model, world, arguments.steps)
            found = {}
            for name in VARIANTS:
                found[name] = milliseconds_of(variants[name], setting)
            if dist.get_rank() == 0:
                print_parts(f"{MODELS[model].title}, {dist.get_world_size()} ranks", found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as a rank, or start the ranks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parts", description="Show where a step takes its time.")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["layer", "mlp"])
    parser.add_argument("--steps", type=int, default=300, help="timed steps (default: 300)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine (default: 2)")
    parsed = parser.parse_args(arguments)
    if is_rank():
        _run_rank(parsed)
        return
    if arguments is None:
        arguments = sys.argv[1:]
    start("benchmarks.parts", parsed.ranks, arguments)


if __name__ == "__main__":
    main()
