"""Proof on the user's own model: a run on several processes against one process that trains freely."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule

from lightning_gradavg.verify.report import Report

__all__ = ["Report", "verify"]


def verify(
    module: LightningModule | Callable[..., LightningModule] | str,
    data: Any = None,
    *,
    strategy: Any = "ddp",
    devices: int = 2,
    steps: int = 3,
    tolerance: float | None = None,
    precision: str = "64-true",
    seed: int = 0,
    **trainer_options: Any,
) -> Report:
    """Train a few steps on `devices` processes and on one, all on the CPU, and say whether the results are equal.

    Arguments are pickled to send them to the processes.

    Args:
        module: A module, or a function without arguments that returns one, such as its class, or `file.py:Name`.
        data: A data module, a training loader, or a function that returns one of them, or `file.py:Name`.
        strategy: The strategy to verify: a name or an instance, `DDPStrategy` or a subclass such as `GradAvgStrategy`,
            or of sharded models `ModelParallelStrategy` or `GradAvgModelParallelStrategy`.
        devices: The number of processes.
        steps: The number of global batches.
        tolerance: The largest relative difference that counts as equal; default: 1e-8, in "32-true" 1e-4.
        precision: What both runs compute in: "64-true", or "32-true" for models that cannot compute in float64.
        seed: The seed that every process sets before it builds the model.
        **trainer_options: Further options of the Trainer.

    Returns:
        The report, which is true if the runs are equal; `print` shows what the command prints. `report.verdict` is
        "equal", "different" or "not shown", and `report.first` is the first cause.

    Raises:
        ValueError: If an option is out of range.
        RuntimeError: If one of the processes failed, with the last line of the user's code.
    """
    from lightning_gradavg.verify import run, target  # noqa: PLC0415  # a script that trains does not need them

    settings = run.Settings(devices, steps, tolerance, precision)
    read = partial(target.user_run_of, module, data)
    return run.verify_target(target.Target(read, {**trainer_options, "strategy": strategy}, seed), settings)
