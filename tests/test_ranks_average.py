"""`average_gradients` on real ranks: the numbers of one process, and the same error on all ranks if it is misused."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, NamedTuple
from unittest.mock import patch

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
                continue
            assert (mine.layout, mine.dtype) == (first.layout, first.dtype)
            pairs = zip(parts(mine), parts(first), strict=True)
            assert all(torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)) for one, other in pairs)
    return results[0]


def parts(gradient: Tensor) -> list[Tensor]:
    return [gradient.indices(), gradient.values()] if gradient.is_sparse else [gradient]


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


def coo(entries: dict[int, Any], dtype: torch.dtype = torch.float64, coalesced: bool = True) -> Tensor:
    """Return an embedding's gradient, every entry repeated over three columns; uncoalesced it has each three times."""
    values = torch.tensor(list(entries.values()), dtype=dtype)[:, None].expand(len(entries), 3)
    indices = torch.tensor([list(entries)], dtype=torch.int64)
    if not coalesced:
        indices, values = torch.cat([indices, indices], 1), torch.cat([values, values * 2])
    gradient = torch.sparse_coo_tensor(indices, values, (6, 3), check_invariants=True)
    return gradient.coalesce() if coalesced else gradient


def half(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float16)


one, lists = torch.tensor, {"reduction": "weighted_mean"}
OVERFLOWING = [half(40000.0, TINY, 60000.0, 40000.0), half(40000.0, TINY, -60000.0, 0.0)]
MILLION = [2.0**20] * 2
NARROW = [coo({1: value}, torch.float16, coalesced=False) for value in (20000.0, -20000.0)]

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
    "float16 in units": (OVERFLOWING, "normalized_sum", MILLION, None, half(80000 / 2**21, 0, 0, 40000 / 2**21)),
    "sparse of weight 0": ([coo({0: 1.0}), coo({0: nan, 3: inf})], "weighted_mean", [3, 0], None, coo({0: 1.0})),
    "sparse, no weight": ([coo({0: 1.0}), coo({0: nan})], "weighted_mean", [0, 0], None, coo({})),
    "sparse float16": (NARROW, "mean", None, None, coo({1: 0.0}, torch.float16)),
    "sparse float16, weighed": (NARROW, "weighted_mean", [3, 1], None, coo({1: 30000.0}, torch.float16)),
}


@pytest.mark.parametrize("name", GIVEN)
def test_gradient_computed_by_hand(world, name):
    """Every rank has the number computed by hand, in the dtype and layout of the gradients."""
    of_ranks, reduction, weights, nodes, expected = GIVEN[name]
    given = [[gradient] for gradient in of_ranks]
    (found,) = same_everywhere(world(len(given)).run(reduce_given, given, weights, nodes, reduction=reduction))
    if expected is None:
        assert found is None
        return
    like = next(gradient for gradient in of_ranks if gradient is not None)
    assert (like.dtype, like.layout) == (found.dtype, found.layout)
    for mine, part in zip(parts(found), parts(torch.as_tensor(expected, dtype=found.dtype)), strict=True):
        torch.testing.assert_close(mine, part, rtol=1e-12, atol=0, equal_nan=True)


COMPLEX = {"dtype": torch.complex64}
SPARSE: dict[str, Gradients] = {
    "even": [coo({0: 1.0, 2: 2.0}), coo({2: 4.0, 5: 8.0}), coo({1: 1.0, 3: 7.0})],
    "uneven": [coo({0: 1.0}), coo({0: 2.0, 1: 4.0, 2: 8.0, 4: 0.5}), coo({5: 3.0, 0: 1.0})],
    "empty on rank 1": [coo({0: 1.0}), coo({}), coo({0: 3.0})],
    "empty": [coo({}), coo({}), coo({})],
    "uncoalesced": [coo({0: 1.0, 1: 2.0}, coalesced=False), coo({1: 1.0}), coo({1: 1.0}, coalesced=False)],
    "None on ranks 0 and 2": [None, coo({1: 4.0, 3: 2.0}), None],
    "two sparse dimensions": [torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse(), torch.zeros(3, 3).to_sparse()],
    "complex": [coo({0: 1j}, **COMPLEX), coo({0: 2.0}, **COMPLEX), coo({}, **COMPLEX)],
}


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
@pytest.mark.parametrize("case", SPARSE)
def test_sparse_gradients(world, case, reduction):
    """They stay sparse beside dense ones and have the values of the dense formula, whatever entries each rank has."""
    of_ranks, weights = [[gradient, torch.arange(3.0)] for gradient in SPARSE[case]], [2, 1, 5]
    sparse, _ = same_everywhere(world(3).run(reduce_given, of_ranks, weights, reduction=reduction))
    assert sparse.is_sparse
    assert sparse.is_coalesced()
    like = next(gradient for gradient in SPARSE[case] if gradient is not None).to_dense()
    gradients = [torch.zeros_like(like) if gradient is None else gradient.to_dense() for gradient in SPARSE[case]]
    expected = combine(torch.stack(gradients), rule=RULES[reduction], nodes=[0, 0, 0], weights=weights)
    torch.testing.assert_close(sparse.to_dense(), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 2**19])
def test_narrow_gradients_are_rounded_once(world, dtype, size):
    """The mean of 4 ranks' narrow gradients is the exact mean, rounded once; a sum in the narrow type is not."""
    draw = torch.Generator().manual_seed(size)
    # Multiples of 1/64 below 2: float32 adds four of them exactly.
    gradients = [(torch.randint(-128, 128, (size,), generator=draw) / 64).to(dtype) for _ in range(4)]
    (mean,) = same_everywhere(world(4).run(reduce_given, [[gradient] for gradient in gradients]))
    exact = torch.stack([gradient.double() for gradient in gradients]).sum(0) / 4
    assert torch.equal(exact.to(dtype), mean)


@pytest.mark.parametrize("size", [3, 2**18])
def test_complex_gradients(world, size):
    """Complex gradients are reduced by parts: an infinite real part makes no NaN of the imaginary part."""
    of_ranks = [[torch.full((size,), value)] for value in (1 + 2j, 3 - 4j, complex(inf, 1))]
    (mean,) = same_everywhere(world(3).run(reduce_given, of_ranks))
    assert torch.isposinf(mean.real).all()
    torch.testing.assert_close(mean.imag, torch.full((size,), -1 / 3))


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
    stock_reduce, stock_gather = dist.all_reduce, dist.all_gather

    class Recorded(NamedTuple):
        work: Any
        size: int

        def wait(self) -> None:
            seen.append(("wait", self.size))
            self.work.wait()

    def all_reduce(tensor: Tensor, *, group: Any, async_op: bool) -> Any:  # a sum: a backend may know nothing else
        seen.append(("all_reduce", tensor.numel()))
        return Recorded(stock_reduce(tensor, group=group, async_op=async_op), tensor.numel())

    def all_gather(tensors: list[Tensor], tensor: Tensor, **rest: Any) -> Any:
        seen.append(("all_gather", tensor.numel()))
        return stock_gather(tensors, tensor, **rest)

    with patch.multiple(dist, all_reduce=all_reduce, all_gather=all_gather):
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
    """Dense, narrow and sparse gradients, weighed by counts 1, 0 and 3 that are there, too."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 600), nn.Linear(600, 600)).cuda()
    model.append(nn.Linear(2, 2).cuda().half())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, nan if rank == 1 else rank + 1.0)
    model[0].weight.grad = coo({rank: rank + 1.0, 5: 4.0}, torch.float32).cuda()
    average_gradients(model, reduction="weighted_mean", weight=torch.tensor(0 if rank == 1 else rank + 1).cuda())
    sparse, *dense = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    assert [[0, 2, 5]] == sparse.indices().tolist()
    assert pytest.approx([0.25, 2.25, 4.0]) == sparse.values()[:, 0].tolist()
    assert len(dense) == 6
    for gradient in dense:
        torch.testing.assert_close(gradient, torch.full_like(gradient, 2.5))


def reduce_in_groups(members: Sequence[Sequence[int]], outsider: bool) -> list[float]:
    """Body: every rank reduces in the first group that it is a member of, or in the first one at all if `outsider`."""
    groups = [dist.new_group(list(ranks)) for ranks in members]
    try:
        mine = 0 if outsider else next(index for index, ranks in enumerate(members) if dist.get_rank() in ranks)
        w = nn.Parameter(torch.zeros(()))
        w.grad = torch.tensor(float(dist.get_rank() + 1))
        average_gradients([w], reduction="weighted_mean", weight=dist.get_rank() + 1, group=groups[mine])
        return [w.grad.item()]
    finally:
        for group in groups:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


@pytest.mark.parametrize(
    ("members", "expected"),
    [([[1, 3], [0], [2]], [1.0, 20 / 6, 3.0, 20 / 6]), ([[0, 2], [1, 3]], [2.5, 20 / 6, 2.5, 20 / 6])],
    ids=str,
)
def test_groups_smaller_than_the_world(world, members, expected):
    """Groups reduce over their members alone, at once; a group of one rank communicates with nobody."""
    assert [pytest.approx([number]) for number in expected] == world(4).run(reduce_in_groups, members, False)


def test_a_rank_outside_the_group_is_told(world):
    """A rank that is not a member of the group gets an error at once, and the members reduce without it."""
    first, second, outsider = world(3).run_expecting_errors(reduce_in_groups, [[0, 1]], True)
    assert pytest.approx([5 / 3]) == first == second
    assert "global rank 2 is not a member of the group" in outsider.message


def with_gradient(gradient: Tensor) -> Callable[[nn.Module], Any]:
    """Return a source with one more parameter, which has this gradient."""

    def source(model: nn.Module) -> list[Tensor]:
        extra = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
        extra.grad = gradient
        return [*model.parameters(), extra]

    return source


def another_dtype(model: nn.Module) -> list[Tensor]:
    extra = nn.Parameter(torch.zeros(2))
    extra.grad_dtype = None
    extra.grad = torch.zeros(2, dtype=torch.float64)
    return [extra]


def dtensor(model: nn.Module) -> list[Tensor]:
    from torch.distributed.tensor import DeviceMesh, distribute_tensor  # noqa: PLC0415  # slow to import

    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    return [nn.Parameter(distribute_tensor(torch.zeros(2), mesh))]


def compressed_rows(model: nn.Module) -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the layout beta
        parameter = nn.Parameter(torch.eye(2).to_sparse_csr())
        parameter.grad = torch.eye(2).to_sparse_csr()
    return [parameter]


def broken_generator(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    raise RuntimeError("the generator broke")


class FullyShardedDataParallel(nn.Linear):
    """Named like torch's, which is told by its name."""


def sparse_on_rank_1(model: nn.Module) -> list[Tensor]:
    zeros = torch.zeros(2, 2)
    return with_gradient(zeros.to_sparse() if dist.get_rank() == 1 else zeros)(model)


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
    "two problems": ([0, 2], {"weight": RankDependent()}, r"on rank 0: a weight is one number.*; on rank 2: "),
    "weight on some ranks": (
        [0, 2],
        {"weight": None},
        r"on ranks 0, 2: .*'weighted_mean'.* needs a weight: pass weight=",
    ),
    "weights too large": (EVERYWHERE, {"weight": 1.7e308}, r"the normalizer inf\. Scale the weights"),
    "other reduction": (
        [1],
        {"reduction": "mean"},
        r"cannot reduce: reduction='weighted_mean'.* 0, 2; reduction='mean'.* on rank 1",
    ),
    "unknown reduction": (
        [1],
        {"reduction": "median"},
        r"on rank 1: reduction='median' is not a rule\. Did you mean 'mean'\? Use one of 'mean'",
    ),
    "failing rule": (EVERYWHERE, {"reduction": failing_rule}, r"rule 'failing_rule' failed on.*no such place"),
    "fewer parameters": (
        [2],
        {"source": lambda model: model[0]},
        r"cannot reduce: 4 parameters on ranks 0, 1; 2 parameters on rank 2",
    ),
    "another shape": (
        [1],
        {"source": lambda model: pair(3)},
        r"'1\.weight' of shape \(1, 2\), torch.float32 on cpu.* 0, 2;.*'1\.weight' of shape \(3, 2\).*on rank 1",
    ),
    "another dtype": (
        [0],
        {"source": lambda model: pair(1).double()},
        r"'0\.weight' of.*torch\.float64 on cpu, device 0 on rank 0",
    ),
    "sparse on one rank": (
        EVERYWHERE,
        {"source": sparse_on_rank_1},
        r"the gradient of parameter 4 is dense on some ranks and sparse on others",
    ),
    "dtype of a gradient": (
        [0],
        {"source": another_dtype},
        r"on rank 0: the gradient of parameter 0 is torch\.float64.*set `grad_dtype`",
    ),
    "compressed rows": (
        [1],
        {"source": compressed_rows},
        r"on rank 1: the gradient of parameter 0 is torch\.sparse_csr; only torch\.strided and torch\.sparse_coo",
    ),
    "DDP submodule": (
        EVERYWHERE,
        {"source": lambda model: nn.ModuleDict({"generator": DistributedDataParallel(model)})},
        r"the submodule 'generator' is a DistributedDataParallel",
    ),
    "FSDP": ([1], {"source": lambda model: FullyShardedDataParallel(2, 2)}, r"on rank 1: the module is a FullySharded"),
    "DTensor": (EVERYWHERE, {"source": dtensor}, r"parameter 0 is a DTensor, whose placements say how it is reduced"),
    "lazy module": (
        [1],
        {"source": lambda model: nn.LazyLinear(2)},
        r"on rank 1: parameter 'weight' has no shape yet: run the lazy module's first forward",
    ),
    "result": ([2], {"source": lambda model: [model[0].weight * 2]}, r"on rank 2: parameter 0 is no leaf"),
    "named parameters": (
        [0],
        {"source": lambda model: model.named_parameters()},
        r"on rank 0: parameter 0 is \('0\.weight'",
    ),
    "broken generator": ([0], {"source": broken_generator}, r"on rank 0: RuntimeError: the generator broke"),
}
if not hasattr(torch.Tensor, "grad_dtype"):
    del MISUSES["dtype of a gradient"]  # an older torch has no such gradients


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


@on_ranks()
def test_no_parameters():
    """Without parameters nothing is reduced, and a bad weight is an error all the same."""
    average_gradients([])
    with pytest.raises(ValueError, match=r"on ranks 0, 1: weight -2\.0 is not a finite number"):
        average_gradients([], reduction="weighted_mean", weight=-2)
