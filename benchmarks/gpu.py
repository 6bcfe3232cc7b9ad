"""What the package takes on GPUs, beside stock: `python -m benchmarks.gpu`, after the tests of `make gpu`.

It prints two tables. The first one has a step of four options on three models, the memory of the GPU, and what the
host's reads cost. Under a rule, the host of every rank reads the rows of a window when it has launched the first
bucket of its last backward, and waits for the other ranks: the GPU may then run out of work. So `weighted_mean` trains
as it is; with weights that are tensors on the device, which the host reads, too; and with a switch of this file alone:
the host reads the first rows of a run, and takes them for those of every later window, as the weights stay the same.
The ranks exchange the same numbers in all of them, so the difference is the cost of the reads. The second table has
epochs, with loading, transfer, validation and checkpoint.

Every rank has a GPU of its own; on one GPU, two ranks share it, with NCCL's network transport between them. Without a
GPU it runs on CPUs, which shows that it runs, and nothing else.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import epoch, step
from benchmarks.models import MODELS
from benchmarks.report import RESULTS, STOCK, Spread, begin_file, load, print_table, save
from benchmarks.world import joined, run
from lightning_gradavg.reduction.rows import RowExchange

__all__ = ["READS", "UNREAD", "main", "one_read"]

UNREAD = "weighted_mean: rows read once"

READS: Mapping[str, str] = {
    STOCK: "Lightning's flag",
    "mean": "the same",
    "single_device": "the same, rows",
    "reproducible": "the same, rows, counts",
    UNREAD: "the same",
    "weighted_mean": "the same, rows",
    "weighted_mean, weights on the device": "the same, rows, weights",
}
"""The variants, and what the host reads in a step."""

STEPS: Mapping[str, int] = {"mlp": 50, "resnet18": 25, "transformer": 10}
"""The models, and the timed steps of a block."""


_READS_OF_FIRST_WINDOW = 2


@contextmanager
def one_read() -> Iterator[None]:
    """Within the context, read rows twice, and return the second ones for those of all later windows, unread.

    The first read of a run is for the unit of its weights, and no window's.
    """
    read = RowExchange.read
    found: list[list[list[float]]] = []

    def read_once(rows: RowExchange) -> list[list[float]]:
        if len(found) < _READS_OF_FIRST_WINDOW:
            found.append(read(rows))
        return found[-1]

    with mock.patch.object(RowExchange, "read", read_once):
        yield


_CONTEXTS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {UNREAD: one_read}


def _print(file: Path) -> None:
    """Print both tables."""
    rows = load(file)
    lines = []
    for row in rows:
        ratio = row.ratio(rows)
        of_unread = row.ratio(rows, UNREAD)
        assert ratio is not None
        assert of_unread is not None
        lines.append(
            (
                MODELS[row.case["model"]].title,
                row.variant,
                READS[row.variant],
                Spread.of([1e3 * value for value in row.seconds]).text(2),
                ratio.text(3),
                of_unread.text(3),
                f"{max(row.more['memory']) / 1e6:,.0f}",
            )
        )
    columns = ("model", "variant", "the host reads", "ms", "of stock", "of rows read once", "most MB of a GPU")
    case = rows[0].case
    caption = (
        f"{case['ranks']} ranks on {case['device']}. A step on the slowest rank: median [quartiles] over"
        f" {len(rows[0].seconds)} rounds."
    )
    print_table(file, columns, lines, caption)
    epoch.print_epochs(_of_epochs(file))


def _of_epochs(file: Path) -> Path:
    return file.with_stem(f"{file.stem}_epoch")


def _run_rank(arguments: argparse.Namespace) -> None:
    """Measure steps, then epochs; rank 0 saves."""
    with joined() as world:
        is_first = dist.get_rank() == 0
        if is_first:
            begin_file(_of_epochs(arguments.output))
        for model in arguments.models:
            steps = STEPS[model]
            if arguments.steps is not None:
                steps = arguments.steps
            rows = step.measure_rounds(
                model, list(READS), world, rounds=arguments.rounds, steps=steps, contexts=_CONTEXTS
            )
            if is_first:
                save(arguments.output, rows)
        of_epochs = epoch.parse(arguments.epoch)
        for workers in of_epochs.workers:
            rows = epoch.measure_epochs(of_epochs, workers, list(epoch.STRATEGIES), world)
            if is_first:
                save(_of_epochs(arguments.output), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="Measure steps, host reads, memory and epochs on GPUs."
    )
    add = parser.add_argument
    ranks = max(2, torch.cuda.device_count())
    add("--ranks", type=int, nargs=1, default=[ranks], help="default: one for each GPU, and two on a single one")
    add("--models", nargs="+", choices=list(STEPS), default=list(STEPS))
    add("--rounds", type=int, default=8, help="rounds that count; one more is dropped (default: 8)")
    add("--steps", type=int, default=None, help="timed steps of a round (default: the model's)")
    epochs = "--rounds=3 --workers 4"
    add("--epoch", type=str.split, default=epochs.split(), help=f"options of benchmarks.epoch (default: {epochs!r})")
    add("--output", type=Path, default=RESULTS / "gpu.json", help="file to write (default: %(default)s)")
    run(_run_rank, parser.parse_args(arguments), _print)


if __name__ == "__main__":
    main(sys.argv[1:])
