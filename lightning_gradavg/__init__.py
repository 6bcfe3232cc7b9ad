"""Gradient reduction for Lightning that reproduces a named reference run on any number of processes."""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_gradavg.batches.loader import split_batches
from lightning_gradavg.fabric import GradAvgStrategy as _FabricStrategy
from lightning_gradavg.monitor import GradAvgMonitor
from lightning_gradavg.reduction.average import average_gradients
from lightning_gradavg.reduction.gather import gather
from lightning_gradavg.reduction.global_mean import global_mean
from lightning_gradavg.reduction.reducer import GradAvgReducer
from lightning_gradavg.sharded import GradAvgModelParallelStrategy
from lightning_gradavg.strategy import GradAvgStrategy
from lightning_gradavg.verify import verify

__all__ = [
    "GradAvgModelParallelStrategy",
    "GradAvgMonitor",
    "GradAvgReducer",
    "GradAvgStrategy",
    "average_gradients",
    "gather",
    "global_mean",
    "split_batches",
    "verify",
]

__version__ = "0.2.0"

# So that Trainer(strategy="gradavg") and Fabric(strategy="gradavg") know the names.
GradAvgStrategy.register_strategies(StrategyRegistry)
StrategyRegistry.register("gradavg_model_parallel", GradAvgModelParallelStrategy, override=True)
_FabricStrategy.register_strategies(STRATEGY_REGISTRY)
