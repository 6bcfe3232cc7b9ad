"""What a run takes before its first step, and the memory of a rank, beside stock: `python -m benchmarks.start`.

Each variant begins in new processes, so that none finds what another has left. The time is that from the making of the
strategy to the end of the first training step, on a model of one small layer. The memory is the most that a rank ever
held, on a model of 50 million parameters, whose gradients are 200 MB. All processes are forks of one that has imported
everything, so what imports take stands apart: the seconds that another process takes to import the package.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.models import MODELS, Measured, Samples
from benchmarks.report import RESULTS, STOCK, Row, Spread, begin_file, load, print_table, save
from benchmarks.variants import ALL, chosen
from benchmarks.world import joined, quiet_trainer, slowest, start

__all__ = ["main", "print_starts"]

_SMALL = "layer"
_LARGE = "transformer"

STEPS = 3
"""The second one has DDP's rebuilt buckets, and the third what a second step leaves."""

IMPORTS = {
    "import torch": "import torch",
    "import lightning.pytorch": "import torch; began = time.perf_counter(); import lightning.pytorch",
    "import lightning_gradavg": "import lightning.pytorch; began = time.perf_counter(); import lightning_gradavg",
}
"""What a new process runs, and times from `began` on: each beside what a user's script has imported already."""


class _FirstStep(Callback):
    """Notes when the first training step has ended."""

    def __init__(self) -> None:
        self.ended = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the time, if it is the first."""
        if not self.ended:
            self.ended = time.perf_counter()


def _seconds_of_import(code: str) -> float:
    """Return the seconds that a new process takes for an import."""
    script = f"import time; began = time.perf_counter(); {code}; print(time.perf_counter() - began)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return float(done.stdout)


def _train(arguments: argparse.Namespace, model: str, name: str) -> None:
    """Be a rank: train a few steps under a variant; rank 0 saves what the slowest and the largest rank took."""
    variant = ALL[name]
    with joined() as world:
        torch.manual_seed(0)
        ranks = dist.get_world_size()
        workload = MODELS[model]
        module = Measured(workload.model())
        if variant.weighted:
            module.weight = 3.0 + dist.get_rank()
        batch = len(workload.batch()[0])
        data = Samples(workload.batch, ranks, STEPS * ranks * batch)
        of_loader: dict[str, Any] = {"batch_size": batch * ranks}
        if not variant.shares_batches:
            of_loader = {"batch_size": batch, "sampler": DistributedSampler(data, shuffle=False)}
        first = _FirstStep()
        dist.barrier()
        began = time.perf_counter()
        trainer = quiet_trainer(variant.strategy(ranks), world, callbacks=[first])
        trainer.fit(module, DataLoader(data, **of_loader))
        held = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes on Linux
        seconds, memory = slowest([first.ended - began, float(held)], world)
        if dist.get_rank() == 0:
            save(arguments.output, [Row({"model": model, "ranks": ranks}, name, [seconds], {"memory": [memory]})])


def _gathered(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each case and variant, of all its rounds."""
    gathered: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = str(row.case), row.variant
        if key not in gathered:
            gathered[key] = row
            continue
        gathered[key].seconds.extend(row.seconds)
        gathered[key].more["memory"].extend(row.more["memory"])
    return list(gathered.values())


def print_starts(file: Path) -> None:
    """Print the table of the starts in a file."""
    rows = _gathered(load(file))
    of_memory = {row.variant: row for row in rows if row.case.get("model") == _LARGE}
    lines = []
    for row in rows:
        if row.case.get("model") == _LARGE:
            continue
        seconds = Spread.of([1e3 * value for value in row.seconds]).text(0)
        ratio = row.ratio(rows)
        of_stock = "-"
        if ratio is not None:
            of_stock = ratio.text(2)
        memory = "-"
        beside = "-"
        if row.variant in of_memory:
            of_variant = of_memory[row.variant].more["memory"]
            memory = f"{Spread.of(of_variant).median / 1e6:,.0f}"
            beside = f"{(Spread.of(of_variant).median - Spread.of(of_memory[STOCK].more['memory']).median) / 1e6:+,.0f}"
        lines.append((row.variant, str(row.case.get("ranks", 1)), seconds, of_stock, memory, beside))
    columns = ("variant", "ranks", "ms", "of stock", "most MB of a rank", "MB beside stock")
    rounds = len(rows[0].seconds)
    caption = (
        f"To the end of the first step of one small layer, on the slowest rank: median [quartiles], {rounds} rounds."
        f" The most that a rank held in {STEPS} steps of {MODELS[_LARGE].title}, on the largest rank."
    )
    print_table(file, columns, lines, caption)


def _measure(arguments: argparse.Namespace) -> None:
    """Begin one variant after the other; in each round, in an order turned around."""
    for code in IMPORTS.values():
        _seconds_of_import(code)  # reads the files of the packages from the disk
    for number in range(arguments.rounds):
        rows = [Row({"ranks": 1}, name, [_seconds_of_import(code)], {"memory": []}) for name, code in IMPORTS.items()]
        save(arguments.output, rows)
        names = list(arguments.only)
        if number % 2 == 1:
            names.reverse()
        for name in names:
            start(_train, arguments.ranks, arguments, _SMALL, name)
            if number < arguments.rounds_of_memory:
                start(_train, arguments.ranks, arguments, _LARGE, name)
        sys.stderr.write(f"round {number + 1} of {arguments.rounds}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or print what was measured."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start", description="Measure the start of a run, and the memory of a rank."
    )
    add = parser.add_argument
    # What needs several nodes, or an accelerator, is the same as others here.
    every = [name for name, variant in ALL.items() if "by_node" not in name and not variant.on_device]
    add("--only", nargs="+", default=every, metavar="NAME", help=f"variants, beside stock, of {list(ALL)}")
    add("--ranks", type=int, default=2, help="ranks on this machine (default: 2)")
    add("--rounds", type=int, default=5, help="of the first step and of imports (default: 5)")
    add("--rounds-of-memory", type=int, default=1, help="of the memory, which hardly varies (default: 1)")
    add("--output", type=Path, default=RESULTS / "start.json", help="file to write (default: %(default)s)")
    add("--table", type=Path, metavar="FILE", help="measure nothing, and print the table of a file")
    parsed = parser.parse_args(arguments)
    if parsed.table is not None:
        print_starts(parsed.table)
        return
    try:
        parsed.only = chosen(parsed.only)
    except ValueError as error:
        parser.error(str(error))
    begin_file(parsed.output)
    _measure(parsed)
    print_starts(parsed.output)


if __name__ == "__main__":
    main(sys.argv[1:])
