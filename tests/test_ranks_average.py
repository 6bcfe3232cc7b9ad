"""`average_gradients` on real ranks: the seeds' loops made right, with the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from averaging import Gradients, approx, draw_gradients, literal, reduce_given, same_everywhere, square_root_of_weight
from lightning_gradavg.collectives import buckets
from torch import Tensor, nn

from lightning_gradavg.reduction.average import average_gradients
from lightning_gradavg.rules import RULES

LAYOUTS = {1: [[0]], 2: [[0, 0], [0, 1]], 3: [[0, 0, 0], [1, 0, 1]], 4: [[0, 0, 1, 1], [0, 0, 0, 1], [7, 3, 5, 3]]}
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
    with patch.multiple(buckets, **sizes):
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


def test_no_weight_anywhere_communicates_no_gradient(world):
    """A total weight of 0 gives zero gradients on all ranks without sending any, even where they were NaN."""
    of_ranks = [[torch.tensor([torch.nan, 1.0]), None], [torch.tensor([torch.inf, 2.0]), torch.ones(3)]]
    options = {"weights": [0, 0.0], "reduction": "weighted_mean"}
    zeros, of_one_rank = same_everywhere(world(2).run(reduce_given, of_ranks, **options), 2)
    assert torch.equal(torch.zeros(2), zeros)
    assert torch.equal(torch.zeros(3), of_one_rank)
    for seen in world(2).run(record_collectives, of_ranks, **options):
        assert [("all_gather", 6), ("all_gather", 2)] == seen


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("reduction", ["weighted_mean", "normalized_sum", square_root_of_weight])
def test_weight_zero_contributes_nothing(world, reduction, poison):
    """Cases 5 and 50: gradients of a rank of weight 0 are discarded, not multiplied: 0 * NaN would be NaN."""
    large = torch.full((2**18,), poison)
    nodes = [0, 1]
    of_ranks = [[torch.tensor([2.0]), large.new_ones(2**18)], [torch.tensor([poison]), large]]
    reduced = same_everywhere(world(2).run(reduce_given, of_ranks, [1, 0], nodes, reduction=reduction), 2)
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
