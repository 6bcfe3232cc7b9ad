"""What the demo hands over: a table, a plot, and the numbers."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from examples.demo.comparison import TOLERANCE, Comparison, TaskResult, losses_difference

__all__ = ["final_loss", "json_safe", "make_table", "save_json", "save_plot"]

PLOT_FLOOR = 1e-9
"""Smaller differences, and none, are drawn here: a logarithmic axis has no zero."""

Results = Mapping[str, Mapping[str, TaskResult]]
"""Results by run and task; the first run is the reference."""

Comparisons = Mapping[str, Mapping[str, Comparison]]
"""Comparisons by run and task; the reference run has none."""


def final_loss(result: TaskResult) -> float:
    """Return the mean of the last ten steps' losses: that of one step depends on which samples it had."""
    return float(result.losses[-10:].mean())


def make_table(results: Results, comparisons: Comparisons, metrics: Mapping[str, str]) -> Table:
    """Return the table of all runs; `metrics` names each task's test metric."""
    table = Table(
        title="Largest relative difference to one process (float32, same global batches)",
        caption="weights: largest ||w - w_ref|| / ||w_ref|| of any parameter after training.\n"
        "loss curve: largest |l - l_ref| / |l_ref| of any step.\n"
        "loss: of the first step, and the mean of the last ten. time: of training.\n"
        "reversed: the samples of each batch in reverse order; only rounding differs.\n"
        f"GradAvg promises at most {TOLERANCE:.0e} in both.",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("run", no_wrap=True)
    for column in ("weights", "loss curve", "loss", "test", "time"):
        table.add_column(column, justify="right", no_wrap=True)
    for task, metric in metrics.items():
        table.add_section()
        table.add_row(f"[bold]{task}[/] ({metric.replace('_', ' ')})")
        for run, tasks in results.items():
            result = tasks[task]
            comparison = comparisons.get(run, {}).get(task)
            table.add_row(
                run,
                f"{comparison.weights:.1e}" if comparison else "-",
                f"{comparison.losses:.1e}" if comparison else "-",
                f"{float(result.losses[0]):.2f} to {final_loss(result):.2f}",
                f"{result.metric:.4f}",
                f"{result.seconds:.1f} s",
            )
    return table


def save_plot(path: Path, results: Results, comparisons: Comparisons, colors: Mapping[str, str]) -> None:
    """Draw each run's relative difference to the reference run, one panel per task.

    Lines are the loss over the steps. Diamonds to the right of them are the weights after training.
    """
    reference, *others = results
    tasks = list(results[reference])
    figure = Figure(figsize=(5.5 * len(tasks), 4.4), layout="constrained")
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for panel, task in zip(panels, tasks, strict=True):
        expected = results[reference][task].losses
        steps = range(1, len(expected) + 1)
        for position, run in enumerate(others, start=1):
            difference = losses_difference(expected, results[run][task].losses).clamp(min=PLOT_FLOOR)
            panel.plot(steps, difference.tolist(), color=colors[run], linewidth=1.2, label=run)
            # Beside each other, because runs that agree would hide one another.
            x = len(expected) * (1.02 + 0.025 * position)
            panel.plot([x], [max(comparisons[run][task].weights, PLOT_FLOOR)], "D", color=colors[run], markersize=5)
        panel.axhline(
            TOLERANCE, color="black", linestyle="--", linewidth=1, label=f"promise of GradAvg: {TOLERANCE:.0e}"
        )
        panel.set_yscale("log")
        panel.set_title(task)
        panel.set_xlabel("loss, over optimizer steps (diamonds: weights after training)")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(f"relative difference to one process\n(less than {PLOT_FLOOR:.0e} is drawn there)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


def save_json(path: Path, results: Results, comparisons: Comparisons) -> None:
    """Write every number of the table, and the loss curves. A number that is not finite is written as a string."""
    runs: dict[str, dict[str, dict[str, Any]]] = {}
    for run, tasks in results.items():
        runs[run] = {}
        for task, result in tasks.items():
            comparison = comparisons.get(run, {}).get(task)
            runs[run][task] = {
                "difference_of_weights": comparison.weights if comparison else 0.0,
                "difference_of_losses": comparison.losses if comparison else 0.0,
                "test_metric": result.metric,
                "seconds": result.seconds,
                "losses": result.losses.tolist(),
            }
    versions = {"python": platform.python_version(), "torch": torch.__version__, "lightning": lightning.__version__}
    document = {"tolerance": TOLERANCE, "versions": versions, "machine": platform.platform(), "runs": runs}
    path.write_text(json.dumps(json_safe(document), indent=1, allow_nan=False) + "\n")


def json_safe(value: Any) -> Any:
    """Return `value` with each infinity and NaN as a string, for which JSON has no number."""
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_safe(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value
