"""What `gradavg verify` reads by LightningCLI: classes by their file, configs without class paths."""

from __future__ import annotations

import argparse
import re
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

from lightning_gradavg.verify.target import UserRun, as_list, imported, user_run_of

__all__ = ["read_config", "read_names"]

_NOISE = re.compile(r"Does not validate|Subtypes:|Errors:|Given value type:|Given value: N|Expected a <class 'NoneT")
"""How the lines of an error of jsonargparse begin that name neither what is accepted nor what was given."""

_UNNAMED_CLASS = re.compile(r"arguments are required: \w+\.model\b|class_path '[\w.]+\.Lightning(Data)?Module'")
"""What an error of jsonargparse says if a config has no `class_path` for the model or the data."""

_REFUSING = ("lightning_gradavg.", "lightning.pytorch.trainer.", "lightning.fabric.", "jsonargparse.")
"""How the names of modules begin whose errors are about an argument, and not about the user's code."""


class _WrongArgumentsError(ValueError):
    """Arguments that LightningCLI does not take."""


def _in_one_line(message: str) -> str:
    """Return an error of jsonargparse, a tree of what it tried, as one line: what is accepted, and what was given."""
    lines: dict[str, None] = {}  # each line once: alternatives of a type are often refused in the same words
    for line in message.splitlines():
        stripped = line.strip(" -")
        if stripped and not _NOISE.match(stripped):
            lines[stripped] = None
    text = "; ".join(lines).replace(":; ", ": ")
    if _UNNAMED_CLASS.search(text):
        text += "; without class_path, name the classes: --model train.py:Net --data train.py:Data"
    return text


def _with_class_paths(arguments: Sequence[str]) -> list[str]:
    """Return arguments of a LightningCLI in which `--model file.py:Net` and `--data file.py:Data` are class paths.

    A named class stands before the config files, which may then have no `class_path`, and after them, so that it wins.
    """
    named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named.add_argument("--model")
    named.add_argument("--data")
    names, further = named.parse_known_args(arguments)
    classes = []
    for option, name in vars(names).items():
        if name:
            classes.append(f"--{option}={_class_path(name)}")

    configured = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    configured.add_argument("-c", "--config", action="append", default=[])
    configs, _ = configured.parse_known_args(further)
    subcommand, options = further[:1], further[1:]
    if not configs.config:
        return [*subcommand, *classes, *options]
    return [*subcommand, *classes, *options, *classes]


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


def _first_error(error: BaseException) -> BaseException:
    """Return the error that led to others, of which the last is given; as a trace shows them, from the top."""
    while True:
        if error.__cause__ is not None:
            earlier: BaseException | None = error.__cause__
        elif error.__suppress_context__:
            return error
        else:
            earlier = error.__context__
        # `raise ... from KeyError` has a cause that nobody raised, and so no trace.
        if earlier is None or earlier.__traceback__ is None:
            return error
        error = earlier


def _module_that_raised(error: BaseException) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    name: str = frames[-1].f_globals["__name__"]
    return name


class _ConfigReader(LightningCLI):
    """Builds what `fit` needs, and runs nothing. It raises `_WrongArgumentsError` for what the user can mend.

    `run=False` would build a Trainer, whose strategy takes the devices of the config. The two methods are private in
    lightning 2.6.0 and 2.6.6; there is no public way to get the options of the Trainer.

    Attributes:
        options: The options of the Trainer, once the classes are instantiated.
    """

    options: dict[str, Any]

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except Exception as error:
            # jsonargparse words what a constructor raises as a value of a wrong type. For a fault in their own code,
            # users need the error itself, whose trace leads there.
            first = _first_error(error)
            if _module_that_raised(first).startswith(_REFUSING):
                raise _WrongArgumentsError(_in_one_line(str(error))) from error
            raise first from first.__cause__

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> Any:
        self.options = {**config, "callbacks": [*as_list(config.get("callbacks")), *callbacks]}

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def read_config(arguments: Sequence[str], data: str | None) -> UserRun:
    """Return module, data and options of `fit` with these arguments; `data` may name a class or a function.

    | `data` | data |
    |---|---|
    | None | that of the config |
    | `file.py:Data`, a class | a data module of this class, which LightningCLI builds |
    | `file.py:data`, a function | the function |
    | a class path without a colon | as LightningCLI takes `--data` |
    """
    given = ["fit", *arguments]
    function = None
    if data and ":" in data:
        found = imported(data)
        if not isinstance(found, type):
            function = found
    if data and function is None:
        given.append(f"--data={data}")
    cli = _ConfigReader(
        args=_with_class_paths(given),
        parser_class=_RaisingParser,
        parser_kwargs={"prog": "gradavg verify"},
        save_config_callback=None,
    )
    if function is not None:
        return UserRun(cli.model, function, cli.options)
    return UserRun(cli.model, cli.datamodule, cli.options)


def read_names(module: str, data: str | None, init: Mapping[str, Any]) -> UserRun:
    """Return module and data by their names; `init` are arguments of the module, from a command line."""
    function: Any = imported(module)
    if not init:
        return user_run_of(function, data)
    parser = ArgumentParser(exit_on_error=False)
    if isinstance(function, type):
        parser.add_class_arguments(function, fail_untyped=False)
    else:
        parser.add_function_arguments(function, fail_untyped=False)
    try:
        # A command line has text. jsonargparse turns it into the types of the annotations.
        found = parser.instantiate_classes(parser.parse_object(dict(init), defaults=False))
    except ArgumentError as error:
        raise _WrongArgumentsError(f"--init: {_in_one_line(str(error))}") from error
    arguments = {name: found[name] for name in init}
    return user_run_of(partial(function, **arguments), data)
