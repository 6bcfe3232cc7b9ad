"""Buckets that travel in narrow types and node by node, on real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_gradavg.wire.options import WIRE_DTYPES, WireOptions
from ranks import RankPool, make_trainer
from torch import nn
from toys import Toy, loader, same_everywhere, train

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.place import places_on_nodes
from lightning_gradavg.reduction.combine import combine
from lightning_gradavg.rules import RULES
from lightning_gradavg.wire import codecs, exchange, transport
from lightning_gradavg.wire.route import Hop, route_of

# Relative L2 error of a sum: rounded once by all ranks but the one that sums, and once after it. A rounding to p bits
# has about 0.41 * 2**-p of error on average, one to a 127th of the largest of 256 about 0.29 / 127 of that number.
LARGEST_ERROR = {"bfloat16": 2.5e-3, "float16": 3.2e-4, "int8": 1.2e-2, None: 1e-6}

pytestmark = [
    pytest.mark.filterwarnings("ignore:rank . has a micro-batch of weight 0:UserWarning"),
    pytest.mark.filterwarnings('ignore:a "weight" was given:UserWarning'),
]


class Bucket:
    """What an exchange asks of a bucket of DDP."""

    def __init__(self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
        self._buffer, self._parameters = buffer, parameters

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def parameters(self) -> Sequence[torch.Tensor]:
        return self._parameters


def scattered_sum(wire_dtype: str | None, nodes: Sequence[int], **options: Any) -> exchange.ScatteredSum:
    route = route_of(WireOptions(wire_dtype, **options), places_on_nodes(nodes), dist.get_rank(), nccl=False)
    return exchange.ScatteredSum(route, wire_dtype, dist.get_rank(), None, torch.device("cpu"))


def gradient_of(rank: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * seed + rank))


def sum_buckets(wire_dtype: str | None, nodes: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> Any:
    """Body: the sums of several buckets, all in flight at once, each rank times its number plus 1."""
    rank = dist.get_rank()
    ours = scattered_sum(wire_dtype, nodes)
    buckets = [gradient_of(rank, size).to(dtype) for size in sizes]
    futures = [ours.sum(Bucket(bucket, [bucket]), lambda: rank + 1.0) for bucket in buckets]  # type: ignore[arg-type]
    sums = [future.wait().clone() for future in futures]
    ours.close()
    return sums


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def exact_sum(world_size: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return sum(((rank + 1) * gradient_of(rank, size).to(dtype).double() for rank in range(world_size)), torch.zeros(size))


SIZES = (1, 7, 1000, 300_001)


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1], [0, 0, 0], [0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0]], ids=str)
@pytest.mark.parametrize("wire_dtype", [*WIRE_DTYPES, None])
def test_sum_of_buckets_of_any_size(world, wire_dtype, nodes):
    """Buckets smaller than the world, that no number of parts divides, or of many segments are summed within the
    error of the type, with the same bits on all ranks."""
    if wire_dtype is None and nodes not in ([0, 0, 1, 1], [0, 1, 1, 0]):
        return
    ranks = world(len(nodes)).run(sum_buckets, wire_dtype, nodes, SIZES, torch.float32)
    for other in ranks[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(other, ranks[0], strict=True))
    for size, found in zip(SIZES, ranks[0], strict=True):
        # An L2 norm of few numbers is not an average: each may be off by twice its largest rounding.
        allowed = LARGEST_ERROR[wire_dtype] * (1 if size >= 1000 else 4)
        assert relative_error(found, exact_sum(len(nodes), size)) <= allowed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_half_precision_gradients(world, wire_dtype, dtype):
    """Gradients in half precision are summed in float32, too, and rounded once more where their type is not that of
    the wire."""
    ranks = world(3).run(sum_buckets, wire_dtype, [0, 0, 0], [5000], dtype)
    own = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    assert dtype == ranks[0][0].dtype
    assert torch.equal(ranks[0][0], ranks[2][0])
    assert relative_error(ranks[0][0], exact_sum(3, 5000, dtype)) <= LARGEST_ERROR[wire_dtype] + 0.5 * own


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


def test_error_does_not_grow_with_ranks(world, eight):
    """In bfloat16 the error is that of two roundings on 2, 4 and 8 ranks, where a ring of bfloat16 has 4.0e-3."""
    for pool in (world(2), world(4), eight):
        size = 100_000
        found = pool.run(sum_buckets, "bfloat16", [0] * pool.world_size, [size], torch.float32)
        assert relative_error(found[0][0], exact_sum(pool.world_size, size)) <= 2.5e-3


def test_four_nodes_of_two(eight):
    """On 4 nodes of 2 ranks the way through the nodes has the error of the way between all ranks."""
    nodes = [0, 0, 1, 1, 2, 2, 3, 3]
    found = eight.run(sum_buckets, "bfloat16", nodes, [100_000], torch.float32)
    assert all(torch.equal(found[0][0], other[0]) for other in found)
    assert relative_error(found[0][0], exact_sum(8, 100_000)) <= 2.5e-3


def sum_with_bad_numbers(wire_dtype: str | None, nodes: Sequence[int], discard: bool) -> torch.Tensor:
    rank = dist.get_rank()
    ours = scattered_sum(wire_dtype, nodes)
    gradient = gradient_of(rank, 2000)
    if rank == 1:
        gradient[3], gradient[1500] = torch.nan, torch.inf
    found: torch.Tensor = ours.sum(Bucket(gradient, [gradient]), lambda: 0.0 if discard and rank == 1 else 1.0).wait()  # type: ignore[arg-type]
    ours.close()
    return found


@pytest.mark.parametrize("nodes", [[0, 0, 0, 0], [0, 0, 1, 1]], ids=str)
@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_bad_numbers_are_seen_everywhere(world, wire_dtype, nodes):
    """One rank's NaN and infinity reach all ranks, as GradScaler needs; int8 loses their blocks, the others nothing
    else."""
    ranks = world(4).run(sum_with_bad_numbers, wire_dtype, nodes, False)
    exact = sum((gradient_of(rank, 2000).double() for rank in range(4)), torch.zeros(2000))
    for found in ranks:
        bad = ~found.isfinite()
        assert bad[3]
        assert bad[1500]
        assert bad.sum() == 2 or (wire_dtype == "int8" and bad.sum() <= 2 * codecs.BLOCK)
        assert relative_error(found[~bad], exact[~bad]) <= LARGEST_ERROR[wire_dtype]


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_discarded_bucket_contributes_nothing(world, wire_dtype):
    """A rank whose factor is 0 contributes exact zeros, although its gradient is NaN and infinite."""
    ranks = world(2).run(sum_with_bad_numbers, wire_dtype, [0, 0], True)
    exact = gradient_of(0, 2000).double()
    assert all(relative_error(found, exact) <= LARGEST_ERROR[wire_dtype] for found in ranks)


class Net(Toy):
    """A small network in float32, whose batch is a seed and a weight, and whose weights stay as they are."""

    def __init__(self, layers: int = 2, width: int = 40, start: Any = 1.0) -> None:
        super().__init__(start=start, dtype=torch.float32, lr=0.0)
        self.net = make_net(layers, width)
        self.width = width

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": loss_of(self.net, self.width, batch) + 0 * self.w.sum(), "weight": batch[1]}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.gradients.append(torch.cat([p.grad.flatten() for p in self.net.parameters()]))


def make_net(layers: int, width: int) -> nn.Sequential:
    generator = torch.Generator().manual_seed(1)
    net = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(generator=generator).mul_(width**-0.5)
    return net


def loss_of(net: nn.Module, width: int, batch: torch.Tensor) -> torch.Tensor:
    seed, weight = batch.tolist()
    x = torch.randn(6, width, generator=torch.Generator().manual_seed(int(seed)))
    loss: torch.Tensor = net(x).square().mean()
    return loss * torch.nan if weight == 0 else loss


def exact_gradient(batches: Sequence[Sequence[Sequence[float]]], rule: str, nodes: Sequence[int]) -> torch.Tensor:
    """Return what `combine` makes of all pairs' gradients."""
    net = make_net(2, 40)
    pairs = [(node, batch) for node, of_rank in zip(nodes, batches, strict=True) for batch in of_rank]
    gradients = [torch.autograd.grad(loss_of(net, 40, torch.tensor(batch)), list(net.parameters())) for _, batch in pairs]
    return combine(
        torch.stack([torch.cat([part.flatten() for part in gradient]).double() for gradient in gradients]),
        rule=RULES[rule],
        nodes=[node for node, _ in pairs],
        weights=[batch[1] for _, batch in pairs],
    )


def batches_of(ranks: int, window: int) -> list[list[list[float]]]:
    return [[[10.0 * rank + step, 1.0 + (rank + step) % 3] for step in range(window)] for rank in range(ranks)]


def train_net(batches: Any, strategy: Any, nodes: Sequence[int], window: int, **options: Any) -> Any:
    return train(batches, {}, strategy, nodes, Net, accumulate_grad_batches=window, **options)


@pytest.mark.filterwarnings("ignore:wire_scope='nodes' has no effect:UserWarning")
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("nodes", "wire"),
    [
        ([0, 0], {"wire_dtype": "bfloat16"}),
        ([0, 0, 1], {"wire_dtype": "float16", "wire_scope": "nodes"}),
        ([0, 0], {"wire_dtype": "int8"}),
        ([0, 0, 1, 1], {}),
        ([0, 0, 1, 1], {"wire_dtype": "bfloat16", "wire_scope": "nodes"}),
    ],
    ids=str,
)
def test_every_rule(world, rule, nodes, wire, window):
    """Every rule, over windows of 1 and 3 and on uneven nodes, is `combine` within the error of the wire."""
    batches = batches_of(len(nodes), window)
    strategy = {"reduction": rule, "bucket_cap_mb": 0.002, "gradient_as_bucket_view": window == 1, **wire}
    seen = same_everywhere(world(len(nodes)).run(train_net, batches, strategy, nodes, window))
    allowed = LARGEST_ERROR[wire.get("wire_dtype")]
    assert relative_error(seen.gradients[0], exact_gradient(batches, rule, nodes)) <= allowed


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("wire_dtype", [*WIRE_DTYPES, None])
def test_weight_of_zero(world, wire_dtype, window):
    """A rank of weight 0 contributes nothing, NaN as its loss is, whatever the type on the wire."""
    batches = batches_of(4, window)
    batches[2] = [[seed, 0.0] for seed, _ in batches[2]]
    nodes = [0, 0, 1, 1]
    strategy = {"reduction": "weighted_mean", "wire_dtype": wire_dtype}
    seen = same_everywhere(world(4).run(train_net, batches, strategy, nodes, window))
    exact = exact_gradient(batches, "weighted_mean", nodes)
    assert relative_error(seen.gradients[0], exact) <= LARGEST_ERROR[wire_dtype]


def train_steps(strategy: Any, nodes: Sequence[int], steps: int, layers: int, width: int) -> Any:
    """Body: as many steps on the same batch of each rank."""
    batches = [[[10.0 * rank, 1.0]] * steps for rank in range(dist.get_world_size())]
    return train(batches, {"layers": layers, "width": width}, strategy, nodes, Net)


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 0, 1, 1]], ids=str)
def test_error_feedback(world, nodes):
    """Over 40 steps, with the buckets arranged anew after the first, the mean of int8's gradients is the exact one: one
    step is off by 1e-2, and their mean by what is owed in the end, a 40th of that, from two stages."""
    strategy = {"reduction": "weighted_mean", "wire_dtype": "int8", "bucket_cap_mb": 0.004}
    seen = same_everywhere(world(len(nodes)).run(train_steps, strategy, nodes, 40, 2, 40))
    batches = [[[10.0 * rank, 1.0]] for rank in range(len(nodes))]
    exact = exact_gradient(batches, "weighted_mean", nodes)
    single = relative_error(seen.gradients[0], exact)
    mean = torch.stack(seen.gradients).double().mean(0)
    assert single > 2e-3
    assert relative_error(mean, exact) <= 2 * 1.2e-2 / 40


@pytest.mark.parametrize(
    ("nodes", "wire"),
    [
        ([0, 0], {"wire_dtype": "bfloat16"}),
        ([0, 0, 0], {"wire_dtype": "int8"}),
        ([0, 0, 1, 1], {"node_aware": True}),
    ],
    ids=str,
)
def test_many_buckets_in_flight(world, nodes, wire):
    """64 buckets at once for 50 steps neither hang nor mix up, and give what one bucket gives."""
    strategy = {"bucket_cap_mb": 0.0001, "reduction": "sum", **wire}
    seen = same_everywhere(world(len(nodes)).run(train_steps, strategy, nodes, 50, 32, 8))
    plain = same_everywhere(world(len(nodes)).run(train_steps, {"reduction": "sum"}, [0] * len(nodes), 1, 32, 8))
    assert 50 == len(seen.gradients)
    # Of many small buckets, few numbers of which share a scale.
    allowed = 3 * LARGEST_ERROR[wire.get("wire_dtype")]
    assert all(relative_error(one, plain.gradients[0].double()) <= allowed for one in seen.gradients)


class TwoBuckets(Toy):
    """Two parameters, each a bucket of its own under a small cap."""

    def __init__(self) -> None:
        super().__init__(start=[1.0] * 1024, dtype=torch.float32)
        self.v = nn.Parameter(torch.ones(1024))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return ((self.w + self.v).mean() * batch).mean()


def count_collectives(wire: Any, nodes: Sequence[int], micro_batches: int, window: int) -> Any:
    """Body: return how many payloads were scattered and gathered."""
    counts = {"scatter": 0, "gather": 0}
    originals = {name: getattr(transport.GlooTransport, name) for name in counts}

    def counting(name: str) -> Any:
        def collective(self: Any, *payloads: torch.Tensor) -> Any:
            counts[name] += 1
            return originals[name](self, *payloads)

        return collective

    for name in counts:
        setattr(transport.GlooTransport, name, counting(name))
    try:
        strategy = GradAvgStrategy(bucket_cap_mb=0.001, **wire)
        trainer = make_trainer(
            strategy, nodes=nodes, max_epochs=1, use_distributed_sampler=False, accumulate_grad_batches=window
        )
        trainer.fit(TwoBuckets(), loader([[1.0 + dist.get_rank()]] * micro_batches))
    finally:
        for name, original in originals.items():
            setattr(transport.GlooTransport, name, original)
    return counts


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize(
    ("nodes", "wire", "hops"),
    [
        *(([0, 0], {"wire_dtype": name}, 1) for name in WIRE_DTYPES),
        ([0, 0, 1, 1], {"reduction": "sum"}, 2),
    ],
    ids=str,
)
def test_once_per_window(world, nodes, wire, hops, window):
    """Cases 15 and 16: over 3 windows, each of 2 buckets is scattered and gathered once per window and hop."""
    long = world(len(nodes)).run(count_collectives, wire, nodes, 4 * window, window)
    short = world(len(nodes)).run(count_collectives, wire, nodes, window, window)
    for after, before in zip(long, short, strict=True):
        assert {"scatter": 6 * hops, "gather": 6 * hops} == {name: after[name] - before[name] for name in after}


def train_toy(wire: Any) -> Any:
    toy = {"kind": "s", "dtype": torch.float32}
    return train([[[1, 2, 3]], [[4]]], toy, {"reduction": "weighted_mean", **wire})


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_compression_composes_with_weights(world, wire_dtype):
    """Case 30: narrow types and weights give 7.5 within 1e-2 on CPU."""
    seen = same_everywhere(world(2).run(train_toy, {"wire_dtype": wire_dtype}))
    assert pytest.approx(7.5, abs=1e-2) == seen.gradients[0].item()


def test_mean_goes_over_the_wire(world):
    """The plain mean, stock DDP otherwise, is sent in the wire type as well."""
    batches = batches_of(2, 1)
    strategy = {"reduction": "mean", "wire_dtype": "bfloat16"}
    net = [[[seed, 1.0] for seed, _ in of_rank] for of_rank in batches]
    seen = same_everywhere(world(2).run(train_mean, net, strategy))
    rounded = seen.gradients[0].bfloat16().float()
    assert torch.equal(rounded, seen.gradients[0])
    assert relative_error(seen.gradients[0], exact_gradient(net, "mean", [0, 0])) <= LARGEST_ERROR["bfloat16"]


class Unweighted(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return loss_of(self.net, self.width, batch) + 0 * self.w.sum()


def train_mean(batches: Any, strategy: Any) -> Any:
    return train(batches, {}, strategy, None, Unweighted)


def train_double(wire: Any) -> Any:
    return train([[[1.0]], [[2.0]]], {}, wire)


def test_double_precision_is_refused(world):
    """Who trains in float64 does not want 8 bits: an error on all ranks that names the parameter."""
    raised = world(2).run_expecting_errors(train_double, {"wire_dtype": "bfloat16"})
    assert ["ValueError"] * 2 == [one.type_name for one in raised]
    assert all("wire_dtype='bfloat16' would round the gradient of 'w', which is torch.float64" in m for _, m in raised)


def test_double_precision_node_by_node(world):
    """Node by node, and without a narrow type, float64 is summed in float64."""
    seen = same_everywhere(world(4).run(train_double_on_nodes))
    assert pytest.approx(0.1 + 0.2 + 0.3 + 0.4, rel=1e-15) == seen.gradients[0].item()


def train_double_on_nodes() -> Any:
    strategy = {"reduction": "sum", "node_aware": True}
    return train([[[0.1]], [[0.2]], [[0.3]], [[0.4]]], {}, strategy, [0, 0, 1, 1])


class Sparse(Toy):
    """An embedding with sparse gradients next to a dense layer."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32, lr=0.0)
        self.table = nn.Embedding(7, 3, sparse=True)
        nn.init.constant_(self.table.weight, 1 / 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.table(batch.long()).mean() * self.w

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.table.weight.grad.is_sparse
        self.seen.gradients += [self.table.weight.grad.to_dense(), self.w.grad.clone()]


def train_sparse() -> Any:
    return train([[[1, 2]], [[2]]], {}, {"reduction": "sum", "wire_dtype": "bfloat16"}, module=Sparse)


def test_sparse_gradients_take_the_plain_way(world):
    """A sparse gradient is summed as without a wire type, exactly, next to dense ones that are rounded."""
    table, w = same_everywhere(world(2).run(train_sparse)).gradients
    expected = torch.zeros(7, 3)
    expected[1], expected[2] = 1 / 6, 1 / 6 + 1 / 3
    torch.testing.assert_close(table, expected, rtol=1e-6, atol=0)
    assert pytest.approx(2 / 3, rel=2.0**-7) == w.item()
    assert w.item() == w.bfloat16().item()


def train_scalar_by_power_sgd() -> Any:
    return train([[[1.0]], [[2.0]]], {}, {"power_sgd_rank": 1})


def test_power_sgd_without_scalars(world):
    """torch's PowerSGD cannot have a parameter without dimensions, which is said before it fails."""
    raised = world(2).run_expecting_errors(train_scalar_by_power_sgd)
    assert ["ValueError"] * 2 == [one.type_name for one in raised]
    assert all("power_sgd_rank=1" in message and "'w'" in message for _, message in raised)


def send_around(ranks: Sequence[int]) -> Any:
    """Body: scatter and gather among some ranks, three messages at once; return the first number of each row."""
    rank = dist.get_rank()
    if rank not in ranks:
        transport.gloo_transports([Hop("alone", (rank,), 0, narrow=False)], None)
        return None
    hop = Hop("some", tuple(ranks), ranks.index(rank), narrow=False)
    (some,) = transport.gloo_transports([hop], None)
    others = [other for other in ranks if other != rank]
    payloads = [torch.tensor([[10 * rank + other, number] for other in others], dtype=torch.uint8) for number in (0, 1, 2)]
    scattered = [torch.empty_like(payload) for payload in payloads]
    works = [some.scatter(payload, received) for payload, received in zip(payloads, scattered, strict=True)]
    gathered = torch.zeros(2 * len(ranks), 3, dtype=torch.uint8)
    gathered[2 * hop.index : 2 * hop.index + 2] = rank + 1
    works.append(some.gather(gathered))
    for work in reversed(works):
        assert work is not None
        work.wait()
    return [received.tolist() for received in scattered], gathered[:, 0].tolist()


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (3, 1), (2,)], ids=str)
def test_messages_between_ranks(world, ranks):
    """Each rank gets from each other what was meant for it, in the order in which it was sent, and all gather all."""
    for rank, answer in enumerate(world(4).run(send_around, ranks)):
        if rank not in ranks:
            assert answer is None
            continue
        scattered, gathered = answer
        senders = [other for other in ranks if other != rank]
        assert [[[10 * other + rank, number] for other in senders] for number in (0, 1, 2)] == scattered
        assert [other + 1 for other in ranks for _ in range(2)] == gathered


class PaperError(Exception):
    """What fails on one rank."""


def train_with_failure(call: str, thread: str, wire: Any, nodes: Sequence[int]) -> Any:
    """Body: a thread of rank 1 fails at its third call; then train again."""
    if call == "read" and "wire_dtype" not in wire:
        call = "decode"  # reads where the numbers are
    original = getattr(codecs.Plain, call)
    calls = 0

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += threading.current_thread().name == thread
        if calls == 3 and threading.current_thread().name == thread:
            raise PaperError("out of paper")
        return original(*arguments, **options)

    if dist.get_rank() == 1:
        setattr(codecs.Plain, call, failing)
    try:
        train_steps(wire, nodes, 4, 4, 8)
    except RuntimeError as error:
        message = str(error)
    else:
        message = ""
    finally:
        setattr(codecs.Plain, call, original)
    return message, train_steps(wire, nodes, 2, 4, 8)


@pytest.mark.parametrize(
    ("call", "thread"), [("write", "gradavg-wire-0"), ("write", "gradavg-wire-1"), ("read", "gradavg-wire-1")]
)
@pytest.mark.parametrize(
    ("nodes", "wire"),
    [([0, 0], {"wire_dtype": "bfloat16", "reduction": "sum"}), ([0, 0, 1, 1], {"reduction": "sum"})],
    ids=str,
)
def test_failure_of_one_rank(world, nodes, wire, call, thread):
    """What fails in the background of one rank is raised by that rank's backward, and by all others' with its number:
    nobody waits for ever, and the ranks can go on."""
    answers = world(len(nodes)).run(train_with_failure, call, thread, {"bucket_cap_mb": 0.0001, **wire}, nodes)
    for rank, (message, _) in enumerate(answers):
        assert ("PaperError('out of paper')" if rank == 1 else "failed on rank 1") in message
    same_everywhere([seen for _, seen in answers])


class Layers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": loss_of(self.net, self.width, batch) + 0 * self.w.sum(), "weight": 1 + dist.get_rank()}


def train_power_sgd(rank: int | None, steps: int) -> Any:
    options = {} if rank is None else {"power_sgd_rank": rank, "power_sgd_start_step": 3}
    batches = [[[10.0 * rank, 1.0]] * steps for rank in range(dist.get_world_size())]
    strategy = {"reduction": "weighted_mean", "bucket_cap_mb": 0.01, **options}
    return train(batches, {"layers": 3, "width": 64, "start": [1.0]}, strategy, None, Layers)


def test_power_sgd(world):
    """PowerSGD by its option is exact until it begins, and with error feedback its sum follows the exact one."""
    exact = same_everywhere(world(2).run(train_power_sgd, None, 1)).gradients[0].double()
    seen = same_everywhere(world(2).run(train_power_sgd, 8, 43))
    errors = [relative_error(one, exact) for one in seen.gradients]
    assert max(errors[:2]) <= 1e-6
    assert min(errors[4:]) > 1e-4
    assert relative_error(torch.stack(seen.gradients).double().mean(0), exact) <= 0.1 * max(errors)


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from test_ranks_wire import Bucket, scattered_sum

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
ours = scattered_sum("bfloat16", [0, 0])
gradient = torch.ones(10)
print(ours.sum(Bucket(gradient, [gradient]), lambda: 1.0).wait().sum().item())
"""


def test_process_ends(tmp_path):
    """A process that never closed its exchange ends at once, with no word of complaint."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for rank in range(2)
    ]
    answers = [(*rank.communicate(timeout=60), rank.returncode) for rank in ranks]
    assert [("20.0\n", "", 0)] * 2 == answers
