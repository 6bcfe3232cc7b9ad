"""What is verified, and how: a module and data by value or by name, the Trainer's options, the settings."""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import inspect
import math
import operator
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, callbacks, seed_everything
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_gradavg.arguments import nearest
from lightning_gradavg.lightning_internals import start_no_processes

__all__ = [
    "MainModule",
    "Settings",
    "Target",
    "TrainsOnImport",
    "imported",
    "in_one_line",
    "is_refused",
    "quiet_options",
    "resolve_strategy",
    "with_class_paths",
]

# Plugins of the cluster and of precision are ours; the callbacks search, stop, write or watch, and need a longer run.
_LEFT_OUT: Mapping[str, tuple[type, ...]] = {
    "plugins": (str, ClusterEnvironment, Precision),
    "callbacks": (
        *(callbacks.BatchSizeFinder, callbacks.LearningRateFinder, callbacks.EarlyStopping, callbacks.Timer),
        *(callbacks.Checkpoint, callbacks.DeviceStatsMonitor, callbacks.LearningRateMonitor, callbacks.ModelSummary),
        callbacks.ProgressBar,
    ),
}
_QUIET: Mapping[str, Any] = {
    **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    **dict.fromkeys(("profiler", "min_epochs", "min_steps", "max_time"), None),
    **dict.fromkeys(("num_nodes", "log_every_n_steps"), 1),
    **dict.fromkeys(("limit_val_batches", "num_sanity_val_steps", "fast_dev_run"), 0),
}


class TrainsOnImport(BaseException):
    """An imported module begins to train. No `except Exception` in it may stop this."""


def _refuse(*_: Any, **__: Any) -> Any:
    raise TrainsOnImport


@contextmanager
def _training_refused() -> Iterator[None]:
    """Let all training, and `verify`, raise `TrainsOnImport`."""
    with mock.patch.multiple(Trainer, fit=_refuse, validate=_refuse, test=_refuse, predict=_refuse):
        yield


def is_refused() -> bool:
    """Return whether a module is being imported, which may not train."""
    return Trainer.fit is _refuse


def imported(path: str) -> Any:
    """Return what `package.module:Name` or `folder/file.py:Name` names.

    Raises:
        ValueError: If there is no such thing, or the module trains when it is imported.
    """
    module, _, name = path.rpartition(":")
    if not module or not name:
        raise ValueError(f"{path!r} must be written package.module:Name or file.py:Name")
    try:
        with _training_refused():
            found: Any = _module_of_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
        return operator.attrgetter(name)(found)
    except (ImportError, AttributeError, OSError) as error:
        raise ValueError(f"{path!r} cannot be imported: {error}") from error
    except TrainsOnImport as error:
        own = str(Path(__file__).parent)
        last = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(own)][-1]
        raise ValueError(
            f"{module!r} trains when it is imported (line {last.lineno}: {last.line})."
            ' Put that under `if __name__ == "__main__":`'
        ) from None


def _module_of_file(file: Path) -> ModuleType:
    if not file.exists():
        raise ImportError(f"there is no file {str(file)!r}")
    spec: Any = importlib.util.spec_from_file_location(file.stem, file.resolve())
    if getattr(sys.modules.get(file.stem), "__file__", None) != spec.origin:
        sys.path.insert(0, str(file.resolve().parent))  # as Python does for a script
        module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[file.stem]


class MainModule(ModuleType):
    """Stands for the script that asked. If a class of it is needed, the script runs up to where it trains."""

    def __init__(self, file: str | None) -> None:
        super().__init__("__main__")
        vars(self)["_script"] = file

    def __getattr__(self, name: str) -> Any:
        file = None if name.startswith("__") else vars(self).pop("_script", None)
        if file is None:
            raise AttributeError(name)
        self.__file__, self.__name__ = file, "__mp_main__"  # the name that multiprocessing imports it by
        with _training_refused(), suppress(TrainsOnImport):
            exec(compile(Path(file).read_bytes(), file, "exec"), vars(self))  # as multiprocessing does
        return getattr(self, name)


def resolve_strategy(strategy: Any) -> DDPStrategy:
    """Return a strategy that runs in processes which are there already.

    Raises:
        ValueError: If it is no DDP strategy: sharded gradients or weights cannot be compared.
    """
    if isinstance(strategy, str) and ":" in strategy:
        strategy = imported(strategy)()
    if isinstance(strategy, str):
        name = "ddp" if strategy == "auto" else strategy.lower()  # as the Trainer does
        if name not in StrategyRegistry:
            raise ValueError(f"strategy={strategy!r} is not registered{nearest(name, sorted(StrategyRegistry))}")
        strategy = StrategyRegistry.get(name)
    if not isinstance(strategy, DDPStrategy):
        raise ValueError(  # noqa: TRY004  # a wrong choice, not a wrong type: strategies come by name, too
            "verify compares gradients of whole models, as DDPStrategy and GradAvgStrategy reduce them; got"
            f" {type(strategy).__name__}"
        )
    start_no_processes(strategy)
    return strategy


def quiet_options(options: Mapping[str, Any], accelerator: str) -> dict[str, Any]:
    """Return the options of a Trainer that trains like the user's, but does not log, save or validate.

    Raises:
        ValueError: If the Trainer has no such option.
    """
    known = list(inspect.signature(Trainer.__init__).parameters)[1:]
    for name in sorted(options.keys() - set(known)):
        raise ValueError(f"Trainer has no option {name!r}{nearest(name, known)}")
    kept = {
        name: [one for one in _as_list(options.get(name)) if not isinstance(one, types)]
        for name, types in _LEFT_OUT.items()
    }
    # Modules may write to `self.logger.experiment`.
    return {**options, **_QUIET, "logger": DummyLogger(), "accelerator": accelerator, **kept}


def _as_list(given: Any) -> list[Any]:
    """Return what the Trainer takes as one, as several, or as None."""
    return given if isinstance(given, list) else list(filter(None, [given]))


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
    parser.add_argument("-c", "--config", action="append", default=[])
    known, _ = parser.parse_known_args(arguments)
    for file in (file for file in known.config if not Path(file).is_file()):
        raise ValueError(f"--config {file!r}: there is no such file")
    given, paths, classes = list(arguments), dict[str, str](), list[str]()
    for option, name in (("--model", known.model), ("--data", known.data)):
        if name is None:
            continue
        found = imported(name) if ":" in name else None
        path = name if found is None else f"{found.__module__}.{found.__qualname__}"
        paths |= {name: path, f"{option}={name}": f"{option}={path}"}
        classes.append(f"{option}={path}")
    given = [paths.get(argument, argument) for argument in given]
    return [*given[:1], *classes, *given[1:], *classes] if known.config else given


class _RaisingParser(LightningArgumentParser):
    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise ValueError(in_one_line(message)) from ex


class _ConfigReader(LightningCLI):
    """A LightningCLI that builds what `fit` needs, and runs nothing.

    `run=False` would build a Trainer, whose strategy takes the devices of the config. The two methods are private in
    lightning 2.5.0 and 2.6.6; there is no public way to get the options of the Trainer.
    """

    options: dict[str, Any]

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        self.parser_class = _RaisingParser
        return super().init_parser(**kwargs)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> Any:
        self.options = {**config, "callbacks": [*_as_list(config.get("callbacks")), *callbacks]}

    def _run_subcommand(self, subcommand: str) -> None:
        pass


@dataclass(frozen=True)
class Target:
    """What is to be verified; every process builds it anew."""

    module: Any = None  # a module, or a function that returns one, such as its class, or `file.py:Name`
    data: Any = None  # a data module, a loader, or a function that returns one of them, or its name
    options: Mapping[str, Any] = field(default_factory=dict)  # of the Trainer, which override a config's
    seed: int = 0
    init: Mapping[str, Any] = field(default_factory=dict)  # arguments of the function that returns the module
    config: tuple[str, ...] = ()  # arguments of `fit` of a LightningCLI, without `--data`

    def build(self, accelerator: str = "cpu") -> tuple[LightningModule, dict[str, Any], dict[str, Any]]:
        """Seed, and return the module, the data arguments of `Trainer.fit`, and the options of a quiet Trainer.

        Raises:
            TypeError: If `module` makes no LightningModule.
            ValueError: If there are no data.
        """
        seed_everything(self.seed, workers=True, verbose=False)
        module, data, options = self._of_config() if self.config else self._of_names()
        data = data() if callable(data) and not hasattr(data, "__iter__") else data
        if not isinstance(module, LightningModule):
            raise TypeError(
                "verify needs a lightning.pytorch.LightningModule, or a function that returns one;"
                f" got {module!r} of type {type(module).__name__}"
            )
        if data is None and not is_overridden("train_dataloader", module):
            raise ValueError(
                f"there is no training data: give --data train.py:data, or let {type(module).__name__} have a"
                " train_dataloader()"
            )
        name = "datamodule" if isinstance(data, LightningDataModule) else "train_dataloaders"
        return module, {} if data is None else {name: data}, quiet_options(options, accelerator)

    def _of_names(self) -> tuple[Any, Any, dict[str, Any]]:
        given, data = (imported(each) if isinstance(each, str) else each for each in (self.module, self.data))
        if isinstance(given, LightningModule):
            module = copy.deepcopy(given)
        else:
            module = given(**_converted(given, self.init)) if self.init else given()
        return module, copy.deepcopy(data) if hasattr(data, "__iter__") else data, dict(self.options)

    def _of_config(self) -> tuple[Any, Any, dict[str, Any]]:
        data = imported(self.data) if self.data and ":" in self.data else None
        is_class = isinstance(data, type) or not data
        arguments = ["fit", *self.config, *[f"--data={self.data}"] * bool(self.data and is_class)]
        with _training_refused():
            cli = _ConfigReader(
                args=with_class_paths(arguments),
                parser_kwargs={"prog": "gradavg verify"},
                save_config_callback=None,
            )
        return cli.model, cli.datamodule if is_class else data, {**cli.options, **self.options}


def _converted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments from a command line in the types of the annotations."""
    parser = ArgumentParser(exit_on_error=False)
    add = parser.add_class_arguments if isinstance(function, type) else parser.add_function_arguments
    add(function, fail_untyped=False)
    try:
        found = parser.instantiate_classes(parser.parse_object(dict(given), defaults=False))
    except ArgumentError as error:
        raise ValueError(f"--init: {in_one_line(str(error))}") from error
    return {name: found[name] for name in given}


@dataclass(frozen=True)
class Settings:
    """How to verify, as `verify` is told."""

    devices: int = 2
    steps: int = 3
    accelerator: str = "cpu"
    single: bool = False
    compare_order: bool = True
    tolerance: float | None = None  # None for what the precision needs

    def __post_init__(self) -> None:
        of_type: Any = getattr(torch, self.accelerator, None)
        found = of_type.device_count() if hasattr(of_type, "device_count") else 0
        refused = {
            f"devices must be 1 or more, got {self.devices}": self.devices < 1,
            f"steps must be 1 or more, got {self.steps}": self.steps < 1,
            f"tolerance is a relative difference > 0, got {self.tolerance}": self.tolerance is not None
            and not 0 < self.tolerance < math.inf,
            f"{self.devices} ranks need as many devices of type {self.accelerator!r}, and torch finds {found}; use"
            " accelerator 'cpu', or another type such as 'cuda'": self.accelerator != "cpu" and found < self.devices,
        }
        for message in (message for message, wrong in refused.items() if wrong):
            raise ValueError(message)
