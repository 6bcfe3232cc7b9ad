"""Every way in which the package touches a device, on devices that are not the CPU: the table is `PATHS`.

Each path runs on ranks with any device. What comes of it equals what comes of it on the CPU, but for roundings. Waits
of the host are as stated. `make gpu` runs all paths on CUDA and NCCL; the simulated device runs those of `SIMULATED`.
"""

from __future__ import annotations

import math
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path as File
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerator import SimAccelerator, SimStream, waits
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from ranks import RankError, RankPool, make_trainer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader
from toys import WEIGHTED, Recorded, TorchLoop

import lightning_gradavg
from benchmarks.one_gpu import OneGpu
from lightning_gradavg import GradAvgMonitor, GradAvgStrategy, average_gradients, gather, global_mean, hooks
from lightning_gradavg.reduction.rows import RowExchange
from lightning_gradavg.rules import RULES

Outcome = list[Tensor]
"""What came of a path, copied to the CPU: the same numbers on every device."""
Count = Callable[[], float]
"""Counts what happened on the device so far."""
Found = tuple[Outcome, dict[str, float]]
"""What came of a path, and what was counted per step."""
Step = Callable[["Net", Tensor, int], Any]
Worlds = Callable[[int], RankPool]

WIDTH = 8
STEPS = 6
SAMPLES = ((3, 4, 2, 1), (5, 2, 1, 4), (4, 4, 3, 2), (2, 6, 4, 3), (3, 3, 1, 5), (1, 5, 2, 2))
"""Of the batches of each rank."""


class Net(Recorded):
    """Several layers, so that buckets travel beside the backward; `step` is its `training_step`."""

    def __init__(self, step: Step, batch_norm: bool = False) -> None:
        super().__init__(lr=0.05)
        torch.manual_seed(0)
        self.net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
        if batch_norm:
            self.net.insert(1, nn.BatchNorm1d(WIDTH))
        if step is sparse:
            self.table = nn.Embedding(9, WIDTH, sparse=True)
        self.step = step
        self.automatic_optimization = step is not manual

    def forward(self, batch: Tensor) -> Any:
        return self.net(batch)

    def loss(self, batch: Tensor) -> Tensor:
        return self(batch).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.step(self, batch, batch_idx)


class Evaluated(Net):
    """Logs and predicts what each sample gives."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", self.loss(batch), batch_size=len(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self(batch).sum(1)


def plain(net: Net, batch: Tensor, batch_idx: int) -> Any:
    loss = net.loss(batch)
    net.log("loss", loss)
    return loss


def weighed(net: Net, batch: Tensor, batch_idx: int) -> Any:
    """The weight is on the device."""
    return {"loss": net.loss(batch), "weight": 1 + (batch[:, 0] > 0).sum()}


def odd(net: Net, batch: Tensor, batch_idx: int, *, weight: float = 1.0, factor: float = 1.0) -> Any:
    """On the last rank every second micro-batch has this weight, which only the device knows, and its loss a factor."""
    is_odd = on_last_rank() and batch_idx % 2 == 1
    on_device = partial(torch.full, (), device=batch.device)
    loss = net.loss(batch) * on_device(factor if is_odd else 1.0)
    return {"loss": loss, "weight": on_device(weight if is_odd else float(len(batch)))}


def on_last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def manual(net: Net, batch: Tensor, batch_idx: int) -> None:
    optimizer: Any = net.optimizers()
    optimizer.zero_grad()
    net.manual_backward(net.loss(batch))
    optimizer.step()


def sparse(net: Net, batch: Tensor, batch_idx: int) -> Any:
    """The entries of the table differ by rank."""
    return net.loss(batch + net.table(torch.full((len(batch),), dist.get_rank() + len(batch), device=batch.device)))


def gathering(net: Net, batch: Tensor, batch_idx: int) -> Any:
    """A loss of all ranks' rows."""
    return torch.pdist(gather(net(batch))).square().mean()


def of_all_ranks(net: Net, batch: Tensor, batch_idx: int) -> Any:
    """Two terms, one of a count on the device and one of a count on the host."""
    losses = net(batch).square().mean(1)
    found = batch[:, 0] > 0
    return sum(global_mean([losses[found].sum(), losses.sum()], [found.sum(), len(batch)]))


class Save(Callback):
    """Saves after the second step: where that step has an error, it comes first, without a file."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            file = File(tempfile.mkdtemp(), "step.ckpt")
            try:
                trainer.save_checkpoint(file)
            finally:
                assert not file.exists()


MONITOR = partial(GradAvgMonitor, every_n_steps=2)


class Counter(Callback):
    """Counts, from the begin of a path's fourth window to that of the last."""

    def __init__(self, counts: Mapping[str, Count], path: Path) -> None:
        self.counts = counts
        self.window = path.window
        self.first = 3
        self.last = STEPS - 1
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
        trainer: Options of the Trainer; precisions are for accelerators, and the CPU has float32.
        nodes: The nodes of the ranks, one for each.
        waits: Waits of the host per optimizer step, by lines of the package, on every rank; None where nothing is
            counted, as no training goes on step after step. One per step under a rule is that for the rows of its
            window. One more per micro-batch reads a weight that is on the device.
        tolerance: Of the norm of what came of it, relative to that on the CPU.
        callbacks: What makes the callbacks of a training.
        raises: The error that ends it, and words of it.
    """

    body: Callable[..., Found]
    options: Mapping[str, Any] = field(default_factory=dict)
    step: Step = plain
    trainer: Mapping[str, Any] = field(default_factory=dict)
    nodes: tuple[int, ...] = (0, 0)
    waits: float | None = None
    tolerance: float = 1e-6
    callbacks: tuple[Callable[[], Callback], ...] = ()
    raises: tuple[type[BaseException], str | None] | None = None

    @property
    def window(self) -> int:
        """Micro-batches of an optimizer step."""
        return int(self.trainer.get("accumulate_grad_batches", 1))


def rows(samples: int, seed: int) -> Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed))


def batches_of_rank(count: int) -> list[Tensor]:
    rank = dist.get_rank()
    return [rows(SAMPLES[number % len(SAMPLES)][rank], 100 * rank + number) for number in range(count)]


def trainer_on(device: str, path: Path, strategy: Any, *callbacks: Callback, **options: Any) -> Any:
    options |= {**path.trainer, "callbacks": [*callbacks]}
    if device == "cpu":
        options.pop("precision", None)
        options.pop("sync_batchnorm", None)  # DDP refuses it there
    accelerator = {"cpu": "cpu", "sim": SimAccelerator(), "cuda": OneGpu()}[device]
    return make_trainer(strategy, nodes=path.nodes, accelerator=accelerator, max_epochs=1, **options)


def fit(path: Path, device: str, counts: Mapping[str, Count]) -> Found:
    """Train, and return the gradients of every step, buffers, logs, and the report of a monitor."""
    counter = Counter(counts, path)
    given = dict(path.options)
    splits = bool({"split_batches", "equivalent_to", "reproducible"} & given.keys())
    module = Net(path.step, batch_norm=splits)
    strategy: Any = DDPStrategy() if given.pop("stock", False) else GradAvgStrategy(**given)
    callbacks = counter, *(make() for make in path.callbacks)
    trainer = trainer_on(device, path, strategy, *callbacks, use_distributed_sampler=splits)
    data: Any = rows(16 * STEPS, 1) if splits else batches_of_rank(STEPS * path.window)
    loader: Any = DataLoader(data, batch_size=16 if splits else None)
    with nullcontext() if path.raises is None else pytest.raises(path.raises[0], match=path.raises[1]):
        trainer.fit(module, loader)
    outcome = [
        *module.seen.gradients,
        *module.buffers(),
        *(value for _, value in sorted(trainer.callback_metrics.items())),
    ]
    if MONITOR in path.callbacks:
        report = strategy.report()
        outcome.append(torch.tensor([report.gradient_norm, report.normalizer, report.weight]))
    return on_cpu(outcome), counter.per_step


def on_cpu(tensors: Sequence[Tensor]) -> Outcome:
    return [one.detach().cpu().double() for one in tensors]


def evaluate(path: Path, device: str, counts: Mapping[str, Count]) -> Found:
    module = Evaluated(plain)
    trainer = trainer_on(device, path, GradAvgStrategy(**path.options))
    loader: Any = DataLoader(rows(7, 1), batch_size=2)
    trainer.validate(module, loader, verbose=False)
    (logged,) = trainer.callback_metrics.values()
    return on_cpu([logged, *trainer.predict(module, loader)]), {}


def in_a_loop(path: Path, device: str, counts: Mapping[str, Count]) -> Found:
    """Train by `GradAvgReducer`, or by `average_gradients`, with weights on the device, of which one is 0."""
    module = Net(plain).to(device)
    loop = TorchLoop(**WEIGHTED)
    averages = "averages" in path.options
    model = module if averages else loop.set_up(module)
    optimizer = module.configure_optimizers()
    for number, batch in enumerate(batches_of_rank(6)):
        last = (number + 1) % path.window == 0
        nothing = number == 3 and dist.get_rank() == 1
        weight = torch.tensor(0 if nothing else len(batch), device=device)
        with nullcontext() if averages else loop.no_sync(model, enabled=not last):
            loss = model(batch.to(device)).square().mean() * (math.nan if nothing else 1)
            if averages:
                loss.backward()
                average_gradients(module, weight=weight, **WEIGHTED)
            else:
                loop.backward(loss, weight=weight)
        if last:
            module.on_before_optimizer_step(optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return on_cpu(module.seen.gradients), {}


FOUR = (0, 0, 1, 1)
WINDOW: Mapping[str, Any] = {"accumulate_grad_batches": 4}
SYNCHRONIZED: Mapping[str, Any] = {"sync_batchnorm": True}
NAN = (ValueError, "on rank 1: weight nan is not a finite number")


PATHS: Mapping[str, Path] = {
    "stock DDPStrategy": Path(fit, {"stock": True}, weighed, waits=0),
    "stock DDPStrategy, windows of 4": Path(fit, {"stock": True}, weighed, trainer=WINDOW, waits=0),
    **{
        name: Path(fit, {"reduction": name}, weighed if rule.uses_weight else plain, waits=2 * rule.uses_weight)
        for name, rule in RULES.items()
        if "node" not in name
    },
    **{name: Path(fit, {"reduction": name}, nodes=FOUR, waits=0) for name in RULES if "node" in name},
    "mean, windows of 4": Path(fit, {"reduction": "mean"}, trainer=WINDOW, waits=0),
    "weighted_mean, windows of 4": Path(fit, WEIGHTED, weighed, trainer=WINDOW, waits=5),
    "weights on the host": Path(fit, WEIGHTED, waits=1),
    "weights on the host, windows of 4": Path(fit, WEIGHTED, trainer=WINDOW, waits=1),
    "weight 0 that only the device knows": Path(fit, WEIGHTED, partial(odd, weight=0, factor=math.nan), waits=2),
    # After the batches 1, 2 and 4 of 6 the ranks compare their parameters.
    "manual optimization": Path(fit, WEIGHTED, manual, waits=1.5),
    "static_graph": Path(fit, {"static_graph": True}, waits=0),
    "gradient_as_bucket_view": Path(fit, {**WEIGHTED, "gradient_as_bucket_view": True}, weighed, waits=2),
    "bf16-true": Path(fit, WEIGHTED, weighed, trainer={"precision": "bf16-true"}, waits=2, tolerance=2e-2),
    **{
        f"hooks.{name}": Path(
            fit,
            {**WEIGHTED, "ddp_comm_hook": getattr(hooks, name)},
            weighed,
            nodes=FOUR if "node" in name else (0, 0),
            waits=2,
            tolerance=1e-2,
        )
        for name in hooks.__all__
    },
    "bf16-mixed": Path(fit, WEIGHTED, trainer={"precision": "bf16-mixed"}, tolerance=2e-2),
    "16-mixed with a GradScaler": Path(fit, WEIGHTED, trainer={"precision": "16-mixed"}, tolerance=2e-2),
    "sparse gradients": Path(fit, WEIGHTED, sparse),
    "gather": Path(fit, WEIGHTED, gathering),
    # One more wait reads both totals and the count together; the exchange is one of the host here.
    "global_mean": Path(fit, {"reduction": "mean"}, of_all_ranks, waits=1),
    "split_batches": Path(fit, {"split_batches": True}),
    "data_parallel": Path(fit, {"equivalent_to": "data_parallel", "num_replicas": 4}),
    "reproducible": Path(fit, {"num_replicas": 4, "reproducible": True}, tolerance=0),
    "single_device": Path(fit, {"equivalent_to": "single_device"}),
    "single_device, sync_batchnorm": Path(fit, {"equivalent_to": "single_device"}, trainer=SYNCHRONIZED),
    "exact_evaluation": Path(evaluate, {"exact_evaluation": True}),
    "monitor": Path(fit, WEIGHTED, weighed, callbacks=(MONITOR,)),
    "NaN weight": Path(fit, WEIGHTED, partial(odd, weight=math.nan), raises=NAN),
    "NaN weight before a checkpoint": Path(fit, WEIGHTED, partial(odd, weight=math.nan), callbacks=(Save,), raises=NAN),
    "GradAvgReducer": Path(in_a_loop),
    "GradAvgReducer, windows of 2": Path(in_a_loop, trainer={"accumulate_grad_batches": 2}),
    "average_gradients": Path(in_a_loop, {"averages": True}),
}

STREAMS_OR_KERNELS = re.compile("static_graph|sparse|mixed")
SAME_CODE = re.compile(r"sum|mean_of|bucket_view|by_node$|by_node_bfloat16|stock.*windows")
SIMULATED = [name for name in PATHS if not (STREAMS_OR_KERNELS.search(name) or SAME_CODE.search(name))]
"""What the simulated device can do, less what runs the code of other paths."""

PACKAGE = str(File(lightning_gradavg.__file__).parent)
WAITED = "called a synchronizing CUDA operation"
PROTOTYPE = "Synchronization debug mode is a prototype feature"
"""Torch 2.11 warns so where the mode is set."""
STREAM_OF_DDP = "The AccumulateGrad node's stream does not match"
"""Torch 2.11 warns so in the first backward of Lightning's `DDPStrategy`, which wraps the model in a stream beside."""


def perform(name: str, device: str, counts: Mapping[str, Count]) -> Found:
    return PATHS[name].body(PATHS[name], device, counts)


def on_the_cpu(name: str) -> Found:
    """Body: run a path on the CPU; Lightning warns where there is a GPU that it does not use."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "GPU available but not used")
        return perform(name, "cpu", {})


def on_sim(name: str) -> Found:
    with waits() as found:
        return perform(name, "sim", {"waits": lambda: sum(line.startswith(PACKAGE) for line in found)})


def now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def on_cuda(name: str) -> Found:
    """Body: run a path, count implicit waits that CUDA tells of at lines of the package, and time the steps."""
    with warnings.catch_warnings(record=True) as found:
        warnings.filterwarnings("always", WAITED)
        warnings.filterwarnings("ignore", PROTOTYPE)
        warnings.filterwarnings("ignore", STREAM_OF_DDP)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            waited: Count = lambda: sum(one.filename.startswith(PACKAGE) for one in found)  # noqa: E731
            return perform(name, "cuda", {"waits": waited, "seconds": now})
        finally:
            torch.cuda.set_sync_debug_mode("default")


def run_beside_the_cpu(body: Callable[[str], Found], name: str, pools: Worlds, world: Worlds) -> list[dict[str, float]]:
    """Run a path on a device, assert that every rank gets what it gets on the CPU, and return what they count."""
    path = PATHS[name]
    ranks = len(path.nodes)
    found = pools(ranks).run(body, name)
    on_cpu = world(ranks).run(on_the_cpu, name)
    # Kernels of a GPU add up float32 in another order than those of the CPU.
    tolerance = path.tolerance if body is on_sim else max(path.tolerance, 2e-5)
    for (outcome, _), (expected, _) in zip(found, on_cpu, strict=True):
        assert [one.shape for one in outcome] == [one.shape for one in expected]
        for mine, its in zip(outcome, expected, strict=True):
            assert (mine - its).norm() <= tolerance * its.norm().clamp(min=1e-12)
    return [counted for _, counted in found]


@pytest.mark.parametrize("name", SIMULATED)
def test_a_path_equals_that_on_the_cpu_and_waits_as_stated(name: str, sim_world: Worlds, world: Worlds) -> None:
    for counted in run_beside_the_cpu(on_sim, name, sim_world, world):
        assert PATHS[name].waits in (None, counted.get("waits"))


@pytest.mark.parametrize("name", [name for name in PATHS if STREAMS_OR_KERNELS.search(name)])
def test_a_path_that_only_a_gpu_can_judge_runs_on_the_cpu(name: str, world: Worlds) -> None:
    """Nobody may have a GPU for months: what `make gpu` runs must not be refused meanwhile."""
    for outcome, _ in world(2).run(on_the_cpu, name):
        assert STEPS <= len(outcome)
        assert all(gradient.isfinite().all() for gradient in outcome)


def test_a_replica_normalizes_no_other_rows(sim_world: Worlds) -> None:
    """The Trainer makes synchronized layers of batch norm after the strategy's first look at the module."""
    path = Path(fit, {"equivalent_to": "data_parallel"}, trainer=SYNCHRONIZED)
    with pytest.raises(RankError, match=r"SyncBatchNorm in net\.1: with equivalent_to='data_parallel'"):
        sim_world(2).run(fit, path, "sim", {})


def rows_beside_the_model() -> tuple[list[list[float]], int, int]:
    """Body: exchange a row; return all rows, how often the device waited for the model, and how often the host did."""
    device = torch.device("sim", 0)
    with mock.patch.object(SimStream, "wait_stream") as waited, waits() as found:
        rows = RowExchange([1.0, dist.get_rank()], device, dist.group.WORLD).read()
    return rows, waited.call_count, len(found)


def test_rows_wait_for_other_ranks_and_not_for_the_forward(sim_world: Worlds) -> None:
    """They are launched after the forward, on a stream that does not wait for it. The host waits once."""
    assert [([[1, 0], [1, 1]], 0, 1)] * 2 == sim_world(2).run(rows_beside_the_model)


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """Print a table after the last path: those that are as on the CPU, with what was counted per step."""
    rows = Table("path", "waits", "seconds", title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    yield rows
    Console().print("\n", rows)


@pytest.mark.gpu
def test_nccl_refuses_sparse_gradients(cuda_world: Worlds) -> None:
    """So it does under stock DDP: the text is of torch's `ProcessGroupNCCL`."""
    with pytest.raises(RankError, match="NCCL does not support all_reduce with sparse tensors"):
        cuda_world(2).run(on_cuda, "sparse gradients")


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in PATHS if name != "sparse gradients"])
def test_a_path_on_cuda_and_nccl(name: str, cuda_world: Worlds, world: Worlds, table: Table) -> None:
    counted, *_ = run_beside_the_cpu(on_cuda, name, cuda_world, world)
    table.add_row(name, *(f"{counted.get(what, math.nan):.3g}" for what in ("waits", "seconds")))
