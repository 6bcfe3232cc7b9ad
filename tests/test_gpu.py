"""NCCL on one GPU: every rule and wire type, CUDA weights, precisions, presets, late errors, streams, and no waits.

Alone, `PYTHONPATH=. python tests/test_gpu.py` runs everything on 1, 2 and 4 ranks and prints a table last; `--backend
gloo` runs what a CPU can. NCCL refuses two ranks on one GPU unless each process has a host id of its own; the traffic
then takes the network transport, as between nodes.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import os
import random
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, NamedTuple

import data_parallel
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_gradavg.wire.options import WIRE_DTYPES, WireOptions
from ranks import isolated, make_trainer
from test_ranks_wire import LARGEST_ERROR, Bucket, relative_error
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader

from lightning_gradavg import GradAvgMonitor, GradAvgStrategy, Place, Share, average_gradients, gather
from lightning_gradavg.place import places_on_nodes
from lightning_gradavg.reduction.combine import combine
from lightning_gradavg.reduction.reducer import Reducer
from lightning_gradavg.rules import RULES, resolve_rule
from lightning_gradavg.termination import Termination
from lightning_gradavg.wire.codecs import BLOCK, CODECS
from lightning_gradavg.wire.exchange import ScatteredSum
from lightning_gradavg.wire.route import route_of

WORLDS = (1, 2, 4)
SIZE = 5
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
WORLD_TIMEOUT = 420.0
# How long a rank may go on after another has failed: it fails alike, or waits for the other in a collective.
AFTER_FAILURE = 10.0
NODES = {1: [0], 2: [0, 1], 4: [0, 0, 0, 1]}
NEEDS_CUDA = "needs CUDA"


class Outcome(NamedTuple):
    """What one rank says of one check."""

    status: str
    text: str = ""
    seconds: float = 0.0


class NotHereError(Exception):
    """The check says nothing here; the message says why."""


def on_cuda() -> bool:
    return dist.get_backend() == "nccl"


def device() -> torch.device:
    return torch.device("cuda", 0) if on_cuda() else torch.device("cpu")


def require_cuda() -> None:
    if not on_cuda():
        raise NotHereError(NEEDS_CUDA)


def require_ranks() -> None:
    if dist.get_world_size() == 1:
        raise NotHereError("needs two ranks")


def root_weighted(place: Place, weight: Any) -> Share:
    """A user's rule whose multiplier also depends on the place."""
    return Share(weight**0.5 / place.ranks_on_node, weight**0.5)


class OnNodes(GradAvgStrategy):
    """Every process is a node of its own to Lightning, or it would ask for a GPU each; the rule sees other nodes."""

    @property
    def node_rank(self) -> int:
        return NODES[dist.get_world_size()][dist.get_rank()]


class Recorder(LightningModule):
    """Records the gradients that reach the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[Tensor] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        parts = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.gradients.append(torch.cat([part.detach().flatten().clone() for part in parts]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trainer_of_ranks(strategy: Any, **options: Any) -> Any:
    """Return a trainer whose ranks are a node each, with the one device of all."""
    accelerator = {"accelerator": "gpu", "devices": 1} if on_cuda() else {}
    nodes = list(range(dist.get_world_size()))
    return make_trainer(strategy, nodes=nodes, max_epochs=1, **{**accelerator, **options})


def same_on_all_ranks(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors on the CPU, after comparing their bits with those of all ranks."""
    mine = [tensor.detach().cpu() for tensor in tensors]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for others in everyone:
        assert len(mine) == len(others) > 0
        for ours, theirs in zip(mine, others, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, msg="the ranks have other numbers")
    return mine


def fit(model: Recorder, batches: Sequence[Any], strategy: Any, window: int = 1, **options: Any) -> list[Tensor]:
    """Train on this rank's batches and return the gradients, after comparing them with those of all ranks."""
    trainer = trainer_of_ranks(strategy, use_distributed_sampler=False, accumulate_grad_batches=window, **options)
    trainer.fit(model, DataLoader(list(batches), batch_size=None))  # type: ignore[arg-type]  # a list is a data set
    return same_on_all_ranks(model.gradients)


class Dictated(Recorder):
    """A batch is `[gradient .., weight]`; where the weight is 0 the loss is NaN. The weight stays on its device."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(SIZE, dtype=torch.float64))
        self.weighted = weighted

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = (self.w * batch[:-1]).sum()
        if not self.weighted:
            return loss
        poison = torch.where(batch[-1] == 0, torch.nan, 1.0)
        return {"loss": loss * poison, "weight": batch[-1]}


def dictate(world_size: int, micro_batches: int, seed: int) -> list[list[list[float]]]:
    draw = random.Random(seed)
    weights = (lambda: 0.0, lambda: draw.uniform(0.1, 9), lambda: float(draw.randint(1, 9)))
    return [
        [[*(draw.uniform(-1, 1) for _ in range(SIZE)), draw.choice(weights)()] for _ in range(micro_batches)]
        for _ in range(world_size)
    ]


def check_rule(reduction: Any) -> None:
    """Every gradient is `combine` of all pairs, for windows of 1, 2 and 3, and a short last one."""
    rule, world_size = resolve_rule(reduction), dist.get_world_size()
    for window in (1, 2, 3):
        steps = 2 * window + window // 2
        rows = dictate(world_size, steps, seed=window)
        mine = [torch.tensor(row, dtype=torch.float64) for row in rows[dist.get_rank()]]
        gradients = fit(Dictated(rule.uses_weight), mine, OnNodes(reduction=reduction), window)
        starts = range(0, steps, window)
        for start, gradient in zip(starts, gradients, strict=True):
            pairs = [(rank, row) for rank in range(world_size) for row in rows[rank][start : start + window]]
            expected = combine(
                torch.tensor([row[:-1] for _, row in pairs], dtype=torch.float64),
                rule=rule,
                nodes=[NODES[world_size][rank] for rank, _ in pairs],
                weights=[row[-1] for _, row in pairs],
            )
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


class Heads(Recorder):
    """Two named terms with a head each; the box loss is a masked mean, NaN in value and gradient without any box."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.cls, self.box = (nn.Parameter(torch.tensor(x, dtype=torch.float64)) for x in (1.0, 2.0, 3.0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        classes, boxes = batch
        mask = (boxes != 0).double()
        loss = {
            "cls": (self.trunk * self.cls * classes).mean(),
            "box": (self.trunk * self.box * boxes * mask).sum() / mask.sum(),
        }
        return {"loss": loss, "weight": {"cls": torch.full_like(mask.sum(), len(classes)), "box": mask.sum()}}


def check_named_terms() -> None:
    """Terms whose weights are CUDA tensors each have their own mean, those without any box included."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def rows(r: int) -> list[tuple[list[float], list[float]]]:
        return [([1.0 + r, 3.0], [4.0 * r, 0.0]), ([2.0], [0.0, 0.0, 0.0]), ([5.0, 1.0, r], [1.0 + r, 7.0])]

    mine = [tuple(torch.tensor(part, dtype=torch.float64) for part in pair) for pair in rows(rank)]
    for window in (1, 3):
        gradients = fit(Heads(), mine, GradAvgStrategy(reduction="weighted_mean"), window)
        for step, gradient in enumerate(gradients):
            pairs = [pair for r in range(world_size) for pair in rows(r)[step * window : (step + 1) * window]]
            classes = [x for pair in pairs for x in pair[0]]
            boxes = [x for pair in pairs for x in pair[1] if x]
            of_classes, of_boxes = sum(classes) / len(classes), sum(boxes) / len(boxes) if boxes else 0.0
            expected = torch.tensor([2 * of_classes + 3 * of_boxes, of_classes, of_boxes], dtype=torch.float64)
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


class BadWeight(Dictated):
    def __init__(self, step: int, value: float) -> None:
        super().__init__(weighted=True)
        self.step, self.value = step, value

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        bad = batch_idx == self.step and dist.get_rank() == dist.get_world_size() - 1
        weight = torch.full_like(batch[-1], self.value) if bad else torch.ones_like(batch[-1])
        return {"loss": (self.w * batch[:-1]).sum(), "weight": weight}


def check_errors_one_step_later() -> None:
    """An unusable weight on one rank is raised by all: on CUDA after one more step, and at the end for the last."""
    late = int(on_cuda())
    for value in (-1.0, float("nan"), float("inf")):
        for step in (1, 3):
            model = BadWeight(step, value)
            raised = None
            try:
                fit(model, [torch.ones(SIZE + 1, dtype=torch.float64)] * 4, GradAvgStrategy(reduction="weighted_mean"))
            except ValueError as error:
                raised = str(error)
            assert raised is not None, f"weight {value} in step {step} of 4 was not found"
            assert "a weight or a share is not usable" in raised
            assert min(4, step + late) == len(model.gradients)


class Line(Recorder):
    """One weight in the precision's dtype; a batch is `[x, weight]`."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0]))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": (self.w * batch[0].to(self.w.dtype)).sum(), "weight": batch[1].double()}


def check_true_half() -> None:
    """In float16 and bfloat16 neither large gradients overflow on the way nor small ones underflow."""
    world_size = dist.get_world_size()
    for precision, dtype in (("16-true", torch.float16), ("bf16-true", torch.bfloat16)):
        for scale in (1.0, 2.0**-38):
            for window in (1, 2):
                rows = [((60000.0 - 5000 * r) * scale, 3.0 - r % 2) for r in range(world_size)]
                batch = torch.tensor(rows[dist.get_rank()])
                strategy = GradAvgStrategy(reduction="weighted_mean")
                (gradient,) = fit(Line(), [batch] * window, strategy, window, precision=precision)
                expected = torch.tensor([sum(x * n for x, n in rows) / sum(n for _, n in rows)], dtype=torch.float64).to(
                    dtype
                )
                assert dtype == gradient.dtype
                # Every gradient was rounded to half precision once before, and so was each of two micro-batches' sum.
                torch.testing.assert_close(gradient, expected, rtol=3 * torch.finfo(dtype).eps, atol=2.0**-23)


class Regression(Recorder):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        tokens = torch.full((), 4096.0 * len(batch), device=batch.device)
        return {"loss": self.net(batch).float().square().mean(), "weight": tokens}


def check_mixed() -> None:
    """Under autocast with a GradScaler, weights of thousands overflow nothing: the gradient is that of float32."""
    world_size = dist.get_world_size()
    for precision, tolerance in (("16-mixed", 5e-3 if on_cuda() else 3e-2), ("bf16-mixed", 3e-2)):
        for window in (1, 3):
            data = [
                [
                    torch.randn(1 + (r + m) % 3, 6, generator=torch.Generator().manual_seed(10 * m + r))
                    for m in range(window)
                ]
                for r in range(world_size)
            ]
            strategy = GradAvgStrategy(reduction="weighted_mean")
            (gradient,) = fit(Regression(), data[dist.get_rank()], strategy, window, precision=precision)
            net = Regression().net
            loss = net(torch.cat([batch for rank in data for batch in rank])).square().mean()
            expected = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(net.parameters()))])
            assert torch.linalg.norm(gradient - expected) <= tolerance * torch.linalg.norm(expected)


def check_stock_bits() -> None:
    """Without options the gradients have the bits of stock DDP."""
    batches = [torch.randn(3, 6, generator=torch.Generator().manual_seed(dist.get_rank() + 9 * m)) for m in range(4)]
    for window in (1, 2):
        ours = fit(Regression(), batches, GradAvgStrategy(), window)
        stock = fit(Regression(), batches, DDPStrategy(), window)
        assert all(torch.equal(mine, its) for mine, its in zip(ours, stock, strict=True))


def check_hook() -> None:
    """A compression hook of DDP composes with weights that are CUDA tensors."""
    strategy = GradAvgStrategy(reduction="weighted_mean", ddp_comm_hook=default_hooks.bf16_compress_hook)
    batches = [torch.randn(1 + dist.get_rank(), 6, generator=torch.Generator().manual_seed(5))]
    compressed = fit(Regression(), batches, strategy)
    exact = fit(Regression(), batches, GradAvgStrategy(reduction="weighted_mean"))
    assert torch.linalg.norm(compressed[0] - exact[0]) <= 2e-2 * torch.linalg.norm(exact[0])


def check_equivalence(equivalent_to: Any, num_replicas: int | None, recompute: bool) -> None:
    """After 20 steps in float64 a run is that of the emulation on a CPU, with replicas or with one device."""
    for kind in (data_parallel.CNN, data_parallel.Contrastive):
        reference = kind(torch.float64)
        expected = data_parallel.train(reference, list(data_parallel.loader(reference)), num_replicas or 1)
        model = kind(torch.float64)
        strategy = GradAvgStrategy(equivalent_to=equivalent_to, num_replicas=num_replicas, recompute_replicas=recompute)
        trainer_of_ranks(strategy).fit(model, data_parallel.loader(model))
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        # Other kernels than on the CPU, over 20 steps.
        torch.testing.assert_close(state, expected.weights, rtol=1e-9, atol=1e-9)


class Noisy(Recorder):
    """Its gradient is the noise that its replicas draw on their device."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(SIZE, dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.w * torch.randn(SIZE, dtype=torch.float64, device=self.device)).sum() * batch.mean()


def check_random_numbers() -> None:
    """Replicas of a device draw different numbers, and the same ones in a rerun."""
    runs = []
    for _ in range(2):
        model = Noisy()
        torch.manual_seed(4)
        strategy = GradAvgStrategy(equivalent_to="data_parallel", num_replicas=4)
        trainer = trainer_of_ranks(strategy)
        trainer.fit(model, DataLoader(torch.ones(12, dtype=torch.float64), batch_size=4))  # type: ignore[arg-type]  # a tensor is a data set
        runs.append(torch.stack(model.gradients).cpu())
    assert torch.equal(runs[0], runs[1])
    assert len(runs[0].unique()) == runs[0].numel()


def numbers_of(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(7000 + rank))


def scattered_sum(wire_dtype: str) -> ScatteredSum:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    route = route_of(WireOptions(wire_dtype), places_on_nodes([0] * world_size), rank, nccl=on_cuda())
    return ScatteredSum(route, wire_dtype, rank, None, device())


def emulated_sum(wire_dtype: str, numbers: Sequence[Tensor]) -> Tensor:
    """Return what an exchange makes of the ranks' numbers, computed on the CPU by one process."""
    codec, W, size = CODECS[wire_dtype], len(numbers), len(numbers[0])
    width = -(-size // (W * codec.multiple)) * codec.multiple
    rows = [nn.functional.pad(one, (0, W * width - size)).view(W, width) for one in numbers]
    sent = [codec.decode(codec.encode(of_rank)) for of_rank in rows]
    parts = []
    for part in range(W):
        came = torch.stack([(rows if rank == part else sent)[rank][part] for rank in range(W)])
        parts.append(codec.decode(codec.encode(came.sum(0, keepdim=True))))
    return torch.cat(parts).flatten()[:size]


def check_wire_sum(wire_dtype: str) -> None:
    """Buckets in flight at once, smaller than the world and large, are summed as the CPU emulates the exchange."""
    require_ranks()
    rank, W, sizes = dist.get_rank(), dist.get_world_size(), (1, 7, 1000, 300_001)
    ours = scattered_sum(wire_dtype)
    factor = torch.full((), rank + 1.0, dtype=torch.float64, device=device())
    buckets = [numbers_of(rank, size).to(device()) for size in sizes]
    futures = [ours.sum(Bucket(bucket, [bucket]), lambda: factor) for bucket in buckets]  # type: ignore[arg-type]  # a bucket as far as it is read
    found = same_on_all_ranks([future.wait() for future in futures])
    ours.close()
    for size, total in zip(sizes, found, strict=True):
        scaled = [(of_rank + 1) * numbers_of(of_rank, size) for of_rank in range(W)]
        # An L2 norm of few numbers is not an average: each may be off by twice its largest rounding.
        allowed = LARGEST_ERROR[wire_dtype] * (1 if size >= 1000 else 4)
        assert relative_error(total, sum(one.double() for one in scaled)) <= allowed
        expected = emulated_sum(wire_dtype, scaled)
        if W == 2:
            assert torch.equal(expected, total)
        elif size >= 1000:
            # Where three numbers or more are added in another order, a sum may fall on the other side of a rounding.
            assert relative_error(total, expected.double()) <= allowed / 20


def check_wire_bad_numbers(wire_dtype: str) -> None:
    """One rank's NaN and infinity arrive on all ranks, and nothing arrives where its factor is 0."""
    require_ranks()
    rank, W, size = dist.get_rank(), dist.get_world_size(), 2000
    for discarded in (False, True):
        numbers = numbers_of(rank, size)
        if rank == W - 1:
            numbers[3], numbers[1500] = torch.nan, torch.inf
        factor = torch.full((), float(not (discarded and rank == W - 1)), dtype=torch.float64, device=device())
        ours, bucket = scattered_sum(wire_dtype), numbers.to(device())
        future = ours.sum(Bucket(bucket, [bucket]), factor.clone)  # type: ignore[arg-type]  # as above
        (found,) = same_on_all_ranks([future.wait()])
        ours.close()
        exact = sum(numbers_of(of_rank, size).double() for of_rank in range(W - discarded))
        bad = ~found.isfinite()
        if discarded:
            assert not bad.any()
        else:
            assert bad[3]
            assert bad[1500]
            assert bad.sum() == 2 or (wire_dtype == "int8" and bad.sum() <= 2 * BLOCK)
        assert relative_error(found[~bad], exact[~bad]) <= LARGEST_ERROR[wire_dtype]


class Pieces(Recorder):
    """Dictated gradients in float32, of parameters that each are a bucket of DDP under a small cap."""

    SIZES = (300, 1000, 7, 520)

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.pieces = nn.ParameterList(torch.ones(size) for size in self.SIZES)
        self.weighted = weighted

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        parts = batch[:-1].float().split(self.SIZES)
        loss = torch.stack([(piece * part).sum() for piece, part in zip(self.pieces, parts, strict=True)]).sum()
        if not self.weighted:
            return loss
        return {"loss": loss * torch.where(batch[-1] == 0, torch.nan, 1.0), "weight": batch[-1]}


def piece_rows(rank: int, steps: int) -> list[Tensor]:
    """Return a rank's batches: the gradient and a weight, which is 0 in each third step, at others' at another rank."""
    gradients = numbers_of(rank, steps * sum(Pieces.SIZES)).double().view(steps, -1)
    weights = [float((rank + step) % 3 != 2) * (1 + (rank + step) % 4) for step in range(steps)]
    return [torch.cat([row, torch.tensor([n], dtype=torch.float64)]) for row, n in zip(gradients, weights, strict=True)]


def check_wire_rules(wire_dtype: str) -> None:
    """Every rule over a window of 2 and a short last one is `combine` within the error of the type, weights of 0 with
    a NaN loss included; on one rank, which sends nothing, within that of float32."""
    world_size, window, steps = dist.get_world_size(), 2, 5
    rows = [piece_rows(rank, steps) for rank in range(world_size)]
    # What int8 owes of a step is paid in the next: then that one is off by both.
    allowed = (LARGEST_ERROR[wire_dtype] if world_size > 1 else 1e-6) * (2 if wire_dtype == "int8" else 1)
    for name in [*RULES, root_weighted]:
        rule = resolve_rule(name)
        strategy = OnNodes(reduction=name, wire_dtype=wire_dtype, bucket_cap_mb=0.001)  # type: ignore[arg-type]  # a member of its literal
        found = fit(Pieces(rule.uses_weight), rows[dist.get_rank()], strategy, window)
        for start, gradient in zip(range(0, steps, window), found, strict=True):
            pairs = [(rank, row) for rank in range(world_size) for row in rows[rank][start : start + window]]
            expected = combine(
                torch.stack([row[:-1] for _, row in pairs]),
                rule=rule,
                nodes=[NODES[world_size][rank] for rank, _ in pairs],
                weights=[float(row[-1]) for _, row in pairs],
            )
            assert relative_error(gradient, expected) <= allowed, f"{rule.name}, window from {start}"


def check_feedback() -> None:
    """Over 40 steps, with buckets arranged anew after the first, the mean of int8's gradients is the exact one."""
    require_ranks()
    steps, world_size = 40, dist.get_world_size()
    rows = [piece_rows(rank, 1)[0] for rank in range(world_size)]
    strategy = GradAvgStrategy(reduction="sum", wire_dtype="int8", bucket_cap_mb=0.001)
    found = fit(Pieces(weighted=False), [rows[dist.get_rank()]] * steps, strategy)
    exact = torch.stack([row[:-1] for row in rows]).sum(0)
    assert relative_error(found[0], exact) > 2e-3
    # What is owed in the end, of one step's size and from two stages, over the number of steps.
    assert relative_error(torch.stack(found).double().mean(0), exact) <= 2 * LARGEST_ERROR["int8"] / steps


class Overflowing(Recorder):
    """The last rank's loss is infinite in its third step."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(600))
        self.scales: list[float] = []
        self.weights: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        bad = batch_idx == 2 and dist.get_rank() == dist.get_world_size() - 1
        return {"loss": (self.w * batch).mean() * (torch.inf if bad else 1.0), "weight": torch.ones_like(batch[0])}

    def on_train_batch_end(self, *args: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())  # type: ignore[attr-defined]  # of mixed precision
        self.weights.append(self.w.detach().clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def check_scaler(wire_dtype: Any) -> None:
    """A gradient that overflows on one rank has the gradient scalers of all ranks skip that step, and only that."""
    batches = [numbers_of(dist.get_rank(), 600).abs() + 0.1] * 5
    model = Overflowing()
    # Lightning has a scaler for CUDA alone.
    scaler = torch.amp.GradScaler(device().type)  # type: ignore[attr-defined]  # not listed in __all__
    precision = MixedPrecision("16-mixed", device().type, scaler)
    fit(model, batches, GradAvgStrategy(reduction="weighted_mean", wire_dtype=wire_dtype), plugins=[precision])
    full = model.scales[0]
    assert [full, full, full / 2, full / 2, full / 2] == model.scales
    same_on_all_ranks(model.weights)
    moved = [not torch.equal(after, before) for before, after in zip(model.weights, model.weights[1:], strict=False)]
    assert [True, False, True, True] == moved


class Squares(Recorder):
    """Its gradient is the same in every step; the weight counts."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.net = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())))
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.net(batch).square().mean()
        return {"loss": loss, "weight": torch.full_like(loss, 1.0 + dist.get_rank())}


def check_power_sgd() -> None:
    """PowerSGD is exact until it begins, and with error feedback its sum follows the exact one."""
    # More rows than the rank of the matrices that are sent, or one rank would lose nothing.
    batch, cap = numbers_of(dist.get_rank(), 20 * 64).view(20, 64), 0.01
    (exact,) = fit(Squares(), [batch], GradAvgStrategy(reduction="weighted_mean", bucket_cap_mb=cap))
    strategy = GradAvgStrategy(reduction="weighted_mean", power_sgd_rank=8, power_sgd_start_step=3, bucket_cap_mb=cap)
    found = fit(Squares(), [batch] * 43, strategy)
    errors = [relative_error(one, exact.double()) for one in found]
    # TF32 apart, which is off by default, the first two are the same kernels in another reduction.
    assert max(errors[:2]) <= 1e-5
    assert min(errors[4:]) > 1e-4
    assert relative_error(torch.stack(found).double().mean(0), exact.double()) <= 0.1 * max(errors)


def check_average_gradients() -> None:
    """A plain loop's gradients, dense, half, absent and sparse, are `combine` of the ranks', NaN at weight 0 or not."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # The innermost launcher that says something counts; `isolated` puts the environment back.
    os.environ["GROUP_RANK"] = str(NODES[world_size][rank])
    weights = [0.0 if r == 1 else 1.0 + r for r in range(world_size)]
    for rule in RULES.values():
        rows = [
            numbers_of(r, 30).double() * (torch.nan if rule.uses_weight and weights[r] == 0 else 1)
            for r in range(world_size)
        ]
        dense, half, lone, table = (nn.Parameter(torch.zeros(shape, device=device())) for shape in ((4, 3), 10, 5, (9, 2)))
        half.data = half.data.bfloat16()
        mine = rows[rank].float().to(device())
        dense.grad, half.grad = mine[:12].view(4, 3).clone(), mine[12:22].bfloat16()
        lone.grad = mine[22:27].clone() if rank == 0 else None
        entry = torch.tensor([[rank, rank]], device=device())
        table.grad = torch.sparse_coo_tensor(entry, torch.stack([mine[:2], mine[2:4]]), (9, 2), check_invariants=False)
        weight = torch.full((), weights[rank], dtype=torch.float64, device=device())
        average_gradients([dense, half, lone, table], reduction=rule, weight=weight)
        found = same_on_all_ranks([dense.grad, half.grad, lone.grad, table.grad.to_dense()])  # type: ignore[list-item]  # none is None now

        def combined(gradients: list[Tensor], rule: Any = rule) -> Tensor:
            return combine(torch.stack(gradients), rule=rule, nodes=NODES[world_size], weights=weights)

        torch.testing.assert_close(found[0].flatten().double(), combined([row[:12] for row in rows]), rtol=1e-5, atol=1e-5)
        rounded = [row[12:22].bfloat16().double() for row in rows]
        torch.testing.assert_close(found[1].double(), combined(rounded), rtol=2.0**-8, atol=1e-6)
        absent = [rows[0][22:27], *(torch.zeros(5, dtype=torch.float64) for _ in rows[1:])]
        torch.testing.assert_close(found[2].double(), combined(absent), rtol=1e-5, atol=1e-5)
        tables = []
        for r, row in enumerate(rows):
            tables.append(torch.zeros(9, 2, dtype=torch.float64))
            tables[r][r] = row[:2] + row[2:4]
        torch.testing.assert_close(found[3].double(), combined(tables), rtol=1e-5, atol=1e-5)


def check_gather() -> None:
    """Rows of all ranks, uneven ones, come in rank order, and each gets the sum of the ranks' gradients of it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = [numbers_of(r, 3 * (r + 1)).view(r + 1, 3) for r in range(world_size)]
    total = sum(map(len, rows))
    factors = [numbers_of(10 + r, 3 * total).view(total, 3) for r in range(world_size)]
    mine = rows[rank].to(device()).requires_grad_()
    found = gather(mine)
    (found * factors[rank].to(device())).sum().backward()
    assert torch.equal(torch.cat(rows), found.detach().cpu())
    start = sum(map(len, rows[:rank]))
    expected = torch.stack(factors).double().sum(0)[start : start + len(mine)]
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad.cpu().double(), expected, rtol=1e-6, atol=1e-6)


def check_monitor() -> None:
    """The monitor's report has the weights, the normalizer and the gradient norm of the step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    weights = [2.0 + r for r in range(world_size)]
    batches = [torch.cat([numbers_of(rank, SIZE).double(), torch.tensor([weights[rank]], dtype=torch.float64)])] * 3
    monitor = GradAvgMonitor(every_n_steps=1, check_data=False, check_parameters_every_n_steps=1)
    strategy = GradAvgStrategy(reduction="weighted_mean")
    found = fit(Dictated(weighted=True), batches, strategy, callbacks=[monitor])
    report = strategy.report()
    assert weights == list(report.terms[0].weights)
    assert sum(weights) == report.terms[0].normalizer
    assert pytest.approx(float(found[-1].norm()), rel=1e-6) == report.gradient_norm


class Signalled(Dictated):
    """The last rank gets SIGTERM in its third step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == 2 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def check_termination() -> None:
    """A signal to one rank ends all ranks after the same step, whether flags travel alone or with the totals."""
    require_ranks()
    # Totals are looked at one step later on CUDA, and only then is the flag seen.
    latest = 5 + on_cuda()
    batches = [torch.ones(SIZE + 1, dtype=torch.float64)] * 9
    for reduction in ("mean", "weighted_mean"):
        strategy: Any = GradAvgStrategy(reduction=reduction)  # type: ignore[arg-type]  # as above
        trainer = trainer_of_ranks(strategy, use_distributed_sampler=False)
        if not Termination.applies_to(trainer):
            raise NotHereError("this lightning has no agreement to replace")
        terminated = False
        try:
            model = Signalled(weighted=resolve_rule(reduction).uses_weight)
            trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]  # a list is a data set
        except SIGTERMException:
            terminated = True
        steps: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(steps, (terminated, trainer.global_step))
        assert len(set(steps)) == 1
        assert terminated
        assert 3 <= trainer.global_step <= latest


class Deep(Recorder):
    """Many layers, whose backward asks for memory all the while that buckets travel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        width, depth = (512, 16) if on_cuda() else (32, 4)
        self.net = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())))
        self.width = width

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.net(batch).square().mean()
        return {"loss": loss, "weight": torch.full_like(loss, 1.0 + dist.get_rank())}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@contextmanager
def one_after_another() -> Iterator[None]:
    """Have every bucket's reduction begin and end before anything else goes on on the device."""
    hook = Reducer.hook

    @functools.wraps(hook)
    def hook_alone(self: Reducer, state: object, bucket: Any) -> Any:
        if on_cuda():
            torch.cuda.synchronize()
        future = hook(self, state, bucket)
        if on_cuda():
            torch.cuda.synchronize()
        return future

    Reducer.hook = hook_alone  # type: ignore[method-assign]  # within the context
    try:
        yield
    finally:
        Reducer.hook = hook  # type: ignore[method-assign]  # as above


def check_streams(wire_dtype: Any) -> None:
    """Buckets that travel beside the backward give the bits of those that travel alone: no memory is shared wrongly."""
    steps, batch = 30 if on_cuda() else 4, 256 if on_cuda() else 8
    cap = 0.6 if on_cuda() else 0.003

    def train() -> list[Tensor]:
        model = Deep()
        rows = numbers_of(dist.get_rank(), batch * model.width).view(batch, model.width)
        strategy = GradAvgStrategy(reduction="weighted_mean", wire_dtype=wire_dtype, bucket_cap_mb=cap)
        return fit(model, [rows] * steps, strategy)

    overlapped = train()
    with one_after_another():
        alone = train()
    for step, (mine, its) in enumerate(zip(overlapped, alone, strict=True)):
        assert torch.equal(mine, its), f"step {step}"


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def unwaiting(strategy: type[DDPStrategy]) -> type[DDPStrategy]:
    """Return the strategy with an error for every wait in a training step and its backward, after the first 6."""

    class Unwaiting(strategy):  # type: ignore[valid-type, misc]  # a class that is an argument
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("batch_idx", args[1] if len(args) > 1 else 0) < 6:
                return super().training_step(*args, **kwargs)
            with waiting_is_an_error():
                return super().training_step(*args, **kwargs)

        def backward(self, *args: Any, **kwargs: Any) -> Any:
            if self.lightning_module.trainer.fit_loop.epoch_loop.batch_idx < 6:
                return super().backward(*args, **kwargs)
            with waiting_is_an_error():
                return super().backward(*args, **kwargs)

    return Unwaiting


class NeverWaits(Callback):
    """Makes every wait an error from the seventh batch to the last, between the steps as well."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 6:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 11:
            torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        torch.cuda.set_sync_debug_mode("default")


def twelve_rows(size: int = SIZE) -> list[Tensor]:
    """Return batches whose last number, the weight, is 0, 1 or 2."""
    return [
        torch.arange(1.0, size + 2, dtype=torch.float64).index_fill(0, torch.tensor([size]), (m + dist.get_rank()) % 3)
        for m in range(12)
    ]


def check_no_waits() -> None:
    """No step waits for the device: not under stock DDP, and not under rules whose weights are CUDA tensors.

    What the mode finds are implicit waits, such as reading a number. The event that a step awaits is not one of them:
    it lies one step back.
    """
    require_cuda()
    rows = twelve_rows()
    pairs = [tuple(torch.tensor(x, dtype=torch.float64) for x in ([1.0, 2.0], [0.0, float(m % 3)])) for m in range(12)]
    fit(Dictated(weighted=False), rows, unwaiting(DDPStrategy)())
    for window in (1, 3):
        for reduction in [*RULES, root_weighted]:
            model = Dictated(resolve_rule(reduction).uses_weight)
            fit(model, rows, unwaiting(GradAvgStrategy)(reduction=reduction), window)
        fit(Heads(), pairs, unwaiting(GradAvgStrategy)(reduction="weighted_mean"), window)


def check_no_waits_of_wire(wire_dtype: str) -> None:
    """Nor does a wire type, under a rule that uses weights and one that does not."""
    require_cuda()
    rows = twelve_rows(sum(Pieces.SIZES))
    for window in (1, 3):
        for reduction in ("sum", "weighted_mean"):
            strategy = unwaiting(GradAvgStrategy)(reduction=reduction, wire_dtype=wire_dtype, bucket_cap_mb=0.001)
            fit(Pieces(resolve_rule(reduction).uses_weight), rows, strategy, window)


def check_no_waits_between() -> None:
    """From the begin of one batch to that of the next there is no wait either: the agreement on SIGTERM has none."""
    require_cuda()
    for reduction in ("mean", "sum", "weighted_mean"):
        strategy: Any = GradAvgStrategy(reduction=reduction)  # type: ignore[arg-type]  # as above
        fit(Dictated(resolve_rule(reduction).uses_weight), twelve_rows(), strategy, callbacks=[NeverWaits()])


Check = tuple[Callable[..., None], tuple[Any, ...]]

CHECKS: dict[str, Check] = {
    **{f"rule {name}": (check_rule, (name,)) for name in RULES},
    "rule custom": (check_rule, (root_weighted,)),
    "named terms": (check_named_terms, ()),
    "errors": (check_errors_one_step_later, ()),
    "true half precision": (check_true_half, ()),
    "mixed precision": (check_mixed, ()),
    "stock bits": (check_stock_bits, ()),
    "hook": (check_hook, ()),
    **{f"{name} sum": (check_wire_sum, (name,)) for name in WIRE_DTYPES},
    **{f"{name} bad numbers": (check_wire_bad_numbers, (name,)) for name in WIRE_DTYPES},
    **{f"{name} rules": (check_wire_rules, (name,)) for name in WIRE_DTYPES},
    "int8 feedback": (check_feedback, ()),
    **{f"{name or 'plain'} scaler": (check_scaler, (name,)) for name in (None, *WIRE_DTYPES)},
    "power_sgd": (check_power_sgd, ()),
    "average_gradients": (check_average_gradients, ()),
    "gather": (check_gather, ()),
    "data_parallel": (check_equivalence, ("data_parallel", 4, False)),
    "data_parallel recomputed": (check_equivalence, ("data_parallel", 4, True)),
    "single_device": (check_equivalence, ("single_device", None, False)),
    "random numbers": (check_random_numbers, ()),
    "monitor": (check_monitor, ()),
    "termination": (check_termination, ()),
    **{f"{name or 'plain'} streams": (check_streams, (name,)) for name in (None, *WIRE_DTYPES)},
    "no waits": (check_no_waits, ()),
    **{f"no waits, {name}": (check_no_waits_of_wire, (name,)) for name in WIRE_DTYPES},
    "no waits between steps": (check_no_waits_between, ()),
}


def fail_on_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("a planted failure")


def die_on_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(7)
    dist.barrier()


PLANTED: dict[str, Check] = {
    "planted failure": (fail_on_last_rank, ()),
    "planted death": (die_on_last_rank, ()),
    "planted success": (dist.barrier, ()),
}
"""Checks of what runs the checks."""


def _perform(name: str) -> Outcome:
    check, arguments = (CHECKS | PLANTED)[name]
    begin = time.perf_counter()
    try:
        with isolated(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "rank . has a micro-batch of weight 0")
            check(*arguments)
    except NotHereError as reason:
        return Outcome("skipped", str(reason))
    except Exception:  # noqa: BLE001  # whatever it is, the table says so
        return Outcome("failed", traceback.format_exc(), time.perf_counter() - begin)
    return Outcome("passed", "", time.perf_counter() - begin)


def _run_rank(rank: int, world_size: int, backend: str, folder: str, names: Sequence[str]) -> None:
    """Run checks as one rank, as far as the first that fails here, and write what came of them."""
    os.environ.update(
        NCCL_HOSTID=f"gradavg-{rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1",
        NCCL_MAX_CTAS="2",
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/store", world_size)  # type: ignore[attr-defined]  # not listed in __all__
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    outcomes: dict[str, Outcome] = {}
    for name in names:
        outcomes[name] = _perform(name)
        Path(folder, f"rank{rank}.json").write_text(json.dumps(outcomes))
        if outcomes[name].status == "failed":
            # The others may wait in a collective; and after a failure a process is fit for nothing else.
            os._exit(1)
        dist.barrier(device_ids=[0] if backend == "nccl" else None)
    dist.destroy_process_group()


def _run_processes(world_size: int, backend: str, names: Sequence[str]) -> list[dict[str, Outcome]]:
    """Return the outcomes that each rank came to, in new processes on one device; they stop at the first failure."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="gradavg-gpu-") as folder:
        ranks = range(world_size)
        processes = [context.Process(target=_run_rank, args=(rank, world_size, backend, folder, names)) for rank in ranks]
        for process in processes:
            process.start()
        deadline = time.monotonic() + WORLD_TIMEOUT
        running = {process.sentinel: process for process in processes}
        try:
            while running and (ended := connection.wait(list(running), deadline - time.monotonic())):
                for sentinel in ended:
                    process = running.pop(sentinel)  # type: ignore[arg-type]  # a sentinel is an integer here
                    process.join()
                    if process.exitcode != 0:
                        deadline = min(deadline, time.monotonic() + AFTER_FAILURE)
        finally:
            for process in processes:
                process.kill()
                process.join()
        files = [Path(folder, f"rank{rank}.json") for rank in ranks]
        answers = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    return [{name: Outcome(*outcome) for name, outcome in answer.items()} for answer in answers]


def run_world(world_size: int, backend: str, names: Sequence[str] = tuple(CHECKS)) -> dict[str, list[Outcome]]:
    """Return every rank's outcome of every check; after a failure new processes go on with the next check."""
    unanswered = Outcome("failed", "this rank did not end the check: see what the other ranks say")
    outcomes: dict[str, list[Outcome]] = {}
    left = list(names)
    while left:
        answers = _run_processes(world_size, backend, left)
        begun = [name for name in left if any(name in answer for answer in answers)]
        if not begun and len(outcomes) == 0:
            begun = left  # where processes do not even start, others would not either
        # A check that took the processes with it was the first without an answer.
        begun = begun or left[:1]
        outcomes |= {name: [answer.get(name, unanswered) for answer in answers] for name in begun}
        left = [name for name in left if name not in outcomes]
    return outcomes


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world_size: f"{world_size} ranks")
def nccl_outcomes(request: pytest.FixtureRequest) -> dict[str, list[Outcome]]:
    return run_world(request.param, "nccl")


@pytest.mark.gpu
@pytest.mark.timeout(WORLD_TIMEOUT * 2)
@pytest.mark.parametrize("name", CHECKS)
def test_nccl_on_one_gpu(nccl_outcomes: dict[str, list[Outcome]], name: str) -> None:
    """Every check passes on all ranks of NCCL, or needs more ranks than one."""
    for rank, outcome in enumerate(nccl_outcomes[name]):
        needs_ranks = outcome.status == "skipped" and len(nccl_outcomes[name]) == 1
        assert needs_ranks or outcome.status == "passed", f"rank {rank}: {outcome.text}"


@pytest.mark.slow
@pytest.mark.timeout(WORLD_TIMEOUT)
def test_checks_are_right_on_cpu() -> None:
    """What the checks for a GPU expect holds on gloo, so that a failure on a GPU is one of the GPU."""
    outcomes = run_world(2, "gloo")
    assert set(CHECKS) == set(outcomes)
    for name, ranks in outcomes.items():
        expected = ("skipped", NEEDS_CUDA) if name.startswith("no waits") else ("passed", "")
        for rank, outcome in enumerate(ranks):
            assert expected == (outcome.status, outcome.text), f"{name}, rank {rank}: {outcome.text}"


@pytest.mark.slow
@pytest.mark.timeout(WORLD_TIMEOUT)
def test_checks_go_on_after_a_failure() -> None:
    """A check that fails on one rank, or ends its process, is told of that rank, and the next one begins afresh."""
    failed, died, passed = run_world(2, "gloo", tuple(PLANTED)).values()
    assert "passed" == failed[0].status
    assert "failed" == failed[1].status
    assert "ValueError: a planted failure" in failed[1].text
    assert "did not end the check" in died[1].text
    assert ["passed", "passed"] == [one.status for one in passed]


def main() -> int:
    """Run the checks and print what failed and a table; the exit code is 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--worlds", type=int, nargs="+", default=list(WORLDS), choices=WORLDS)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="checks, with wildcards (default: all)")
    parser.add_argument("--output", type=Path, help="a JSON file for the outcomes")
    arguments = parser.parse_args()
    names = [name for name in CHECKS if any(fnmatch.fnmatchcase(name, pattern) for pattern in arguments.only)]
    if not names:
        parser.error(f"--only {' '.join(arguments.only)} names no check; there are {', '.join(CHECKS)}")
    if arguments.backend == "nccl" and not torch.cuda.is_available():
        parser.error("no CUDA device is available: --backend gloo runs on the CPU what does not need one")
    table: dict[int, dict[str, list[Outcome]]] = {}
    for world_size in arguments.worlds:
        table[world_size] = run_world(world_size, arguments.backend, names)
        if arguments.output is not None:
            # After each world: whoever ends this process early has what there is.
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps({"backend": arguments.backend, "worlds": table}, indent=1) + "\n")
    rows, failures = [], []
    for name in names:
        cells = []
        for world_size, outcomes in table.items():
            broken = [(rank, one.text) for rank, one in enumerate(outcomes[name]) if one.status == "failed"]
            failures += [f"{name}, {world_size} ranks, rank {rank}:\n{text}" for rank, text in broken]
            seconds = max(one.seconds for one in outcomes[name])
            status = "failed" if broken else outcomes[name][0].status
            cells.append(f"{status} {seconds:5.1f} s" if seconds else f"{status}        ")
        rows.append((name, *cells))
    header = (arguments.backend, *(f"{world_size} ranks        " for world_size in table))
    lines = [f"{name:28}" + "".join(f"{cell:>20}" for cell in cells) for name, *cells in (header, *rows)]
    print("\n".join([*failures, *lines]))  # noqa: T201  # the script reports on the console
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
