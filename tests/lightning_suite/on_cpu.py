"""A pytest plug-in: what Lightning tests on up to two GPUs runs on as many CPU processes; the tests stay as they are.

Loaded by `-p on_cpu` before any test is imported, with RUN_ONLY_CUDA_TESTS=1, by which Lightning's conftest leaves the
others out. A test that needs CUDA itself fails here, with stock DDP as with ours.
"""

from __future__ import annotations

from typing import Any

import lightning.fabric.utilities.testing._runif as requirements
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.utilities import testing

connect = _AcceleratorConnector.__init__
reasons_of = testing._runif_reasons


def connect_to_cpu(self: Any, *, devices: Any = "auto", accelerator: Any = "auto", **options: Any) -> None:
    if accelerator in ("gpu", "cuda"):
        accelerator, devices = "cpu", len(devices) if isinstance(devices, list) else devices
    connect(self, devices=devices, accelerator=accelerator, **options)


vars(requirements)["num_cuda_devices"] = lambda: 2
# Each is run in a process of its own.
vars(testing)["_runif_reasons"] = lambda **needs: reasons_of(**{**needs, "standalone": False})
setattr(_AcceleratorConnector, "__init__", connect_to_cpu)  # noqa: B010  # a type checker refuses the assignment
