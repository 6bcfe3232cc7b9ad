"""The strategy that users name where the model is sharded: the rules of the reduction on Lightning's FSDP2 engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gradavg.batches.part import Batches
from lightning_gradavg.launch import destroy_at_exit, require_alike
from lightning_gradavg.part import Part, Run
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.comm_hook import CommHook
from lightning_gradavg.reduction.gather import losses_weighed
from lightning_gradavg.reduction.manual import ManualSteps
from lightning_gradavg.reduction.reduction import Reduction
from lightning_gradavg.reduction.sharded import (
    ShardedAccumulation,
    ShardedModel,
    ShardedWeights,
    refuse_options,
    refuse_wrapped,
    sharded_rule,
)
from lightning_gradavg.reduction.weights import MicroBatch
from lightning_gradavg.rules import RULES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["GradAvgModelParallelStrategy"]

_OPTIONS = (
    "reduction",
    "data_parallel_size",
    "tensor_parallel_size",
    "save_distributed_checkpoint",
    "process_group_backend",
    "timeout",
)


class _ShardedReduction(Reduction):
    """Weighs each micro-batch's loss, and finishes what the engine averaged."""

    def shard(self, run: Run, mesh: DeviceMesh, optimizers: list[Optimizer]) -> ShardedModel:
        """Begin a run that trains, with the module sharded. A collective operation."""
        Part.configure_ddp(self, run)
        model, manual = ShardedModel(run.module, mesh), not run.module.automatic_optimization
        giver = "training_step returned" if not manual else "manual_backward was given"
        self._weights = ShardedWeights(model, self.rule, run.device, giver, self.warn, self._tell_once)
        self.look_at = self._weights.look_at
        # Nothing to compare: the engine averages the gradients of every backward.
        self.manual = ManualSteps(World(), self.rule.name, self.warn) if manual else None
        self._parameters, self._sparse, self._reduces_first = [], [], False
        self.window = model.window(self.rule, compares=manual and self.rule != RULES["mean"])
        self._accumulation = ShardedAccumulation(self.window, model, optimizers, owned_by_user=manual)
        return model

    @override
    def _without_loss(self, output: Any, *, counts: bool) -> Any:
        return self._stand_in(MicroBatch({}))

    @override
    def _stand_in(self, micro_batch: MicroBatch) -> Tensor:
        raise RuntimeError(
            "training_step returned no loss where the model is sharded: the other ranks need the backward of this"
            ' one. Return {"loss": loss, "weight": 0}, with a loss computed from the model\'s output.'
        )

    @override
    def _reduce_apart(self) -> None:
        """Leave it: there are no such parameters."""


class GradAvgModelParallelStrategy(ModelParallelStrategy):
    """Training of a sharded model whose reduced gradient is that of a stated rule, over all ranks and micro-batches.

    Shard the model in `configure_model`, as with Lightning's `ModelParallelStrategy`: by `fully_shard` (FSDP2, or HSDP
    on a mesh of two dimensions), with tensor parallelism or without. Weights are given as with `GradAvgStrategy`:
    return `{"loss": loss, "weight": n}`, or call `self.manual_backward(loss, weight=n)`. Ranks of one tensor-parallel
    group give the same. See docs/sharded.md.

    Args:
        reduction: The name of a rule: `"mean"`, `"sum"`, `"weighted_mean"` or `"normalized_sum"`. See
            `lightning_gradavg.rules`.
        data_parallel_size: As in `ModelParallelStrategy`, like all that follow.
        tensor_parallel_size: See above.
        save_distributed_checkpoint: See above.
        process_group_backend: See above.
        timeout: See above.
        refused: Nothing: other options of `GradAvgStrategy` are errors that say why.

    Raises:
        ValueError: If `reduction` names no rule, or none for sharded models.
        TypeError: If an option is unknown, or cannot be served where the model is sharded.
    """

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
        refuse_options(refused, _OPTIONS)
        rule = sharded_rule(reduction)
        super().__init__(
            data_parallel_size, tensor_parallel_size, save_distributed_checkpoint, process_group_backend, timeout
        )
        self._reduction = _ShardedReduction(rule, CommHook(None, None, None), on_weighed=lambda *_: None)
        self._batches = Batches()
        self._prepares: str | None = None

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the name of this strategy. Doing it again changes nothing."""
        strategy_registry.register("gradavg_model_parallel", cls, description=cls.__name__, override=True)

    @override
    def setup_environment(self) -> None:
        """Join the process group, and see to its end."""
        ours = not dist.is_initialized()
        super().setup_environment()
        if ours:
            destroy_at_exit()

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        run = Run(trainer, module, self.root_device, World.of(None))
        self._reduction.setup(run)
        self._batches.setup(run)
        trains = trainer.state.fn == TrainerFn.FITTING
        if trains:
            refuse_wrapped(module)
            require_alike(run.world, trainer, module, {"reduction": self._reduction.rule.name})
        super().setup(trainer)
        if trains:
            model = self._reduction.shard(run, self.device_mesh, self.optimizers)
            rule, window = self._reduction.rule, trainer.accumulate_grad_batches
            rank_zero_info(
                f"{type(self).__name__}: reduction={rule.name!r}, g = {rule.formula};"
                f" {model.ranks} data-parallel x {model.peers.size} tensor-parallel ranks ({dist.get_backend()});"
                f" windows of {window} micro-batch{'es' * (window > 1)}"
            )

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. Lightning names the loaders here that it is about to prepare."""
        super().barrier(name)
        if name is not None and name.endswith("_dataloader()"):
            self._prepares = name.removesuffix("_dataloader()")

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        module = self.lightning_module
        trains = module is not None and module.trainer.state.fn == TrainerFn.FITTING
        return self._batches.process_dataloader(dataloader) if trains and self._prepares == "train" else dataloader

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self.lightning_module is not None and self.lightning_module.trainer.training:
            self._reduction.look_at(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        assert self.lightning_module is not None
        batch = args[0] if args else next(iter(kwargs.values()), None)
        self._reduction.begin_step(batch, self._batches.missing)
        with self._batches.training_step(), losses_weighed():
            output = super().training_step(*args, **kwargs)
        return self._reduction.read(output, self._samples) if self._reduction.manual is None else output

    @property
    def _samples(self) -> int | None:
        """0 for a batch that only keeps the rank busy."""
        return None if self._batches.chunk is None else 0

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Have the window go on after the backward within."""
        self._reduction.hold(holding=True)
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._reduction.hold(holding=False)

    @override
    def backward(
        self, closure_loss: Any, optimizer: Optimizer | None, *args: Any, weight: Any = None, **kwargs: Any
    ) -> Tensor:
        """Run the backward of a step's loss; at the end of a window, finish its gradients."""
        module, precision = self.lightning_module, self.precision_plugin
        assert module is not None
        if self._reduction.manual is not None:
            closure_loss = self._reduction.add(closure_loss, weight, self._samples).value
        (loss,) = self._reduction.take()
        self.pre_backward(closure_loss)
        root = precision.pre_backward(closure_loss, module)
        self._reduction.backward(loss, lambda: precision.backward(root, module, optimizer, *args, **kwargs))
        self._reduction.reduce()
        self._reduction.end_window()
        closed: Tensor = precision.post_backward(root, module)
        self.post_backward(closed)
        return closed

    @override
    def on_train_end(self) -> None:
        """Check the weights of the last step, which no further step does."""
        super().on_train_end()
        self._reduction.check()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            # What is wrong with the last step must not get into a file.
            self._reduction.check()
        super().save_checkpoint(checkpoint, *args, **kwargs)
