"""`gradavg bench`: what the links of a cluster carry, and what a training step over them is expected to take."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from lightning_gradavg.cli.plan import OneLineParser
from lightning_gradavg.costs.allreduce import Layout
from lightning_gradavg.costs.links import BYTES_PER_NUMBER, Link, Links
from lightning_gradavg.costs.measure import measure_links
from lightning_gradavg.costs.plot import plot_predictions
from lightning_gradavg.costs.predict import Work, predict_all
from lightning_gradavg.costs.tables import print_links, print_predictions
from lightning_gradavg.place import node_from_environment
from lightning_gradavg.reduction.groups import gather_places

__all__ = ["SCHEMA", "add_arguments", "main"]

SCHEMA = 1
"""Version of the predictions' JSON; raised when a field changes its name or its meaning, not when one is added."""

DESCRIPTION = (
    "Measures the links between the ranks and the processor time of the wire types; with --model, predicts the time of"
    " a training step for every way of summing gradients, in one process."
)

_RANKS = tuple(2**power for power in range(1, 13))

_MEASURING: Mapping[str, Any] = {"repeats": 15, "interface": None}
_PREDICTING: Mapping[str, Any] = {
    "links": None,
    "gradient_mb": None,
    "compute_ms": None,
    "ranks_per_node": 1,
    "bucket_mb": 25.0,
    "overlap": True,
    "wire_dtypes": tuple(BYTES_PER_NUMBER),
    "alpha_within_us": None,
    "bandwidth_within_mbit": None,
    "sum_ns": None,
    "plot": None,
}
"""The options of one mode alone, and what they are unless given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gradavg bench` to `parser`."""
    add = parser.add_argument
    add("--model", action="store_true", help="predict, from figures that were measured or are given")
    add(
        "--ranks",
        type=int,
        nargs="+",
        metavar="N",
        help="ranks to start on this machine, where torchrun did not (default: 2); with --model, numbers of ranks to"
        f" predict for (default: {_RANKS[0]} {_RANKS[1]} ... {_RANKS[-1]})",
    )
    add(
        "--bandwidth-mbit",
        "--bandwidth",
        type=float,
        metavar="X",
        help="of a node's link to other nodes, in Mbit/s; where it is measured, what the measured one is compared with",
    )
    add("--alpha-us", type=float, metavar="X", help="latency of that link, in microseconds; not where it is measured")
    add("--output", type=Path, metavar="FILE", help="write the figures, or the predictions, as JSON")
    add("--json", action="store_true", help="print them as JSON; docs/cost_model.md has the schemas")
    measuring = parser.add_argument_group("measuring").add_argument
    measuring("--repeats", type=int, metavar="N", help="of each time, whose median counts (default: 15)")
    measuring("--interface", metavar="NAME", help="network interface of gloo and NCCL (default: theirs)")
    predicting = parser.add_argument_group("predicting").add_argument
    predicting("--links", type=Path, metavar="FILE", help="figures that `gradavg bench --output FILE` wrote")
    predicting("--gradient-mb", type=float, metavar="X", help="gradients in float32, in MB of 10**6 bytes; required")
    predicting(
        "--compute-ms", type=float, nargs=2, metavar=("F", "B"), help="of a step: the backward, and the rest; required"
    )
    predicting("--ranks-per-node", type=int, metavar="N", help="ranks that share a node's link (default: 1)")
    predicting("--bucket-mb", type=float, metavar="X", help="bucket_cap_mb of DDP, in MiB (default: 25)")
    predicting(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        help="sum buckets while the backward goes on (default: yes)",
    )
    predicting(
        "--wire-dtypes", nargs="+", choices=tuple(BYTES_PER_NUMBER), metavar="TYPE", help="of the tables (default: all)"
    )
    predicting("--alpha-within-us", type=float, metavar="X", help="latency between two ranks of a node")
    predicting("--bandwidth-within-mbit", type=float, metavar="X", help="bandwidth between two ranks of a node")
    predicting("--sum-ns", type=float, metavar="X", help="processor time of adding a number, in ns (default: 0)")
    predicting("--plot", type=Path, metavar="FILE", help="draw the scaling curves; needs matplotlib")


def _complete(args: argparse.Namespace) -> None:
    """Fill in defaults.

    Raises:
        ValueError: If an option belongs to the other mode.
    """
    own, foreign = (_PREDICTING, _MEASURING) if args.model else (_MEASURING, _PREDICTING)
    for name in foreign:
        if getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{option} is for measuring, not for --model. Leave one of them out."
                if args.model
                else f"{option} is for predictions. Add --model, or leave it out to measure."
            )
    for name, default in own.items():
        if getattr(args, name) is None:
            setattr(args, name, default)


def _given_link(alpha_us: float | None, bandwidth_mbit: float | None, measured: Link | None, where: str) -> Link | None:
    """Return the link that options describe, completed by what was measured."""
    if alpha_us is None and bandwidth_mbit is None:
        return measured
    for option, value in (("alpha{}-us", alpha_us), ("bandwidth{}-mbit", bandwidth_mbit)):
        if value is None and measured is None:
            raise ValueError(f"a link has a latency and a bandwidth: give --{option.format(where)} as well.")
    if alpha_us is not None and not 0 <= alpha_us < math.inf:
        raise ValueError(f"--alpha{where}-us must be finite and >= 0, got {alpha_us!r}.")
    if bandwidth_mbit is not None and not 0 < bandwidth_mbit < math.inf:
        raise ValueError(f"--bandwidth{where}-mbit must be finite and > 0, got {bandwidth_mbit!r}.")
    link = measured or Link(0.0, 1.0)
    if alpha_us is not None:
        link = replace(link, latency=alpha_us / 1e6)
    return link if bandwidth_mbit is None else replace(link, bandwidth=bandwidth_mbit * 1e6 / 8)


def _links(args: argparse.Namespace, layouts: Sequence[Layout]) -> Links:
    """Return the figures that predictions are made from."""
    measured = None if args.links is None else Links.load(args.links)
    between, within = (None, None) if measured is None else (measured.between, measured.within)
    between = _given_link(args.alpha_us, args.bandwidth_mbit, between, "")
    within = _given_link(args.alpha_within_us, args.bandwidth_within_mbit, within, "-within")
    if any(layout.nodes > 1 for layout in layouts) and between is None:
        raise ValueError(
            "nothing is known of the links between nodes: give --alpha-us and --bandwidth-mbit, or --links FILE that"
            " was measured on two nodes or more."
        )
    if any(layout.ranks_per_node > 1 for layout in layouts) and within is None:
        raise ValueError(
            "nothing is known of the links within a node: give --alpha-within-us and --bandwidth-within-mbit, or"
            " --links FILE."
        )
    link = within or between
    if link is None:
        raise ValueError("there is nothing to predict: --ranks are all 1.")
    links = Links(link, between) if measured is None else replace(measured, within=link, between=between)
    return links if args.sum_ns is None else replace(links, sum=args.sum_ns / 1e9)


def _predict(args: argparse.Namespace) -> None:
    for name in ("gradient_mb", "compute_ms"):
        if getattr(args, name) is None:
            raise ValueError(f"--model needs --{name.replace('_', '-')}, which describes a step of your model.")
    layouts = [Layout.of(ranks, args.ranks_per_node) for ranks in args.ranks or _RANKS]
    forward, backward = (milliseconds / 1e3 for milliseconds in args.compute_ms)
    work = Work(args.gradient_mb * 1e6, forward, backward, args.bucket_mb * 2**20, args.overlap)
    links = _links(args, layouts)
    predictions = predict_all(work, layouts, links, args.wire_dtypes)
    result = {
        "schema": SCHEMA,
        "work": asdict(work),
        "links": links.as_dict(),
        "predictions": [asdict(prediction) for prediction in predictions],
    }
    if args.plot is not None:
        plot_predictions(predictions, work, args.plot)
    if args.output is not None:
        _write(args.output, result)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print_predictions(predictions, work, "the options" if args.links is None else str(args.links))


def _write(path: Path, result: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--output={str(path)!r} cannot be written: {error}") from error


def _measure(args: argparse.Namespace) -> None:
    """Measure as a rank of the process group that torchrun prepared."""
    if args.interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = args.interface
    local_rank, ranks_on_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.device_count() >= ranks_on_node:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    try:
        node = node_from_environment()
        assert node is not None  # torchrun names it
        links = measure_links(gather_places(node, None), device, repeats=args.repeats)
        if dist.get_rank() == 0:
            _report(links, args)
        dist.barrier()
    finally:
        # A process group that lives on in a cycle would end with the interpreter, and gloo's threads abort it then.
        gc.collect()
        dist.destroy_process_group()


def _report(links: Links, args: argparse.Namespace) -> None:
    nominal = args.bandwidth_mbit
    if links.between is None:
        between = _given_link(args.alpha_us, nominal, None, "")
        links = replace(links, between=between)
    if args.output is not None:
        _write(args.output, links.as_dict())
    if args.json:
        print(json.dumps(links.as_dict(), indent=2))
    else:
        print_links(links, nominal)


def _ranks_to_measure(args: argparse.Namespace) -> int:
    """Return the number of ranks, having found what is wrong before any is started: all of them would say it."""
    launched = "LOCAL_RANK" in os.environ
    if launched and args.ranks is not None:
        raise ValueError(f"--ranks {' '.join(map(str, args.ranks))}: torchrun has started the ranks. Leave it out.")
    if args.ranks is not None and len(args.ranks) > 1:
        raise ValueError(
            f"--ranks {' '.join(map(str, args.ranks))}: links are measured for one number. Give one, or add --model."
        )
    ranks = int(os.environ["WORLD_SIZE"]) if launched else (args.ranks or [2])[0]
    nodes = ranks // int(os.environ["LOCAL_WORLD_SIZE"]) if launched else 1
    if ranks < 2:  # noqa: PLR2004  # a link has two ends
        raise ValueError(f"a link has two ends: --ranks must be 2 or more, got {ranks}.")
    if args.repeats < 1:
        raise ValueError(f"--repeats must be 1 or more, got {args.repeats}.")
    interfaces = [name for _, name in socket.if_nameindex()]
    if args.interface is not None and args.interface not in interfaces:
        raise ValueError(f"--interface={args.interface!r} is not a network interface of this machine; it has {interfaces}.")
    if nodes == 1:
        _given_link(args.alpha_us, args.bandwidth_mbit, None, "")
    elif args.alpha_us is not None:
        raise ValueError(f"--alpha-us {args.alpha_us}: it is measured between these {nodes} nodes. Leave it out.")
    return ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Run `gradavg bench` with `argv`, or the arguments of the process, and return its exit code.

    Without `--model` it measures: as a rank where torchrun started the process, and otherwise on ranks that it starts.
    """
    parser = OneLineParser(prog="gradavg bench", description=DESCRIPTION)
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        _complete(args)
        if args.model:
            _predict(args)
            return 0
        ranks = _ranks_to_measure(args)
        if "LOCAL_RANK" in os.environ:
            _measure(args)
            return 0
    except (ValueError, RuntimeError) as error:
        print(f"gradavg bench: error: {error}", file=sys.stderr)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    module = ["--module", "lightning_gradavg.cli.bench"]
    try:
        torchrun(["--standalone", f"--nproc-per-node={ranks}", *module, *_for_a_rank(args)])
    except ChildFailedError:  # the rank itself has said why
        return 2
    return 0


def _for_a_rank(args: argparse.Namespace) -> list[str]:
    given = {name: getattr(args, name) for name in ("repeats", "bandwidth_mbit", "alpha_us", "output", "interface")}
    passed = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    return [*passed, "--json"] if args.json else passed


if __name__ == "__main__":
    sys.exit(main())
