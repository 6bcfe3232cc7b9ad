"""Error and time of the communication hooks: `python -m benchmarks.hooks --ranks 8 --nodes 2`.

The error is the relative L2 error of the mean of random gradients against float64, of float32 and of bfloat16; the time
is that of 45 MB of float32 in three buckets, without a model, median and quartiles over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook

from benchmarks.world import is_rank, joined, start
from lightning_gradavg import hooks

__all__ = ["main"]

HOOKS: dict[str, Any] = {name: getattr(hooks, name) for name in hooks.__all__}
HOOKS |= {"torch's allreduce_hook": allreduce_hook, "torch's bf16_compress_hook": bf16_compress_hook}
ELEMENTS = 1_000_000
BUCKETS = (262_144, 6_553_600, 4_367_360)


def _bucket(gradients: Tensor, *, last: bool = True) -> Any:
    """Return what a hook reads of a bucket of DDP."""
    return SimpleNamespace(buffer=lambda: gradients, is_last=lambda: last)


def _error(hook: Any, dtype: torch.dtype) -> float:
    own = [
        torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(rank)) for rank in range(dist.get_world_size())
    ]
    exact = torch.stack([one.to(dtype).double() for one in own]).mean(0)
    found = hook(None, _bucket(own[dist.get_rank()].to(dtype))).wait()
    return float((found - exact).norm() / exact.norm())


def _milliseconds(hook: Any, rounds: int) -> list[float]:
    buckets, taken = [_bucket(torch.randn(size), last=size == BUCKETS[-1]) for size in BUCKETS], []
    for _ in range(rounds + 2):
        dist.barrier()
        begun = time.perf_counter()
        for future in [hook(None, bucket) for bucket in buckets]:
            future.wait()
        taken.append(1000 * (time.perf_counter() - begun))
    return statistics.quantiles(taken[2:], n=4)


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
            errors = [_error(hook, dtype) for dtype in (torch.float32, torch.bfloat16)]
            low, median, high = _milliseconds(hook, arguments.rounds)
            if dist.get_rank() == 0:
                line = f"{name:28s} {errors[0]:.2e} {errors[1]:.2e}  {median:4.0f} [{low:.0f}, {high:.0f}] ms"
                print(line, flush=True)  # noqa: T201  # a benchmark prints


if __name__ == "__main__":
    main()
