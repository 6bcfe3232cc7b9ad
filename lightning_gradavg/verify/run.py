"""`verify`: the ranks of the user's run, each in a process of its own, and one more process that compares.

`verify_target` goes through these steps:

1. One process for each rank, with the variables that a launcher sets, trains and records (`_rank`).
2. One more process trains alone, and compares (`judge`).

Each process builds module and data anew.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_gradavg._support.arguments import as_count
from lightning_gradavg.verify.judge import judge
from lightning_gradavg.verify.processes import folder_of_run, in_processes
from lightning_gradavg.verify.recorder import Recorder
from lightning_gradavg.verify.records import Record
from lightning_gradavg.verify.report import Report
from lightning_gradavg.verify.target import (
    Options,
    Target,
    is_importing,
    quiet_options,
    resolve_strategy,
    without_types,
)

__all__ = ["Settings", "record_run", "verify_target"]

_TOLERANCES: Mapping[str, float] = {"64-true": 1e-8, "32-true": 1e-4}
"""The relative difference that counts as equal, by the precision."""


@dataclass(frozen=True)
class Settings:
    """How to verify. `lightning_gradavg.verify` says what the options mean, and `gradavg verify --help`."""

    devices: int = 2
    steps: int = 3
    tolerance: float | None = None  # None for that of the precision
    precision: str = "64-true"

    def __post_init__(self) -> None:
        if is_importing():
            raise ImportError('it verifies when it is imported: put that under `if __name__ == "__main__":`')
        as_count("devices", self.devices)
        as_count("steps", self.steps)
        if self.tolerance is not None and not 0 < self.tolerance < math.inf:
            raise ValueError(f"tolerance is a relative difference > 0, got {self.tolerance}")
        if self.precision not in _TOLERANCES:
            known = " and ".join(map(repr, _TOLERANCES))
            raise ValueError(f"precision={self.precision!r} is none of {known}. Leave it out for float64")


def record_run(
    recorder: Recorder,
    strategy: DDPStrategy | ModelParallelStrategy,
    options: Options,
    module: LightningModule,
    data: Options,
) -> Record:
    """Train until all steps are recorded, and return the record of this rank."""
    changed = {
        "plugins": [*without_types(options["plugins"], (Precision,)), recorder.plugin],
        "callbacks": [*options["callbacks"], recorder],
        "strategy": strategy,
    }
    trainer = Trainer(**{**options, **changed})
    with recorder.watching(module):
        trainer.fit(module, **data)
    return recorder.record


def verify_target(target: Target, settings: Settings) -> Report:
    """Run a target on several processes and on one, and return how the two differ."""
    quiet_options(target.options)  # a wrong one is refused before any process starts
    with folder_of_run() as folder:
        calls = [partial(_rank, target, rank, settings, folder) for rank in range(settings.devices)]
        records = in_processes(calls)
    tolerance = settings.tolerance or _TOLERANCES[settings.precision]
    (result,) = in_processes([partial(judge, records, target.build, tolerance, settings.precision)])
    report: Report = result
    return report


def _rank(target: Target, rank: int, settings: Settings, folder: str) -> Record:
    """Return what one rank records. It runs in a process of its own."""
    cores = os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // settings.devices))
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", settings.devices),
        rank=rank,
        world_size=settings.devices,
        timeout=timedelta(seconds=300),
    )
    try:
        module, data, options = target.build()
        strategy = resolve_strategy(options.get("strategy") or "ddp")
        recorder = Recorder(settings.steps, settings.precision)
        options = {**options, "devices": settings.devices}
        return record_run(recorder, strategy, options, module, data)
    finally:
        dist.destroy_process_group()
