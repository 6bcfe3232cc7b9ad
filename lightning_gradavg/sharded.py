"""The strategy that users name where the model is sharded: the rules of the reduction on Lightning's FSDP2 engine."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gradavg.arguments import refuse_unknown
from lightning_gradavg.batches.part import Batches
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.comm_hook import CommHook
from lightning_gradavg.reduction.manual import ManualSteps
from lightning_gradavg.reduction.reduction import Reduction
from lightning_gradavg.reduction.sharded import (
    REFUSED,
    ShardedAccumulation,
    ShardedModel,
    ShardedWeights,
    sharded_rule,
)
from lightning_gradavg.reduction.weights import MicroBatch
from lightning_gradavg.training import WeighedTraining

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["GradAvgModelParallelStrategy"]


class _ShardedReduction(Reduction):
    """Weighs each micro-batch's loss, and finishes what the engine averaged."""

    _of_shards: ShardedAccumulation | None = None

    def shard(self, mesh: DeviceMesh, optimizers: list[Optimizer]) -> ShardedModel:
        """Begin a run that trains, with the module sharded. A collective operation."""
        model, manual = ShardedModel(self.run.module, mesh), not self.run.module.automatic_optimization
        giver = "training_step returned" if not manual else "manual_backward was given"
        self._weights = ShardedWeights(model, self.rule, self.run.device, giver, self.warn, self._tell_once)
        self.look_at = self._weights.look_at
        # Nothing to compare: the engine averages the gradients of every backward.
        self.manual = ManualSteps(World(), self.rule.name, self.warn) if manual else None
        self._parameters, self._sparse, self._reduces_first = [], [], False
        self.window = model.window(self.rule, manual=manual)
        self._accumulation = self._of_shards = ShardedAccumulation(self.window, model, optimizers, owned_by_user=manual)
        return model

    @override
    def teardown(self) -> None:
        if self._of_shards is not None:
            self._of_shards.close()

    @override
    def _stand_in(self, micro_batch: MicroBatch) -> Tensor:
        raise RuntimeError(
            "training_step returned no loss where the model is sharded: the other ranks need the backward of this"
            ' one. Return {"loss": loss, "weight": 0}, with a loss computed from the model\'s output.'
        )

    @override
    def _without_loss(self, output: Any, *, counts: bool) -> Any:
        return self._stand_in(MicroBatch({}))

    @override
    def _reduce_apart(self) -> None:
        """Leave it: there are no such parameters."""


class GradAvgModelParallelStrategy(WeighedTraining, ModelParallelStrategy):
    """Trains a sharded model by the gradient of a stated rule, over all ranks and micro-batches.

    Shard the model in `configure_model`, as with Lightning's `ModelParallelStrategy`: by `fully_shard` (FSDP2, or HSDP
    on a mesh of two dimensions), with or without tensor parallelism. Pass weights as with `GradAvgStrategy`: return
    `{"loss": loss, "weight": n}`, or call `self.manual_backward(loss, weight=n)`. Ranks of one tensor-parallel group
    pass equal weights. See docs/sharded.md.

    Args:
        reduction: The name of a rule: `"mean"`, `"sum"`, `"weighted_mean"` or `"normalized_sum"`. See
            `lightning_gradavg.rules`.
        data_parallel_size: As in `ModelParallelStrategy`.
        tensor_parallel_size: As in `ModelParallelStrategy`.
        save_distributed_checkpoint: As in `ModelParallelStrategy`.
        process_group_backend: As in `ModelParallelStrategy`.
        timeout: As in `ModelParallelStrategy`.
        refused: Nothing: other options of `GradAvgStrategy` are errors that say why.

    Raises:
        ValueError: If `reduction` names no rule, or none for sharded models.
        TypeError: If an option is unknown, or cannot be served where the model is sharded.
    """

    _reduction: _ShardedReduction

    def __init__(
        self,
        *,
        reduction: Literal["mean", "sum", "weighted_mean", "normalized_sum"] = "mean",
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **refused: Any,
    ) -> None:
        known = [*inspect.signature(GradAvgModelParallelStrategy.__init__).parameters][1:-1]
        refuse_unknown(type(self).__name__, refused, known, REFUSED, "served where the model is sharded")
        rule = sharded_rule(reduction)
        super().__init__(
            data_parallel_size, tensor_parallel_size, save_distributed_checkpoint, process_group_backend, timeout
        )
        self._reduction = _ShardedReduction(rule, CommHook(None, None, None))
        self._batches = Batches()
        self._parts = self._reduction, self._batches
        self._plain = {"reduction": rule.name}

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the name of this strategy. Doing it again changes nothing."""
        strategy_registry.register("gradavg_model_parallel", cls, description=cls.__name__, override=True)

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self._trains:
            model = self._reduction.shard(self.device_mesh, self.optimizers)
            rule, window = self._reduction.rule, trainer.accumulate_grad_batches
            rank_zero_info(
                f"{type(self).__name__}: reduction={rule.name!r}, g = {rule.formula};"
                f" {model.ranks} data-parallel x {model.peers.size} tensor-parallel ranks ({dist.get_backend()});"
                f" windows of {window} micro-batch{'es' * (window > 1)}"
            )
