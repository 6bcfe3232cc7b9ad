"""How a run is set up, read from its Trainer."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DistributedSampler

from lightning_gradavg.strategy import GradAvgStrategy
from lightning_gradavg.verification.records import Facts

__all__ = ["facts_of", "samples_that_count"]


def facts_of(trainer: Trainer, module: LightningModule) -> Facts:
    """Return the facts of a run that is about to train. A collective operation."""
    strategy: Any = trainer.strategy
    # Stock DDP answers nothing: one micro-batch of its own per rank, and the mean.
    told = strategy.facts() if isinstance(strategy, GradAvgStrategy) else None
    return Facts(
        strategy=type(strategy).__name__,
        reduction="mean" if told is None else told.rule.name,
        rule=None if told is None else told.rule,
        nodes=_nodes(strategy),
        accumulation=trainer.accumulate_grad_batches if told is None else told.accumulation,
        cuts=1 if told is None else told.micro_batches,
        splits=told is not None and told.splits_batches,
        replicas=None if told is None else told.replicas,
        crosses_ranks=told is not None and told.replicated,
        counts_replicas=told is not None and told.replicated and told.counts_replicas,
        step_end=told is not None and told.replicated and callable(getattr(module, "training_step_end", None)),
        scales_rates=told is not None and told.scales_rates,
        automatic=module.automatic_optimization,
        estimated_steps=_estimated_steps(trainer),
        epoch_batches=trainer.num_training_batches,
        padded=_padded(trainer),
        precision=str(trainer.precision),
        clip=trainer.gradient_clip_val,
    )


def samples_that_count(trainer: Trainer, fingerprints: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return the fingerprints of a micro-batch's samples; none if the strategy gave the rank something to do only."""
    strategy = trainer.strategy
    return () if isinstance(strategy, GradAvgStrategy) and strategy.facts().samples == 0 else fingerprints


def _nodes(strategy: Any) -> tuple[int, ...]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return (0,)
    nodes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, getattr(strategy, "node_rank", 0))
    return tuple(nodes)


def _estimated_steps(trainer: Trainer) -> float | None:
    try:
        return trainer.estimated_stepping_batches
    except RuntimeError:  # Lightning's, of an accumulation that differs between epochs
        return None


def _padded(trainer: Trainer) -> int:
    loader: Any = trainer.train_dataloader
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return 0
    dataset: Any = sampler.dataset
    return max(0, sampler.total_size - len(dataset))
