"""The console command `gradavg`: tools around the package's strategies."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["OneLineParser", "main"]

_COMMANDS = {
    "plan": "batch, accumulation and learning rate of a recipe on another cluster",
    "verify": "compare a few steps of your own run with one process: are they equal, and if not, why",
}
_NEXT = (
    "To compare your run with one process: 'gradavg verify train.py:Net', with the name of your LightningModule; all"
    " commands: 'gradavg --help'"
)
"""What somebody does next who has named no command."""


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line without the usage, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Print `message` on one line, and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: The arguments without the program's name; those of the process if not given.
    """
    if argv is None:
        argv = sys.argv[1:]
    command = argv[0] if argv else ""
    if command in ("-h", "--help"):
        print(_help())
        return 0
    if command == "--version":
        print(f"gradavg {sys.modules['lightning_gradavg'].__version__}")  # imported, but above this folder
        return 0
    if not argv:
        print(f"gradavg: error: a command is missing. {_NEXT}", file=sys.stderr)
        return 2
    if command not in _COMMANDS:
        print(f"gradavg: error: {command!r} is not a command; choose from {', '.join(_COMMANDS)}", file=sys.stderr)
        return 2
    # Users name modules of the folder that they are in, as with `python -m`.
    folder = os.getcwd()  # noqa: PTH109  # an entry of sys.path is a string
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # A command imports only what it needs.
    module = importlib.import_module(f"lightning_gradavg.cli.{command}")
    exit_code: int = module.main(list(argv[1:]))
    return exit_code


def _help() -> str:
    lines = ["usage: gradavg COMMAND [options]", "", "commands:"]
    for name, text in _COMMANDS.items():
        lines.append(f"  {name:10} {text}")
    lines += ["", "Start with 'gradavg verify train.py:Net', where Net is the LightningModule in your train.py."]
    lines += ["'gradavg COMMAND --help' lists its options, 'gradavg --version' prints the version."]
    return "\n".join(lines)
