"""Every way in which the package touches a device, as bodies that run on ranks with any: the table is `PATHS`.

Each body returns what came of it, on the CPU, and is the same on all devices but for roundings. `tests/gpu.py` runs all
of them on CUDA and NCCL, `tests/test_accelerator.py` runs `SIMULATED` on the simulated device.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerator import make_sim_trainer
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from ranks import make_trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_gradavg import GradAvgMonitor, GradAvgReducer, GradAvgStrategy, average_gradients, gather, hooks
from lightning_gradavg.rules import RULES

__all__ = ["COUNTED", "PATHS", "SIMULATED", "Count", "Outcome", "Path", "perform"]

WIDTH = 8
SAMPLES = ((3, 4, 2, 1), (5, 2, 1, 4), (4, 4, 3, 2), (2, 6, 4, 3), (3, 3, 1, 5), (1, 5, 2, 2))
"""Of the batches of each rank; the window of every other one is another."""

Outcome = dict[str, list[float]]
"""What came of a body, by name: the same numbers on every device."""

Count = Callable[[], float]
"""Counts what happened on the device so far."""


class Net(LightningModule):
    """Several layers, so that buckets travel beside the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
        self.gradients: list[Tensor] = []

    def forward(self, batch: Tensor) -> Any:
        return self.net(batch)

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def keep_gradients(self) -> None:
        found = [one.grad.detach().to_dense() for one in self.parameters() if one.grad is not None]
        self.gradients.append(torch.cat([one.flatten() for one in found]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.automatic_optimization:
            self.keep_gradients()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class OnDevice(Net):
    """Its weights are tensors on the device."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "weight": 1 + (batch[:, 0] > 0).sum()}


class Masked(OnDevice):
    """On rank 1 every second micro-batch has weight 0, which only the device knows, and a loss that is NaN."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        nothing = dist.get_rank() == 1 and batch_idx % 2 == 1
        loss = self.loss(batch) * torch.full((), torch.nan if nothing else 1.0, device=batch.device)
        return {"loss": loss, "weight": torch.full((), 0 if nothing else len(batch), device=batch.device)}


class Half(OnDevice):
    """Its parameters are bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch.bfloat16()).square().mean()


class Terms(Net):
    """Two named terms with weights on the device, one of which is at times zero and its loss NaN."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        found = batch[:, 0] > 0
        masked = (self.net(batch).square().mean(1) * found).sum() / found.sum()
        return {
            "loss": {"all": self.loss(batch), "masked": masked},
            "weight": {"all": len(batch), "masked": found.sum()},
        }


class Manual(Net):
    """Its own loop."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.keep_gradients()
        optimizer.step()


class Faulty(Net):
    """Its loss is no number on rank 1 in the second step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch) * (float("nan") if (dist.get_rank(), batch_idx) == (1, 1) else 1)


class Sparse(Net):
    """A table with sparse gradients, of entries that differ by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH, sparse=True)

    def loss(self, batch: Tensor) -> Tensor:
        rows = torch.full((len(batch),), dist.get_rank() + len(batch), device=batch.device)
        return super().loss(batch + self.table(rows))


class BatchNorm(Net):
    """Statistics of a batch, dropout, and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


class Gathering(Net):
    """A loss of all ranks' rows, which `gather` brings."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return torch.pdist(gather(self.net(batch))).square().mean()


class Evaluated(Net):
    """Logs of what each sample gives."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", self.loss(batch), batch_size=len(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).sum(1)


class BadWeight(Net):
    """The last rank's weight is NaN in the second step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        bad = batch_idx == 1 and dist.get_rank() == dist.get_world_size() - 1
        return {"loss": self.loss(batch), "weight": torch.full((), torch.nan if bad else 1.0, device=batch.device)}


class Signalled(Net):
    """The last rank gets SIGTERM in the second step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == 1 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.loss(batch)


class OnNodes(GradAvgStrategy):
    """Sees the nodes that it is told of, where each process is a node of its own to Lightning."""

    nodes: Sequence[int] | None = None

    @property
    def node_rank(self) -> int:
        return self._environment_node if self.nodes is None else self.nodes[dist.get_rank()]

    @property
    def _environment_node(self) -> int:
        assert self.cluster_environment is not None
        return self.cluster_environment.node_rank()


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
        module: The module that is trained.
        trainer: Options of the Trainer.
        nodes: The nodes of the ranks, one for each.
        steps: Optimizer steps of a training.
        waits: Waits of the host per optimizer step, by lines of the package, on every rank; None where nothing is
            counted, as no training goes on step after step. One per micro-batch is that for the signal to end of the
            micro-batch before, one per step under rules with weights that for the totals of the step before: both are
            long there. One more per micro-batch of a window, or of named terms, reads weights that are on the device.
        tolerance: Of the norm of what came of it, relative to that on the CPU.
        reference: Options of the Trainer for the run on the CPU, where those of the path are for accelerators.
    """

    body: Callable[..., tuple[Outcome, dict[str, float]]]
    options: Callable[[], Mapping[str, Any]] = dict
    module: type[Net] = Net
    trainer: Mapping[str, Any] = field(default_factory=dict)
    nodes: tuple[int, ...] = (0, 0)
    steps: int = 6
    waits: float | None = None
    tolerance: float = 1e-6
    reference: Mapping[str, Any] = field(default_factory=dict)

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


def trainer_on(device: str, path: Path, strategy: Any, counter: Callback | None = None, **options: Any) -> Any:
    """Return a Trainer on a device, with the nodes of the path."""
    options = {"max_epochs": 1, "use_distributed_sampler": False, **path.trainer, **options}
    options["callbacks"] = [*options.get("callbacks", ()), *([counter] if counter is not None else [])]
    if device == "sim":
        return make_sim_trainer(strategy, nodes=path.nodes, **options)
    if device == "cpu":
        return make_trainer(strategy, nodes=path.nodes, **{**options, **path.reference})
    if isinstance(strategy, OnNodes):
        strategy.nodes = path.nodes
    return make_trainer(strategy, nodes=range(len(path.nodes)), **{"accelerator": "gpu", "devices": 1, **options})


def fit(path: Path, device: str, counts: Mapping[str, Count]) -> tuple[Outcome, dict[str, float]]:
    """Train, and return the gradients of every step."""
    counter, module = Counter(counts, path), path.module()
    given = path.options()
    trainer = trainer_on(device, path, DDPStrategy() if given.get("stock") else OnNodes(**given), counter)
    trainer.fit(module, DataLoader(batches_of_rank(path.steps * path.window), batch_size=None))  # type: ignore[arg-type]  # a list is a data set
    return outcome_of(module), counter.per_step


def outcome_of(module: Net) -> Outcome:
    return {f"gradient {step}": found.double().tolist() for step, found in enumerate(module.gradients)}


def fit_split(path: Path, device: str, counts: Mapping[str, Count]) -> tuple[Outcome, dict[str, float]]:
    """Train on global batches, and return gradients, buffers and logs."""
    counter, module = Counter(counts, path), path.module()
    trainer = trainer_on(device, path, OnNodes(**path.options()), counter, use_distributed_sampler=True)
    trainer.fit(module, DataLoader(rows(16 * path.steps, 1), batch_size=16))  # type: ignore[arg-type]  # a tensor is a data set
    buffers = {name: one.double().flatten().tolist() for name, one in module.named_buffers()}
    logged = {name: [float(value)] for name, value in trainer.callback_metrics.items()}
    return {**outcome_of(module), **buffers, **logged}, counter.per_step


def evaluate(path: Path, device: str, counts: Mapping[str, Count]) -> tuple[Outcome, dict[str, float]]:
    """Validate and predict, and return what one process would log and predict."""
    module = path.module()
    trainer = trainer_on(device, path, OnNodes(**path.options()), use_distributed_sampler=True)
    loader: Any = DataLoader(rows(7, 1), batch_size=2)  # type: ignore[arg-type]  # a tensor is a data set
    trainer.validate(module, loader, verbose=False)
    logged = {name: [float(value)] for name, value in trainer.callback_metrics.items()}
    predicted = trainer.predict(module, loader)
    return {**logged, "predicted": [float(value) for batch in predicted for value in batch]}, {}


def monitored(path: Path, device: str, counts: Mapping[str, Count]) -> tuple[Outcome, dict[str, float]]:
    """Train under the monitor, and return its last report."""
    strategy, module = OnNodes(**path.options()), path.module()
    monitor = GradAvgMonitor(every_n_steps=2, check_parameters_every_n_steps=2)
    trainer = trainer_on(device, path, strategy, callbacks=[monitor])
    trainer.fit(module, DataLoader(batches_of_rank(path.steps * path.window), batch_size=None))  # type: ignore[arg-type]  # a list is a data set
    report = strategy.report()
    summary = [report.gradient_norm, report.terms[0].normalizer, *report.terms[0].weights]
    return {**outcome_of(module), "report": [float(value) for value in summary]}, {}


def refused(path: Path, device: str, counts: Mapping[str, Count]) -> tuple[Outcome, dict[str, float]]:
    """Train until a weight is refused, and return after how many steps, and that of the refused one changed nothing."""
    module, trainer = path.module(), trainer_on(device, path, OnNodes(**path.options()))
    with pytest.raises(ValueError, match="rank 1: micro-batch 0 of the window: weight nan is not a finite number"):
        trainer.fit(module, DataLoader(batches_of_rank(path.steps), batch_size=None))  # type: ignore[arg-type]  # a list is a data set
    # On an accelerator it is told one step later; what is stepped on is zero.
    assert all(bool((gradient == 0).all()) for gradient in module.gradients[1:])
    return {"first gradient": module.gradients[0].double().tolist()}, {}


def saved(path: Path, device: str, counts: Mapping[str, Count]) -> tuple[Outcome, dict[str, float]]:
    """Save a checkpoint after the step of a weight that is refused: the error comes first, and there is no file."""
    module, folder = path.module(), tempfile.mkdtemp()
    file = os.path.join(folder, "step.ckpt")  # noqa: PTH118  # `Path` is another one here

    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:  # the step of that weight, which an accelerator has not told of yet
                trainer.save_checkpoint(file)

    trainer = trainer_on(device, path, OnNodes(**path.options()), callbacks=[Save()])
    with pytest.raises(ValueError, match="weight nan is not a finite number"):
        trainer.fit(module, DataLoader(batches_of_rank(path.steps), batch_size=None))  # type: ignore[arg-type]  # a list is a data set
    return {"files": [float(os.path.exists(file))]}, {}  # noqa: PTH110  # as above


def terminated(path: Path, device: str, counts: Mapping[str, Count]) -> tuple[Outcome, dict[str, float]]:
    """Train until a signal to one rank ends all, and return after how many steps."""
    module = path.module()
    trainer = trainer_on(device, path, OnNodes(**path.options()))
    with pytest.raises(SIGTERMException):
        trainer.fit(module, DataLoader(batches_of_rank(path.steps), batch_size=None))  # type: ignore[arg-type]  # a list is a data set
    return {"steps": [float(trainer.global_step)]}, {}


def plain_loop(path: Path, device: str, counts: Mapping[str, Count]) -> tuple[Outcome, dict[str, float]]:
    """Reduce a plain loop's gradients by `average_gradients`."""
    module = path.module().to(device)
    optimizer = module.configure_optimizers()
    for batch in batches_of_rank(path.steps):
        optimizer.zero_grad()
        module.loss(batch.to(device)).backward()
        average_gradients(module, weight=len(batch), **path.options())
        module.keep_gradients()
        optimizer.step()
    return outcome_of(module), {}


def weighed_losses(path: Path, device: str, counts: Mapping[str, Count]) -> tuple[Outcome, dict[str, float]]:
    """Train under DDP with `GradAvgReducer`, with weights on the device, of which one is 0 and its loss NaN."""
    module, window = Net().to(device), path.window
    model, reducer = DistributedDataParallel(module), GradAvgReducer(reduction="weighted_mean")
    reducer.register(model)
    optimizer = module.configure_optimizers()
    for number, batch in enumerate(batches_of_rank(6)):
        last, nothing = (number + 1) % window == 0, number == 3 and dist.get_rank() == 1
        with nullcontext() if last else model.no_sync():
            loss = model(batch.to(device)).square().mean() * (math.nan if nothing else 1)
            reducer.weigh(loss, weight=torch.tensor(0 if nothing else len(batch), device=device)).backward()
        if last:
            module.keep_gradients()
            optimizer.step()
            optimizer.zero_grad()
    reducer.check()
    return outcome_of(module), {}


def options(**given: Any) -> Callable[[], Mapping[str, Any]]:
    return lambda: given


FOUR = (0, 0, 1, 1)
WEIGHTED: Mapping[str, Any] = {"reduction": "weighted_mean"}
WINDOW: Mapping[str, Any] = {"accumulate_grad_batches": 4}

MIXED: Mapping[str, Any] = {"reference": {"precision": "32-true"}, "tolerance": 2e-2}
STOCK = options(stock=True)

PATHS: Mapping[str, Path] = {
    "stock DDPStrategy": Path(fit, STOCK, OnDevice, waits=0),
    "stock DDPStrategy, windows of 4": Path(fit, STOCK, OnDevice, WINDOW, waits=0),
    **{
        name: Path(
            fit, options(reduction=name), OnDevice if rule.uses_weight else Net, nodes=FOUR, waits=1 + rule.uses_weight
        )
        for name, rule in RULES.items()
    },
    "mean, windows of 4": Path(fit, options(reduction="mean"), trainer=WINDOW, waits=4),
    "weighted_mean, windows of 4": Path(fit, options(**WEIGHTED), OnDevice, WINDOW, waits=9),
    "weights on the host": Path(fit, options(**WEIGHTED), waits=2),
    "weights on the host, windows of 4": Path(fit, options(**WEIGHTED), trainer=WINDOW, waits=5),
    "weight 0 that only the device knows": Path(fit, options(**WEIGHTED), Masked, waits=2),
    "named terms": Path(fit, options(**WEIGHTED), Terms, waits=3),
    # After the batches 1, 2 and 4 of 6 the ranks compare their parameters.
    "manual optimization": Path(fit, options(**WEIGHTED), Manual, waits=2.5),
    "static_graph, windows of 4": Path(fit, options(**WEIGHTED, static_graph=True), trainer=WINDOW, waits=5),
    "gradient_as_bucket_view": Path(fit, options(**WEIGHTED, gradient_as_bucket_view=True), OnDevice, waits=2),
    "bfloat16 parameters": Path(fit, options(**WEIGHTED), Half, waits=2, tolerance=2e-2),
    **{
        f"hooks.{name}": Path(
            fit, options(**WEIGHTED, ddp_comm_hook=getattr(hooks, name)), OnDevice, nodes=FOUR, waits=2, tolerance=1e-2
        )
        for name in hooks.__all__
    },
    "hooks.bfloat16, windows of 4": Path(
        fit, options(**WEIGHTED, ddp_comm_hook=hooks.bfloat16), OnDevice, WINDOW, waits=9, tolerance=1e-2
    ),
    "bf16-mixed": Path(fit, options(**WEIGHTED), trainer={"precision": "bf16-mixed"}, **MIXED),
    "16-mixed with a GradScaler": Path(fit, options(**WEIGHTED), trainer={"precision": "16-mixed"}, **MIXED),
    "sparse gradients": Path(fit, options(**WEIGHTED), Sparse),
    "nonfinite=skip_step": Path(fit, options(nonfinite="skip_step"), Faulty),
    "gather": Path(fit, options(**WEIGHTED), Gathering),
    "split_batches": Path(fit_split, options(split_batches=True)),
    "data_parallel": Path(fit_split, options(equivalent_to="data_parallel", num_replicas=4), BatchNorm),
    "reproducible": Path(fit_split, options(num_replicas=4, reproducible=True), BatchNorm),
    "single_device": Path(fit_split, options(equivalent_to="single_device"), BatchNorm),
    "exact_evaluation": Path(evaluate, options(exact_evaluation=True), Evaluated),
    "monitor": Path(monitored, options(**WEIGHTED), OnDevice),
    "NaN weight": Path(refused, options(**WEIGHTED), BadWeight),
    "NaN weight before a checkpoint": Path(saved, options(**WEIGHTED), BadWeight),
    "SIGTERM": Path(terminated, module=Signalled),
    "GradAvgReducer": Path(weighed_losses),
    "GradAvgReducer, windows of 2": Path(weighed_losses, trainer={"accumulate_grad_batches": 2}),
    "average_gradients": Path(plain_loop, options(**WEIGHTED)),
}

SIMULATED = [
    name
    for name, path in PATHS.items()
    if (path.waits is not None or "Reducer" in name or "NaN" in name)
    and "static_graph" not in name  # DDP pins memory for it, which the simulated device cannot
    and (name not in RULES or name in ("mean", "weighted_mean"))
]
"""Those with stated waits of the host, and a few more; of the rules, one with weights and one without."""


COUNTED = (
    "stock DDPStrategy",
    "stock DDPStrategy, windows of 4",
    "mean",
    "mean, windows of 4",
    "weights on the host",
    "weights on the host, windows of 4",
    "weighted_mean",
    "weighted_mean, windows of 4",
    "hooks.bfloat16",
)
"""Those whose operators docs/accelerators.md lists."""


def perform(name: str, device: str, counts: Mapping[str, Count] | None = None) -> tuple[Outcome, dict[str, float]]:
    """Body: run a path on a device, and return what came of it, and the counts per step."""
    path = PATHS[name]
    return path.body(path, device, counts or {})
