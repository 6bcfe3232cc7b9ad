"""Train two real tasks with stock DDP and with GradAvg, and compare both with one process: `python -m examples.demo`.

Each run is real processes, started by Lightning's own launcher. Nothing is downloaded. The table is printed; the
plot `comparison.png` and the numbers `results.json` are written to `demo_output/`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from examples.demo.report import TOLERANCE, Comparison, TaskResult, compare, make_table, save_json, save_plot
from examples.demo.run_one import tasks

__all__ = ["Configuration", "configurations", "finish", "main", "run"]

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT = 300.0
"""Seconds after which a run counts as hanging. The slowest takes about 40 on two cores."""


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


def finish(command: Sequence[str], log: Path, *, name: str) -> None:
    """Run a command to its end, with one thread per process.

    Raises:
        RuntimeError: If it fails. The message has the end of its log.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, stdout=file, stderr=file, check=False, timeout=TIMEOUT
        )
    if done.returncode:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise RuntimeError(f"{name}: exit status {done.returncode}.\n{end}\nThe whole log is {log}")


def run(configuration: Configuration, folder: Path, *, quick: bool) -> dict[str, TaskResult]:
    """Run one configuration and return its results by task."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = folder / "results.pt"
    saved.unlink(missing_ok=True)
    command = [sys.executable, "-m", "examples.demo.run_one", "--strategy", configuration.strategy]
    command += ["--devices", str(configuration.devices), "--output", str(folder), *configuration.options]
    if quick:
        command.append("--quick")
    finish(command, folder / "log.txt", name=configuration.name)
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
    for index, configuration in enumerate(configurations(options.worlds)):
        with console.status(f"training: {configuration.name}"):
            folder = output / f"{index}_{configuration.strategy}_{configuration.devices}"
            results[configuration.name] = run(configuration, folder, quick=options.quick)
    reference, *others = results
    comparisons: dict[str, dict[str, Comparison]] = {}
    for name in others:
        comparisons[name] = {}
        for task, result in results[name].items():
            comparisons[name][task] = compare(results[reference][task], result)
    console.print(make_table(results, comparisons, {task.name: task.metric for task in tasks(quick=options.quick)}))
    largest = options.worlds[-1]
    shown = (reference, f"stock DDP, {largest} processes", f"GradAvg, {largest} processes")
    save_plot(output / "comparison.png", {name: results[name]["text"].losses for name in shown})
    save_json(output / "results.json", results, comparisons)
    console.print(f"Written: {output / 'comparison.png'} and {output / 'results.json'}", soft_wrap=True)

    failed = []
    for name in others:
        if not name.startswith("GradAvg"):
            continue
        for task, comparison in comparisons[name].items():
            if not comparison.within_tolerance:
                failed.append(f"{name}, {task}")
    if not failed:
        return 0
    console.print(f"Differs from one process by more than {TOLERANCE:.0e}: {'; '.join(failed)}", style="red")
    return 1
