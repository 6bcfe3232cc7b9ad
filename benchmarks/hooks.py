"""Error and time of the communication hooks: `python -m benchmarks.hooks --ranks 8 --nodes 2`.

The error is the relative L2 error of the mean of random gradients against float64, of float32 and of bfloat16; the time
is that of 45 MB of float32 in three buckets, without a model, median and quartiles over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook

from benchmarks.world import is_rank, joined, start
from lightning_gradavg import hooks

__all__ = ["main"]

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]

HOOKS: dict[str, Hook] = {
    **{name: getattr(hooks, name) for name in hooks.__all__},
    "torch's allreduce_hook": allreduce_hook,
    "torch's bf16_compress_hook": bf16_compress_hook,
}
ELEMENTS = 1_000_000
"""Of the gradient whose error is measured."""
BUCKETS = (262_144, 6_553_600, 4_367_360)
"""Elements of the buckets whose time is measured."""
WARMUP = 2
"""Rounds that do not count."""


def _bucket(gradients: Tensor, *, last: bool = True) -> Any:
    """Return what a hook reads of a bucket of DDP."""
    return SimpleNamespace(buffer=lambda: gradients, is_last=lambda: last)


def _error(hook: Hook, dtype: torch.dtype) -> float:
    """Return the relative error of a hook's mean. A collective operation: every rank knows the gradients of all."""
    gradients = []
    for rank in range(dist.get_world_size()):
        generator = torch.Generator().manual_seed(rank)
        gradients.append(torch.randn(ELEMENTS, generator=generator).to(dtype))
    exact = torch.stack([gradient.double() for gradient in gradients]).mean(0)
    mean = hook(None, _bucket(gradients[dist.get_rank()])).wait()
    return float((mean - exact).norm() / exact.norm())


def _milliseconds(hook: Hook, rounds: int) -> list[float]:
    """Return the quartiles of the time of all buckets. A collective operation."""
    buckets = []
    for size in BUCKETS:
        buckets.append(_bucket(torch.randn(size), last=size == BUCKETS[-1]))
    milliseconds = []
    for _ in range(WARMUP + rounds):
        dist.barrier()
        started = time.perf_counter()
        # All buckets are under way before the first one is waited for, as in a backward.
        futures = [hook(None, bucket) for bucket in buckets]
        for future in futures:
            future.wait()
        milliseconds.append(1000 * (time.perf_counter() - started))
    return statistics.quantiles(milliseconds[WARMUP:], n=4)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1, help="nodes that the ranks are said to be on")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    if not is_rank():
        start("benchmarks.hooks", arguments.ranks, [f"--nodes={arguments.nodes}", f"--rounds={arguments.rounds}"])
        return
    with joined():
        os.environ["GROUP_RANK"] = str(dist.get_rank() * arguments.nodes // dist.get_world_size())
        for name, hook in HOOKS.items():
            error_of_float32 = _error(hook, torch.float32)
            error_of_bfloat16 = _error(hook, torch.bfloat16)
            low, median, high = _milliseconds(hook, arguments.rounds)
            if dist.get_rank() == 0:
                errors = f"{error_of_float32:.2e} {error_of_bfloat16:.2e}"
                line = f"{name:28s} {errors}  {median:4.0f} [{low:.0f}, {high:.0f}] ms"
                print(line, flush=True)  # noqa: T201  # a benchmark prints


if __name__ == "__main__":
    main()
