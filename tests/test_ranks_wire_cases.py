"""Every way that buckets can travel, in the cases that are hard for each: windows, hooks, and odd parameters."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning_gradavg.wire.transport import GlooTransport
from ranks import make_trainer
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from toys import Toy, loader, same_everywhere, train
from typing_extensions import Self

from lightning_gradavg import GradAvgStrategy

POWER_SGD: dict[str, Any] = {"power_sgd_rank": 3, "power_sgd_start_step": 2}

WIRES: list[Any] = [
    ([0, 0], {"wire_dtype": "bfloat16"}),
    ([0, 0], {"wire_dtype": "float16"}),
    ([0, 0], {"wire_dtype": "int8"}),
    ([0, 0, 1, 1], {"wire_dtype": "int8", "wire_scope": "nodes"}),
    ([0, 0, 1, 1], {"node_aware": True}),
    ([0, 0], POWER_SGD),
]

EVERY_WIRE = pytest.mark.parametrize(("nodes", "wire"), WIRES, ids=str)

# Twice that of random numbers, see test_ranks_wire; in int8 gradients of biases and weights share a step here, too.
LARGEST_ERROR = {"bfloat16": 5e-3, "float16": 7e-4, "int8": 3.6e-2, None: 1e-6}

SIGTERM = ("all_reduce", 4)
"""The agreement on termination, of four bytes, where no totals carry it: see docs/sigterm.md."""

pytestmark = pytest.mark.filterwarnings("ignore:rank . has a micro-batch of weight 0:UserWarning")


def hops_of(nodes: Sequence[int]) -> int:
    return 2 if len(set(nodes)) > 1 else 1


class Traffic:
    """What this rank hands to collectives, while it is entered: kind and bytes of each."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []  # appended by several threads
        self._originals = {
            (GlooTransport, "scatter"): GlooTransport.scatter,
            (GlooTransport, "gather"): GlooTransport.gather,
            (dist, "all_reduce"): dist.all_reduce,
        }

    def __enter__(self) -> Self:
        for (owner, name), original in self._originals.items():
            setattr(owner, name, self._counting(name, original, 0 if owner is dist else 1))
        return self

    def __exit__(self, *args: object) -> None:
        for (owner, name), original in self._originals.items():
            setattr(owner, name, original)

    def _counting(self, name: str, original: Any, position: int) -> Any:
        def collective(*args: Any, **options: Any) -> Any:
            self.sent.append((name, args[position].nbytes))
            return original(*args, **options)

        return collective


class TwoBuckets(Toy):
    """Two parameters of 4 KiB, each a bucket of its own under a small cap, and a buffer that DDP would broadcast."""

    def __init__(self, traffic: Traffic, weighs: bool) -> None:
        super().__init__(start=[0.0], dtype=torch.float32, lr=0.0)
        self.w = nn.Parameter(torch.ones(32, 32))
        self.v = nn.Parameter(torch.ones(32, 32))
        self.register_buffer("b", torch.zeros(1))
        self.traffic, self.weighs = traffic, weighs
        self.steps: list[tuple[bool, list[tuple[str, int]]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.syncs = self.trainer.strategy.model.require_backward_grad_sync
        loss = ((self.w + self.v) / 2 * batch).sum()
        return {"loss": loss, "weight": 1.0} if self.weighs else loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.traffic.sent.clear()  # of the setup

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.steps.append((self.syncs, self.traffic.sent[:]))
        self.traffic.sent.clear()


def train_counted(nodes: Sequence[int], wire: Any, reduction: str, window: int, windows: int) -> Any:
    """Body: return per micro-batch whether its forward was to be reduced and what it sent; and the gradients."""
    with Traffic() as traffic:
        model = TwoBuckets(traffic, reduction == "weighted_mean")
        trainer = make_trainer(
            GradAvgStrategy(bucket_cap_mb=0.001, reduction=reduction, **wire),
            nodes=nodes,
            max_epochs=1,
            use_distributed_sampler=False,
            accumulate_grad_batches=window,
        )
        trainer.fit(model, loader([[1.0 + dist.get_rank()]] * window * windows))
    return model.steps, model.seen


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
    hops, small = hops_of(nodes), [("all_reduce", 512)] if reduction == "weighted_mean" else []
    narrow = {"bfloat16": 2, "float16": 2, "int8": 4, None: 1}[wire.get("wire_dtype")]
    for steps, _ in answers:
        assert [False, False, False, True] * 4 == [syncs for syncs, _ in steps]
        for micro_batch, (_, sent) in enumerate(steps):
            if micro_batch % 4 < 3:
                assert sent in ([], [SIGTERM])
        # PowerSGD begins with the third.
        for _, sent in steps[11 if wire is POWER_SGD else 7 :: 4]:
            totals = [entry for entry in sent if entry == ("all_reduce", 512)]
            assert small == totals
            buckets = [entry for entry in sent if entry not in (*totals, SIGTERM)]
            if wire is POWER_SGD:
                # Of each bucket what is not compressed, here nothing, and the two factors of rank 3.
                assert [("all_reduce", 0)] * 2 + [("all_reduce", 4 * 3 * 32)] * 4 == sorted(buckets)
                continue
            assert sorted(["scatter", "gather"] * 2 * hops) == sorted(kind for kind, _ in buckets)
            # The last hop, of two ranks, is narrow: each sends the other half of 4 KiB, or of the half of a node's.
            entering = 2048 // hops
            smallest = sorted(size for kind, size in buckets if kind == "scatter")[:2]
            assert all(entering // narrow <= size <= entering // narrow + 64 for size in smallest)


def train_rank_one(nodes: Sequence[int], wire: Any, batches: Any) -> Any:
    toy = {"kind": "s", "dtype": torch.float32, "start": [1.0]}
    return train(batches, toy, {"reduction": "weighted_mean", **wire}, nodes)


@EVERY_WIRE
def test_every_wire_composes_with_weights(world, nodes, wire):
    """Case 30: on CPU every way of sending and weights give 7.5 within 1e-2: the mean of 1, 4, 9 and 16."""
    batches = [[[[1], [2], [3]]], [[[4]]]] if len(nodes) == 2 else [[[[number]]] for number in (1, 2, 3, 4)]
    seen = same_everywhere(world(len(nodes)).run(train_rank_one, nodes, wire, batches))
    assert pytest.approx(7.5, abs=1e-2) == seen.gradients[0].item()


@pytest.mark.parametrize(
    "hook", [{"ddp_comm_hook": default_hooks.allreduce_hook}, {"ddp_comm_wrapper": default_hooks.fp16_compress_wrapper}]
)
@pytest.mark.parametrize("wire", [wire for _, wire in WIRES], ids=str)
def test_hook_and_wire_are_refused(wire, hook):
    """Case 30: a communication hook beside an option of the wire is refused at once, and both are named."""
    (given,) = hook
    asked = next(name for name in ("wire_dtype", "node_aware", "power_sgd_rank") if name in wire)
    with pytest.raises(ValueError, match=given) as raised:
        GradAvgStrategy(**wire, **hook)
    assert asked in str(raised.value)


class Odd(Toy):
    """A small network with one oddity; a batch is a seed and a weight, and weights stay as they are.

    The parameters of every kind include matrices, which PowerSGD compresses.
    """

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


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("nodes", "wire", "name"),
    # Empty parameters are refused by PowerSGD, see below.
    [(*way, name) for way in WIRES for name in ODDITIES if (way[1], name) != (POWER_SGD, "empty")],
    ids=str,
)
def test_odd_parameters_and_options(world, exact, nodes, wire, name):
    """The first gradient is that of the plain way, up to the rounding of the wire; over 12 steps, with buckets arranged
    anew after the first, error feedback makes the mean of int8's better than one of them."""
    steps = 12 if wire.get("wire_dtype") == "int8" else 4
    seen = same_everywhere(world(len(nodes)).run(train_odd, name, nodes, wire, steps))
    expected = exact(name, nodes)
    assert steps == len(seen.gradients)
    allowed = LARGEST_ERROR[wire.get("wire_dtype")] + (2.0**-8 if name == "bf16" else 0)
    errors = [relative_error(gradient, expected) for gradient in seen.gradients]
    assert errors[0] <= allowed
    if wire is POWER_SGD:
        assert errors[1] <= allowed
        assert max(errors) < 1.5
    elif wire.get("wire_dtype") == "int8":
        # Paid back is up to as much as a step rounds.
        assert max(errors) <= 2 * allowed
        mean = torch.stack(seen.gradients).double().mean(0)
        assert relative_error(mean, expected) <= 0.25 * allowed + (2.0**-8 if name == "bf16" else 0)
    else:
        assert max(errors) <= allowed


def test_power_sgd_refuses_empty_parameters(world):
    """torch's PowerSGD cannot view a parameter without numbers as a matrix, which is said before it fails."""
    raised = world(2).run_expecting_errors(train_odd, "empty", [0, 0], POWER_SGD, 1)
    assert ["ValueError"] * 2 == [one.type_name for one in raised]
    assert all("power_sgd_rank=3" in message and "'before'" in message for _, message in raised)


class LowRank(Toy):
    """A matrix whose gradient has rank 1, and is zero before a step."""

    def __init__(self, zero_until: int) -> None:
        super().__init__(start=[0.0], dtype=torch.float32, lr=0.0)
        self.w = nn.Parameter(torch.ones(32, 32))
        self.zero_until = zero_until

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.w * batch).sum() * float(self.trainer.global_step >= self.zero_until)


def train_low_rank(rank: int, zero_until: int) -> Any:
    toy, strategy = {"zero_until": zero_until}, {"power_sgd_rank": rank, "power_sgd_start_step": 2}
    return train([[[1.0]] * 8, [[2.0]] * 8], toy, strategy, None, LowRank)


@pytest.mark.parametrize("zero_until", [0, 4])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_power_sgd_of_low_rank(world, rank, zero_until):
    """Matrices of higher rank than the gradient say it exactly; one of zeros stays zero, and is left again."""
    seen = same_everywhere(world(2).run(train_low_rank, rank, zero_until))
    for step, gradient in enumerate(seen.gradients):
        expected = torch.full((32, 32), 1.5 if step >= zero_until else 0.0)
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=0)


def wire_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("gradavg-wire"))


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
    threads = [wire_threads()]
    trainer = trainer_with()
    trainer.fit(once, loader(batches))
    threads.append(wire_threads())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(again, loader(batches))
    threads.append(wire_threads())
    return [model.seen for model in (failed, once, again)], threads


@pytest.mark.parametrize("where", ["before the backward", "after the backward"])
@EVERY_WIRE
def test_fits_in_a_row(world, nodes, wire, where):
    """After a fit that failed in the middle of a step, two more are alike, and no thread of the wire is left."""
    answers = world(len(nodes)).run(train_after_failure, nodes, wire, where)
    for _, threads in answers:
        assert [[], [], []] == threads
    failed, once, again = (same_everywhere([seen[attempt] for seen, _ in answers]) for attempt in range(3))
    assert [1, 3, 3] == [len(failed.gradients), len(once.gradients), len(again.gradients)]
    for mine, other in zip(once.gradients, again.gradients, strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(failed.gradients[0], once.gradients[0])


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


@pytest.mark.parametrize("wire", [{"wire_dtype": "int8"}, {"wire_dtype": "float16"}, POWER_SGD], ids=str)
def test_resume_at_another_world_size(world, wire, tmp_path: Path):
    """A run of 2 ranks resumed on 3 and on 4 ends where a run in float32 does, within a few roundings, although
    what was owed is no part of the checkpoint; all ranks hold the same bits."""
    saved = str(tmp_path / "saved.ckpt")
    _, expected = world(2).run(train_resumable, {}, 4, None, None)[0]
    world(2).run(train_resumable, wire, 2, None, saved)
    for world_size in (2, 3, 4):
        ranks = world(world_size).run(train_resumable, wire, 4, saved, None)
        assert [32] * world_size == [steps for steps, _ in ranks]
        assert all(torch.equal(ranks[0][1], weights) for _, weights in ranks)
        assert relative_error(ranks[0][1], expected.double()) <= 1e-2


class FailInBackward(Callback):
    """Fails in the middle of the second backward on all ranks, when buckets are under way and cannot arrive yet."""

    def __init__(self) -> None:
        self.hold = threading.Event()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        if trainer.global_step == 1:
            trainer.strategy._exchange._workers[-1].submit(self.hold.wait)
            # Of the first layer, whose gradients come last.
            pl_module.first.weight.register_hook(self.fail)

    def fail(self, gradient: torch.Tensor) -> None:
        raise FloatingPointError("out of luck")


def train_after_failed_backward(nodes: Sequence[int], wire: Any) -> Any:
    """Body: fail in the middle of a backward, let the buckets arrive, and return which threads do not end."""
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
    threads = {thread.name: thread for thread in threading.enumerate() if thread.name.startswith("gradavg-wire")}
    held = threads.pop(max(threads))
    failing.hold.set()
    held.join(timeout=10)
    if not held.is_alive():
        for thread in threads.values():
            thread.join()
    return held.name, wire_threads()


@pytest.mark.filterwarnings('ignore:a "weight" was given:UserWarning')
@pytest.mark.parametrize(("nodes", "wire"), [way for way in WIRES if way[1] is not POWER_SGD], ids=str)
def test_threads_end_after_a_failed_backward(world, nodes, wire):
    """Threads that cannot be waited for, because buckets are under way when training fails, end when those arrived."""
    assert [(f"gradavg-wire-{2 * hops_of(nodes)}", [])] * len(nodes) == world(len(nodes)).run(
        train_after_failed_backward, nodes, wire
    )
