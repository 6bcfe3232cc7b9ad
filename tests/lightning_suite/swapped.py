"""A pytest plug-in for Lightning's own tests, which stay as they are; loaded by `-p swapped` before any is imported.

With SWAPPED=1 GradAvgStrategy stands wherever they name DDPStrategy: the names of DDP in the registry make ours, and
Lightning's own modules keep the class that ours inherits from.

With RUN_ONLY_CUDA_TESTS=1, by which Lightning's conftest leaves the others out, what they test on up to two GPUs runs
on as many CPU processes. A test that needs CUDA itself fails here, with stock DDP as with ours.
"""

from __future__ import annotations

import os
from typing import Any

import lightning.fabric.utilities.testing._runif as requirements
import lightning.pytorch.strategies
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry, ddp
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.utilities import testing

from lightning_gradavg import GradAvgStrategy

connect, reasons_of = _AcceleratorConnector.__init__, testing._runif_reasons


def connect_to_cpu(self: Any, *, devices: Any = "auto", accelerator: Any = "auto", **options: Any) -> None:
    if accelerator in ("gpu", "cuda"):
        accelerator, devices = "cpu", len(devices) if isinstance(devices, list) else devices
    connect(self, devices=devices, accelerator=accelerator, **options)


if os.environ["SWAPPED"] == "1":
    for registered in StrategyRegistry.values():
        if registered["strategy"] is DDPStrategy:
            registered["strategy"] = GradAvgStrategy
    for module in (lightning.pytorch.strategies, ddp):
        vars(module)["DDPStrategy"] = GradAvgStrategy
if os.environ["RUN_ONLY_CUDA_TESTS"] == "1":
    vars(requirements)["num_cuda_devices"] = lambda: 2
    # Each is run in a process of its own.
    vars(testing)["_runif_reasons"] = lambda **needs: reasons_of(**{**needs, "standalone": False})
    setattr(_AcceleratorConnector, "__init__", connect_to_cpu)  # noqa: B010  # a type checker refuses the assignment
