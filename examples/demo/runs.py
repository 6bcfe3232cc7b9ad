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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from examples.demo.report import TOLERANCE, TaskResult, compare, make_table, save_json, save_plot
from examples.demo.run_one import tasks

__all__ = ["Configuration", "RunFailedError", "configurations", "environment", "finish", "main", "run"]

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT = 300.0
"""Seconds after which a run is taken to hang. The slowest takes about 40 on two cores."""

LAUNCHER_NAMES = ("LOCAL_RANK", "RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_PREFIXES = ("SLURM_", "TORCHELASTIC_", "OMPI_", "JSM_", "LSB_", "PL_", "LT_")


class RunFailedError(RuntimeError):
    """A run did not finish, or left no result."""


@dataclass(frozen=True)
class Configuration:
    """One run of the demo: its name in the table, its strategy, and further options of `examples.demo.run_one`."""

    name: str
    strategy: str
    devices: int
    options: tuple[str, ...] = ()


def configurations(worlds: Sequence[int]) -> list[Configuration]:
    """Return the runs. The first is the reference: one process.

    One process with the samples of each batch reversed computes the same with other roundings. No arrangement of the
    same samples can be expected to come closer.
    """
    return [
        Configuration("one process", "auto", 1),
        Configuration("one process, reversed", "auto", 1, ("--reversed",)),
        *(Configuration(f"stock DDP, {world} processes", "ddp", world) for world in worlds),
        *(Configuration(f"GradAvg, {world} processes", "gradavg", world) for world in worlds),
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


def finish(command: Sequence[str], log: Path, *, name: str, timeout: float = TIMEOUT) -> None:
    """Run a command to its end.

    Raises:
        RunFailedError: If it fails, or takes longer than `timeout` seconds. The message has the end of its log.
    """
    with started(command, log) as process:
        try:
            status = f"exit status {process.wait(timeout)}"
        except subprocess.TimeoutExpired:
            status = f"not finished after {timeout:.0f} s"
    if status != "exit status 0":
        end = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise RunFailedError(f"{name}: {status}.\n{end}\nThe whole log is {log}")


def run(configuration: Configuration, folder: Path, *, quick: bool) -> dict[str, TaskResult]:
    """Run one configuration and return its results by task."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = folder / "results.pt"
    saved.unlink(missing_ok=True)
    command = [sys.executable, "-m", "examples.demo.run_one", "--strategy", configuration.strategy]
    command += ["--devices", str(configuration.devices), "--output", str(folder), *configuration.options]
    finish([*command, "--quick"] if quick else command, folder / "log.txt", name=configuration.name)
    return {task: TaskResult(**values) for task, values in torch.load(saved, weights_only=True).items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status: 0 if every run with GradAvg matched one process, else 1."""
    parser = argparse.ArgumentParser(description="Compare stock DDP and GradAvg with one process, on real data.")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="numbers of processes (default: 2 4)")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "demo_output", help="default: demo_output/")
    parser.add_argument("--quick", action="store_true", help="one short epoch of each task")
    options = parser.parse_args(arguments)
    output: Path = options.output.resolve()
    console = Console()

    results: dict[str, dict[str, TaskResult]] = {}
    for index, each in enumerate(configurations(options.worlds)):
        with console.status(f"training: {each.name}"):
            folder = output / f"{index}_{each.strategy}_{each.devices}"
            results[each.name] = run(each, folder, quick=options.quick)
    reference, *others = results
    comparisons = {
        name: {task: compare(results[reference][task], result) for task, result in results[name].items()}
        for name in others
    }
    console.print(make_table(results, comparisons, {task.name: task.metric for task in tasks(quick=options.quick)}))
    shown = (reference, *(f"{label}, {options.worlds[-1]} processes" for label in ("stock DDP", "GradAvg")))
    save_plot(output / "comparison.png", {name: results[name]["text"].losses for name in shown})
    save_json(output / "results.json", results, comparisons)
    console.print(f"Written: {output / 'comparison.png'} and {output / 'results.json'}", soft_wrap=True)

    failed = [
        f"{name}, {task}"
        for name in others
        for task, comparison in comparisons[name].items()
        if name.startswith("GradAvg") and not comparison.within_tolerance
    ]
    if failed:
        console.print(f"Differs from one process by more than {TOLERANCE:.0e}: {'; '.join(failed)}", style="red")
    return int(bool(failed))
