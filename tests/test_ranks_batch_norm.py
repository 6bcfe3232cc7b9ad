"""Batch norm synchronized over real ranks against `torch.nn`'s own on the whole batch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gradavg.ranks import World
from lightning_gradavg.replicas.batch_norm import count_rows, synchronized_batch_norm

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
    """What a module did in two steps; all that is of rows is in the order of the rows."""

    outputs: list[Tensor]
    of_rows: list[Any]
    of_parameters: list[Any]
    buffers: list[Tensor]


def batches(rows: int, sizes: Sequence[int] = (), dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(17)
    drawn = [torch.randn(rows, CHANNELS, *sizes, generator=generator, dtype=torch.float64) for _ in range(2)]
    return [(2 * one + 0.5).to(dtype) for one in drawn]


def filled(norm: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A batch norm whose parameters and buffers are not those that it begins with."""
    with torch.no_grad():
        for index, tensor in enumerate([*norm.parameters(), *norm.buffers()]):
            if tensor.is_floating_point():
                tensor.copy_(torch.linspace(0.5, 1.5 + index, tensor.numel(), dtype=torch.float64))
    return norm.to(dtype)


def observe(module: nn.Module, inputs: Sequence[Tensor], *, counts: bool = True) -> Seen:
    """Run two steps with a loss that is a sum over rows, in which rows have unlike gradients."""
    outputs, of_rows = [], []
    for values in inputs:
        x = values.clone().requires_grad_()
        count_rows(counted=counts)
        y = module(x)
        # As on an accelerator, where the backward runs on threads of autograd.
        runner = threading.Thread(target=(y.sin() * (1 + y)).sum().backward)
        runner.start()
        runner.join()
        count_rows(counted=True)
        outputs.append(y.detach())
        of_rows.append(x.grad)
    return Seen(outputs, of_rows, [one.grad for one in module.parameters()], [one.clone() for one in module.buffers()])


def on_ranks(
    module: nn.Module, rows: Sequence[int], inputs: Sequence[Tensor], stand_in: int | None = None, factor: float = 1
) -> Seen:
    """Body: this rank's rows of every batch; the stand-in, of 0 rows, computes the first two, times a factor."""
    rank = dist.get_rank()
    own = [batch[sum(rows[:rank]) : sum(rows[: rank + 1])] for batch in inputs]
    own = [batch[:2] * factor for batch in inputs] if rank == stand_in else own
    with synchronized_batch_norm(World.of(None)):
        return observe(module, own, counts=rank != stand_in)


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
        assert_close(one.buffers, expected.buffers, tolerance)


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("sizes", TYPES, ids=str)
def test_equals_one_process(world, rows, sizes):
    norm, inputs = filled(TYPES[sizes](CHANNELS)), batches(sum(rows), sizes)
    seen = world(len(rows)).run(on_ranks, norm, rows, inputs)
    assert_equal_to_one_process(seen, observe(norm, inputs), 1e-12)


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
    norm, inputs = filled(nn.BatchNorm1d(CHANNELS, **options)), batches(7, (4,))
    seen = world(3).run(on_ranks, norm, [3, 0, 4], inputs)
    assert_equal_to_one_process(seen, observe(norm, inputs), 1e-12)


def test_the_variance_does_not_cancel(world):
    """A mean that is 1e8 times the deviation."""
    norm, x = nn.BatchNorm1d(1, momentum=1.0).double(), torch.tensor([[-1.0], [1.0], [-3.0], [3.0]]).double()
    seen = world(2).run(on_ranks, norm, [2, 2], [1e8 + x])
    for one in seen:
        torch.testing.assert_close(one.buffers[1], torch.tensor([20 / 3], dtype=torch.float64), rtol=1e-9, atol=0)
    (y,) = side_by_side(one.outputs for one in seen)
    torch.testing.assert_close(y, x / (5 + 1e-5) ** 0.5, rtol=1e-7, atol=0)


class Network(nn.Module):
    """Three batch norms, of which two may be recomputed in the backward."""

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


@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=str)
@pytest.mark.parametrize(
    ("rows", "stand_in", "factor"),
    [([3, 0, 4], None, 1), ([3, 0, 4], 1, 1), ([0, 1, 4], 0, 1), ([2, 3, 1, 0], 3, float("nan"))],
    ids=str,
)
def test_a_network_with_checkpoint_equals_one_process(world, use_reentrant, rows, stand_in, factor):
    """Also beside rows that do not count, be they NaN, and that have no gradient."""
    network, inputs = Network(use_reentrant), batches(sum(rows))
    seen = world(len(rows)).run(on_ranks, network, rows, inputs, stand_in, factor)
    expected = observe(network, inputs)
    if stand_in is not None:
        own = seen.pop(stand_in)
        assert_close(own.buffers, expected.buffers, 1e-12)
        if factor == 1:
            assert_close(own.outputs, [output[:2] for output in expected.outputs], 1e-11)
        if not use_reentrant:  # which makes zeros of undefined gradients
            assert {None} == {*own.of_rows, *own.of_parameters[:-2]}
    assert_equal_to_one_process(seen, expected, 1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_rounded_once(world, dtype):
    norm, inputs = filled(nn.BatchNorm1d(CHANNELS), dtype), batches(45, (), dtype)[:1]
    seen = world(3).run(on_ranks, norm, [20, 0, 25], inputs)
    expected = observe(copy.deepcopy(norm).double(), [one.double() for one in inputs])

    # Half a unit in the last place; float32 adds what is far below that, where its terms do not cancel.
    close = {"rtol": torch.finfo(dtype).eps / 2 + 1e-5, "atol": 1e-5, "check_dtype": False}
    (outputs,) = side_by_side(one.outputs for one in seen)
    assert outputs.dtype is dtype
    torch.testing.assert_close(outputs, expected.outputs[0], **close)
    for one in seen:
        assert [dtype] * 3 == [gradient.dtype for gradient in (*one.of_rows, *one.of_parameters)]
        torch.testing.assert_close(one.buffers, expected.buffers, **close)


@pytest.mark.parametrize(("rows", "stand_in"), [([1, 0], None), ([0, 0, 1], None), ([0, 1], 0)], ids=str)
def test_one_value_per_channel_is_torchs_error_on_all_ranks(world, rows, stand_in):
    norm, inputs = nn.BatchNorm1d(CHANNELS), [torch.ones(1, CHANNELS)]
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training") as caught:
        norm(*inputs)
    start, _, _ = str(caught.value).partition(", got")
    for raised in world(len(rows)).run_expecting_errors(on_ranks, norm, rows, inputs, stand_in):
        assert raised.type_name == "ValueError"
        assert raised.message.startswith(f"{start}, but the samples of all ranks together have 1.")


@pytest.mark.parametrize("rows", [[1, 1], [0, 0]], ids=str)
def test_few_rows_are_normalized_as_on_one_process(world, rows):
    norm, inputs = nn.BatchNorm1d(CHANNELS), [torch.ones(sum(rows), CHANNELS)]
    assert_equal_to_one_process(world(2).run(on_ranks, norm, rows, inputs), observe(norm, inputs), 1e-6)


def second_derivative() -> None:
    x = torch.randn(4, CHANNELS, requires_grad=True)
    with synchronized_batch_norm(World.of(None)):
        y = nn.BatchNorm1d(CHANNELS)(x)
        (gradient,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        gradient.square().sum().backward()


def test_a_second_derivative_is_refused_on_all_ranks(world):
    for raised in world(2).run_expecting_errors(second_derivative):
        assert "once_differentiable" in raised.message


class Own(nn.BatchNorm1d):
    """A batch norm with a forward of its own, as libraries have that add an activation."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        return nn.functional.batch_norm(input, None, None, training=self.training) + 1


LAYERS: dict[str, tuple[nn.Module, bool]] = {
    "torch's, synchronized on GPUs only": (nn.SyncBatchNorm(2), True),
    "a forward of its own": (Own(2), True),
    "frozen": (nn.BatchNorm1d(2).eval(), False),
    "frozen, without running statistics": (nn.BatchNorm1d(2, track_running_stats=False).eval(), True),
    "of another kind": (nn.LayerNorm(2), False),
}


def synchronized(layer: nn.Module) -> tuple[bool, bool]:
    """Body: whether the ranks' rows are normalized together, and whether torch's function is there afterwards."""
    x, of_torch = torch.arange(4.0).view(2, 2) + 10.0 * dist.get_rank(), nn.functional.batch_norm
    alone = copy.deepcopy(layer)(x) if type(layer) is not nn.SyncBatchNorm else nn.BatchNorm1d(2)(x)
    with synchronized_batch_norm(World.of(None)):
        together = layer(x)
    return not torch.allclose(alone, together, atol=0.1), nn.functional.batch_norm is of_torch


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_all_kinds(world, name):
    layer, expected = LAYERS[name]
    assert [(expected, True)] * 2 == world(2).run(synchronized, layer)
