"""`gradavg verify`: does this run train what one process would train?"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from lightning_gradavg.cli.plan import OneLineParser
from lightning_gradavg.verification.api import verify_target
from lightning_gradavg.verification.causes import CAUSES
from lightning_gradavg.verification.config import ConfigTarget
from lightning_gradavg.verification.plot import plot_report
from lightning_gradavg.verification.report import Report
from lightning_gradavg.verification.table import print_report
from lightning_gradavg.verification.targets import ObjectTarget, Target, imported, resolve_strategy
from lightning_gradavg.verification.worlds import Settings

__all__ = ["add_arguments", "main"]

DESCRIPTION = (
    "Trains a few optimizer steps on several processes, then computes them on one, and compares the two stage by stage."
    " Exit code 0: equal; 1: different; 2: wrong usage, or the run failed."
)

_PIPE_WIDTH = 120  # rich assumes 80 columns where there is no terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gradavg verify` to `parser`."""
    what = parser.add_argument_group("what to verify: a config file of LightningCLI, or a module")
    what.add_argument("module", nargs="?", metavar="module:LightningModule", help="a class or function, by its name")
    what.add_argument("--data", metavar="module:DataModule", help="a data module, or a function that returns a loader")
    what.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="a config file of `fit`; may be given again"
    )
    what.add_argument(
        "--strategy", metavar="NAME", help="a registered name, or module:Class (default: the config's, else ddp)"
    )
    what.add_argument(
        "--trainer",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the Trainer, its value as JSON or a plain string; may be given again",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--devices", type=int, default=2, metavar="N", help="processes (default: 2)")
    how.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps (default: 3)")
    how.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    how.add_argument("--double", action="store_true", help="compute in float64, which tells rounding from defects")
    how.add_argument(
        "--tolerance", type=float, metavar="X", help="relative difference that counts as equal (default: 1e-5 or 1e-10)"
    )
    how.add_argument("--seed", type=int, default=0, metavar="N", help="seed, where the config has none (default: 0)")
    how.add_argument(
        "--ignore", action="append", default=[], choices=tuple(CAUSES), metavar="CAUSE", help="a cause not to report"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the report as JSON; docs/verify.md has the schema")
    output.add_argument("--plot", metavar="FILE", help="draw the difference per parameter and step; needs matplotlib")


def _trainer_options(texts: Sequence[str]) -> dict[str, Any]:
    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"--trainer must be NAME=VALUE, got {text!r}")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def _target(args: argparse.Namespace, further: Sequence[str]) -> Target:
    options = _trainer_options(args.trainer)
    if args.strategy is not None:
        strategy = imported(args.strategy)() if ":" in args.strategy else args.strategy
        options["strategy"] = resolve_strategy(strategy)
    if args.config:
        if args.module is not None or args.data is not None:
            raise ValueError("give either --config or a module with --data, not both")
        arguments = [part for config in args.config for part in ("--config", config)]
        return ConfigTarget((*arguments, *further), options, args.seed)
    if args.module is None:
        raise ValueError("nothing to verify: give --config FILE, or module:LightningModule")
    if further:
        raise ValueError(f"{further[0]!r} is not an option; further options of LightningCLI need --config")
    data = None if args.data is None else imported(args.data)
    return ObjectTarget(imported(args.module), data, {"strategy": "ddp", **options}, args.seed)


def _show(report: Report, args: argparse.Namespace) -> None:
    if args.plot is not None:
        plot_report(report, args.plot)
    if args.json:
        print(json.dumps(report.as_dict(), indent=2))
        return
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    print_report(report, Console(width=_PIPE_WIDTH if piped else None, highlight=False))


def main(argv: Sequence[str] | None = None) -> int:
    """Run `gradavg verify` with `argv`, or the arguments of the process, and return its exit code.

    Options that it does not know are those of LightningCLI, as behind `gradavg fit`.
    """
    parser = OneLineParser(prog="gradavg verify", description=DESCRIPTION)
    add_arguments(parser)
    args, further = parser.parse_known_args(argv)
    if os.getcwd() not in sys.path:  # noqa: PTH109  # an entry of sys.path is a string
        sys.path.insert(0, os.getcwd())  # noqa: PTH109  # likewise; the user's modules, as with `python -m`
    try:
        settings = Settings(args.devices, args.steps, args.accelerator, args.double)
        report = verify_target(_target(args, further), settings, tolerance=args.tolerance, ignore=args.ignore)
        _show(report, args)
    except (ValueError, RuntimeError) as error:
        print(f"gradavg verify: error: {error}", file=sys.stderr)
        return 2
    return 0 if report.equal else 1


if __name__ == "__main__":
    sys.exit(main())
