"""What a training step will cost on more ranks: `python -m benchmarks.cost_model measure | predict | compare`.

`measure` times the links between ranks, `predict` computes the step of up to thousands of ranks from such figures, and
`compare` puts predictions beside results of `benchmarks.step`. `benchmarks/README.md` has the formulas.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.allreduce import ALGORITHMS, Layout, Work, predict
from benchmarks.links import WIRE_TYPES, Link, Links, measure_links
from benchmarks.ways import live_places
from benchmarks.world import is_rank, joined, start
from lightning_gradavg.rules import RULES

__all__ = ["Comparison", "compare", "main", "way_of"]

_WIDTH = 140
_STOCK = ("DDP", "Lightning DDPStrategy", "communication only", "GradAvg mean")
_SAME = ("", "bucket views", "no termination flag")  # what a name may end in without sending anything else
_BACKWARD = 2 / 3  # of a step: a backward multiplies twice as many matrices as its forward, one per factor of a product
_COMPUTE = "compute only"


class Way(NamedTuple):
    """How gradients are summed: keys of `ALGORITHMS` and of `WIRE_TYPES`."""

    algorithm: str
    wire_type: str = "float32"


def way_of(name: str, layout: Layout) -> Way | None:
    """Return how a variant of `benchmarks.step` sums gradients on CPUs, or None where the model knows no cost of it."""
    in_groups = layout.nodes > 1 and layout.ranks_per_node > 1
    by_tail = {"flat": Way("ring"), "node by node": Way("node by node")}
    for wire_type in set(WIRE_TYPES) - {"float32"}:
        ours = Way("node by node" if in_groups else "scattered", wire_type)
        by_tail[f"{wire_type} hook"] = Way("ring", wire_type)
        by_tail[f"{wire_type} on the wire"] = by_tail[f"{wire_type} between nodes"] = ours
        by_tail[f"{wire_type} on the wire, flat"] = Way("scattered", wire_type)
    head, _, tail = name.partition(", ")
    if tail in by_tail:
        return by_tail[tail]
    if (head in _STOCK and tail in _SAME) or (head == "average_gradients" and tail in RULES):
        return Way("ring")
    if head.startswith("GradAvg ") and tail in _SAME:
        return Way("node by node" if in_groups else "ring")
    return None


class Comparison(NamedTuple):
    """One measured variant.

    Attributes:
        name: Of the variant.
        way: How it sums gradients.
        predicted: Seconds of a step; of the sums alone where there is no computation.
        measured: The median over the rounds.
    """

    name: str
    way: Way
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The predicted time over the measured one, less 1."""
        return self.predicted / self.measured - 1


def compare(results: Mapping[str, Any], links: Links) -> list[Comparison]:
    """Return the comparison of every variant that the model has a cost of.

    What a step takes without communication is the measured "compute only"; nothing is fitted to the results.

    Args:
        results: Of one model, as `benchmarks.step` saves them.
        links: The figures of the links.
    """
    layout = Layout(results["nodes"], results["world_size"] // results["nodes"])
    compute = statistics.median(results["seconds"][_COMPUTE])
    found = []
    for name, seconds in results["seconds"].items():
        way = None if name == _COMPUTE else way_of(name, layout)
        if way is not None:
            overlap = not name.startswith("average_gradients")
            work = Work(results["gradient_bytes"], (1 - _BACKWARD) * compute, _BACKWARD * compute, overlap=overlap)
            step, communication = predict(*way, work, layout, links)
            predicted = communication if name.startswith("communication only") else step
            found.append(Comparison(name, way, predicted, statistics.median(seconds)))
    return found


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    return table


def _compare(given: argparse.Namespace, console: Console) -> None:
    links = Links.load(given.links)
    for path in given.results:
        for results in json.loads(path.read_text(encoding="utf-8"))["models"]:
            found = compare(results, links)
            errors = [abs(one.error) for one in found]
            title = f"{results['title']}, {results['world_size']} ranks on {results['nodes']} nodes: median |error|"
            title += f" {statistics.median(errors):.1%}, largest {max(errors):.1%}"
            table = _table(title, "variant", "way", "predicted ms", "measured ms", "error")
            for one in found:
                times = f"{1e3 * one.predicted:.1f}", f"{1e3 * one.measured:.1f}"
                table.add_row(one.name, ", ".join(one.way), *times, f"{one.error:+.1%}")
            console.print(table)


def _measure(given: argparse.Namespace, console: Console) -> None:
    with joined() as world:
        links = measure_links(live_places(), world.device, repeats=given.repeats)
        if dist.get_rank() == 0:
            links.save(given.output)
            _print_links(links, console)


def _print_links(links: Links, console: Console) -> None:
    about = links.about
    where = f"{about['world_size']} ranks on {about['nodes']} node(s) ({about['backend']}, {about['device']})"
    table = _table(f"Links of {where}", "", "latency us", "Mbit/s", "residual of the fit")
    for name, link in (("within", links.within), ("between", links.between)):
        if link is not None and name in about["residual"]:
            figures = f"{1e6 * link.latency:.4g}", f"{link.bandwidth * 8 / 1e6:.4g}"
            table.add_row(f"{name} nodes", *figures, f"{about['residual'][name]:.1%}")
    console.print(table)
    table = _table("Processor time in ns per number", "wire type", "encode", "decode and sum", "decode")
    for wire_type, stages in links.stages.items():
        table.add_row(wire_type, *(f"{1e9 * seconds:.3g}" for seconds in vars(stages).values()))
    table.add_row("a sum in float32", "", f"{1e9 * links.sum:.3g}", "")
    console.print(table)


def _given_link(figures: Sequence[float] | None, measured: Link | None) -> Link | None:
    """Return the link of two figures, microseconds and Mbit/s, or else what was measured."""
    return measured if figures is None else Link(figures[0] / 1e6, figures[1] * 1e6 / 8)


def _predict(given: argparse.Namespace, console: Console) -> None:
    measured = None if given.links is None else Links.load(given.links)
    between = _given_link(given.between, None if measured is None else measured.between)
    within = _given_link(given.within, None if measured is None else measured.within)
    layouts = [Layout.of(ranks, given.ranks_per_node) for ranks in given.ranks]
    if any(layout.ranks_per_node > 1 for layout in layouts) and within is None:
        raise ValueError("nothing is known of the links within a node: give --within, or --links FILE.")
    link = within or between
    if link is None:
        raise ValueError("nothing is known of the links: give --between and --within, or --links FILE.")
    links = replace(measured or Links(link), within=link, between=between)
    if min(given.gradient_mb, given.bucket_mb) <= 0 or min(given.compute_ms) < 0:
        raise ValueError("--gradient-mb and --bucket-mb are above 0, and --compute-ms not below.")
    forward, backward = (milliseconds / 1e3 for milliseconds in given.compute_ms)
    work = Work(given.gradient_mb * 1e6, forward, backward, given.bucket_mb * 2**20, given.overlap)
    steps = {
        wire_type: {name: [predict(name, wire_type, work, one, links)[0] for one in layouts] for name in ALGORITHMS}
        for wire_type in given.wire_types
    }
    for wire_type, by_algorithm in steps.items():
        table = _table(f"A step in ms, predicted: {wire_type} on the wire", "nodes x ranks", *ALGORITHMS)
        for layout, *seconds in zip(layouts, *by_algorithm.values(), strict=True):
            cells = [f"{1e3 * one:.4g}" for one in seconds]
            table.add_row(f"{layout.nodes} x {layout.ranks_per_node}", *cells)
        console.print(table)
    if given.plot is not None:
        _plot(steps, given.ranks, forward + backward, given.plot)


def _plot(steps: Mapping[str, Mapping[str, Sequence[float]]], ranks: Sequence[int], compute: float, path: Path) -> None:
    """Draw the time of a step over the number of ranks: a picture per wire type, a line per algorithm."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # of the extra `plot`
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter  # noqa: PLC0415  # likewise

    figure = Figure(figsize=(3.4 * len(steps) + 1.2, 3.8), layout="constrained")
    axes = figure.subplots(1, len(steps), sharey=True, squeeze=False)[0]
    for axis, (wire_type, by_algorithm) in zip(axes, steps.items(), strict=True):
        for (name, seconds), style in zip(by_algorithm.items(), ("-", "--", ":", "-."), strict=True):
            axis.plot(ranks, [1e3 * one for one in seconds], linestyle=style, marker=".", label=name)
        axis.axhline(1e3 * compute, color="#808080", linewidth=1, label="computation alone")
        axis.set(xscale="log", yscale="log", title=wire_type, xlabel="ranks")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(ScalarFormatter())
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.grid(visible=True, which="both", color="#e0e0e0", linewidth=0.5)
    axes[0].set_ylabel("step, ms")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_model", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("measure", help="time the links between ranks").add_argument
    add("--ranks", type=int, default=2, help="on this machine, where torchrun did not start them (default: 2)")
    add("--repeats", type=int, default=15, help="of each time, whose median counts (default: 15)")
    add("--output", type=Path, default=Path("links.json"), help="file to write (default: links.json)")
    add = commands.add_parser("predict", help="compute steps from figures of links").add_argument
    link = {"type": float, "nargs": 2, "metavar": ("US", "MBIT")}
    add("--links", type=Path, metavar="FILE", help="figures that `measure` wrote")
    add("--between", **link, help="latency and bandwidth of a node's link to other nodes, in place of the measured")
    add("--within", **link, help="the same between two ranks of a node")
    add("--gradient-mb", type=float, required=True, help="gradients in float32, in MB of 10**6 bytes")
    add(
        "--compute-ms",
        type=float,
        nargs=2,
        metavar=("F", "B"),
        required=True,
        help="all but the backward; the backward",
    )
    add("--ranks", type=int, nargs="+", default=[2**power for power in range(1, 13)], help="(default: 2 4 8 ... 4096)")
    add("--ranks-per-node", type=int, default=1, help="that share a node's link (default: 1)")
    add("--bucket-mb", type=float, default=25.0, help="bucket_cap_mb of DDP, in MiB (default: 25)")
    add("--overlap", action=argparse.BooleanOptionalAction, default=True, help="sum buckets during the backward")
    add("--wire-types", nargs="+", choices=list(WIRE_TYPES), default=list(WIRE_TYPES), help="(default: all)")
    add("--plot", type=Path, metavar="FILE", help="draw the scaling curves")
    add = commands.add_parser("compare", help="put predictions beside measured steps").add_argument
    add("--links", type=Path, metavar="FILE", required=True, help="figures of the same nodes")
    add("results", type=Path, nargs="+", help="of benchmarks.step")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as a rank, start the ranks that do, or compute."""
    passed = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    given = parser.parse_args(passed)
    console = Console(width=_WIDTH, highlight=False, markup=False)
    try:
        if given.command == "predict":
            _predict(given, console)
        elif given.command == "compare":
            _compare(given, console)
        elif given.repeats < 1 or int(os.environ.get("WORLD_SIZE", given.ranks)) < 2:  # noqa: PLR2004  # a link's ends
            parser.error(f"--repeats is 1 or more and --ranks 2 or more; got {given.repeats} and {given.ranks}")
        elif is_rank():
            _measure(given, console)
        else:
            start("benchmarks.cost_model", given.ranks, passed)
    except (OSError, KeyError, ValueError) as error:
        parser.error(f"{type(error).__name__}: {error}" if isinstance(error, (OSError, KeyError)) else str(error))


if __name__ == "__main__":
    main()
