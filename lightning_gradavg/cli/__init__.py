"""The console command `gradavg`: a LightningCLI that knows this package's strategies, and tools around them."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["OneLineParser", "main"]

_COMMANDS = {
    "fit": "train a model from a config file or options, with this package's strategies registered",
    "validate": "evaluate it on its validation data",
    "test": "evaluate it on its test data",
    "predict": "predict with it",
    "plan": "batch, accumulation and learning rate of a recipe on another cluster",
    "verify": "compare a few steps of your own run with one process: are they equal, and if not, why",
}
_OWN = ("plan", "verify")
_HELP = "\n".join(
    (
        "usage: gradavg COMMAND [options]\n\ncommands:",
        *(f"  {name:10} {text}" for name, text in _COMMANDS.items()),
        "\n'gradavg COMMAND --help' lists its options, 'gradavg --version' prints the version.",
    )
)


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
    given = list(sys.argv[1:] if argv is None else argv)
    command = given[0] if given else ""
    version = f"gradavg {sys.modules['lightning_gradavg'].__version__}"  # above this folder, and imported before it
    if answer := {"-h": _HELP, "--help": _HELP, "--version": version}.get(command):
        print(answer)
        return 0
    if command not in _COMMANDS:
        print(f"gradavg: error: {command!r} is not a command; choose from {', '.join(_COMMANDS)}", file=sys.stderr)
        return 2
    if os.getcwd() not in sys.path:  # noqa: PTH109  # an entry of sys.path is a string
        sys.path.insert(0, os.getcwd())  # noqa: PTH109  # likewise; the user's modules, as with `python -m`
    # A command imports only what it needs.
    own = command in _OWN
    module = importlib.import_module(f"lightning_gradavg.cli.{command if own else 'lightning'}")
    code: int = module.main(given[own:])
    return code
