"""Batch norm synchronized over real ranks against `torch.nn`'s own on the whole batch."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gradavg.replicas.batch_norm import (
    count_rows,
    restore_batch_norm,
    synchronize_batch_norm,
    unsynchronizable_batch_norms,
)

CHANNELS = 3
TYPES: dict[Sequence[int], type[nn.Module]] = {
    (): nn.BatchNorm1d,
    (4,): nn.BatchNorm1d,
    (2, 3): nn.BatchNorm2d,
    (2, 1, 3): nn.BatchNorm3d,
}
"""The layer for each shape of a value."""
ROWS = [[6], [5, 2], [7, 0], [0, 5, 1], [3, 0, 1, 4]]


class Seen(NamedTuple):
    """What a batch norm did in two steps; all that is of rows is in the order of the rows."""

    outputs: list[Tensor]
    of_rows: list[Tensor]
    of_parameters: list[Tensor]
    buffers: dict[str, Tensor]


def batches(rows: int, sizes: Sequence[int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(17)
    return [
        (2 * torch.randn(rows, CHANNELS, *sizes, generator=generator, dtype=torch.float64) + 0.5).to(dtype)
        for _ in range(2)
    ]


def filled(norm: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A batch norm whose parameters and buffers are not those that it begins with."""
    with torch.no_grad():
        for index, tensor in enumerate([*norm.parameters(), *norm.buffers()]):
            if tensor.is_floating_point():
                tensor.copy_(torch.linspace(0.5, 1.5 + index, tensor.numel(), dtype=torch.float64))
    return norm.to(dtype)


def observe(norm: nn.Module, inputs: Sequence[Tensor], *, counts: bool = True, thread: bool = False) -> Seen:
    """Run two steps with a loss that is a sum over rows, in which rows have unlike gradients."""
    outputs, of_rows = [], []
    for values in inputs:
        x = values.clone().requires_grad_()
        count_rows(counted=counts)
        y = norm(x)
        loss = (y.sin() * (1 + y)).sum()
        if thread:  # as on an accelerator, where the backward runs on threads of autograd
            runner = threading.Thread(target=loss.backward)
            runner.start()
            runner.join()
        else:
            loss.backward()
        count_rows(counted=True)
        outputs.append(y.detach())
        of_rows.append(x.grad)
    of_parameters: Any = [parameter.grad for parameter in norm.parameters()]
    return Seen(outputs, of_rows, of_parameters, {name: buffer.clone() for name, buffer in norm.named_buffers()})


def part_of(batch: Tensor, rows: Sequence[int], rank: int) -> Tensor:
    return batch[sum(rows[:rank]) : sum(rows[: rank + 1])]


def synchronized_steps(
    rows: Sequence[int], sizes: Sequence[int], dtype: torch.dtype, options: dict[str, Any], **how: Any
) -> Seen:
    """Body: this rank's rows of every batch."""
    norm = filled(TYPES[sizes](CHANNELS, **options), dtype)
    assert [""] == synchronize_batch_norm(norm)
    inputs = [part_of(batch, rows, dist.get_rank()) for batch in batches(sum(rows), sizes, dtype)]
    return observe(norm, inputs, **how)


def single_process(rows: Sequence[int], sizes: Sequence[int], dtype: torch.dtype, options: dict[str, Any]) -> Seen:
    return observe(filled(TYPES[sizes](CHANNELS, **options), dtype), batches(sum(rows), sizes, dtype))


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    assert len(expected) == len(actual)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def side_by_side(of_ranks: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*of_ranks, strict=True)]


def assert_equal_to_one_process(seen: Sequence[Seen], expected: Seen, tolerance: float) -> None:
    """Rows side by side are those of one process, buffers are on every rank, and gradients of parameters sum up."""
    assert_close(side_by_side(one.outputs for one in seen), expected.outputs, tolerance)
    assert_close(side_by_side(one.of_rows for one in seen), expected.of_rows, tolerance)
    sums = [torch.stack(parts).sum(0) for parts in zip(*(one.of_parameters for one in seen), strict=True)]
    assert_close(sums, expected.of_parameters, tolerance)
    for one in seen:
        assert list(expected.buffers) == list(one.buffers)
        assert_close(list(one.buffers.values()), list(expected.buffers.values()), tolerance)


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("sizes", TYPES, ids=str)
def test_equals_one_process(world, rows, sizes):
    seen = world(len(rows)).run(synchronized_steps, rows, sizes, torch.float64, {})

    assert_equal_to_one_process(seen, single_process(rows, sizes, torch.float64, {}), 1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.5},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
    ],
    ids=str,
)
def test_options_equal_one_process(world, options):
    rows = [3, 0, 4]
    seen = world(3).run(synchronized_steps, rows, (4,), torch.float64, options)

    assert_equal_to_one_process(seen, single_process(rows, (4,), torch.float64, options), 1e-12)


def far_from_zero() -> tuple[Tensor, Tensor]:
    """Body: a mean that is 1e8 times the deviation."""
    norm = nn.BatchNorm1d(1, momentum=1.0).double()
    synchronize_batch_norm(norm)
    y = norm(1e8 + torch.tensor([[[-1.0], [1.0]], [[-3.0], [3.0]]], dtype=torch.float64)[dist.get_rank()])
    return norm.get_buffer("running_var"), y.detach()


def test_the_variance_does_not_cancel(world):
    results = world(2).run(far_from_zero)
    for variance, _ in results:
        torch.testing.assert_close(variance, torch.tensor([20 / 3], dtype=torch.float64), rtol=1e-9, atol=0)
    expected = torch.tensor([-1.0, 1.0, -3.0, 3.0], dtype=torch.float64) / (5 + 1e-5) ** 0.5
    torch.testing.assert_close(torch.cat([y for _, y in results]).flatten(), expected, rtol=1e-7, atol=0)


STAND_IN_ROWS = 2


def steps_beside_a_stand_in(rows: Sequence[int], stand_in: int, factor: float) -> Seen:
    """Body: the rank of the stand-in, of 0 rows, computes the first rows of the batch, times a factor."""
    norm = filled(nn.BatchNorm1d(CHANNELS), torch.float64)
    synchronize_batch_norm(norm)
    rank = dist.get_rank()
    inputs = [part_of(batch, rows, rank) for batch in batches(sum(rows), ())]
    if rank == stand_in:
        inputs = [batch[:STAND_IN_ROWS] * factor for batch in batches(sum(rows), ())]
    return observe(norm, inputs, counts=rank != stand_in, thread=rank == stand_in)


@pytest.mark.parametrize(("rows", "stand_in"), [([5, 0], 1), ([0, 1, 3], 0), ([2, 3, 1, 0], 3)], ids=str)
@pytest.mark.parametrize("factor", [1, float("nan")])
def test_a_stand_in_counts_for_nothing(world, rows, stand_in, factor):
    seen = world(len(rows)).run(steps_beside_a_stand_in, rows, stand_in, factor)
    expected = single_process(rows, (), torch.float64, {})

    own = seen.pop(stand_in)
    assert_equal_to_one_process(seen, expected, 1e-12)
    assert_close(list(own.buffers.values()), list(expected.buffers.values()), 1e-12)
    assert [None] * 4 == own.of_rows + own.of_parameters
    if factor == 1:
        assert_close(own.outputs, [output[:STAND_IN_ROWS] for output in expected.outputs], 1e-12)


class Network(nn.Module):
    """Two batch norms, of which the second may be recomputed in the backward."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Sequential(nn.Linear(CHANNELS, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1), nn.BatchNorm1d(1))
        self.use_reentrant = use_reentrant
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.use_reentrant is None:
            return self.second(x)
        return checkpoint(self.second, x, use_reentrant=self.use_reentrant)


def network_steps(rows: Sequence[int], use_reentrant: bool | None, stand_in: int | None) -> Seen:
    network = Network(use_reentrant)
    assert ["first.1", "second.1", "second.4"] == synchronize_batch_norm(network)
    rank = dist.get_rank()
    inputs = [part_of(batch, rows, rank) for batch in batches(sum(rows), ())]
    if rank == stand_in:
        inputs = [batch[:STAND_IN_ROWS] + 1 for batch in batches(sum(rows), ())]
    return observe(network, inputs, counts=rank != stand_in, thread=rank == stand_in)


@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=str)
@pytest.mark.parametrize(("rows", "stand_in"), [([3, 0, 4], None), ([3, 0, 4], 1)], ids=str)
def test_a_network_with_checkpoint_equals_one_process(world, use_reentrant, rows, stand_in):
    seen = world(len(rows)).run(network_steps, rows, use_reentrant, stand_in)
    expected = observe(Network(use_reentrant), batches(sum(rows), ()))

    if stand_in is not None:
        assert_close(list(seen.pop(stand_in).buffers.values()), list(expected.buffers.values()), 1e-12)
    assert_equal_to_one_process(seen, expected, 1e-11)


def half_precision_step(norm: nn.Module, rows: Sequence[int], dtype: torch.dtype) -> Seen:
    """Body: one step of this rank's rows, with given gradients; without a process group, of all rows."""
    synchronize_batch_norm(norm)
    x, dy = batches(sum(rows), (), dtype)
    if dist.is_initialized():
        x, dy = (part_of(batch, rows, dist.get_rank()) for batch in (x, dy))
    kind = next(norm.parameters()).dtype
    x = x.to(kind, copy=True).requires_grad_()
    y = norm(x)
    y.backward(dy.to(kind))
    assert x.grad is not None
    of_parameters: Any = [parameter.grad for parameter in norm.parameters()]
    return Seen([y.detach()], [x.grad], of_parameters, dict(norm.named_buffers()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_parameters_are_rounded_once(world, dtype):
    rows = [20, 0, 25]
    norm = filled(nn.BatchNorm1d(CHANNELS), dtype)
    seen = world(3).run(half_precision_step, norm, rows, dtype)
    expected = half_precision_step(copy.deepcopy(norm).double(), rows, dtype)

    # Half a unit in the last place; float32 adds what is far below that, where its terms do not cancel.
    close = {"rtol": torch.finfo(dtype).eps / 2 + 1e-5, "atol": 1e-5, "check_dtype": False}
    for one, other in ((side_by_side(of[index] for of in seen)[0], expected[index][0]) for index in (0, 1)):
        assert dtype is one.dtype
        torch.testing.assert_close(one, other, **close)
    for seen_by_rank in seen:
        assert [dtype] * 2 == [gradient.dtype for gradient in seen_by_rank.of_parameters]
        for name, buffer in seen_by_rank.buffers.items():
            torch.testing.assert_close(buffer, expected.buffers[name], **close)


def on_these_rows(rows: Sequence[int], stand_in: int | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Body: the output of rows of ones and the buffers."""
    rank = dist.get_rank()
    norm = nn.BatchNorm1d(CHANNELS)
    synchronize_batch_norm(norm)
    count_rows(counted=rank != stand_in)
    try:
        y = norm(torch.ones(STAND_IN_ROWS if rank == stand_in else rows[rank], CHANNELS))
    finally:
        count_rows(counted=True)
    y.sum().backward()
    return y.detach(), dict(norm.named_buffers())


@pytest.mark.parametrize(("rows", "stand_in"), [([1, 0], None), ([0, 0, 1], None), ([0, 1], 0)], ids=str)
def test_one_value_per_channel_is_torchs_error_on_all_ranks(world, rows, stand_in):
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training") as caught:
        nn.BatchNorm1d(CHANNELS)(torch.ones(1, CHANNELS))
    start, _, _ = str(caught.value).partition(", got")
    for raised in world(len(rows)).run_expecting_errors(on_these_rows, rows, stand_in):
        assert raised.type_name == "ValueError"
        assert raised.message.startswith(f"{start}, but the samples of all ranks together have 1.")


@pytest.mark.parametrize("rows", [[1, 1], [0, 0]], ids=str)
def test_few_rows_are_normalized_as_on_one_process(world, rows):
    norm = nn.BatchNorm1d(CHANNELS)
    expected = norm(torch.ones(sum(rows), CHANNELS))
    seen = world(2).run(on_these_rows, rows, None)
    assert torch.equal(expected, torch.cat([y for y, _ in seen]))
    for _, buffers in seen:
        assert_close(list(buffers.values()), list(norm.buffers()), 1e-6)


def second_derivative() -> None:
    norm = nn.BatchNorm1d(CHANNELS)
    synchronize_batch_norm(norm)
    x = torch.randn(4, CHANNELS, requires_grad=True)
    (gradient,) = torch.autograd.grad(norm(x).sin().sum(), x, create_graph=True)
    assert gradient.isfinite().all()
    gradient.square().sum().backward()


def test_a_second_derivative_is_refused_on_all_ranks(world):
    for raised in world(2).run_expecting_errors(second_derivative):
        assert "once_differentiable" in raised.message


def spread(norm: nn.Module) -> float:
    """The mean over this rank's rows, which is 0 where they were normalized by themselves."""
    return float(norm(torch.arange(4.0).view(2, 2) + 10.0 * dist.get_rank()).mean().detach())


def when_it_synchronizes() -> list[bool]:
    """Body: whether the ranks' rows are normalized together in a model that trains, a frozen layer, and evaluation."""
    found = []
    for of_model, of_layer, track in ((True, True, True), (True, True, False), (True, False, True), (False,) * 3):
        model = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=track)).train(of_model)
        synchronize_batch_norm(model)
        model[0].train(of_layer)
        plain = copy.deepcopy(model)
        restore_batch_norm(plain)
        found.append(abs(spread(model) - spread(plain)) > 0.1)
    return found


def test_only_the_statistics_of_training_batches_are_synchronized(world):
    assert [[True, True, False, False]] * 2 == world(2).run(when_it_synchronizes)


class Own(nn.BatchNorm1d):
    """A batch norm with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        return super().forward(input).relu()


def of_many_types() -> tuple[list[str], list[str], list[bool]]:
    """Body: which layers are named, and which of them normalize the ranks' rows together."""
    layers = {"plain": nn.BatchNorm1d(2), "torch's": nn.SyncBatchNorm(2), "lazy": nn.LazyBatchNorm1d(), "own": Own(2)}
    model = nn.ModuleDict({**layers, "patched": nn.BatchNorm1d(2), "other": nn.LayerNorm(2)})
    model["patched"].forward = torch.nn.functional.relu
    names = synchronize_batch_norm(model)
    assert names == synchronize_batch_norm(model)
    together = [abs(spread(model[name])) > 0.5 for name in names]
    unsynchronizable = unsynchronizable_batch_norms(model)
    restore_batch_norm(model)
    assert ["patched"] == [name for name, layer in model.items() if "forward" in vars(layer)]
    return names, unsynchronizable, together


def test_layers_of_all_types(world):
    expected = (["plain", "torch's", "lazy"], ["own", "patched"], [True] * 3)
    assert [expected] * 2 == world(2).run(of_many_types)


def copies() -> None:
    """Body: a deep copy is synchronized on its own, a pickled one when it is told."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    synchronize_batch_norm(model)
    together = spread(model[0])
    assert abs(together) > 0.5
    for copied in (copy.deepcopy(model)[0], copy.deepcopy(model[0])):
        with torch.no_grad():
            copied.bias.add_(100)
        assert pytest.approx(together + 100, rel=1e-5) == spread(copied)
    assert 1 == int(model[0].num_batches_tracked)
    assert together == spread(model[0])

    loaded = pickle.loads(pickle.dumps(model))
    assert pytest.approx(0, abs=1e-6) == spread(loaded[0])
    assert ["0"] == synchronize_batch_norm(loaded)
    assert together == spread(loaded[0])


def test_copies_are_synchronized(world):
    assert [None] * 2 == world(2).run(copies)


def test_without_a_process_group_it_is_torchs_own():
    norm, plain = nn.BatchNorm1d(CHANNELS), nn.BatchNorm1d(CHANNELS)
    assert [""] == synchronize_batch_norm(norm)
    (x, _) = batches(8, (), torch.float32)

    assert torch.equal(plain(x), norm(x))
    assert torch.equal(plain.running_var, norm.running_var)
