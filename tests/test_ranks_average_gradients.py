"""`average_gradients` with gradients of any kind, and used wrongly: one error on all ranks, no gradient changed."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from averaging import Gradients, approx, literal, reduce_given, same_everywhere
from ranks import Raised
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_gradavg.place import Place
from lightning_gradavg.reduction.average import average_gradients
from lightning_gradavg.rules import Share


def test_none_on_some_ranks_counts_as_zero(world):
    """Case 47: None counts as zero and receives the reduced gradient; None on all ranks stays None."""
    of_ranks = [
        [torch.tensor([1.0]), None, None, torch.ones(2, 2)],
        [None, torch.tensor([2.0, 4.0]), None, torch.ones(2, 2)],
        [None, torch.tensor([4.0, 5.0]), None, torch.ones(2, 2)],
    ]
    results = world(3).run(reduce_given, of_ranks)
    first, second, last = same_everywhere(results, 3)
    assert torch.equal(torch.tensor([1.0]) * (1 / 3), first)
    assert torch.equal(torch.tensor([2.0, 3.0]), second)
    assert approx([1.0] * 4, 1e-6) == last.flatten().tolist()
    assert [None] * 3 == [result[2] for result in results]


def reduce_partly_frozen() -> dict[str, Tensor | None]:
    """Body: a model with a frozen layer, a head that nobody used and one that only rank 0 used."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in ("frozen", "body", "unused", "used_on_0")})
    model["frozen"].requires_grad_(False)
    out = model["body"](model["frozen"](torch.ones(1, 2)) * torch.ones(1, 2))
    if dist.get_rank() == 0:
        out = out + model["used_on_0"](torch.ones(1, 2))
    out.sum().backward()
    average_gradients(model, reduction="sum")
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_frozen_and_unused_parameters(world):
    """Case 47: frozen and unused parameters keep None, a head that one rank used has its gradient on all ranks."""
    for gradients in world(2).run(reduce_partly_frozen):
        assert gradients["frozen.weight"] is None
        assert gradients["unused.weight"] is None
        assert gradients["body.weight"] is not None
        assert torch.equal(torch.ones(1, 2), gradients["used_on_0.weight"])


def test_float16_neither_overflows_nor_underflows(world):
    """float16 is summed in float32: what fits in the result is not lost on the way, and what does not is infinite."""
    tiny = 2.0**-24
    values = [[40000.0, 40000.0], [tiny, tiny], [60000.0, -60000.0], [40000.0, 0.0]]
    of_ranks = [[torch.tensor([pair[rank] for pair in values], dtype=torch.float16)] for rank in range(2)]
    (mean,) = same_everywhere(world(2).run(reduce_given, of_ranks), 2)
    assert [40000.0, tiny, 0.0, 20000.0] == mean.tolist()
    (total,) = same_everywhere(world(2).run(reduce_given, of_ranks, reduction="sum"), 2)
    assert [torch.inf, 2 * tiny, 0.0, 40000.0] == total.tolist()
    weights = [2.0**20, 2.0**20]
    (normalized,) = same_everywhere(world(2).run(reduce_given, of_ranks, weights, reduction="normalized_sum"), 2)
    expected = [torch.tensor(sum(pair) / 2.0**21).half().item() for pair in values]
    assert expected == normalized.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 2**19])
def test_narrow_gradients_are_rounded_once(world, dtype, size):
    """The mean of 4 ranks' narrow gradients is the exact mean, rounded once; a sum in the narrow type is not."""
    draw = torch.Generator().manual_seed(size)
    # Multiples of 1/64 below 2: float32 adds four of them exactly.
    gradients = [(torch.randint(-128, 128, (size,), generator=draw) / 64).to(dtype) for _ in range(4)]
    (mean,) = same_everywhere(world(4).run(reduce_given, [[gradient] for gradient in gradients]), 4)
    exact = torch.stack([gradient.double() for gradient in gradients]).sum(0) / 4
    assert dtype == mean.dtype
    assert torch.equal(exact.to(dtype), mean)


@pytest.mark.parametrize("size", [3, 2**18])
def test_complex_gradients(world, size):
    """Complex gradients are reduced by parts: an infinite real part makes no NaN of the imaginary part."""
    of_ranks = [[torch.full((size,), value)] for value in (1 + 2j, 3 - 4j, complex(torch.inf, 1))]
    (mean,) = same_everywhere(world(3).run(reduce_given, of_ranks), 3)
    assert torch.complex64 == mean.dtype
    assert torch.isposinf(mean.real).all()
    torch.testing.assert_close(mean.imag, torch.full((size,), -1 / 3))


def reduce_in_place(case: str, size: int) -> tuple[list[Tensor], bool]:
    """Body: reduce gradients of a special memory. Return those in contiguous memory, and whether it was in place."""
    x = torch.arange(size * size, dtype=torch.float32).reshape(size, size) * (dist.get_rank() + 1)
    image = x.reshape(1, size, size, 1).expand(1, size, size, 2).clone()
    gradients = {
        "contiguous": x,
        "transposed": x.t().clone().t(),
        "contiguous on rank 0": x if dist.get_rank() == 0 else x.t().clone().t(),
        "expanded": x[0].expand(size, size),
        "one element expanded": x[0, 1].expand(size, size),
        "every other column": torch.zeros(size, 2 * size)[:, ::2].copy_(x),
        "half of one tensor": torch.zeros(size, 2 * size)[:, :size].copy_(x),
        "channels_last": image.to(memory_format=torch.channels_last),
        "conjugate": torch.complex(x, -x).conj(),
        "imaginary": torch.complex(x, -x).conj().imag,
        "graph": x.clone().requires_grad_() * 1,
    }
    before = gradients[case]
    parameter = nn.Parameter(torch.zeros(before.shape, dtype=before.dtype))
    parameter.grad = before
    average_gradients([parameter], reduction="sum")
    assert parameter.grad is not None
    return [parameter.grad.detach().resolve_conj().resolve_neg().contiguous()], parameter.grad is before


@pytest.mark.parametrize("size", [4, 520], ids=["small", "large"])
@pytest.mark.parametrize(
    "case",
    [
        *("contiguous", "transposed", "contiguous on rank 0", "expanded", "one element expanded", "every other column"),
        *("half of one tensor", "channels_last", "conjugate", "imaginary", "graph"),
    ],
)
def test_memory_of_a_gradient(world, case, size):
    """A gradient is reduced in place whatever its strides on any rank; one that cannot be written is replaced."""
    results = world(3).run(reduce_in_place, case, size)
    (total,) = same_everywhere([gradients for gradients, _ in results], 3)
    x = torch.arange(size * size, dtype=torch.float32).reshape(size, size) * 6
    expected = {
        "expanded": x[0].expand(size, size),
        "one element expanded": x[0, 1].expand(size, size),
        "channels_last": x.reshape(1, size, size, 1).expand(1, size, size, 2),
        "conjugate": torch.complex(x, x),
    }
    assert torch.equal(expected.get(case, x), total)
    replaced = ("expanded", "one element expanded", "conjugate", "imaginary")
    assert [case not in replaced] * 3 == [in_place for _, in_place in results]


def reduce_one_memory(size: int) -> list[Tensor | None]:
    """Body: two parameters that were given the same gradient, and a third that was given a part of it."""
    memory = torch.full((size,), dist.get_rank() + 1.0)
    parameters = [
        nn.Parameter(torch.zeros(size)),
        nn.Parameter(torch.zeros(size)),
        nn.Parameter(torch.zeros(size // 2)),
    ]
    for parameter in parameters:
        parameter.grad = memory[: parameter.numel()]
    average_gradients(parameters, reduction="sum")
    return [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("size", [4, 2**19])
def test_gradients_in_one_memory_are_reduced_once(world, size):
    """Gradients of different parameters that share memory are reduced once."""
    for gradient in same_everywhere(world(2).run(reduce_one_memory, size), 2):
        assert torch.equal(torch.full_like(gradient, 3.0), gradient)


def reduce_source(source: str) -> list[Tensor | None]:
    """Body: reduce a model with tied weights, given in different ways."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    vars(model[2])["_parameters"]["weight"] = model[0].weight
    model(torch.eye(3) * (dist.get_rank() + 1)).sum().backward()
    sources: dict[str, Any] = {
        "module": model,
        "generator": (parameter for parameter in model.parameters()),
        "list with repeats": [model[0].weight, model[0].bias, model[2].weight, model[2].bias],
        "single tensors": None,
    }
    if source == "single tensors":
        for parameter in model.parameters():
            average_gradients(parameter)
    else:
        average_gradients(sources[source])
    return [parameter.grad for parameter in model.parameters()]


def test_parameters_are_given_in_any_form_and_count_once(world):
    """A module, a generator, a list that repeats a shared parameter, and single tensors give the same gradients."""
    sources = ["module", "generator", "list with repeats", "single tensors"]
    reduced = [same_everywhere(world(2).run(reduce_source, source), 2) for source in sources]
    for other in reduced[1:]:
        assert len(other) == 3
        for mine, first in zip(other, reduced[0], strict=True):
            assert torch.equal(first, mine)


def reduce_on_cuda() -> list[Tensor | None]:
    """Body: dense, narrow and sparse gradients on an accelerator, weighed by a count that is there, too."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 600), nn.Linear(600, 600)).cuda()
    model.append(nn.Linear(2, 2).cuda().half())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan if rank == 1 else rank + 1.0)
    model[0].weight.grad = coo({rank: rank + 1.0, 5: 4.0}, dtype=torch.float32).cuda()
    weight = torch.tensor(0 if rank == 1 else rank + 1, device="cuda")
    average_gradients(model, reduction="weighted_mean", weight=weight)
    return [None if parameter.grad is None else parameter.grad.cpu() for parameter in model.parameters()]


@pytest.mark.gpu
def test_gradients_on_an_accelerator(world):
    """Gradients and weights on an accelerator give the numbers computed by hand: weights 1, 0 and 3."""
    sparse, *dense = same_everywhere(world(3).run(reduce_on_cuda), 3)
    assert [[0, 2, 5]] == sparse.indices().tolist()
    assert approx([0.25, 2.25, 4.0], 1e-6) == sparse.values()[:, 0].tolist()
    assert len(dense) == 6
    for gradient in dense:
        torch.testing.assert_close(gradient, torch.full_like(gradient, 2.5))


def coo(entries: dict[int, Any], size: int = 6, dtype: torch.dtype = torch.float64, coalesced: bool = True) -> Tensor:
    """Return an embedding's gradient, every entry repeated over three columns."""
    values = torch.tensor(list(entries.values()), dtype=dtype)[:, None].expand(len(entries), 3)
    indices = torch.tensor([list(entries)], dtype=torch.int64)
    if not coalesced:
        indices, values = torch.cat([indices, indices], 1), torch.cat([values, values * 2])
    gradient = torch.sparse_coo_tensor(indices, values, (size, 3), check_invariants=True)
    return gradient.coalesce() if coalesced else gradient


SPARSE = {
    "even": [coo({0: 1.0, 2: 2.0}), coo({2: 4.0, 5: 8.0}), coo({1: 1.0, 3: 7.0})],
    "uneven": [coo({0: 1.0}), coo({0: 2.0, 1: 4.0, 2: 8.0, 4: 0.5}), coo({5: 3.0, 0: 1.0})],
    "empty on rank 1": [coo({0: 1.0}), coo({}), coo({0: 3.0})],
    "empty": [coo({}), coo({}), coo({})],
    "uncoalesced": [coo({0: 1.0, 1: 2.0}, coalesced=False), coo({1: 1.0}), coo({1: 1.0}, coalesced=False)],
    "None on ranks 0 and 2": [None, coo({1: 4.0, 3: 2.0}), None],
    "two sparse dimensions": [torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse(), torch.zeros(3, 3).to_sparse()],
    "complex": [
        coo({0: 1j}, dtype=torch.complex64),
        coo({0: 2.0}, dtype=torch.complex64),
        coo({}, dtype=torch.complex64),
    ],
}


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
@pytest.mark.parametrize("case", SPARSE)
def test_sparse_gradients(world, case, reduction):
    """Sparse gradients stay sparse and have the values of the dense formula, whatever entries each rank has."""
    dense = torch.arange(3, dtype=torch.float32)
    of_ranks = [[gradient, dense] for gradient in SPARSE[case]]
    weights = [2, 1, 5]
    sparse, _ = same_everywhere(world(3).run(reduce_given, of_ranks, weights, reduction=reduction), 3)
    assert sparse.is_sparse
    assert sparse.is_coalesced()
    like = next(gradient for gradient in SPARSE[case] if gradient is not None).to_dense()
    gradients = [torch.zeros_like(like) if gradient is None else gradient.to_dense() for gradient in SPARSE[case]]
    expected = literal(reduction, gradients, weights, [0, 0, 0])
    torch.testing.assert_close(sparse.to_dense(), expected.to(like.dtype), rtol=1e-6, atol=1e-12)


def test_sparse_gradient_of_weight_zero_is_discarded(world):
    """A sparse NaN on a rank of weight 0 is discarded; without any weight the gradient is sparse and empty."""
    of_ranks = [[coo({0: 1.0})], [coo({0: torch.nan, 3: torch.inf})]]
    (sparse,) = same_everywhere(world(2).run(reduce_given, of_ranks, [3, 0], reduction="weighted_mean"), 2)
    assert [[0]] == sparse.indices().tolist()
    assert [[1.0, 1.0, 1.0]] == sparse.values().tolist()
    (sparse,) = same_everywhere(world(2).run(reduce_given, of_ranks, [0, 0], reduction="weighted_mean"), 2)
    assert sparse._nnz() == 0


def test_narrow_sparse_gradients_are_summed_in_float32(world):
    """Repeated float16 entries do not overflow where the mean of the ranks does not."""
    of_ranks = [[coo({1: value}, dtype=torch.float16, coalesced=False)] for value in (20000.0, -20000.0)]
    (sparse,) = same_everywhere(world(2).run(reduce_given, of_ranks), 2)
    assert torch.float16 == sparse.dtype
    assert [[0.0, 0.0, 0.0]] == sparse.values().tolist()
    (sparse,) = same_everywhere(world(2).run(reduce_given, of_ranks, [3, 1], reduction="weighted_mean"), 2)
    assert [[30000.0, 30000.0, 30000.0]] == sparse.values().tolist()


def train_embedding(sparse: bool) -> list[Tensor]:
    """Body: train an embedding on different tokens per rank."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(11, 4, sparse=sparse), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.tensor([[1, 2, 2, 3], [3, 9, 10, 10], [0, 0, 0, 0]])[dist.get_rank()]
    for _ in range(5):
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        average_gradients(model, reduction="weighted_mean", weight=dist.get_rank() + 1)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_sparse_embedding_trains_like_a_dense_one(world):
    """An embedding with sparse gradients has the weights of one with dense gradients, the same bits on all ranks."""
    dense = same_everywhere(world(3).run(train_embedding, False), 3)
    sparse = same_everywhere(world(3).run(train_embedding, True), 3)
    for mine, expected in zip(sparse, dense, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-7)


def reduce_checkpointed(reentrant: bool) -> list[Tensor]:
    """Body: a checkpointed model and a plain one, 5 weighted steps each; the difference is 0 to rounding."""
    reduced = []
    for is_checkpointed in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = (
            torch.randn(4, 4, dtype=torch.float64)[:3]
            if dist.get_rank() == 0
            else torch.ones(1, 4, dtype=torch.float64)
        )
        x.requires_grad_()
        for _ in range(5):
            optimizer.zero_grad()
            out = checkpoint(model, x, use_reentrant=reentrant) if is_checkpointed else model(x)
            out.square().mean().backward()
            average_gradients(model, reduction="weighted_mean", weight=len(x))
            optimizer.step()
        reduced += [parameter.detach() for parameter in model.parameters()]
    return reduced


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(world, reentrant):
    """Case 45: a checkpointed model trains as the plain one does, with weights 3 and 1."""
    weights = same_everywhere(world(2).run(reduce_checkpointed, reentrant), 2)
    for with_checkpoint, without in zip(weights[:4], weights[4:], strict=True):
        torch.testing.assert_close(with_checkpoint, without, rtol=1e-12, atol=1e-12)


def reduce_penalty() -> list[Tensor | None]:
    """Body: the gradient of a squared gradient, which a bias does not enter."""
    w, b = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))
    x = torch.tensor(dist.get_rank() + 1.0, requires_grad=True)
    (slope,) = torch.autograd.grad(w * x**2 + b, x, create_graph=True)
    slope.square().backward()
    average_gradients([w, b])
    return [w.grad, b.grad]


def test_gradient_penalty(world):
    """Case 48: loss (dy/dx)**2 of y = w x**2 + b at x = 1 and x = 2 has gradient 20 for w, and none for b."""
    results = world(2).run(reduce_penalty)
    assert [[20.0, None]] * 2 == [[w.item(), b] for w, b in results]


def train_with_a_lost_loss(policy: str) -> Tensor:
    """Body: 5 steps of gradient 2 on rank 0 and 4 on rank 1, whose loss is NaN at the third."""
    w = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([w], lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        lost = step == 2 and dist.get_rank() == 1
        loss = w * (2.0 + 2.0 * dist.get_rank()) * (torch.nan if lost else 1.0)
        if policy == "nan" or not lost:
            loss.backward()
        average_gradients([w], reduction="weighted_mean", weight=0 if lost else 1)
        optimizer.step()
    return w.detach()


@pytest.mark.parametrize("policy", ["nan", "no backward"])
def test_a_rank_without_a_usable_loss(world, policy):
    """Case 50: weight 0 where the loss is NaN, or where there is no backward, leaves that step to the other rank."""
    results = world(2).run(train_with_a_lost_loss, policy)
    (w,) = same_everywhere([[result] for result in results], 2)
    assert approx(-1.4, 1e-6) == w.item()


def reduce_like_ddp() -> tuple[list[Tensor], list[Tensor]]:
    """Body: the gradients of DDP and of `average_gradients` for the same model and data."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    wrapped = DistributedDataParallel(model)
    wrapped(x).square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    stock = [gradient.clone() for gradient in gradients]
    with wrapped.no_sync():
        model.zero_grad()
        wrapped(x).square().mean().backward()
    average_gradients(model)
    return stock, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_mean_has_the_bits_of_ddp(world):
    """On two ranks the mean has the bits of stock DDP's."""
    for stock, ours in world(2).run(reduce_like_ddp):
        assert len(stock) == 4
        for expected, gradient in zip(stock, ours, strict=True):
            assert torch.equal(expected, gradient)


def failing_rule(place: Place, weight: Any) -> Share:
    raise KeyError("no such place")


def reduce_in_groups(members: Sequence[Sequence[int]], outsider: bool) -> list[float]:
    """Body: every rank reduces in the first group that it is a member of, or in the first one at all if `outsider`."""
    groups = [dist.new_group(list(ranks)) for ranks in members]
    try:
        mine = 0 if outsider else next(index for index, ranks in enumerate(members) if dist.get_rank() in ranks)
        w = nn.Parameter(torch.zeros(()))
        w.grad = torch.tensor(float(dist.get_rank() + 1))
        average_gradients([w], reduction="weighted_mean", weight=dist.get_rank() + 1, group=groups[mine])
        assert w.grad is not None
        return [w.grad.item()]
    finally:
        for group in groups:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


def test_groups_smaller_than_the_world(world):
    """A group reduces over its members alone; a group of one rank communicates with nobody."""
    results = world(4).run(reduce_in_groups, [[1, 3], [0], [2]], False)
    assert [[1.0], approx([20 / 6], 1e-6), [3.0], approx([20 / 6], 1e-6)] == results


def test_a_rank_outside_the_group_is_told(world):
    """A rank that is not a member of the group gets an error at once, and the members reduce without it."""
    first, second, outsider = world(3).run_expecting_errors(reduce_in_groups, [[0, 1]], True)
    assert approx([5 / 3], 1e-6) == first
    assert first == second
    assert isinstance(outsider, Raised)
    assert "global rank 2 is not a member of the group" in outsider.message


class Misused:
    """The arguments of a call that only fails on some ranks, and the gradients that it must leave alone."""

    def __init__(self, rank: int) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, rank + 1.0)
        self.source: Any = self.model
        self.options: dict[str, Any] = {"reduction": "weighted_mean", "weight": rank + 1}


def set_weight(value: Any) -> Callable[[Misused], None]:
    return lambda call: call.options.update(weight=value)


def set_reduction(value: Any) -> Callable[[Misused], None]:
    return lambda call: call.options.update(reduction=value)


def set_wire_dtype(value: Any) -> Callable[[Misused], None]:
    return lambda call: call.options.update(wire_dtype=value)


def in_double_precision(dtype: torch.dtype) -> Callable[[Misused], None]:
    def change(call: Misused) -> None:
        call.source = with_gradient(lambda zeros: zeros, dtype)(call.model)
        call.options.update(wire_dtype="bfloat16")

    return change


def set_source(make: Callable[[nn.Sequential], Any]) -> Callable[[Misused], None]:
    def change(call: Misused) -> None:
        call.source = make(call.model)

    return change


def with_gradient(
    make: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32
) -> Callable[[nn.Sequential], Any]:
    """Return a source with one more parameter, whose gradient is `make` of zeros."""

    def source(model: nn.Sequential) -> list[Tensor]:
        extra = nn.Parameter(torch.zeros(2, 2, dtype=dtype))
        extra.grad = make(torch.zeros(2, 2, dtype=dtype))
        return [*model.parameters(), extra]

    return source


def parallel(model: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(model)


def dtensor(model: nn.Sequential) -> list[Tensor]:
    from torch.distributed.tensor import DeviceMesh, distribute_tensor  # noqa: PLC0415  # slow to import

    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    return [nn.Parameter(distribute_tensor(torch.zeros(2), mesh))]


def lazy(model: nn.Sequential) -> nn.Module:
    return nn.LazyLinear(2)


def compressed_rows(model: nn.Sequential) -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the layout beta
        parameter = nn.Parameter(torch.eye(2).to_sparse_csr())
        parameter.grad = torch.eye(2).to_sparse_csr()
    return [parameter]


def broken_generator(model: nn.Sequential) -> Iterator[Tensor]:
    yield from model.parameters()
    raise RuntimeError("the generator broke")


# Name: the ranks of three that it concerns, what it does there, and what all ranks are told.
EVERYWHERE = (0, 1, 2)
MISUSES: dict[str, tuple[Sequence[int], Callable[[Misused], None], str]] = {
    "negative weight": ([1], set_weight(-1), r"on rank 1: weight -1\.0 is not a finite number >= 0"),
    "NaN weight": ([1], set_weight(torch.tensor(torch.nan)), r"on rank 1: weight nan is not a finite"),
    "infinite weight": ([0, 2], set_weight(np.inf), r"on ranks 0, 2: weight inf is not a finite"),
    "weight of text": ([2], set_weight("3"), r"on rank 2: a weight is one number, got '3' of type str"),
    "weight of a batch": ([2], set_weight(torch.ones(3)), r"on rank 2: a weight is one number.*shape \(3,\)"),
    "huge weight": ([2], set_weight(10**400), r"on rank 2: .*too large"),
    "two problems": (
        EVERYWHERE,
        lambda call: set_weight(-call.options["weight"])(call),
        r"on rank 0: weight -1\.0.*; on rank 2",
    ),
    "weight on some ranks": (
        [0, 2],
        set_weight(None),
        r"weight= was given on rank 1 but not on ranks 0, 2: pass it on all",
    ),
    "no weight": (
        EVERYWHERE,
        set_weight(None),
        r"reduction='weighted_mean', sum\(n \* g\) / sum\(n\), needs a weight: pass",
    ),
    "weights too large": (EVERYWHERE, set_weight(1.7e308), r"the normalizer inf\. Scale the weights"),
    "other reduction": (
        [1],
        set_reduction("mean"),
        r"reduction= differs.*'weighted_mean'.* on ranks 0, 2; 'mean'.* on rank 1",
    ),
    "unknown reduction": (
        [1],
        set_reduction("median"),
        r"on rank 1: reduction='median' is not a rule\. Use one of 'mean'",
    ),
    "unknown wire type": (
        [1],
        set_wire_dtype("int8"),
        (
            r"on rank 1: wire_dtype='int8' is not a type that gradients can be sent as\."
            r" Use 'bfloat16', 'float16', or None"
        ),
    ),
    "a dtype": (
        EVERYWHERE,
        set_wire_dtype(torch.bfloat16),
        r"on ranks 0, 1, 2: wire_dtype=torch\.bfloat16 is not a type that gradients can be sent as",
    ),
    "other wire type": (
        [1],
        set_wire_dtype("float16"),
        r"wire_dtype= differs between ranks: None on ranks 0, 2; 'float16' on rank 1\. Pass the same on all ranks\.",
    ),
    "double precision on the wire": (
        EVERYWHERE,
        in_double_precision(torch.float64),
        r"on ranks 0, 1, 2: wire_dtype='bfloat16' would round the gradient of parameter 4, which is torch\.float64",
    ),
    "complex double precision on the wire": (
        EVERYWHERE,
        in_double_precision(torch.complex128),
        r"parameter 4, which is torch\.complex128",
    ),
    "reduction of no type": (EVERYWHERE, set_reduction(3), r"on ranks 0, 1, 2: reduction must be one of"),
    "failing rule": (
        EVERYWHERE,
        set_reduction(failing_rule),
        r"the reduction rule 'failing_rule' failed on.*no such place",
    ),
    "fewer parameters": (
        [2],
        set_source(lambda model: model[0]),
        r"different numbers of parameters: 4 parameters on ranks 0, 1; 2 parameters on rank 2",
    ),
    "no parameters": ([1], set_source(lambda model: []), r"4 parameters on ranks 0, 2; 0 parameters on rank 1"),
    "another shape": (
        [1],
        set_source(lambda model: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))),
        r"'1\.weight' of shape \(1, 2\), torch.float32 on cpu on ranks 0, 2;.*'1\.weight' of shape \(3, 2\).*on rank 1",
    ),
    "another dtype": (
        [0],
        set_source(lambda model: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()),
        r"torch\.float64",
    ),
    "another order": (
        [0],
        set_source(lambda model: reversed(list(model.parameters()))),
        r"parameter 0 of shape \(1,\).* on rank 0",
    ),
    "sparse on one rank": (
        EVERYWHERE,
        set_source(with_gradient(lambda zeros: zeros.to_sparse() if dist.get_rank() == 1 else zeros)),
        r"4 differs between ranks: dense, torch\.float32 on ranks 0, 2; sparse with 2 .*, torch\.float32 on rank 1",
    ),
    "compressed rows": (
        [1],
        set_source(compressed_rows),
        r"on rank 1: the gradient of parameter 0 is torch\.sparse_csr; only torch\.strided and torch\.sparse_coo",
    ),
    "DDP module": (
        EVERYWHERE,
        set_source(parallel),
        r"on ranks 0, 1, 2: the module is a DistributedDataParallel, which has reduced",
    ),
    "DDP submodule": (
        EVERYWHERE,
        set_source(lambda model: nn.ModuleDict({"generator": parallel(model)})),
        r"the submodule 'generator' is a DistributedDataParallel",
    ),
    "DTensor": (EVERYWHERE, set_source(dtensor), r"parameter 0 is a DTensor, whose placements say how it is reduced"),
    "lazy module": (
        [1],
        set_source(lazy),
        r"on rank 1: parameter 'weight' has no shape yet: run the lazy module's first forward",
    ),
    "result": ([2], set_source(lambda model: [model[0].weight * 2]), r"on rank 2: parameter 0 is no leaf"),
    "named parameters": (
        [0],
        set_source(lambda model: model.named_parameters()),
        r"on rank 0: parameter 0 is \('0\.weight'",
    ),
    "number": ([0], set_source(lambda model: 5), r"on rank 0: pass a module or its parameters; got 5 of type int"),
    "broken generator": ([0], set_source(broken_generator), r"on rank 0: RuntimeError: the generator broke"),
}


def misuse(name: str) -> None:
    """Body: call with the misuse, and check that the gradients are what they were."""
    ranks, change, _ = MISUSES[name]
    call = Misused(dist.get_rank())
    if dist.get_rank() in ranks:
        change(call)
    try:
        average_gradients(call.source, **call.options)
    finally:
        for parameter in call.model.parameters():
            assert parameter.grad is not None
            assert torch.equal(torch.full_like(parameter, dist.get_rank() + 1.0), parameter.grad)


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises_the_same_error_on_all_ranks(world, name):
    """Case 32: what one rank does wrong is the same ValueError on all ranks, and no gradient has changed."""
    errors = world(3).run_expecting_errors(misuse, name)
    assert [errors[0]] * 3 == errors
    assert errors[0].type_name == "ValueError"
    assert re.search(MISUSES[name][2], errors[0].message), errors[0].message


def reduce_nothing(**options: Any) -> list[Tensor]:
    """Body: a call without parameters."""
    average_gradients([], **options)
    return []


def test_no_parameters(world):
    """Without parameters nothing is reduced, and a bad weight is an error all the same."""
    assert [[], []] == world(2).run(reduce_nothing)
    errors = world(2).run_expecting_errors(reduce_nothing, reduction="weighted_mean", weight=-2)
    assert [Raised("ValueError", errors[0].message)] * 2 == errors
    assert "on ranks 0, 1: weight -2.0 is not a finite number" in errors[0].message


def reduce_on_unknown_nodes(reduction: str) -> list[Tensor | None]:
    """Body: an MPI launcher's variables, which tell that there are more nodes and not which."""
    os.environ.update({"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "2"})
    return reduce_given([[torch.ones(2)], [torch.ones(2)]], reduction=reduction)


def test_unknown_nodes(world):
    """Where the launcher does not tell the node, rules without nodes work and those with nodes are refused."""
    (mean,) = same_everywhere(world(2).run(reduce_on_unknown_nodes, "mean"), 2)
    assert torch.equal(torch.ones(2), mean)
    errors = world(2).run_expecting_errors(reduce_on_unknown_nodes, "mean_of_node_sums")
    assert [errors[0]] * 2 == errors
    assert "tells the node on ranks 0, 1. Set NODE_RANK" in errors[0].message


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
