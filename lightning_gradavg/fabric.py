"""`GradAvgStrategy` for Lightning Fabric: the same reductions, weights and splitting, in a loop of your own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakSet

from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from lightning.fabric.strategies.parallel import ParallelStrategy
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gradavg._lightning.internals import SyncControl
from lightning_gradavg._lightning.launch import Registered
from lightning_gradavg._lightning.options import refuse_unserved
from lightning_gradavg._support.means import averages_integers, mean_of_integers
from lightning_gradavg.batches.loader import SplitLoader, split_batches
from lightning_gradavg.reduction.reducer import GradAvgReducer
from lightning_gradavg.reduction.sharded import ShardedGradients, sharded_options, sharded_rule
from lightning_gradavg.rules import RULES, Rule, RuleFunction, resolve_rule, rule_of_split_batches

__all__ = ["GradAvgModelParallelStrategy", "GradAvgStrategy"]


class _Weighing(Registered, ParallelStrategy):
    """What both strategies do around a backward and a reduction. Its class comes before that of the engine."""

    _rule: Rule
    _reducer: GradAvgReducer  # has the windows, and reduces the gradients of what it weighed
    _loaders: WeakSet[SplitLoader]  # weak, so that a loader that the user drops is freed

    @property
    def samples(self) -> int | None:
        """The samples of the current batch that count, with `split_batches`; 0 if the rank has none of it.

        None outside of a loop over a loader.

        Raises:
            ValueError: If several loaders are passed over at once whose batches differ.
        """
        # A loader tells None outside of a loop over it.
        counts = {loader.samples for loader in self._loaders if loader.samples is not None}
        if len(counts) > 1:
            raise ValueError(
                f"loaders are read at once whose batches have {' and '.join(map(str, counts))} samples on this rank, so"
                " split_batches=True cannot tell which count. Read one loader at a time, and evaluate between epochs."
            )
        if not counts:
            return None
        return counts.pop()

    @override
    def backward(
        self,
        tensor: Tensor,
        module: nn.Module | None,
        *args: Any,
        weight: Any = None,
        **kwargs: Any,
    ) -> None:
        """Run the backward of a loss with its weight. The last backward of a window reduces its gradients."""
        loss = self._reducer.weigh(tensor, weight=weight, samples=self.samples)
        super().backward(loss, module, *args, **kwargs)

    @override
    def all_reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Tensor:
        """Reduce a tensor over the ranks. The mean of integers keeps its decimals, unlike Fabric's."""
        if averages_integers(tensor, reduce_op):
            return mean_of_integers(tensor, lambda wide: self.all_reduce(wide, group, reduce_op))
        reduced: Tensor = super().all_reduce(tensor, group, reduce_op)  # type: ignore[safe-super]  # the engine's
        return reduced


class GradAvgStrategy(_Weighing, DDPStrategy):
    """Trains with Fabric by the gradient of a stated rule.

    Pass the weight with the loss, `fabric.backward(loss, weight=n)`. Micro-batches within
    `fabric.no_backward_sync(model)` belong to the window that ends with the next backward outside of it. Don't divide
    the loss by the window's length, except under the plain mean. Without options this computes the bits of stock DDP.
    For loss terms that have counts of their own, use `lightning_gradavg.global_mean` under the plain mean. Two
    optimizers have windows of their own if each backward freezes the other one's parameters. See docs/reduction.md.

    Args:
        reduction: The name of a rule, or a function `(place, weight) -> Share`. See `lightning_gradavg.rules`.
        split_batches: True if the loaders' batches are the global batches. Every rank gets its contiguous chunk of
            each, and the default weight is the number of its samples.
        options: Options of Fabric's `DDPStrategy` and of `DistributedDataParallel`, by name. The default of
            `gradient_as_bucket_view` is True for every rule but the plain mean, under which this is stock DDP.

    Raises:
        ValueError: If `reduction` names no rule, or an option cannot be combined with it.
        TypeError: If an option is unknown.
    """

    names: ClassVar = {
        "gradavg": {},
        "gradavg_sum": {"reduction": "sum"},
        "gradavg_weighted": {"reduction": "weighted_mean"},
        "gradavg_weighted_mean": {"reduction": "weighted_mean"},  # as the option is called
        "gradavg_spawn": {"start_method": "spawn"},
        "gradavg_fork": {"start_method": "fork"},
        "gradavg_notebook": {"start_method": "fork"},
    }

    def __init__(self, *, reduction: str | RuleFunction = "mean", split_batches: bool = False, **options: Any) -> None:
        own_options = ("reduction", "split_batches")
        refuse_unserved("GradAvgStrategy for Fabric", own_options, options, DDPStrategy, DistributedDataParallel)
        self._rule = resolve_rule(reduction)
        if split_batches:
            self._rule = rule_of_split_batches(self._rule)
        if self._rule != RULES["mean"]:
            options.setdefault("gradient_as_bucket_view", True)  # as in `GradAvgStrategy` for the Trainer
        super().__init__(**options)
        self._splits = split_batches
        self._loaders = WeakSet()
        self._reducer = GradAvgReducer(reduction=self._rule)

    def __repr__(self) -> str:
        # Trainers quote a strategy by its repr when they refuse it.
        return (
            f"{type(self).__name__}(reduction={self._rule.name!r}) [a strategy for lightning.fabric.Fabric; with"
            " Trainer use lightning_gradavg.GradAvgStrategy]"
        )

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:  # type: ignore[override]  # None has Fabric add no sampler
        if self._splits:
            return None
        # `DDPStrategy` multiplies nodes by devices, which is another number where nodes are uneven.
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        if not self._splits:
            return dataloader
        loader = split_batches(dataloader)
        # Fabric's wrapper (`_FabricDataLoader`) shows what is in the `__dict__` of what it wraps, such as `dataset` and
        # `batch_size`. The attributes of our loader win.
        for name, value in vars(dataloader).items():
            vars(loader).setdefault(name, value)
        self._loaders.add(loader)
        return loader

    @override
    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        model = super().setup_module(module)
        self._reducer.register(model, node=self.node_rank)
        return model


class GradAvgModelParallelStrategy(_Weighing, ModelParallelStrategy):
    """Trains a sharded model with Fabric by the gradient of a stated rule.

    Like `GradAvgStrategy`, for `fully_shard` and tensor parallelism: `fabric.backward(loss, weight=n)`, and
    micro-batches within `fabric.no_backward_sync(model)`. Set the optimizer up with `fabric.setup_optimizers`. Without
    options this is Fabric's `ModelParallelStrategy`. See docs/sharded.md.

    Args:
        parallelize_fn: As in Fabric's `ModelParallelStrategy`: it shards a module over a device mesh.
        reduction: The name of a rule: `"mean"`, `"sum"`, `"weighted_mean"` or `"normalized_sum"`.
        options: Options of Fabric's `ModelParallelStrategy`, by name.

    Raises:
        ValueError: If `reduction` names no rule, or none for sharded models.
        TypeError: If an option is unknown.
    """

    _control: SyncControl | None = None  # once a model is set up, but not under the plain mean

    def __init__(self, parallelize_fn: Callable[..., Any], *, reduction: str = "mean", **options: Any) -> None:
        self._rule = sharded_rule(reduction, options, ModelParallelStrategy)
        super().__init__(parallelize_fn, **options)
        self._optimizers_set_up = list[Optimizer]()
        self._loaders = WeakSet()
        self._reducer = GradAvgReducer(reduction=self._rule)

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        model = super().setup_module(module)
        if self._rule == RULES["mean"]:
            return model  # FSDP2 averages
        if self._control is not None:
            raise ValueError("one strategy shards one model, as its checkpoints do: use a strategy for each")
        control = SyncControl(self)
        self._control = control
        # Fabric sets the optimizers up after the model, so the list is still to be filled.
        gradients = ShardedGradients(self._rule, model, self.device_mesh, self._optimizers_set_up)
        options = sharded_options(self._rule, gradients, user_ends_windows=True)
        self._reducer.watch(model, options, gradients, lambda: not control.holding)
        return model

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._optimizers_set_up.append(optimizer)
        return super().setup_optimizer(optimizer)
