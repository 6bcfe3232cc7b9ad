"""Communication hooks under stock DDP and under the strategy: the mean, its bits, its error, and the bytes sent."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import DDPStrategy
from ranks import RankPool
from roundings import relative_error
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg import GradAvgStrategy, hooks

NARROW = ("bfloat16", "float16")
NAMES = (*NARROW, "float32_sum", "by_node", "by_node_bfloat16", "by_node_float16")
FLAT, EVEN, UNEVEN, SINGLE = [0, 0], [0, 0, 1, 1], [0, 0, 0, 1], [0, 1]
# Of an L2 norm: one rounding to p bits makes about 0.41 * 2**-p. In 16 bits a gradient is rounded once before the sum,
# but by the rank that sums it, and once after it; one that has 16 bits itself only after it.
ONE_ROUNDING = {torch.bfloat16: 1.9e-3, torch.float16: 2.4e-4}
LARGEST_ERROR = {"bfloat16": 2.4e-3, "float16": 3.1e-4}
SIZES = (1, 7, 1000, 300_001)


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


class Bucket:
    """What a hook reads of a bucket of DDP."""

    def __init__(self, buffer: Tensor, *, last: bool = True) -> None:
        self._buffer, self._last = buffer, last

    def buffer(self) -> Tensor:
        return self._buffer

    def is_last(self) -> bool:
        return self._last


@contextmanager
def on_nodes(nodes: Sequence[int]) -> Iterator[None]:
    """Have the launcher tell of nodes, and the hooks ask anew."""
    hooks._NODES.clear()
    with mock.patch.dict(os.environ, {"GROUP_RANK": str(nodes[dist.get_rank()])}):
        yield
    hooks._NODES.clear()


def begin(name: str, *gradients: Tensor) -> list[Any]:
    hook: Callable[..., Any] = getattr(hooks, name)
    return [hook(None, Bucket(one, last=one is gradients[-1])) for one in gradients]


def random(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def means(
    name: str, nodes: Sequence[int], sizes: Sequence[int], dtype: torch.dtype, scale: float = 1.0, spoiled: int = -1
) -> Any:
    """Body: the means of several buckets that travel at once; the `spoiled` rank has NaN and infinity in each."""
    rank = dist.get_rank()
    with on_nodes(nodes):
        buckets = [random(rank, size, dtype) * scale for size in sizes]
        for bucket in buckets if rank == spoiled else ():
            bucket[3], bucket[1500] = torch.nan, torch.inf
        results = [future.wait() for future in begin(name, *buckets)]
    assert all(one.dtype == dtype for one in results)
    return results


def of_all(ranks: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    """Assert that all ranks hold the same bits, and return them."""
    for other in ranks[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(other, ranks[0], strict=True))
    return ranks[0]


def exact_mean(ranks: int, size: int, dtype: torch.dtype) -> Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.stack([random(rank, size, dtype).to(wide) for rank in range(ranks)]).mean(0)


# float16 ends at 65504 and at 6e-8: neither what is sent nor the mean overflows or underflows.
CASES: list[tuple[str, list[int], torch.dtype, float]] = [
    *((name, nodes, torch.float32, 1.0) for name in NAMES for nodes in (SINGLE, EVEN)),
    *((name, nodes, torch.float32, 1.0) for name in ("by_node", "by_node_float16") for nodes in (FLAT, UNEVEN)),
    *((name, EVEN, dtype, 1.0) for name in NAMES for dtype in (torch.bfloat16, torch.float16)),
    *((name, EVEN, torch.float64, 1.0) for name in ("float32_sum", "by_node")),
    *((name, SINGLE, torch.complex64, 1.0) for name in (*NARROW, "float32_sum", "by_node_float16")),
    *((name, EVEN, torch.float16, 2.0**13) for name in ("float16", "float32_sum", "by_node")),
    *((name, FLAT, torch.float32, 2.0**100) for name in ("float16", "float32_sum")),
    *((name, FLAT, torch.float32, 2.0**-100) for name in NARROW),
]


def allowed(name: str, dtype: torch.dtype) -> float:
    wire = name.removeprefix("by_node_")
    if dtype in ONE_ROUNDING:  # a hook that is narrower between nodes than the sum there rounds that, too
        return ONE_ROUNDING[dtype] + (LARGEST_ERROR[wire] if name.startswith("by_node_") else 0)
    return LARGEST_ERROR.get(wire, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(("name", "nodes", "dtype", "scale"), CASES, ids=str)
def test_mean(world, name, nodes, dtype, scale):
    results = of_all(world(len(nodes)).run(means, name, nodes, SIZES, dtype, scale))
    for size, found in zip(SIZES, results, strict=True):
        # The norm of few numbers is no average: each may be off by twice its largest rounding.
        bound = allowed(name, dtype) * (1 if size > 1000 else 4)
        expected = exact_mean(len(nodes), size, dtype)
        assert relative_error(found.to(expected.dtype) / scale, expected) <= bound


NODES_OF_TWO = [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("name", "nodes", "dtype", "bound"),
    [
        ("bfloat16", [0] * 8, torch.float32, 2.4e-3),
        ("by_node_bfloat16", NODES_OF_TWO, torch.float32, 2.4e-3),
        ("float32_sum", [0] * 8, torch.bfloat16, 1.7e-3),
    ],
    ids=str,
)
def test_error_does_not_grow_with_ranks(eight, name, nodes, dtype, bound):
    """On 8 ranks a ring of bfloat16 has 4.0e-3, and 3.2e-3 of parameters that are bfloat16 themselves."""
    (found,) = of_all(eight.run(means, name, nodes, [100_000], dtype))
    assert relative_error(found, exact_mean(8, 100_000, dtype)) <= bound


@pytest.mark.parametrize("name", NAMES)
def test_bad_numbers_are_seen_everywhere(world, name):
    """One rank's NaN and infinity reach all ranks, as GradScaler needs, and spoil nothing else."""
    exact = exact_mean(4, 2000, torch.float32)
    for (found,) in world(4).run(means, name, EVEN, [2000], torch.float32, spoiled=1):
        assert [3, 1500] == (~found.isfinite()).nonzero().flatten().tolist()
        assert found[3].isnan()
        assert found[1500] == torch.inf
        fine = found.isfinite()
        assert relative_error(found[fine], exact[fine]) <= 1.1 * allowed(name, torch.float32)


BUCKETS = 24


def mean_in_skew(name: str, nodes: Sequence[int]) -> int:
    """Body: many small buckets in flight, while each rank works for a time of its own; return the wrong means."""
    rank, world_size, wrong = dist.get_rank(), dist.get_world_size(), 0
    draw = torch.Generator().manual_seed(rank)
    busy = torch.randn(120, 120, generator=draw)
    with on_nodes(nodes):
        for step in range(4):
            futures = []
            for index in range(BUCKETS):
                for _ in range(int(torch.randint(4, (), generator=draw))):
                    busy = torch.tanh(busy @ busy)
                number = float(world_size * (rank + index % 7 + step % 5))  # exact in 16 bits, as is the mean
                bucket = Bucket(torch.full((1 + index,), number), last=index == BUCKETS - 1)
                futures.append(getattr(hooks, name)(None, bucket))
            for index, future in enumerate(futures):
                expected = world_size * (world_size - 1) / 2 + world_size * (index % 7 + step % 5)
                wrong += not bool((future.wait() == expected).all())
    return wrong


@pytest.mark.parametrize(("name", "nodes"), [("bfloat16", FLAT), ("float16", [0, 0, 0]), ("by_node_bfloat16", EVEN)])
def test_order_under_skew(world, name, nodes):
    """Many buckets, on ranks that are never at the same point, neither hang nor mix up."""
    assert [0] * len(nodes) == world(len(nodes)).run(mean_in_skew, name, nodes)


def bytes_sent(name: str, nodes: Sequence[int], dtype: torch.dtype) -> Counter[bool]:
    """Body: bytes that this rank hands to collectives for other ranks, by whether these are on other nodes."""
    sent: Counter[bool] = Counter()
    rank, exchange = dist.get_rank(), dist.all_to_all_single

    def counted(received: Tensor, rows: Tensor, *, group: Any, async_op: bool) -> Any:
        for other, row in zip(dist.get_process_group_ranks(group), rows, strict=True):
            if other != rank:
                sent[nodes[other] != nodes[rank]] += row.numel() * row.element_size()
        return exchange(received, rows, group=group, async_op=async_op)

    with on_nodes(nodes), mock.patch.object(dist, "all_to_all_single", counted):
        begin(name, torch.zeros(48_000, dtype=dtype))
    return sent


# Of 48000 numbers, in bytes: there and back, in the node and between nodes, by each rank.
SENT = [
    ("bfloat16", FLAT, torch.float32, {False: 48_000 * 2}),
    ("bfloat16", [0] * 4, torch.float32, {False: 48_000 * 2 * 2 * 3 / 4}),
    ("float32_sum", [0] * 4, torch.bfloat16, {False: 48_000 * 2 * 2 * 3 / 4}),
    ("by_node", EVEN, torch.float32, {False: 48_000 * 4, True: 24_000 * 4}),
    ("by_node_bfloat16", EVEN, torch.float32, {False: 48_000 * 4, True: 24_000 * 2}),
]


@pytest.mark.parametrize(("name", "nodes", "dtype", "expected"), SENT)
def test_bytes_sent(world, name, nodes, dtype, expected):
    """Half the bytes of float32, in as many as a ring sends; node by node only one bucket per node goes out."""
    assert [expected] * len(nodes) == world(len(nodes)).run(bytes_sent, name, nodes, dtype)


def gradients_of_ddp(name: str, nodes: Sequence[int], **options: Any) -> list[list[float]]:
    """Body: two backwards of stock DDP, whose input is rank + 1, with each matrix in a bucket of its own."""
    with on_nodes(nodes):
        layers = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
        for parameter in layers.parameters():
            nn.init.ones_(parameter)
        model = DistributedDataParallel(layers, bucket_cap_mb=0.00001, **options)
        model.register_comm_hook(None, getattr(hooks, name))
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
        return [parameter.grad.flatten().tolist() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("name", "nodes", "views"), [*((name, SINGLE, True) for name in NAMES), ("by_node_float16", EVEN, False)]
)
def test_stock_ddp(world, name, nodes, views):
    """The gradient of the first is 2 x, and of the second first(x) = 4 x, on average over x = 1, 2, ..."""
    mean = sum(range(1, len(nodes) + 1)) / len(nodes)
    expected = [[2 * mean] * 12, [4 * mean] * 6]
    assert [expected] * len(nodes) == world(len(nodes)).run(
        gradients_of_ddp, name, nodes, gradient_as_bucket_view=views
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # LightningCLI of 2.6 calls an old API of jsonargparse
@pytest.mark.parametrize("strategy", [GradAvgStrategy, DDPStrategy])
def test_import_path_in_yaml(strategy):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(strategy, "strategy")
    text = "strategy:\n  ddp_comm_hook: lightning_gradavg.hooks.bfloat16\n"
    assert parser.instantiate_classes(parser.parse_string(text)).strategy._ddp_comm_hook is hooks.bfloat16


def begin_odd(case: str) -> Any:
    """Body: a bucket or an environment that is not the usual one."""
    hooks._NODES.clear()
    rank = dist.get_rank()
    buckets = {
        "sparse": torch.sparse_coo_tensor(
            torch.tensor([[rank]]), torch.tensor([2.0 + rank]), (3,), check_invariants=True
        ).coalesce(),
        "float64": torch.zeros(3, dtype=torch.float64),
    }
    environ = {"nodes": {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}, "number": {"GROUP_RANK": "one"} if rank else {}}
    with mock.patch.dict(os.environ, environ.get(case, {})):
        (begun,) = begin("bfloat16" if case in buckets else "by_node", buckets.get(case, torch.zeros(3)))
    return begun.wait().to_dense().tolist()


ODD: list[tuple[str, int, Any]] = [
    ("sparse", 2, [1.0, 1.5, 0.0]),
    ("float64", 2, "gradients of torch.float64 in 16 bits"),
    ("nodes", 2, "but cannot, on ranks 0, 1: the launcher does not tell the node: set NODE_RANK"),
    ("number", 2, "on rank 1: invalid literal for int() with base 10: 'one'"),
]


@pytest.mark.parametrize(("case", "ranks", "expected"), ODD)
def test_odd_buckets(world, case, ranks, expected):
    """What has nothing to round comes back, and what cannot be served is the same error on all ranks."""
    for answer in world(ranks).run_expecting_errors(begin_odd, case):
        if isinstance(expected, str):
            assert answer.type_name == "ValueError"
            assert expected in answer.message
        else:
            assert expected == answer


def begin_in_groups() -> Any:
    rank, groups = dist.get_rank(), [dist.new_group([0, 1, 2, 3]), dist.new_group([4])]
    with on_nodes([0, 0, 1, 1, 2]):
        bucket: Any = Bucket(torch.full((2,), rank * 2.0))
        return hooks.by_node(groups[rank // 4], bucket).wait().tolist()


def test_groups_of_some_ranks(world):
    """A hook that needs groups of its own refuses a part of the ranks; a rank that is alone needs none."""
    *refused, alone = world(5).run_expecting_errors(begin_in_groups)
    assert all("takes all 5 ranks of the run, but it reduces over 4" in one.message for one in refused)
    assert [8.0, 8.0] == alone
