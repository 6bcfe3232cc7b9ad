"""Which samples of a loader batch a rank computes: the chunks of the batch, cut as `torch.chunk` cuts.

    loader batch --chunk_bounds--> R replicas --chunk_bounds--> W ranks --at most m samples each--> micro-batches

All ranks take the same number of micro-batches per loader batch, because their collectives must match. A rank with
fewer pieces of the batch fills up with *stand-ins*: the first samples of the same batch, computed like any other, of
weight 0. A stand-in holds two samples where it can, so that batch norm can normalize it. Stand-ins come *before* the
rank's own samples: rank 0, whose share is never the smallest, then computes a stand-in only where no rank has samples
(`Chunk.ranks` is 0), and the last micro-batch, whose backward reduces the gradients, always has samples on rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

__all__ = ["Chunk", "Split", "chunk_bounds"]

Bounds: TypeAlias = tuple[int, int]
"""`(start, stop)`, half open."""

_STAND_IN_SAMPLES = 2  # F.batch_norm refuses to train on one value per channel


def chunk_bounds(size: int, parts: int) -> tuple[Bounds, ...]:
    """Return the bounds of `parts` contiguous chunks of `size` items, as `torch.chunk` cuts them.

    Every chunk has `ceil(size / parts)` items while they last, so later chunks may be short or empty: 5 over 4 gives
    2, 2, 1, 0. `torch.chunk` leaves the empty ones out; here they are kept.

    Args:
        size: Number of items, 0 or more.
        parts: Number of chunks, 1 or more.
    """
    if size < 0 or parts < 1:
        raise ValueError(f"chunk_bounds needs size >= 0 and parts >= 1, got size={size} and parts={parts}")
    step = -(-size // parts)
    return tuple((min(part * step, size), min((part + 1) * step, size)) for part in range(parts))


def _even_bounds(start: int, stop: int, parts: int) -> Iterator[Bounds]:
    """Cut into `parts` whose sizes differ by at most 1: batch norm sees as many samples as it can in each."""
    size = stop - start
    for part in range(parts):
        yield start + part * size // parts, start + (part + 1) * size // parts


@dataclass(frozen=True)
class Chunk:
    """What stands behind one micro-batch that a rank gets.

    Attributes:
        start: First sample, as a position in the loader batch.
        stop: Sample after the last.
        replica: Replica that the samples belong to; None for a stand-in, whose weight is 0.
        index: Position among the micro-batches that the rank takes of this loader batch, from 0.
        count: Number of micro-batches that every rank takes of this loader batch.
        batch_samples: Number of samples of the loader batch.
        ranks: Number of ranks that have samples in this position; 0 where nobody has.
    """

    start: int
    stop: int
    replica: int | None
    index: int
    count: int
    batch_samples: int
    ranks: int

    @property
    def stand_in(self) -> bool:
        """Whether the samples only keep the rank busy, and must not count."""
        return self.replica is None

    @property
    def samples(self) -> int:
        """Number of samples that count: 0 for a stand-in."""
        return 0 if self.stand_in else self.stop - self.start


@dataclass(frozen=True)
class Split:
    """How loader batches are split.

    Attributes:
        rank: This rank.
        world_size: Number of ranks W.
        replicas: Number of replicas R that every loader batch has; None for W. Rank r computes the r-th chunk of them.
        max_samples: Most samples m in a micro-batch; None for no limit. No micro-batch spans two replicas.
    """

    rank: int = 0
    world_size: int = 1
    replicas: int | None = None
    max_samples: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be in [0, world_size={self.world_size}), got {self.rank}")
        if self.replicas is not None and self.replicas < 1:
            raise ValueError(f"num_replicas must be 1 or more, or None for the world size, got {self.replicas}")
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError(f"max_device_batch_size must be 1 or more, or None for no limit, got {self.max_samples}")

    def count(self, batch_size: int | None) -> int:
        """Return how many micro-batches every rank takes of each loader batch of at most `batch_size` samples.

        Args:
            batch_size: The largest loader batch. Only needed where `max_samples` is set.
        """
        replicas = self.replicas or self.world_size
        replicas_per_rank = -(-replicas // self.world_size)
        if self.max_samples is None:
            return replicas_per_rank
        if batch_size is None:
            raise ValueError("batch_size must be known where max_samples is set")
        replica_samples = -(-batch_size // replicas)
        return replicas_per_rank * max(1, -(-replica_samples // self.max_samples))

    def cut(self, size: int, count: int) -> tuple[Chunk, ...]:
        """Return this rank's `count` micro-batches of a loader batch of `size` samples.

        Raises:
            ValueError: If the batch is empty, or too large for `count` micro-batches.
        """
        return _cut(self, size, count)

    def _pieces(self, size: int) -> tuple[tuple[tuple[int, Bounds], ...], ...]:
        """Return, for every rank, its non-empty pieces `(replica, bounds)`."""
        replicas = self.replicas or self.world_size
        bounds = chunk_bounds(size, replicas)
        return tuple(
            tuple(
                (replica, piece)
                for replica in range(*mine)
                for piece in _even_bounds(*bounds[replica], self._parts(*bounds[replica]))
            )
            for mine in chunk_bounds(replicas, self.world_size)
        )

    def _parts(self, start: int, stop: int) -> int:
        return -(-(stop - start) // (self.max_samples or max(1, stop - start)))


@lru_cache(maxsize=256)
def _cut(split: Split, size: int, count: int) -> tuple[Chunk, ...]:
    if size < 1:
        raise ValueError("a loader batch has no samples: leave out empty batches")
    pieces = split._pieces(size)
    if len(pieces[0]) > count:
        raise ValueError(
            f"a loader batch of {size} samples makes {len(pieces[0])} micro-batches of at most"
            f" max_device_batch_size={split.max_samples} samples on a rank, but the loader's batch_size promised at"
            f" most {count}. Let `batch_size` of the loader or of its batch sampler be the largest batch."
        )
    mine = pieces[split.rank]
    stand_ins = count - len(mine)
    _, (_, first_stop) = pieces[0][0]
    rows = min(max(first_stop, _STAND_IN_SAMPLES), size, split.max_samples or size)
    return tuple(
        Chunk(
            *(mine[index - stand_ins][1] if index >= stand_ins else (0, rows)),
            replica=mine[index - stand_ins][0] if index >= stand_ins else None,
            index=index,
            count=count,
            batch_samples=size,
            ranks=sum(len(theirs) >= count - index for theirs in pieces),
        )
        for index in range(count)
    )
