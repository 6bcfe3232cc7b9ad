"""What is to be verified: how every process builds the module, the data and the Trainer's options, all the same way."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    Timer,
)
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

__all__ = ["Built", "ObjectTarget", "Target", "imported", "quiet_options", "resolve_strategy"]

_SILENCED = (Checkpoint, DeviceStatsMonitor, EarlyStopping, LearningRateMonitor, ModelSummary, ProgressBar, Timer)
"""Callbacks that write, watch or stop, and need a logger or a longer run."""

_QUIET: Mapping[str, Any] = {
    "num_nodes": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "profiler": None,
    "fast_dev_run": False,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
}


@dataclass
class Built:
    """What a target builds.

    Attributes:
        module: The module, before training.
        data: The data arguments of `Trainer.fit`.
        options: The options of the Trainer, the user's strategy among them.
    """

    module: LightningModule
    data: dict[str, Any]
    options: dict[str, Any]


class Target(Protocol):
    """Builds the same in every process. It is sent to them by pickle."""

    def build(self) -> Built:
        """Seed, and build everything anew."""


@dataclass(frozen=True)
class ObjectTarget:
    """A module and its data, as instances or as functions that return them.

    Attributes:
        module: A module, or a function without arguments that returns one, such as its class.
        data: A data module, a training loader, or a function that returns one of them; None where the module has it.
        options: The options of the Trainer.
        seed: What every process seeds before it builds.
    """

    module: LightningModule | Callable[[], LightningModule]
    data: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def build(self) -> Built:
        """Seed, and build everything anew.

        Raises:
            TypeError: If `module` makes no LightningModule.
        """
        seed_everything(self.seed, workers=True, verbose=False)
        module = copy.deepcopy(self.module) if isinstance(self.module, LightningModule) else self.module()
        if not isinstance(module, LightningModule):
            raise TypeError(
                "verify needs a lightning.pytorch.LightningModule, or a function that returns one;"
                f" got {module!r} of type {type(module).__name__}"
            )
        loader = hasattr(self.data, "__iter__")
        data = self.data() if callable(self.data) and not loader else copy.deepcopy(self.data)
        if data is None:
            return Built(module, {}, dict(self.options))
        name = "datamodule" if isinstance(data, LightningDataModule) else "train_dataloaders"
        return Built(module, {name: data}, dict(self.options))


def imported(path: str) -> Any:
    """Return what `package.module:Name` names.

    Raises:
        ValueError: If there is no such thing.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"{path!r} must be written package.module:Name")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{path!r} cannot be imported: {error}") from error
    return found


def resolve_strategy(strategy: Any) -> DDPStrategy:
    """Return a strategy that runs in processes which are there already.

    Raises:
        ValueError: If it is none of DDP's kind: where gradients or weights are sharded there is none to compare.
    """
    if isinstance(strategy, str):
        name = "ddp" if strategy == "auto" else strategy
        if name not in StrategyRegistry:
            raise ValueError(f"strategy={strategy!r} is not registered; use one of {', '.join(sorted(StrategyRegistry))}")
        strategy = StrategyRegistry.get(name)
    if not isinstance(strategy, DDPStrategy):
        raise ValueError(  # noqa: TRY004  # a wrong choice, not a wrong type: strategies come by name, too
            f"verify compares gradients of whole models, as DDPStrategy and GradAvgStrategy reduce them; got"
            f" {type(strategy).__name__}"
        )
    strategy._start_method = "popen"
    return strategy


def quiet_options(options: Mapping[str, Any], accelerator: str) -> dict[str, Any]:
    """Return the options of a Trainer that trains as the user's, but neither logs nor saves nor validates."""
    unknown = [name for name in options if name not in Trainer.__init__.__annotations__ and name != "callbacks"]
    if unknown:
        raise ValueError(f"Trainer has no option {unknown[0]!r}")
    callbacks = options.get("callbacks") or []
    plugins = options.get("plugins") or []
    return {
        **options,
        **_QUIET,
        "accelerator": accelerator,
        "callbacks": [one for one in _as_list(callbacks) if not isinstance(one, _SILENCED)],
        "plugins": [one for one in _as_list(plugins) if not isinstance(one, ClusterEnvironment)],
    }


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]
