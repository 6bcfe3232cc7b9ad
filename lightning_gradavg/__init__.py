"""Gradient reduction for Lightning that reproduces a named reference run on any number of processes."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_gradavg.collectives.average import average_gradients
from lightning_gradavg.collectives.gather import gather
from lightning_gradavg.monitoring.monitor import GradAvgMonitor
from lightning_gradavg.monitoring.noise_scale import GradientNoiseScale
from lightning_gradavg.place import Place
from lightning_gradavg.profiling.profiler import GradAvgProfiler
from lightning_gradavg.rules import Share
from lightning_gradavg.strategy import GradAvgStrategy
from lightning_gradavg.verify import GradAvgVerifier, verify

__all__ = [
    "GradAvgMonitor",
    "GradAvgProfiler",
    "GradAvgStrategy",
    "GradAvgVerifier",
    "GradientNoiseScale",
    "Place",
    "Share",
    "average_gradients",
    "gather",
    "verify",
]

GradAvgStrategy.register_strategies(StrategyRegistry)
