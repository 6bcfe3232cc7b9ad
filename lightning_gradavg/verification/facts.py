"""How a run is set up, read from its Trainer."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DistributedSampler

from lightning_gradavg.verification.records import Facts

__all__ = ["facts_of", "samples_that_count"]


def facts_of(trainer: Trainer, module: LightningModule) -> Facts:
    """Return the facts of a run that is about to train. A collective operation."""
    strategy: Any = trainer.strategy
    rule = getattr(strategy, "_rule", None)
    data = getattr(strategy, "_data", None)
    return Facts(
        strategy=type(strategy).__name__,
        reduction="mean" if rule is None else rule.name,
        rule=rule,
        nodes=_nodes(strategy),
        accumulation=trainer.accumulate_grad_batches if data is None else data.accumulation,
        cuts=1 if data is None else data.micro_batches,
        splits=data is not None,
        replicas=_replicas(strategy),
        crosses_ranks=_replicated(strategy),
        counts_replicas=_replicated(strategy) and strategy._plan.counts_replicas,
        step_end=_replicated(strategy) and callable(getattr(module, "training_step_end", None)),
        scales_rates=getattr(getattr(strategy, "_recipe", None), "rates", None) is not None,
        automatic=module.automatic_optimization,
        estimated_steps=_estimated_steps(trainer),
        epoch_batches=trainer.num_training_batches,
        padded=_padded(trainer),
        precision=str(trainer.precision),
        clip=trainer.gradient_clip_val,
    )


def samples_that_count(trainer: Trainer, fingerprints: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return the fingerprints of a micro-batch's samples; none if the strategy gave the rank something to do only."""
    counted = getattr(trainer.strategy, "_samples", lambda: None)()
    return () if counted == 0 else fingerprints


def _nodes(strategy: Any) -> tuple[int, ...]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return (0,)
    nodes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, getattr(strategy, "node_rank", 0))
    return tuple(nodes)


def _replicated(strategy: Any) -> bool:
    plan = getattr(strategy, "_plan", None)
    return plan is not None and plan.replicated


def _replicas(strategy: Any) -> int | None:
    """Return the number of replicas that have batch statistics of their own; None where the whole batch has one."""
    if not _replicated(strategy):
        return None
    plan = strategy._plan
    if plan.preset is not None and plan.preset.synchronizes_statistics:
        return None
    return int(plan.num_replicas or strategy.world_size)


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
