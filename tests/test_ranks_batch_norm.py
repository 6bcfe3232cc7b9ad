"""Batch norm synchronized over real ranks against `torch.nn`'s own on the whole batch."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import Raised
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_gradavg.replicas.batch_norm import (
    not_counted,
    restore_batch_norm,
    synchronize_batch_norm,
    unsynchronizable_batch_norms,
)

CHANNELS = 3
SHAPES = {"1d": (), "1d in time": (4,), "2d": (2, 3), "3d": (2, 1, 3)}
TYPES: dict[int, Callable[..., nn.Module]] = {
    0: nn.BatchNorm1d,
    1: nn.BatchNorm1d,
    2: nn.BatchNorm2d,
    3: nn.BatchNorm3d,
}
ROWS = [[6], [3, 3], [5, 2], [1, 4], [7, 0], [2, 2, 2], [0, 5, 1], [2, 2, 2, 2], [3, 0, 1, 4]]


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


def gradients_of(module: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in module.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [gradient for gradient in gradients if gradient is not None]


def observe(norm: nn.Module, inputs: Sequence[Tensor], *, counts: bool = True, thread: bool = False) -> Seen:
    """Run two steps with a loss that is a sum over rows, in which rows have unlike gradients."""
    outputs, of_rows = [], []
    for values in inputs:
        x = values.clone().requires_grad_()
        with nullcontext() if counts else not_counted():
            y = norm(x)
        loss = (y.sin() * (1 + y)).sum()
        if thread:  # as on an accelerator, where the backward runs on threads of autograd
            runner = threading.Thread(target=loss.backward)
            runner.start()
            runner.join()
        else:
            loss.backward()
        outputs.append(y.detach())
        of_rows.append(x.grad)
    return Seen(outputs, of_rows, gradients_of(norm), {name: buffer.clone() for name, buffer in norm.named_buffers()})


def part_of(batch: Tensor, rows: Sequence[int], rank: int) -> Tensor:
    return batch[sum(rows[:rank]) : sum(rows[: rank + 1])]


def synchronized_steps(
    rows: Sequence[int], sizes: Sequence[int], dtype: torch.dtype, options: dict[str, Any], **how: Any
) -> Seen:
    """Body: this rank's rows of every batch."""
    norm = filled(TYPES[len(sizes)](CHANNELS, **options), dtype)
    assert [""] == synchronize_batch_norm(norm)
    inputs = [part_of(batch, rows, dist.get_rank()) for batch in batches(sum(rows), sizes, dtype)]
    return observe(norm, inputs, **how)


def single_process(rows: Sequence[int], sizes: Sequence[int], dtype: torch.dtype, options: dict[str, Any]) -> Seen:
    return observe(filled(TYPES[len(sizes)](CHANNELS, **options), dtype), batches(sum(rows), sizes, dtype))


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
@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
def test_equals_one_process(world, rows, sizes):
    """Case 42: outputs, running statistics and all gradients are those of the whole batch on one process, 1e-12."""
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
    """Without parameters, with a cumulative average, and without running statistics it is torch's batch norm, too."""
    rows = [3, 0, 4]
    seen = world(3).run(synchronized_steps, rows, (2,), torch.float64, options)

    assert_equal_to_one_process(seen, single_process(rows, (2,), torch.float64, options), 1e-12)


@pytest.mark.parametrize("rows", [[9, 7], [5, 0, 11]], ids=str)
def test_float32_equals_one_process(world, rows):
    """In float32 outputs and running statistics are those of one process to 1e-6."""
    seen = world(len(rows)).run(synchronized_steps, rows, (3, 3), torch.float32, {})
    expected = single_process(rows, (3, 3), torch.float32, {})

    assert_close(side_by_side(one.outputs for one in seen), expected.outputs, 1e-6)
    for one in seen:
        assert_close(list(one.buffers.values()), list(expected.buffers.values()), 1e-6)


def test_case_42_numbers(world):
    """Case 42: rows 0, 2 and 4, 6 move the running statistics to 0.3 and 1.5666667, not to 0.1 or 0.5, and 1.1."""
    expected = torch.tensor([0.3, 1.5666667])
    for mean, variance in world(2).run(running_statistics_of_case_42):
        torch.testing.assert_close(torch.cat([mean, variance]), expected, rtol=1e-6, atol=0)


def running_statistics_of_case_42() -> tuple[Tensor, Tensor]:
    """Body."""
    norm = nn.BatchNorm1d(1)
    synchronize_batch_norm(norm)
    norm(torch.tensor([[[0.0], [2.0]], [[4.0], [6.0]]])[dist.get_rank()])
    return norm.get_buffer("running_mean"), norm.get_buffer("running_var")


def far_from_zero() -> tuple[Tensor, Tensor]:
    """Body: a mean that is 1e8 times the deviation."""
    norm = nn.BatchNorm1d(1, momentum=1.0).double()
    synchronize_batch_norm(norm)
    y = norm(1e8 + torch.tensor([[[-1.0], [1.0]], [[-3.0], [3.0]]], dtype=torch.float64)[dist.get_rank()])
    return norm.get_buffer("running_var"), y.detach()


def test_the_variance_does_not_cancel(world):
    """Values 1e8 -1, +1, -3, +3 have the unbiased variance 20/3; a difference of squares would keep no digit of it."""
    results = world(2).run(far_from_zero)
    for variance, _ in results:
        torch.testing.assert_close(variance, torch.tensor([20 / 3], dtype=torch.float64), rtol=1e-9, atol=0)
    expected = torch.tensor([-1.0, 1.0, -3.0, 3.0], dtype=torch.float64) / (5 + 1e-5) ** 0.5
    torch.testing.assert_close(torch.cat([y for _, y in results]).flatten(), expected, rtol=1e-7, atol=0)


STAND_IN_ROWS = 2


def steps_beside_a_stand_in(rows: Sequence[int], stand_in: int, fill: float | None, **how: Any) -> Seen:
    """Body: the rank of the stand-in, of 0 rows, computes the first rows of the batch, or rows of the value `fill`."""
    norm = filled(nn.BatchNorm1d(CHANNELS), torch.float64)
    synchronize_batch_norm(norm)
    rank = dist.get_rank()
    inputs = [part_of(batch, rows, rank) for batch in batches(sum(rows), ())]
    if rank == stand_in:
        inputs = [batch[:STAND_IN_ROWS] for batch in batches(sum(rows), ())]
        if fill is not None:
            inputs = [torch.full_like(values, fill) for values in inputs]
    return observe(norm, inputs, counts=rank != stand_in, **how)


@pytest.mark.parametrize(("rows", "stand_in"), [([5, 0], 1), ([0, 1, 3], 0), ([2, 3, 1, 0], 3)], ids=str)
@pytest.mark.parametrize("thread", [False, True], ids=["", "backward on another thread"])
def test_a_stand_in_counts_for_nothing(world, rows, stand_in, thread):
    """Rows that do not count change nothing for the others, and are normalized by the statistics of the others."""
    seen = world(len(rows)).run(steps_beside_a_stand_in, rows, stand_in, None, thread=thread)
    expected = single_process(rows, (), torch.float64, {})

    own = seen.pop(stand_in)
    assert_equal_to_one_process(seen, expected, 1e-12)
    assert_close(list(own.buffers.values()), list(expected.buffers.values()), 1e-12)
    assert_close(own.outputs, [output[:STAND_IN_ROWS] for output in expected.outputs], 1e-12)
    for gradient, batch, output in zip(own.of_rows, batches(sum(rows), ()), own.outputs, strict=True):
        # What the statistics do not depend on has the derivative of a line.
        slope = filled(nn.BatchNorm1d(CHANNELS), torch.float64).weight / (batch.var(0, correction=0) + 1e-5).sqrt()
        assert_close([gradient], [slope.detach() * (output.cos() * (1 + output) + output.sin())], 1e-12)


def test_a_stand_in_of_nan_counts_for_nothing(world):
    """NaN in rows that do not count, and in their gradient, stays there."""
    rows = [5, 0, 2]
    seen = world(3).run(steps_beside_a_stand_in, rows, 1, float("nan"))

    assert seen[1].of_rows[0].isnan().all()
    assert_equal_to_one_process([seen[0], seen[2]], single_process(rows, (), torch.float64, {}), 1e-12)


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
    """Body."""
    network = Network(use_reentrant)
    assert ["first.1", "second.1", "second.4"] == synchronize_batch_norm(network)
    rank = dist.get_rank()
    inputs = [part_of(batch, rows, rank) for batch in batches(sum(rows), ())]
    if rank == stand_in:
        inputs = [batch[:STAND_IN_ROWS] + 1 for batch in batches(sum(rows), ())]
    return observe(network, inputs, counts=rank != stand_in, thread=rank == stand_in)


@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=str)
@pytest.mark.parametrize(("rows", "stand_in"), [([4, 3], None), ([3, 0, 4], None), ([3, 0, 4], 1)], ids=str)
def test_a_network_with_checkpoint_equals_one_process(world, use_reentrant, rows, stand_in):
    """Also recomputed in the backward, out of the context of a stand-in, all is as on one process that recomputes."""
    seen = world(len(rows)).run(network_steps, rows, use_reentrant, stand_in)
    expected = observe(Network(use_reentrant), batches(sum(rows), ()))

    if stand_in is not None:
        assert_close(list(seen.pop(stand_in).buffers.values()), list(expected.buffers.values()), 1e-12)
    assert_equal_to_one_process(seen, expected, 1e-11)


def gradients_under_ddp(rows: Sequence[int]) -> list[Tensor]:
    """Body: stock averaging of summed losses times the number of ranks, in buckets of a single parameter."""
    network = Network(None)
    synchronize_batch_norm(network)
    wrapped = DistributedDataParallel(network, bucket_cap_mb=1e-6)
    (batch, _) = batches(sum(rows), ())
    (wrapped(part_of(batch, rows, dist.get_rank())).sin().sum() * dist.get_world_size()).backward()
    return gradients_of(network)


def test_reduced_gradients_under_ddp_equal_one_process(world):
    """Between DDP's own collectives, the reduced gradients of all parameters are those of one process."""
    rows = [2, 0, 5]
    network = Network(None)
    network(batches(sum(rows), ())[0]).sin().sum().backward()

    for gradients in world(3).run(gradients_under_ddp, rows):
        assert_close(gradients, gradients_of(network), 1e-11)


def outputs_in(dtype: torch.dtype, autocast: bool, rows: Sequence[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Body."""
    linear, norm = nn.Linear(CHANNELS, CHANNELS), nn.BatchNorm1d(CHANNELS)
    model = nn.Sequential(linear, norm)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(CHANNELS))
        linear.bias.zero_()
    synchronize_batch_norm(model)
    x = part_of(batches(sum(rows), (), dtype)[0], rows, dist.get_rank())
    if not autocast:
        linear.to(dtype)
    with torch.autocast("cpu", dtype) if autocast else nullcontext():
        y = model(x.float() if autocast else x)
    y.float().square().sum().backward()
    return y.detach(), norm.get_buffer("running_var"), gradients_of(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_half_precision_is_computed_in_float32(world, dtype, autocast):
    """The output has the input's half precision, and is that of float32 apart from the last rounding."""
    rows = [600, 500]
    seen = world(2).run(outputs_in, dtype, autocast, rows)
    x = batches(sum(rows), (), dtype)[0].float()
    reference = nn.BatchNorm1d(CHANNELS)
    expected = reference(x).detach()

    output = torch.cat([y for y, _, _ in seen])
    assert dtype is output.dtype
    torch.testing.assert_close(output.float(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    for _, variance, gradients in seen:
        torch.testing.assert_close(variance, reference.running_var, rtol=1e-6, atol=0)
        assert all(gradient.isfinite().all() for gradient in gradients)


def one_step(norm: nn.Module, x: Tensor, dy: Tensor) -> Seen:
    x = x.clone().requires_grad_()
    y = norm(x)
    y.backward(dy)
    assert x.grad is not None
    return Seen([y.detach()], [x.grad], gradients_of(norm), dict(norm.named_buffers()))


def half_precision_step(rows: Sequence[int], dtype: torch.dtype) -> Seen:
    """Body."""
    norm = filled(nn.BatchNorm1d(CHANNELS), dtype)
    synchronize_batch_norm(norm)
    x, dy = (part_of(batch, rows, dist.get_rank()) for batch in batches(sum(rows), (), dtype))
    return one_step(norm, x, dy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_parameters_are_rounded_once(world, dtype):
    """With parameters and buffers in half precision, results are those of float64 on the same numbers, rounded once."""
    rows = [20, 0, 25]
    seen = world(3).run(half_precision_step, rows, dtype)
    norm = filled(nn.BatchNorm1d(CHANNELS), dtype).double()
    expected = one_step(norm, *(batch.double() for batch in batches(sum(rows), (), dtype)))

    # Half a unit in the last place; float32 adds what is far below that, where its terms do not cancel.
    close = {"rtol": torch.finfo(dtype).eps / 2 + 1e-5, "atol": 1e-5, "check_dtype": False}
    for one, other in ((side_by_side(of[index] for of in seen)[0], expected[index][0]) for index in (0, 1)):
        assert dtype is one.dtype
        torch.testing.assert_close(one, other, **close)
    for seen_by_rank in seen:
        assert [dtype] * 2 == [gradient.dtype for gradient in seen_by_rank.of_parameters]
        for name, buffer in seen_by_rank.buffers.items():
            torch.testing.assert_close(buffer, expected.buffers[name], **close)


def one_value(rows: Sequence[int], stand_in: int | None) -> Tensor:
    """Body."""
    rank = dist.get_rank()
    norm = nn.BatchNorm1d(CHANNELS)
    synchronize_batch_norm(norm)
    with not_counted() if rank == stand_in else nullcontext():
        return norm(torch.ones(STAND_IN_ROWS if rank == stand_in else rows[rank], CHANNELS)).detach()


@pytest.mark.parametrize(("rows", "stand_in"), [([1, 0], None), ([0, 0, 1], None), ([0, 1], 0)], ids=str)
def test_one_value_per_channel_is_torchs_error_on_all_ranks(world, rows, stand_in):
    """Where all ranks together have one value per channel, all of them raise what torch raises."""
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training") as caught:
        nn.BatchNorm1d(CHANNELS)(torch.ones(1, CHANNELS))
    start, _, _ = str(caught.value).partition(", got")

    for rank, raised in enumerate(world(len(rows)).run_expecting_errors(one_value, rows, stand_in)):
        n = STAND_IN_ROWS if rank == stand_in else rows[rank]
        expected = (
            f"{start}, but the samples of all ranks together have 1, on this rank in an input of shape"
            f" ({n}, {CHANNELS}). Use larger batches, or drop_last=True."
        )
        assert Raised("ValueError", expected) == raised


def test_one_value_per_rank_is_enough(world):
    """A rank with one value per channel is none of torch's errors as long as another has values, too."""
    for output in world(2).run(one_value, [1, 1], None):
        assert torch.equal(torch.zeros(1, CHANNELS), output)


def without_any_row() -> tuple[tuple[int, ...], dict[str, Tensor], Tensor | None]:
    """Body."""
    norm = nn.BatchNorm1d(CHANNELS)
    synchronize_batch_norm(norm)
    y = norm(torch.ones(0, CHANNELS))
    y.sum().backward()
    return tuple(y.shape), dict(norm.named_buffers()), norm.weight.grad


def test_no_row_on_any_rank_is_as_on_one_process(world):
    """Without any row there is nothing to normalize, and running statistics stay as they are, as in torch."""
    norm = nn.BatchNorm1d(CHANNELS)
    norm(torch.ones(0, CHANNELS))

    for shape, buffers, gradient in world(2).run(without_any_row):
        assert (0, CHANNELS) == shape
        assert torch.equal(torch.zeros(CHANNELS), gradient)
        assert_close(list(buffers.values()), list(norm.buffers()), 0)


def wrong_channels() -> Tensor:
    """Body."""
    norm = nn.BatchNorm1d(1)
    synchronize_batch_norm(norm)
    return norm(torch.ones(2, CHANNELS))


def test_an_input_of_other_channels_is_refused(world):
    """An input that would only fit by repeating the one channel of the layer is an error that names both numbers."""
    for raised in world(2).run_expecting_errors(wrong_channels):
        assert "ValueError" == raised.type_name
        assert "a batch norm of 1 channels got an input of shape (2, 3): pass num_features=3" in raised.message


def second_derivative() -> None:
    """Body: a penalty on the gradient of the input."""
    norm = nn.BatchNorm1d(CHANNELS)
    synchronize_batch_norm(norm)
    x = torch.randn(4, CHANNELS, requires_grad=True)
    (gradient,) = torch.autograd.grad(norm(x).sin().sum(), x, create_graph=True)
    assert gradient.isfinite().all()
    gradient.square().sum().backward()


def test_a_second_derivative_is_refused(world):
    """A gradient of a gradient is an error on all ranks, and not a wrong number; the first one is there."""
    for raised in world(2).run_expecting_errors(second_derivative):
        assert "RuntimeError" == raised.type_name
        assert "once_differentiable" in raised.message


def spread(norm: nn.Module) -> float:
    """The mean over this rank's rows, which is 0 where they were normalized by themselves."""
    return float(norm(torch.arange(4.0).view(2, 2) + 10.0 * dist.get_rank()).mean().detach())


def when_it_synchronizes() -> dict[str, bool]:
    """Body: which settings let the ranks' rows be normalized together."""
    found = {}
    for track in (True, False):
        model = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=track))
        synchronize_batch_norm(model)
        for name, model_trains, layer_trains in (
            ("train", True, True),
            ("frozen", True, False),
            ("eval", False, False),
        ):
            model.train(model_trains)
            model[0].train(layer_trains)
            before = copy.deepcopy(model.state_dict())
            plain = copy.deepcopy(model)
            restore_batch_norm(plain)
            found[f"{name}, {track}"] = abs(spread(model) - spread(plain)) > 0.1
            if not layer_trains:
                assert_close(list(model.state_dict().values()), list(before.values()), 0)
    return found


def test_only_the_statistics_of_training_batches_are_synchronized(world):
    """Frozen layers use their running statistics, or the global batch where they have none; evaluation is local."""
    expected = {
        "train, True": True,
        "frozen, True": False,
        "eval, True": False,
        "train, False": True,
        "frozen, False": True,
        "eval, False": False,
    }

    assert [expected] * 2 == world(2).run(when_it_synchronizes)


def evaluation_in_inference_mode() -> list[float]:
    """Body: a model in training mode under inference mode, and then trained."""
    norm = nn.BatchNorm1d(2, track_running_stats=False)
    synchronize_batch_norm(norm)
    with torch.inference_mode():
        inferred = spread(norm)
    with torch.no_grad():
        return [inferred, spread(norm), spread(norm)]


def test_inference_mode_and_no_grad_compute_the_same(world):
    """Without gradients, too, the ranks' rows are normalized together."""
    first, second = world(2).run(evaluation_in_inference_mode)

    assert first[:1] * 3 == first
    assert second[:1] * 3 == second
    assert first[0] < -0.5 < 0.5 < second[0]


class Own(nn.BatchNorm1d):
    """A batch norm with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        return super().forward(input).relu()


class Renamed(nn.BatchNorm1d):
    """A batch norm that only is of another type."""


def of_many_types() -> tuple[list[str], list[str], list[bool], list[bool]]:
    """Body: which layers are named, and which of them normalize the ranks' rows together."""
    model = nn.ModuleDict(
        {
            "plain": nn.BatchNorm1d(2),
            "torch's": nn.SyncBatchNorm(2),
            "lazy": nn.LazyBatchNorm1d(),
            "renamed": Renamed(2),
            "own": Own(2),
            "patched": nn.BatchNorm1d(2),
            "other": nn.LayerNorm(2),
        }
    )
    model["patched"].forward = torch.nn.functional.relu
    types = {name: nn.BatchNorm1d if name == "lazy" else type(layer) for name, layer in model.items()}
    twice = synchronize_batch_norm(model), synchronize_batch_norm(model)
    assert twice[0] == twice[1]
    together = [abs(spread(model[name])) > 0.5 for name in twice[0]]
    assert types == {name: type(layer) for name, layer in model.items()}
    unsynchronizable = unsynchronizable_batch_norms(model)
    restore_batch_norm(model)
    assert ["patched"] == [name for name, layer in model.items() if "forward" in vars(layer)]
    locally = [abs(spread(model[name])) < 1e-6 for name in twice[0] if name != "torch's"]
    return twice[0], unsynchronizable, together, locally


def test_layers_of_all_types(world):
    """Torch's layers of any type are synchronized, and restored; those with a forward of their own are only named."""
    expected = (["plain", "torch's", "lazy", "renamed"], ["own", "patched"], [True] * 4, [True] * 3)

    assert [expected] * 2 == world(2).run(of_many_types)


class Tower(nn.Module):
    """A model whose layer does not refer to it, and which says when it is copied."""

    copied = 0

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.hooked = 0
        self.norm.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.hooked += 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        Tower.copied += 1
        super().__setstate__(state)


def copies() -> None:
    """Body: what copies of a model and of a layer compute, with which parameters."""
    model = Tower()
    keys, parameters, kept = list(model.state_dict()), list(model.parameters()), model.norm
    synchronize_batch_norm(model)
    together = spread(model.norm)
    assert abs(together) > 0.5
    assert 1 == model.hooked
    assert kept is model.norm
    assert keys == list(model.state_dict())
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))

    whole = copy.deepcopy(model)
    with torch.no_grad():
        whole.norm.bias.add_(100)
    assert pytest.approx(together + 100, rel=1e-5) == spread(whole.norm)
    assert (1, 2) == (model.hooked, whole.hooked)
    assert 1 == int(model.norm.num_batches_tracked)
    assert together == spread(model.norm)

    loaded = pickle.loads(pickle.dumps(model))
    assert pytest.approx(0, abs=1e-6) == spread(loaded.norm)
    assert ["norm"] == synchronize_batch_norm(loaded)
    assert together == spread(loaded.norm)


def test_copies_are_synchronized(world):
    """The layer stays the object that it was; a deep copy is synchronized on its own, a pickled one when it is told."""
    assert [None] * 2 == world(2).run(copies)


def copy_of_a_layer() -> tuple[int, bool]:
    """Body: without the layer's hook, which does refer to the model."""
    model = Tower()
    model.norm._forward_hooks.clear()
    synchronize_batch_norm(model)
    before = Tower.copied
    return_value = copy.deepcopy(model.norm)
    return Tower.copied - before, abs(spread(return_value)) > 0.5


def test_the_copy_of_a_layer_is_not_one_of_its_model(world):
    """Copying a synchronized layer copies no more than the layer."""
    assert [(0, True)] * 2 == world(2).run(copy_of_a_layer)


def in_groups() -> float:
    """Body: ranks 0 and 1 are a group, and rank 2 is another."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    norm = nn.BatchNorm1d(2)
    synchronize_batch_norm(norm, groups[dist.get_rank() // 2])
    return spread(norm)


def test_ranks_of_a_group_are_synchronized(world):
    """Only the ranks of the given group are normalized together."""
    first, second, alone = world(3).run(in_groups)

    assert pytest.approx([0, 0], abs=1e-6) == [first + second, alone]
    assert first < -0.5


def alone_and_not_counted() -> tuple[list[float], list[float]]:
    """Body: one rank, first with rows that do not count."""
    norm = nn.BatchNorm1d(2)
    synchronize_batch_norm(norm)
    with not_counted():
        assert norm(torch.ones(2, 2)).isfinite().all()
    unmoved = norm.running_mean.tolist()
    norm(torch.tensor([[1.0, 3.0], [3.0, 5.0]]))
    return unmoved, norm.running_mean.tolist()


def test_rows_that_do_not_count_move_no_statistics_where_no_others_do(world):
    """A rank that is alone leaves its running statistics as they are within `not_counted`."""
    ((unmoved, moved),) = world(1).run(alone_and_not_counted)

    assert [0.0, 0.0] == unmoved
    assert pytest.approx([0.2, 0.4]) == moved


def test_without_a_process_group_it_is_torchs_own():
    """On one process, without a process group, the bits are those of the layer as it was."""
    norm, plain = nn.BatchNorm1d(CHANNELS), nn.BatchNorm1d(CHANNELS)
    assert [""] == synchronize_batch_norm(norm)
    (x, _) = batches(8, (), torch.float32)

    assert torch.equal(plain(x), norm(x))
    assert torch.equal(plain.running_var, norm.running_var)
