"""`split_batches`: a loader whose batches are this rank's chunks of the global batches, in any training loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from lightning_gradavg.batches.chunks import Split
from lightning_gradavg.batches.loader import BatchSplitter, SplitLoader
from lightning_gradavg.ranks import World

__all__ = ["ChunkLoader", "split_batches"]


class ChunkLoader(SplitLoader):
    """What `split_batches` returns. Its other attributes are those of the user's loader.

    Attributes:
        samples: Samples of the batch yielded last that count: 0 where the rank has none of the global batch, and the
            batch only keeps it busy. None outside of a pass.
        with_gradients: Whether that batch was taken outside of `torch.no_grad`.
    """

    samples: int | None = None
    with_gradients = True

    def __iter__(self) -> Iterator[Any]:
        try:
            for batch, behind in self.begin().items:
                self.samples, self.with_gradients = behind.chunk.samples, torch.is_grad_enabled()
                yield batch
        finally:
            self.samples = None


def split_batches(loader: Any, *, group: dist.ProcessGroup | None = None) -> ChunkLoader:
    """Return a loader that yields this rank's chunk of each batch of `loader`, which is the global batch.

    Every rank gets its contiguous chunk, cut as `torch.chunk` cuts, in the order of one process. Samplers are used
    unchanged, with the random state of rank 0. A rank loads only its own samples. If a short batch leaves a rank none,
    it gets a sample of another rank, to take part in the backward, and `samples` of the returned loader is 0: the
    weight of that batch.

    Creating the loader and iterating over it are collective operations.

    Args:
        loader: A `DataLoader` with the global batch size and no `DistributedSampler`, or an iterable of batches. If it
            or its dataset has a true attribute `sharded_by_rank`, every rank reads its own part of the data, and
            batches stay whole.
        group: The ranks that share the batches; those of the default group if None.

    Raises:
        ValueError: On all ranks, if the loader cannot be split, or the ranks' loaders differ.
    """
    world = World.of(group)
    return BatchSplitter(Split(world.rank, world.size), world).wrap(loader, ChunkLoader)
