"""What must hold before a run begins: its processes can be started, are as many as expected, and are parts of one run.

`Registered` gives strategies the names by which users select them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import lightning
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.parameter import is_lazy

from lightning_gradavg._support.collectives import Contribution, World
from lightning_gradavg._support.text import by_value

__all__ = ["Registered", "plain", "require_launch", "require_one_run"]


def require_launch(strategy: DDPStrategy, start_method: str) -> None:
    """Refuse what cannot start the processes of a strategy; have its launcher accept uneven nodes of torchrun.

    The strategy calls this when Lightning has made its launcher (`_configure_launcher`).
    """
    _require_script(strategy, start_method)
    _require_number_of_tasks(strategy)
    _accept_uneven_nodes(strategy)


def _require_script(strategy: DDPStrategy, start_method: str) -> None:
    """Refuse a notebook, or an interactive Python, from which the start method starts nothing.

    Lightning refuses it next, and names strategies of its own.
    """
    launcher: Any = strategy.launcher
    is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    if is_interactive and not launcher.is_interactive_compatible:
        raise MisconfigurationException(
            f"start_method={start_method!r} starts the script again in every process, which no notebook can."
            f" Use {type(strategy).__name__}(start_method='fork'), or Trainer(strategy='gradavg_notebook')."
        )


def _require_number_of_tasks(strategy: DDPStrategy) -> None:
    """Refuse another number of SLURM's tasks than the Trainer has devices: the ranks would wait for each other.

    Where nodes have different numbers of tasks, no product of devices and nodes is their number: nothing is refused.
    """
    if not isinstance(strategy.cluster_environment, SLURMEnvironment):
        return
    devices, nodes = strategy.num_processes, strategy.num_nodes
    expected = str(devices * nodes)
    tasks = os.environ.get("SLURM_NTASKS", expected)
    is_uneven = "," in os.environ.get("SLURM_TASKS_PER_NODE", "")  # as 2,1; of even nodes it is 2(x2)
    if tasks != expected and not is_uneven:
        raise MisconfigurationException(
            f"SLURM started SLURM_NTASKS={tasks} processes, but Trainer(devices={devices}, num_nodes={nodes}) trains on"
            f" {expected}. Set #SBATCH --nodes={nodes} --ntasks-per-node={devices} and start the script by srun,"
            " or change devices and num_nodes."
        )


def _accept_uneven_nodes(strategy: DDPStrategy) -> None:
    """Have Lightning's launcher compare the number of torchrun's ranks with itself, instead of a product.

    `TorchElasticEnvironment.validate_settings` multiplies the processes of this node by the nodes, which is another
    number where nodes are uneven (`tests/test_ranks_faults.py::test_uneven_nodes_of_torchrun`). It is replaced only if
    the Trainer has torchrun's numbers of processes on this node and of nodes.
    """
    environment = strategy.cluster_environment
    if not isinstance(environment, TorchElasticEnvironment):
        return
    launcher: Any = strategy.launcher
    processes_of_node = os.environ.get("LOCAL_WORLD_SIZE")
    nodes = os.environ.get("GROUP_WORLD_SIZE")
    if processes_of_node == str(strategy.num_processes) and nodes == str(strategy.num_nodes):
        launcher.num_processes = environment.world_size()
        launcher.num_nodes = 1


_OPTIONS_OF_TRAINER = (
    "max_epochs",
    "max_steps",
    "accumulate_grad_batches",
    "limit_train_batches",
    "limit_val_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "precision",
    "gradient_clip_val",
)
"""The Trainer's options that `require_one_run` compares. Ranks that differ in these wait for ever, or drift apart."""


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a strategy that are numbers or texts, which `require_one_run` compares by their `repr`."""
    return {name: value for name, value in options.items() if isinstance(value, (int, float, str))}


def require_one_run(world: World, trainer: Trainer, module: LightningModule, options: Mapping[str, Any]) -> None:
    """Raise a RuntimeError on all ranks unless they are parts of one run. A collective operation.

    They are if packages, options of strategy and Trainer, and the module's class and parameters are equal, and no two
    ranks have one place. The strategy's `setup` calls this first: whatever comes next, ranks of different runs would
    wait for each other in it.

    Args:
        world: All ranks.
        trainer: The Trainer, whose `_OPTIONS_OF_TRAINER` are compared.
        module: The user's module.
        options: The strategy's `plain` options.
    """
    if world.size == 1:
        return
    strategy: Any = trainer.strategy
    refusal = "the ranks are in different runs (start the same script in the same environment on all of them)"
    # Raises if the descriptions differ. Places must differ, so each rank gets those of all.
    agreement = world.agree(
        refusal,
        lambda: Contribution(_description(trainer, module, options), [strategy.node_rank, strategy.local_rank]),
        RuntimeError,
    )
    places = [tuple(place) for place in agreement.of_ranks.details]
    if len(set(places)) < len(places):
        raise RuntimeError(
            f"two processes share a place: (node, rank on the node) is {by_value(places)}. Give every node its own"
            " NODE_RANK and every process of a node its own LOCAL_RANK, or let one launcher set both."
        )


def _description(trainer: Trainer, module: LightningModule, options: Mapping[str, object]) -> list[str]:
    """Return the lines that are the same on all ranks of one run."""
    strategy = type(trainer.strategy).__name__
    lines = [
        f"Python {sys.version_info.major}.{sys.version_info.minor}",
        f"torch {torch.__version__}",
        f"Lightning {lightning.__version__}",
    ]
    for name in _OPTIONS_OF_TRAINER:
        lines.append(f"Trainer({name}={getattr(trainer, name)!r})")
    for name, value in options.items():
        lines.append(f"{strategy}({name}={value!r})")
    lines.append(f"a module of the class {type(module).__module__}.{type(module).__qualname__}")
    for name, parameter in module.named_parameters():
        lines.append(f"the parameter {name} of {_shape(parameter)}")
    return lines


def _shape(parameter: torch.nn.Parameter) -> str:
    if is_lazy(parameter):
        return "unknown shape"
    return f"shape {tuple(parameter.shape)} and {parameter.dtype}"


class Registered:
    """The base of strategies that users may select by a name, as in `Trainer(strategy="gradavg")`."""

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The names, each with the options that the strategy has under it."""

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names of this strategy; `lightning_gradavg/__init__.py` calls this when it is imported.

        The registry is that of Lightning's Trainer or of Fabric. Doing it again changes nothing.
        """
        for name, options in cls.names.items():
            strategy_registry.register(name, cls, description=f"{cls.__name__} {options}", override=True, **options)
