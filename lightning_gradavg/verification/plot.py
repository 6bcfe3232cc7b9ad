"""A report as a picture: the difference of every parameter's gradient in every step."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

from lightning_gradavg.verification.report import Report

__all__ = ["plot_report"]

_SMALLEST = 1e-16
"""What equal is drawn as: a logarithm needs a number."""


def plot_report(report: Report, path: str | Path) -> None:
    """Write a picture of the reduced gradient's relative difference per parameter and step.

    Args:
        report: The report.
        path: The file, of a type that matplotlib writes; PNG without a suffix.

    Raises:
        RuntimeError: If matplotlib is not installed.
    """
    try:
        figure_module: Any = importlib.import_module("matplotlib.figure")
        colors: Any = importlib.import_module("matplotlib.colors")
    except ImportError as error:
        raise RuntimeError("the plot needs matplotlib, which is not installed: pip install matplotlib") from error
    names = list(report.gradients)
    rows = [[_drawn(value) for value in report.gradients[name]] for name in names]
    figure = figure_module.Figure(figsize=(4 + 0.6 * report.steps, 1.8 + 0.28 * len(names)), layout="constrained")
    axes = figure.subplots()
    largest = max((value for row in rows for value in row), default=1.0)
    norm = colors.LogNorm(vmin=report.tolerance / 1e3, vmax=max(10 * report.tolerance, largest), clip=True)
    image = axes.imshow(rows, aspect="auto", norm=norm, cmap="magma", interpolation="nearest")
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xticks(range(report.steps))
    axes.set_xlabel("optimizer step")
    axes.set_title("equal" if report.first is None else report.first.cause, fontsize=9)
    bar = figure.colorbar(image, ax=axes)
    bar.set_label("relative difference of the reduced gradient", fontsize=7)
    bar.ax.axhline(report.tolerance, color="white")
    figure.savefig(path, dpi=150)


def _drawn(value: float) -> float:
    return max(value, _SMALLEST) if math.isfinite(value) else 1.0
