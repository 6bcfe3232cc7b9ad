"""A pytest plug-in: GradAvgStrategy stands wherever Lightning's tests name DDPStrategy; the tests stay as they are.

Loaded by `-p swapped` before any test is imported. The names of DDP in the registry make ours; Lightning's own modules
keep the class that ours inherits from.
"""

from __future__ import annotations

import lightning.pytorch.strategies
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry, ddp

from lightning_gradavg import GradAvgStrategy

for name in list(StrategyRegistry):
    if StrategyRegistry[name]["strategy"] is DDPStrategy:
        StrategyRegistry[name]["strategy"] = GradAvgStrategy
for module in (lightning.pytorch.strategies, ddp):
    vars(module)["DDPStrategy"] = GradAvgStrategy
