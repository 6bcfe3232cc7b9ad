"""`global_mean` between real ranks: values and gradients by hand, in every loop that averages gradients plainly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from ranks import Raised, group_of, on_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from toys import (
    IGNORE_UNUSED_PARAMETERS,
    WEIGHTED,
    FabricLoop,
    OneWeight,
    Recorded,
    Seen,
    TorchLoop,
    approx,
    same_everywhere,
    train,
)

from lightning_gradavg import GradAvgStrategy, average_gradients, gather, global_mean
from lightning_gradavg._support.running import Forward, running

pytestmark = IGNORE_UNUSED_PARAMETERS

OF_RANKS: Sequence[list[float]] = ([1.0, 2.0, 3.0], [5.0, 7.0], [])
"""The numbers of each rank. Their mean is 18 / 5 = 3.6."""
BOXES: Sequence[list[float]] = ([2.0], [1.0, 1.0, 0.5, 0.5], [])
"""Of another term: their mean is 5 / 5 = 1."""


def parameter(value: float = 1.0) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def double(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def two_terms(w: Tensor, rank: int) -> Tensor:
    """Return 3.6 * w + 1.0 * w ** 2, of two denominators, plus an auxiliary loss of w ** 2 / 2.

    At 1 the loss is 3.6 + 1 + 0.5, and its gradient 3.6 + 2 + 1.
    """
    numbers = double(OF_RANKS[rank])
    boxes = double(BOXES[rank])
    totals = {"class": (numbers * w).sum(), "box": (boxes * w**2).sum()}
    if rank == 1:
        totals = dict(reversed(totals.items()))
    means = global_mean(totals, {"box": len(boxes), "class": len(numbers)})
    return means["class"] + means["box"] + w**2 / 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_two_denominators_and_an_auxiliary_loss(world, size):
    """On 3 ranks the last one has nothing of either term, and brings its part of the auxiliary loss."""
    for value, mean_gradient in world(size).run(of_two_terms):
        # Alone, rank 0 has the means 2 and 2: 2 w + 2 w ** 2 + w ** 2 / 2.
        assert [approx(4.5), approx(7.0)] if size == 1 else [approx(5.1), approx(6.6)] == [value, mean_gradient]


def of_two_terms() -> tuple[float, float]:
    w = parameter()
    loss = two_terms(w, dist.get_rank())
    loss.backward()
    average_gradients(w)
    assert w.grad is not None
    return loss.item(), w.grad.item()


@on_ranks(2)
def test_the_gradient_of_each_rank():
    """W / N times that of its own total: 2 / 5 of 6 and of 12."""
    rank = dist.get_rank()
    w = parameter()
    mean = global_mean((double(OF_RANKS[rank]) * w).sum(), len(OF_RANKS[rank]))
    mean.backward()
    assert (approx(3.6), approx([2.4, 4.8][rank])) == (mean.item(), w.grad.item())


def by_torch() -> Any:
    model = DistributedDataParallel(OneWeight())
    return model, model.module, lambda loss: loss.backward()


def by_fabric() -> Any:
    loop = FabricLoop()
    module = OneWeight()
    return loop.set_up(module), module, loop.backward


def by_stock_fabric() -> Any:
    loop = FabricLoop(strategy="ddp")
    module = OneWeight()
    return loop.set_up(module), module, loop.backward


def by_reducer() -> Any:
    loop = TorchLoop()
    module = OneWeight()
    return loop.set_up(module), module, loop.backward


@pytest.mark.parametrize("loop", [by_torch, by_fabric, by_stock_fabric, by_reducer])
@pytest.mark.parametrize("size", [2, 3])
def test_loops(world, loop, size):
    assert [approx(3.6)] * size == world(size).run(in_a_loop, loop)


def in_a_loop(loop: Callable[[], Any]) -> float | None:
    model, module, backward = loop()
    numbers = double(OF_RANKS[dist.get_rank()])
    backward(global_mean(model(numbers).sum(), len(numbers)))
    gradient: float | None = module.gradient
    return gradient


@on_ranks(2)
def test_split_batches_of_fabric():
    """Chunks of 3 and 2 samples, of which 3 and 1 count: 11 / 4, where the losses have equal weight."""
    loop = FabricLoop(split_batches=True)
    module = OneWeight()
    model = loop.set_up(module)
    data = double([1.0, 2.0, 3.0, 5.0, 0.0])
    (batch,) = loop.fabric.setup_dataloaders(DataLoader(TensorDataset(data), 5))
    numbers = batch[0][batch[0] > 0]
    assert len(numbers) == [3, 1][dist.get_rank()]
    loop.backward(global_mean(model(numbers).sum(), len(numbers)), weight=1)
    assert approx(11 / 4) == module.gradient


class Terms(Recorded):
    """The global mean of the numbers > 0 of a batch, times w; the rest is padding. `weight` is returned, if given."""

    def __init__(self, weight: float | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.weight = weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        counted = batch > 0
        loss = global_mean((batch * self.w)[counted].sum(), counted.sum())
        return loss if self.weight is None else {"loss": loss, "weight": self.weight}


def trained(world: Any, of_ranks: Any, strategy: Any = None, weight: float | None = None, **options: Any) -> Seen:
    toy = {"weight": weight}
    return same_everywhere(world(len(of_ranks)).run(train, of_ranks, toy, strategy, None, Terms, **options))


@pytest.mark.parametrize("of", [GradAvgStrategy, DDPStrategy])
@pytest.mark.parametrize("numbers", [OF_RANKS[:2], ([1.0, 2.0], [3.0], [5.0, 7.0, 0.0, 0.0])], ids=["2", "3"])
def test_trainer(world, numbers, of):
    assert [approx(3.6)] == trained(world, [[each] for each in numbers], of=of).gradients


def test_windows(world):
    """Each micro-batch by its own count: 18 / 5 and 10 / 4, on average 3.05; then 9 / 3 in a window of one."""
    of_ranks = [[OF_RANKS[0], [4.0], [1.0]], [OF_RANKS[1], [2.0, 2.0, 2.0], [6.0, 2.0]]]
    assert [approx(3.05), approx(3.0)] == trained(world, of_ranks, accumulate_grad_batches=2).gradients


def test_ranks_that_run_out_of_batches(world):
    """3.6 on three ranks, then on two of them, whose mean is of two ranks, and then 4 on one."""
    of_ranks = [[[1.0, 2.0], OF_RANKS[0], [4.0]], [[3.0], OF_RANKS[1]], [[5.0, 7.0]]]
    assert [approx(3.6), approx(3.6), approx(4.0)] == trained(world, of_ranks).gradients


@pytest.mark.parametrize("strategy", [{"split_batches": True}, {"equivalent_to": "single_device"}], ids=str)
@pytest.mark.parametrize(
    ("size", "batch", "expected"),
    [
        (2, [1.0, 2.0, 3.0, 5.0, 0.0], 11 / 4),  # chunks of 3 and 2, which count 3 and 1
        (3, [1.0, 2.0, 3.0, 0.0], 2.0),  # of 2 and 2, and a rank without samples
    ],
)
def test_split_batches(world, strategy, size, batch, expected):
    """With a weight of 1 all ranks count alike, so that their mean is plain."""
    for rule in ({}, WEIGHTED):
        seen = trained(world, [[batch]] * size, {**strategy, **rule}, 1.0)
        assert [approx(expected)] == seen.gradients


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COUNTS: dict[str, Any] = {
    "int": 5,
    "float": 5.0,
    "int64": np.int64(5),
    "float32": np.float32(5.0),
    "array": np.array(5),
    "a row": torch.tensor([5]),
    **{f"tensor of {dtype}": torch.tensor(5, dtype=dtype) for dtype in (torch.int64, torch.uint8, *FLOATS)},
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("count", COUNTS)
@on_ranks(2)
def test_types(count, dtype):
    """Totals of 10 and 20, and counts of 5: the mean 3, in the total's type and shape, and the gradient 2 / 10."""
    total = torch.full((1,), [10.0, 20.0][dist.get_rank()], dtype=dtype, requires_grad=True)
    mean = global_mean(total, COUNTS[count])
    assert (mean.dtype, mean.shape) == (dtype, total.shape)
    assert [3.0] == mean.tolist()
    mean.backward()
    assert torch.equal(torch.full_like(total, 0.2), total.grad)


@on_ranks(2)
def test_numbers_and_integers():
    """Without a graph: the accuracy of 3 of 4 and of 1 of 4, and counts that float32 does not hold."""
    rank = dist.get_rank()
    assert 0.5 == global_mean(torch.tensor([3, 1])[rank], 4).item()
    assert 0.5 == global_mean([3, 1][rank], torch.tensor(True)).item() / 4
    large = 2**24 + 1
    mean = global_mean(torch.tensor(float(large), dtype=torch.float64), [large, 0][rank] + rank)
    # The totals are 2 * large, but the counts large + 1.
    assert approx(2 * large / (large + 1)) == mean.item()
    nested = global_mean((1.0, [2.0, {"a": 3.0}]), (1, [1, {"a": 2}]))
    assert (1.0, [2.0, {"a": 1.5}]) == nested


@on_ranks(2)
def test_more_terms_than_one_exchange_holds():
    """Twenty terms, term k with the totals k and 3 k and the counts 1 and 3."""
    rank = dist.get_rank()
    w = parameter()
    totals = {str(k): w * k * [1, 3][rank] for k in range(20)}
    means = global_mean(totals, dict.fromkeys(totals, [1, 3][rank]))
    assert list(totals) == list(means)
    assert [approx(float(k)) for k in range(20)] == [mean.item() for mean in means.values()]
    sum(means.values()).backward()
    # The sum of k is 190, of which rank 0 has 2 / 4, and rank 1 three times that.
    assert approx([95.0, 285.0][rank]) == w.grad.item()


def nan_of_nothing(w: Tensor) -> Tensor:
    return mse_loss(w * double([]), double([])) * 0


def all_targets_ignored(w: Tensor) -> Tensor:
    scores = w * torch.ones(2, 3, dtype=torch.float64)
    classes = torch.full((2,), -100)
    return cross_entropy(scores, classes) * 0


def nan_in_total(w: Tensor) -> Tensor:
    return w * torch.nan


@pytest.mark.parametrize(
    "of_nothing",
    [nan_of_nothing, all_targets_ignored, None],
    ids=["nan_of_nothing", "all_targets_ignored", "None"],
)
@on_ranks(3)
def test_a_count_of_zero(of_nothing):
    """A NaN that counts nothing changes no value, and, as a mean over nothing, no gradient."""
    rank = dist.get_rank()
    w = parameter()
    total = (double(OF_RANKS[rank]) * w).sum()
    count = len(OF_RANKS[rank])
    if rank == 2 and of_nothing is not None:
        total = of_nothing(w)
        assert total.isnan()
    mean = global_mean(total, count)
    assert approx(3.6) == mean.item()
    mean.backward()
    assert approx([3.6, 7.2, 0.0][rank]) == w.grad.item()


@on_ranks(2)
def test_the_limit_of_a_count_of_zero():
    """The zero gradient becomes NaN by a derivative that is NaN, and is zero if such rows are left out before."""
    rank = dist.get_rank()
    w = parameter()
    total = w * 6 if rank == 0 else w * torch.nan
    global_mean(total, [3, 0][rank]).backward()
    assert approx([4.0, math.nan][rank]) == w.grad.item()
    w = parameter()
    padding = torch.full((2,), torch.nan, dtype=torch.float64)
    total = w * 6 if rank == 0 else (w * padding[~padding.isnan()]).sum()
    global_mean(total, [3, 0][rank]).backward()
    assert approx([4.0, 0.0][rank]) == w.grad.item()


@on_ranks(2)
def test_no_count_anywhere():
    """Value and gradient are 0, also where the loss's own gradient is not finite."""
    w = parameter()
    mean = global_mean({"a": w * 3, "b": w * 4}, {"a": 0, "b": 2})
    assert (0.0, 2.0) == (mean["a"].item(), mean["b"].item())
    (mean["a"].sqrt() + mean["b"]).backward()
    assert approx(2.0) == w.grad.item()


@on_ranks(3)
def test_a_stand_in_counts_nothing():
    """Rank 2 repeats another rank's numbers: it is in no sum, and the mean of gradients is one over two ranks."""
    rank = dist.get_rank()
    w = parameter()
    numbers = double(OF_RANKS[rank % 2])
    if rank < 2:
        mean = global_mean((numbers * w).sum(), len(numbers))
    else:
        with running(Forward(samples=0)):
            mean = global_mean((numbers * w).sum(), len(numbers))
    mean.backward()
    assert (approx(3.6), approx([2.4, 4.8, 0.0][rank])) == (mean.item(), w.grad.item())


@on_ranks(2)
def test_without_gradients():
    rank = dist.get_rank()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            mean = global_mean(double(OF_RANKS[rank]).sum(), len(OF_RANKS[rank]))
        assert (approx(3.6), False) == (mean.item(), mean.requires_grad)


@on_ranks(3)
def test_group():
    """Ranks 0 and 2 among themselves: 2 and 6 on average, and half of the ranks' mean comes from each."""
    rank = dist.get_rank()
    group = group_of((0, 2))
    w = parameter()
    if rank == 1:
        with pytest.raises(ValueError, match="global rank 1 is not a member of the group"):
            global_mean(w, 1, group=group)
        return
    mean = global_mean(w * 2 * (rank + 1), 1, group=group)
    mean.backward()
    assert (4.0, 2.0 * (rank + 1)) == (mean.item(), w.grad.item())


def test_without_a_process_group():
    w = parameter()
    mean = global_mean(w * 6, 4)
    mean.backward()
    assert (1.5, 1.5) == (mean.item(), w.grad.item())


@on_ranks(2)
def test_a_second_derivative():
    """The mean of w ** 3 over two ranks, each of which has one: W / N * 6 w."""
    w = parameter(2.0)
    (first,) = torch.autograd.grad(global_mean(w**3, 1), w, create_graph=True)
    (second,) = torch.autograd.grad(first, w)
    assert (approx(12.0), approx(12.0)) == (first.item(), second.item())


TOTAL = torch.ones(())
# What each of two ranks gives, and what both are told.
MISUSES: dict[str, tuple[tuple[Any, Any], tuple[Any, Any], str]] = {
    "negative": ((TOTAL, -1), (TOTAL, 1), "on rank 0: count is -1.0, not a finite number >= 0"),
    "infinite": ((TOTAL, 1), (TOTAL, torch.tensor(torch.inf)), "on rank 1: count is inf, not a finite number >= 0"),
    "nan of a term": (({"a": TOTAL}, {"a": torch.nan}), ({"a": TOTAL}, {"a": 1}), "count['a'] is nan, not a finite"),
    "a word": ((TOTAL, "3"), (TOTAL, 3), "on rank 0: count is one number, got '3' of type str"),
    "nothing": ((None, 3), (TOTAL, 3), "on rank 0: total is one number, got None of type NoneType"),
    "no sum": ((torch.ones(3), 3), (TOTAL, 3), "total is one number, got a tensor of shape (3,): pass its sum"),
    "complex": ((torch.ones((), dtype=torch.complex64), 3), (TOTAL, 3), "is a real number, got torch.complex64"),
    "learned": ((TOTAL, torch.ones((), requires_grad=True)), (TOTAL, 3), "count requires grad, but counts have no"),
    "no count": (({"a": TOTAL, "b": TOTAL}, {"a": 1}), ({}, {}), "total has the terms ['a'], ['b'], but count has the"),
    "no term": (({}, {}), ({}, {}), "on ranks 0, 1: there is no term in {}: pass at least one"),
    "other terms": (
        ({"a": TOTAL}, {"a": 1}),
        ({"a": TOTAL, "b": TOTAL}, {"a": 1, "b": 1}),
        "cannot proceed: global_mean of the terms ['a'] on rank 0; global_mean of the terms ['a'], ['b'] on rank 1",
    ),
    "one term or a dict": (({"a": TOTAL}, {"a": 1}), (TOTAL, 1), "terms ['a'] on rank 0; global_mean of one term on"),
}


def misuse(name: str) -> None:
    of_ranks: Any = MISUSES[name]
    global_mean(*of_ranks[dist.get_rank()])


@pytest.mark.parametrize("name", MISUSES)
def test_errors_are_the_same_on_all_ranks(world, name):
    raised = world(2).run_expecting_errors(misuse, name)
    assert [Raised("ValueError", raised[0].message)] * 2 == raised
    assert MISUSES[name][2] in raised[0].message


def other_function() -> None:
    if dist.get_rank() == 0:
        global_mean(TOTAL, 1)
    else:
        gather(torch.ones(1))


def test_ranks_that_call_something_else(world):
    first, second = world(2).run_expecting_errors(other_function)
    assert "global_mean cannot proceed: global_mean of one term on rank 0; with gradients on rank 1" in first.message
    assert "gather cannot proceed: global_mean of one term on rank 0; with gradients on rank 1" in second.message


def exchanges() -> list[str]:
    """Body: return the collectives of three terms, forward and backward."""
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        stock = getattr(dist, name)

        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return stock(*args, **options)

        return call

    names = ("all_gather", "all_reduce", "all_to_all_single", "broadcast", "all_gather_object")
    replaced: Any = {name: counted(name) for name in names}
    with mock.patch.multiple(dist, **replaced):
        w = parameter()
        sum(global_mean({"a": w, "b": w * 2, "c": w * 3}, {"a": 1, "b": 2, "c": 3}).values()).backward()
    return calls


def test_several_terms_take_one_exchange(world):
    assert [["all_gather"]] * 2 == world(2).run(exchanges)
