"""`gradavg plan`: from a recipe that works to a cluster, without a training run."""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_gradavg.planning.plans import Plan, make_plan
from lightning_gradavg.planning.recipe import OPTIMIZERS, Cluster, Recipe
from lightning_gradavg.planning.runs import Outcome, Run
from lightning_gradavg.rates.scaling import SCALINGS

__all__ = ["OneLineParser", "add_arguments", "main", "run"]

SCHEMA = 1
"""Version of the JSON output; raised when a field changes its name or its meaning, not when one is added."""

DESCRIPTION = (
    "From a base recipe and a cluster: batch per device, accumulation, learning rate and schedule, and what stock DDP"
    " would make of the same script."
)

_PIPE_WIDTH = 120  # rich assumes 80 columns where there is no terminal: too few for the tables


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line without the usage, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Print `message` on one line and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def _noise_scale(text: str) -> float:
    """Return the number, or the last noise scale in the file of a CSVLogger."""
    try:
        return float(text)
    except ValueError:
        path = Path(text)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"must be a number or a CSVLogger's metrics.csv, got {text!r}: {error}") from None
    columns = [name for name in (rows[0] if rows else ()) if name is not None and name.endswith("/noise_scale")]
    measured = [row[columns[0]] for row in rows if row[columns[0]]] if columns else []
    if not measured:
        raise argparse.ArgumentTypeError(
            f"{text!r} has no value in a column gradavg/noise_scale: train with GradAvgMonitor(noise_scale=True)"
        )
    return _number(measured[-1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gradavg plan` to `parser`."""
    base = parser.add_argument_group("the base recipe, whose learning rate is known to work")
    base.add_argument("--batch-size", type=_integer, required=True, metavar="N", help="batch_size of its DataLoader")
    base.add_argument("--lr", type=_number, required=True, metavar="X", help="its learning rate")
    base.add_argument(
        "--base-devices",
        type=_integer,
        default=1,
        metavar="N",
        help="DDP ranks it ran on, each with its own loader batch; 1 for DataParallel on any number of GPUs (default: 1)",
    )
    base.add_argument(
        "--accumulate-grad-batches", type=_integer, default=1, metavar="N", help="its accumulation (default: 1)"
    )
    base.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="sgd", help="its optimizer (default: sgd)")
    base.add_argument("--betas", type=_number, nargs=2, metavar=("B1", "B2"), help="of adam, adamw (default: 0.9 0.999)")
    base.add_argument("--alpha", type=_number, metavar="X", help="of rmsprop (default: 0.99)")
    base.add_argument("--eps", type=_number, metavar="X", help="of adam, adamw, rmsprop (default: 1e-8)")
    base.add_argument("--weight-decay", type=_number, metavar="X", help="its weight decay; read for adamw")
    base.add_argument("--steps", type=_integer, metavar="N", help="its length in optimizer steps")
    base.add_argument("--epochs", type=_integer, metavar="N", help="its length in epochs; needs --dataset-size")
    base.add_argument("--dataset-size", type=_integer, metavar="N", help="samples of its data set")
    base.add_argument("--warmup-steps", type=_integer, metavar="N", help="warm-up of its schedule, in optimizer steps")
    to = parser.add_argument_group("where to train now")
    to.add_argument("--nodes", type=_integer, default=1, metavar="N", help="number of nodes (default: 1)")
    to.add_argument("--devices-per-node", type=_integer, required=True, metavar="N", help="devices on each node")
    to.add_argument(
        "--global-batch-size",
        type=_integer,
        metavar="N",
        help="samples per optimizer step (default: as the base recipe)",
    )
    to.add_argument(
        "--noise-scale",
        type=_noise_scale,
        metavar="X",
        help="gradient noise scale in samples, or the metrics.csv that GradAvgMonitor(noise_scale=True) logged it to",
    )
    to.add_argument("--max-device-batch-size", type=_integer, metavar="N", help="most samples a device holds at once")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON; docs/scaling.md has the schema")


def _plan(args: argparse.Namespace) -> Plan:
    recipe = Recipe(
        batch_size=args.batch_size,
        lr=args.lr,
        devices=args.base_devices,
        accumulate_grad_batches=args.accumulate_grad_batches,
        optimizer=args.optimizer,
        betas=None if args.betas is None else (args.betas[0], args.betas[1]),
        alpha=args.alpha,
        eps=args.eps,
        weight_decay=args.weight_decay,
        steps=args.steps,
        epochs=args.epochs,
        dataset_size=args.dataset_size,
        warmup_steps=args.warmup_steps,
    )
    return make_plan(
        recipe,
        Cluster(args.nodes, args.devices_per_node),
        global_batch_size=args.global_batch_size,
        max_device_batch_size=args.max_device_batch_size,
        noise_scale=args.noise_scale,
    )


def run(args: argparse.Namespace, console: Console | None = None) -> int:
    """Print the plan that `args` asks for.

    Args:
        args: What a parser with `add_arguments` returned.
        console: Where to print the tables; the default is standard output.

    Returns:
        The exit code: 0, or 2 after a line on standard error where a value is out of range or contradicts another.
    """
    try:
        plan = _plan(args)
    except ValueError as error:
        print(f"gradavg plan: error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"schema": SCHEMA, **asdict(plan)}, indent=2))
    else:
        _print_tables(plan, console or _console())
    return 0


def _console() -> Console:
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=_PIPE_WIDTH if piped else None, highlight=False)


def _number_text(value: Any) -> str:
    return " ".join(map(_number_text, value)) if isinstance(value, tuple) else f"{value:.6g}"


def _chunks_text(run: Run) -> str:
    if len(run.chunks) == 1:
        return str(run.chunks[0].samples)
    return ", ".join(f"{chunk.samples} on {chunk.devices}" for chunk in run.chunks) + " devices"


def _micro_batches_text(run: Run) -> str:
    return "1" if run.accumulate == 1 else f"{run.accumulate} of up to {run.chunks[0].micro_batch_size}"


_QUANTITIES: tuple[tuple[str, Callable[[Run], object]], ...] = (
    ("ranks", lambda run: run.world_size),
    ("DataLoader batch_size", lambda run: run.loader_batch_size),
    ("batch per device", _chunks_text),
    ("micro-batches per device", _micro_batches_text),
    ("global batch", lambda run: run.global_batch_size),
    ("scale k", lambda run: f"{run.scale:.6g}"),
    ("steps per epoch", lambda run: run.steps_per_epoch),
    ("steps", lambda run: run.steps),
    ("warm-up steps", lambda run: run.warmup_steps),
    ("gradient of mean losses", lambda run: run.mean_loss_gradient),
    ("gradient of sum losses", lambda run: run.sum_loss_gradient),
)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _batches_table(plan: Plan) -> Table:
    table = _table("One optimizer step", "", "base recipe", "GradAvg", "stock DDP, same script")
    for name, quantity in _QUANTITIES:
        cells = [quantity(column) for column in (plan.base, plan.gradavg, plan.stock_ddp)]
        if cells[0] is not None:
            table.add_row(name, *map(str, cells))
    return table


def _outcome_text(outcome: Outcome) -> str:
    if outcome.hyperparameters is None:
        largest = outcome.largest_global_batch_size
        return "not for this optimizer" if largest is None else f"not feasible; largest global batch: {largest}"
    parts = [f"{name} {_number_text(value)}" for name, value in outcome.hyperparameters.items()]
    if outcome.lr_warmup_steps is not None:
        parts.append(f"lr_warmup_steps {outcome.lr_warmup_steps}")
    return ", ".join(parts)


def _scalings_table(plan: Plan) -> Table:
    table = _table(
        "Hyperparameters for mean losses, by lr_scaling",
        "lr_scaling",
        "formula",
        f"GradAvg, k = {plan.gradavg.scale:.6g}",
        f"stock DDP, k = {plan.stock_ddp.scale:.6g}",
    )
    for ours, stock in zip(plan.gradavg.scalings, plan.stock_ddp.scalings, strict=True):
        table.add_row(ours.lr_scaling, SCALINGS[ours.lr_scaling].formula, _outcome_text(ours), _outcome_text(stock))
    return table


def _advice_table(plan: Plan) -> Table:
    table = _table(
        "Advice found in threads for the learning rate of mean losses",
        "advice",
        "lr",
        f"GradAvg, global batch {plan.gradavg.global_batch_size}",
        f"stock DDP, global batch {plan.stock_ddp.global_batch_size}",
    )
    for advice in plan.advice:
        table.add_row(advice.text, _number_text(advice.lr), advice.gradavg, advice.stock_ddp)
    return table


def _print_tables(plan: Plan, console: Console) -> None:
    recipe, cluster = plan.recipe, plan.cluster
    devices = "1 device" if recipe.devices == 1 else f"{recipe.devices} devices"
    console.print(
        f"Base recipe: global batch {recipe.global_batch_size} on {devices}, {recipe.optimizer}, lr {recipe.lr:.6g}."
        f" Now: {cluster.nodes} node(s) x {cluster.devices_per_node} device(s) = {cluster.world_size} rank(s)."
    )
    console.print(_batches_table(plan))
    console.print(_scalings_table(plan))
    if plan.advice:
        console.print(_advice_table(plan))
    for note in plan.notes:
        console.print(f"- {note}", markup=False)
    console.print("As code:" if plan.gradavg.scale == 1 else "As code, with one of the values of lr_scaling:")
    for line in plan.code:
        console.print(f"  {line}", markup=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `gradavg plan` with `argv`, or the arguments of the process, and return its exit code."""
    parser = OneLineParser(prog="gradavg plan", description=DESCRIPTION)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
