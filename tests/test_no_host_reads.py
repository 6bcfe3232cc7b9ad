"""The way that gradients take on an accelerator, without one: on meta tensors, which cannot be read, and on CPU tensors
whose stream is a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_gradavg.reduction.accumulate import Accumulator
from lightning_gradavg.reduction.terms import keep_gradients
from lightning_gradavg.weights import as_weight
from lightning_gradavg.wire.options import WIRE_DTYPES, WireOptions
from test_ranks_wire import LARGEST_ERROR, Bucket, gradient_of, relative_error
from torch import Tensor, nn
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_gradavg.place import places_on_nodes
from lightning_gradavg.reduction.reducer import Reducer
from lightning_gradavg.reduction.window import WHOLE_LOSS, MicroBatch
from lightning_gradavg.rules import RULES, Share, resolve_rule
from lightning_gradavg.wire import exchange
from lightning_gradavg.wire.codecs import CODECS
from lightning_gradavg.wire.route import route_of

META = torch.device("meta")


class StandInStream:
    """Says of a stream what was asked of it; what runs on it runs at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waited_for = 0

    def wait_stream(self, stream: Any) -> None:
        self.waited_for += 1


class Echo:
    """A transport to ranks that send what this one sends, so that nothing leaves the process."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def scatter(self, payload: Tensor, received: Tensor) -> None:
        received.copy_(payload)

    def gather(self, payload: Tensor) -> None:
        blocks = payload.unflatten(0, (RANKS, -1))
        blocks.copy_(blocks[1].clone())


RANKS = 3


class Ownership(TorchDispatchMode):
    """Notes which memory was made on the stream of the exchange, and what else was used there."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = False
        self.made: set[int] = set()
        self.foreign: list[Tensor] = []
        # Of what was freed the address may be that of the next.
        self._kept: list[Tensor] = []

    @contextmanager
    def on(self, stream: StandInStream) -> Iterator[None]:
        self.beside = True
        try:
            yield
        finally:
            self.beside = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if self.beside:
            used = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.foreign += [tensor for tensor in used if address_of(tensor) not in self.made]
            before = {address_of(tensor) for tensor in used}
            fresh = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and address_of(leaf) not in before]
            self.made |= {address_of(tensor) for tensor in fresh}
            self._kept += fresh
        return found


def address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def accelerated(transport: Any = None, on_stream: Any = nullcontext) -> Iterator[None]:
    """Have an exchange take its way on streams within the context, whatever device it works on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", StandInStream)
        patch.setattr(torch.cuda, "stream", on_stream)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: None)
        # A future without devices: those of another kind than CUDA have no events to wait for.
        patch.setattr(exchange, "Future", lambda devices=(): Future())
        if transport is not None:
            patch.setattr(exchange, "NcclTransport", transport)
        yield


def scattered_sum(wire_dtype: str, rank: int, ranks: int, device: torch.device) -> exchange.ScatteredSum:
    route = route_of(WireOptions(wire_dtype), places_on_nodes([0] * ranks), rank, nccl=True)
    return exchange.ScatteredSum(route, wire_dtype, rank, None, device)


def test_meta_tensors_cannot_be_read():
    """What the tests below rely on: to read a number or a truth value of a meta tensor is an error, also indirectly."""
    tensor = torch.ones(3, device=META)
    for read in (
        tensor.sum().item,
        lambda: bool(tensor.any()),
        tensor.tolist,
        tensor.nonzero,
        lambda: tensor[tensor > 0],
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read()


@pytest.mark.parametrize(
    ("wire_dtype", "dtype"),
    [(name, dtype) for name in WIRE_DTYPES for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64)],
    ids=str,
)
@pytest.mark.parametrize("weighted", [False, True])
def test_exchange_reads_nothing(wire_dtype, dtype, weighted):
    """On an accelerator a bucket is scaled, encoded, sent, summed and decoded without a look at any number, over steps
    whose buckets are arranged anew."""
    factor: Any = torch.full((), 0.5, dtype=torch.float64, device=META) if weighted else 0.5
    with accelerated(Echo):
        ours = scattered_sum(wire_dtype, 1, RANKS, META)
        one, other = (torch.zeros(size, dtype=dtype, device=META) for size in (700, 1))
        for parameters in ([one, other], [one, other], [other], [one], [one]):
            buffer = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=dtype, device=META)
            bucket: Any = Bucket(buffer, parameters)
            assert ours.sum(bucket, lambda: factor).wait() is buffer
        assert isinstance(ours._stream, StandInStream)
        # Once for each bucket: the stream of the exchange begins behind that of the gradients.
        assert 5 == ours._stream.waited_for
        ours.close()


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_exchange_has_memory_of_its_own(wire_dtype):
    """On its stream an exchange uses nothing that was made elsewhere but the bucket and its factor, which live as long
    as the step: memory of another stream could be given away there as soon as the host has let it go."""
    ownership = Ownership()
    factor = torch.full((), 0.5, dtype=torch.float64, device=META)
    with accelerated(Echo, ownership.on):
        ours = scattered_sum(wire_dtype, 1, RANKS, META)
        one, other = (torch.zeros(size, device=META) for size in (700, 1))
        for parameters in ([one, other], [one, other], [other], [one], [one]):
            bucket = torch.ones(sum(parameter.numel() for parameter in parameters), device=META)
            with ownership:
                ours.sum(Bucket(bucket, parameters), lambda: factor).wait()  # type: ignore[arg-type]  # as far as it is read
            assert {address_of(bucket), address_of(factor)} == set(map(address_of, ownership.foreign))
            ownership.foreign.clear()
        ours.close()


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_codecs_read_nothing(wire_dtype):
    """A payload is made and read without a look at any number."""
    rows = torch.zeros(3, 512, device=META)
    payload = CODECS[wire_dtype].encode(rows)
    assert payload.device == META
    assert rows.shape == CODECS[wire_dtype].decode(payload).shape


class Jammed(Echo):
    """A transport whose first message cannot be made."""

    def scatter(self, payload: Tensor, received: Tensor) -> None:
        raise MemoryError("no memory")


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_failure_is_no_number(wire_dtype):
    """What a rank sends that failed is NaN in every number, because nobody reads on an accelerator who failed; the rank
    itself raises."""
    with accelerated(Jammed):
        ours = scattered_sum(wire_dtype, 1, RANKS, torch.device("cuda", 0))
        ours._device = torch.device("cpu")
        bucket = torch.ones(700)
        future = ours.sum(Bucket(bucket, [bucket]), lambda: 1.0)  # type: ignore[arg-type]  # as far as it is read
        with pytest.raises(RuntimeError, match="no memory"):
            future.wait()
        ours.close()
    assert bucket.isnan().all()


def root_weighted(place: Any, weight: Any) -> Share:
    return Share(weight**0.5 / place.ranks_on_node, weight**0.5)


class Bare:
    """A bucket of a reducer that has one."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def buffer(self) -> Tensor:
        return self._buffer

    def is_last(self) -> bool:
        return True


class Summed:
    """An exchange that multiplies and adds nothing."""

    def begin(self) -> None:
        pass

    def sum(self, bucket: Any, factor: Callable[[], Any]) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer().mul_(factor()))
        return future

    def close(self) -> None:
        pass


def reduce_window(rule: Any, weights: Sequence[Sequence[float]], names: Sequence[str]) -> None:
    """Go through a window on a rank of one, as far as the end of its last backward, on the meta device."""
    parameters = [nn.Parameter(torch.ones(4, device=META)), nn.Parameter(torch.ones(2, device=META))]
    reducer = Reducer(resolve_rule(rule), places_on_nodes([0]), 0, None, META, exchange=Summed())
    accumulator = Accumulator(reducer, parameters, preserves_gradients=False)
    for index, of_terms in enumerate(weights):
        terms = {name: parameters[0].sum() * parameters[1].sum() for name in names}
        # Of another type and 1-dimensional, as a mask's sum with keepdim.
        given = {name: as_weight(torch.full((1,), n, device=META), META) for name, n in zip(names, of_terms, strict=True)}
        loss = accumulator.weigh(terms, MicroBatch(given, explicit=True), alone=len(weights) == 1)
        loss.root = loss.value
        last = index == len(weights) - 1

        def run(loss: Any = loss, **options: Any) -> None:
            loss.root.backward(**options)

        accumulator.backward(loss, run, last=last, loss_divisor=len(weights))
        if not last:
            accumulator.pause()
    bucket: Any = Bare(torch.ones(6, device=META))
    found: Tensor = reducer.hook(None, bucket).wait()
    assert found.device == META


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("rule", [*RULES, root_weighted], ids=[*RULES, "root_weighted"])
def test_rules_read_nothing(rule, window):
    """Weights that are tensors go through a window, its totals and the factor of its buckets unread, under any rule."""
    reduce_window(rule, [[1.0 + step] for step in range(window)], [WHOLE_LOSS])


@pytest.mark.parametrize("window", [1, 3])
def test_named_terms_read_nothing(window):
    """Nor is a weight of a named term read."""
    reduce_window("weighted_mean", [[1.0 + step, 2.0] for step in range(window)], ["box", "cls"])


def test_kept_gradients_are_not_read():
    """Whether a gradient is kept is decided where it is."""
    parameter = nn.Parameter(torch.ones(3, device=META))
    with keep_gradients([parameter], torch.ones((), device=META) > 0):
        parameter.sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.device == META


SIZES = (1, 7, 1000, 30_001)


def sum_on_streams(wire_dtype: str) -> Any:
    """Body: sums of buckets by the steps that follow one another on a stream, and by threads, of three steps."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    factor = torch.full((), rank + 1.0, dtype=torch.float64)
    found: dict[str, list[Tensor]] = {"stream": [], "threads": []}
    with accelerated():
        # On CPU tensors, and so through the collectives of the gloo group, which has those of NCCL.
        on_stream = scattered_sum(wire_dtype, rank, ranks, torch.device("cuda", 0))
        on_stream._device = torch.device("cpu")
        for seed in range(3):
            buckets = [gradient_of(rank, size, seed) for size in SIZES]
            for bucket in buckets:
                on_stream.sum(Bucket(bucket, [bucket]), lambda: factor).wait()  # type: ignore[arg-type]  # as far as it is read
            found["stream"] += buckets
    in_threads = scattered_sum(wire_dtype, rank, ranks, torch.device("cpu"))
    for seed in range(3):
        buckets = [gradient_of(rank, size, seed) for size in SIZES]
        futures = [in_threads.sum(Bucket(bucket, [bucket]), lambda: factor) for bucket in buckets]  # type: ignore[arg-type]  # as above
        for future in futures:
            future.wait()
        found["threads"] += buckets
    in_threads.close()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_stream_and_threads_give_the_same_bits(world, wire_dtype, ranks):
    """The steps of an exchange give the same numbers one after another, as on NCCL, and in threads, as on gloo: the
    same bits on all ranks, and right ones."""
    found = world(ranks).run(sum_on_streams, wire_dtype)
    for of_rank in found:
        for one, other, first in zip(of_rank["stream"], of_rank["threads"], found[0]["stream"], strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one, first)
    for size, total in zip(SIZES, found[0]["stream"][: len(SIZES)], strict=True):
        exact = sum((rank + 1) * gradient_of(rank, size).double() for rank in range(ranks))
        assert relative_error(total, exact) <= LARGEST_ERROR[wire_dtype] * (1 if size >= 1000 else 4)
