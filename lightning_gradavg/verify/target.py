"""The user's run: what it is made of, by value or by name, and what a quiet run of the Trainer is made of it."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, callbacks, seed_everything
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_gradavg._lightning.internals import start_no_processes
from lightning_gradavg._support.arguments import nearest, refuse_unknown

__all__ = [
    "Build",
    "Built",
    "Options",
    "Target",
    "UserRun",
    "as_list",
    "imported",
    "is_importing",
    "quiet_options",
    "resolve_strategy",
    "user_run_of",
    "without_types",
]

_REPLACED_PLUGINS = (str, ClusterEnvironment)
"""The plugin of the cluster is that of `verify`, and `record_run` replaces that of precision. A string names one."""

_REMOVED_CALLBACKS = (
    # They search or stop, and need a longer run.
    callbacks.BatchSizeFinder,
    callbacks.LearningRateFinder,
    callbacks.EarlyStopping,
    callbacks.Timer,
    # They write or watch.
    callbacks.Checkpoint,
    callbacks.DeviceStatsMonitor,
    callbacks.LearningRateMonitor,
    callbacks.ModelSummary,
    callbacks.ProgressBar,
)

Options: TypeAlias = Mapping[str, Any]
"""Options of the Trainer, or of its `fit`."""

_QUIET: Options = {
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "precision": None,
    "profiler": None,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "num_nodes": 1,
    "log_every_n_steps": 1,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "fast_dev_run": 0,
}
"""Options of the Trainer that replace the user's."""


def _refuse(*_: object, **__: object) -> None:
    """Stand for `Trainer.fit` while a module is imported; `Settings` calls it for `verify`."""
    raise ImportError('it trains when it is imported: put that under `if __name__ == "__main__":`')


def is_importing() -> bool:
    """Return whether a module is being imported that is to be verified."""
    return Trainer.fit is _refuse


def imported(path: str) -> Any:
    """Return what `package.module:Name` or `folder/file.py:Name` names."""
    module, _, name = path.rpartition(":")
    if not module or not name:
        raise ValueError(f"{path!r} must be written package.module:Name or file.py:Name")
    try:
        with mock.patch.object(Trainer, "fit", _refuse):
            if module.endswith(".py"):
                found = _module_of_file(Path(module))
            else:
                found = importlib.import_module(module)
        return operator.attrgetter(name)(found)
    except (ImportError, AttributeError, OSError) as error:
        raise ValueError(f"{path!r} cannot be imported: {error}") from error


def _module_of_file(file: Path) -> ModuleType:
    """Import a file, unless it is imported already, under its own name, so that pickles of its classes are found."""
    if not file.exists():
        raise ImportError(f"there is no file {str(file)!r}")
    spec: Any = importlib.util.spec_from_file_location(file.stem, file.resolve())
    if getattr(sys.modules.get(file.stem), "__file__", None) != spec.origin:
        sys.path.insert(0, str(file.resolve().parent))  # as Python does for a script
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
    return sys.modules[file.stem]


def resolve_strategy(strategy: object) -> DDPStrategy | ModelParallelStrategy:
    """Return a strategy that runs in processes which are there already."""
    if isinstance(strategy, str) and ":" in strategy:
        made_by = imported(strategy)
        if not callable(made_by):
            raise ValueError(f"strategy={strategy!r} is {made_by!r}; name the class, or a function that makes one")
        strategy = made_by()
    if isinstance(strategy, str):
        name = strategy.lower()
        if strategy == "auto":
            name = "ddp"  # as the Trainer chooses for several devices
        if name not in StrategyRegistry:
            raise ValueError(f"strategy={strategy!r} is not registered{nearest(name, sorted(StrategyRegistry))}")
        strategy = StrategyRegistry.get(name)
    if isinstance(strategy, DDPStrategy):
        start_no_processes(strategy)
        return strategy
    if isinstance(strategy, ModelParallelStrategy):
        return strategy
    raise ValueError(
        "verify compares gradients as DDPStrategy and ModelParallelStrategy (FSDP2) reduce them, and those of this"
        f" package; got {type(strategy).__name__}"
    )


def quiet_options(options: Options) -> Options:
    """Return the options of a Trainer that trains like the user's, but does not log, save or validate."""
    known = [name for name in inspect.signature(Trainer.__init__).parameters if name != "self"]
    refuse_unknown("the Trainer", options, known)
    return {
        **options,
        **_QUIET,
        "logger": DummyLogger(),  # modules may write to `self.logger.experiment`
        "accelerator": "cpu",
        "plugins": without_types(as_list(options.get("plugins")), _REPLACED_PLUGINS),
        "callbacks": without_types(as_list(options.get("callbacks")), _REMOVED_CALLBACKS),
    }


def without_types(values: list[object], types: tuple[type, ...]) -> list[object]:
    """Return the values that are of none of some types."""
    return [value for value in values if not isinstance(value, types)]


def as_list(value: object) -> list[object]:
    """Return what the Trainer takes as one, as several, or as None."""
    if isinstance(value, list):
        return value
    if not value:
        return []
    return [value]


class Built(NamedTuple):
    """What a run of the Trainer is made of, new for each run."""

    module: LightningModule
    data: Options  # the argument of `Trainer.fit` that has the data; empty if the module has them
    options: Options  # of the Trainer


Build: TypeAlias = Callable[[], Built]


class UserRun(NamedTuple):
    """What is trained."""

    module: Any  # a LightningModule; `Target.build` checks it
    data: Any  # a data module, a loader, or a function that returns one of them; None if the module has its own
    options: Options  # of the Trainer


def user_run_of(module: Any, data: Any = None) -> UserRun:
    """Return a new module and new data of what `verify` is given: values, what makes them, or names of one of these."""
    if isinstance(module, str):
        module = imported(module)
    if isinstance(data, str):
        data = imported(data)
    if isinstance(module, LightningModule):
        module = copy.deepcopy(module)
    elif callable(module):
        module = module()
    if hasattr(data, "__iter__"):  # a loader; data modules and functions make new ones for each run
        data = copy.deepcopy(data)
    return UserRun(module, data, {})


@dataclass(frozen=True)
class Target:
    """What is to be verified; every process builds it anew."""

    read: Callable[[], UserRun]
    options: Options = field(default_factory=dict)  # of the Trainer, which override those that are read
    seed: int = 0

    def build(self) -> Built:
        """Seed, and return what a quiet run of the Trainer is made of."""
        seed_everything(self.seed, workers=True, verbose=False)
        with mock.patch.object(Trainer, "fit", _refuse):
            module, data, options = self.read()
        if callable(data) and not hasattr(data, "__iter__"):
            data = data()
        if not isinstance(module, LightningModule):
            raise TypeError(
                "verify needs a lightning.pytorch.LightningModule, or a function that returns one;"
                f" got a {type(module).__name__}"
            )
        if data is None and not is_overridden("train_dataloader", module):
            raise ValueError(
                "there is no training data: give --data train.py:data, a function that returns a loader, or --data"
                f" train.py:Data, a LightningDataModule, or let {type(module).__name__} have a train_dataloader()"
            )
        data_arguments = {}
        if isinstance(data, LightningDataModule):
            data_arguments["datamodule"] = data
        elif data is not None:
            data_arguments["train_dataloaders"] = data
        # Callbacks and plugins keep state, and a process may build several runs.
        return Built(module, data_arguments, quiet_options({**options, **copy.deepcopy(self.options)}))
