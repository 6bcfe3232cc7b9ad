"""Scaling curves: how the time of a step grows with the number of ranks."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_gradavg.costs.allreduce import ALGORITHMS
from lightning_gradavg.costs.links import BYTES_PER_NUMBER
from lightning_gradavg.costs.predict import Prediction, Work

__all__ = ["plot_predictions"]

_COLORS = ("#4878a8", "#d07830", "#60a060", "#a04868")
_STYLES = ("-", "--", ":", "-.")


def plot_predictions(predictions: Sequence[Prediction], work: Work, path: Path) -> None:
    """Draw the time of a step over the number of ranks: a picture per wire type, a line per algorithm.

    Args:
        predictions: One or more, of any order.
        work: The step that they are of.
        path: The file, of a type that matplotlib writes; PNG without a suffix.

    Raises:
        RuntimeError: If matplotlib is not installed, or knows no such type of file.
    """
    try:
        figure_module: Any = importlib.import_module("matplotlib.figure")
        ticker: Any = importlib.import_module("matplotlib.ticker")
    except ImportError as error:
        raise RuntimeError(
            "--plot needs matplotlib, which is not installed: pip install 'lightning-gradavg[demo]'"
        ) from error
    wire_dtypes = [name for name in BYTES_PER_NUMBER if any(one.way.wire_dtype == name for one in predictions)]
    figure = figure_module.Figure(figsize=(3.4 * len(wire_dtypes) + 1.2, 3.8), layout="constrained")
    axes = figure.subplots(1, len(wire_dtypes), sharey=True, squeeze=False)[0]
    for axis, wire_dtype in zip(axes, wire_dtypes, strict=True):
        for algorithm, color, style in zip(ALGORITHMS, _COLORS, _STYLES, strict=True):
            line = sorted(
                (one.layout.world_size, 1e3 * one.step)
                for one in predictions
                if (one.way.algorithm, one.way.wire_dtype) == (algorithm, wire_dtype)
            )
            axis.plot(*zip(*line, strict=True), color=color, linestyle=style, marker=".", label=algorithm)
        axis.axhline(1e3 * work.compute, color="#808080", linewidth=1, label="computation alone")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(ticker.ScalarFormatter())
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(ticker.ScalarFormatter())
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
        axis.set_title(wire_dtype)
        axis.set_xlabel("ranks")
        axis.grid(visible=True, which="both", color="#e0e0e0", linewidth=0.5)
    axes[0].set_ylabel("step, ms")
    axes[0].legend(fontsize=8)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise RuntimeError(f"the plot {str(path)!r} cannot be written: {error}") from error
