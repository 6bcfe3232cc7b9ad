"""`average_gradients` on real ranks: the numbers of one process, and the same error on all ranks if it is misused."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from cases import root
from ranks import Raised, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg.place import Place
from lightning_gradavg.reduction import sums
from lightning_gradavg.reduction.average import average_gradients
from lightning_gradavg.reduction.reference import combine
from lightning_gradavg.rules import RULES, Share, resolve_rule

Gradients = Sequence["Tensor | None"]
inf, nan = torch.inf, torch.nan
TINY = 2.0**-24


EVERY_RULE = [*RULES, root]


def reduce_given(of_ranks: Sequence[Gradients], weights: Any = None, nodes: Any = None, **options: Any) -> Gradients:
    """Body: reduce dictated gradients, `of_ranks[rank][parameter]`, and return this rank's."""
    rank = dist.get_rank()
    if nodes is not None:
        os.environ["NODE_RANK"] = str(nodes[rank])
    parameters = []
    for gradients in zip(*of_ranks, strict=True):
        like = next((gradient for gradient in gradients if gradient is not None), torch.zeros(2))
        parameters.append(nn.Parameter(torch.zeros(like.shape, dtype=like.dtype)))
        parameters[-1].grad = gradients[rank]
    if weights is not None:
        options["weight"] = weights[rank]
    average_gradients(parameters, **options)
    return [parameter.grad for parameter in parameters]


def same_everywhere(results: Sequence[Gradients]) -> Any:
    """Assert that all ranks hold the same bits, and return them."""
    for result in results[1:]:
        for mine, first in zip(result, results[0], strict=True):
            if mine is None or first is None:
                assert mine is first
            else:
                assert mine.dtype == first.dtype
                assert torch.equal(torch.nan_to_num(mine), torch.nan_to_num(first))
    return results[0]


def draw_gradients(world_size: int, shapes: Sequence[Any], dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(world_size)
    return [[torch.randn(shape, dtype=dtype, generator=draw) for shape in shapes] for _ in range(world_size)]


LAYOUTS = {1: [[0]], 2: [[0, 0], [0, 1]], 3: [[0, 0, 0], [1, 0, 1]], 4: [[0, 0, 1, 1], [0, 0, 0, 1], [7, 3, 5, 3]]}
SHAPES = ((), (3,), (0, 4), (2, 5), (131_072,), (1,), (3, 2, 2))


def reduce_by_every_rule(of_ranks: Sequence[Gradients], weights: Sequence[float]) -> list[Gradients]:
    """Body: on all nodes by every rule, and without weights, too, by those that use none."""
    found = []
    for nodes in LAYOUTS[len(of_ranks)]:
        for rule in EVERY_RULE:
            found.append(reduce_given(deepcopy(of_ranks), weights, nodes, reduction=rule))
            if not resolve_rule(rule).uses_weight:
                same_everywhere([found[-1], reduce_given(deepcopy(of_ranks), None, nodes, reduction=rule)])
    return found


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_rule_is_its_formula(world, world_size):
    """Small gradients in a bucket and one large, on any nodes, to 1e-12; a rule without weights needs none."""
    of_ranks, weights = draw_gradients(world_size, SHAPES), [3.0, 0.25, 0.0, 17.5][:world_size]
    ways = [(nodes, rule) for nodes in LAYOUTS[world_size] for rule in EVERY_RULE]
    of_ways = zip(*world(world_size).run(reduce_by_every_rule, of_ranks, weights), strict=True)
    for (nodes, rule), results in zip(ways, of_ways, strict=True):
        for index, gradient in enumerate(same_everywhere(results)):
            stacked = torch.stack([gradients[index] for gradients in of_ranks])
            expected = combine(stacked, rule=resolve_rule(rule), nodes=nodes, weights=weights)
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def half(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float16)


one, lists = torch.tensor, {"reduction": "weighted_mean"}
OVERFLOWING = [half(40000.0, TINY, 60000.0, 40000.0), half(40000.0, TINY, -60000.0, 0.0)]
MILLION = [2.0**20] * 2

# Name: the gradient of each rank, reduction, weights, nodes, and the reduced gradient computed by hand.
GIVEN: dict[str, tuple[Gradients, str, Any, Any, Any]] = {
    "None on a rank": ([one([2.0, 4.0]), one([4.0, 5.0]), None], "mean", None, None, [2.0, 3.0]),
    "one has it": ([None, one([3.0])], "sum", None, None, [3.0]),
    "None": ([None, None], "mean", None, None, None),
    "NaN of a rank": ([one([2.0, 1.0]), one([nan, 3.0])], "mean", None, None, [nan, 2.0]),
    "NaN of weight 0": ([one([2.0]), one([nan])], "weighted_mean", [1, 0], [0, 1], [2.0]),
    "infinite of weight 0, large": (
        [torch.ones(2**18), torch.full((2**18,), -inf)],
        "weighted_mean",
        [1, 0],
        [0, 1],
        [1.0] * 2**18,
    ),
    "no weight": ([one([nan, 1.0]), one([inf, 2.0])], "weighted_mean", [0, 0.0], None, [0.0, 0.0]),
    "no weight, None on a rank": ([None, torch.ones(3)], "weighted_mean", [0, 0.0], None, [0.0, 0.0, 0.0]),
    # Summed in float32: what fits in the result is not lost on the way, and what does not is infinite.
    "float16 mean": (OVERFLOWING, "mean", None, None, [40000.0, TINY, 0.0, 20000.0]),
    "float16 sum": (OVERFLOWING, "sum", None, None, [inf, 2 * TINY, 0.0, 40000.0]),
    "bfloat16": ([one([256.0, 1, 1, 1]).bfloat16().roll(n) for n in range(4)], "mean", None, None, [65.0] * 4),
    "complex": ([one([1 + 2j]), one([complex(inf, -4)])], "mean", None, None, [complex(inf, -1)]),
    "float16 in units": (OVERFLOWING, "normalized_sum", MILLION, None, half(80000 / 2**21, 0, 0, 40000 / 2**21)),
}


@pytest.mark.parametrize("name", GIVEN)
def test_gradient_computed_by_hand(world, name):
    """Every rank has the number computed by hand, in the dtype of the gradients."""
    of_ranks, reduction, weights, nodes, expected = GIVEN[name]
    given = [[gradient] for gradient in of_ranks]
    (found,) = same_everywhere(world(len(given)).run(reduce_given, given, weights, nodes, reduction=reduction))
    if expected is None:
        assert found is None
        return
    assert {found.dtype} == {gradient.dtype for gradient in of_ranks if gradient is not None}
    expected = torch.as_tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0, equal_nan=True)


def reduce_in_small_buckets(of_ranks: Sequence[Gradients], single: int) -> Gradients:
    with patch.object(sums, "SINGLE_BYTES", single):
        return reduce_given(of_ranks, reduction="sum")


@pytest.mark.parametrize("single", [1, 64])
def test_size_of_buckets_does_not_matter(world, single):
    """However the gradients are cut into buckets, and whatever dtypes are mixed, integers are summed exactly."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.float16]
    of_ranks = [[torch.full((i % 5 + 1,), rank + i).to(dtypes[i % 5]) for i in range(40)] for rank in range(3)]
    for i, gradient in enumerate(same_everywhere(world(3).run(reduce_in_small_buckets, of_ranks, single))):
        assert torch.equal(torch.full((i % 5 + 1,), 3.0 + 3 * i).to(dtypes[i % 5]), gradient)


def record_collectives(of_ranks: Sequence[Gradients], **options: Any) -> list[tuple[str, int]]:
    """Body: return the collectives of a call and the waits for the sums, in order, each with its size."""
    seen: list[tuple[str, int]] = []

    def recorded(stock: Any) -> Any:
        def call(*tensors: Any, **rest: Any) -> Any:
            assert {"group", "async_op"} >= rest.keys()  # a sum: a backend may know nothing else
            size, work = tensors[-1].numel(), stock(*tensors, **rest)
            seen.append((stock.__name__, size))

            def wait() -> None:
                seen.append(("wait", size))
                work.wait()

            return Mock(wait=wait)

        return call

    with patch.multiple(dist, all_reduce=recorded(dist.all_reduce), all_gather=recorded(dist.all_gather)):
        reduce_given(of_ranks, **options)
    return seen


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean", "mean_of_node_means"])
def test_one_small_exchange_and_all_buckets_in_flight(world, reduction):
    """Cases 16 and 31: one exchange of five numbers, and sums alone, each begun before the first is waited for."""
    of_ranks = draw_gradients(2, [(100,)] * 50 + [(2**18,), (7,)], torch.float32)
    expected = [("all_gather", 5), ("all_reduce", 5007), ("all_reduce", 2**18), ("wait", 5007), ("wait", 2**18)]
    options = {"weights": [1, 2], "nodes": [0, 1], "reduction": reduction}
    assert [expected] * 2 == world(2).run(record_collectives, of_ranks, **options)


REPLACED = ("expanded", "one element expanded", "conjugate", "imaginary")
WRITTEN = ("contiguous", "transposed", "contiguous on rank 0", "every other column", "half of one tensor", "graph")


@pytest.mark.parametrize("size", [4, 520], ids=["small", "large"])
@pytest.mark.parametrize("case", [*WRITTEN, "channels_last", *REPLACED])
@on_ranks(3)
def test_memory_of_a_gradient(case, size):
    """A gradient is reduced in place whatever its strides on any rank; one that cannot be written is replaced."""

    def gradients(x: Tensor, rank: int) -> dict[str, Tensor]:
        image = x.reshape(1, size, size, 1).expand(1, size, size, 2).clone()
        return {
            "contiguous": x,
            "transposed": x.t().clone().t(),
            "contiguous on rank 0": x if rank == 0 else x.t().clone().t(),
            "expanded": x[0].expand(size, size),
            "one element expanded": x[0, 1].expand(size, size),
            "every other column": torch.zeros(size, 2 * size)[:, ::2].copy_(x),
            "half of one tensor": torch.zeros(size, 2 * size)[:, :size].copy_(x),
            "channels_last": image.to(memory_format=torch.channels_last),
            "conjugate": torch.complex(x, -x).conj(),
            "imaginary": torch.complex(x, -x).conj().imag,
            "graph": x.clone().requires_grad_() * 1,
        }

    x, rank = torch.arange(size * size, dtype=torch.float32).reshape(size, size), dist.get_rank()
    gradient = gradients(x * (rank + 1), rank)[case]
    parameter = nn.Parameter(torch.zeros_like(gradient).contiguous())
    parameter.grad = gradient
    average_gradients([parameter], reduction="sum")
    assert (case not in REPLACED) == (parameter.grad is gradient)
    assert torch.equal(gradients(6 * x, rank)[case], parameter.grad)


@pytest.mark.parametrize("size", [4, 2**19])
@on_ranks()
def test_gradients_in_one_memory_are_reduced_once(size):
    """Two parameters were given the same gradient, and a third a part of it."""
    memory = torch.full((size,), dist.get_rank() + 1.0)
    parameters = [nn.Parameter(torch.zeros(length)) for length in (size, size, size // 2)]
    for parameter in parameters:
        parameter.grad = memory[: parameter.numel()]
    average_gradients(parameters, reduction="sum")
    for parameter in parameters:
        assert parameter.grad is not None
        assert torch.equal(torch.full_like(parameter, 3.0), parameter.grad)


SOURCES: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda model: [model],
    "generator": lambda model: [(parameter for parameter in model.parameters())],
    "list with repeats": lambda model: [[model[0].weight, model[0].bias, model[2].weight, model[2].bias]],
    "single tensors": lambda model: model.parameters(),
}


@pytest.mark.parametrize("source", SOURCES)
@on_ranks()
def test_mean_has_the_bits_of_ddp(source):
    """On two ranks, with parameters in any form, of which tied weights count once."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    vars(model[2])["_parameters"]["weight"] = model[0].weight
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    wrapped = DistributedDataParallel(model)
    wrapped(x).square().mean().backward()
    stock = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    with wrapped.no_sync():
        model.zero_grad()
        wrapped(x).square().mean().backward()
    for given in SOURCES[source](model):
        average_gradients(given)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(stock) == 3
    assert all(torch.equal(*pair) for pair in zip(stock, gradients, strict=True))


@pytest.mark.gpu
@on_ranks(3)
def test_gradients_on_an_accelerator():
    """Wide and narrow gradients, weighed by counts 1, 0 and 3 that are there, too."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(3, 600), nn.Linear(600, 600)).cuda()
    model.append(nn.Linear(2, 2).cuda().half())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, nan if rank == 1 else rank + 1.0)
    average_gradients(model, reduction="weighted_mean", weight=torch.tensor(0 if rank == 1 else rank + 1).cuda())
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 2.5))


def reduce_in_groups(members: Sequence[Sequence[int]]) -> float:
    """Body: every rank reduces in the first group that it is a member of."""
    groups = [dist.new_group(list(ranks)) for ranks in members]
    mine = next(index for index, ranks in enumerate(members) if dist.get_rank() in ranks)
    w = nn.Parameter(torch.zeros(()))
    w.grad = torch.tensor(float(dist.get_rank() + 1))
    average_gradients([w], reduction="weighted_mean", weight=dist.get_rank() + 1, group=groups[mine])
    dist.destroy_process_group(groups[mine])
    return w.grad.item()


@pytest.mark.parametrize(
    ("members", "expected"),
    [([[1, 3], [0], [2]], [1.0, 20 / 6, 3.0, 20 / 6]), ([[0, 2], [1, 3]], [2.5, 20 / 6, 2.5, 20 / 6])],
    ids=str,
)
def test_groups_smaller_than_the_world(world, members, expected):
    """Groups reduce over their members alone, at once; a group of one rank communicates with nobody."""
    assert pytest.approx(expected) == world(4).run(reduce_in_groups, members)


def dtensor(model: nn.Module) -> list[Tensor]:
    from torch.distributed.tensor import DeviceMesh, distribute_tensor  # noqa: PLC0415  # slow to import

    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    return [nn.Parameter(distribute_tensor(torch.zeros(2), mesh))]


def broken_generator(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    raise RuntimeError("the generator broke")


def sparse(model: nn.Module) -> list[Tensor]:
    table = nn.Parameter(torch.zeros(2, 2))
    table.grad = torch.zeros(2, 2).to_sparse()
    return [*model.parameters(), table]


def failing_rule(place: Place, weight: Any) -> Share:
    raise KeyError("no such place")


class RankDependent:
    """No number, and what messages call it differs between ranks."""

    def __repr__(self) -> str:
        return f"the weight of rank {dist.get_rank()}"


def pair(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, outputs))


EVERYWHERE = (0, 1, 2)
# Name: the ranks of three that it concerns, what is given there instead, and what all ranks are told. A source is made
# of the model.
MISUSES: dict[str, tuple[Sequence[int], dict[str, Any], str]] = {
    "weight of a batch": ([2], {"weight": torch.ones(3)}, r"on rank 2: a weight is one number.*shape \(3,\)"),
    "negative weight": ([1], {"weight": -2}, r"on rank 1: weight -2\.0 is not a finite number >= 0"),
    "two problems": ([0, 2], {"weight": RankDependent()}, r"on rank 0: a weight is one number.*; on rank 2: "),
    "no weight": ([0, 2], {"weight": None}, r"on ranks 0, 2: .*'weighted_mean'.* needs a weight: pass weight="),
    "weights too large": (EVERYWHERE, {"weight": 1.7e308}, r"the normalizer inf\. Scale the weights"),
    "other reduction": ([1], {"reduction": "mean"}, r"cannot reduce: reduction='weighted_mean'.*; reduction='mean'"),
    "no reduction": ([1], {"reduction": "median"}, r"on rank 1: reduction='median' is not.* Did you mean 'mean'"),
    "failing rule": (EVERYWHERE, {"reduction": failing_rule}, r"rule 'failing_rule' failed on.*no such place"),
    "fewer parameters": ([2], {"source": lambda model: model[0]}, "4 parameters on ranks 0, 1; 2 parameters on rank 2"),
    "another shape": ([1], {"source": lambda model: pair(3)}, r"of shape \(1, 2\).* 0, 2;.* of shape \(3, 2\).* 1"),
    "another dtype": ([0], {"source": lambda model: pair(1).double()}, r"'0\.weight' of.*torch\.float64 on cpu on.* 0"),
    "sparse": ([1], {"source": sparse}, r"on rank 1: .* 4 is torch\.sparse_coo: convert it by to_dense"),
    "DDP submodule": (
        EVERYWHERE,
        {"source": lambda model: nn.ModuleDict({"generator": DistributedDataParallel(model)})},
        "generator is a DistributedDataParallel, which has reduced the gradients",
    ),
    "DTensor": (EVERYWHERE, {"source": dtensor}, r"parameter 0 is a DTensor, whose placements say how it is reduced"),
    "named": ([0], {"source": lambda model: model.named_parameters()}, r"on rank 0: parameter 0 is \('0\.weight'"),
    "broken generator": ([0], {"source": broken_generator}, r"on rank 0: RuntimeError: the generator broke"),
}


def misuse(name: str) -> None:
    """Body: call with the misuse, and check that the gradients are what they were."""
    rank, model = dist.get_rank(), pair(1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    ranks, given, _ = MISUSES[name]
    options: dict[str, Any] = {"reduction": "weighted_mean", "weight": rank + 1, "source": lambda model: model}
    options |= given if rank in ranks else {}
    try:
        average_gradients(options.pop("source")(model), **options)
    finally:
        for parameter in model.parameters():
            assert torch.equal(torch.full_like(parameter, rank + 1.0), parameter.grad)


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises_the_same_error_on_all_ranks(world, name):
    """Case 32: what one rank does wrong is the same ValueError on all ranks, and no gradient has changed."""
    errors = world(3).run_expecting_errors(misuse, name)
    assert [Raised("ValueError", errors[0].message)] * 3 == errors
    assert re.search(MISUSES[name][2], errors[0].message), errors[0].message
