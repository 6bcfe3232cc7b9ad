"""`average_gradients`: the numbers of one process, and the same error on all ranks if it is misused.

Rules, weights and weights of 0 are rows of `cases.py`, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from ranks import Raised, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg.reduction import average
from lightning_gradavg.reduction.average import average_gradients

Gradients = Sequence["Tensor | None"]


def reduce_given(of_ranks: Sequence[Gradients], weights: Any = None, **options: Any) -> Gradients:
    """Body: reduce dictated gradients, `of_ranks[rank][parameter]`, and return this rank's."""
    rank = dist.get_rank()
    parameters = []
    for gradients in zip(*of_ranks, strict=True):
        like = next(gradient for gradient in gradients if gradient is not None)
        parameters.append(nn.Parameter(torch.zeros(like.shape, dtype=like.dtype)))
        parameters[-1].grad = gradients[rank]
    if weights is not None:
        options["weight"] = weights[rank]
    average_gradients(parameters, **options)
    return [parameter.grad for parameter in parameters]


def reduce_in_small_buckets(of_ranks: Sequence[Gradients]) -> Gradients:
    with patch.object(average, "_BUCKET_BYTES", 64):
        return reduce_given(of_ranks, reduction="sum")


def test_buckets_of_many_dtypes(world):
    """However gradients are cut into buckets, and whatever dtypes are mixed, a sum is rounded once; None is 0."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.float16]
    shapes = [(1,), (2,), (), (0, 4), (5,), (3, 2, 2)]
    kinds = [(shapes[i % 6], dtypes[i % 5]) for i in range(40)]
    # In bfloat16, 256 + 1 is 256.
    of_ranks: list[list[Any]] = [
        [torch.full(shape, number + 4.0 * i * (number > 1)).to(dtype) for i, (shape, dtype) in enumerate(kinds)]
        for number in (256.0, 1.0, 1.0)
    ]
    expected = [torch.full(shape, 258.0 + 4 * i).to(dtype) for i, (shape, dtype) in enumerate(kinds)]
    of_ranks[2][0], expected[0] = None, expected[0] - 1
    for found in world(3).run(reduce_in_small_buckets, of_ranks):
        assert [True] * 40 == [torch.equal(*pair) for pair in zip(expected, found, strict=True)]


def record_collectives(of_ranks: Sequence[Gradients], **options: Any) -> list[tuple[str, int]]:
    """Body: return the collectives of a call and the waits for the sums, in order, each with its size."""
    seen: list[tuple[str, int]] = []

    def recorded(stock: Any) -> Any:
        def call(*tensors: Any, **rest: Any) -> Any:
            assert {"group", "async_op"} >= rest.keys()  # a sum: a backend may know nothing else
            size = tensors[-1].numel()
            work = stock(*tensors, **rest)
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
    """Cases 16 and 31: one exchange of 18 numbers, and sums alone, each begun before the first is waited for."""
    of_ranks = [[torch.ones(length) for length in [100] * 50 + [2**12, 7]]] * 2
    reduced = [4100, 900 + 2**12, 7]
    begun = [("all_gather", 18), ("wait", 18), *(("all_reduce", size) for size in reduced)]
    expected = [*begun, *(("wait", size) for size in reduced)]
    assert [expected] * 2 == world(2).run(record_collectives, of_ranks, weights=[1, 2], reduction="weighted_mean")


def in_many_memories(x: Tensor) -> list[Tensor]:
    """Return gradients that are laid out differently, one with a graph; the sum replaces one conjugated lazily."""
    nhwc = x.reshape(1, 4, 4, 1).repeat(1, 1, 1, 2).to(memory_format=torch.channels_last)
    graph = x.clone().requires_grad_() * 1
    return [x, x.t(), torch.zeros(4, 8)[:, ::2].copy_(x), nhwc, torch.complex(x, -x).conj(), graph]


@on_ranks(3)
def test_memory_of_a_gradient():
    """A gradient is reduced in place whatever its strides."""
    x = torch.arange(16.0).reshape(4, 4)
    parameters = list[Any]()
    for gradient in (gradients := in_many_memories(x * (dist.get_rank() + 1))):
        parameters.append(nn.Parameter(torch.zeros_like(gradient).contiguous()))
        parameters[-1].grad = gradient
    average_gradients(parameters, reduction="sum")
    for expected, parameter, gradient in zip(in_many_memories(6 * x), parameters, gradients, strict=True):
        assert torch.equal(expected, parameter.grad)
        assert type(expected.grad_fn) is type(parameter.grad.grad_fn)
        assert parameter.grad is gradient or gradient.is_conj()


SOURCES: Any = [
    lambda model: [model],
    lambda model: [(parameter for parameter in model.parameters())],
    lambda model: [[model[0].weight, model[0].bias, model[2].weight, model[2].bias]],  # one twice
    lambda model: model.parameters(),  # one at a time
]


@on_ranks()
def test_mean_has_the_bits_of_ddp():
    """On two ranks, with parameters in any form, of which tied weights count once, and those without gradient not."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    vars(model[2])["_parameters"]["weight"] = model[0].weight
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    wrapped = DistributedDataParallel(model)
    found = list[Any]()
    model.register_parameter("counts", nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False))
    for source in (None, *SOURCES):
        model.zero_grad()
        with wrapped.no_sync() if source else nullcontext():
            wrapped(x).square().mean().backward()
        for given in source(model) if source else ():
            average_gradients(given, weight=dist.get_rank())  # which the mean does not use
        found.append([parameter.grad for parameter in model.parameters()])
    stock, *ours = found
    assert [True, False, False, False] == [gradient is None for gradient in stock]
    for gradients in ours:
        assert all(one is other or torch.equal(one, other) for one, other in zip(stock, gradients, strict=True))


@on_ranks(4)
def test_groups_smaller_than_the_world():
    """Groups reduce over their members alone, at once; a group of one rank communicates with nobody."""
    rank = dist.get_rank()
    members = [[1, 3], [0], [2]]
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in members}
    (mine,) = [group for ranks, group in groups.items() if rank in ranks]
    w = nn.Parameter(torch.zeros(()))
    w.grad = torch.tensor(rank + 1.0)
    average_gradients([w], reduction="weighted_mean", weight=rank + 1, group=mine)
    dist.destroy_process_group(mine)
    assert pytest.approx([1.0, 20 / 6, 3.0, 20 / 6][rank]) == w.grad.item()


def dtensor(model: nn.Module) -> list[Tensor]:
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415  # slow to import

    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    return [nn.Parameter(distribute_tensor(torch.zeros(2), mesh))]


def ending_in(gradient: Tensor) -> Callable[[nn.Module], list[Tensor]]:
    """Return what gives a model's parameters and one more, with this gradient."""
    table = nn.Parameter(torch.zeros(2, 2))
    table.grad = gradient
    return lambda model: [*model.parameters(), table]


def pair(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, outputs))


EVERYWHERE = (0, 1, 2)
# Name: the ranks of three that it concerns, what is given there instead, and what all ranks are told. A source is made
# of the model.
# fmt: off
MISUSES: dict[str, tuple[Sequence[int], dict[str, Any], str]] = {
    "no weight": ([0, 2], {"weight": None}, r"on ranks 0, 2: .*'weighted_mean'.* needs a weight: pass weight="),
    "weights too large": (EVERYWHERE, {"weight": 1.7e308}, r"the normalizer inf\. Scale the weights"),
    "weights too small": (
        EVERYWHERE, {"reduction": "normalized_sum", "weight": 5e-324},
        r"\[1\.0, 1\.0, 1\.0\] and the normalizer 1\.5e-323\. .* quotients, are finite"),
    "other reduction": ([1], {"reduction": "mean"}, r"cannot reduce: reduction='weighted_mean'.*; reduction='mean'"),
    "no reduction": ([1], {"reduction": "median"}, r"on rank 1: reduction='median' is not.* Did you mean 'mean'"),
    "fewer parameters": ([2], {"source": lambda model: model[0]}, "4 parameters on ranks 0, 1; 2 parameters on rank 2"),
    "another shape": ([1], {"source": lambda model: pair(3)}, r"of shape \(1, 2\).* 0, 2;.* of shape \(3, 2\).* 1"),
    "another dtype": ([0], {"source": lambda model: pair(1).double()}, r"'0\.weight' of.*torch\.float64 on cpu on.* 0"),
    "sparse": (
        [1], {"source": ending_in(torch.zeros(2, 2).to_sparse())},
        r"on rank 1: .* 4 has a gradient of layout torch\.sparse_coo: convert it"),
    "expanded": (
        [1], {"source": ending_in(torch.zeros(2).expand(2, 2))},
        r"on rank 1: .* 4 has a gradient that repeats elements in memory, .*: clone\(\) it"),
    "DDP submodule": (
        EVERYWHERE, {"source": lambda model: nn.ModuleDict({"generator": DistributedDataParallel(model)})},
        "generator is a DistributedDataParallel, which has reduced the gradients"),
    "DTensor": (EVERYWHERE, {"source": dtensor}, r"parameter 0 is a DTensor, whose placements say how it is reduced"),
    "named": ([0], {"source": lambda model: model.named_parameters()}, r"on rank 0: parameter 0 is \('0\.weight'"),
}
# fmt: on


def misuse(name: str) -> None:
    """Body: call with the misuse, and check that the gradients are what they were."""
    rank = dist.get_rank()
    model = pair(1)
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


@on_ranks()
def test_a_rule_without_weights_ignores_them():
    """Whatever they are, and on whichever rank: (1 + 2) / 2."""
    parameter = nn.Parameter(torch.ones(()))
    parameter.grad = torch.tensor(1.0 + dist.get_rank())
    average_gradients([parameter], weight=[None, "many"][dist.get_rank()])
    assert parameter.grad.item() == 1.5


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises_the_same_error_on_all_ranks(world, name):
    """Case 32: what one rank does wrong is the same ValueError on all ranks, and no gradient has changed."""
    errors = world(3).run_expecting_errors(misuse, name)
    assert [Raised("ValueError", errors[0].message)] * 3 == errors
    assert re.search(MISUSES[name][2], errors[0].message), errors[0].message


def test_original_error_is_kept():
    """The error that this rank met is the cause of the one that all ranks raise."""
    with pytest.raises(ValueError, match="got 'x' of type str") as caught:
        average_gradients([], reduction="weighted_mean", weight="x")
    assert isinstance(caught.value.__cause__, TypeError)
