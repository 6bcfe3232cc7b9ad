"""Global batches arranged by hand: every rank reads its own contiguous chunk of each loader batch.

Together the ranks read what one process would read, in the same order. The last loader batch of an epoch is as short as
the data leaves it, so its chunks may differ by many samples, and a rank may have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Sampler

__all__ = ["GlobalBatchSampler", "global_batch_loader"]

Sample = TypeVar("Sample")


class GlobalBatchSampler(Sampler[list[int]]):
    """Yields, for each loader batch of all ranks, the chunk that `rank` reads; an empty list where it has none.

    Chunks are those of `torch.chunk`. With a seed, the order depends on the seed and the epoch, and on no rank.
    """

    def __init__(
        self, num_samples: int, loader_batch_size: int, *, rank: int, world_size: int, seed: int | None
    ) -> None:
        self.num_samples = num_samples
        self.loader_batch_size = loader_batch_size
        self.batch_size = math.ceil(loader_batch_size / world_size)  # of this rank, as other batch samplers have it
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0
        self.sampler = self  # Lightning calls `set_epoch` of this attribute

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(self.num_samples / self.loader_batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.num_samples)
        if self.seed is not None:
            order = torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        for batch in order.split(self.loader_batch_size):
            size = math.ceil(len(batch) / self.world_size)
            yield batch[self.rank * size : (self.rank + 1) * size].tolist()


def global_batch_loader(
    samples: Sequence[Sample],
    loader_batch_size: int,
    collate: Callable[[list[Sample]], Any],
    trainer: Trainer | None,
    shuffle_seed: int | None = None,
) -> DataLoader[Sample]:
    """Return this rank's loader, or that of one process without a trainer; `collate` may get an empty list."""
    rank = 0
    world_size = 1
    if trainer is not None:
        rank = trainer.global_rank
        world_size = trainer.world_size
    batches = GlobalBatchSampler(len(samples), loader_batch_size, rank=rank, world_size=world_size, seed=shuffle_seed)
    return DataLoader(samples, batch_sampler=batches, collate_fn=collate)  # type: ignore[arg-type]  # a sequence is a map-style data set
