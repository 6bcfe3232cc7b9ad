"""How far the cost model is from what was measured: `python -m benchmarks.prediction --links FILE results.json ...`.

Reads the figures of the links (`gradavg bench --output FILE`, on the same nodes) and results of `benchmarks.step`. What
a step takes without communication is the measured "compute only"; everything else is predicted, and nothing is fitted
to the results. The error is the predicted time over the measured one, less 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import Spread
from benchmarks.variants import BASELINE, COMPUTE, EXCHANGE, LIGHTNING
from lightning_gradavg.costs.allreduce import Layout
from lightning_gradavg.costs.links import Links
from lightning_gradavg.costs.predict import Way, Work, predict
from lightning_gradavg.rules import RULES
from lightning_gradavg.wire.options import WIRE_DTYPES

__all__ = ["Comparison", "compare", "main", "way_of"]

WIDTH = 140

BACKWARD_FRACTION = 2 / 3
"""Of a step: a backward multiplies twice as many matrices as its forward, one per factor of each product."""

_STOCK = (BASELINE, LIGHTNING, EXCHANGE, "Accelerate", "GradAvg mean")

_SAME = ("", "bucket views", "no termination flag")
"""What a name may end in without sending anything else."""

_AFTER_THE_BACKWARD = "average_gradients"


def way_of(name: str, layout: Layout) -> Way | None:
    """Return how a variant of `benchmarks.step` sums gradients on CPUs, or None where the model knows no cost of it."""
    in_groups = layout.nodes > 1 and layout.ranks_per_node > 1
    by_tail = {"flat": Way("ring"), "node by node": Way("node by node")}
    for wire_dtype in WIRE_DTYPES:
        ours = Way("node by node" if in_groups else "scattered", wire_dtype)
        by_tail[f"{wire_dtype} hook"] = Way("ring", wire_dtype)
        by_tail[f"{wire_dtype} on the wire"] = by_tail[f"{wire_dtype} between nodes"] = ours
        by_tail[f"{wire_dtype} on the wire, flat"] = Way("scattered", wire_dtype)
    head, _, tail = name.partition(", ")
    if tail in by_tail:
        return by_tail[tail]
    if (head in _STOCK and tail in _SAME) or (head == _AFTER_THE_BACKWARD and tail in RULES):
        return Way("ring")
    if head.startswith("GradAvg ") and tail in _SAME:
        return Way("node by node" if in_groups else "ring")
    return None


@dataclass(frozen=True)
class Comparison:
    """One variant.

    Attributes:
        name: Of the variant.
        way: How it sums gradients.
        predicted: Seconds of a step; of the sums alone where there is no computation.
        measured: The same over the rounds.
    """

    name: str
    way: Way
    predicted: float
    measured: Spread

    @property
    def error(self) -> float:
        """The predicted time over the median measured one, less 1."""
        return self.predicted / self.measured.median - 1


def compare(results: Mapping[str, Any], links: Links, backward_fraction: float = BACKWARD_FRACTION) -> list[Comparison]:
    """Return the comparison of every variant that the model has a cost of.

    Args:
        results: Of one model, as `benchmarks.step` saves them.
        links: The figures of the links.
        backward_fraction: Of a step without communication, how much is the backward.

    Raises:
        ValueError: If the step without communication was not measured.
    """
    if COMPUTE not in results["seconds"]:
        raise ValueError(f"{results['model']}: {COMPUTE!r} was not measured. Run benchmarks.step with it.")
    layout = Layout(results["nodes"], results["world_size"] // results["nodes"])
    compute = statistics.median(results["seconds"][COMPUTE])
    forward, backward = (1 - backward_fraction) * compute, backward_fraction * compute

    def comparisons() -> Iterator[Comparison]:
        for name in results["order"]:
            way = None if name == COMPUTE else way_of(name, layout)
            seconds = results["seconds"].get(name)
            if way is None or seconds is None:
                continue
            overlap = not name.startswith(_AFTER_THE_BACKWARD)
            work = Work(results["gradient_bytes"], forward, backward, overlap=overlap)
            found = predict(way, work, layout, links)
            predicted = found.communication if name.startswith(EXCHANGE) else found.step
            yield Comparison(name, way, predicted, Spread.of(seconds))

    return list(comparisons())


def _print(results: Mapping[str, Any], found: Sequence[Comparison], console: Console) -> None:
    table = Table(
        title=f"{results['title']}, {results['world_size']} ranks on {results['nodes']} nodes",
        caption=f"median |error| {statistics.median(abs(one.error) for one in found):.1%}, largest"
        f" {max(abs(one.error) for one in found):.1%}",
    )
    for heading, justify in (("variant", "left"), ("way", "left"), ("predicted ms", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]  # a literal, which mypy widens
    table.add_column("measured ms [quartiles]", justify="right")
    table.add_column("error", justify="right")
    for one in found:
        low, median, high = (f"{1e3 * seconds:.1f}" for seconds in one.measured)
        cells = [f"{1e3 * one.predicted:.1f}", f"{median} [{low}, {high}]", f"{one.error:+.1%}"]
        table.add_row(one.name, str(one.way), *cells)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table per model of every file of results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prediction", description="Compare the cost model with measured steps."
    )
    parser.add_argument("--links", type=Path, required=True, help="figures that `gradavg bench --output FILE` wrote")
    parser.add_argument(
        "--backward-fraction",
        type=float,
        default=BACKWARD_FRACTION,
        help="of a step without communication, how much is the backward (default: 2/3)",
    )
    parser.add_argument("results", type=Path, nargs="+", help="results of benchmarks.step, measured on the same nodes")
    given = parser.parse_args(arguments)
    if not 0 <= given.backward_fraction <= 1:
        parser.error(f"--backward-fraction is from 0 to 1; got {given.backward_fraction}")
    console = Console(width=WIDTH, markup=False)
    try:
        links = Links.load(given.links)
        for path in given.results:
            for results in json.loads(path.read_text(encoding="utf-8"))["models"]:
                _print(results, compare(results, links, given.backward_fraction), console)
    except (OSError, KeyError, ValueError) as error:
        parser.error(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
