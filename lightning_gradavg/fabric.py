"""`GradAvgStrategy` for Lightning Fabric: the same reductions, weights and splitting, in a loop of your own."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakSet

from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gradavg._lightning.launch import Registered
from lightning_gradavg._lightning.options import refuse_unserved
from lightning_gradavg._support.means import averages_integers, mean_of_integers
from lightning_gradavg.batches.loader import SplitLoader, split_batches
from lightning_gradavg.reduction.reducer import GradAvgReducer
from lightning_gradavg.rules import RULES, resolve_rule, rule_of_split_batches

__all__ = ["GradAvgStrategy"]


class GradAvgStrategy(Registered, DDPStrategy):
    """Trains with Fabric by the gradient of a stated rule.

    Pass the weight with the loss, `fabric.backward(loss, weight=n)`. Micro-batches within
    `fabric.no_backward_sync(model)` belong to the window that ends with the next backward outside of it. Don't divide
    the loss by the window's length, except under the plain mean. Without options this computes the bits of stock DDP.
    For loss terms that have counts of their own, use `lightning_gradavg.global_mean` under the plain mean. See
    docs/reduction.md.

    Args:
        reduction: The name of a rule. See `lightning_gradavg.rules`.
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

    # Weak, so that what the user drops is freed. Made when needed: a weak set cannot be pickled, as a strategy is for
    # the processes that Fabric spawns.
    _loaders: WeakSet[SplitLoader] | None = None

    def __init__(self, *, reduction: str = "mean", split_batches: bool = False, **options: Any) -> None:
        own_options = ("reduction", "split_batches")
        refuse_unserved("GradAvgStrategy for Fabric", own_options, options, DDPStrategy, DistributedDataParallel)
        self._rule = resolve_rule(reduction)
        if split_batches:
            self._rule = rule_of_split_batches(self._rule)
        if self._rule != RULES["mean"]:
            options.setdefault("gradient_as_bucket_view", True)  # as in `GradAvgStrategy` for the Trainer
        super().__init__(**options)
        self._splits = split_batches
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
        if self._loaders is None:
            self._loaders = WeakSet()
        self._loaders.add(loader)
        return loader

    @override
    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        model = super().setup_module(module)
        self._reducer.register(model, node=self.node_rank)
        return model

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._reducer.add_optimizer(optimizer)
        return super().setup_optimizer(optimizer)

    @property
    def samples(self) -> int | None:
        """The samples of the current batch that count, with `split_batches`; 0 if the rank has none of it.

        None outside of a loop over a loader.

        Raises:
            ValueError: If several loaders are passed over at once whose batches differ.
        """
        # A loader tells None outside of a loop over it.
        counts = {loader.samples for loader in self._loaders or () if loader.samples is not None}
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
        reduced: Tensor = super().all_reduce(tensor, group, reduce_op)
        return reduced


def __getattr__(name: str) -> Any:
    """Say of a class that Fabric does not have what to use instead."""
    if name == "GradAvgModelParallelStrategy":
        raise ImportError(
            "lightning_gradavg reduces no sharded model in Fabric. Use lightning_gradavg.GradAvgModelParallelStrategy"
            " with Lightning's Trainer; or Fabric's ModelParallelStrategy, whose gradient is the plain mean, with"
            " lightning_gradavg.global_mean for each loss term."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
