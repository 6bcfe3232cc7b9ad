"""What the cost model found, as tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_gradavg.costs.allreduce import ALGORITHMS, Layout
from lightning_gradavg.costs.links import Links
from lightning_gradavg.costs.predict import Prediction, Work, best

__all__ = ["print_links", "print_predictions"]

_PIPE_WIDTH = 120  # rich assumes 80 columns where there is no terminal


def _console() -> Console:
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=_PIPE_WIDTH if piped else None, highlight=False)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def print_predictions(predictions: Sequence[Prediction], work: Work, source: str) -> None:
    """Print a table of steps per wire type, and one of the best choices.

    Args:
        predictions: Of every algorithm, for each layout and wire type.
        work: The step that they are of.
        source: Where the figures of the links come from.
    """
    console = _console()
    layouts = list(dict.fromkeys(one.layout for one in predictions))
    console.print(
        f"Predicted, not measured: {work.gradient_bytes / 1e6:.4g} MB of gradients, {_milliseconds(work.forward)} +"
        f" {_milliseconds(work.backward)} ms of computation, links of {source}.",
        markup=False,
    )
    for wire_dtype in dict.fromkeys(one.way.wire_dtype for one in predictions):
        table = _table(f"A step in ms, {wire_dtype} on the wire", "nodes x ranks", *ALGORITHMS)
        for layout in layouts:
            cells = {
                one.way.algorithm: _milliseconds(one.step)
                for one in predictions
                if (one.layout, one.way.wire_dtype) == (layout, wire_dtype)
            }
            table.add_row(_layout_text(layout), *(cells[algorithm] for algorithm in ALGORITHMS))
        console.print(table)
    table = _table("The shortest step that something offers", "nodes x ranks", "ms", "exposed ms", "efficiency")
    for heading in ("way", "chosen by"):
        table.add_column(heading)
    for layout in layouts:
        choice = best(one for one in predictions if one.layout == layout)
        if choice is None:
            table.add_row(_layout_text(layout), "-", "-", "-", "nothing offers these wire types")
            continue
        efficiency = f"{work.compute / choice.step:.0%}" if choice.step > 0 else "-"
        times = _milliseconds(choice.step), _milliseconds(choice.exposed)
        table.add_row(_layout_text(layout), *times, efficiency, str(choice.way), choice.chosen_by)
    console.print(table)


def _layout_text(layout: Layout) -> str:
    return f"{layout.nodes} x {layout.ranks_per_node}"


def print_links(links: Links, nominal: float | None) -> None:
    """Print what `measure_links` found.

    Args:
        links: The figures.
        nominal: What the links between nodes are said to carry, in Mbit/s, or None.
    """
    console, about = _console(), links.about
    table = _table(
        f"Links of {about['world_size']} ranks on {about['nodes']} nodes ({about['backend']}, {about['device']})",
        *("", "latency us", "Mbit/s", "of --bandwidth-mbit", "residual of the fit"),
    )
    for name, link in (("within", links.within), ("between", links.between)):
        if link is None or name not in about["residual"]:
            continue
        megabits = link.bandwidth * 8 / 1e6
        share = f"{megabits / nominal:.0%}" if nominal is not None and name == "between" else "-"
        title = "within a node" if name == "within" else "between nodes"
        cells = [f"{1e6 * link.latency:.4g}", f"{megabits:.4g}", share, f"{about['residual'][name]:.1%}"]
        table.add_row(title, *cells)
    console.print(table)
    table = _table("Processor time in ns per number", "wire type", "encode", "decode and sum", "decode")
    for wire_dtype, stages in links.stages.items():
        cells = [f"{1e9 * seconds:.3g}" for seconds in (stages.encode, stages.decode_sum, stages.decode)]
        table.add_row(wire_dtype, *cells)
    console.print(table)
    console.print(f"Adding one float32 to another: {1e9 * links.sum:.3g} ns.")
