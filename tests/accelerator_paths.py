"""Every way in which the package touches a device, as bodies that run on ranks with any: the table is `PATHS`.

Each body returns what came of it, on the CPU, and is the same on all devices but for roundings. `test_accelerator.py`
runs all of them on CUDA and NCCL, where there is a GPU, and `SIMULATED` on the simulated device.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerator import SimAccelerator
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from loops import OfTorch
from ranks import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from toys import WEIGHTED

from lightning_gradavg import GradAvgMonitor, GradAvgStrategy, average_gradients, gather, hooks
from lightning_gradavg.rules import RULES

__all__ = ["PATHS", "SIMULATED", "Count", "OneGpu", "Outcome", "Path", "perform", "trainer_on"]

WIDTH = 8
SAMPLES = ((3, 4, 2, 1), (5, 2, 1, 4), (4, 4, 3, 2), (2, 6, 4, 3), (3, 3, 1, 5), (1, 5, 2, 2))
"""Of the batches of each rank; the window of every other one is another."""

Outcome = list[Tensor]
"""What came of a body, copied to the CPU: the same numbers on every device."""

Step = Callable[["Net", Tensor, int], Any]

Count = Callable[[], float]
"""Counts what happened on the device so far."""


class Net(LightningModule):
    """Several layers, so that buckets travel beside the backward; `step` is its `training_step`."""

    def __init__(self, step: Step, batch_norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
        if batch_norm:
            self.net.insert(1, nn.BatchNorm1d(WIDTH))
        if step is sparse:
            self.table = nn.Embedding(9, WIDTH, sparse=True)
        self.step, self.gradients = step, list[Tensor]()
        self.automatic_optimization = step is not manual

    def forward(self, batch: Tensor) -> Any:
        return self.net(batch)

    def loss(self, batch: Tensor) -> Tensor:
        return self(batch).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.step(self, batch, batch_idx)

    def keep_gradients(self) -> None:
        found = [one.grad.detach().to_dense().flatten() for one in self.parameters() if one.grad is not None]
        self.gradients.append(torch.cat(found) if found else torch.empty(0))  # none in a step that is skipped

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.automatic_optimization:
            self.keep_gradients()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Evaluated(Net):
    """Logs and predicts what each sample gives."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", self.loss(batch), batch_size=len(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self(batch).sum(1)


def plain(net: Net, batch: Tensor, batch_idx: int) -> Any:
    return net.loss(batch)


def weighed(net: Net, batch: Tensor, batch_idx: int) -> Any:
    """The weight is on the device."""
    return {"loss": net.loss(batch), "weight": 1 + (batch[:, 0] > 0).sum()}


def masked(net: Net, batch: Tensor, batch_idx: int) -> Any:
    """On rank 1 every second micro-batch has weight 0, which only the device knows, and a loss that is NaN."""
    nothing = dist.get_rank() == 1 and batch_idx % 2 == 1
    loss = net.loss(batch) * torch.full((), torch.nan if nothing else 1.0, device=batch.device)
    return {"loss": loss, "weight": torch.full((), 0 if nothing else len(batch), device=batch.device)}


def terms(net: Net, batch: Tensor, batch_idx: int) -> Any:
    """Two named terms with weights on the device, one of which is at times zero and its loss NaN."""
    found = batch[:, 0] > 0
    of_found = (net(batch).square().mean(1) * found).sum() / found.sum()
    return {"loss": {"all": net.loss(batch), "found": of_found}, "weight": {"all": len(batch), "found": found.sum()}}


def manual(net: Net, batch: Tensor, batch_idx: int) -> None:
    optimizer: Any = net.optimizers()
    optimizer.zero_grad()
    net.manual_backward(net.loss(batch))
    net.keep_gradients()
    optimizer.step()


def on_the_last_rank(batch_idx: int) -> bool:
    """Return whether this is the last rank's second step."""
    return (dist.get_rank(), batch_idx) == (dist.get_world_size() - 1, 1)


def faulty(net: Net, batch: Tensor, batch_idx: int) -> Any:
    return net.loss(batch) * (math.nan if on_the_last_rank(batch_idx) else 1)


def sparse(net: Net, batch: Tensor, batch_idx: int) -> Any:
    """The entries of the table differ by rank."""
    return net.loss(batch + net.table(torch.full((len(batch),), dist.get_rank() + len(batch), device=batch.device)))


def logged(net: Net, batch: Tensor, batch_idx: int) -> Any:
    loss = net.loss(batch)
    net.log("loss", loss)
    return loss


def gathering(net: Net, batch: Tensor, batch_idx: int) -> Any:
    """A loss of all ranks' rows."""
    return torch.pdist(gather(net(batch))).square().mean()


def badly_weighed(net: Net, batch: Tensor, batch_idx: int) -> Any:
    weight = math.nan if on_the_last_rank(batch_idx) else 1.0
    return {"loss": net.loss(batch), "weight": torch.full((), weight, device=batch.device)}


def signalled(net: Net, batch: Tensor, batch_idx: int) -> Any:
    if on_the_last_rank(batch_idx):
        os.kill(os.getpid(), signal.SIGTERM)
    return net.loss(batch)


class Save(Callback):
    """Saves after the second step, which an accelerator has not told of yet: its error comes first, without a file."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            file = File(tempfile.mkdtemp(), "step.ckpt")
            try:
                trainer.save_checkpoint(file)
            finally:
                assert not file.exists()


def monitor() -> Callback:
    return GradAvgMonitor(every_n_steps=2, check_parameters_every_n_steps=2)


class OneGpu(CUDAAccelerator):
    """The first GPU, which all ranks of a node share."""

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return [0] * devices


class Counter(Callback):
    """Counts, from the begin of a path's fourth window to that of the last."""

    def __init__(self, counts: Mapping[str, Count], path: Path) -> None:
        self.counts, self.window, self.first, self.last = counts, path.window, 3, path.steps - 1
        self.per_step: dict[str, float] = {}
        self._begun: dict[str, float] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first * self.window:
            self._begun = {name: count() for name, count in self.counts.items()}
        if batch_idx == self.last * self.window:
            for name, count in self.counts.items():
                self.per_step[name] = (count() - self._begun[name]) / (self.last - self.first)


@dataclass(frozen=True)
class Path:
    """A way in which the package touches a device.

    Attributes:
        body: What runs it, on every rank: `(path, device, counts) -> (outcome, counts per step)`.
        options: Those of `GradAvgStrategy`.
        step: The `training_step`.
        batch_norm: Whether the model has some.
        trainer: Options of the Trainer.
        nodes: The nodes of the ranks, one for each.
        steps: Optimizer steps of a training.
        waits: Waits of the host per optimizer step, by lines of the package, on every rank; None where nothing is
            counted, as no training goes on step after step. One per micro-batch is that for the signal to end of the
            micro-batch before, one per step under rules with weights that for the totals of the step before: both are
            long there. One more per micro-batch of a window, or of named terms, reads weights that are on the device.
        tolerance: Of the norm of what came of it, relative to that on the CPU.
        reference: Options of the Trainer for the run on the CPU, where those of the path are for accelerators.
        callbacks: What makes the callbacks of a training.
        raises: The error that ends it, and words of it.
    """

    body: Callable[..., tuple[Outcome, dict[str, float]]]
    options: Mapping[str, Any] = field(default_factory=dict)
    step: Step = plain
    batch_norm: bool = False
    trainer: Mapping[str, Any] = field(default_factory=dict)
    nodes: tuple[int, ...] = (0, 0)
    steps: int = 6
    waits: float | None = None
    tolerance: float = 1e-6
    reference: Mapping[str, Any] = field(default_factory=dict)
    callbacks: tuple[Callable[[], Callback], ...] = ()
    raises: tuple[type[BaseException], str | None] | None = None

    @property
    def window(self) -> int:
        """Micro-batches of an optimizer step."""
        return int(self.trainer.get("accumulate_grad_batches", 1))


def rows(samples: int, seed: int) -> Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed))


def batches_of_rank(count: int) -> list[Tensor]:
    """Return this rank's batches, of as many samples as the table says."""
    rank = dist.get_rank()
    return [rows(SAMPLES[number % len(SAMPLES)][rank], 100 * rank + number) for number in range(count)]


def trainer_on(device: str, path: Path, strategy: Any, *callbacks: Callback, **options: Any) -> Any:
    """Return a Trainer on a device, with the nodes of the path."""
    options |= {**path.trainer, **(path.reference if device == "cpu" else {}), "callbacks": [*callbacks]}
    accelerator = {"cpu": "cpu", "sim": SimAccelerator(), "cuda": OneGpu()}[device]
    return make_trainer(strategy, nodes=path.nodes, accelerator=accelerator, max_epochs=1, **options)


def fit(path: Path, device: str, counts: Mapping[str, Count]) -> tuple[Outcome, dict[str, float]]:
    """Train, and return the gradients of every step, buffers, logs, and the report of a monitor."""
    counter, module, given = Counter(counts, path), Net(path.step, path.batch_norm), dict(path.options)
    splits = bool({"split_batches", "equivalent_to", "reproducible"} & given.keys())
    strategy: Any = DDPStrategy() if given.pop("stock", False) else GradAvgStrategy(**given)
    callbacks = counter, *(make() for make in path.callbacks)
    trainer = trainer_on(device, path, strategy, *callbacks, use_distributed_sampler=splits)
    data: Any = rows(16 * path.steps, 1) if splits else batches_of_rank(path.steps * path.window)
    loader: Any = DataLoader(data, batch_size=16 if splits else None)
    with nullcontext() if path.raises is None else pytest.raises(path.raises[0], match=path.raises[1]):
        trainer.fit(module, loader)
    # An accelerator tells of a weight that is refused one step later, and that step is on zeros.
    gradients = [one for one in module.gradients if path.raises is None or bool(one.any())]
    outcome = [*gradients, *module.buffers(), *(value for _, value in sorted(trainer.callback_metrics.items()))]
    if monitor in path.callbacks:
        report = strategy.report()
        outcome.append(torch.tensor([report.gradient_norm, report.terms[0].normalizer, *report.terms[0].weights]))
    return on_cpu(outcome), counter.per_step


def on_cpu(tensors: Sequence[Tensor]) -> Outcome:
    return [one.detach().cpu().double() for one in tensors]


def evaluate(path: Path, device: str, counts: Mapping[str, Count]) -> tuple[Outcome, dict[str, float]]:
    """Validate and predict, and return what one process would log and predict."""
    module = Evaluated(plain, path.batch_norm)
    trainer = trainer_on(device, path, GradAvgStrategy(**path.options))
    loader: Any = DataLoader(rows(7, 1), batch_size=2)
    trainer.validate(module, loader, verbose=False)
    (logged,) = trainer.callback_metrics.values()
    return on_cpu([logged, *trainer.predict(module, loader)]), {}


def in_a_loop(path: Path, device: str, counts: Mapping[str, Count]) -> tuple[Outcome, dict[str, float]]:
    """Train by `GradAvgReducer`, or by `average_gradients`, with weights on the device, of which one is 0."""
    module, loop, averages = Net(plain, batch_norm=False).to(device), OfTorch(**WEIGHTED), "averages" in path.options
    model = module if averages else loop.set_up(module)
    optimizer = module.configure_optimizers()
    for number, batch in enumerate(batches_of_rank(6)):
        last, nothing = (number + 1) % path.window == 0, number == 3 and dist.get_rank() == 1
        weight = torch.tensor(0 if nothing else len(batch), device=device)
        with nullcontext() if averages else loop.no_sync(model, enabled=not last):
            loss = model(batch.to(device)).square().mean() * (math.nan if nothing else 1)
            if averages:
                loss.backward()
                average_gradients(module, weight=weight, **WEIGHTED)
            else:
                loop.backward(loss, weight=weight)
        if last:
            module.keep_gradients()
            optimizer.step()
            optimizer.zero_grad()
    loop.reducer.check()
    return on_cpu(module.gradients), {}


FOUR = (0, 0, 1, 1)
WINDOW: Mapping[str, Any] = {"accumulate_grad_batches": 4}
MIXED: Mapping[str, Any] = {"reference": {"precision": "32-true"}, "tolerance": 2e-2}
NAN = (ValueError, "rank 1: micro-batch 0 of the window: weight nan is not a finite number")


def by(hook: str) -> Mapping[str, Any]:
    return {**WEIGHTED, "ddp_comm_hook": getattr(hooks, hook)}


PATHS: Mapping[str, Path] = {
    "stock DDPStrategy": Path(fit, {"stock": True}, weighed, waits=0),
    "stock DDPStrategy, windows of 4": Path(fit, {"stock": True}, weighed, trainer=WINDOW, waits=0),
    **{
        name: Path(
            fit, {"reduction": name}, weighed if rule.uses_weight else plain, nodes=FOUR, waits=1 + rule.uses_weight
        )
        for name, rule in RULES.items()
    },
    "mean, windows of 4": Path(fit, {"reduction": "mean"}, trainer=WINDOW, waits=4),
    "weighted_mean, windows of 4": Path(fit, WEIGHTED, weighed, trainer=WINDOW, waits=9),
    "weights on the host": Path(fit, WEIGHTED, waits=2),
    "weights on the host, windows of 4": Path(fit, WEIGHTED, trainer=WINDOW, waits=5),
    "weight 0 that only the device knows": Path(fit, WEIGHTED, masked, waits=2),
    "named terms": Path(fit, WEIGHTED, terms, waits=3),
    # After the batches 1, 2 and 4 of 6 the ranks compare their parameters.
    "manual optimization": Path(fit, WEIGHTED, manual, waits=2.5),
    "static_graph, windows of 4": Path(fit, {**WEIGHTED, "static_graph": True}, trainer=WINDOW, waits=5),
    "gradient_as_bucket_view": Path(fit, {**WEIGHTED, "gradient_as_bucket_view": True}, weighed, waits=2),
    "bf16-true": Path(fit, WEIGHTED, weighed, trainer={"precision": "bf16-true"}, waits=2, **MIXED),
    **{f"hooks.{name}": Path(fit, by(name), weighed, nodes=FOUR, waits=2, tolerance=1e-2) for name in hooks.__all__},
    "bf16-mixed": Path(fit, WEIGHTED, trainer={"precision": "bf16-mixed"}, **MIXED),
    "16-mixed with a GradScaler": Path(fit, WEIGHTED, trainer={"precision": "16-mixed"}, **MIXED),
    "sparse gradients": Path(fit, WEIGHTED, sparse),
    "nonfinite=skip_step": Path(fit, {"nonfinite": "skip_step"}, faulty),
    "gather": Path(fit, WEIGHTED, gathering),
    "split_batches": Path(fit, {"split_batches": True}),
    "data_parallel": Path(fit, {"equivalent_to": "data_parallel", "num_replicas": 4}, logged, batch_norm=True),
    "reproducible": Path(fit, {"num_replicas": 4, "reproducible": True}, logged, batch_norm=True),
    "single_device": Path(fit, {"equivalent_to": "single_device"}, logged, batch_norm=True),
    "exact_evaluation": Path(evaluate, {"exact_evaluation": True}),
    "monitor": Path(fit, WEIGHTED, weighed, callbacks=(monitor,)),
    "NaN weight": Path(fit, WEIGHTED, badly_weighed, raises=NAN),
    "NaN weight before a checkpoint": Path(fit, WEIGHTED, badly_weighed, callbacks=(Save,), raises=NAN),
    "SIGTERM": Path(fit, {}, signalled, raises=(SIGTERMException, None)),
    "GradAvgReducer": Path(in_a_loop),
    "GradAvgReducer, windows of 2": Path(in_a_loop, trainer={"accumulate_grad_batches": 2}),
    "average_gradients": Path(in_a_loop, {"averages": True}),
}

SIMULATED = [
    name
    for name in PATHS
    if not any(word in name for word in ("static_graph", "sparse", "mixed"))
    and (name not in RULES or name in ("mean", "weighted_mean"))
]
"""What the simulated device can; of the rules, one with weights and one without."""


def perform(name: str, device: str, counts: Mapping[str, Count] | None = None) -> tuple[Outcome, dict[str, float]]:
    """Body: run a path on a device, and return what came of it, and the counts per step."""
    path = PATHS[name]
    return path.body(path, device, counts or {})
