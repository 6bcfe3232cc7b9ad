"""What the demo hands over: a table, a plot, and the numbers."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

__all__ = ["TOLERANCE", "Comparison", "TaskResult", "compare", "make_table", "save_json", "save_plot"]

TOLERANCE = 1e-5
"""The largest relative difference that a run with GradAvg may have in float32."""


@dataclass(frozen=True)
class TaskResult:
    """What one run left of one task.

    Attributes:
        losses: Mean loss of each global batch, float64, one per optimizer step.
        weights: The trained parameters by name.
        metric: The test metric.
        seconds: Wall time of training on rank 0, without the start of processes.
    """

    losses: Tensor
    weights: Mapping[str, Tensor]
    metric: float
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """The largest relative differences to the reference run: of any parameter's norm, and of any step's loss."""

    weights: float
    losses: float

    @property
    def within_tolerance(self) -> bool:
        """Whether both are at most `TOLERANCE`; a NaN is not."""
        return self.weights <= TOLERANCE and self.losses <= TOLERANCE


Results = Mapping[str, Mapping[str, TaskResult]]
"""Results by run and task; the first run is the reference."""

Comparisons = Mapping[str, Mapping[str, Comparison]]
"""Comparisons by run and task; the reference run has none."""


def compare(reference: TaskResult, result: TaskResult) -> Comparison:
    """Return the maxima of ||w - w_ref|| / ||w_ref|| and |l - l_ref| / |l_ref|, in float64; NaN where any number is."""
    differences = []
    for name, weight in reference.weights.items():
        w_ref = weight.double()
        w = result.weights[name].double()
        differences.append((w - w_ref).norm() / w_ref.norm())
    weights = torch.stack(differences)
    losses = (result.losses.double() / reference.losses.double() - 1).abs()
    return Comparison(float(weights.max()), float(losses.max()))


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
            # The reference run is compared with nothing.
            difference_of_weights = "-"
            difference_of_losses = "-"
            if run in comparisons:
                difference_of_weights = f"{comparisons[run][task].weights:.1e}"
                difference_of_losses = f"{comparisons[run][task].losses:.1e}"
            table.add_row(
                run,
                difference_of_weights,
                difference_of_losses,
                f"{float(result.losses[0]):.2f} to {float(result.losses[-10:].mean()):.2f}",
                f"{result.metric:.4f}",
                f"{result.seconds:.1f} s",
            )
    return table


def save_plot(path: Path, losses: Mapping[str, Tensor]) -> None:
    """Draw the training loss over the steps of one process, of stock DDP and of GradAvg, in this order."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    panel = figure.subplots()
    styles = (("#b8bec7", "-", 7.0), ("#d9480f", "-", 2.0), ("#0b4f94", "--", 2.0))
    for (name, curve), (color, line, width) in zip(losses.items(), styles, strict=True):
        steps = range(1, len(curve) + 1)
        panel.plot(steps, curve.tolist(), color=color, linestyle=line, linewidth=width, label=name)
    panel.set_xlabel("optimizer steps", fontsize=16)
    panel.set_ylabel("training loss", fontsize=16)
    panel.tick_params(labelsize=13)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=16, frameon=False)
    figure.savefig(path, dpi=150)


def save_json(path: Path, results: Results, comparisons: Comparisons) -> None:
    """Write every number of the table, and the loss curves."""
    runs: dict[str, dict[str, Any]] = {}
    for run, tasks in results.items():
        runs[run] = {}
        for task, result in tasks.items():
            # The reference run differs from itself by nothing.
            comparison = Comparison(0.0, 0.0)
            if run in comparisons:
                comparison = comparisons[run][task]
            runs[run][task] = {
                "difference_of_weights": comparison.weights,
                "difference_of_losses": comparison.losses,
                "test_metric": result.metric,
                "seconds": result.seconds,
                "losses": result.losses.tolist(),
            }
    versions = {"python": platform.python_version(), "torch": torch.__version__, "lightning": lightning.__version__}
    document = {"tolerance": TOLERANCE, "versions": versions, "machine": platform.platform(), "runs": runs}
    path.write_text(json.dumps(document, indent=1) + "\n")
