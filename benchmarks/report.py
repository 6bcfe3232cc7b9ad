"""What a benchmark found: a file of rows, the table that is printed of it, and the ratios that are compared."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch

import lightning_gradavg

__all__ = ["RESULTS", "STOCK", "Row", "Spread", "begin_file", "load", "print_table", "save"]

RESULTS = Path("benchmarks/results")
"""The folder of the files, which git ignores."""

STOCK = "stock"
"""The variant that all others are compared with: Lightning's own strategy."""


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

    def text(self, digits: int, *, sign: str = "") -> str:
        """Return the cell of a table: median [quartiles]."""
        form = f"{sign},.{digits}f"
        return f"{self.median:{form}} [{self.low:{form}}, {self.high:{form}}]"


@dataclass(frozen=True)
class Row:
    """What one variant took in one case.

    Attributes:
        case: What all variants that are compared with each other share, such as the ranks and the model.
        variant: The name of the variant.
        seconds: On the slowest rank, one number per round.
        more: Further numbers, by name: one per round each, or what the benchmark says.
    """

    case: dict[str, Any]
    variant: str
    seconds: list[float]
    more: dict[str, Any] = field(default_factory=dict)

    def ratio(self, rows: Iterable[Row], to: str = STOCK) -> Spread | None:
        """Return the time relative to another variant's, round by round; None if that one was not measured."""
        for row in rows:
            if row.variant == to and row.case == self.case:
                return Spread.of([ours / theirs for ours, theirs in zip(self.seconds, row.seconds, strict=True)])
        return None


def begin_file(file: Path) -> None:
    """Write a file without rows, which says when, where and by which command it is filled."""
    about = {
        "command": _command(),
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "hardware": f"{os.cpu_count()} cores of {_processor()}",
        "load": os.getloadavg()[0],  # a figure of a busy machine is worthless, and this tells
        "versions": (
            f"lightning_gradavg {lightning_gradavg.__version__}, torch {torch.__version__},"
            f" lightning {lightning.__version__}, Python {platform.python_version()}"
        ),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"about": about, "rows": []}) + "\n")


def _command() -> str:
    """Return the command that runs, as one types it."""
    module = sys.modules["__main__"].__spec__
    name = "benchmarks"
    if module is not None:
        name = module.name
    return f"python -m {name} {shlex.join(sys.argv[1:])}".rstrip()


def _processor() -> str:
    """Return the name of the processor, which `platform` does not know on Linux."""
    listed = Path("/proc/cpuinfo")
    if listed.exists():
        for line in listed.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def save(file: Path, rows: Sequence[Row]) -> None:
    """Add rows to a file; after each case, so that an interrupt loses no more than one."""
    saved = json.loads(file.read_text())
    # Only a rank asks: to ask for the name begins CUDA, and ranks may be forks of the process that began the file.
    if torch.cuda.is_initialized():
        saved["about"]["hardware"] += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    saved["rows"] += [asdict(row) for row in rows]
    file.write_text(json.dumps(saved) + "\n")


def load(file: Path) -> list[Row]:
    """Return the rows of a file."""
    return [Row(**row) for row in json.loads(file.read_text())["rows"]]


def print_table(file: Path, columns: Sequence[str], lines: Sequence[Sequence[str]], caption: str) -> None:
    """Print a table as Markdown, which documentation takes over, and below it what its file is about.

    Args:
        file: The file of the rows.
        columns: The titles. The first two columns hold words, all others numbers.
        lines: The cells.
        caption: What the numbers are.
    """
    about = json.loads(file.read_text())["about"]
    texts = [[*columns], *([*line] for line in lines)]
    widths = [max(len(line[number]) for line in texts) for number in range(len(columns))]
    rule = ["-" * width for width in widths]
    for line in (texts[0], rule, *texts[1:]):
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.write(f"\n{caption} {about['hardware']}; load {about['load']:.1f} when it began. {about['versions']}.\n")
    sys.stdout.write(f"{about['date']}, {file}\n\n    $ {about['command']}\n\n")
    sys.stdout.flush()
