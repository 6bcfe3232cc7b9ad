"""What is verified, and how: a module and data by value or by name, the Trainer's options, the settings."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import math
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias
from unittest import mock

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, callbacks, seed_everything
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_gradavg.arguments import nearest
from lightning_gradavg.lightning_internals import start_no_processes

__all__ = ["Read", "Settings", "Target", "as_list", "imported", "of_values", "quiet_options", "resolve_strategy"]

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


def _refuse(*_: Any, **__: Any) -> None:
    """Stand for `Trainer.fit`, and `verify`, while a module is imported."""
    raise ImportError('it trains when it is imported: put that under `if __name__ == "__main__":`')


def imported(path: str) -> Any:
    """Return what `package.module:Name` or `folder/file.py:Name` names."""
    module, _, name = path.rpartition(":")
    if not module or not name:
        raise ValueError(f"{path!r} must be written package.module:Name or file.py:Name")
    try:
        with mock.patch.object(Trainer, "fit", _refuse):
            found: Any = _module_of_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
        return operator.attrgetter(name)(found)
    except (ImportError, AttributeError, OSError) as error:
        raise ValueError(f"{path!r} cannot be imported: {error}") from error


def _module_of_file(file: Path) -> ModuleType:
    if not file.exists():
        raise ImportError(f"there is no file {str(file)!r}")
    spec: Any = importlib.util.spec_from_file_location(file.stem, file.resolve())
    if getattr(sys.modules.get(file.stem), "__file__", None) != spec.origin:
        sys.path.insert(0, str(file.resolve().parent))  # as Python does for a script
        module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[file.stem]


def resolve_strategy(strategy: Any) -> DDPStrategy:
    """Return a strategy that runs in processes which are there already."""
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
    """Return the options of a Trainer that trains like the user's, but does not log, save or validate."""
    known = list(inspect.signature(Trainer.__init__).parameters)[1:]
    for name in sorted(options.keys() - set(known)):
        raise ValueError(f"Trainer has no option {name!r}{nearest(name, known)}")
    kept = {
        name: [one for one in as_list(options.get(name)) if not isinstance(one, types)]
        for name, types in _LEFT_OUT.items()
    }
    # Modules may write to `self.logger.experiment`.
    return {**options, **_QUIET, "logger": DummyLogger(), "accelerator": accelerator, **kept}


def as_list(given: Any) -> list[Any]:
    """Return what the Trainer takes as one, as several, or as None."""
    return given if isinstance(given, list) else list(filter(None, [given]))


Read: TypeAlias = tuple[Any, Any, Mapping[str, Any]]
"""A module, its data or None, and options of the Trainer."""


def of_values(module: Any, data: Any = None) -> Read:
    """Return a new module and new data of what `verify` is given: values, what makes them, or names of one of these."""
    given, of_data = (imported(each) if isinstance(each, str) else each for each in (module, data))
    made = copy.deepcopy(given) if isinstance(given, LightningModule) else given()
    return made, copy.deepcopy(of_data) if hasattr(of_data, "__iter__") else of_data, {}


@dataclass(frozen=True)
class Target:
    """What is to be verified; every process builds it anew."""

    read: Callable[[], Read]
    options: Mapping[str, Any] = field(default_factory=dict)  # of the Trainer, which override those that are read
    seed: int = 0

    def build(self, accelerator: str = "cpu") -> tuple[LightningModule, dict[str, Any], dict[str, Any]]:
        """Seed, and return the module, the data arguments of `Trainer.fit`, and the options of a quiet Trainer."""
        seed_everything(self.seed, workers=True, verbose=False)
        with mock.patch.object(Trainer, "fit", _refuse):
            module, data, options = self.read()
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
        return module, {} if data is None else {name: data}, quiet_options({**options, **self.options}, accelerator)


@dataclass(frozen=True)
class Settings:
    """How to verify, as `verify` is told."""

    devices: int = 2
    steps: int = 3
    accelerator: str = "cpu"
    single: bool = False
    tolerance: float | None = None  # None for what the precision needs

    @property
    def largest_difference(self) -> float:
        """The relative difference up to which values are equal."""
        return self.tolerance or (1e-4 if self.single else 1e-8)

    def __post_init__(self) -> None:
        if Trainer.fit is _refuse:
            _refuse()
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
