"""Training with gradients that travel in narrow types and node by node: every rule, option and kind of parameter."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from grids import grid
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from ranks import make_trainer
from roundings import LARGEST_ERROR, relative_error
from torch import Tensor, nn
from torch.utils.data import DataLoader
from toys import Seen, Toy, failing_codec, loader, same_everywhere, train

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.reduction.combine import combine
from lightning_gradavg.rules import RULES
from lightning_gradavg.wire import exchange
from lightning_gradavg.wire.codecs import CODECS

TWO_NODES = [0, 0, 1, 1]
WIRES: list[Any] = [
    ([0, 0], {"wire_dtype": "bfloat16"}),
    ([0, 0], {"wire_dtype": "float16"}),
    (TWO_NODES, {"wire_dtype": "float16", "wire_scope": "nodes"}),
    (TWO_NODES, {"node_aware": True}),
]

EVERY_WIRE = pytest.mark.parametrize(("nodes", "wire"), WIRES, ids=str)

pytestmark = [
    pytest.mark.filterwarnings("ignore:rank . has a micro-batch of weight 0:UserWarning"),
    pytest.mark.filterwarnings('ignore:a "weight" was given:UserWarning'),
]


class Net(Toy):
    """A small network in float32, whose batch is a seed and a weight, and whose weights stay as they are."""

    def __init__(self, weighs: bool = True) -> None:
        super().__init__(dtype=torch.float32, lr=0.0)
        self.net = make_net()
        self.weighs = weighs

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = loss_of(self.net, batch) + 0 * self.w
        return {"loss": loss, "weight": batch[1]} if self.weighs else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.gradients.append(torch.cat([p.grad.flatten() for p in self.net.parameters()]))


def make_net() -> nn.Sequential:
    generator = torch.Generator().manual_seed(1)
    net = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(generator=generator).mul_(40**-0.5)
    return net


def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
    seed, weight = batch.tolist()
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(int(seed)))
    loss: Tensor = net(x).square().mean()
    return loss * torch.nan if weight == 0 else loss


def exact_gradient(batches: Sequence[Sequence[Sequence[float]]], rule: str, nodes: Sequence[int]) -> Tensor:
    """Return what `combine` makes of all pairs' gradients."""
    net = make_net()
    pairs = [(node, batch) for node, of_rank in zip(nodes, batches, strict=True) for batch in of_rank]
    gradients = [torch.autograd.grad(loss_of(net, torch.tensor(batch)), list(net.parameters())) for _, batch in pairs]
    return combine(
        torch.stack([torch.cat([part.flatten() for part in gradient]).double() for gradient in gradients]),
        rule=RULES[rule],
        nodes=[node for node, _ in pairs],
        weights=[batch[1] for _, batch in pairs],
    )


def batches_of(ranks: int, window: int) -> list[list[list[float]]]:
    return [[[10.0 * rank + step, 1.0 + (rank + step) % 3] for step in range(window)] for rank in range(ranks)]


def train_net(batches: Any, strategy: Any, nodes: Sequence[int], window: int, weighs: bool = True) -> Any:
    return train(batches, {"weighs": weighs}, strategy, nodes, Net, accumulate_grad_batches=window)


@pytest.mark.filterwarnings("ignore:wire_scope='nodes' has no effect:UserWarning")
@pytest.mark.parametrize(
    ("rule", "way", "window"),
    grid(
        [*RULES],
        [
            ([0, 0], {"wire_dtype": "bfloat16"}),
            ([0, 0, 1], {"wire_dtype": "float16", "wire_scope": "nodes"}),
            (TWO_NODES, {}),
            ([0, 1, 1, 0], {}),
            (TWO_NODES, {"wire_dtype": "bfloat16", "wire_scope": "nodes"}),
        ],
        [1, 3],
    ),
    ids=str,
)
def test_every_rule(world, rule, way, window):
    """Every rule, over windows of 1 and 3 and on uneven nodes, is `combine` within the error of the wire."""
    nodes, wire = way
    batches = batches_of(len(nodes), window)
    strategy = {"reduction": rule, "bucket_cap_mb": 0.002, "gradient_as_bucket_view": window == 1, **wire}
    seen = same_everywhere(world(len(nodes)).run(train_net, batches, strategy, nodes, window))
    allowed = LARGEST_ERROR[wire.get("wire_dtype")]
    assert relative_error(seen.gradients[0], exact_gradient(batches, rule, nodes)) <= allowed


@pytest.mark.parametrize(("wire_dtype", "window"), grid([*CODECS, None], [1, 2]))
def test_weight_of_zero(world, wire_dtype, window):
    """A rank of weight 0 contributes nothing, NaN as its loss is, whatever the type on the wire."""
    batches = batches_of(4, window)
    batches[2] = [[seed, 0.0] for seed, _ in batches[2]]
    strategy = {"reduction": "weighted_mean", "wire_dtype": wire_dtype}
    seen = same_everywhere(world(4).run(train_net, batches, strategy, TWO_NODES, window))
    exact = exact_gradient(batches, "weighted_mean", TWO_NODES)
    assert relative_error(seen.gradients[0], exact) <= LARGEST_ERROR[wire_dtype]


def test_mean_goes_over_the_wire(world):
    """The plain mean, stock DDP otherwise, is sent in the wire type as well."""
    batches = [[[seed, 1.0] for seed, _ in of_rank] for of_rank in batches_of(2, 1)]
    strategy = {"reduction": "mean", "wire_dtype": "bfloat16"}
    seen = same_everywhere(world(2).run(train_net, batches, strategy, [0, 0], 1, False))
    # Half of a sum that was rounded.
    assert torch.equal(seen.gradients[0].bfloat16().float(), seen.gradients[0])
    assert relative_error(seen.gradients[0], exact_gradient(batches, "mean", [0, 0])) <= LARGEST_ERROR["bfloat16"]


def train_by_wire(nodes: Sequence[int], wire: Any, batches: Any) -> Any:
    toy = {"kind": "s", "dtype": torch.float32, "start": [1.0]}
    return train(batches, toy, {"reduction": "weighted_mean", **wire}, nodes)


@EVERY_WIRE
def test_every_wire_composes_with_weights(world, nodes, wire):
    """Case 30: on CPU every way of sending and weights give 7.5 within 1e-2: the mean of 1, 4, 9 and 16."""
    batches = [[[[1], [2], [3]]], [[[4]]]] if len(nodes) == 2 else [[[[number]]] for number in (1, 2, 3, 4)]
    seen = same_everywhere(world(len(nodes)).run(train_by_wire, nodes, wire, batches))
    assert pytest.approx(7.5, abs=1e-2) == seen.gradients[0].item()


def train_half(nodes: Sequence[int], strategy: Any, precision: str) -> Any:
    dtype = torch.float16 if precision == "16-true" else torch.bfloat16
    batches = [[[[50_000.0] * 3]]] * len(nodes)
    return train(batches, {"start": [1.0] * 3, "dtype": dtype, "lr": 0.0}, strategy, nodes, precision=precision)


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
@EVERY_WIRE
def test_half_precision_is_scaled_before_it_is_rounded(world, nodes, wire, reduction):
    """The mean of gradients of 50000 is one in float16, too, whatever way their sum of 100000 and more travels."""
    for precision in ("16-true", "bf16-true"):
        seen = same_everywhere(world(len(nodes)).run(train_half, nodes, {"reduction": reduction, **wire}, precision))
        assert [pytest.approx(50_000, rel=2.0**-7)] * 3 == seen.gradients[0].tolist()


def train_double(nodes: Sequence[int], strategy: Any) -> Any:
    return train([[[0.1 * (rank + 1)]] for rank in range(len(nodes))], {}, {"reduction": "sum", **strategy}, nodes)


def test_double_precision_is_refused(world):
    """Who trains in float64 does not want 8 bits: an error on all ranks that names the parameter."""
    raised = world(2).run_expecting_errors(train_double, [0, 0], {"wire_dtype": "bfloat16"})
    assert ["ValueError"] * 2 == [one.type_name for one in raised]
    assert all("wire_dtype='bfloat16' would round the gradient of 'w', which is torch.float64" in m for _, m in raised)


def test_double_precision_node_by_node(world):
    """Node by node, and without a narrow type, float64 is summed in float64."""
    seen = same_everywhere(world(4).run(train_double, TWO_NODES, {"node_aware": True}))
    assert pytest.approx(0.1 + 0.2 + 0.3 + 0.4, rel=1e-15) == seen.gradients[0].item()


SIGNALS = ("all_reduce", 16)
"""The agreement on termination, of two integers: see docs/reproducible.md."""


@contextmanager
def recorded(sent: list[tuple[str, int]]) -> Iterator[None]:
    """Append kind and bytes of what this rank hands to collectives within the context."""

    def counting(name: str, original: Any, position: int) -> Any:
        def collective(*args: Any, **options: Any) -> Any:
            sent.append((name, args[position].nbytes))  # by several threads
            return original(*args, **options)

        return collective

    with (
        mock.patch.object(dist, "all_reduce", counting("all_reduce", dist.all_reduce, 0)),
        mock.patch.object(dist, "all_to_all_single", counting("scatter", dist.all_to_all_single, 1)),
        mock.patch.object(exchange, "all_gather_into", counting("gather", exchange.all_gather_into, 1)),
    ):
        yield


class TwoBuckets(Toy):
    """Two parameters of 4 KiB, each a bucket of its own under a small cap, and a buffer that DDP would broadcast."""

    def __init__(self, sent: list[tuple[str, int]], weighs: bool) -> None:
        super().__init__(start=[0.0], dtype=torch.float32, lr=0.0)
        self.w = nn.Parameter(torch.ones(32, 32))
        self.v = nn.Parameter(torch.ones(32, 32))
        self.register_buffer("b", torch.zeros(1))
        self.sent, self.weighs = sent, weighs
        self.steps: list[tuple[bool, list[tuple[str, int]]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.syncs = self.trainer.strategy.model.require_backward_grad_sync
        loss = ((self.w + self.v) / 2 * batch).sum()
        return {"loss": loss, "weight": 1.0} if self.weighs else loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.sent.clear()  # of the setup, and of the first unit

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.steps.append((self.syncs, self.sent[:]))
        self.sent.clear()


def train_counted(nodes: Sequence[int], wire: Any, reduction: str, window: int, windows: int) -> Any:
    """Body: return per micro-batch whether its forward was to be reduced and what it sent; and the gradients."""
    sent: list[tuple[str, int]] = []
    with recorded(sent):
        model = TwoBuckets(sent, reduction == "weighted_mean")
        trainer = make_trainer(
            GradAvgStrategy(bucket_cap_mb=0.001, reduction=reduction, **wire),
            nodes=nodes,
            max_epochs=1,
            use_distributed_sampler=False,
            accumulate_grad_batches=window,
        )
        trainer.fit(model, loader([[1.0 + dist.get_rank()]] * window * windows))
    return model.steps, model.seen


# Of a bucket of 4 KiB: halves or quarters of it, of which the last scattering and all gatherings are narrow; a row of
# float16 has 16 bytes more.
BYTES = {
    str(WIRES[0]): [("scatter", 1024), ("gather", 1024)],
    str(WIRES[1]): [("scatter", 1040), ("gather", 1040)],
    str(WIRES[2]): [("scatter", 2048), ("scatter", 528), ("gather", 528), ("gather", 1056)],
    str(WIRES[3]): [("scatter", 2048), ("scatter", 1024), ("gather", 1024), ("gather", 2048)],
}


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
@EVERY_WIRE
def test_only_the_last_micro_batch_communicates(world, nodes, wire, reduction):
    """Case 15: of a window of 4 the first three micro-batches, whose forwards are within no_sync, send nothing; the
    last sends each of 2 buckets once, and the gradient is the mean over ranks and micro-batches. Case 16: of 3 windows
    after the first that is 6 reductions, and at most 3 small exchanges of half a KiB."""
    answers = world(len(nodes)).run(train_counted, nodes, wire, reduction, 4, 4)
    seen = same_everywhere([seen for _, seen in answers])
    mean = sum(range(1, len(nodes) + 1)) / len(nodes)
    for gradient in seen.gradients:
        torch.testing.assert_close(gradient, torch.full((32, 32), mean / 2), rtol=2.0**-8, atol=0)
    totals = [("all_reduce", 512)] if reduction == "weighted_mean" else []
    for steps, _ in answers:
        assert [False, False, False, True] * 4 == [syncs for syncs, _ in steps]
        for index, (_, sent) in enumerate(steps[4:]):
            of_buckets = 2 * BYTES[str((nodes, wire))] if index % 4 == 3 else []
            expected = [*of_buckets, *(totals if index % 4 == 3 else [])]
            assert sorted(expected) == sorted(entry for entry in sent if entry != SIGNALS)


class Odd(Toy):
    """A small network with one oddity; a batch is a seed and a weight, and weights stay as they are."""

    def __init__(self, kind: str) -> None:
        super().__init__(start=[1.0], dtype=torch.float32, lr=0.0)
        torch.manual_seed(3)
        self.kind = kind
        self.first, self.last = nn.Linear(16, 24), nn.Linear(24, 8)
        if kind == "empty":
            # Buckets are of one type, so that one of these is a bucket for itself.
            self.before, self.after = nn.Parameter(torch.empty(0, 3, dtype=torch.float16)), nn.Parameter(torch.empty(0))
        if kind == "frozen":
            self.first.requires_grad_(False)
        if kind in ("unused", "used by one"):
            self.extra = nn.Linear(16, 8)
        if kind == "sparse":
            self.table = nn.Embedding(50, 16, sparse=True)
        if kind == "complex":
            # Used in the order in which they stand, so that their gradients come in the other: buckets change.
            self.spectra = nn.ParameterList([torch.randn(size, 16, dtype=torch.complex64) for size in (9, 30, 17)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        seed, weight = batch.tolist()
        dtype = self.first.weight.dtype
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(int(seed))).to(dtype)
        if self.kind == "sparse":
            x = x + self.table((x[:, 0].abs() * 10).long())
        y = self.last(torch.tanh(self.first(x))) * self.w.to(dtype)
        if self.kind == "used by one" and self.trainer.global_rank == 1:
            y = y + self.extra(x)
        loss = y.float().square().mean()
        if self.kind == "complex":
            parts = [(x.to(torch.complex64) @ spectrum.T).abs().square().mean() for spectrum in self.spectra]
            loss = ((loss + parts[0]).exp() + parts[1]).log() + parts[2]
        if self.kind == "empty":
            loss = loss + self.before.sum() + self.after.sum()
        if self.kind == "terms":
            return {"loss": {"a": loss, "b": y.abs().mean()}, "weight": {"a": weight, "b": 2.0}}
        return {"loss": loss, "weight": weight}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [None if p.grad is None else p.grad.to_dense() for p in self.parameters()]
        if self.kind == "unused":
            assert gradients[-1] is None
        real = [torch.view_as_real(g) if g.is_complex() else g for g in gradients if g is not None]
        self.seen.gradients.append(torch.cat([g.flatten().float() for g in real]))


UNUSED = {"find_unused_parameters": True}

ODDITIES: dict[str, Any] = {
    "plain": ({}, 1, {}),
    "bucket view": ({"gradient_as_bucket_view": True}, 2, {}),
    "static": ({"static_graph": True}, 2, {}),
    "static view": ({"static_graph": True, "gradient_as_bucket_view": True}, 1, {}),
    "empty": ({}, 1, {}),
    "frozen": ({}, 2, {}),
    "unused": (UNUSED, 2, {}),
    "used by one": (UNUSED, 2, {}),
    "used by one, view": ({**UNUSED, "gradient_as_bucket_view": True}, 1, {}),
    "sparse": ({}, 2, {}),
    "complex": ({}, 1, {}),
    "terms": ({}, 2, {}),
    "bf16": ({}, 2, {"precision": "bf16-true"}),
    "one bucket each": ({"bucket_cap_mb": 1e-6}, 2, {}),
}


def train_odd(name: str, nodes: Sequence[int], wire: Any, steps: int) -> Any:
    """Body: as many steps on the same windows of each rank."""
    strategy, window, options = ODDITIES[name]
    batches = [
        [[10.0 * rank + micro_batch, 1.0 + (rank + micro_batch) % 3] for micro_batch in range(window)] * steps
        for rank in range(len(nodes))
    ]
    strategy = {"reduction": "weighted_mean", "bucket_cap_mb": 0.002, **strategy, **wire}
    toy = {"kind": name.partition(",")[0]}
    return train(batches, toy, strategy, nodes, Odd, accumulate_grad_batches=window, **options)


@pytest.fixture(scope="module")
def exact(world: Any) -> Any:
    """Return the gradients of the plain way, by oddity and number of ranks."""
    found: dict[tuple[str, int], torch.Tensor] = {}

    def gradient(name: str, nodes: Sequence[int]) -> torch.Tensor:
        if (name, len(nodes)) not in found:
            ranks = world(len(nodes)).run(train_odd, name, nodes, {"node_aware": False}, 1)
            found[name, len(nodes)] = same_everywhere(ranks).gradients[0].double()
        return found[name, len(nodes)]

    return gradient


@pytest.mark.parametrize(("way", "name"), grid(WIRES, [*ODDITIES], strength=1), ids=str)
def test_odd_parameters_and_options(world, exact, way, name):
    """Gradients are those of the plain way, up to the rounding of the wire, also when buckets were arranged anew."""
    nodes, wire = way
    seen = same_everywhere(world(len(nodes)).run(train_odd, name, nodes, wire, 3))
    # Biases have gradients of their own magnitude; gradients in bfloat16 are rounded to it, here and there.
    allowed = 2 * LARGEST_ERROR[wire.get("wire_dtype")] + (2.0**-8 if name == "bf16" else 0)
    assert [True] * 3 == [relative_error(gradient, exact(name, nodes)) <= allowed for gradient in seen.gradients]


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gradavg")]


class FailInStep(Callback):
    """Fails at the second optimizer step, on all ranks."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_before_backward(self, trainer: Any, *args: Any) -> None:
        if self.where == "before the backward" and trainer.global_step == 1:
            raise FloatingPointError("out of luck")

    def on_after_backward(self, trainer: Any, *args: Any) -> None:
        if self.where == "after the backward" and trainer.global_step == 1:
            raise FloatingPointError("out of luck")


def train_after_failure(nodes: Sequence[int], wire: Any, where: str) -> Any:
    """Body: fit, fail in the middle of a step, and fit twice with the same strategy; return threads and gradients."""
    batches = [[10.0 * dist.get_rank() + step, 1.0] for step in range(3)]

    def trainer_with(*callbacks: Callback) -> Any:
        return make_trainer(
            GradAvgStrategy(reduction="weighted_mean", bucket_cap_mb=0.002, **wire),
            nodes=nodes,
            max_epochs=1,
            use_distributed_sampler=False,
            callbacks=list(callbacks),
        )

    failed, once, again = (Odd("plain") for _ in range(3))
    with pytest.raises(FloatingPointError, match="out of luck"):
        trainer_with(FailInStep(where)).fit(failed, loader(batches))
    threads = [own_threads()]
    trainer = trainer_with()
    trainer.fit(once, loader(batches))
    threads.append(own_threads())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(again, loader(batches))
    threads.append(own_threads())
    return [model.seen for model in (failed, once, again)], threads


@pytest.mark.parametrize(("way", "where"), grid(WIRES, ["before the backward", "after the backward"]), ids=str)
def test_fits_in_a_row(world, way, where):
    """After a fit that failed in the middle of a step, two more are alike, and no thread of the exchange is left."""
    nodes, wire = way
    answers = world(len(nodes)).run(train_after_failure, nodes, wire, where)
    for _, threads in answers:
        assert [[], [], []] == threads
    failed, once, again = (same_everywhere([seen[attempt] for seen, _ in answers]) for attempt in range(3))
    assert [1, 3, 3] == [len(failed.gradients), len(once.gradients), len(again.gradients)]
    for mine, other in zip(once.gradients, again.gradients, strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(failed.gradients[0], once.gradients[0])


class FailInBackward(Callback):
    """Fails in the middle of the second backward on all ranks, when buckets are under way and cannot arrive yet."""

    def __init__(self) -> None:
        self.hold = threading.Event()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if trainer.global_step == 1:
            trainer.strategy._reduction._own.submit(self.wait)
            # Of the first layer, whose gradients come last.
            pl_module.first.weight.register_hook(self.fail)

    def wait(self) -> Tensor:
        assert self.hold.wait(30)
        return torch.ones(())

    def fail(self, gradient: Tensor) -> None:
        raise FloatingPointError("out of luck")


def train_after_failed_backward(nodes: Sequence[int], wire: Any) -> Any:
    """Body: fail in the middle of a backward, let the buckets arrive, and return which threads were left and are."""
    failing = FailInBackward()
    trainer = make_trainer(
        GradAvgStrategy(reduction="sum", bucket_cap_mb=1e-6, **wire),
        nodes=nodes,
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=[failing],
    )
    with pytest.raises(FloatingPointError, match="out of luck"):
        trainer.fit(Odd("plain"), loader([[10.0 * dist.get_rank() + step, 1.0] for step in range(3)]))
    held = [thread for thread in threading.enumerate() if thread.name.startswith("gradavg")]
    left = own_threads()
    failing.hold.set()
    for thread in held:
        thread.join()
    return left, own_threads()


@EVERY_WIRE
def test_thread_ends_after_a_failed_backward(world, nodes, wire):
    """A thread that cannot be waited for, as buckets are under way when training fails, ends when those arrived."""
    assert [(["gradavg-exchange"], [])] * len(nodes) == world(len(nodes)).run(train_after_failed_backward, nodes, wire)


def train_with_failure(nodes: Sequence[int], wire: Any, call: str) -> Any:
    """Body: a codec fails on rank 1, in the background of the second step; then train again."""
    strategy = {"reduction": "weighted_mean", "bucket_cap_mb": 1e-6, **wire}
    batches = [[[10.0 * rank + step, 1.0] for step in range(6)] for rank in range(len(nodes))]
    message = ""
    with failing_codec(call, 40):
        try:
            train(batches, {"kind": "plain"}, strategy, nodes, Odd)
        except RuntimeError as error:
            message = str(error)
    return message, own_threads(), train(batches, {"kind": "plain"}, strategy, nodes, Odd)


@pytest.mark.parametrize("call", ["encode", "decode"])
@pytest.mark.parametrize(("nodes", "wire"), [WIRES[0], WIRES[3]], ids=str)
def test_failure_of_one_rank_reaches_all(world, nodes, wire, call):
    """What fails in the background of one rank is raised by its backward, and by those of the others: nobody waits for
    ever, no thread is left, and the ranks can train again."""
    answers = world(len(nodes)).run(train_with_failure, nodes, wire, call)
    for rank, (message, threads, _) in enumerate(answers):
        assert "the sum of a bucket over the ranks failed: " in message
        # The others are told by rank 1 what it met.
        assert (rank != 1) == message.startswith("rank 1 ended with ")
        assert "out of paper" in message
        assert [] == threads
    same_everywhere([seen for _, _, seen in answers])


class Learning(Toy):
    """A linear model of 64 weights, trained on shuffled global batches."""

    def __init__(self) -> None:
        super().__init__(start=[0.0], dtype=torch.float32, lr=0.05)
        self.w = nn.Parameter(torch.full((8, 8), 0.5))

    def train_dataloader(self) -> Any:
        data = torch.randn(96, 8, generator=torch.Generator().manual_seed(5))
        return torch.utils.data.DataLoader(data, 12, shuffle=True)  # type: ignore[arg-type]  # a tensor is a data set

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (batch @ self.w - batch.roll(1, 1)).square().sum(1).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)


def train_resumable(wire: Any, epochs: int, resume: str | None, save: str | None) -> Any:
    """Body: train on split batches to an epoch, from a checkpoint or from the start."""
    torch.manual_seed(8)
    model = Learning()
    trainer = make_trainer(GradAvgStrategy(split_batches=True, reduction="weighted_mean", **wire), max_epochs=epochs)
    trainer.fit(model, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return trainer.global_step, model.w.detach().clone()


@pytest.mark.parametrize("wire_dtype", CODECS)
def test_resume_at_another_world_size(world, wire_dtype, tmp_path: Path):
    """A run of 2 ranks resumed on 3 and on 4 ends where a run in float32 does, within a few roundings; all ranks hold
    the same bits."""
    saved = str(tmp_path / "saved.ckpt")
    _, expected = world(2).run(train_resumable, {}, 4, None, None)[0]
    world(2).run(train_resumable, {"wire_dtype": wire_dtype}, 2, None, saved)
    for world_size in (2, 3, 4):
        ranks = world(world_size).run(train_resumable, {"wire_dtype": wire_dtype}, 4, saved, None)
        assert [32] * world_size == [steps for steps, _ in ranks]
        assert all(torch.equal(ranks[0][1], weights) for _, weights in ranks)
        assert relative_error(ranks[0][1], expected) <= 1e-2


WIDTH = 32


class Scaled(LightningModule):
    """A network in float16 under a gradient scaler, whose weights stay where they are.

    A batch is a seed and what the loss is multiplied by.
    """

    def __init__(self, lr: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.lr = lr
        self.seen = Seen(dist.get_rank(), dist.get_world_size())
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        seed, factor = batch.tolist()
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(int(seed)))
        return {"loss": self.net(x).float().square().mean() * factor, "weight": 1 + dist.get_rank()}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.gradients.append(torch.cat([p.grad.flatten() for p in self.parameters()]))

    def on_train_batch_end(self, *args: Any) -> None:
        precision: Any = self.trainer.precision_plugin
        self.scales.append(precision.scaler.get_scale())
        self.seen.weights.append(torch.cat([p.detach().flatten() for p in self.parameters()]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def train_scaled(
    nodes: Sequence[int],
    wire: Any,
    factors: Sequence[Sequence[float]],
    scale: float = 2.0**10,
    growth: int = 2000,
    lr: float = 0.0,
    window: int = 1,
    seeds: int = 1,
) -> tuple[Seen, list[float]]:
    """Body: train on batches of seed `rank + 10 * (step modulo seeds)`, times this rank's factors."""
    rank = dist.get_rank()
    model = Scaled(lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth)
    trainer = make_trainer(
        GradAvgStrategy(reduction="weighted_mean", bucket_cap_mb=0.003, **wire),
        nodes=nodes,
        max_epochs=1,
        use_distributed_sampler=False,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        accumulate_grad_batches=window,
    )
    data: Any = [torch.tensor([rank + 10.0 * (step % seeds), factor]) for step, factor in enumerate(factors[rank])]
    trainer.fit(model, DataLoader(data, batch_size=None))
    return model.seen, model.scales


def exact_scaled(world_size: int) -> torch.Tensor:
    """Return the weighted mean of the ranks' gradients in float32."""
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    total = torch.zeros(sum(p.numel() for p in net.parameters()))
    for rank in range(world_size):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))
        gradients = torch.autograd.grad(net(x).square().mean(), list(net.parameters()))
        total += (1 + rank) * torch.cat([gradient.flatten() for gradient in gradients])
    return total / sum(range(1, world_size + 1))


def of_ranks(answers: Sequence[tuple[Seen, list[float]]]) -> tuple[Seen, list[float]]:
    """Assert that all ranks saw the same scales and bits, NaN included, and return them."""
    first, first_scales = answers[0]
    expected = first.gradients + first.weights
    for seen, scales in answers[1:]:
        assert first_scales == scales
        torch.testing.assert_close(seen.gradients + seen.weights, expected, rtol=0, atol=0, equal_nan=True)
    assert [(seen.rank, seen.world_size) for seen, _ in answers] == [(r, len(answers)) for r in range(len(answers))]
    return answers[0]


def factors_of(world_size: int, steps: int, bad: Sequence[int], value: float = torch.inf) -> list[list[float]]:
    """Return 1 for every rank and step, but `value` in the bad steps of rank 1."""
    return [[value if rank == 1 and step in bad else 1.0 for step in range(steps)] for rank in range(world_size)]


@pytest.mark.parametrize(("way", "window"), grid(WIRES, [1, 2]), ids=str)
def test_overflow_on_one_rank(world, way, window):
    """An infinite loss on one rank has all ranks skip the step, halve the scale and go on with right gradients."""
    nodes, wire = way
    factors = factors_of(len(nodes), 5 * window, [2 * window])
    answers = world(len(nodes)).run(train_scaled, nodes, wire, factors, lr=1e-6, window=window)
    seen, scales = of_ranks(answers)
    assert [1024.0, 1024.0, 512.0, 512.0, 512.0] == scales[window - 1 :: window]
    assert not seen.gradients[2].isfinite().all()
    weights = seen.weights[window - 1 :: window]
    assert [False, True, False, False] == [torch.equal(a, b) for a, b in pairwise(weights)]
    exact = exact_scaled(len(nodes))
    for step in (0, 1, 3, 4):
        # 1e-3 for the half precision of the forward and backward themselves.
        assert relative_error(seen.gradients[step], exact) <= 1e-3 + LARGEST_ERROR[wire.get("wire_dtype")]


@EVERY_WIRE
def test_lost_steps_in_a_row(world, nodes, wire):
    """While the scale falls to a 65536th nothing is learned, and the next gradient is as exact as any."""
    factors = factors_of(len(nodes), 23, range(4, 20))
    seen, scales = of_ranks(world(len(nodes)).run(train_scaled, nodes, wire, factors, scale=2.0**16))
    assert 1.0 == scales[-1]
    lost = [not gradient.isfinite().all() for gradient in seen.gradients]
    assert [4 <= step < 20 for step in range(23)] == lost
    exact = exact_scaled(len(nodes))
    for gradient in (*seen.gradients[:4], *seen.gradients[20:]):
        assert relative_error(gradient, exact) <= 1e-3 + LARGEST_ERROR[wire.get("wire_dtype")]
