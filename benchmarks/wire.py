"""How exact and how steady the wire types are: `python -m benchmarks.wire accuracy`, `python -m benchmarks.wire steps`.

`accuracy` prints, per wire type and number of ranks, the relative L2 error of the sum of random gradients against
float64; next to it stands a ring all-reduce in that type, which is what DDP's own compression hooks do.

`steps` sends many buckets at once for many steps, each rank pausing at random between them, and checks every sum. A
mismatch of collectives between ranks would abort the process or hang.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from benchmarks.ways import WIRE_TYPES
from lightning_gradavg import average_gradients
from lightning_gradavg.place import Place, places_on_nodes
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.hooks import OwnGroups, exchange_sum
from lightning_gradavg.reduction.reducer import BucketSum
from lightning_gradavg.wire.route import WireOptions

__all__ = ["as_bucket", "live_exchange", "main"]

ELEMENTS = 1_000_000
SEEDS = 3


@dataclass(frozen=True)
class Bucket:
    """What an exchange asks of a bucket of DDP."""

    gradient: Tensor

    def buffer(self) -> Tensor:
        """Return the gradients, in one dimension."""
        return self.gradient


def live_exchange(options: WireOptions, places: Sequence[Place], device: torch.device) -> tuple[BucketSum, OwnGroups]:
    """Return what sums buckets over the live process group, and what is to be closed after the last."""
    own = OwnGroups(World.of(None), device, None)
    exchange, reason = exchange_sum(options, places, dist.group.WORLD, device, (), own)
    if exchange is None:
        raise ValueError(f"{options} is an all-reduce on this network: {reason or 'nothing else was asked for'}")
    return exchange, own


def as_bucket(gradient: Tensor) -> GradBucket:
    """Return what an exchange takes for a bucket of DDP."""
    return cast("GradBucket", Bucket(gradient))


def _gradient(kind: str, rank: int, seed: int, size: int) -> Tensor:
    own = torch.randn(size, generator=torch.Generator().manual_seed(1000 * seed + rank + 1))
    if kind == "independent":
        return own
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * seed)) + 0.5 * own


def _errors(kind: str, wire_dtype: str) -> tuple[float, float]:
    """Return the mean error of our sum, and that of a ring."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ours, ring = [], []
    parameter = torch.nn.Parameter(torch.zeros(ELEMENTS))
    for seed in range(SEEDS):
        gradients = [_gradient(kind, other, seed, ELEMENTS) for other in range(world_size)]
        exact = torch.stack(gradients).double().mean(0)
        mine = gradients[rank]
        parameter.grad = mine.clone()
        average_gradients([parameter], wire_dtype=wire_dtype)
        ours.append(float((parameter.grad - exact).norm() / exact.norm()))
        summed = (mine / world_size).to(getattr(torch, wire_dtype))
        dist.all_reduce(summed)
        ring.append(float((summed - exact).norm() / exact.norm()))
    return sum(ours) / SEEDS, sum(ring) / SEEDS


def _accuracy(arguments: argparse.Namespace) -> None:
    for kind in ("independent", "common"):
        for wire_dtype in WIRE_TYPES:
            ours, ring = _errors(kind, wire_dtype)
            if dist.get_rank() == 0:
                _print(f"{arguments.world_size:2d} ranks  {kind:12s} {wire_dtype:9s} {ours:.2e}  ring {ring:.2e}")


def _steps(arguments: argparse.Namespace) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    nodes = [other * arguments.nodes // world_size for other in range(world_size)]
    wire_dtype = None if arguments.wire_dtype == "none" else arguments.wire_dtype
    jitter = random.Random(rank)  # not for secrets
    sizes = [1 + 997 * number % arguments.elements for number in range(arguments.buckets)]
    for repeat in range(arguments.repeats):
        exchange, own = live_exchange(WireOptions(wire_dtype), places_on_nodes(nodes), torch.device("cpu"))
        begun = time.perf_counter()
        buckets = [torch.empty(size) for size in sizes]
        for step in range(arguments.steps):
            futures = []
            for number, bucket in enumerate(buckets):
                bucket.fill_(float(step % 7 + number % 5 + rank))
                futures.append(exchange(as_bucket(bucket)))
                if jitter.random() < arguments.skew:
                    time.sleep(0.001 * jitter.random())
            for number, future in enumerate(futures):
                expected = world_size * (step % 7 + number % 5) + world_size * (world_size - 1) / 2
                found = future.wait()
                if not bool(((found - expected).abs() <= 0.05 * expected + 0.05).all()):
                    raise RuntimeError(f"repeat {repeat}, step {step}, bucket {number}: {found} is not {expected}")
        own.close()
        if rank == 0:
            seconds = time.perf_counter() - begun
            _print(f"repeat {repeat}: {arguments.steps} steps of {len(buckets)} buckets in {seconds:.1f} s")


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201  # a benchmark prints


def _rank(rank: int, folder: str, arguments: argparse.Namespace) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = Path(folder) / "store"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=arguments.world_size,
        timeout=timedelta(seconds=60),
    )
    body: Any = {"accuracy": _accuracy, "steps": _steps}[arguments.what]
    body(arguments)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accuracy", "steps"))
    parser.add_argument("--world-size", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument("--wire-dtype", default="bfloat16", choices=(*WIRE_TYPES, "none"), help="of `steps`")
    parser.add_argument("--nodes", type=int, default=1, help="nodes that the processes are said to be on (default: 1)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--buckets", type=int, default=64)
    parser.add_argument("--elements", type=int, default=4096, help="largest size of a bucket (default: 4096)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--skew", type=float, default=0.02, help="how often a rank pauses after a bucket (default: 0.02)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, arguments), nprocs=arguments.world_size)


if __name__ == "__main__":
    main()
