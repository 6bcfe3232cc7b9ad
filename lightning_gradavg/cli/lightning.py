"""LightningCLI for `fit` and its like, and for `verify`: classes by their file, configs without class paths."""

from __future__ import annotations

import argparse
import re
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from typing_extensions import override

from lightning_gradavg.verify.run import Read, as_list, imported, of_values

__all__ = ["main", "read_config", "read_names"]

_NOISE = re.compile(r"Does not validate|Subtypes:|Errors:|Given value type:|Given value: N|Expected a <class 'NoneT")
_UNNAMED = re.compile(r"arguments are required: \w+\.model\b|class_path '[\w.]+\.Lightning(Data)?Module'")
_REFUSING = ("lightning_gradavg.", "lightning.pytorch.trainer.", "lightning.fabric.", "jsonargparse.")


class _WrongArgumentsError(ValueError):
    """Arguments that LightningCLI does not take."""


def _in_one_line(message: str) -> str:
    """Return an error of jsonargparse, a tree of what it tried, as one line: what is accepted, and what was given."""
    lines = (line.strip(" -") for line in message.splitlines())
    text = "; ".join(dict.fromkeys(line for line in lines if line and not _NOISE.match(line))).replace(":; ", ": ")
    advice = "; without class_path, name the classes: --model train.py:Net --data train.py:Data"
    return text + advice * bool(_UNNAMED.search(text))


def _with_class_paths(arguments: Sequence[str]) -> list[str]:
    """Return arguments of a LightningCLI in which `--model file.py:Net` and `--data file.py:Data` are class paths.

    A named class stands before the config files, which may then have no `class_path`, and after them, so that it wins.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--model", "--data"):
        parser.add_argument(option)
    known, further = parser.parse_known_args(arguments)
    parser.add_argument("-c", "--config", action="append", default=[])
    files = parser.parse_known_args(arguments)[0].config
    classes = [f"--{option}={_class_path(name)}" for option, name in vars(known).items() if name]
    return [*further[:1], *classes, *further[1:], *classes * bool(files)]


def _class_path(name: str) -> str:
    if ":" not in name:
        return name
    found: Any = imported(name)
    return f"{found.__module__}.{found.__qualname__}"


class _RaisingParser(LightningArgumentParser):
    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        raise _WrongArgumentsError(_in_one_line(message)) from ex


class _CommandLine(LightningCLI):
    """A LightningCLI that raises `_WrongArgumentsError` for what the user can mend on the command line."""

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        self.parser_class = _RaisingParser
        return super().init_parser(**kwargs)

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except Exception as error:
            # jsonargparse wraps what a constructor raises. For a fault in their own code, users need the trace.
            root: BaseException = error
            while before := root.__cause__ or (None if root.__suppress_context__ else root.__context__):
                root = before
            *_, (raised_in, _) = traceback.walk_tb(root.__traceback__)
            if raised_in.f_globals["__name__"].startswith(_REFUSING):
                raise _WrongArgumentsError(_in_one_line(str(error))) from error
            raise


class _SavedConfig(SaveConfigCallback):
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Without a logger it would be written to the working folder, over the config.yaml that was given, and refused.
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)


def main(arguments: Sequence[str]) -> int:
    """Run LightningCLI with the strategies registered, and return its exit code.

    Args:
        arguments: The subcommand and its options. `--model` and `--data` may name classes as `file.py:Name`. Processes
            that Lightning starts get them, too.
    """
    given, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "LightningCLI's args parameter", UserWarning)
            args = _with_class_paths(arguments)
            _CommandLine(args=args, save_config_callback=_SavedConfig, parser_kwargs={"prog": "gradavg"})
    except _WrongArgumentsError as error:
        print(f"gradavg {arguments[0]}: error: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        sys.argv = given
    return 0


class _ConfigReader(_CommandLine):
    """Builds what `fit` needs, and runs nothing.

    `run=False` would build a Trainer, whose strategy takes the devices of the config. The two methods are private in
    lightning 2.5.0 and 2.6.6; there is no public way to get the options of the Trainer.
    """

    options: dict[str, Any]

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> Any:
        self.options = {**config, "callbacks": [*as_list(config.get("callbacks")), *callbacks]}

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def read_config(arguments: Sequence[str], data: str | None) -> Read:
    """Return module, data and options of `fit` with these arguments; `data` may name a function."""
    function = imported(data) if data and ":" in data else None
    is_class = isinstance(function, type) or function is None
    given = _with_class_paths(["fit", *arguments, *[f"--data={data}"] * bool(data and is_class)])
    cli = _ConfigReader(args=given, parser_kwargs={"prog": "gradavg verify"}, save_config_callback=None)
    return cli.model, cli.datamodule if is_class else function, cli.options


def read_names(module: str, data: str | None, init: Mapping[str, Any]) -> Read:
    """Return module and data by their names; `init` are arguments of the module, from a command line."""
    function: Any = imported(module)
    if not init:
        return of_values(function, data)
    parser = ArgumentParser(exit_on_error=False)
    add = parser.add_class_arguments if isinstance(function, type) else parser.add_function_arguments
    add(function, fail_untyped=False)
    try:
        found = parser.instantiate_classes(parser.parse_object(dict(init), defaults=False))
    except ArgumentError as error:
        raise _WrongArgumentsError(f"--init: {_in_one_line(str(error))}") from error
    return of_values(partial(function, **{name: found[name] for name in init}), data)
