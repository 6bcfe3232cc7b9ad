"""Train two real tasks with stock DDP and with GradAvg, and compare both with one process: `python -m examples.demo`.

Each run is real processes, started by Lightning's own launcher. Nothing is downloaded. The table is printed; the
plot `comparison.png` and the numbers `results.json` are written to `demo_output/`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from examples.demo.comparison import TOLERANCE, TaskResult, compare
from examples.demo.report import make_table, save_json, save_plot
from examples.demo.run_one import tasks

__all__ = ["Configuration", "RunFailedError", "configurations", "environment", "main", "run"]

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT = 300.0
"""Seconds after which a run is taken to hang. The slowest takes about 40 on two cores."""

LAUNCHER_NAMES = ("LOCAL_RANK", "RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_PREFIXES = ("SLURM_", "TORCHELASTIC_", "OMPI_", "JSM_", "LSB_", "PL_", "LT_")


class RunFailedError(RuntimeError):
    """A run did not finish, or left no result."""


@dataclass(frozen=True)
class Configuration:
    """One run of the demo.

    Attributes:
        name: What the table calls it.
        strategy: One of `examples.demo.training.STRATEGIES`.
        devices: Number of processes.
        color: Of its line in the plot.
        options: Further arguments of `examples.demo.run_one`.
    """

    name: str
    strategy: str
    devices: int
    color: str
    options: tuple[str, ...] = ()

    @property
    def must_match(self) -> bool:
        """Whether the demo fails if this run differs from one process."""
        return self.strategy == "gradavg"


def configurations(worlds: Sequence[int]) -> list[Configuration]:
    """Return the runs: one process first, which is the reference, then what is compared with it.

    One process with the samples of each batch reversed computes the same with other roundings. Its difference is the
    least that any arrangement of the same samples can be asked for.
    """
    shades = {"ddp": ("#f6a55c", "#c8500a"), "gradavg": ("#6db3e8", "#0b4f94")}
    return [
        Configuration("one process", "auto", 1, "black"),
        Configuration("one process, reversed", "auto", 1, "#8a8a8a", ("--reversed",)),
        *(
            Configuration(f"{label}, {world} processes", strategy, world, shades[strategy][index % 2])
            for strategy, label in (("ddp", "stock DDP"), ("gradavg", "GradAvg"))
            for index, world in enumerate(worlds)
        ),
    ]


def environment() -> dict[str, str]:
    """Return the environment of a run: one thread per process, and nothing left of a launcher around the demo."""
    left = {name for name in os.environ if name in LAUNCHER_NAMES or name.startswith(LAUNCHER_PREFIXES)}
    return {name: value for name, value in os.environ.items() if name not in left} | {"OMP_NUM_THREADS": "1"}


@contextmanager
def started(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start `command` in its own process group; whatever of the group is left at the end is killed."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment(), stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield process
    finally:
        # Also after success: rank 0 does not wait for the other ranks to end.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(
    configuration: Configuration, folder: Path, progress: Progress, *, quick: bool, timeout: float
) -> dict[str, TaskResult]:
    """Run one configuration to its end and return its results by task.

    Raises:
        RunFailedError: If it fails, or takes longer than `timeout` seconds. The message ends with the end of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, marks, saved = folder / "log.txt", folder / "progress", folder / "results.pt"
    for path in (marks, saved):
        path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "examples.demo.run_one", "--strategy", configuration.strategy]
    command += ["--devices", str(configuration.devices), "--output", str(folder), *configuration.options]
    command += ["--quick"] if quick else []
    bar = progress.add_task(f"{configuration.name}: starting", total=None)
    deadline = time.monotonic() + timeout
    with started(command, log) as process:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise RunFailedError(f"{configuration.name}: not finished after {timeout:.0f} s.\n{tail(log)}")
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.25)
            show_progress(progress, bar, configuration.name, marks)
    if process.returncode != 0 or not saved.exists():
        raise RunFailedError(f"{configuration.name}: exit status {process.returncode}.\n{tail(log)}")
    return {task: TaskResult(**values) for task, values in torch.load(saved, weights_only=True).items()}


def show_progress(progress: Progress, bar: TaskID, name: str, marks: Path) -> None:
    """Bring the bar to the last complete line of `marks`."""
    lines = marks.read_text().split("\n")[:-1] if marks.exists() else []
    if lines:
        task, done, total = lines[-1].split()
        progress.update(bar, description=f"{name}: {task}", completed=int(done), total=int(total))


def tail(log: Path) -> str:
    """Return the end of a log, and where the whole is."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([*lines[-30:], f"The whole log is {log}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status: 0 if every run with GradAvg matched one process, else 1."""
    parser = argparse.ArgumentParser(description="Compare stock DDP and GradAvg with one process, on real data.")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="numbers of processes (default: 2 4)")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "demo_output", help="default: demo_output/")
    parser.add_argument("--quick", action="store_true", help="one short epoch of each task")
    options = parser.parse_args(arguments)
    output: Path = options.output.resolve()
    console = Console()

    runs = configurations(options.worlds)
    results: dict[str, dict[str, TaskResult]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            whole = progress.add_task("runs", total=len(runs))
            for index, configuration in enumerate(runs):
                folder = output / f"{index}_{configuration.strategy}_{configuration.devices}"
                results[configuration.name] = run(configuration, folder, progress, quick=options.quick, timeout=TIMEOUT)
                progress.advance(whole)
    except RunFailedError as error:
        console.print(str(error), style="red", markup=False)
        return 1

    reference, *others = runs
    comparisons = {
        other.name: {
            task: compare(results[reference.name][task], result) for task, result in results[other.name].items()
        }
        for other in others
    }
    console.print(make_table(results, comparisons, {task.name: task.metric for task in tasks(quick=options.quick)}))
    save_plot(output / "comparison.png", results, comparisons, {run.name: run.color for run in runs})
    save_json(output / "results.json", results, comparisons)
    console.print(f"Written: {output / 'comparison.png'} and {output / 'results.json'}", soft_wrap=True)

    failed = [
        f"{other.name}, {task}"
        for other in others
        if other.must_match
        for task, comparison in comparisons[other.name].items()
        if not comparison.within_tolerance
    ]
    if failed:
        console.print(f"Differs from one process by more than {TOLERANCE:.0e}: {'; '.join(failed)}", style="red")
    return 1 if failed else 0
