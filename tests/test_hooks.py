"""Communication hooks under stock DDP: the mean, its bits, its error, and the bytes sent. With rules: `cases.py`."""

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
from ranks import group_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg import hooks

NAMES = ("bfloat16", "float32_sum", "by_node", "by_node_bfloat16")
FLAT = [0, 0]
EVEN = [0, 0, 1, 1]
UNEVEN = [0, 0, 0, 1]
SINGLE = [0, 1]
EIGHT = [0] * 8
# Of an L2 norm: one rounding to p bits makes about 0.41 * 2**-p. In 16 bits a gradient is rounded once before the sum,
# but by the rank that sums it, and once after it; one that has 16 bits itself only after it.
ONE_ROUNDING = {torch.bfloat16: 1.7e-3, torch.float16: 2.4e-4}
LARGEST_ERROR = {"bfloat16": 2.4e-3}
SIZES = (1, 7, 1000, *range(8, 28), 300_001)


def bucket_of(buffer: Tensor, *, last: bool = True) -> Any:
    return mock.Mock(**{"buffer.return_value": buffer, "is_last.return_value": last})


@contextmanager
def on_nodes(nodes: Sequence[int]) -> Iterator[None]:
    """Have the launcher tell of nodes, and the hooks ask anew."""
    hooks._STAGES.clear()
    once = mock.patch.object(dist, "new_group", lambda ranks: group_of((*ranks,)))
    with once, mock.patch.dict(os.environ, {"GROUP_RANK": str(nodes[dist.get_rank()])}):
        yield
    hooks._STAGES.clear()


def begin(name: str, gradient: Tensor, *, last: bool = True) -> Any:
    hook: Callable[..., Any] = getattr(hooks, name)
    return hook(None, bucket_of(gradient, last=last))


def gradients_of(rank: int, nodes: Sequence[int], dtype: torch.dtype, scale: float) -> list[Tensor]:
    """Return a rank's buckets; the last rank has a NaN and an infinity in the last of them."""
    drawn = [
        torch.randn(size, generator=torch.Generator().manual_seed(100 * size + rank), dtype=dtype) * scale
        for size in SIZES
    ]
    if rank == len(nodes) - 1 and not dtype.is_complex:  # whose real part spoils the imaginary one in torch's mean
        drawn[-1][3], drawn[-1][1500] = torch.nan, torch.inf
    return drawn


def means(name: str, nodes: Sequence[int], dtype: torch.dtype, scale: float) -> list[Tensor]:
    """Body: the means of many buckets that travel at once, before each of which every rank works for another time."""
    rank = dist.get_rank()
    futures = []
    work = torch.ones(120, 120)
    draw = torch.Generator().manual_seed(rank)
    with on_nodes(nodes):
        for gradient in (given := gradients_of(rank, nodes, dtype, scale)):
            for _ in range(int(torch.randint(4, (), generator=draw))):
                work = torch.tanh(work @ work)
            futures.append(begin(name, gradient, last=gradient is given[-1]))
        return [future.wait() for future in futures]


# Of float16 gradients, which end at 65504, no sum overflows. bfloat16 has the range of float32.
MEANS: list[tuple[str, list[int], torch.dtype, float]] = [
    *((name, EVEN, torch.float32, 1.0) for name in NAMES),
    *((name, nodes, torch.float32, 1.0) for name in ("by_node", "by_node_bfloat16") for nodes in (FLAT, UNEVEN)),
    *((name, EVEN, dtype, 1.0) for name in NAMES for dtype in (torch.bfloat16, torch.float16)),
    *((name, EVEN, torch.float64, 1.0) for name in ("float32_sum", "by_node")),
    *((name, SINGLE, torch.complex64, 1.0) for name in ("bfloat16", "float32_sum", "by_node_bfloat16")),
    *((name, EVEN, torch.float16, 2.0**13) for name in NAMES),
    *((name, FLAT, torch.float32, scale) for name in ("bfloat16", "float32_sum") for scale in (2.0**100, 2.0**-100)),
    # The error does not grow with ranks: here a ring of bfloat16 has 4.0e-3, and 3.2e-3 of bfloat16 parameters.
    ("bfloat16", EIGHT, torch.float32, 1.0),
    ("by_node_bfloat16", [0, 0, 1, 1, 2, 2, 3, 3], torch.float32, 1.0),
    ("float32_sum", EIGHT, torch.bfloat16, 1.0),
]


def allowed(name: str, dtype: torch.dtype) -> float:
    wire = name.removeprefix("by_node_")
    if dtype in ONE_ROUNDING:  # a hook that is narrower between nodes than the sum there rounds that, too
        return ONE_ROUNDING[dtype] + (LARGEST_ERROR[wire] if name.startswith("by_node_") else 0)
    return LARGEST_ERROR.get(wire, 4 * torch.finfo(dtype).eps)


def as_doubles(numbers: Tensor) -> Tensor:
    return (torch.view_as_real(numbers) if numbers.is_complex() else numbers).double()


@pytest.mark.parametrize(("name", "nodes", "dtype", "scale"), MEANS, ids=str)
def test_mean(world, name, nodes, dtype, scale):
    """Of every bucket, with the same bits on all ranks; a NaN or an infinity stays one, and spoils nothing else."""
    of_ranks = world(len(nodes)).run(means, name, nodes, dtype, scale)
    given = [gradients_of(rank, nodes, dtype, scale) for rank in range(len(nodes))]
    for size, *found, of_bucket in zip(SIZES, *of_ranks, zip(*given, strict=True), strict=True):
        assert all(torch.equal(one.nan_to_num(), found[0].nan_to_num()) for one in found)
        assert found[0].dtype == dtype
        mean = as_doubles(found[0])
        exact = torch.stack(list(map(as_doubles, of_bucket))).mean(0)
        fine = exact.isfinite()
        assert torch.equal(mean.isfinite(), fine)
        assert torch.equal(mean.isnan(), exact.isnan())
        # The norm of few numbers is no average: each may be off by twice its largest rounding.
        bound = allowed(name, dtype) * (1 if size > 1000 else 4)
        assert (mean - exact)[fine].norm() <= bound * exact[fine].norm()


def bytes_sent(name: str, nodes: Sequence[int], dtype: torch.dtype) -> Counter[bool]:
    """Body: bytes that this rank hands to collectives for other ranks, by whether these are on other nodes."""
    sent: Counter[bool] = Counter()
    rank = dist.get_rank()
    exchange = dist.all_to_all_single

    def counted(received: Tensor, rows: Tensor, *, group: Any, async_op: bool) -> Any:
        for other, row in zip(dist.get_process_group_ranks(group), rows, strict=True):
            if other != rank:
                sent[nodes[other] != nodes[rank]] += row.numel() * row.element_size()
        return exchange(received, rows, group=group, async_op=async_op)

    with on_nodes(nodes), mock.patch.object(dist, "all_to_all_single", counted):
        begin(name, torch.zeros(48_000, dtype=dtype))
    return sent


@pytest.mark.parametrize(
    ("name", "nodes", "dtype", "expected"),
    [
        # Of 48000 numbers, in bytes: there and back, in the node and between nodes, by each rank.
        ("bfloat16", FLAT, torch.float32, {False: 48_000 * 2}),
        ("bfloat16", [0] * 4, torch.float32, {False: 48_000 * 2 * 2 * 3 / 4}),
        ("float32_sum", [0] * 4, torch.bfloat16, {False: 48_000 * 2 * 2 * 3 / 4}),
        ("by_node", EVEN, torch.float32, {False: 48_000 * 4, True: 24_000 * 4}),
        ("by_node_bfloat16", EVEN, torch.float32, {False: 48_000 * 4, True: 24_000 * 2}),
    ],
)
def test_bytes_sent(world, name, nodes, dtype, expected):
    """Half the bytes of float32, in as many as a ring sends; node by node only one bucket per node goes out."""
    assert [expected] * len(nodes) == world(len(nodes)).run(bytes_sent, name, nodes, dtype)


def gradients_of_ddp(name: str, nodes: Sequence[int], views: bool) -> list[list[float]]:
    """Body: two backwards of stock DDP, whose input is rank + 1, with each matrix in a bucket of its own."""
    with on_nodes(nodes):
        layers = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
        for parameter in layers.parameters():
            nn.init.ones_(parameter)
        model = DistributedDataParallel(layers, bucket_cap_mb=0.00001, gradient_as_bucket_view=views)
        model.register_comm_hook(None, getattr(hooks, name))
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
        return [parameter.grad.flatten().tolist() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("name", "nodes", "views"), [*((name, SINGLE, True) for name in NAMES), ("by_node_bfloat16", EVEN, False)]
)
def test_stock_ddp(world, name, nodes, views):
    """The gradient of the first is 2 x, and of the second first(x) = 4 x, on average over x = 1, 2, ..."""
    mean = sum(range(1, len(nodes) + 1)) / len(nodes)
    expected = [[2 * mean] * 12, [4 * mean] * 6]
    assert [expected] * len(nodes) == world(len(nodes)).run(gradients_of_ddp, name, nodes, views)


def sparse() -> Any:
    rank = dist.get_rank()
    index = torch.tensor([[rank]])
    value = torch.tensor([2.0 + rank])
    bucket = torch.sparse_coo_tensor(index, value, (3,), check_invariants=True).coalesce()
    return begin("bfloat16", bucket).wait().to_dense().tolist()


def wide() -> Any:
    return begin("bfloat16", torch.zeros(3, dtype=torch.float64))


def nowhere() -> Any:
    """Body: the launcher knows of other nodes, and does not tell this one."""
    hooks._STAGES.clear()
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}):
        return begin("by_node", torch.zeros(3))


def in_groups() -> Any:
    """Body: the hook needs groups of its own on the first ranks, and none on the last, which is alone."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1, 2, 3]), dist.new_group([4])]
    with on_nodes([0, 0, 1, 1, 2]):
        return hooks.by_node(groups[rank // 4], bucket_of(torch.full((2,), rank * 2.0))).wait().tolist()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (sparse, [[1.0, 1.5, 0.0]] * 2),  # there is nothing to round
        (wide, ["gradients of torch.float64 in 16 bits"] * 2),
        (nowhere, ["but cannot, on ranks 0, 1: the launcher does not tell the node: set NODE_RANK"] * 2),
        (in_groups, [*["takes all 5 ranks of the run, but it reduces over 4"] * 4, [8.0, 8.0]]),
    ],
)
def test_odd_buckets_and_groups(world, body, expected):
    """What cannot be served is the same error on all ranks that it concerns."""
    for answer, its in zip(world(len(expected)).run_expecting_errors(body), expected, strict=True):
        assert its == answer if isinstance(its, list) else its in answer.message


def test_a_factor_of_0_erases_nan():
    """0 times NaN is NaN. A sparse bucket is left without rows; gloo lets ranks have different numbers of them."""
    dense = torch.tensor([torch.nan, 1.0])
    rows = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([torch.nan, 1.0]), (3,), check_invariants=False)
    for buffer in (dense, rows):
        hooks.scale_bucket(buffer, 0.0)
    assert [0.0, 0.0] == dense.tolist()
    assert ([0.0, 0.0, 0.0], 0) == (rows.to_dense().tolist(), len(rows.coalesce().values()))
