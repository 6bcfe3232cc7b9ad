"""Sums of buckets by the exchange, on real ranks: in narrow types, node by node, in order, and when something fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from grids import grid
from ranks import RankPool
from roundings import LARGEST_ERROR, relative_error
from torch.futures import Future
from toys import failing_codec

from lightning_gradavg.place import places_on_nodes
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.hooks import OwnGroups, exchange_sum
from lightning_gradavg.reduction.reducer import BucketSum
from lightning_gradavg.wire import exchange
from lightning_gradavg.wire.codecs import CODECS
from lightning_gradavg.wire.route import WireOptions

CPU = torch.device("cpu")
NODES = [[0, 0], [0, 1], [0, 0, 0], [0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0]]
SIZES = (1, 7, 1000, 300_001)


class Bucket:
    """What an exchange asks of a bucket of DDP."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def buffer(self) -> torch.Tensor:
        return self._buffer


def begin(bucket_sum: BucketSum, buffer: torch.Tensor) -> Future[torch.Tensor]:
    return bucket_sum(Bucket(buffer))  # type: ignore[arg-type]  # as far as it is read


def open_exchange(wire_dtype: str | None, nodes: Sequence[int]) -> tuple[BucketSum, OwnGroups]:
    own = OwnGroups(World.of(None), CPU, None)
    options, group = WireOptions(wire_dtype), dist.group.WORLD
    assert group is not None
    bucket_sum, _ = exchange_sum(options, places_on_nodes(nodes), group, CPU, [], own)
    assert bucket_sum is not None
    return bucket_sum, own


def gradient_of(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def exact_sum(world_size: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return sum((gradient_of(rank, size).to(dtype).double() for rank in range(world_size)), torch.zeros(size))


def sum_buckets(wire_dtype: str | None, nodes: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> Any:
    """Body: the sums of several buckets, all in flight at once."""
    bucket_sum, own = open_exchange(wire_dtype, nodes)
    futures = [begin(bucket_sum, gradient_of(dist.get_rank(), size).to(dtype)) for size in sizes]
    sums = [future.wait() for future in futures]
    own.close()
    return sums


def of_all(ranks: Sequence[Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
    """Assert that all ranks hold the same bits, and return them."""
    for other in ranks[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(other, ranks[0], strict=True))
    return ranks[0]


@pytest.mark.parametrize(("nodes", "wire_dtype"), grid(NODES, [*CODECS], strength=1), ids=str)
def test_sum_of_buckets_of_any_size(world, wire_dtype, nodes):
    """Buckets smaller than the world, that no number of parts divides, or of many segments are summed within the
    error of the type, with the same bits on all ranks."""
    sums = of_all(world(len(nodes)).run(sum_buckets, wire_dtype, nodes, SIZES, torch.float32))
    for size, found in zip(SIZES, sums, strict=True):
        # An L2 norm of few numbers is not an average: each may be off by twice its largest rounding.
        allowed = LARGEST_ERROR[wire_dtype] * (1 if size >= 1000 else 4)
        assert relative_error(found, exact_sum(len(nodes), size)) <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 1, 0]], ids=str)
def test_sum_node_by_node(world, nodes, dtype):
    """Without a narrow type, node by node, numbers are summed in their own with all its digits."""
    sums = of_all(world(4).run(sum_buckets, None, nodes, SIZES, dtype))
    for size, found in zip(SIZES, sums, strict=True):
        assert dtype == found.dtype
        assert relative_error(found, exact_sum(4, size, dtype)) <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wire_dtype", CODECS)
def test_half_precision_gradients(world, wire_dtype, dtype):
    """Gradients in half precision are summed in float32, and the sum is not rounded before it is scaled."""
    (found,) = of_all(world(3).run(sum_buckets, wire_dtype, [0, 0, 0], [5000], dtype))
    assert torch.float32 == found.dtype
    assert relative_error(found, exact_sum(3, 5000, dtype)) <= LARGEST_ERROR[wire_dtype]


def sum_complex(nodes: Sequence[int]) -> torch.Tensor:
    bucket_sum, own = open_exchange("bfloat16", nodes)
    found = begin(bucket_sum, torch.complex(gradient_of(dist.get_rank(), 999), torch.ones(999))).wait()
    own.close()
    return found


def test_complex_gradients(world):
    """Real and imaginary parts are sent side by side, and each is rounded for itself."""
    (found,) = of_all([[one] for one in world(2).run(sum_complex, [0, 0])])
    assert torch.complex64 == found.dtype
    assert torch.equal(torch.full((999,), 2.0), found.imag)
    assert relative_error(found.real, exact_sum(2, 999)) <= LARGEST_ERROR["bfloat16"]


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.mark.parametrize("nodes", [[0, 0], [0] * 4, [0] * 8, [0, 0, 1, 1, 2, 2, 3, 3]], ids=str)
def test_error_does_not_grow_with_ranks(world, eight, nodes):
    """In bfloat16 the error is that of two roundings on 2, 4 and 8 ranks, between all and on 4 nodes of 2, where a ring
    of bfloat16 has 4.0e-3."""
    pool = eight if len(nodes) == 8 else world(len(nodes))
    (found,) = of_all(pool.run(sum_buckets, "bfloat16", nodes, [100_000], torch.float32))
    assert relative_error(found, exact_sum(len(nodes), 100_000)) <= 2.5e-3


def sum_with_bad_numbers(wire_dtype: str | None, nodes: Sequence[int]) -> torch.Tensor:
    bucket_sum, own = open_exchange(wire_dtype, nodes)
    gradient = gradient_of(dist.get_rank(), 2000)
    if dist.get_rank() == 1:
        gradient[3], gradient[1500] = torch.nan, torch.inf
    found = begin(bucket_sum, gradient).wait()
    own.close()
    return found


@pytest.mark.parametrize(("nodes", "wire_dtype"), grid([[0, 0, 0, 0], [0, 0, 1, 1]], [*CODECS]), ids=str)
def test_bad_numbers_are_seen_everywhere(world, wire_dtype, nodes):
    """One rank's NaN and infinity reach all ranks, as GradScaler needs, and spoil nothing else."""
    exact = exact_sum(4, 2000)
    for found in world(4).run(sum_with_bad_numbers, wire_dtype, nodes):
        bad = ~found.isfinite()
        assert [3, 1500] == bad.nonzero().flatten().tolist()
        assert relative_error(found[~bad], exact[~bad]) <= LARGEST_ERROR[wire_dtype]


BUCKETS = 64


def sum_in_skew(wire_dtype: str | None, nodes: Sequence[int], steps: int) -> list[int]:
    """Body: many small buckets in flight, while each rank works for a time of its own; return the steps that failed."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(rank)
    busy = torch.randn(120, 120, generator=draw)
    bucket_sum, own = open_exchange(wire_dtype, nodes)
    failed = []
    for step in range(steps):
        buckets = [torch.full((1 + index,), float(rank + index % 7 + step % 5)) for index in range(BUCKETS)]
        futures = []
        for bucket in buckets:
            for _ in range(int(torch.randint(4, (), generator=draw))):
                busy = torch.tanh(busy @ busy)
            futures.append(begin(bucket_sum, bucket))
        sums = [future.wait() for future in futures]
        # Integers below 256 are exact in either type.
        common = world_size * (world_size - 1) // 2
        expected = [float(common + world_size * (index % 7 + step % 5)) for index in range(BUCKETS)]
        if not all(bool((found == number).all()) for found, number in zip(sums, expected, strict=True)):
            failed.append(step)
    own.close()
    return failed


SKEWED = [([0, 0], "bfloat16"), ([0, 0, 0], "float16"), ([0, 0, 1, 1], None)]


@pytest.mark.parametrize(("nodes", "wire_dtype"), SKEWED, ids=str)
def test_order_under_skew(world, nodes, wire_dtype):
    """64 buckets at once for 20 steps, on ranks that are never at the same point, neither hang nor mix up."""
    assert [[]] * len(nodes) == world(len(nodes)).run(sum_in_skew, wire_dtype, nodes, 20)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("nodes", "wire_dtype"), SKEWED, ids=str)
def test_order_under_skew_for_long(nodes, wire_dtype):
    """Nor do they for 1000 steps."""
    pool = RankPool(len(nodes), timeout=500)
    try:
        assert [[]] * len(nodes) == pool.run(sum_in_skew, wire_dtype, nodes, 1000)
    finally:
        pool.close()


def fail_on_one_rank(wire_dtype: str | None, nodes: Sequence[int], call: str) -> Any:
    """Body: the third call of a codec fails on rank 1; then sum again."""
    bucket_sum, own = open_exchange(wire_dtype, nodes)
    with failing_codec(call, 3):
        futures = [begin(bucket_sum, torch.ones(100)) for _ in range(3)]
        messages = []
        for future in futures:
            try:
                future.wait()
            except RuntimeError as error:
                messages.append(str(error))
                break
    # As a strategy does that is torn down because of it.
    own.close()
    return messages, sum_buckets(wire_dtype, nodes, [100], torch.float32)[0]


@pytest.mark.parametrize("call", ["encode", "decode"])
@pytest.mark.parametrize(("nodes", "wire_dtype"), [([0, 0], "bfloat16"), ([0, 0, 1, 1], None)], ids=str)
def test_failure_of_one_rank_reaches_all(world, nodes, wire_dtype, call):
    """What fails in the background of one rank is raised by the future that waits for it, and by those of the others
    when that rank leaves: nobody waits for ever, and the ranks can begin anew."""
    answers = world(len(nodes)).run(fail_on_one_rank, wire_dtype, nodes, call)
    for rank, (messages, _) in enumerate(answers):
        (message,) = messages
        assert "the sum of a bucket over the ranks failed: " in message
        assert (rank == 1) == ("MemoryError('out of paper')" in message)
    of_all([[found] for _, found in answers])


def sum_in_small_segments(nodes: Sequence[int], size: int, segment: int) -> torch.Tensor:
    with mock.patch.object(exchange, "SEGMENT_BYTES", segment):
        bucket_sum, own = open_exchange("bfloat16", nodes)
        bucket = torch.arange(size).float() % 50
        found = begin(bucket_sum, bucket).wait()
        own.close()
        return found


@pytest.mark.parametrize(
    ("nodes", "size", "segment"), grid([[0, 0, 0], [0, 0, 1, 1]], [1, 23, 24, 25, 500], [1, 48, 2**20]), ids=str
)
def test_size_of_segments_does_not_matter(world, nodes, size, segment):
    """However a bucket is cut, integers are summed exactly, and arrive where they belong."""
    expected = len(nodes) * (torch.arange(size).float() % 50)
    for found in world(len(nodes)).run(sum_in_small_segments, nodes, size, segment):
        assert torch.equal(expected, found)


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from test_ranks_wire import begin, open_exchange

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
bucket_sum, own = open_exchange("bfloat16", [0, 0])
print(begin(bucket_sum, torch.ones(10)).wait().sum().item())
"""


def test_process_ends(tmp_path):
    """A process that never closed its exchange ends at once, with no word of complaint."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    answers = [(*rank.communicate(timeout=60), rank.returncode) for rank in ranks]
    assert [("20.0\n", "", 0)] * 2 == answers
