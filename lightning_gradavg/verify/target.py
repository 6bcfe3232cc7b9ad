"""What is verified, and how: a module and data by value or by name, the Trainer's options, the settings."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import math
import operator
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import torch
import yaml
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, callbacks, seed_everything
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_gradavg.lightning_internals import start_no_processes

__all__ = [
    "CommandLine",
    "MainModule",
    "Settings",
    "Target",
    "TrainsOnImport",
    "imported",
    "in_one_line",
    "is_refused",
    "quiet_options",
    "resolve_strategy",
]

_LEFT_OUT = (
    *(callbacks.BatchSizeFinder, callbacks.LearningRateFinder, callbacks.EarlyStopping, callbacks.Timer),
    *(callbacks.Checkpoint, callbacks.DeviceStatsMonitor, callbacks.LearningRateMonitor, callbacks.ModelSummary),
    callbacks.ProgressBar,
)
"""Callbacks that search, stop, write or watch, and need a longer run or a logger."""

_QUIET: Mapping[str, Any] = {
    **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    **dict.fromkeys(("profiler", "min_epochs", "min_steps", "max_time"), None),
    "num_nodes": 1,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "fast_dev_run": False,
}


class TrainsOnImport(BaseException):
    """A module that is only to be imported begins to train; no handler of `Exception` in it is to stop this."""


def _refuse(*_: Any, **__: Any) -> Any:
    raise TrainsOnImport


@contextmanager
def _training_refused() -> Iterator[None]:
    """Have all training within the context, and `verify`, raise `TrainsOnImport`."""
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
        where = f"line {last.lineno}: {last.line}"
        advice = 'Put that under `if __name__ == "__main__":`'
        raise ValueError(f"{module!r} trains when it is imported ({where}). {advice}") from None


def _module_of_file(file: Path) -> ModuleType:
    if not file.exists():
        raise ImportError(f"there is no file {str(file)!r}")
    spec: Any = importlib.util.spec_from_file_location(file.stem, file.resolve())
    if file.stem not in sys.modules or getattr(sys.modules[file.stem], "__file__", None) != spec.origin:
        sys.path.insert(0, str(file.resolve().parent))  # as of a script
        module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[file.stem]


class MainModule(ModuleType):
    """Stands for the script that asked, which is run up to where it trains if a class or function of it is needed."""

    def __init__(self, file: str | None) -> None:
        super().__init__("__main__")
        vars(self)["_script"] = file

    def __getattr__(self, name: str) -> Any:
        file = vars(self).pop("_script", None) if not name.startswith("__") else None
        if file is None:
            raise AttributeError(name)
        self.__file__, self.__name__ = file, "__mp_main__"  # the name that multiprocessing imports it by
        with _training_refused(), suppress(TrainsOnImport):
            exec(compile(Path(file).read_bytes(), file, "exec"), vars(self))  # as multiprocessing does
        return getattr(self, name)


def resolve_strategy(strategy: Any) -> DDPStrategy:
    """Return a strategy that runs in processes which are there already.

    Raises:
        ValueError: If it is none of DDP's kind: where gradients or weights are sharded there is none to compare.
    """
    if isinstance(strategy, str) and ":" in strategy:
        strategy = imported(strategy)()
    if isinstance(strategy, str):
        name = "ddp" if strategy == "auto" else strategy.lower()  # as the Trainer does
        if name not in StrategyRegistry:
            known = ", ".join(sorted(StrategyRegistry))
            raise ValueError(f"strategy={strategy!r} is not registered; use one of {known}")
        strategy = StrategyRegistry.get(name)
    if not isinstance(strategy, DDPStrategy):
        raise ValueError(  # noqa: TRY004  # a wrong choice, not a wrong type: strategies come by name, too
            f"verify compares gradients of whole models, as DDPStrategy and GradAvgStrategy reduce them; got"
            f" {type(strategy).__name__}"
        )
    start_no_processes(strategy)
    return strategy


def quiet_options(options: Mapping[str, Any], accelerator: str) -> dict[str, Any]:
    """Return the options of a Trainer that trains as the user's, but neither logs nor saves nor validates.

    Raises:
        ValueError: If the Trainer has no such option.
    """
    known = list(inspect.signature(Trainer.__init__).parameters)[1:]
    for name in sorted(options.keys() - set(known)):
        raise ValueError(f"Trainer has no option {name!r}; it has {', '.join(known)}")
    kept = {
        name: [one for one in _as_list(options.get(name)) if not isinstance(one, (str, *types))]
        for name, types in {"callbacks": _LEFT_OUT, "plugins": (ClusterEnvironment, Precision)}.items()
    }
    # Modules may write to `self.logger.experiment`.
    return {**options, **_QUIET, "logger": DummyLogger(), "accelerator": accelerator, **kept}


def _as_list(given: Any) -> list[Any]:
    """Return what the Trainer takes as one, as several, or as None."""
    return given if isinstance(given, list) else list(filter(None, [given]))


_NOISE = (
    "Does not validate",
    "Subtypes:",
    "Errors:",
    "Given value type:",
    "Given value: N",
    "Expected a <class 'NoneT",
)


def in_one_line(message: str) -> str:
    """Return an error of jsonargparse, a tree of what was tried, as one line of what is accepted and what was given."""
    lines = [line.strip(" -") for line in message.splitlines()]
    kept = dict.fromkeys(line for line in lines if line and not line.startswith(_NOISE))
    text = "; ".join(kept).replace(":; ", ": ")
    text = re.sub(r"(?:a )?typing\.Literal\[(.*?)\]", r"one of \1", text)
    return re.sub(r"a <class '([\w.]+)'>", r"\1", text)


class CommandLine(NamedTuple):
    """Arguments of a LightningCLI, and the classes that they name as `file.py:Name`."""

    arguments: list[str]
    model: Any = None
    data: Any = None

    @property
    def classes(self) -> dict[str, Any]:
        """What a LightningCLI is built with."""
        data = self.data if isinstance(self.data, type) else None
        return {"model_class": self.model, "datamodule_class": data}

    @classmethod
    def of(cls, arguments: Sequence[str]) -> CommandLine:
        """Take `--model file.py:Net` and `--data file.py:Data` out of arguments, and fit the config files to them.

        A config of `LightningCLI(Net, Data)` states arguments only, one of `LightningCLI()` a `class_path`, too: either
        will do for a class that is named.

        Raises:
            ValueError: If a file is not there, or states no class and none is named.
        """
        rest: list[str] = []
        given: dict[str, str] = {}
        files: list[int] = []
        items = iter(arguments)
        for item in items:
            name, equals, value = item.partition("=")
            if name in ("--model", "--data", "--config", "-c"):
                value = value if equals else next(items, "")
                if name in ("--model", "--data") and ":" in value:
                    given[name[2:]] = value
                    continue
                rest += [name, value]
                files += [len(rest) - 1] * (name in ("--config", "-c"))
            else:
                rest.append(item)
        for place in files:
            rest[place] = _fitted(rest[place], given, rest)
        return cls(rest, *(imported(given[name]) if name in given else None for name in ("model", "data")))


def _fitted(file: str, given: Mapping[str, str], arguments: Sequence[str]) -> str:
    """Return a config file, or its content without the classes that are named already."""
    if not Path(file).is_file():
        raise ValueError(f"--config {file!r}: there is no such file")
    try:
        content = yaml.safe_load(Path(file).read_text("utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"--config {file!r} is no YAML: {' '.join(str(error).split())}") from error
    inner = next(
        (content[key] for key in ("fit", "validate", "test", "predict") if isinstance(content.get(key), dict)), content
    )
    changed = False
    for name in ("model", "data"):
        stated = inner.get(name)
        if not isinstance(stated, dict):
            continue
        if name in given and "class_path" in stated:
            inner[name], changed = dict(stated.get("init_args") or {}), True
        elif name not in given and "class_path" not in stated and f"--{name}" not in arguments:
            kind = {"model": "Net", "data": "Data"}[name]
            raise ValueError(
                f"--config {file!r}: {name} has no class_path, as of a LightningCLI(Net, Data): name the class by"
                f" --{name} train.py:{kind}"
            )
    return yaml.safe_dump(content) if changed else file


class _RaisingParser(LightningArgumentParser):
    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise ValueError(in_one_line(message)) from ex


class _ConfigReader(LightningCLI):
    """A LightningCLI that builds what `fit` needs, and runs nothing.

    `run=False` would build a Trainer, whose strategy takes the devices of the config. The two methods are private in
    lightning 2.5.0 and 2.6.6, and there is no public way to get the options of the Trainer.
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
    """What is to be verified; every process builds it anew.

    Attributes:
        module: A module, or a function that returns one, such as its class, or `file.py:Name`; None with `config`.
        data: A data module, a training loader, or a function that returns one of them, or its name; None where the
            module has it.
        options: Options of the Trainer, which override a config's.
        seed: What every process seeds before it builds.
        init: The arguments of the function that returns the module.
        config: What would stand behind `fit` of a LightningCLI.
    """

    module: Any = None
    data: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    init: Mapping[str, Any] = field(default_factory=dict)
    config: tuple[str, ...] = ()

    def build(self) -> tuple[LightningModule, dict[str, Any], dict[str, Any]]:
        """Seed, and return the module, the data arguments of `Trainer.fit`, and the options of the Trainer.

        Raises:
            TypeError: If `module` makes no LightningModule.
        """
        seed_everything(self.seed, workers=True, verbose=False)
        options = dict(self.options)
        if self.config:
            line = CommandLine.of(self.config)
            with _training_refused():
                cli = _ConfigReader(
                    **line.classes,
                    args=["fit", *line.arguments],
                    parser_kwargs={"prog": "gradavg verify"},
                    save_config_callback=None,
                )
            module, data, options = cli.model, cli.datamodule, {**cli.options, **options}
            data = line.data if data is None else data
        else:
            given, data = (imported(each) if isinstance(each, str) else each for each in (self.module, self.data))
            if not isinstance(given, LightningModule):
                _require_types(given, self.init)
            module = copy.deepcopy(given) if isinstance(given, LightningModule) else given(**self.init)
            data = copy.deepcopy(data) if hasattr(data, "__iter__") else data
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
        return module, {} if data is None else {name: data}, options


_TYPES: Mapping[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    str: ((str,), "a string"),
}


def _require_types(function: Any, given: Mapping[str, Any]) -> None:
    """Check arguments from a command line against plain annotations.

    Raises:
        ValueError: If an argument is unknown, or of another type.
    """
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except (TypeError, ValueError, NameError):
        return
    for name, value in given.items():
        known = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        if name not in parameters and not known:
            raise ValueError(f"--init {name}={value!r}: it has no such argument; it has {', '.join(parameters)}")
        types, words = _TYPES.get(getattr(parameters.get(name), "annotation", None), ((object,), ""))
        if not isinstance(value, types) or (isinstance(value, bool) and types not in ((bool,), (object,))):
            raise ValueError(f"--init {name}={value!r}: give {words}")


@dataclass(frozen=True)
class Settings:
    """How to verify.

    Attributes:
        devices: The number of ranks.
        steps: The number of optimizer steps.
        accelerator: "cpu", or a type of device such as "cuda".
        single: Whether to compute in float32, and not in float64.
        compare_order: Whether to compare the order of samples with that of one process.
        tolerance: The largest relative difference that counts as equal; None for what the precision needs.
    """

    devices: int = 2
    steps: int = 3
    accelerator: str = "cpu"
    single: bool = False
    compare_order: bool = True
    tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.tolerance is not None and not 0 < self.tolerance < math.inf:
            raise ValueError(f"tolerance is a relative difference > 0, got {self.tolerance}")
        for name, number in (("devices", self.devices), ("steps", self.steps)):
            if number < 1:
                raise ValueError(f"{name} must be 1 or more, got {number}")
        if self.accelerator == "cpu":
            return
        of_type: Any = getattr(torch, self.accelerator, None)
        if not hasattr(of_type, "device_count"):
            raise ValueError(
                f"accelerator must be 'cpu', or a type of device of torch such as 'cuda', got {self.accelerator!r}"
            )
        number = of_type.device_count()
        if number < self.devices:
            raise ValueError(
                f"{self.devices} ranks need as many devices of type {self.accelerator}, and there are {number};"
                " use accelerator 'cpu'"
            )

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a Trainer that verifies."""
        return quiet_options(given, self.accelerator)
