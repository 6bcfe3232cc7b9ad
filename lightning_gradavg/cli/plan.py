"""`gradavg plan`: from a recipe that works to a cluster, without a training run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_gradavg.cli import OneLineParser
from lightning_gradavg.plan import OPTIMIZERS, Cluster, Outcome, Plan, Recipe, Run, counted, make_plan
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
    parser.add_argument("--json", action="store_true", help="print the plan as JSON; docs/api.md has the fields")
    return parser


def _number_text(value: Any) -> str:
    return " ".join(map(_number_text, value)) if isinstance(value, tuple) else f"{value:.6g}"


def _chunks_text(run: Run) -> str:
    shares = [f"{chunk.samples} on {counted(chunk.devices, 'device')}" for chunk in run.chunks]
    return ", ".join(shares) if len(shares) > 1 else str(run.chunks[0].samples)


def _micro_batches_text(run: Run) -> str:
    most = counted(run.chunks[0].micro_batch_size, "sample")
    return f"{run.accumulate}, each of at most {most}" if run.accumulate > 1 else "1"


_QUANTITIES: dict[str, Callable[[Run], object]] = {
    "ranks": lambda run: run.world_size,
    "DataLoader batch_size": lambda run: run.loader_batch_size,
    "batch per device": _chunks_text,
    "micro-batches per device": _micro_batches_text,
    "global batch": lambda run: run.global_batch_size,
    "scale k": lambda run: _number_text(run.scale),
    "steps per epoch": lambda run: run.steps_per_epoch,
    "steps": lambda run: run.steps,
    "warm-up steps": lambda run: run.warmup_steps,
    "gradient of mean losses": lambda run: run.mean_loss_gradient,
    "gradient of sum losses": lambda run: run.sum_loss_gradient,
}


def _outcome_text(outcome: Outcome) -> str:
    largest = outcome.largest_global_batch_size
    if outcome.hyperparameters is None:
        return "not for this optimizer" if largest is None else f"not feasible; largest global batch: {largest}"
    values = outcome.hyperparameters | {"lr_warmup_steps": outcome.lr_warmup_steps}
    return ", ".join(f"{name} {_number_text(value)}" for name, value in values.items() if value is not None)


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    return table


def _print_tables(plan: Plan) -> None:
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(width=_PIPE_WIDTH if piped else None, highlight=False)
    recipe, cluster, ours, stock = plan.recipe, plan.cluster, plan.gradavg, plan.stock_ddp
    console.print(
        f"Base recipe: global batch {recipe.global_batch_size} on {counted(recipe.devices, 'device')},"
        f" {recipe.optimizer}, lr {recipe.lr:.6g}. Now: {counted(cluster.nodes, 'node')} x"
        f" {counted(cluster.devices_per_node, 'device')} = {counted(cluster.world_size, 'rank')}."
    )
    quantities = [(name, *map(quantity, (plan.base, ours, stock))) for name, quantity in _QUANTITIES.items()]
    known = [row for row in quantities if row[1] is not None]
    console.print(_table("One optimizer step", ("", "base recipe", "GradAvg", "stock DDP, same script"), known))
    console.print(
        _table(
            "Hyperparameters for mean losses, by lr_scaling",
            ("lr_scaling", "formula", f"GradAvg, k = {ours.scale:.6g}", f"stock DDP, k = {stock.scale:.6g}"),
            [
                (one.lr_scaling, SCALINGS[one.lr_scaling].formula, _outcome_text(one), _outcome_text(other))
                for one, other in zip(ours.scalings, stock.scalings, strict=True)
            ],
        )
    )
    batches = (ours.global_batch_size, stock.global_batch_size)
    if plan.advice:
        console.print(
            _table(
                "Common advice on the learning rate for another number of ranks, and what it does to mean losses",
                ("advice", "lr", f"GradAvg, global batch {batches[0]}", f"stock DDP, global batch {batches[1]}"),
                [(one.text, _number_text(one.lr), one.gradavg, one.stock_ddp) for one in plan.advice],
            )
        )
    for note in plan.notes:
        console.print(f"- {note}", markup=False)
    console.print("As code:" if ours.scale == 1 else "As code, with one of the values of lr_scaling:")
    for line in plan.code:
        console.print(f"  {line}", markup=False, soft_wrap=True)


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
        print(json.dumps({"schema": SCHEMA, **asdict(plan)}, indent=2))
    else:
        _print_tables(plan)
    return 0


if __name__ == "__main__":
    sys.exit(main())
