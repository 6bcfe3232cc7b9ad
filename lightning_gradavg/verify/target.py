"""What is verified, and how: a module and data by value or by name, the Trainer's options, the settings."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import operator
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, callbacks, seed_everything
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_gradavg.lightning_internals import start_no_processes
from lightning_gradavg.verify.record import Recorder

__all__ = [
    "MainModule",
    "Settings",
    "Target",
    "TrainsOnImport",
    "imported",
    "is_refused",
    "quiet_options",
    "resolve_strategy",
]

_LEFT_OUT = (
    *(callbacks.BatchSizeFinder, callbacks.LearningRateFinder, callbacks.EarlyStopping, callbacks.Timer),
    *(callbacks.Checkpoint, callbacks.DeviceStatsMonitor, callbacks.LearningRateMonitor, callbacks.ModelSummary),
    *(callbacks.ProgressBar, Recorder),
)
"""Callbacks that search, stop, write or watch, and need a longer run or a logger."""

_QUIET: Mapping[str, Any] = {
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    **dict.fromkeys(("profiler", "min_epochs", "min_steps", "max_time"), None),
    "num_nodes": 1,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
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
        name: [one for one in _as_list(options.get(name)) if not isinstance(one, types)]
        for name, types in {"callbacks": _LEFT_OUT, "plugins": (ClusterEnvironment,)}.items()
    }
    return {**options, **_QUIET, "accelerator": accelerator, **kept}


def _as_list(given: Any) -> list[Any]:
    """Return what the Trainer takes as one, as several, or as None."""
    return given if isinstance(given, list) else list(filter(None, [given]))


class _ConfigReader(LightningCLI):
    """A LightningCLI that builds what `fit` needs, and runs nothing.

    `run=False` would build a Trainer, whose strategy takes the devices of the config. The two methods are private in
    lightning 2.5.0 and 2.6.6, and there is no public way to get the options of the Trainer.
    """

    options: dict[str, Any]

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
        given, data = (imported(each) if isinstance(each, str) else each for each in (self.module, self.data))
        seed_everything(self.seed, workers=True, verbose=False)
        options = dict(self.options)
        if self.config:
            with _training_refused():
                cli = _ConfigReader(args=["fit", *self.config], parser_kwargs={"prog": "gradavg verify"})
            module, data, options = cli.model, cli.datamodule, {**cli.options, **options}
        else:
            module = copy.deepcopy(given) if isinstance(given, LightningModule) else given(**self.init)
            data = data() if callable(data) and not hasattr(data, "__iter__") else copy.deepcopy(data)
        if not isinstance(module, LightningModule):
            raise TypeError(
                "verify needs a lightning.pytorch.LightningModule, or a function that returns one;"
                f" got {module!r} of type {type(module).__name__}"
            )
        name = "datamodule" if isinstance(data, LightningDataModule) else "train_dataloaders"
        return module, {} if data is None else {name: data}, options


@dataclass(frozen=True)
class Settings:
    """How to verify.

    Attributes:
        devices: The number of ranks.
        steps: The number of optimizer steps.
        accelerator: "cpu", or a type of device such as "cuda".
        double: Whether to compute in float64.
        compare_order: Whether to compare the order of samples with that of one process.
        tolerance: The largest relative difference that counts as equal; None for what the precision needs.
    """

    devices: int = 2
    steps: int = 3
    accelerator: str = "cpu"
    double: bool = False
    compare_order: bool = True
    tolerance: float | None = None

    def __post_init__(self) -> None:
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
        double = {"precision": "64-true"} if self.double else {}
        return {**quiet_options(given, self.accelerator), **double}
