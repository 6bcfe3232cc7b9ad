"""`verify`: a few steps of a run on several processes, compared with one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningModule

from lightning_gradavg.verification.compare import compare
from lightning_gradavg.verification.report import Report
from lightning_gradavg.verification.targets import ObjectTarget, Target
from lightning_gradavg.verification.worlds import Settings, run_and_reference

__all__ = ["verify", "verify_target"]


def verify_target(
    target: Target, settings: Settings, *, tolerance: float | None = None, ignore: Sequence[str] = ()
) -> Report:
    """Run a target on several processes and on one, and return how the two differ.

    Raises:
        RuntimeError: If one of the processes failed; with its traceback.
    """
    runs, reference, stream = run_and_reference(target, settings)
    return compare(runs, reference, stream=stream, tolerance=tolerance).without(ignore)


def verify(
    module: LightningModule | Callable[[], LightningModule],
    data: Any = None,
    *,
    strategy: Any = "ddp",
    devices: int = 2,
    steps: int = 3,
    accelerator: str = "cpu",
    double: bool = False,
    tolerance: float | None = None,
    ignore: Sequence[str] = (),
    compare_order: bool = True,
    seed: int = 0,
    **options: Any,
) -> Report:
    """Train a few steps on `devices` processes, and say whether one process would have taken the same.

    Processes are started by `spawn`: a script that calls this keeps the call under `if __name__ == "__main__":`, and
    what it passes can be pickled.

    Args:
        module: A module, or a function without arguments that returns one, such as its class.
        data: A data module, a training loader, or a function that returns one of them.
        strategy: The strategy to verify: a name or an instance, `DDPStrategy` or a subclass such as `GradAvgStrategy`.
        devices: The number of processes.
        steps: The number of optimizer steps.
        accelerator: "cpu", or "cuda" with one GPU per process.
        double: True to compute in float64, which tells rounding from defects.
        tolerance: The largest relative difference that counts as equal; default: 1e-5, in float64 1e-10.
        ignore: Causes that are not to be reported.
        compare_order: Whether to compare the order of samples with that of one process, too.
        seed: What every process seeds before it builds.
        **options: Further options of the Trainer.

    Returns:
        The report. `report.equal` says whether the run is its reference, `report.first` why not.

    Raises:
        ValueError: If an option is out of range.
        RuntimeError: If one of the processes failed; with its traceback.
    """
    settings = Settings(devices, steps, accelerator, double, compare_order)
    target = ObjectTarget(module, data, {**options, "strategy": strategy}, seed)
    return verify_target(target, settings, tolerance=tolerance, ignore=ignore)
