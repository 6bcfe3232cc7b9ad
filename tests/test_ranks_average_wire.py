"""`average_gradients(wire_dtype=...)`: gradients that travel in half the bytes, on real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from averaging import (
    Gradients,
    draw_gradients,
    literal,
    reduce_given,
    same_everywhere,
    square_root_of_weight,
)
from lightning_gradavg.collectives import buckets
from lightning_gradavg.reduction.contribution import STATELESS
from ranks import Raised
from torch import Tensor, nn

from lightning_gradavg.reduction.average import average_gradients
from lightning_gradavg.rules import RULES

# Relative L2 error of a sum, as in test_ranks_wire.py.
LARGEST_ERROR = {"bfloat16": 2.5e-3, "float16": 3.2e-4}

NODES = {2: [0, 1], 3: [1, 0, 1], 4: [0, 0, 1, 1]}


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def test_types_are_those_that_need_no_memory():
    """What a function offers is what the strategy offers without error feedback."""
    assert ("bfloat16", "float16") == STATELESS


@pytest.mark.parametrize("wire_dtype", STATELESS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_error_is_that_of_two_roundings(world, world_size, wire_dtype):
    """Small gradients in a bucket and a large one in segments, of sizes that do not divide, have the error of one
    rounding before the sum and one after it, on any number of ranks, and the same bits on all."""
    shapes = [(70_001,), (50, 21), (601_003,), (1,)]
    of_ranks = draw_gradients(world_size, shapes, torch.float32)
    reduced = same_everywhere(
        world(world_size).run(reduce_given, of_ranks, reduction="sum", wire_dtype=wire_dtype), world_size
    )
    for index, gradient in enumerate(reduced):
        exact = sum((of_rank[index].double() for of_rank in of_ranks), torch.zeros(()))
        # An L2 norm of one number is no average.
        allowed = LARGEST_ERROR[wire_dtype] * (1 if exact.numel() > 1000 else 4)
        assert 0 < relative_error(gradient, exact) <= allowed


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9])
def test_size_that_does_not_divide(world, size):
    """Fewer numbers than ranks, and one more or less than a whole number of parts, all arrive where they belong."""
    of_ranks = [[torch.arange(size).float() + 16 * rank] for rank in range(4)]
    (gradient,) = same_everywhere(world(4).run(reduce_given, of_ranks, reduction="sum", wire_dtype="bfloat16"), 4)
    # Integers below 256 are bfloat16.
    assert torch.equal(4 * torch.arange(size).float() + 96, gradient)


@pytest.mark.parametrize("reduction", [*RULES, square_root_of_weight], ids=[*RULES, "custom"])
@pytest.mark.parametrize("world_size", NODES)
def test_every_rule(world, world_size, reduction):
    """Every rule is its formula within the error of the type, a rank of weight 0 and nodes included."""
    name = reduction if isinstance(reduction, str) else "square_root_of_weight"
    of_ranks = draw_gradients(world_size, [(3000,)], torch.float32)
    weights, nodes = [3.0, 0.0, 0.25, 17.5][:world_size], NODES[world_size]
    options = {"reduction": reduction, "wire_dtype": "bfloat16"}
    (gradient,) = same_everywhere(world(world_size).run(reduce_given, of_ranks, weights, nodes, **options), world_size)
    exact = literal(name, [of_rank[0].double() for of_rank in of_ranks], weights, nodes)
    assert relative_error(gradient, exact) <= LARGEST_ERROR["bfloat16"]


@pytest.mark.parametrize("wire_dtype", STATELESS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_weight_zero_contributes_nothing(world, poison, wire_dtype):
    """Cases 5 and 50: what a rank of weight 0 has is discarded, NaN as it may be, in a bucket and alone."""
    of_ranks = [[torch.tensor([2.0]), torch.ones(2**18)], [torch.tensor([poison]), torch.full((2**18,), poison)]]
    options = {"reduction": "weighted_mean", "wire_dtype": wire_dtype}
    reduced = same_everywhere(world(2).run(reduce_given, of_ranks, [1, 0], **options), 2)
    assert torch.equal(torch.tensor([2.0]), reduced[0])
    assert torch.equal(torch.ones(2**18), reduced[1])


@pytest.mark.parametrize("wire_dtype", STATELESS)
def test_bad_numbers_are_seen_everywhere(world, wire_dtype):
    """NaN and infinity reach all ranks where they are, and nowhere else."""
    of_ranks = draw_gradients(3, [(5000,)], torch.float32)
    of_ranks[1][0][[7, 4999]] = torch.tensor([torch.nan, torch.inf])
    results = world(3).run(reduce_given, of_ranks, wire_dtype=wire_dtype)
    assert 3 == len(results)
    exact = torch.stack([of_rank[0].double() for of_rank in of_ranks]).mean(0)
    for (gradient,) in results:
        bad = ~gradient.isfinite()
        assert [7, 4999] == bad.nonzero().flatten().tolist()
        assert relative_error(gradient[~bad], exact[~bad]) <= LARGEST_ERROR[wire_dtype]


def test_float16_neither_overflows_nor_underflows(world):
    """A sum beyond the range of float16 and gradients below it come out, each piece being sent times a power of 2."""
    of_ranks = [[torch.full((2**18,), 3e4), torch.full((2**18,), 1e-9)] for _ in range(4)]
    large, small = same_everywhere(world(4).run(reduce_given, of_ranks, reduction="sum", wire_dtype="float16"), 4)
    torch.testing.assert_close(large, torch.full((2**18,), 1.2e5), rtol=1e-3, atol=0)
    torch.testing.assert_close(small, torch.full((2**18,), 4e-9), rtol=1e-3, atol=0)


MIXED = (torch.float32, torch.bfloat16, torch.complex64, torch.float16)


def test_mixed_dtypes_layouts_and_absence(world):
    """Gradients of all types that are summed in 32 bits keep their own, a sparse one takes the plain way with all its
    digits, in double precision, too, and one that is None on a rank counts as zero there."""
    draw = torch.Generator().manual_seed(0)
    of_ranks: list[list[Tensor | None]] = []
    for _ in range(3):
        own: list[Tensor | None] = [torch.randn(2000, generator=draw).to(dtype) for dtype in MIXED]
        own.append(torch.randn(2000, generator=draw) if len(of_ranks) == 1 else None)
        own.append(torch.randn(6, 4, generator=draw, dtype=torch.float64).to_sparse())
        own.append(torch.randn(40, 50, generator=draw).t())
        of_ranks.append([*own, None])
    results = world(3).run(reduce_given, of_ranks, wire_dtype="bfloat16")
    reduced = same_everywhere(results, 3)
    assert all(of_rank[-1] is None for of_rank in results)
    for index, gradient in enumerate(reduced):
        there = [of_rank[index] for of_rank in of_ranks]
        like = next(one for one in there if one is not None)
        wide = [(torch.zeros_like(like) if one is None else one).to_dense().to(torch.complex128) for one in there]
        exact = torch.stack(wide).mean(0)
        assert like.dtype == gradient.dtype
        error = float((gradient.to_dense().to(torch.complex128) - exact).norm() / exact.norm())
        # Gradients of 8 digits are rounded to their own type once more.
        allowed = {torch.bfloat16: 4.5e-3, torch.float64: 1e-15}.get(like.dtype, LARGEST_ERROR["bfloat16"])
        assert error <= allowed


def reduce_in_pieces(of_ranks: Sequence[Gradients], **sizes: Any) -> list[Tensor | None]:
    with patch.multiple(buckets, **sizes):
        return reduce_given(of_ranks, reduction="sum", wire_dtype="bfloat16")


@pytest.mark.parametrize(
    "sizes", [{"SEGMENT_BYTES": 64}, {"BUCKET_BYTES": 64, "SEGMENT_BYTES": 1}, {"SINGLE_BYTES": 64}], ids=str
)
def test_size_of_buckets_and_segments_does_not_matter(world, sizes):
    """However gradients are cut into buckets and segments, integers are summed exactly."""
    of_ranks = [[torch.arange(index * 11).float() % 50 + rank for index in range(20)] for rank in range(3)]
    reduced = same_everywhere(world(3).run(reduce_in_pieces, of_ranks, **sizes), 3)
    for index, gradient in enumerate(reduced):
        assert torch.equal((3 * (torch.arange(index * 11).float() % 50) + 3).bfloat16().float(), gradient)


def record_collectives(of_ranks: Sequence[Gradients], **options: Any) -> list[str]:
    """Body: return the collectives of a call and the waits for them, in order."""
    seen: list[str] = []

    class Recorded:
        def __init__(self, name: str, work: Any) -> None:
            self.name, self.work = name, work

        def wait(self) -> None:
            seen.append(f"wait {self.name}")
            self.work.wait()

    def recorded(name: str) -> Any:
        stock = getattr(dist, name)

        def collective(*args: Any, **rest: Any) -> Any:
            seen.append(name)
            work = stock(*args, **rest)
            return Recorded(name, work) if rest.get("async_op") else work

        return collective

    names = ("all_reduce", "all_gather", "all_to_all_single")
    replaced: dict[str, Any] = {name: recorded(name) for name in names}
    with patch.multiple(dist, **replaced):
        reduce_given(of_ranks, **options)
    return seen


def test_all_segments_are_in_flight_at_once(world):
    """Every segment is scattered before the first is waited for, and the sums are gathered in the same order: so ranks
    cannot part in the order of their collectives. 3 MiB on the wire are 3 segments, and the rest is a fourth."""
    of_ranks = draw_gradients(2, [(3 * 2**19 - 16,), (100,), (7,)], torch.float32)
    expected = (
        ["all_gather"] + ["all_to_all_single"] * 4 + ["wait all_to_all_single", "all_gather"] * 4 + ["wait all_gather"] * 4
    )
    for seen in world(2).run(record_collectives, of_ranks, wire_dtype="bfloat16"):
        assert expected == seen


def test_no_weight_anywhere_communicates_no_gradient(world):
    """A total weight of 0 gives zero gradients on all ranks without sending any."""
    of_ranks = [[torch.tensor([torch.nan, 1.0])], [torch.tensor([torch.inf, 2.0])]]
    options = {"weights": [0, 0.0], "reduction": "weighted_mean", "wire_dtype": "float16"}
    (zeros,) = same_everywhere(world(2).run(reduce_given, of_ranks, **options), 2)
    assert torch.equal(torch.zeros(2), zeros)
    assert [["all_gather"]] * 2 == world(2).run(record_collectives, of_ranks, **options)


def test_one_rank_rounds_nothing(world):
    """Alone, a rank sends nothing, and so rounds nothing."""
    gradient = draw_gradients(1, [(1000,)], torch.float32)[0][0]
    ((reduced,),) = world(1).run(reduce_given, [[gradient]], wire_dtype="bfloat16")
    assert torch.equal(gradient, reduced)


def reduce_in_groups(members: Sequence[Sequence[int]], of_ranks: Sequence[Gradients]) -> list[Tensor | None]:
    """Body: every rank reduces in its group; the groups do so at once."""
    groups = [dist.new_group(list(ranks)) for ranks in members]
    mine = next(group for group, ranks in zip(groups, members, strict=True) if dist.get_rank() in ranks)
    try:
        return reduce_given(of_ranks, group=mine, wire_dtype="bfloat16")
    finally:
        dist.destroy_process_group(mine)


@pytest.mark.parametrize("members", [[[0, 2], [1, 3]], [[0, 1], [2, 3]], [[3, 0, 1], [2]]], ids=str)
def test_groups_smaller_than_the_world(world, members):
    """Each group reduces over its own members, with the same bits on all of them."""
    of_ranks = draw_gradients(4, [(300_001,), (9,)], torch.float32)
    results = world(4).run(reduce_in_groups, members, of_ranks)
    assert 4 == len(results)
    for ranks in members:
        for index in range(2):
            exact = torch.stack([of_ranks[rank][index].double() for rank in ranks]).mean(0)
            assert all(torch.equal(results[ranks[0]][index], results[rank][index]) for rank in ranks)
            assert relative_error(results[ranks[0]][index], exact) <= 4 * LARGEST_ERROR["bfloat16"]


@pytest.mark.parametrize("wire_dtype", STATELESS)
def test_training_in_a_plain_loop(world, wire_dtype):
    """20 steps of a small network end where those with full digits end, within a part in a thousand."""
    mine, *others = world(3).run(train_net, wire_dtype)
    exact = world(3).run(train_net, None)[0]
    assert 2 == len(others)
    assert all(torch.equal(mine, other) for other in others)
    assert 0 < relative_error(mine, exact) <= 1e-3


def train_net(wire_dtype: Any) -> Tensor:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(20):
        rows = dist.get_rank() + 1
        optimizer.zero_grad()
        net(torch.randn(rows, 6, generator=draw)).square().mean().backward()
        average_gradients(net, reduction="weighted_mean", weight=rows, wire_dtype=wire_dtype)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


MISUSES: dict[str, tuple[Sequence[int], dict[str, Any], str]] = {
    "int8": (
        [0, 1, 2],
        {"wire_dtype": "int8"},
        (
            "on ranks 0, 1, 2: wire_dtype='int8' has to keep what a step did not send and add it to the next one, and a"
            " function keeps nothing between calls. Use 'bfloat16', 'float16', or None"
        ),
    ),
    "unknown": ([1], {"wire_dtype": "fp8"}, "on rank 1: wire_dtype='fp8' is not a type that gradients can be sent as"),
    "a type": (
        [0],
        {"wire_dtype": torch.bfloat16},
        "on rank 0: wire_dtype=torch.bfloat16 is not a type that gradients can be sent as. Use 'bfloat16', 'float16'",
    ),
    "on some ranks": (
        [1],
        {"wire_dtype": None},
        "wire_dtype= differs between ranks: 'bfloat16' on ranks 0, 2; None on rank 1. Pass the same on all ranks.",
    ),
    "another": (
        [2],
        {"wire_dtype": "float16"},
        "wire_dtype= differs between ranks: 'bfloat16' on ranks 0, 1; 'float16' on rank 2. Pass the same on all ranks.",
    ),
    "double precision": (
        [],
        {"dtype": torch.float64},
        "on ranks 0, 1, 2: wire_dtype='bfloat16' would round the gradient of parameter 1, which is torch.float64",
    ),
    "complex double precision": ([], {"dtype": torch.complex128}, "parameter 1, which is torch.complex128"),
}


def misuse(name: str) -> None:
    """Body: call with the misuse, and check that the gradients are what they were."""
    ranks, options, _ = MISUSES[name]
    of_all: dict[str, Any] = {"wire_dtype": "bfloat16", "dtype": torch.float32} | ({} if ranks else options)
    given = of_all | (options if dist.get_rank() in ranks else {})
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, dtype=given.pop("dtype")))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, dist.get_rank() + 1.0)
    try:
        average_gradients(parameters, **given)
    finally:
        for parameter in parameters:
            assert torch.equal(torch.full_like(parameter, dist.get_rank() + 1.0), parameter.grad)


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises_the_same_error_on_all_ranks(world, name):
    """Case 32: what does not fit is the same ValueError on all ranks, and no gradient has changed."""
    errors = world(3).run_expecting_errors(misuse, name)
    assert [Raised("ValueError", errors[0].message)] * 3 == errors
    assert MISUSES[name][2] in errors[0].message


def test_double_precision_without_gradient_is_no_obstacle(world):
    """A parameter in double precision whose gradient is None on all ranks is not sent, and not refused."""
    of_ranks = [[torch.ones(2), None], [torch.ones(2), None]]
    reduced = same_everywhere(world(2).run(reduce_beside_double, of_ranks), 2)
    assert torch.equal(torch.ones(2), reduced[0])


def reduce_beside_double(of_ranks: Sequence[Gradients]) -> list[Tensor | None]:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    parameters[0].grad = of_ranks[dist.get_rank()][0]
    average_gradients(parameters, wire_dtype="bfloat16")
    return [parameter.grad for parameter in parameters]
