"""Variants that Lightning's Trainer runs: its own DDP strategy and ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks.block import WARMUP, Clock, Setting, Variant, weight_of_rank
from benchmarks.trainer import make_quiet_trainer
from lightning_gradavg import GradAvgStrategy, hooks
from lightning_gradavg.rules import RULES

__all__ = ["LIGHTNING", "trained_variants"]

LIGHTNING = "Lightning DDPStrategy"

HAS_BATCHED_COPY = "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters
"""Whether torch's DDP can copy the gradients of a bucket all at once, as from torch 2.13 on."""


class _Ticks(Callback):
    """Ticks at every batch."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_batch_start(self, *_: Any) -> None:
        """A step begins, which ends the one before."""
        self._clock.tick()


def _train(
    strategy: Callable[[], Strategy],
    setting: Setting,
    clock: Clock,
    *,
    weighted: bool = False,
    varying: bool = False,
    shared: bool = False,
    prepare: Callable[[Trainer], None] | None = None,
) -> None:
    """Be the `run` of a variant: train in Lightning's Trainer under a strategy.

    Args:
        strategy: Makes the strategy.
        setting: What the variant works with.
        clock: Ticks at every step.
        weighted: Whether the training step returns a weight.
        varying: Whether the weight changes from step to step.
        shared: Whether every rank loads the global batch, of which the strategy gives each a chunk.
        prepare: Changes the Trainer before the training.
    """
    setting.module.weight = weight_of_rank() if weighted else None
    setting.module.varying = varying
    batch = _gather_batch(setting.batch) if shared else setting.batch
    batches: Any = [batch] * (WARMUP + setting.steps + 1)
    trainer = make_quiet_trainer(
        strategy(),
        accelerator="cpu" if setting.device.type == "cpu" else "gpu",
        devices=dist.get_world_size() // setting.nodes,
        num_nodes=setting.nodes,
        callbacks=[_Ticks(clock)],
    )
    if prepare is not None:
        prepare(trainer)
    trainer.fit(setting.module, DataLoader(batches, batch_size=None))
    # Lightning moves the model to the CPU when training ends.
    setting.module.to(setting.device)


def _gather_batch(batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the global batch, of which each rank's own is its chunk. A collective operation."""
    global_batch = []
    for part in batch:
        parts_of_ranks = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts_of_ranks, part)
        global_batch.append(torch.cat(parts_of_ranks))
    return tuple(global_batch)


def _stock() -> Iterator[Variant]:
    yield Variant(LIGHTNING, partial(_train, DDPStrategy), in_lightning=True)
    views = partial(DDPStrategy, gradient_as_bucket_view=True)
    yield Variant(f"{LIGHTNING}, bucket views", partial(_train, views), in_lightning=True)
    if HAS_BATCHED_COPY:
        batched = partial(DDPStrategy, batched_grad_copy=True)
        yield Variant(f"{LIGHTNING}, batched copy", partial(_train, batched), in_lightning=True)


def _ours(reduction: str, name: str = "", *, varying: bool = False, **options: Any) -> Variant:
    """Return a variant of our strategy; `name` says what is special about it."""
    title = f"GradAvg {reduction}"
    if name:
        title += f", {name}"
    strategy = partial(GradAvgStrategy, reduction=reduction, **options)
    train = partial(_train, strategy, weighted=RULES[reduction].uses_weight, varying=varying)
    return Variant(title, train, in_lightning=True)


def _reproducible() -> Variant:
    """Return the mean with one replica on each rank, so that only the sum is another one."""
    strategy = partial(GradAvgStrategy, num_replicas=dist.get_world_size(), reproducible=True)
    return Variant("GradAvg mean, reproducible", partial(_train, strategy, shared=True), in_lightning=True)


def _presets() -> Iterator[Variant]:
    """Yield the runs that share each loader batch, one replica or part of it on each rank."""
    one_device = partial(GradAvgStrategy, equivalent_to="single_device")
    yield Variant("GradAvg single_device", partial(_train, one_device, shared=True), in_lightning=True)
    replicas = partial(GradAvgStrategy, equivalent_to="data_parallel", num_replicas=dist.get_world_size())
    yield Variant("GradAvg data_parallel", partial(_train, replicas, shared=True), in_lightning=True)


def trained_variants(*, several_on_nodes: bool) -> Iterator[Variant]:
    """Yield what Lightning runs, the process group being up.

    Args:
        several_on_nodes: Whether there are several nodes with several ranks each, which hooks sum node by node.
    """
    yield from _stock()
    for reduction in RULES:
        yield _ours(reduction)
    yield _ours("weighted_mean", "varying weights", varying=True)
    yield _reproducible()
    yield from _presets()
    yield _ours("mean", "bucket views", gradient_as_bucket_view=True)
    for reduction in ("sum", "weighted_mean"):  # whose gradients are views of buckets by default
        yield _ours(reduction, "no bucket views", gradient_as_bucket_view=False)
    if HAS_BATCHED_COPY:
        for reduction in ("mean", "weighted_mean"):
            yield _ours(reduction, "batched copy", batched_grad_copy=True)
    yield _ours("weighted_mean", "hooks.bfloat16", ddp_comm_hook=hooks.bfloat16)
    if several_on_nodes:
        yield _ours("weighted_mean", "hooks.by_node", ddp_comm_hook=hooks.by_node)
        yield _ours("weighted_mean", "hooks.by_node_bfloat16", ddp_comm_hook=hooks.by_node_bfloat16)
