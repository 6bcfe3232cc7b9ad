"""What the measured rounds say: one table per model, and the files that keep it."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import lightning
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.plain import BASELINE
from benchmarks.trained import LIGHTNING

__all__ = ["Measurements", "Spread", "print_report", "save_report"]

WIDTH = 160


class Spread(NamedTuple):
    """Median and quartiles of one number over the rounds."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    @classmethod
    def of_ratios(cls, values: Sequence[float], baseline: Sequence[float]) -> Spread:
        """Return the spread of the ratios to a baseline, round by round."""
        return cls.of([value / base for value, base in zip(values, baseline, strict=True)])


@dataclass
class Measurements:
    """The rounds of one model.

    Attributes:
        model: Its name.
        title: Its description.
        gradient_bytes: Size of all gradients in memory.
        world_size: Number of ranks.
        nodes: Number of nodes.
        device: `cpu` or `cuda`.
        steps: Timed steps of a round.
        order: All variants, in the order of the table.
        seconds: Of each variant, the seconds of a step on the slower rank, one per round.
        processor: Likewise the processor seconds.
        sent: Likewise the bytes that a node's interface sent.
        in_lightning: The variants that Lightning's Trainer ran.
    """

    model: str
    title: str
    gradient_bytes: int
    world_size: int
    nodes: int
    device: str
    steps: int
    order: list[str]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    processor: dict[str, list[float]] = field(default_factory=dict)
    sent: dict[str, list[float]] = field(default_factory=dict)
    in_lightning: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The variants that were measured, in the order of the table."""
        return [name for name in self.order if name in self.seconds]

    def add(self, name: str, seconds: float, processor: float, sent: float) -> None:
        """Append a round of one variant."""
        self.seconds.setdefault(name, []).append(seconds)
        self.processor.setdefault(name, []).append(processor)
        self.sent.setdefault(name, []).append(sent)

    def ratios(self, name: str, to: str) -> Spread | None:
        """Return a variant's time relative to another's, round by round; None if the other was not measured."""
        if to not in self.seconds:
            return None
        return Spread.of_ratios(self.seconds[name], self.seconds[to])


def _milliseconds(seconds: Sequence[float]) -> str:
    """Return the cell of times."""
    spread = Spread.of([1e3 * value for value in seconds])
    return f"{spread.median:.1f} [{spread.low:.1f}, {spread.high:.1f}]"


def _ratio(spread: Spread | None) -> str:
    """Return the cell of a ratio."""
    if spread is None:
        return "-"
    return f"{spread.median:.3f} [{spread.low:.3f}, {spread.high:.3f}]"


def _table(results: Measurements) -> Table:
    rounds = max((len(seconds) for seconds in results.seconds.values()), default=0)
    table = Table(
        title=f"{results.title}: {results.gradient_bytes / 1e6:.1f} MB of gradients, {results.world_size} ranks on"
        f" {results.nodes} nodes ({results.device}), {rounds} rounds of {results.steps} steps",
        caption="median [quartiles] over the rounds; times of the slower rank",
    )
    table.add_column("variant", no_wrap=True)
    for column in ("ms", f"of {BASELINE}", "of Lightning", "CPU ms", "sent MB"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in results.names:
        # What Lightning does beside reducing is no part of the variants that it does not run.
        to_lightning = results.ratios(name, LIGHTNING) if name in results.in_lightning else None
        table.add_row(
            name,
            _milliseconds(results.seconds[name]),
            _ratio(results.ratios(name, BASELINE)),
            _ratio(to_lightning),
            _milliseconds(results.processor[name]),
            f"{statistics.median(results.sent[name]) / 1e6:.2f}",
        )
    return table


def print_report(results: Measurements) -> None:
    """Print the table of one model."""
    Console(width=WIDTH, markup=False).print(_table(results))


def save_report(results: Sequence[Measurements], output: Path) -> None:
    """Write the rounds of each model as JSON."""
    output.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
        "command": sys.argv[1:],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "models": [asdict(measurements) for measurements in results],
    }
    output.write_text(json.dumps(about, indent=1) + "\n")
    Console(width=WIDTH, markup=False).print(f"saved {output}")
