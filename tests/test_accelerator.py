"""On a device that is not the CPU: values equal those of the CPU, and waits of the host and operators are as stated."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path as File
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerator import Wait, counts, waits
from accelerator_paths import PATHS, SIMULATED, OneGpu, Outcome, Path, perform, trainer_on
from ranks import RankPool, on_ranks
from rich.console import Console
from rich.table import Table

import lightning_gradavg
from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.reduction.weights import as_weight

Worlds = Callable[[int], RankPool]
Found = tuple[Outcome, dict[str, float]]
PACKAGE = str(File(lightning_gradavg.__file__).parent)
ASKED = ("collectives", "operators", "copies to the host")
PAGE = File(__file__).parent.parent / "docs" / "accelerators.md"
TIMED = ("stock DDPStrategy", "mean", "weights on the host", "weighted_mean", "hooks.bfloat16")
COUNTED_ON_CUDA = ("kernels", "waits", "times stock's step")
WAITED = "called a synchronizing CUDA operation"


def run_beside_the_cpu(body: Callable[[str], Found], name: str, pools: Worlds, world: Worlds) -> list[dict[str, float]]:
    """Run a path on a device, assert that every rank gets what it gets on the CPU, and return what they count."""
    path = PATHS[name]
    ranks = len(path.nodes)
    found, on_cpu = pools(ranks).run(body, name), world(ranks).run(perform, name, "cpu")
    # Kernels of a GPU add up float32 in another order than those of the CPU.
    tolerance = path.tolerance if body is on_sim else max(path.tolerance, 2e-5)
    for (outcome, _), (expected, _) in zip(found, on_cpu, strict=True):
        assert [one.shape for one in outcome] == [one.shape for one in expected]
        for mine, its in zip(outcome, expected, strict=True):
            assert (mine - its).norm() <= tolerance * its.norm().clamp(min=1e-12)
    return [counted for _, counted in found]


def on_sim(name: str) -> Found:
    """Body: run a path, and count the waits per step at lines of the package."""
    with waits() as found:
        return perform(name, "sim", {"waits": lambda: sum(wait.where.startswith(PACKAGE) for wait in found)})


@pytest.mark.parametrize("name", SIMULATED)
def test_a_path_equals_that_on_the_cpu_and_waits_as_stated(name: str, sim_world: Worlds, world: Worlds) -> None:
    for counted in run_beside_the_cpu(on_sim, name, sim_world, world):
        assert PATHS[name].waits in (None, counted.get("waits"))


class OnCuda:
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


def on_cuda(name: str) -> Found:
    """Body: run a path, and count."""
    cuda = OnCuda()
    with warnings.catch_warnings():
        warnings.showwarning = cuda.note  # type: ignore[assignment]  # takes whatever it is called with
        warnings.filterwarnings("always", WAITED)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            return perform(name, "cuda", {"waits": lambda: cuda.waits, "kernels": cuda.of_kernels})
        finally:
            torch.cuda.set_sync_debug_mode("default")


def step_seconds(path: Path, device: str) -> float:
    """Body: return how long a step takes, the mean of many."""

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    return path.body(path, device, {"seconds": now})[1]["seconds"]


def times_of_stock(name: str, pool: RankPool, device: str, steps: int) -> float:
    """Return how many times the time of stock DDP a step takes, on the slowest rank."""
    nodes = PATHS[name].nodes
    ours, stock = (
        max(pool.run(step_seconds, replace(PATHS[one], steps=steps, nodes=nodes), device)) for one in (name, TIMED[0])
    )
    return float(ours / stock)


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """Print a table after the last path: those that are as on the CPU, with what was counted per step."""
    rows = Table("path", *COUNTED_ON_CUDA, title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    yield rows
    Console().print("\n", rows)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PATHS)
def test_a_path_on_cuda_and_nccl(name: str, cuda_world: Worlds, world: Worlds, table: Table) -> None:
    counted, *_ = run_beside_the_cpu(on_cuda, name, cuda_world, world)
    if name in TIMED:
        counted["times stock's step"] = times_of_stock(name, cuda_world(len(PATHS[name].nodes)), "cuda", 300)
    table.add_row(name, *(f"{counted[what]:.4g}" if what in counted else "-" for what in COUNTED_ON_CUDA))


@on_ranks()
def test_all_ranks_of_a_node_have_the_first_gpu() -> None:
    strategy = GradAvgStrategy()
    with patch.object(OneGpu, "is_available", return_value=True):
        trainer_on("cuda", PATHS["monitor"], strategy)
    assert ([torch.device("cuda", 0)] * 2, dist.get_rank()) == (strategy.parallel_devices, strategy.local_rank)


def test_steps_can_be_timed(world: Worlds) -> None:
    assert 0 < times_of_stock("hooks.bfloat16", world(4), "cpu", 5) < 100


def asked(name: str) -> dict[str, float]:
    """Body: return what the device is asked for in an optimizer step."""
    return perform(name, "sim", {what: partial(counts.__getitem__, what) for what in ASKED})[1]


def test_the_page_says_what_a_step_asks_for(sim_world: Worlds) -> None:
    """The table of docs/accelerators.md, counted on rank 0."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text("utf-8").splitlines()]
    stated = {row[0]: row[1:] for row in rows if row and row[0] in PATHS}
    found = {name: sim_world(len(PATHS[name].nodes)).run(asked, name)[0] for name in stated}
    assert {"stock DDPStrategy", "mean", "weighted_mean", "hooks.bfloat16"} <= stated.keys()
    assert {name: [f"{count:g}" for count in counts.values()] for name, counts in found.items()} == stated


def counted_on() -> float:
    count = torch.tensor(3.0, dtype=torch.float64, device="sim")
    weight = as_weight(count, count.device)
    count.add_(4)
    return float(weight)


def test_a_weight_is_what_it_was_when_it_was_given(sim_world: Worlds) -> None:
    assert [3.0, 3.0] == sim_world(2).run(counted_on)


WAITING: dict[str, Callable[[torch.Tensor], object]] = {
    "aten::nonzero": lambda ones: ones[ones > 0],
    "aten::_index_put_impl_": lambda ones: ones.__setitem__(ones > 0, 1.0),
    "copy to the host": lambda ones: torch.empty(4).copy_(ones, non_blocking=True),  # not pinned
    "copy to the device": lambda ones: torch.tensor(1.0, device="sim"),
    "aten::equal": lambda ones: torch.equal(ones, ones),
    "": lambda ones: torch.empty(4, pin_memory=True).copy_(ones, non_blocking=True),
}


def simulate() -> None:
    """Body: find each wait with the line that it is for, and refuse tensors of two devices, as on CUDA."""
    ones = torch.ones(4, device="sim")
    for what, wait in WAITING.items():
        with waits() as found:
            wait(ones)
        line = f"{__file__}:{wait.__code__.co_firstlineno}"
        assert [Wait(what, line)] * bool(what) == found
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        ones + torch.ones(4)


def test_the_simulated_device_notes_what_cuda_would_wait_for(sim_world: Worlds) -> None:
    sim_world(1).run(simulate)
