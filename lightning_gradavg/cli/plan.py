"""`gradavg plan`: from a recipe that works to a cluster, without a training run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_gradavg.cli import OneLineParser
from lightning_gradavg.plan import OPTIMIZERS, Recipe, counted, make_plan
from lightning_gradavg.rates.scaling import SCALINGS

__all__ = ["main"]

DESCRIPTION = "Batch per device, accumulation, learning rate and schedule for a cluster, and what stock DDP would do."

SCHEMA = 2
"""Version of the JSON output; raised when a field goes or changes its name or its meaning, not when one is added."""

_PIPE_WIDTH = 120  # rich assumes 80 columns where there is no terminal: too few for the table
_RUNS = ("base", "gradavg", "stock_ddp")  # keys of the plan, and columns of the table
_OWN_ROWS = ("chunks", "scalings")  # of a run, which have rows of their own form


def _parser() -> argparse.ArgumentParser:
    # Options that were not given are the defaults of `Recipe` and `make_plan`.
    parser = OneLineParser(prog="gradavg plan", description=DESCRIPTION, argument_default=argparse.SUPPRESS)
    base = parser.add_argument_group("the base recipe, whose learning rate is known to work")
    count: dict[str, Any] = {"type": int, "metavar": "N"}
    base.add_argument("--batch-size", required=True, **count, help="batch_size of its DataLoader")
    base.add_argument("--lr", required=True, type=float, metavar="X", help="its learning rate")
    base.add_argument(
        "--base-devices",
        dest="devices",
        **count,
        help="DDP ranks it ran on, each with its own loader batch; DataParallel on any GPUs counts as 1 (default: 1)",
    )
    base.add_argument("--accumulate-grad-batches", **count, help="its accumulation (default: 1)")
    base.add_argument("--optimizer", choices=OPTIMIZERS, help="its optimizer (default: sgd)")
    base.add_argument("--betas", type=float, nargs=2, metavar=("B1", "B2"), help="of adam, adamw (default: 0.9 0.999)")
    base.add_argument("--eps", type=float, metavar="X", help="of adam, adamw (default: 1e-8)")
    base.add_argument("--steps", **count, help="its length in optimizer steps; epochs stay as they are")
    base.add_argument("--dataset-size", **count, help="samples of its data set")
    base.add_argument("--warmup-steps", **count, help="warm-up of its schedule, in optimizer steps")
    cluster = parser.add_argument_group("where to train now")
    cluster.add_argument("--nodes", **count, help="number of nodes (default: 1)")
    cluster.add_argument("--devices-per-node", required=True, **count, help="devices on each node")
    cluster.add_argument(
        "--global-batch-size", **count, help="samples per optimizer step (default: as the base recipe)"
    )
    cluster.add_argument("--max-device-batch-size", **count, help="most samples a device holds at once")
    parser.add_argument(
        "--json", action="store_true", default=False, help="print the plan as JSON; docs/api.md has the keys"
    )
    return parser


def _text(value: Any) -> str:
    """Return a value of the plan as a cell of the table."""
    if isinstance(value, dict):
        parts = []
        for name, item in value.items():
            if item is not None:
                parts.append(f"{name} {_text(item)}")
        return ", ".join(parts)
    if isinstance(value, list):
        return ", ".join(_text(item) for item in value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def _outcome(outcome: dict[str, Any]) -> str:
    """Return what a scaling makes of a run, or why it makes nothing of it."""
    if outcome["problem"] is None:
        return _text({**outcome["hyperparameters"], "lr_warmup_steps": outcome["lr_warmup_steps"]})
    largest = outcome["largest_global_batch_size"]
    if largest:
        return f"not feasible; largest global batch: {largest}"
    return "not for this optimizer"


def _chunks(run: dict[str, Any]) -> str:
    """Return how many samples the devices of a run have."""
    return ", ".join(f"{chunk['samples']} on {counted(chunk['devices'], 'device')}" for chunk in run["chunks"])


def _table(plan: dict[str, Any]) -> Table:
    """Return the three runs side by side, named as in the JSON, with what each scaling makes of them."""
    table = Table(title="One optimizer step", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for heading in ("", *_RUNS):
        table.add_column(heading, overflow="fold")
    runs = [plan[name] for name in _RUNS]
    for key, value in plan["base"].items():
        if key not in _OWN_ROWS and value is not None:
            table.add_row(key.replace("_", " "), *(_text(run[key]) for run in runs))
    table.add_row("chunks", *(_chunks(run) for run in runs), end_section=True)
    for index, scaling in enumerate(SCALINGS.values()):
        table.add_row(f"{scaling.name}: {scaling.formula}", *(_outcome(run["scalings"][index]) for run in runs))
    return table


def _print(plan: dict[str, Any]) -> None:
    width = None  # that of the terminal
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        width = _PIPE_WIDTH
    console = Console(width=width, highlight=False, markup=False)
    with console.capture() as printed:
        console.print(
            _table(plan), "The last rows are the hyperparameters of a mean loss, by lr_scaling; k is the scale."
        )
        for note in plan["notes"]:
            console.print(f"- {note}")
        if plan["gradavg"]["scale"] == 1:
            console.print("As code:")
        else:
            console.print("As code, with one of the values of lr_scaling:")
        for line in plan["code"]:
            console.print(f"  {line}", soft_wrap=True)
    for line in printed.get().splitlines():
        print(line.rstrip())  # a table of rich fills its lines with blanks


def main(argv: Sequence[str] | None = None) -> int:
    """Run `gradavg plan` with `argv`, or the arguments of the process, and return its exit code.

    It is 0, or 2 after a line on standard error where a value is out of range or contradicts another.
    """
    options = vars(_parser().parse_args(argv))
    prints_json = options.pop("json")
    recipe_options = {}
    for field in fields(Recipe):
        if field.name in options:
            recipe_options[field.name] = options.pop(field.name)
    try:
        plan = make_plan(Recipe(**recipe_options), **options)
    except (ValueError, OverflowError) as error:  # a number may be larger than a float can be
        print(f"gradavg plan: error: {error}", file=sys.stderr)
        return 2
    if prints_json:
        print(json.dumps({"schema": SCHEMA, **plan}, indent=2))
    else:
        _print(plan)
    return 0
