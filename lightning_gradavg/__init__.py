"""Gradient reduction for Lightning that reproduces a named reference run on any number of processes."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_gradavg.strategy import GradAvgStrategy

__all__ = ["GradAvgStrategy"]

GradAvgStrategy.register_strategies(StrategyRegistry)
