"""The console command `gradavg`: a LightningCLI that knows this package's strategies, and tools around them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

_LIGHTNING = {
    "fit": "train a model from a config file or options, with this package's strategies registered",
    "validate": "evaluate it on its validation data",
    "test": "evaluate it on its test data",
    "predict": "predict with it",
}
_OWN = {
    "plan": "batch, accumulation and learning rate of a recipe on another cluster",
    "verify": "a few steps of your own run against one process: are they the same, and if not, why",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: The arguments without the program's name; those of the process if not given.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help"):
        print(_help())
        return 0
    if command == "plan":
        from lightning_gradavg.cli import plan  # noqa: PLC0415 - a command imports only what it needs

        return plan.main(arguments[1:])
    if command == "verify":
        from lightning_gradavg.cli import verify  # noqa: PLC0415 - likewise

        return verify.main(arguments[1:])
    if command in _LIGHTNING:
        from lightning_gradavg.cli import fit  # noqa: PLC0415 - likewise

        return fit.main(arguments)
    if command == "--version":
        package = sys.modules["lightning_gradavg"]  # which is above this folder, and imported before it
        print(f"gradavg {package.__version__}")
        return 0
    commands = ", ".join([*_LIGHTNING, *_OWN])
    print(f"gradavg: error: {command!r} is not a command; choose from {commands}", file=sys.stderr)
    return 2


def _help() -> str:
    commands = "\n".join(f"  {name:10} {text}" for name, text in {**_LIGHTNING, **_OWN}.items())
    further = "'gradavg COMMAND --help' lists its options, 'gradavg --version' tells the version."
    return f"usage: gradavg COMMAND [options]\n\ncommands:\n{commands}\n\n{further}"
