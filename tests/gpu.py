"""Every path on CUDA and NCCL, next to the same on the CPU: `python -m tests.gpu`, which prints one table last.

NCCL refuses two ranks on one GPU unless each process has a host id of its own; the traffic then takes the network
transport, as between nodes. `--device cpu` shows that the script works where there is no GPU.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path as File
from typing import Any

import torch

sys.path.insert(0, str(File(__file__).parent))

from accelerator_paths import PATHS, Outcome, perform
from ranks import RankError, RankPool
from rich.console import Console
from rich.table import Table

TIMED = ("stock DDPStrategy", "mean", "weights on the host", "weighted_mean", "hooks.bfloat16")
STEPS = {"cuda": 300, "cpu": 10}
WAITED = "called a synchronizing CUDA operation"


def alone_on_a_gpu() -> None:
    """Have a process count as a host of its own, with kernels of all ranks on the GPU at once. Before NCCL starts."""
    os.environ.update(
        NCCL_HOSTID=f"gradavg-{os.getpid()}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1",
        NCCL_MAX_CTAS="2",
    )
    torch.cuda.set_device(0)


class Counts:
    """Counts from its first call to its second: kernels, and implicit waits that CUDA tells of at lines of ours."""

    def __init__(self) -> None:
        self.waits = 0
        self._profile: Any = None

    def of_kernels(self) -> int:
        if self._profile is None:
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.start()
            return 0
        self._profile.stop()
        return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in self._profile.events())

    def note(self, message: Any, category: Any, filename: str, *rest: Any) -> None:
        self.waits += WAITED in str(message) and "lightning_gradavg" in filename


def counted(name: str, device: str) -> tuple[Outcome, dict[str, float]]:
    """Body: run a path, and count."""
    if device == "cpu":
        return perform(name, device)
    counts = Counts()
    with warnings.catch_warnings():
        warnings.showwarning = counts.note  # type: ignore[assignment]  # takes whatever it is called with
        warnings.filterwarnings("always", WAITED)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            return perform(name, device, {"waits": lambda: counts.waits, "kernels": counts.of_kernels})
        finally:
            torch.cuda.set_sync_debug_mode("default")


def step_seconds(name: str, device: str, nodes: tuple[int, ...]) -> float:
    """Body: return how long a step takes, the mean of many."""
    path = replace(PATHS[name], steps=STEPS[device], nodes=nodes)

    def now() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    return path.body(path, device, {"seconds": now})[1]["seconds"]


def error_of(found: Outcome, expected: Outcome) -> float:
    """Return the largest relative error of what came of a path; infinite where it is something else."""
    if {name: len(values) for name, values in found.items()} != {name: len(its) for name, its in expected.items()}:
        return float("inf")
    pairs = [(torch.tensor(found[name]), torch.tensor(its)) for name, its in expected.items()]
    errors = torch.tensor([float((mine - its).norm() / its.norm().clamp(min=1e-12)) for mine, its in pairs])
    return float(errors.nan_to_num(float("inf")).max())


def check(names: Sequence[str], device: str) -> tuple[Table, bool]:
    """Run paths on the device and on the CPU; return a table, and whether all of them passed."""
    table, passed = Table("path", "ranks", "largest error", "tolerance", "waits", "kernels", "step / stock's"), True
    for ranks in sorted({len(PATHS[name].nodes) for name in names}):
        prepare = alone_on_a_gpu if device == "cuda" else None
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        with closing(RankPool(ranks)) as cpu, closing(RankPool(ranks, backend=backend, prepare=prepare)) as pool:
            for name in [name for name in names if len(PATHS[name].nodes) == ranks]:
                row, right = checked(name, device, cpu, pool)
                table.add_row(name, str(ranks), *row)
                passed = passed and right
                Console().print(name, *row)
    return table, passed


def checked(name: str, device: str, cpu: RankPool, pool: RankPool) -> tuple[list[str], bool]:
    """Return what is known of a path, and whether it is right on all ranks."""
    path = PATHS[name]
    # Kernels of a GPU add up float32 in another order than those of the CPU.
    tolerance = max(path.tolerance, 2e-5)
    try:
        expected = [outcome for outcome, _ in cpu.run(perform, name, "cpu")]
        found = pool.run(counted, name, device)
        times = [slowest(pool, timed, device, path.nodes) for timed in (name, TIMED[0])] if name in TIMED else []
    except RankError as failure:
        return [str(failure).splitlines()[0][:100], f"{tolerance:.1e}", "", "", ""], False
    error = max(error_of(outcome, its) for (outcome, _), its in zip(found, expected, strict=True))
    counts = [f"{found[0][1][key]:g}" if key in found[0][1] else "" for key in ("waits", "kernels")]
    ratio = f"{times[0] / times[1]:.2f}" if times else ""
    return [f"{error:.1e}", f"{tolerance:.1e}", *counts, ratio], error <= tolerance


def slowest(pool: RankPool, name: str, device: str, nodes: tuple[int, ...]) -> float:
    return max(float(of_rank) for of_rank in pool.run(step_seconds, name, device, nodes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the paths; the exit code is 1 if one of them is wrong, and 2 without the device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="paths, with wildcards (default: all)")
    parsed = parser.parse_args(arguments)
    if parsed.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu shows that the script works")
    names = [name for name in PATHS if any(fnmatch.fnmatchcase(name, pattern) for pattern in parsed.only)]
    table, passed = check(names, parsed.device)
    hardware = torch.cuda.get_device_name() if parsed.device == "cuda" else "CPU"
    versions = [f"{package} {version(package)}" for package in ("torch", "lightning", "torchmetrics")]
    table.caption = ", ".join([time.strftime("%Y-%m-%d"), hardware, f"CUDA {torch.version.cuda}", *versions])
    Console().print(table)
    return 0 if passed else 1


if __name__ == "__main__":
    import gpu  # a rank finds the bodies by the module's name

    sys.exit(gpu.main())
