"""Global batches arranged by hand: every rank reads its own contiguous chunk of each loader batch.

A loader batch is cut into one chunk per rank, sized as `torch.chunk` sizes them, so the ranks
together read exactly what one process would read, in the same order. The last loader batch of an epoch is as short as
the data leaves it; its chunks may differ by many samples, and a rank may have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Sampler, SequentialSampler

__all__ = ["GlobalBatchSampler", "ShuffleSampler", "chunk_of_rank", "global_batch_loader"]

Sample = TypeVar("Sample")


def chunk_of_rank(indices: Sequence[int], rank: int, world_size: int) -> list[int]:
    """Return the chunk of `indices` that `rank` reads: `torch.chunk` into `world_size`, missing chunks being empty."""
    size = math.ceil(len(indices) / world_size)
    return list(indices[rank * size : (rank + 1) * size])


class ShuffleSampler(Sampler[int]):
    """Yields `0 .. num_samples - 1` in an order that depends on the seed and the epoch alone, so on no rank.

    Lightning calls `set_epoch` before each epoch.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        yield from torch.randperm(self.num_samples, generator=generator).tolist()


class GlobalBatchSampler(Sampler[list[int]]):
    """Yields, for each loader batch of `loader_batch_size` samples over all ranks, the chunk that `rank` reads.

    All ranks see the same number of batches. A batch is an empty list where the rank has no chunk.

    Attributes:
        batch_size: As in other batch samplers, the most samples that one rank reads at once.

    Raises:
        ValueError: If `loader_batch_size` is not positive, or `rank` is not in `[0, world_size)`.
    """

    def __init__(
        self, sampler: ShuffleSampler | SequentialSampler, loader_batch_size: int, *, rank: int = 0, world_size: int = 1
    ) -> None:
        if loader_batch_size < 1:
            raise ValueError(f"loader_batch_size must be at least 1, got {loader_batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, world_size={world_size}), got {rank}")
        self.sampler = sampler
        self.loader_batch_size = loader_batch_size
        self.batch_size = math.ceil(loader_batch_size / world_size)
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.loader_batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        for start in range(0, len(indices), self.loader_batch_size):
            yield chunk_of_rank(indices[start : start + self.loader_batch_size], self.rank, self.world_size)


def global_batch_loader(
    samples: Sequence[Sample],
    loader_batch_size: int,
    collate: Callable[[list[Sample]], Any],
    trainer: Trainer | None,
    shuffle_seed: int | None = None,
) -> DataLoader[Sample]:
    """Return this rank's loader.

    Args:
        samples: All samples, the same on every rank.
        loader_batch_size: Samples of one loader batch, over all ranks.
        collate: Makes a batch from a list of samples, which may be empty.
        trainer: Knows the rank and the world size; None for one process.
        shuffle_seed: Shuffles differently in each epoch; None keeps the order.
    """
    order: ShuffleSampler | SequentialSampler
    order = SequentialSampler(samples) if shuffle_seed is None else ShuffleSampler(len(samples), shuffle_seed)
    rank, world_size = (trainer.global_rank, trainer.world_size) if trainer else (0, 1)
    batches = GlobalBatchSampler(order, loader_batch_size, rank=rank, world_size=world_size)
    return DataLoader(samples, batch_sampler=batches, collate_fn=collate)  # type: ignore[arg-type]  # a sequence is a map-style data set
