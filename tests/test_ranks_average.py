"""`average_gradients` on real ranks: plain loops made right, with the numbers of one process, whatever is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from averaging import Gradients, approx, draw_gradients, literal, reduce_given, same_everywhere, square_root_of_weight
from grids import grid
from roundings import LARGEST_ERROR, relative_error
from torch import Tensor, nn

from lightning_gradavg.reduction import average
from lightning_gradavg.reduction.average import average_gradients
from lightning_gradavg.rules import RULES
from lightning_gradavg.wire import exchange
from lightning_gradavg.wire.codecs import CODECS

LAYOUTS = {1: [[0]], 2: [[0, 0], [0, 1]], 3: [[0, 0, 0], [1, 0, 1]], 4: [[0, 0, 1, 1], [0, 0, 0, 1], [7, 3, 5, 3]]}
NODES = {2: [0, 1], 3: [1, 0, 1], 4: [0, 0, 1, 1]}
WITHOUT_WEIGHT = ("mean", "sum", "mean_of_node_sums", "mean_of_node_means", "sum_of_node_means")

SHAPES = ((), (3,), (0, 4), (2, 5), (131_072,), (1,), (3, 2, 2))


@pytest.mark.parametrize("reduction", [*RULES, square_root_of_weight], ids=[*RULES, "custom"])
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_rule_is_its_formula(world, world_size, reduction):
    """Every rule gives its literal formula to 1e-12, small gradients in a bucket and one large, on any nodes."""
    name = reduction if isinstance(reduction, str) else "square_root_of_weight"
    of_ranks = draw_gradients(world_size, SHAPES)
    weights = [3.0, 0.25, 0.0, 17.5][:world_size]
    for nodes in LAYOUTS[world_size]:
        reduced = same_everywhere(
            world(world_size).run(reduce_given, of_ranks, weights, nodes, reduction=reduction), world_size
        )
        for index, gradient in enumerate(reduced):
            expected = literal(name, [gradients[index] for gradients in of_ranks], weights, nodes)
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", WITHOUT_WEIGHT)
def test_weight_is_optional_where_the_rule_has_none(world, reduction):
    """A rule that uses no weight gives the same bits without one."""
    of_ranks = draw_gradients(3, [(5,)])
    without = same_everywhere(world(3).run(reduce_given, of_ranks, reduction=reduction), 3)
    with_weight = same_everywhere(world(3).run(reduce_given, of_ranks, [1, 2, 0], reduction=reduction), 3)
    assert torch.equal(without[0], with_weight[0])


def reduce_in_small_buckets(of_ranks: Sequence[Gradients], **sizes: Any) -> list[Tensor | None]:
    with patch.multiple(average, **sizes):
        return reduce_given(of_ranks, reduction="sum")


@pytest.mark.parametrize(
    "sizes", [{"BUCKET_BYTES": 64}, {"SINGLE_BYTES": 64}, {"BUCKET_BYTES": 64, "SINGLE_BYTES": 1}], ids=str
)
def test_size_of_buckets_does_not_matter(world, sizes):
    """However the gradients are cut into buckets, and whatever dtypes are mixed, integers are summed exactly."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.float16]
    of_ranks = [
        [torch.full((index % 5 + 1,), rank + index).to(dtypes[index % 5]) for index in range(40)] for rank in range(3)
    ]
    reduced = same_everywhere(world(3).run(reduce_in_small_buckets, of_ranks, **sizes), 3)
    for index, gradient in enumerate(reduced):
        assert torch.equal(torch.full((index % 5 + 1,), 3.0 + 3 * index).to(dtypes[index % 5]), gradient)


def train_toy(
    samples: Sequence[Sequence[float]],
    *,
    kind: str = "s",
    loss: str = "mean",
    weighted: bool = False,
    steps: int = 1,
    lr: float = 0.01,
    convert: Callable[[int], Any] = float,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Body: a plain loop on one weight, which starts at 1. Return the last gradient and the weight."""
    x = torch.tensor(samples[dist.get_rank()], dtype=torch.float64)
    w = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.SGD([w], lr=lr)
    if weighted:
        options["weight"] = convert(len(x))
    for _ in range(steps):
        optimizer.zero_grad()
        losses = 0.5 * (w * x) ** 2 if kind == "s" else w * x
        (losses.mean() if loss == "mean" else losses.sum()).backward()
        average_gradients([w], **options)
        optimizer.step()
    assert w.grad is not None
    return w.grad, w.detach()


@pytest.mark.parametrize(
    ("samples", "options", "gradient", "weight"),
    [
        ([[1, 2], [3, 4]], {"loss": "sum", "reduction": "sum"}, 30, 0.7),
        ([[1, 2], [3, 4], [5, 6], [7, 8]], {"loss": "sum", "reduction": "sum"}, 204, -1.04),
        ([[1, 2, 3], [4]], {"reduction": "weighted_mean", "weighted": True}, 7.5, 0.925),
        ([[1, 2, 3], [4]], {"reduction": "mean"}, 31 / 3, 1 - 0.31 / 3),
        ([[2, 4], []], {"kind": "lin", "reduction": "weighted_mean", "weighted": True}, 3.0, 0.97),
        ([[1, 2, 3, 4], [5, 6, 7, 8]], {}, 25.5, 0.745),
        (
            [[1], [2], [3, 4, 5], [6, 7, 8]],
            {"loss": "sum", "reduction": "normalized_sum", "weighted": True},
            25.5,
            0.745,
        ),
        ([[1, 2, 3], [4, 5]], {"reduction": "weighted_mean", "weighted": True}, 11.0, 0.89),
    ],
    ids=["case 1", "case 1, 4 ranks", "case 2", "case 2, stock", "case 5", "case 12", "case 12, uneven", "case 27"],
)
def test_plain_loop_gives_the_gradient_of_one_process(world, samples, options, gradient, weight):
    """Cases 1, 2, 5, 12 and 27: one step of a plain loop has the gradient and the weight computed by hand."""
    seen = same_everywhere(world(len(samples)).run(train_toy, samples, **options), len(samples))
    assert approx([gradient, weight]) == [value.item() for value in seen]


def test_twenty_steps_of_uneven_batches(world):
    """Case 2: after 20 steps on {1, 2, 3} and {4} the weight is that of one process."""
    options = {"reduction": "weighted_mean", "weighted": True, "steps": 20}
    _, weight = same_everywhere(world(2).run(train_toy, [[1, 2, 3], [4]], **options), 2)
    assert approx(0.21029776386659413) == weight.item()


def int64_scalar(count: int) -> Tensor:
    return torch.tensor(count)


def bfloat16_matrix(count: int) -> Tensor:
    return torch.tensor([[count]], dtype=torch.bfloat16)


def differentiable(count: int) -> Tensor:
    return torch.tensor(float(count), requires_grad=True)


@pytest.mark.parametrize(
    "convert",
    [int, float, np.int16, np.float32, Fraction, int64_scalar, bfloat16_matrix, differentiable],
    ids=lambda convert: convert.__name__,
)
def test_weight_of_any_type(world, convert):
    """Case 32: a weight may be of any numeric type, Python's, NumPy's or a tensor; case 2 gives 7.5 with each."""
    options = {"reduction": "weighted_mean", "weighted": True, "convert": convert}
    gradient, _ = same_everywhere(world(2).run(train_toy, [[1, 2, 3], [4]], **options), 2)
    assert approx(7.5) == gradient.item()


def test_weights_are_summed_in_float64(world):
    """Case 32: weights 2**24 (gradient 0) and 1 (gradient 2**24 + 1) give exactly 1, which float32 sums do not."""
    of_ranks = [[torch.zeros((), dtype=torch.float64)], [torch.tensor(2.0**24 + 1, dtype=torch.float64)]]
    weights = [torch.tensor(2**24), torch.tensor(1.0)]
    (gradient,) = same_everywhere(world(2).run(reduce_given, of_ranks, weights, reduction="weighted_mean"), 2)
    assert gradient.item() == pytest.approx(1.0, abs=1e-10)


def refuse_averages(of_ranks: Sequence[Gradients], **options: Any) -> list[Tensor | None]:
    """Body: reduce with every collective but SUM forbidden."""
    stock = dist.all_reduce

    def only_sum(tensor: Tensor, op: Any = dist.ReduceOp.SUM, **rest: Any) -> Any:
        if op != dist.ReduceOp.SUM:
            raise RuntimeError(f"{op} is not available")
        return stock(tensor, op, **rest)

    with patch.object(dist, "all_reduce", only_sum):
        return reduce_given(of_ranks, **options)


@pytest.mark.parametrize("reduction", RULES)
def test_only_sums_are_communicated(world, reduction):
    """Case 31: every rule works with a backend that can only sum."""
    of_ranks = [[torch.tensor([1.0])], [torch.tensor([3.0])]]
    options = {"weights": [1, 1], "nodes": [0, 1], "reduction": reduction}
    (gradient,) = same_everywhere(world(2).run(refuse_averages, of_ranks, **options), 2)
    assert (4.0 if reduction.startswith("sum") else 2.0) == gradient.item()


def record_collectives(of_ranks: Sequence[Gradients], **options: Any) -> list[tuple[str, int]]:
    """Body: return the collectives of a call and the waits for the sums, in order, each with its size."""
    seen: list[tuple[str, int]] = []
    stock_reduce, stock_gather = dist.all_reduce, dist.all_gather

    class Recorded:
        def __init__(self, work: Any, size: int) -> None:
            self.work, self.size = work, size

        def wait(self) -> None:
            seen.append(("wait", self.size))
            self.work.wait()

    def all_reduce(tensor: Tensor, *args: Any, **rest: Any) -> Any:
        assert rest["async_op"] is True
        seen.append(("all_reduce", tensor.numel()))
        return Recorded(stock_reduce(tensor, *args, **rest), tensor.numel())

    def all_gather(tensors: list[Tensor], tensor: Tensor, *args: Any, **rest: Any) -> Any:
        seen.append(("all_gather", tensor.numel()))
        return stock_gather(tensors, tensor, *args, **rest)

    with patch.multiple(dist, all_reduce=all_reduce, all_gather=all_gather):
        reduce_given(of_ranks, **options)
    return seen


def test_one_small_exchange_and_all_buckets_in_flight(world):
    """Case 16: a call costs one exchange of six numbers; every bucket's sum begins before the first is waited for."""
    shapes = [(100,)] * 50 + [(2**18,), (7,)]
    of_ranks = draw_gradients(2, shapes, torch.float32)
    for seen in world(2).run(record_collectives, of_ranks, weights=[1, 2], reduction="weighted_mean"):
        expected = [("all_gather", 6), ("all_reduce", 2**18), ("all_reduce", 5007), ("wait", 2**18), ("wait", 5007)]
        assert expected == seen


@pytest.mark.parametrize("wire_dtype", [None, *CODECS])
def test_no_weight_anywhere(world, wire_dtype):
    """A total weight of 0 gives zero gradients on all ranks, even where they were NaN."""
    of_ranks = [[torch.tensor([torch.nan, 1.0]), None], [torch.tensor([torch.inf, 2.0]), torch.ones(3)]]
    options = {"weights": [0, 0.0], "reduction": "weighted_mean", "wire_dtype": wire_dtype}
    zeros, of_one_rank = same_everywhere(world(2).run(reduce_given, of_ranks, **options), 2)
    assert torch.equal(torch.zeros(2), zeros)
    assert torch.equal(torch.zeros(3), of_one_rank)


@pytest.mark.parametrize(
    ("poison", "reduction", "wire_dtype"),
    grid(
        [torch.nan, torch.inf, -torch.inf],
        ["weighted_mean", "normalized_sum", square_root_of_weight],
        [None, *CODECS],
    ),
)
def test_weight_zero_contributes_nothing(world, reduction, poison, wire_dtype):
    """Cases 5 and 50: gradients of a rank of weight 0 are discarded, not multiplied: 0 * NaN would be NaN."""
    large = torch.full((2**18,), poison)
    nodes = [0, 1]
    of_ranks = [[torch.tensor([2.0]), large.new_ones(2**18)], [torch.tensor([poison]), large]]
    options = {"reduction": reduction, "wire_dtype": wire_dtype}
    reduced = same_everywhere(world(2).run(reduce_given, of_ranks, [1, 0], nodes, **options), 2)
    assert torch.equal(torch.tensor([2.0]), reduced[0])
    assert torch.equal(torch.ones(2**18), reduced[1])


def test_nan_reaches_all_ranks_where_weights_are_equal(world):
    """Nothing hides a NaN: under the mean all ranks have it."""
    of_ranks = [[torch.tensor([2.0, 1.0])], [torch.tensor([torch.nan, 3.0])]]
    for result in world(2).run(reduce_given, of_ranks):
        assert torch.equal(torch.tensor([True, False]), result[0].isnan())
        assert result[0][1] == 2


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("mean_of_node_means", 4.0), ("mean_of_node_sums", 8.0), ("sum_of_node_means", 8.0), ("sum", 16.0)],
)
def test_two_levels(world, reduction, expected):
    """Case 10: gradients 1, 3, 5, 7 on two nodes of two ranks, mean or sum within a node and across nodes."""
    of_ranks = [[torch.tensor(value)] for value in (1.0, 3.0, 5.0, 7.0)]
    (gradient,) = same_everywhere(world(4).run(reduce_given, of_ranks, nodes=[0, 0, 1, 1], reduction=reduction), 4)
    assert expected == gradient.item()


@pytest.mark.parametrize(
    ("reduction", "gradients", "weights", "expected"),
    [
        ("normalized_sum", [14.0, 14.0], [4, 8], 28 / 12),
        ("mean", [3 * 2 / 4, 5 * 2 / 4], None, 2.0),
        ("weighted_mean", [1.0, 2.0], [2.0, 18.0], 1.9),
        ("normalized_sum", [1.0, 2.0, 3.0, 6.0], [1, 1, 1, 1], 3.0),
        ("normalized_sum", [3.0, 9.0], [2, 2], 3.0),
        ("normalized_sum", [12.0], [4], 3.0),
        ("sum", [3.0, 9.0], None, 12.0),
    ],
    ids=["case 4", "case 7", "case 8", "case 11, 4 ranks", "case 11, 2 ranks", "case 11, 1 rank", "case 11, sum"],
)
def test_dictated_gradients(world, reduction, gradients, weights, expected):
    """Cases 4, 7, 8 and 11: the global gradient computed by hand."""
    of_ranks = [[torch.tensor(gradient, dtype=torch.float64)] for gradient in gradients]
    results = world(len(gradients)).run(reduce_given, of_ranks, weights, reduction=reduction)
    (gradient,) = same_everywhere(results, len(gradients))
    assert approx(expected) == gradient.item()


def train_mlp(chunk: bool) -> list[Tensor]:
    """Body: 20 steps of a small classifier, on this rank's chunk of each global batch or on the whole of it."""
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(64, 8, generator=draw, dtype=torch.float64)
    y = torch.randint(4, (64,), generator=draw)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    parts = dist.get_world_size() if chunk else 1
    for step in range(20):
        batch = torch.arange(16) + 16 * (step % 4)
        mine = batch.tensor_split(parts)[dist.get_rank() % parts]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        average_gradients(model, reduction="weighted_mean", weight=len(mine))
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_same_training_on_any_number_of_ranks(world, world_size):
    """Case 3: 20 steps on 1 to 4 ranks, evenly or unevenly cut, end at the weights of one process to 1e-12."""
    reference = world(1).run(train_mlp, False)[0]
    weights = same_everywhere(world(world_size).run(train_mlp, True), world_size)
    for mine, expected in zip(weights, reference, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wire_dtype", CODECS)
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


@pytest.mark.parametrize(("world_size", "reduction"), grid(list(NODES), [*RULES, square_root_of_weight], strength=1))
def test_every_rule_in_half_the_bytes(world, world_size, reduction):
    """Every rule is its formula within the error of the type, a rank of weight 0 and nodes included."""
    name = reduction if isinstance(reduction, str) else "square_root_of_weight"
    of_ranks = draw_gradients(world_size, [(3000,)], torch.float32)
    weights, nodes = [3.0, 0.0, 0.25, 17.5][:world_size], NODES[world_size]
    options = {"reduction": reduction, "wire_dtype": "bfloat16"}
    (gradient,) = same_everywhere(world(world_size).run(reduce_given, of_ranks, weights, nodes, **options), world_size)
    exact = literal(name, [of_rank[0].double() for of_rank in of_ranks], weights, nodes)
    assert relative_error(gradient, exact) <= LARGEST_ERROR["bfloat16"]


@pytest.mark.parametrize("wire_dtype", CODECS)
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


def test_float16_on_the_wire_neither_overflows_nor_underflows(world):
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
    with ExitStack() as stack:
        for name, size in sizes.items():
            stack.enter_context(patch.object(exchange if name.startswith("SEGMENT") else average, name, size))
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
def test_groups_that_reduce_at_once(world, members):
    """Each group reduces over its own members, with the same bits on all of them."""
    of_ranks = draw_gradients(4, [(300_001,), (9,)], torch.float32)
    results = world(4).run(reduce_in_groups, members, of_ranks)
    assert 4 == len(results)
    for ranks in members:
        for index in range(2):
            exact = torch.stack([of_ranks[rank][index].double() for rank in ranks]).mean(0)
            assert all(torch.equal(results[ranks[0]][index], results[rank][index]) for rank in ranks)
            assert relative_error(results[ranks[0]][index], exact) <= 4 * LARGEST_ERROR["bfloat16"]


@pytest.mark.parametrize("wire_dtype", CODECS)
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
