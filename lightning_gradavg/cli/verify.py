"""`gradavg verify`: does this run train what one process would train?"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_gradavg.cli.plan import OneLineParser
from lightning_gradavg.fingerprint import StateLog, parting_of
from lightning_gradavg.verify.causes import CAUSES
from lightning_gradavg.verify.report import EXIT_CODES, Report, plot_report, plotting
from lightning_gradavg.verify.run import print_to_console, verify_target
from lightning_gradavg.verify.target import Settings, Target, quiet_options, resolve_strategy

__all__ = ["add_arguments", "main"]

DESCRIPTION = (
    "Trains a few optimizer steps on several processes, then computes them on one, and compares the two stage by stage."
    " Exit code 0: equal; 1: different; 2: wrong usage, or the run failed; 3: not shown, as not all could be compared."
)
_FAILED = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gradavg verify` to `parser`."""
    what = parser.add_argument_group("what to verify: a config file of LightningCLI, or a module")
    what.add_argument(
        "module", nargs="?", metavar="NAME", help="a class or function: package.module:Net or train.py:Net"
    )
    what.add_argument("--data", metavar="NAME", help="a data module, or a function that returns a loader, likewise")
    what.add_argument(
        "--init",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the module; may be given again",
    )
    what.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="a config file of `fit`; may be given again"
    )
    what.add_argument(
        "--strategy", metavar="NAME", help="a registered name, or train.py:Class (default: the config's, else ddp)"
    )
    what.add_argument(
        "--trainer",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the Trainer, its value as JSON or a plain string; may be given again",
    )
    what.add_argument(
        "--until-differs",
        nargs=2,
        metavar="LOG",
        help="instead: where two runs part, by the files of GradAvgMonitor(state_log=...)",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--devices", type=int, default=2, metavar="N", help="processes (default: 2)")
    how.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps (default: 3)")
    how.add_argument("--accelerator", default="cpu", metavar="TYPE", help="a type of device: cpu, cuda (default: cpu)")
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


def _assignments(option: str, texts: Sequence[str]) -> dict[str, Any]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"{option} must be NAME=VALUE, got {text!r}")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def _target(args: argparse.Namespace, further: Sequence[str]) -> Target:
    options = _assignments("--trainer", args.trainer)
    quiet_options(options, args.accelerator)  # a wrong one is refused before any process starts
    if args.strategy is not None:
        options["strategy"] = args.strategy
        if ":" not in args.strategy:
            resolve_strategy(args.strategy)
    init = _assignments("--init", args.init)
    if args.config:
        if args.module is not None or args.data is not None or init:
            raise ValueError("give either --config or a module with --data and --init, not both")
        arguments = [part for config in args.config for part in ("--config", config)]
        return Target(options=options, seed=args.seed, config=(*arguments, *further))
    if args.module is None:
        raise ValueError("nothing to verify: give --config FILE, or module:LightningModule")
    if further:
        raise ValueError(f"{further[0]!r} is not an option; further options of LightningCLI need --config")
    return Target(args.module, args.data, {"strategy": "ddp", **options}, args.seed, init)


def _run(args: argparse.Namespace, further: Sequence[str]) -> Report:
    settings = Settings(args.devices, args.steps, args.accelerator, args.double, tolerance=args.tolerance)
    target = _target(args, further)
    if args.plot is not None:
        plotting()
        if not Path(args.plot).absolute().parent.is_dir():
            raise ValueError(f"--plot {args.plot!r}: there is no folder {str(Path(args.plot).parent)!r}")
    report = verify_target(target, settings, args.ignore)
    if args.plot is not None:
        plot_report(report, args.plot)
    return report


def _compare_logs(first: StateLog, second: StateLog, *, as_json: bool) -> int:
    """Print where two runs part, and return the exit code."""
    parting = parting_of(first, second)
    begin, end, count = parting.compared[0], parting.compared[-1], len(parting.compared)
    if as_json:
        print(json.dumps(asdict(parting), indent=2))
    elif parting.step is None:
        print(f"the same bits in the {count} steps that both runs logged, {begin} to {end}")
    else:
        print(f"{first.path} and {second.path} part in step {parting.step}:")
        print(f"  first in {parting.names[0]!r}; {len(parting.names)} of {parting.total} tensors and numbers differ")
        before = [step for step in parting.compared if step < parting.step]
        print(f"  the last step that both logged with the same bits: {before[-1] if before else 'none'}")
    return EXIT_CODES["equal" if parting.step is None else "different"]


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
        if args.until_differs:
            return _compare_logs(*map(StateLog, args.until_differs), as_json=args.json)
        report = _run(args, further)
        if args.json:
            print(json.dumps(report.as_dict(), indent=2))
        else:
            print_to_console(report)
    except Exception as error:  # noqa: BLE001  # no failure may look like a verdict
        print(f"gradavg verify: error: {error}", file=sys.stderr)
        return _FAILED
    return EXIT_CODES[report.verdict]


if __name__ == "__main__":
    sys.exit(main())
