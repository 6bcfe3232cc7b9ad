"""The reduction of a run whose bits do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_gradavg.lightning_internals import backend_name
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.accumulation import Accumulation
from lightning_gradavg.reduction.hooks import OwnGroups
from lightning_gradavg.reduction.loss import WeighedLoss
from lightning_gradavg.reduction.reduction import Reduction
from lightning_gradavg.reproducible.accumulation import (
    ReplicaAccumulation,
    ReplicaReducer,
    ReplicaSums,
    ReplicaWindow,
)
from lightning_gradavg.reproducible.sum import TreeSum

__all__ = ["TreeReduction"]


class TreeReduction(Reduction):
    """Reduces the gradients of all replicas in one order on any number of ranks.

    Args:
        replicas: Replicas of each loader batch.
        given: What `Reduction` takes.
    """

    def __init__(self, *given: Any, replicas: int, **named: Any) -> None:
        super().__init__(*given, **named)
        self._replicas = replicas

    def _accumulate(
        self, own: OwnGroups, parameters: list[nn.Parameter], trained: list[tuple[str, nn.Parameter]]
    ) -> Accumulation:
        run, world = self.run, World.of(self.run.ddp.process_group)
        sparse = [name for name, parameter in trained if id(parameter) in self.sparse]
        if sparse:
            raise ValueError(
                f"reproducible=True does not serve sparse gradients, as {', '.join(sparse)} would have. Make the"
                " embedding with sparse=False."
            )
        ignored = sorted(run.ddp.parameters_to_ignore & {name for name, _ in trained})
        if ignored:
            raise ValueError(
                f"reproducible=True does not serve parameters that each rank trains for itself, as DDP was told of"
                f" {', '.join(ignored)}. Do not have it ignore them, or freeze them."
            )
        backend = backend_name(run.ddp.process_group, run.device)
        if (run.device.type == "cpu") != (backend == "gloo"):
            raise ValueError(
                f"reproducible=True works on gloo for CPUs and on NCCL and its like for accelerators; this is {backend}"
                f" on {run.device.type}. Choose process_group_backend accordingly, or leave the option out."
            )
        each = self._replicas // world.size
        sums = ReplicaSums(self._replicas, range(world.rank * each, (world.rank + 1) * each), parameters)
        reducer = ReplicaReducer(
            self.rule,
            run.places,
            run.ddp.process_group,
            run.device,
            TreeSum(self._replicas, world, run.ddp.process_group, sums, own),
            window=partial(ReplicaWindow, replicas=self._replicas),
        )
        self._of_replicas = ReplicaAccumulation(reducer, parameters, sums, finds_unused=run.ddp.find_unused_parameters)
        return self._of_replicas

    def backward(
        self, loss: WeighedLoss, root: Tensor, run: Callable[..., None], *, first: bool = True, final: bool = True
    ) -> None:
        """Run the backward of one of a step's losses: that of the rank's first replica, or of the next."""
        self._of_replicas.begin(first=first, ends=self.ends_window(final=True))
        super().backward(loss, root, run, first=first, final=final)
