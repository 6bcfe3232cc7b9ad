"""The ways of reducing gradients that are measured: each trains the same model for a few steps."""

# DDP compares a hook's annotations with the real objects, so this module must not postpone their evaluation.

import copy
import gc
import importlib
import importlib.util
import inspect
import statistics
import time
import typing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader

from benchmarks.models import LEARNING_RATE, Measured
from lightning_gradavg import GradAvgStrategy, average_gradients
from lightning_gradavg.rules import RULES

__all__ = ["BASELINE", "COMPUTE", "EXCHANGE", "Setting", "Variant", "measure", "unavailable", "variants"]

BASELINE = "DDP"
COMPUTE = "compute only"
EXCHANGE = "communication only"

_REPLICATE = "torch.distributed._composable.replicate_with_fsdp"

_TERMINATION = "_broadcast_sigterm_tensor"

WARMUP = 3
"""Steps before the timed ones; DDP rebuilds its buckets after the first."""

Batch = tuple[Tensor, Tensor]


@dataclass
class Setting:
    """What a variant works with.

    Attributes:
        module: The model, the same object in every variant.
        batch: This rank's batch, on the device.
        device: Where both are.
        steps: Timed steps of a block.
        nodes: Number of nodes.
    """

    module: Measured
    batch: Batch
    device: torch.device
    steps: int
    nodes: int


@dataclass(frozen=True)
class Block:
    """The timed steps of one variant in one round, on this rank.

    Attributes:
        seconds: Median time of a step.
        processor: Processor seconds of a step, user and system, of all threads.
        sent: Bytes that the interface sent, per step.
    """

    seconds: float
    processor: float
    sent: float


class Clock:
    """Takes the time between successive calls of `tick`, the first `WARMUP` intervals left out.

    Args:
        steps: Intervals to time.
        device: Waited for at each tick.
        sent: Returns the bytes sent since the machine began.
    """

    def __init__(self, steps: int, device: torch.device, sent: Callable[[], int]) -> None:
        self._steps = steps
        self._device = device
        self._sent = sent
        self._times: list[float] = []
        self._counters: list[tuple[float, int]] = []

    def tick(self) -> None:
        """A step begins, which ends the one before."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._times.append(time.perf_counter())
        if len(self._times) - 1 in (WARMUP, WARMUP + self._steps):
            self._counters.append((time.process_time(), self._sent()))

    def block(self) -> Block:
        """Return what was measured."""
        timed = self._times[WARMUP : WARMUP + self._steps + 1]
        (processor, sent), (processor_after, sent_after) = self._counters
        return Block(
            statistics.median(after - before for before, after in pairwise(timed)),
            (processor_after - processor) / self._steps,
            (sent_after - sent) / self._steps,
        )


@dataclass(frozen=True)
class Variant:
    """One way of reducing gradients.

    Attributes:
        name: What the table calls it.
        run: Trains for `WARMUP + setting.steps` steps, ticking once before each and once after the last.
    """

    name: str
    run: Callable[[Setting, Clock], None]


def _loop(
    setting: Setting,
    clock: Clock,
    model: nn.Module,
    reduce: Callable[[], None] = lambda: None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Train as a plain PyTorch loop does."""
    optimizer = SGD(model.parameters(), lr=LEARNING_RATE)
    inputs, target = setting.batch
    for _ in range(WARMUP + setting.steps):
        clock.tick()
        optimizer.zero_grad()
        with context():
            logits = model(inputs)
            nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten()).backward()
        reduce()
        optimizer.step()
    clock.tick()


def _ddp(setting: Setting, **options: Any) -> DistributedDataParallel:
    device_ids = [setting.device] if setting.device.type == "cuda" else None
    return DistributedDataParallel(setting.module, device_ids=device_ids, **options)


def _compute(setting: Setting, clock: Clock) -> None:
    _loop(setting, clock, setting.module)


def _exchange(setting: Setting, clock: Clock) -> None:
    """Sum the gradients' bytes in buckets of DDP's size, without any computation."""
    total = sum(parameter.numel() for parameter in setting.module.parameters())
    buckets = torch.zeros(total, device=setting.device).split(25 * 2**20 // 4)
    for _ in range(WARMUP + setting.steps):
        clock.tick()
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            assert work is not None
            work.wait()
    clock.tick()


def _each_parameter(setting: Setting, clock: Clock) -> None:
    """The loop of PyTorch's early tutorial: an all-reduce per parameter after the backward, then a division."""

    def reduce() -> None:
        for parameter in setting.module.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= dist.get_world_size()

    _loop(setting, clock, setting.module, reduce)


def _average_gradients(reduction: str) -> Callable[[Setting, Clock], None]:
    def run(setting: Setting, clock: Clock) -> None:
        weight = _weight() if RULES[reduction].uses_weight else None
        _loop(
            setting,
            clock,
            setting.module,
            lambda: average_gradients(setting.module, reduction=reduction, weight=weight),
        )

    return run


def _raw_ddp(hook: Callable[..., Any] | None = None, state: Callable[[], Any] = lambda: None, **options: Any) -> Any:
    def run(setting: Setting, clock: Clock) -> None:
        model = _ddp(setting, **options)
        if hook is not None:
            model.register_comm_hook(state(), hook)
        _loop(setting, clock, model)

    return run


def _bfloat16_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Torch's hook under another name: by its own it is refused on builds without CUDA, where it works."""
    return default_hooks.bf16_compress_hook(state, bucket)


def _fsdp_replicate(setting: Setting, clock: Clock) -> None:
    """Data parallelism of the FSDP2 family, which leaves its marks on a module: it gets a copy."""
    replicate = importlib.import_module(_REPLICATE).replicate

    network = copy.deepcopy(setting.module.network)
    mesh = init_device_mesh(setting.device.type, (dist.get_world_size(),), mesh_dim_names=("replicate",))
    for child in network.children():
        if any(True for _ in child.parameters()):
            replicate(child, mesh=mesh)
    replicate(network, mesh=mesh)
    _loop(setting, clock, network)


def _accelerate(setting: Setting, clock: Clock) -> None:
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=setting.device.type == "cpu")
    model = accelerator.prepare_model(setting.module)
    _loop(setting, clock, model)


def _weight() -> float:
    return 3.0 + dist.get_rank()


class _Ticks(Callback):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_batch_start(self, *_: Any) -> None:
        """A step begins, which ends the one before."""
        self._clock.tick()


def _lightning(
    strategy: Callable[[], Strategy], *, weighted: bool = False, around: Callable[[Trainer], None] | None = None
) -> Callable[[Setting, Clock], None]:
    def run(setting: Setting, clock: Clock) -> None:
        setting.module.weight = _weight() if weighted else None
        batches: Any = [setting.batch] * (WARMUP + setting.steps + 1)
        trainer = Trainer(
            accelerator=setting.device.type if setting.device.type == "cpu" else "gpu",
            devices=dist.get_world_size() // setting.nodes,
            num_nodes=setting.nodes,
            strategy=strategy(),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[_Ticks(clock)],
        )
        if around is not None:
            around(trainer)
        trainer.fit(setting.module, DataLoader(batches, batch_size=None))
        # Lightning moves the model to the CPU when training ends.
        setting.module.to(setting.device)

    return run


def _without_termination_flag(trainer: Trainer) -> None:
    """Leave out what Lightning 2.6 does at every batch: a broadcast of whether rank 0 is to end, read on the host."""
    loop: Any = trainer.fit_loop.epoch_loop
    if hasattr(loop, _TERMINATION):
        setattr(loop, _TERMINATION, lambda: None)


def _power_sgd() -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, use_error_feedback=True)


def _raw() -> Iterator[Variant]:
    yield Variant(BASELINE, _raw_ddp())
    yield Variant(COMPUTE, _compute)
    yield Variant(EXCHANGE, _exchange)
    yield Variant("DDP, gradients as bucket views", _raw_ddp(gradient_as_bucket_view=True))
    yield Variant("DDP, float16 hook", _raw_ddp(default_hooks.fp16_compress_hook))
    yield Variant("DDP, bfloat16 hook", _raw_ddp(_bfloat16_hook))
    # On gloo the hook's chained collectives need a single bucket: those of two would meet in any order.
    one_bucket = {"bucket_cap_mb": 10_000} if dist.get_backend() == "gloo" else {}
    yield Variant("DDP, PowerSGD rank 1", _raw_ddp(powerSGD_hook, _power_sgd, **one_bucket))
    yield Variant("all-reduce per parameter", _each_parameter)
    yield Variant("FSDP2 replicate", _fsdp_replicate)
    yield Variant("Accelerate", _accelerate)
    for reduction in ("mean", "weighted_mean"):
        yield Variant(f"average_gradients, {reduction}", _average_gradients(reduction))


def _ours() -> Iterator[Variant]:
    for name, rule in RULES.items():
        strategy = partial(GradAvgStrategy, reduction=name)
        yield Variant(f"GradAvg {name}", _lightning(strategy, weighted=rule.uses_weight))
    wire = inspect.signature(GradAvgStrategy).parameters.get("wire_dtype")
    for value in () if wire is None else _literals(wire.annotation):
        strategy = partial(GradAvgStrategy, reduction="weighted_mean", wire_dtype=value)
        yield Variant(f"GradAvg weighted_mean, {value} on the wire", _lightning(strategy, weighted=True))


def _literals(annotation: Any) -> list[str]:
    """Return the strings that an annotation such as `Literal["a", "b"] | None` lists."""
    if typing.get_origin(annotation) is typing.Literal:
        return [value for value in typing.get_args(annotation) if isinstance(value, str)]
    return [value for part in typing.get_args(annotation) for value in _literals(part)]


def variants() -> list[Variant]:
    """Return everything that can be measured, the process group being up."""
    silent = _lightning(DDPStrategy, around=_without_termination_flag)
    stock = [
        Variant("Lightning DDPStrategy", _lightning(DDPStrategy)),
        Variant("Lightning DDPStrategy, no termination flag", silent),
    ]
    return [*_raw(), *stock, *_ours()]


def unavailable(variant: Variant) -> str | None:
    """Return why a variant cannot run here, or None."""
    if variant.name == "Accelerate" and importlib.util.find_spec("accelerate") is None:
        return "the package accelerate is not installed"
    if variant.name == "FSDP2 replicate" and importlib.util.find_spec(_REPLICATE) is None:
        return f"torch {torch.__version__} has no {_REPLICATE}"
    if variant.name.endswith("no termination flag") and not hasattr(_TrainingEpochLoop, _TERMINATION):
        return f"lightning {lightning.__version__} broadcasts no flag"
    return None


def measure(variant: Variant, setting: Setting, sent: Callable[[], int]) -> Block:
    """Run one block of a variant, beginning on all ranks together."""
    clock = Clock(setting.steps, setting.device, sent)
    dist.barrier()
    try:
        variant.run(setting, clock)
    finally:
        for parameter in setting.module.parameters():
            parameter.grad = None
        gc.collect()
    return clock.block()
