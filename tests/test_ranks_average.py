"""`average_gradients`: the numbers of one process, and the same error on all ranks if it is misused.

Rules, weights and weights of 0 are rows of `cases.py`, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from ranks import Raised, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg.place import Place
from lightning_gradavg.reduction import average
from lightning_gradavg.reduction.average import average_gradients
from lightning_gradavg.rules import Share

Gradients = Sequence["Tensor | None"]
inf, nan = torch.inf, torch.nan
TINY = 2.0**-24


def reduce_given(of_ranks: Sequence[Gradients], weights: Any = None, **options: Any) -> Gradients:
    """Body: reduce dictated gradients, `of_ranks[rank][parameter]`, and return this rank's."""
    rank, parameters = dist.get_rank(), []
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


def half(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float16)


one = torch.tensor
OVERFLOWING = [half(40000.0, TINY, 60000.0, 40000.0), half(40000.0, TINY, -60000.0, 0.0)]
MILLION = [2.0**20] * 2

# Name: the gradient of each rank, reduction, weights, and the reduced gradient computed by hand.
GIVEN: dict[str, tuple[Gradients, str, Any, Any]] = {
    "None on a rank": ([one([2.0, 4.0]), one([4.0, 5.0]), None], "mean", None, [2.0, 3.0]),
    "one has it": ([None, one([3.0])], "sum", None, [3.0]),
    "weights that the rule ignores": ([one([2.0]), one([4.0])], "mean", [3, 0], [3.0]),
    "None": ([None, None], "mean", None, None),
    "NaN of a rank": ([one([2.0, 1.0]), one([nan, 3.0])], "mean", None, [nan, 2.0]),
    "no weight, None on a rank": ([None, torch.ones(3)], "weighted_mean", [0, 0.0], [0.0, 0.0, 0.0]),
    # Summed in float32: what fits in the result is not lost on the way, and what does not is infinite.
    "float16 mean": (OVERFLOWING, "mean", None, [40000.0, TINY, 0.0, 20000.0]),
    "float16 sum": (OVERFLOWING, "sum", None, [inf, 2 * TINY, 0.0, 40000.0]),
    "bfloat16": ([one([256.0, 1, 1, 1]).bfloat16().roll(n) for n in range(4)], "mean", None, [65.0] * 4),
    "complex": ([one([1 + 2j]), one([3 - 4j])], "mean", None, [2 - 1j]),
    "float16 in units": (OVERFLOWING, "normalized_sum", MILLION, half(80000 / 2**21, 0, 0, 40000 / 2**21)),
}


@pytest.mark.parametrize("name", GIVEN)
def test_gradient_computed_by_hand(world, name):
    of_ranks, reduction, weights, expected = GIVEN[name]
    given = [[gradient] for gradient in of_ranks]
    (found,) = same_everywhere(world(len(given)).run(reduce_given, given, weights, reduction=reduction))
    if expected is None:
        assert found is None
        return
    assert {found.dtype} == {gradient.dtype for gradient in of_ranks if gradient is not None}
    expected = torch.as_tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0, equal_nan=True)


def reduce_in_small_buckets(of_ranks: Sequence[Gradients]) -> Gradients:
    with patch.object(average, "_BUCKET_BYTES", 64):
        return reduce_given(of_ranks, reduction="sum")


def test_buckets_of_many_dtypes(world):
    """However the gradients are cut into buckets, and whatever dtypes are mixed, integers are summed exactly."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.float16]
    shapes = [(1,), (2,), (), (0, 4), (5,), (3, 2, 2)]
    kinds = [(shapes[i % 6], dtypes[i % 5]) for i in range(40)]
    of_ranks = [[torch.full(shape, rank + i).to(dtype) for i, (shape, dtype) in enumerate(kinds)] for rank in range(3)]
    found = same_everywhere(world(3).run(reduce_in_small_buckets, of_ranks))
    assert all(torch.equal(torch.full(kinds[i][0], 3.0 + 3 * i).to(kinds[i][1]), one) for i, one in enumerate(found))


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

    all_of = {name: recorded(getattr(dist, name)) for name in ("all_reduce", "all_gather")}
    with patch.multiple(dist, **all_of), patch.object(average, "_BUCKET_BYTES", 2**14):
        reduce_given(of_ranks, **options)
    return seen


def test_one_small_exchange_and_all_buckets_in_flight(world):
    """Cases 16 and 31: one exchange of five numbers, and sums alone, each begun before the first is waited for."""
    of_ranks = [[torch.ones(length) for length in [100] * 50 + [2**12, 7]]] * 2
    reduced = [4100, 900 + 2**12, 7]
    expected = [("all_gather", 5), *(("all_reduce", size) for size in reduced), *(("wait", size) for size in reduced)]
    assert [expected] * 2 == world(2).run(record_collectives, of_ranks, weights=[1, 2], reduction="weighted_mean")


REPLACED = ("conjugate", "imaginary")
WRITTEN = ("contiguous", "transposed", "contiguous on rank 0", "every other column", "channels_last", "graph")


@pytest.mark.parametrize("case", [*WRITTEN, *REPLACED])
@on_ranks(3)
def test_memory_of_a_gradient(case):
    """A gradient is reduced in place whatever its strides on any rank; one conjugated lazily is replaced."""

    def gradients(x: Tensor, rank: int) -> dict[str, Tensor]:
        image = x.reshape(1, 4, 4, 1).expand(1, 4, 4, 2).clone()
        return {
            "contiguous": x,
            "transposed": x.t().clone().t(),
            "contiguous on rank 0": x if rank == 0 else x.t().clone().t(),
            "every other column": torch.zeros(4, 8)[:, ::2].copy_(x),
            "channels_last": image.to(memory_format=torch.channels_last),
            "conjugate": torch.complex(x, -x).conj(),
            "imaginary": torch.complex(x, -x).conj().imag,
            "graph": x.clone().requires_grad_() * 1,
        }

    x, rank = torch.arange(16.0).reshape(4, 4), dist.get_rank()
    gradient = gradients(x * (rank + 1), rank)[case]
    parameter = nn.Parameter(torch.zeros_like(gradient).contiguous())
    parameter.grad, graph = gradient, gradient.grad_fn
    average_gradients([parameter], reduction="sum")
    assert ((case not in REPLACED), graph) == (parameter.grad is gradient, parameter.grad.grad_fn)
    assert torch.equal(gradients(6 * x, rank)[case], parameter.grad)


@on_ranks()
def test_gradients_in_one_memory_are_reduced_once():
    """Two parameters were given the same gradient, and a third a part of it."""
    memory = torch.full((4,), dist.get_rank() + 1.0)
    parameters = [nn.Parameter(torch.zeros(length)) for length in (4, 4, 2)]
    for parameter in parameters:
        parameter.grad = memory[: parameter.numel()]
    average_gradients(parameters, reduction="sum")
    assert [[3.0] * len(one) for one in parameters] == [one.grad.tolist() for one in parameters if one.grad is not None]


@on_ranks()
def test_module_without_gradients_is_left_alone():
    """Frozen parameters, also of integers, and parameters without gradient take part and change nothing."""
    model = nn.Linear(2, 2).requires_grad_(False)
    model.register_parameter("counts", nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False))
    average_gradients(model)
    assert all(parameter.grad is None for parameter in model.parameters())


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


@on_ranks(4)
def test_groups_smaller_than_the_world():
    """Groups reduce over their members alone, at once; a group of one rank communicates with nobody."""
    rank, members = dist.get_rank(), [[1, 3], [0], [2]]
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in members}
    (mine,) = [group for ranks, group in groups.items() if rank in ranks]
    w = nn.Parameter(torch.zeros(()))
    w.grad = torch.tensor(rank + 1.0)
    average_gradients([w], reduction="weighted_mean", weight=rank + 1, group=mine)
    dist.destroy_process_group(mine)
    assert pytest.approx([1.0, 20 / 6, 3.0, 20 / 6][rank]) == w.grad.item()


def dtensor(model: nn.Module) -> list[Tensor]:
    from torch.distributed.tensor import DeviceMesh, distribute_tensor  # noqa: PLC0415  # slow to import

    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    return [nn.Parameter(distribute_tensor(torch.zeros(2), mesh))]


def sparse(model: nn.Module) -> list[Tensor]:
    table = nn.Parameter(torch.zeros(2, 2))
    table.grad = torch.zeros(2, 2).to_sparse()
    return [*model.parameters(), table]


def failing_rule(place: Place, weight: Any) -> Share:
    raise KeyError("no such place")


def of_tensors(place: Place, weight: Any) -> Share:
    return Share(torch.tensor(nan), 1.0)


def expanded(model: nn.Module) -> list[Tensor]:
    table = nn.Parameter(torch.zeros(2, 2))
    table.grad = torch.zeros(2).expand(2, 2)
    return [*model.parameters(), table]


def pair(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, outputs))


EVERYWHERE = (0, 1, 2)
# Name: the ranks of three that it concerns, what is given there instead, and what all ranks are told. A source is made
# of the model.
MISUSES: dict[str, tuple[Sequence[int], dict[str, Any], str]] = {
    "weight of a batch": ([2], {"weight": torch.ones(3)}, r"on rank 2: a weight is one number.*shape \(3,\)"),
    "negative weight": ([1], {"weight": -2}, r"on rank 1: weight -2\.0 is not a finite number >= 0"),
    "no weight": ([0, 2], {"weight": None}, r"on ranks 0, 2: .*'weighted_mean'.* needs a weight: pass weight="),
    "weights too large": (EVERYWHERE, {"weight": 1.7e308}, r"the normalizer inf\. Scale the weights"),
    "weights too small": (
        EVERYWHERE,
        {"reduction": "normalized_sum", "weight": 5e-324},
        r"\[1\.0, 1\.0, 1\.0\] and the normalizer 1\.5e-323\. .* quotients, are finite",
    ),
    "a tensor for a share": (EVERYWHERE, {"reduction": of_tensors}, r"the multipliers \[nan, nan, nan\]"),
    "other reduction": ([1], {"reduction": "mean"}, r"cannot reduce: reduction='weighted_mean'.*; reduction='mean'"),
    "no reduction": ([1], {"reduction": "median"}, r"on rank 1: reduction='median' is not.* Did you mean 'mean'"),
    "failing rule": (EVERYWHERE, {"reduction": failing_rule}, r"rule 'failing_rule' failed on.*no such place"),
    "fewer parameters": ([2], {"source": lambda model: model[0]}, "4 parameters on ranks 0, 1; 2 parameters on rank 2"),
    "another shape": ([1], {"source": lambda model: pair(3)}, r"of shape \(1, 2\).* 0, 2;.* of shape \(3, 2\).* 1"),
    "another dtype": ([0], {"source": lambda model: pair(1).double()}, r"'0\.weight' of.*torch\.float64 on cpu on.* 0"),
    "sparse": ([1], {"source": sparse}, r"on rank 1: .* 4 is torch\.sparse_coo: convert it by to_dense"),
    "expanded": ([1], {"source": expanded}, r"on rank 1: .* 4 repeats elements in memory, .*: clone\(\) it"),
    "DDP submodule": (
        EVERYWHERE,
        {"source": lambda model: nn.ModuleDict({"generator": DistributedDataParallel(model)})},
        "generator is a DistributedDataParallel, which has reduced the gradients",
    ),
    "DTensor": (EVERYWHERE, {"source": dtensor}, r"parameter 0 is a DTensor, whose placements say how it is reduced"),
    "named": ([0], {"source": lambda model: model.named_parameters()}, r"on rank 0: parameter 0 is \('0\.weight'"),
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


def test_original_error_is_kept():
    """The error that this rank met is the cause of the one that all ranks raise."""
    with pytest.raises(ValueError, match="got 'x' of type str") as caught:
        average_gradients([], weight="x")
    assert isinstance(caught.value.__cause__, TypeError)
