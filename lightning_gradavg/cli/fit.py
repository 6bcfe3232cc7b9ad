"""`gradavg fit`, `validate`, `test` and `predict`: LightningCLI, whose errors are one line here."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.strategies import StrategyRegistry
from typing_extensions import override

from lightning_gradavg.arguments import nearest
from lightning_gradavg.cli import hinted
from lightning_gradavg.cli.lightning import CommandLine, WrongArgumentsError, in_one_line, with_class_paths

__all__ = ["main"]

_REFUSING = ("lightning_gradavg.", "lightning.pytorch.trainer.", "lightning.fabric.", "jsonargparse.")
_OPTIONS = (
    *("--config", "--model", "--data", "--optimizer", "--lr_scheduler", "--ckpt_path", "--seed_everything"),
    *("--print_config", *(f"--trainer.{name}" for name in inspect.signature(Trainer).parameters)),
)


class _SavedConfig(SaveConfigCallback):
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Without a logger it would be written to the working folder, over the config.yaml that was given, and refused.
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)


class _CommandLine(CommandLine):
    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except Exception as error:
            # jsonargparse wraps what a constructor raises.
            *_, (raised_in, _) = traceback.walk_tb(_root(error).__traceback__)
            # For a fault in their own code, users need the trace.
            if not raised_in.f_globals["__name__"].startswith(_REFUSING):
                raise
            wrong = re.search(r"invalid strategy name: `strategy='(.*?)'`", str(error))
            raise WrongArgumentsError(
                in_one_line(str(error) if wrong is None else _unknown_strategy(wrong[1]))
            ) from error


def _unknown_strategy(name: str) -> str:
    return f"strategy={name!r} is not registered{nearest(name, sorted(StrategyRegistry))}"


def _root(error: BaseException) -> BaseException:
    """Return the error that others were raised from."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error if before is None else _root(before)


def main(arguments: Sequence[str]) -> int:
    """Run LightningCLI with the strategies registered, and return its exit code.

    Args:
        arguments: The subcommand and its options. `--model` and `--data` may name classes as `file.py:Name`. Processes
            that Lightning starts get them, too.
    """
    given, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        read = with_class_paths(arguments)
        # Where nothing was taken out, the arguments stay those of the process, as Lightning wants them.
        changed: dict[str, Any] = {"args": read} if read != list(arguments) else {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "LightningCLI's args parameter", UserWarning)
            _CommandLine(**changed, save_config_callback=_SavedConfig, parser_kwargs={"prog": "gradavg"})
    except WrongArgumentsError as error:
        print(f"gradavg {arguments[0]}: error: {hinted(str(error), _OPTIONS)}", file=sys.stderr)
        sys.exit(2)
    finally:
        sys.argv = given
    return 0
