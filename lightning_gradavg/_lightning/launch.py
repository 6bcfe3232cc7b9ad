"""What must hold before a run begins: that its processes can be started, their number, and that they are equal."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import lightning
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.parameter import is_lazy

from lightning_gradavg._support.collectives import Contribution, World, by_value

__all__ = ["Registered", "plain", "require_launch", "require_one_run"]


def require_launch(strategy: Any, start_method: str) -> None:
    """Refuse what cannot start the processes of a `DDPStrategy`; have its launcher accept uneven nodes of torchrun."""
    launcher, environment = strategy.launcher, strategy.cluster_environment
    if (hasattr(sys, "ps1") or sys.flags.interactive) and not launcher.is_interactive_compatible:
        raise MisconfigurationException(
            f"start_method={start_method!r} starts the script again in every process, which no notebook can."
            f" Use {type(strategy).__name__}(start_method='fork'), or Trainer(strategy='gradavg_notebook')."
        )
    devices, nodes = strategy.num_processes, strategy.num_nodes
    tasks = os.environ.get("SLURM_NTASKS", str(devices * nodes))
    uneven = "," in os.environ.get("SLURM_TASKS_PER_NODE", "")  # as 2,1; of even nodes it is 2(x2)
    if isinstance(environment, SLURMEnvironment) and tasks != str(devices * nodes) and not uneven:
        raise MisconfigurationException(
            f"SLURM started SLURM_NTASKS={tasks} processes, but Trainer(devices={devices}, num_nodes={nodes}) trains on"
            f" {devices * nodes}. Set #SBATCH --nodes={nodes} --ntasks-per-node={devices} and start the script by srun,"
            " or change devices and num_nodes."
        )
    # torchrun tells of this node and of all; their product, which Lightning compares, is wrong for uneven nodes.
    started = [os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")]
    if isinstance(environment, TorchElasticEnvironment) and started == [str(devices), str(nodes)]:
        launcher.num_processes, launcher.num_nodes = environment.world_size(), 1


# Ranks that differ in these wait for each other for ever, or drift apart.
_OPTIONS_OF_TRAINER = (
    *("max_epochs", "max_steps", "accumulate_grad_batches", "limit_train_batches", "limit_val_batches"),
    *("val_check_interval", "check_val_every_n_epoch", "precision", "gradient_clip_val"),
)


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are numbers or texts, which processes can compare."""
    return {name: value for name, value in options.items() if isinstance(value, (int, float, str))}


def require_one_run(world: World, trainer: Trainer, module: LightningModule, options: Mapping[str, Any]) -> None:
    """Raise a RuntimeError on all ranks, before any waits for another, unless they are parts of one run.

    They are if packages, options of strategy and Trainer, and the module's class and parameters are equal, and no two
    ranks have one place. A collective operation.
    """
    if world.size == 1:
        return
    strategy: Any = trainer.strategy

    def described() -> Contribution:
        equal = [
            f"Python {sys.version_info.major}.{sys.version_info.minor}",
            f"torch {torch.__version__}",
            f"Lightning {lightning.__version__}",
            *(f"Trainer({name}={getattr(trainer, name)!r})" for name in _OPTIONS_OF_TRAINER),
            *(f"{type(strategy).__name__}({name}={value!r})" for name, value in options.items()),
            f"a module of the class {type(module).__module__}.{type(module).__qualname__}",
            *(f"the parameter {name} of {_shape(one)}" for name, one in module.named_parameters()),
        ]
        return Contribution(equal, [strategy.node_rank, strategy.local_rank])

    refusal = "the ranks are in different runs (start the same script in the same environment on all of them)"
    places = [tuple(place) for place in world.agree(refusal, described, RuntimeError)[1].details]
    if len(set(places)) < len(places):
        raise RuntimeError(
            f"two processes share a place: (node, rank on the node) is {by_value(places)}. Give every node its own"
            " NODE_RANK and every process of a node its own LOCAL_RANK, or let one launcher set both."
        )


class Registered:
    """A strategy that users may give by names."""

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The options of the strategy under each of them."""

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names of this strategy. Doing it again changes nothing."""
        for name, options in cls.names.items():
            strategy_registry.register(name, cls, description=f"{cls.__name__} {options}", override=True, **options)


def _shape(parameter: torch.nn.Parameter) -> str:
    known = not is_lazy(parameter)
    return f"shape {tuple(parameter.shape)} and {parameter.dtype}" if known else "unknown shape"
