"""What narrow gradients do to training: `python -m examples.demo.convergence`.

The demo's two tasks are trained with several seeds on 2 and 4 processes, with gradients sent in float32, in 16 bits by
our hooks, and by torch's bf16 hook. The table is printed, and its numbers are written to
`demo_output/convergence.json`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from subprocess import TimeoutExpired

import lightning
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.demo.convergence_run import OUTCOMES, WAYS, Outcome, seeded_tasks
from examples.demo.report import json_safe
from examples.demo.runs import REPOSITORY, RunFailedError, started, tail

__all__ = ["Summary", "main", "make_table", "summarize"]

TIMEOUT = 1800.0
"""Seconds after which the runs on one number of processes are taken to hang."""

LAST_STEPS = 10
"""The final loss is the mean over this many steps: that of one step depends on which samples it had."""

Setting = tuple[str, int]
"""A task and a number of processes."""


@dataclass(frozen=True)
class Spread:
    """Mean over the seeds, and sample standard deviation; None for that of one seed."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(mean(values), stdev(values) if len(values) > 1 else None)

    def text(self, digits: int, *, scale: float = 1.0, sign: str = "") -> str:
        deviation = "" if self.deviation is None else f"±{scale * self.deviation:.{digits}f}"
        return f"{scale * self.mean:{sign}.{digits}f}{deviation}"

    def thousandths(self) -> str:
        return self.text(1, scale=1000.0, sign="+")


@dataclass(frozen=True)
class Summary:
    """One way of sending in one setting, over the seeds.

    Attributes:
        loss: Mean training loss of the last steps.
        metric: The test metric.
        loss_change: Difference of that loss from the exact run of the same seed.
        metric_change: Difference of the test metric from that run.
        distance: Of the weights from that run's, mean over the seeds.
        bytes_per_step: What a process sends.
    """

    loss: Spread
    metric: Spread
    loss_change: Spread
    metric_change: Spread
    distance: float
    bytes_per_step: float


def final_loss(outcome: Outcome) -> float:
    return mean(outcome.losses[-LAST_STEPS:])


def summarize(outcomes: Sequence[Outcome]) -> dict[Setting, dict[str, Summary]]:
    """Return the summaries by setting and way, in the order of the outcomes and of `WAYS`."""
    found: dict[Setting, dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        ways = found.setdefault((outcome.task, outcome.devices), {way.name: [] for way in WAYS})
        ways[outcome.way].append(outcome)
    summaries: dict[Setting, dict[str, Summary]] = {}
    for setting, ways in found.items():
        exact = {outcome.seed: outcome for outcome in ways[WAYS[0].name]}
        summaries[setting] = {
            way: Summary(
                loss=Spread.of([final_loss(one) for one in ones]),
                metric=Spread.of([one.metric for one in ones]),
                loss_change=Spread.of([final_loss(one) - final_loss(exact[one.seed]) for one in ones]),
                metric_change=Spread.of([one.metric - exact[one.seed].metric for one in ones]),
                distance=mean(one.distance for one in ones),
                bytes_per_step=mean(one.bytes_per_step for one in ones),
            )
            for way, ones in ways.items()
        }
    return summaries


def make_table(summaries: Mapping[Setting, Mapping[str, Summary]], seeds: int) -> Table:
    """Return the table of all settings."""
    table = Table(
        title=f"What the way of sending does to training (mean ± standard deviation, {seeds} seeds)",
        caption=f"loss: training, mean of the last {LAST_STEPS} steps. test: accuracy of digits, loss of text.\n"
        "change: in thousandths, from float32 with the same seed.\n"
        "weights: largest ||w - w_exact|| / ||w_exact|| of any parameter, seeds' mean.\n"
        "kB: sent by one process in one step, an all-reduce counted as a ring.",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=0,
    )
    table.add_column("way", no_wrap=True)
    for column in ("loss", "change", "test", "change", "weights", "kB"):
        table.add_column(column, justify="right", no_wrap=True)
    for (task, devices), ways in summaries.items():
        table.add_section()
        table.add_row(f"[bold]{task}[/], {devices} ranks")
        for way, summary in ways.items():
            first = way == WAYS[0].name
            table.add_row(
                way,
                summary.loss.text(2),
                "-" if first else summary.loss_change.thousandths(),
                summary.metric.text(3),
                "-" if first else summary.metric_change.thousandths(),
                "-" if first else f"{summary.distance:.1e}",
                f"{summary.bytes_per_step / 1e3:.3g}",
            )
    return table


def save_json(path: Path, summaries: Mapping[Setting, Mapping[str, Summary]], outcomes: Sequence[Outcome]) -> None:
    """Write every number of the table, and every run. A number that is not finite is written as a string."""
    settings = [
        {"task": task, "devices": devices, "ways": {way: asdict(summary) for way, summary in ways.items()}}
        for (task, devices), ways in summaries.items()
    ]
    versions = {"python": platform.python_version(), "torch": torch.__version__, "lightning": lightning.__version__}
    document = {"versions": versions, "settings": settings, "runs": [asdict(outcome) for outcome in outcomes]}
    path.write_text(json.dumps(json_safe(document), indent=1, allow_nan=False) + "\n")


def run(devices: int, seeds: int, folder: Path, progress: Progress, bar: TaskID, *, quick: bool) -> list[Outcome]:
    """Run every way on a number of processes, and return the outcomes.

    Raises:
        RunFailedError: If a run fails, or all take longer than `TIMEOUT` seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, saved = folder / "log.txt", folder / OUTCOMES
    saved.unlink(missing_ok=True)
    command = [sys.executable, "-m", "examples.demo.convergence_run", "--devices", str(devices), "--seeds", str(seeds)]
    command += ["--output", str(folder), *(["--quick"] if quick else [])]
    before, deadline = progress.tasks[bar].completed, time.monotonic() + TIMEOUT
    with started(command, log) as process:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise RunFailedError(f"{devices} processes: not finished after {TIMEOUT:.0f} s.\n{tail(log)}")
            with suppress(TimeoutExpired):
                process.wait(timeout=0.25)
            lines = saved.read_text().count("\n") if saved.exists() else 0
            progress.update(bar, completed=before + lines, description=f"{devices} processes")
    outcomes = [Outcome(**json.loads(line)) for line in saved.read_text().splitlines()] if saved.exists() else []
    if process.returncode != 0 or len(outcomes) != seeds * len(WAYS) * len(seeded_tasks(quick=quick)):
        raise RunFailedError(f"{devices} processes: exit status {process.returncode}.\n{tail(log)}")
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print and save; return 1 if a run failed, else 0."""
    parser = argparse.ArgumentParser(description="What narrow gradients do to training.")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="numbers of processes (default: 2 4)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each way (default: 3)")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "demo_output", help="default: demo_output/")
    parser.add_argument("--quick", action="store_true", help="a few steps of each task")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or min(options.worlds) < 2:  # one process sends nothing
        parser.error(f"--seeds is 1 or more and --worlds 2 or more each; got {options.seeds} and {options.worlds}")
    output: Path = options.output.resolve()
    console = Console()

    outcomes: list[Outcome] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    total = len(options.worlds) * options.seeds * len(WAYS) * len(seeded_tasks(quick=options.quick))
    try:
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("starting", total=total)
            for devices in options.worlds:
                folder = output / f"convergence_{devices}"
                outcomes += run(devices, options.seeds, folder, progress, bar, quick=options.quick)
    except RunFailedError as error:
        console.print(str(error), style="red", markup=False)
        return 1

    summaries = summarize(outcomes)
    console.print(make_table(summaries, options.seeds))
    save_json(output / "convergence.json", summaries, outcomes)
    console.print(f"Written: {output / 'convergence.json'}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
