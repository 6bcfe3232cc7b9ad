"""`gradavg verify`: a few steps of the user's own run against one process, from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_gradavg.cli import OneLineParser
from lightning_gradavg.cli.lightning import read_config, read_names
from lightning_gradavg.verify.causes import CAUSES, explanation
from lightning_gradavg.verify.report import EXIT_CODES, Report
from lightning_gradavg.verify.run import Settings, verify_target
from lightning_gradavg.verify.target import Target, UserRun, resolve_strategy

__all__ = ["main", "names_a_gradavg_strategy"]

DESCRIPTION = (
    "Trains a few optimizer steps on several processes, then on one with the same samples, both in float64, and"
    " compares the two until they differ. Exit code 0: equal; 1: different; 2: wrong usage, or the run failed; 3:"
    " inconclusive; some values could not be compared."
)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="gradavg verify", description=DESCRIPTION)
    repeatable: dict[str, Any] = {"action": "append", "default": []}
    target = parser.add_argument_group("what to verify: a config file of LightningCLI, or a module")
    target.add_argument(
        "module", nargs="?", metavar="NAME", help="the model, a class or function: package.module:Net or train.py:Net"
    )
    target.add_argument("--model", metavar="NAME", help="the same, together with --config")
    target.add_argument(
        "--data",
        metavar="NAME",
        help="the data: train.py:Data, a LightningDataModule, or a function that returns a loader",
    )
    target.add_argument(
        "--init", **repeatable, type=_assignment, metavar="NAME=VALUE", help="an argument of the module; repeatable"
    )
    target.add_argument("--config", **repeatable, metavar="FILE", help="a config file of LightningCLI; repeatable")
    target.add_argument(
        "--strategy", metavar="NAME", help="a registered name, or train.py:Class (default: the config's, else ddp)"
    )
    target.add_argument(
        "--trainer",
        **repeatable,
        type=_assignment,
        metavar="NAME=VALUE",
        help="an option of the Trainer, such as accumulate_grad_batches=4, its value as JSON or a string; repeatable",
    )
    settings = parser.add_argument_group("how")
    settings.add_argument("--devices", type=int, default=2, metavar="N", help="processes (default: 2)")
    settings.add_argument("--steps", type=int, default=3, metavar="N", help="global batches (default: 3)")
    settings.add_argument(
        "--precision",
        default="64-true",
        metavar="NAME",
        help="what both runs compute in: 64-true (default), or 32-true for models that cannot compute in float64",
    )
    settings.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest relative difference that counts as equal (default: 1e-8, in 32-true 1e-4)",
    )
    settings.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the seed if the config has none (default: 0)"
    )
    settings.add_argument("--json", action="store_true", help="print the report as JSON")
    settings.add_argument(
        "--explain",
        type=_cause,
        choices=tuple(CAUSES),
        metavar="CAUSE",
        help="print only what a cause means, and what to do about it",
    )
    return parser


def _cause(text: str) -> str:
    """Return the name of a cause, in which hyphens may stand for spaces."""
    names = {name.replace("-", " "): name for name in CAUSES}
    return names.get(text.replace("-", " "), text)


def _assignment(text: str) -> tuple[str, Any]:
    """Return name and value of `NAME=VALUE`, whose value is JSON or a plain string."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, such as accumulate_grad_batches=4, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value  # a plain string


def _strategy_is_assumed(args: argparse.Namespace) -> bool:
    """Return whether nothing says which strategy to verify; a config may, and its Trainer has a default."""
    return not args.config and not args.strategy and "strategy" not in dict(args.trainer)


def names_a_gradavg_strategy(module: str) -> bool:
    """Return whether the script of `file.py:Name` names a strategy of this package, which verify does not read."""
    file = Path(module.rpartition(":")[0])
    # Bytes: a script may say that it has another encoding than UTF-8.
    return file.suffix == ".py" and file.is_file() and b"GradAvgStrategy" in file.read_bytes()


def _target(args: argparse.Namespace, further: Sequence[str]) -> Target:
    """Return what is to be verified, or raise a ValueError about arguments that are wrong or contradict each other."""
    module = args.model or args.module
    if not args.config and not module:
        raise ValueError("nothing to verify: give --config FILE, or module:LightningModule")
    if args.config and args.init:
        raise ValueError("--init is for a module without --config; beside it write --model.NAME=VALUE")
    for file in args.config:
        if not Path(file).is_file():
            raise ValueError(f"--config {file!r}: there is no such file")
        try:
            Path(file).read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--config {file!r} is not UTF-8: {error}") from error
    if further and not args.config:
        raise ValueError(f"{further[0]!r} is not an option; further options of LightningCLI need --config")

    options = {}
    if not args.config:
        options["strategy"] = "ddp"  # a config may name one
    options.update(dict(args.trainer))
    if args.strategy:
        options["strategy"] = args.strategy
    if "strategy" in options:
        _check_strategy(options["strategy"])

    read: Callable[[], UserRun] = partial(read_names, module, args.data, dict(args.init))
    if args.config:
        arguments = [f"--config={file}" for file in args.config]
        if module:
            arguments.append(f"--model={module}")
        read = partial(read_config, [*arguments, *further], args.data)
    return Target(read, options, args.seed)


def _check_strategy(strategy: object) -> None:
    """Raise an error about a strategy that is no name, or a wrong one, before any process starts."""
    if not isinstance(strategy, str):
        raise TypeError(
            f"strategy={strategy!r} is no name: give --strategy gradavg_single_device, or --strategy"
            " train.py:make_strategy for one with options"
        )
    if ":" not in strategy:
        resolve_strategy(strategy)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `gradavg verify`, whose unknown options are those of LightningCLI, and return its exit code."""
    args, further = _parser().parse_known_args(argv)
    if args.explain is not None:
        print(explanation(args.explain))
        return 0
    try:
        settings = Settings(args.devices, args.steps, args.tolerance, args.precision)
        report = verify_target(_target(args, further), settings)
        _print(report, args)
    except Exception as error:  # noqa: BLE001  # no failure may look like a verdict
        print(f"gradavg verify: error: {error}", file=sys.stderr)
        return 2
    return EXIT_CODES[report.verdict]


def _print(report: Report, args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps(report.as_dict(), indent=2))
        return
    if _strategy_is_assumed(args):
        first_line = "This verifies the strategy ddp: --strategy is not given, and verify does not read your Trainer."
        if names_a_gradavg_strategy(args.model or args.module):
            first_line += " The script names a GradAvgStrategy: verify it with --strategy."
        print(first_line)
    print(report)
