"""What the rows of `cases.py` are made of: ways to train, special micro-batches, and rules and hooks of a user."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

NAN = math.nan
INF = math.inf

# The ways to train. `test_ranks_cases.py` has a function for each, in `WAY_OF`.
#
#   automatic   Trainer, automatic optimization: Lightning says where a window ends
#   manual      Trainer, manual optimization
#   fabric      Fabric
#   reducer     torch DDP and `GradAvgReducer`
#   average     `average_gradients`, which has no windows of several micro-batches
#   sharded     Trainer, FSDP2, `GradAvgModelParallelStrategy`
#   split       Trainer; the ranks share each batch of the loader, which is what a row gives them, end to end
#   twice       Trainer; one Trainer makes two runs, with validation in them
LOOPS = ("manual", "fabric", "reducer")
"""Ways in which the user says where a window ends."""
OF_DDP = ("automatic", *LOOPS)
"""Ways in which DDP reduces the gradients of windows."""
WAYS = (*OF_DDP, "average", "sharded")
"""Ways of a row that names none."""
OF_SHARDED = ("mean", "sum", "weighted_mean", "normalized_sum")
"""Rules that sharded models know."""

CLEARED = "gradients set to None"
ZEROED = "gradients set to 0"
CLEARS = (CLEARED, ZEROED)
"""Between micro-batches of a loop: what the user does to gradients. It gives up the window that has begun."""

FIRST = ("first",)
SECOND = ("second",)
BOTH = ("first", "second")
"""The parameters of the model of a row, by their names."""


class Fails(NamedTuple):
    """A micro-batch whose backward raises, which ends its window: those after it do not run."""

    gradient: float
    weight: float


class Steep(NamedTuple):
    """A micro-batch of a finite loss whose gradient is NaN."""

    gradient: Any
    weight: Any


class Trains(NamedTuple):
    """A micro-batch from which on some parameters train, and no others."""

    gradient: Any
    weight: Any
    # The names of the parameters that train.
    parameters: Sequence[str] = BOTH
    # Whether the micro-batch ends the window of these parameters. None: the last one of the row's window does.
    ends: bool | None = None


def samples(*gradients: float) -> torch.Tensor:
    """Return a micro-batch of several samples, by the gradients of their losses."""
    return torch.tensor(gradients, dtype=torch.float64)


# Communication hooks of a user. What they multiply by shows whether they were called.


def doubling(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return twice the mean of a bucket."""
    return default_hooks.allreduce_hook(state, bucket).then(lambda done: 2 * done.value())


def tripled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook so that it returns three times its bucket."""

    def wrapped(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket).then(lambda done: 3 * done.value())

    return wrapped
