"""LightningCLI for `fit` and `verify`: classes by their file, configs without class paths, errors in one line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

from lightning_gradavg.verify.target import Read, as_list, imported, of_values

__all__ = ["CommandLine", "WrongArgumentsError", "in_one_line", "read_config", "read_names", "with_class_paths"]


class WrongArgumentsError(ValueError):
    """Arguments that LightningCLI does not take."""


_NOISE = (
    *("Does not validate", "Subtypes:", "Errors:", "Given value type:", "Given value: N"),
    "Expected a <class 'NoneT",
)


def in_one_line(message: str) -> str:
    """Return an error of jsonargparse, a tree of what it tried, as one line: what is accepted, and what was given."""
    if re.search(r"arguments are required: \w+\.model\b", message):
        return "no model: give --model train.py:Net, or a --config that states model: class_path"
    lines = [line.strip(" -") for line in message.splitlines()]
    kept = dict.fromkeys(line for line in lines if line and not line.startswith(_NOISE))
    text = "; ".join(kept).replace(":; ", ": ")
    text = re.sub(r"(?:a )?typing\.Literal\[(.*?)\]", r"one of \1", text)
    text = re.sub(r"a <class '([\w.]+)'>", r"\1", text)
    unnamed = re.search(r'Parser key "(model|data)": Option .* is not accepted', message)
    return f"{text}; without class_path give --{unnamed[1]} train.py:Class" if unnamed else text


def with_class_paths(arguments: Sequence[str]) -> list[str]:
    """Return arguments of a LightningCLI in which `--model file.py:Net` and `--data file.py:Data` are class paths.

    A named class stands before the config files, which may then have no `class_path`, and after them, so that it wins.

    Raises:
        ValueError: If a config file, or what is named, is not there.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--model", "--data"):
        parser.add_argument(option)
    known, further = parser.parse_known_args(arguments)
    parser.add_argument("-c", "--config", action="append", default=[])
    files = parser.parse_known_args(arguments)[0].config
    for file in (file for file in files if not Path(file).is_file()):
        raise WrongArgumentsError(f"--config {file!r}: there is no such file")
    classes = [f"--{option}={_class_path(name)}" for option, name in vars(known).items() if name is not None]
    return [*further[:1], *classes, *further[1:], *classes * bool(files)]


def _class_path(name: str) -> str:
    found = imported(name) if ":" in name else None
    return name if found is None else f"{found.__module__}.{found.__qualname__}"


class _RaisingParser(LightningArgumentParser):
    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        raise WrongArgumentsError(in_one_line(message)) from ex


class CommandLine(LightningCLI):
    """A LightningCLI that raises `WrongArgumentsError`, and whose classes may be named by their file."""

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        self.parser_class = _RaisingParser
        return super().init_parser(**kwargs)


class _ConfigReader(CommandLine):
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
    """Return module, data and options of `fit` with these arguments; `data` may name a function.

    Raises:
        WrongArgumentsError: If LightningCLI does not take them.
    """
    function = imported(data) if data and ":" in data else None
    is_class = isinstance(function, type) or function is None
    given = with_class_paths(["fit", *arguments, *[f"--data={data}"] * bool(data and is_class)])
    cli = _ConfigReader(args=given, parser_kwargs={"prog": "gradavg verify"}, save_config_callback=None)
    return cli.model, cli.datamodule if is_class else function, cli.options


def read_names(module: str, data: str | None, init: Mapping[str, Any]) -> Read:
    """Return module and data by their names; `init` are arguments of the module, from a command line.

    Raises:
        WrongArgumentsError: If the module does not take them.
    """
    function: Any = imported(module)
    if not init:
        return of_values(function, data)
    parser = ArgumentParser(exit_on_error=False)
    add = parser.add_class_arguments if isinstance(function, type) else parser.add_function_arguments
    add(function, fail_untyped=False)
    try:
        found = parser.instantiate_classes(parser.parse_object(dict(init), defaults=False))
    except ArgumentError as error:
        raise WrongArgumentsError(f"--init: {in_one_line(str(error))}") from error
    return of_values(partial(function, **{name: found[name] for name in init}), data)
