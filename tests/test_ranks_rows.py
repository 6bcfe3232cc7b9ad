"""`gather` between real ranks: any dtype and number of rows, every gradient once, the same error on all ranks.

Which gradient that gives under which rule: `test_ranks_gather.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import Raised, on_ranks
from torch import Tensor

from lightning_gradavg.reduction.gather import gather, losses_weighed

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.int64, torch.int16, torch.uint8, torch.bool),
]
ROWS = [(2,), (3, 1), (0, 0, 0), (1, 3, 0, 2)]


def of_dtypes(rows: Sequence[int], tail: Sequence[int]) -> list[Tensor]:
    numbers = torch.arange(rows[dist.get_rank()]).reshape(-1, *[1] * len(tail)).expand(-1, *tail) + dist.get_rank()
    return [(numbers % 2 if dtype is torch.bool else numbers).to(dtype) for dtype in DTYPES]


def views(rows: Sequence[int], tail: Sequence[int]) -> list[Tensor]:
    """Return tensors that are not laid out row by row, or not stored as they read."""
    base = torch.arange(6.0).reshape(2, 3) + 10 * dist.get_rank()
    conjugate = torch.complex(base, base).conj()
    assert conjugate.is_conj()
    assert conjugate.imag.is_neg()
    return [base.T, base[:, ::2], base[:1].expand(2, 3), conjugate, conjugate.imag]


def gather_together_and_alone(tensors: Callable[..., list[Tensor]], *given: Any) -> list[tuple[Tensor, Tensor]]:
    """Body: gather tensors in one call, and each alone; return this rank's and all, as numbers."""
    own, pairs = tensors(*given), []
    for tensor, of_all in zip(own, gather(own), strict=True):
        alone = gather(tensor)
        assert tensor.dtype == of_all.dtype == alone.dtype
        assert not of_all.requires_grad
        assert torch.equal(of_all.to(torch.complex128), alone.to(torch.complex128))
        pairs.append((tensor.to(torch.complex128), of_all.to(torch.complex128)))
    return pairs


@pytest.mark.parametrize("tensors", [of_dtypes, views])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_rows_of_all_ranks_in_their_order(world, rows, tensors):
    for tail in ((), (3,), (2, 5), (0,)):
        of_ranks = world(len(rows)).run(gather_together_and_alone, tensors, rows, tail)
        for of_tensor in zip(*of_ranks, strict=True):
            expected = torch.cat([own for own, _ in of_tensor])
            assert all(torch.equal(expected, gathered) for _, gathered in of_tensor)


class Home(NamedTuple):
    """What comes home where each rank has a loss of all rows; None on a rank whose tensor has no gradient."""

    of_ranks: Sequence[Tensor]
    loss: Callable[[Tensor, int], Tensor]
    expected: Sequence[Any]
    weights: Sequence[float] | None = None
    weighed: bool = False


def times(*factors: float) -> Callable[[Tensor, int], Tensor]:
    return lambda rows, rank: (rows * factors[rank]).sum()


def numbered(rows: Tensor, rank: int) -> Tensor:
    return (rows * 2.0**rank * torch.arange(1, len(rows) + 1)[:, None]).sum().real


def numbers(rows: Sequence[int]) -> list[list[list[float]]]:
    """Return the sum over ranks of what `numbered` gives each row, by rank."""
    of_all = [[(2.0 ** len(rows) - 1) * number] * 2 for number in range(1, sum(rows) + 1)]
    return [of_all[sum(rows[:rank]) : sum(rows[: rank + 1])] for rank in range(len(rows))]


HALF = torch.ones(1, dtype=torch.float16)
HOME: dict[str, Home] = {
    **{
        f"{rows} of {dtype}": Home([torch.ones(n, 2, dtype=dtype) for n in rows], numbered, numbers(rows))
        for rows in ROWS
        for dtype in (torch.float32, torch.complex128)
    },
    # The result requires grad on every rank if any rank's tensor does, so that no rank waits.
    "one has a gradient": Home([torch.tensor([3.0])] * 3, lambda rows, _: rows.prod(), [None, [27.0], None]),
    # 120000 is infinite in float16, and 257 is 256 in bfloat16.
    "float16": Home([HALF] * 3, times(60000.0, 60000.0, -60000.0), [[60000.0]] * 3),
    "bfloat16": Home([HALF.bfloat16()] * 3, times(256.0, 1.0, 1.0), [[258.0]] * 3),
    # Weights of thousands multiply a float16 gradient by their ratios, in float32, unless the loss is weighed.
    "thousands": Home([HALF] * 2, times(20.0, 20.0), [[30.0], [60.0]], (8000.0, 4000.0)),
    "thousands in the loss": Home([HALF] * 2, times(20.0, 20.0), [[40.0], [40.0]], (8000.0, 4000.0), True),
    "weight 0 in the loss": Home([HALF] * 2, times(20.0, 20.0), [[40.0], [40.0]], (1.0, 0.0), True),
    # A NaN gradient for others' rows is not multiplied by the weight 0 of its rank, which would be NaN.
    "NaN of weight 0": Home([torch.ones(1), torch.ones(0)], times(6.0, torch.nan), [[6.0], []], (1.0, 0.0)),
}


def come_home(name: str) -> None:
    """Body: check the gradient of this rank's rows."""
    home, rank = HOME[name], dist.get_rank()
    x = home.of_ranks[rank].clone().requires_grad_(home.expected[rank] is not None)
    told: dict[str, Any] = {}
    if home.weights is not None:
        told = {"reduction": "weighted_mean", "weight": home.weights[rank]}
    with losses_weighed() if home.weighed else nullcontext():
        rows = gather(x, **told)
        assert rows.requires_grad
        home.loss(rows, rank).backward()
    assert home.expected[rank] == (None if x.grad is None else x.grad.tolist())
    assert x.grad is None or x.dtype == x.grad.dtype


@pytest.mark.parametrize("name", HOME)
def test_the_gradient_of_a_row_is_the_sum_over_ranks(world, name):
    world(len(HOME[name].of_ranks)).run(come_home, name)


@on_ranks()
def test_structure_has_one_backward():
    """Of features and labels in one call, of which the loss uses some."""
    rank = dist.get_rank()
    x = torch.full((rank + 1, 1), 2.0, requires_grad=True)
    y = torch.full((1, 3), 5.0, requires_grad=True)
    labels, targets = torch.full((rank + 1,), rank), torch.full((1,), float(rank))
    result: Any = gather(OrderedDict(x=x, labels=labels, y=[y, targets]))
    assert [OrderedDict, list] == [type(result), type(result["y"])]
    assert [True, False, True, False] == [
        tensor.requires_grad for tensor in (result["x"], result["labels"], *result["y"])
    ]
    assert ([0, 1, 1], [0.0, 1.0]) == (result["labels"].tolist(), result["y"][1].tolist())
    result["x"].square().sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(torch.full((rank + 1, 1), 8.0), x.grad)
    assert torch.equal(torch.zeros(1, 3), y.grad)


@on_ranks(3)
def test_group():
    """Ranks 0 and 2 gather among themselves."""
    rank, group = dist.get_rank(), dist.new_group([0, 2])
    x = torch.tensor([float(rank)], requires_grad=True)
    if rank == 1:
        with pytest.raises(ValueError, match="global rank 1 is not a member of the group"):
            gather(x, group=group)
        return
    result = gather(x, group=group)
    result.prod().backward()
    assert ([0.0, 2.0], 4.0 - 2 * rank) == (result.tolist(), x.grad.item())


def test_one_rank():
    """Without a process group the result is a copy, which the gradient passes through, but that of a gradient."""
    x = torch.tensor([[2.0], [3.0]], requires_grad=True)
    result = gather(x)
    assert torch.equal(x, result)
    assert x.data_ptr() != result.data_ptr()
    (first,) = torch.autograd.grad((result**3).sum(), x, create_graph=True)
    assert torch.equal(3 * x**2, first)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


X = torch.ones(1, 2)
# What each of two ranks gives instead of one row, and what both are told.
MISUSES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "bad on one rank": ({"tensors": 3}, {}, "gather cannot proceed, on rank 0: tensors must be a tensor, or a tuple"),
    "shapes": (
        {},
        {"tensors": torch.ones(1, 3)},
        "gather cannot proceed: tensors of shape (rows, 2) and torch.float32 on rank 0; tensors of shape (rows, 3) and",
    ),
    "structure": ({}, {"tensors": (X, X)}, "torch.float32 on rank 0; tensors[0] of shape (rows, 2) and torch.float32 "),
    "rule": ({}, {"reduction": "sum"}, "reduction='mean' on rank 0; reduction='sum' on rank 1. Pass the same"),
    "no_grad": ({}, {"grad": False}, "with gradients on rank 0; under torch.no_grad on rank 1. Pass the same"),
    "weight 0": (
        {"reduction": "weighted_mean", "weight": 0},
        {"reduction": "weighted_mean", "weight": 1},
        "discards the gradient of a rank of weight 0, but there are rows on rank 0 that count",
    ),
    "a number": ({"tensors": torch.tensor(1.0)}, {}, "has no dimension to concatenate along: pass tensor.reshape(1)"),
    "no tensor": ({"tensors": {}}, {}, "there is no tensor in {}: pass at least one"),
    "sparse": ({"tensors": X.to_sparse()}, {}, "tensors must be a dense tensor, got layout torch.sparse_coo"),
}


def misuse(name: str) -> None:
    of_ranks: Any = MISUSES[name]
    given = {"tensors": X.detach().requires_grad_(), "grad": True, **of_ranks[dist.get_rank()]}
    with torch.set_grad_enabled(given.pop("grad")):
        gather(given.pop("tensors"), **given)


@pytest.mark.parametrize("name", MISUSES)
def test_errors_are_the_same_on_all_ranks(world, name):
    raised = world(2).run_expecting_errors(misuse, name)
    assert [Raised("ValueError", raised[0].message)] * 2 == raised
    assert MISUSES[name][2] in raised[0].message
