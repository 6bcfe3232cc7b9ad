"""Batch norm synchronized over real ranks against `torch.nn`'s own on the whole batch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gradavg._lightning.internals import BatchNorm
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.running import Forward, running
from lightning_gradavg.replicas.batch_norm import synchronized_batch_norm

CHANNELS = 3


class Network(nn.Module):
    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Sequential(nn.Linear(CHANNELS, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1), nn.BatchNorm1d(1))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.use_reentrant is None:
            return self.second(x)
        return checkpoint(self.second, x, use_reentrant=self.use_reentrant)


class Own(nn.BatchNorm1d):
    """Has a forward of its own, as in libraries that add an activation."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        return nn.functional.batch_norm(input, None, None, self.weight, self.bias, self.training) + 1


NORM = nn.BatchNorm1d
MODULES: dict[str, tuple[nn.Module, Sequence[int]]] = {
    "1d": (NORM(CHANNELS), ()),
    "2d": (nn.BatchNorm2d(CHANNELS), (2, 3)),
    "3d": (nn.BatchNorm3d(CHANNELS), (2, 1, 3)),
    "momentum=None": (NORM(CHANNELS, momentum=None), ()),
    "momentum=0.7, eps=0.5": (NORM(CHANNELS, momentum=0.7, eps=0.5), (4,)),
    "track_running_stats=False": (NORM(CHANNELS, track_running_stats=False), ()),
    "no parameters": (NORM(CHANNELS, affine=False, track_running_stats=False), (4,)),
    "torch's, synchronized on GPUs only": (nn.SyncBatchNorm(CHANNELS), (4,)),
    "a forward of its own": (Own(CHANNELS), ()),
    "frozen, without running statistics": (NORM(CHANNELS, track_running_stats=False).eval(), ()),
    "frozen": (NORM(CHANNELS).eval(), ()),
    "network": (Network(), ()),
    "checkpoint": (Network(use_reentrant=False), ()),
    "reentrant checkpoint": (Network(use_reentrant=True), ()),
}
"""Modules that normalize over all ranks, but for the frozen one, and the shape of a value."""


class Place(NamedTuple):
    """The rows of each rank. The rows of a stand-in do not count: two that are NaN."""

    rows: list[int]
    stand_in: int | None = None


OF_ALL = [6], [7, 0], [0, 5, 1], [3, 0, 1, 4]
PLACES = [*map(Place, OF_ALL), Place([0, 1, 4], 0), Place([2, 3, 1, 0], 3)]


class Seen(NamedTuple):
    outputs: list[Tensor]
    of_rows: list[Any]
    of_parameters: list[Any]
    buffers: list[Tensor]


def observe(module: nn.Module, inputs: Sequence[Tensor]) -> Seen:
    """Run two steps with a loss that is a sum over rows, in which rows have unlike gradients."""
    outputs = []
    of_rows = []
    for values in inputs:
        x = values.clone().requires_grad_()
        y = module(x)
        # As on an accelerator, where the backward runs on threads of autograd.
        runner = threading.Thread(target=(y.sin() * (1 + y)).sum().backward)
        runner.start()
        runner.join()
        outputs.append(y.detach())
        of_rows.append(x.grad)
    return Seen(outputs, of_rows, [one.grad for one in module.parameters()], list(module.buffers()))


def on_rank(module: nn.Module, inputs: Sequence[Tensor], place: Place) -> tuple[Seen, slice, bool]:
    """Return what a rank sees of its rows, which they are, and whether they count."""
    rank = dist.get_rank()
    counts = rank != place.stand_in
    rows = slice(sum(place.rows[:rank]), sum(place.rows[: rank + 1]))
    own = [batch[rows] if counts else batch[:2] * torch.nan for batch in inputs]
    of_torch = nn.functional.batch_norm
    try:
        forward = Forward(samples=None if counts else 0, world=World.of(None))
        with synchronized_batch_norm(), running(forward):
            return observe(module, own), rows, counts
    finally:
        assert nn.functional.batch_norm is of_torch


def made(name: str, rows: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, list[Tensor]]:
    """Return a module, whose parameters and buffers are not those that it begins with, and two batches."""
    like, sizes = MODULES[name]
    module = copy.deepcopy(like)
    norms = [norm for norm in module.modules() if isinstance(norm, BatchNorm)]
    with torch.no_grad():
        for index, tensor in enumerate(one for norm in norms for one in [*norm.parameters(), *norm.buffers()]):
            if tensor.is_floating_point():
                tensor.copy_(torch.linspace(0.5, 1.5 + index % 4, tensor.numel(), dtype=torch.float64))
    generator = torch.Generator().manual_seed(17)
    drawn = [torch.randn(rows, CHANNELS, *sizes, generator=generator, dtype=torch.float64) for _ in range(2)]
    return module.to(dtype), [(2 * one + 0.5).to(dtype) for one in drawn]


def compare(module: Any, inputs: Sequence[Tensor], place: Place, expected: Seen) -> None:
    """Body: compare a rank's rows, and the sums of the ranks' gradients of parameters, with those of one process."""
    seen, rows, counts = on_rank(module, inputs, place)
    tolerance = 1e-11 if isinstance(module, Network) else 1e-12

    def close(actual: Sequence[Any], right: Sequence[Any], tolerance: float = tolerance) -> None:
        torch.testing.assert_close(actual, right, rtol=tolerance, atol=tolerance)

    close(seen.buffers, expected.buffers, 1e-12)
    if counts:
        close(seen.outputs, [output[rows] for output in expected.outputs])
        close(seen.of_rows, [gradient[rows] for gradient in expected.of_rows])
    if not counts and not getattr(module, "use_reentrant", False):  # which makes zeros of undefined gradients
        assert {None} == {*seen.of_rows, *seen.of_parameters}
    sums = [
        torch.zeros_like(one) if of_rank is None or not counts else of_rank
        for one, of_rank in zip(module.parameters(), seen.of_parameters, strict=True)
    ]
    for one in sums:
        dist.all_reduce(one)
    close(sums, expected.of_parameters)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        # Every module beside an empty rank and a stand-in; one of each kind of graph in every place.
        *product([name for name in MODULES if name != "frozen"], [Place([3, 0, 4], 1)]),
        *product(["1d", "network", "reentrant checkpoint"], PLACES),
        *product(["1d"], [Place([1, 1]), Place([0, 0])]),
        ("frozen", Place([3, 0, 4])),
    ],
    ids=str,
)
def test_equals_one_process(world, name, place):
    """Rows are those of one process, buffers are on every rank, and gradients of parameters sum up.

    So they are beside rows that do not count, which are NaN and have no gradient.
    """
    module, inputs = made(name, sum(place.rows))
    world(len(place.rows)).run(compare, module, inputs, place, observe(copy.deepcopy(module), inputs))


@on_ranks(2)
def test_the_variance_does_not_cancel():
    """A mean that is 1e8 times the deviation."""
    norm = NORM(1, momentum=1.0).double()
    x = torch.tensor([[-1.0], [1.0], [-3.0], [3.0]]).double()
    seen, rows, _ = on_rank(norm, [1e8 + x], Place([2, 2]))
    torch.testing.assert_close(seen.buffers[1], torch.tensor([20 / 3], dtype=torch.float64), rtol=1e-9, atol=0)
    torch.testing.assert_close(seen.outputs[0], x[rows] / (5 + 1e-5) ** 0.5, rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@on_ranks(3)
def test_half_precision_is_rounded_once(dtype):
    module, (x, _) = made("1d", 45, dtype)
    expected = observe(copy.deepcopy(module).double(), [x.double()])
    seen, rows, _ = on_rank(module, [x], Place([20, 0, 25]))
    assert [dtype] * 4 == [part.dtype for part in (*seen.outputs, *seen.of_rows, *seen.of_parameters)]
    # Half a unit in the last place; float32 adds what is far below that, where its terms do not cancel.
    close = {"rtol": torch.finfo(dtype).eps / 2 + 1e-5, "atol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(seen.outputs[0], expected.outputs[0][rows], **close)
    torch.testing.assert_close(seen.buffers, expected.buffers, **close)


@pytest.mark.parametrize("place", [Place([1, 0]), Place([0, 0, 1]), Place([0, 1], 0)], ids=str)
def test_one_value_per_channel_is_torchs_error_on_all_ranks(world, place):
    norm = NORM(CHANNELS)
    inputs = [torch.ones(1, CHANNELS)]
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training") as caught:
        norm(*inputs)
    start, _, _ = str(caught.value).partition(", got")
    for raised in world(len(place.rows)).run_expecting_errors(on_rank, norm, inputs, place):
        assert raised.type_name == "ValueError"
        assert raised.message.startswith(f"{start}, but the samples of all ranks together have 1.")
