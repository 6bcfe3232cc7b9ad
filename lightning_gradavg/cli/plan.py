"""`gradavg plan`: from a recipe that works to a cluster, without a training run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_gradavg.cli import OneLineParser
from lightning_gradavg.plan import OPTIMIZERS, Cluster, Recipe, counted, make_plan
from lightning_gradavg.rates.scaling import SCALINGS

__all__ = ["main"]

SCHEMA = 1
"""Version of the JSON output; raised when a field changes its name or its meaning, not when one is added."""

DESCRIPTION = (
    "From a base recipe and a cluster: batch per device, accumulation, learning rate and schedule, and what stock DDP"
    " would make of the same script."
)

_PIPE_WIDTH = 120  # rich assumes 80 columns where there is no terminal: too few for the tables


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="gradavg plan", description=DESCRIPTION)
    base = parser.add_argument_group("the base recipe, whose learning rate is known to work").add_argument
    count: dict[str, Any] = {"type": int, "metavar": "N"}
    number: dict[str, Any] = {"type": float, "metavar": "X"}
    base("--batch-size", required=True, **count, help="batch_size of its DataLoader")
    base("--lr", required=True, **number, help="its learning rate")
    base(
        "--base-devices",
        dest="devices",
        default=1,
        **count,
        help="DDP ranks it ran on, each with its own loader batch; DataParallel on any GPUs counts as 1 (default: 1)",
    )
    base("--accumulate-grad-batches", default=1, **count, help="its accumulation (default: 1)")
    base("--optimizer", choices=tuple(OPTIMIZERS), default="sgd", help="its optimizer (default: sgd)")
    base("--betas", type=float, nargs=2, metavar=("B1", "B2"), help="of adam, adamw (default: 0.9 0.999)")
    base("--alpha", **number, help="of rmsprop (default: 0.99)")
    base("--eps", **number, help="of adam, adamw, rmsprop (default: 1e-8)")
    base("--weight-decay", **number, help="its weight decay; read for adamw")
    base("--steps", **count, help="its length in optimizer steps")
    base("--epochs", **count, help="its length in epochs; needs --dataset-size")
    base("--dataset-size", **count, help="samples of its data set")
    base("--warmup-steps", **count, help="warm-up of its schedule, in optimizer steps")
    to = parser.add_argument_group("where to train now").add_argument
    to("--nodes", default=1, **count, help="number of nodes (default: 1)")
    to("--devices-per-node", required=True, **count, help="devices on each node")
    to("--global-batch-size", **count, help="samples per optimizer step (default: as the base recipe)")
    to("--noise-scale", **number, help="gradient noise scale in samples, as examples/noise_scale.py measures it")
    to("--max-device-batch-size", **count, help="most samples a device holds at once")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON; docs/api.md has the keys")
    return parser


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items() if each is not None)
    if isinstance(value, list):
        return ", ".join(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _outcome(outcome: dict[str, Any]) -> dict[str, Any] | str:
    if outcome["feasible"]:
        return {**outcome["hyperparameters"], "lr_warmup_steps": outcome["lr_warmup_steps"]}
    largest = outcome["largest_global_batch_size"]
    return f"not feasible; largest global batch: {largest}" if largest else "not for this optimizer"


def _share(samples: int, devices: int, **_: int) -> str:
    return f"{samples} on {counted(devices, 'device')}"


def _tables(plan: dict[str, Any]) -> Iterator[Table]:
    """Yield a table for each list of rows, whose columns are named as in the JSON."""
    runs = {
        name: {**plan[name], "chunks": [_share(**chunk) for chunk in plan[name]["chunks"]]}
        for name in ("base", "gradavg", "stock_ddp")
    }
    scalings = {name: run["scalings"] for name, run in runs.items() if name != "base"}
    rows: dict[str, list[dict[str, Any]]] = {
        "One optimizer step": [
            {"": key.replace("_", " "), **{name: run[key] for name, run in runs.items()}}
            for key, known in plan["base"].items()
            if key != "scalings" and known is not None
        ],
        "Hyperparameters for mean losses, by lr_scaling": [
            {
                "lr_scaling": scaling.name,
                "formula": scaling.formula,
                **{f"{name}, k = {runs[name]['scale']:.6g}": _outcome(all_[index]) for name, all_ in scalings.items()},
            }
            for index, scaling in enumerate(SCALINGS.values())
        ],
        "Common advice on the learning rate for another number of ranks, for mean losses": plan["advice"],
    }
    for title, entries in rows.items():
        if entries:
            table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
            for heading in entries[0]:
                table.add_column(heading, overflow="fold")
            for entry in entries:
                table.add_row(*map(_text, entry.values()))
            yield table


def _print(plan: dict[str, Any]) -> None:
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(width=_PIPE_WIDTH if piped else None, highlight=False, markup=False)
    recipe, (nodes, devices) = plan["recipe"], plan["cluster"].values()
    console.print(
        f"Base recipe: global batch {plan['base']['global_batch_size']} on {counted(recipe['devices'], 'device')},"
        f" {recipe['optimizer']}, lr {recipe['lr']:.6g}. Now: {counted(nodes, 'node')} x {counted(devices, 'device')}"
        f" = {counted(nodes * devices, 'rank')}."
    )
    for table in _tables(plan):
        console.print(table)
    for note in plan["notes"]:
        console.print(f"- {note}")
    console.print("As code:" if plan["gradavg"]["scale"] == 1 else "As code, with one of the values of lr_scaling:")
    for line in plan["code"]:
        console.print(f"  {line}", soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `gradavg plan` with `argv`, or the arguments of the process, and return its exit code.

    It is 0, or 2 after a line on standard error where a value is out of range or contradicts another.
    """
    options = vars(_parser().parse_args(argv))
    recipe = {field.name: options[field.name] for field in fields(Recipe)}
    try:
        plan = make_plan(
            Recipe(**{**recipe, "betas": options["betas"] and tuple(options["betas"])}),
            Cluster(options["nodes"], options["devices_per_node"]),
            global_batch_size=options["global_batch_size"],
            max_device_batch_size=options["max_device_batch_size"],
            noise_scale=options["noise_scale"],
        )
    except ValueError as error:
        print(f"gradavg plan: error: {error}", file=sys.stderr)
        return 2
    if options["json"]:
        print(json.dumps({"schema": SCHEMA, **plan}, indent=2))
    else:
        _print(plan)
    return 0


if __name__ == "__main__":
    sys.exit(main())
