"""A pytest plug-in for Lightning's own tests, which stay as they are; loaded by `-p swapped` before any is imported.

GradAvgStrategy stands wherever they name DDPStrategy: the names of DDP in the registry make ours, and Lightning's own
modules keep the class that ours inherits from.
"""

from __future__ import annotations

import lightning.pytorch.strategies
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry, ddp

from lightning_gradavg import GradAvgStrategy

for registered in StrategyRegistry.values():
    if registered["strategy"] is DDPStrategy:
        registered["strategy"] = GradAvgStrategy
for module in (lightning.pytorch.strategies, ddp):
    vars(module)["DDPStrategy"] = GradAvgStrategy
