"""What must be so before processes are started: where they can be, and uneven nodes that torchrun has started."""

from __future__ import annotations

import os
from typing import Any

from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_gradavg.lightning_internals import is_interactive, start_method

__all__ = ["require_launch"]


def require_launch(strategy: Any) -> None:
    """Check that a strategy's launcher can start its processes, and have it accept uneven nodes of torchrun.

    Args:
        strategy: A `DDPStrategy` whose launcher is configured.

    Raises:
        MisconfigurationException: If it starts scripts, and this is a notebook.
    """
    launcher, environment = strategy.launcher, strategy.cluster_environment
    if is_interactive() and not launcher.is_interactive_compatible:
        raise MisconfigurationException(
            f"start_method={start_method(strategy)!r} starts the script again in every process, and a notebook is none."
            f" Use {type(strategy).__name__}(start_method='fork'), or Trainer(strategy='gradavg_notebook')."
        )
    # torchrun tells of this node and of all; their product, which Lightning compares, is wrong for uneven nodes.
    started = [os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")]
    as_stated = started == [str(strategy.num_processes), str(strategy.num_nodes)]
    if as_stated and isinstance(environment, TorchElasticEnvironment):
        launcher.num_processes, launcher.num_nodes = environment.world_size(), 1
