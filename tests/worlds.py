"""Fixtures for all tests: the worlds of ranks, and isolation of what Lightning and torch keep per process."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import cache
from typing import Any

import accelerator
import hypothesis
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from ranks import RankPool, ensure_forkserver, isolated

from benchmarks.one_gpu import alone_on_a_gpu

# No deadline and no random examples: a test says the same on every machine and on every run.
hypothesis.settings.register_profile("reproducible", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("reproducible")

# A launcher that starts the tests must not become the launcher that Lightning detects within them.
LAUNCHER_PREFIXES = ("SLURM_", "TORCHELASTIC_", "OMPI_", "JSM_", "LSB_", "PL_", "LT_")
LAUNCHER_NAMES = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)


def pytest_configure(config: pytest.Config) -> None:
    for name in list(os.environ):
        if name in LAUNCHER_NAMES or name.startswith(LAUNCHER_PREFIXES):
            del os.environ[name]
    vars(rank_zero_only)["rank"] = 0  # Lightning read it from the environment when it was imported
    torch.set_num_threads(1)  # as on the ranks: the order of a sum must not depend on the process
    if sys.platform == "linux":
        # For this process and those that it starts. A process that wakes another one goes on: otherwise a rank is
        # preempted with the lock of the connection that it sends on, which gloo's thread tries to take without a pause.
        with suppress(OSError):  # where it is not allowed
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop() -> Any:
    gc.freeze()  # what is imported stays: no collection needs to go through it, here and in ranks
    gc.enable()
    # Before verify starts a fork server, which knows no test modules, and of which a process has one.
    ensure_forkserver()
    return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Whole commands come first: no test takes longer, and the others would wait for them in the end.
    items.sort(key=lambda item: item.path.parent.name != "trainer")
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _isolation() -> Iterator[None]:
    """Leave no process-wide setting and no process group behind."""
    with isolated():
        yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left its process group initialized")


def _pools(**options: Any) -> Iterator[Callable[[int], RankPool]]:
    """Yield a function of the number of ranks. It makes a pool once, and closes all pools at the end."""
    with ExitStack() as stack:

        @cache
        def pool_of(world_size: int) -> RankPool:
            return stack.enter_context(closing(RankPool(world_size, **options)))

        yield pool_of


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], RankPool]]:
    """Return `world(n)`: the pool of n ranks, started once per session and reused by every test."""
    yield from _pools()


@pytest.fixture(scope="session")
def sim_world() -> Iterator[Callable[[int], RankPool]]:
    """Return `sim_world(n)`: like `world`, with one simulated accelerator per rank; skips where torch is too old."""
    if not accelerator.AVAILABLE:
        pytest.skip("this torch cannot have a device whose operators are written in Python")
    yield from _pools(backend=accelerator.BACKEND, prepare=accelerator.load)


@pytest.fixture(scope="session")
def cuda_world() -> Iterator[Callable[[int], RankPool]]:
    """Return `cuda_world(n)`: like `world`, with NCCL, and the first GPU for all ranks."""
    yield from _pools(backend="cpu:gloo,cuda:nccl", prepare=alone_on_a_gpu)
