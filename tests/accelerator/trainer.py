"""Lightning's view of the simulated device: `Trainer(accelerator="sim")`, and what Lightning has for CUDA alone."""

from __future__ import annotations

from contextlib import nullcontext
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.strategies import DDPStrategy, Strategy
from ranks import make_trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["SimAccelerator", "make_sim_trainer"]


class SimAccelerator(Accelerator):
    """One simulated device per process, whatever the number of ranks on a node: as with CUDA_VISIBLE_DEVICES."""

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device.index)

    def setup(self, trainer: Trainer) -> None:
        if isinstance(trainer.strategy, DDPStrategy):
            trainer.strategy._setup_model = MethodType(_setup_model, trainer.strategy)  # type: ignore[method-assign]

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: int) -> int:
        return devices

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device("sim", 0)] * devices

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "sim"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}


def _setup_model(strategy: DDPStrategy, model: nn.Module) -> DistributedDataParallel:
    """Wrap the model without the side stream that Lightning 2.6.6 asks `torch.cuda` for (strategies/ddp.py:194)."""
    with patch.object(torch.cuda, "Stream", lambda: None), patch.object(torch.cuda, "stream", lambda _: nullcontext()):
        return type(strategy)._setup_model(strategy, model)


def make_sim_trainer(strategy: Strategy | str, **options: Any) -> Trainer:
    """Return a quiet `Trainer` on the simulated device, as `ranks.make_trainer` does for the CPU."""
    if "sim" not in AcceleratorRegistry:
        AcceleratorRegistry.register("sim", SimAccelerator, description="a simulated device")
    return make_trainer(strategy, accelerator="sim", **options)
