"""Which samples of a loader batch a rank computes: the chunks of the batch, cut as `torch.chunk` cuts.

    loader batch --chunk_bounds--> R replicas --chunk_bounds--> W ranks --at most m samples each--> pieces

Where R is given, a rank's pieces are its replicas, and none is cut further; else R is W.

A rank without samples of a batch gets a *stand-in*: the first samples of the same batch, computed like any other, of
weight 0. A stand-in holds two samples where it can, so that batch norm can normalize it. Rank 0 always has samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

__all__ = ["EMPTY_BATCH", "Chunk", "Piece", "Split", "chunk_bounds", "even_parts", "require_same_reach"]

EMPTY_BATCH = "a loader batch has no samples: leave out empty batches"

Bounds: TypeAlias = tuple[int, int]
"""`(start, stop)`, half open."""

_STAND_IN_SAMPLES = 2  # F.batch_norm refuses to train on one value per channel


@lru_cache(maxsize=256)
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


class Piece(NamedTuple):
    """Samples `start` to `stop` of a loader batch, computed at once.

    `replica` counts over all ranks, from 0; each part of a chunk has another number.
    """

    replica: int
    start: int
    stop: int


def even_parts(start: int, stop: int, count: int) -> list[Bounds]:
    """Cut samples into parts whose sizes differ by at most 1: batch norm sees many samples in each."""
    return list(pairwise(start + part * (stop - start) // count for part in range(count + 1)))


@dataclass(frozen=True)
class Chunk:
    """What a rank has of a loader batch.

    Attributes:
        start: First sample, as a position in the loader batch.
        stop: Sample after the last.
        pieces: What is computed at once, in order; none for a stand-in.
        ranks: Number of ranks that have samples.
        batch_samples: Number of samples of the loader batch.
        batch_replicas: Number of replicas of the loader batch that have samples, over all ranks. They are the first.
    """

    start: int
    stop: int
    pieces: tuple[Piece, ...]
    ranks: int
    batch_samples: int
    batch_replicas: int

    @cached_property
    def stand_in(self) -> bool:
        """Whether the samples only keep the rank busy, and must not count."""
        return not self.pieces

    @cached_property
    def samples(self) -> int:
        """Number of samples that count: 0 for a stand-in."""
        return 0 if self.stand_in else self.stop - self.start


@dataclass(frozen=True)
class Split:
    """How loader batches are split.

    Attributes:
        rank: This rank.
        world_size: Number of ranks W.
        replicas: Number of replicas R that every loader batch has. Rank r computes the r-th chunk of them: of 4
            replicas, 3 ranks have 2, 2 and 0. None for W, each a rank's.
        max_samples: Most samples m of a piece; None for no limit, and where R is given.
    """

    rank: int = 0
    world_size: int = 1
    replicas: int | None = None
    max_samples: int | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks that every loader batch has, of which some may be empty."""
        return self.replicas or self.world_size

    def cut(self, size: int) -> Chunk:
        """Return this rank's chunk of a loader batch of `size` samples, or raise a ValueError if it is empty."""
        return _cut(self, size)


@lru_cache(maxsize=256)
def _cut(split: Split, size: int) -> Chunk:
    if size < 1:
        raise ValueError(EMPTY_BATCH)
    pieces = [Piece(replica, *bounds) for replica, bounds in enumerate(chunk_bounds(size, split.chunks))]
    owned = [
        [piece for piece in pieces[first:last] if piece.stop > piece.start]
        for first, last in chunk_bounds(split.chunks, split.world_size)
    ]
    mine, most = owned[split.rank], split.max_samples
    if most is not None and mine:
        ((replica, start, stop),) = mine
        parts = even_parts(start, stop, -(-(stop - start) // most))
        mine = [Piece(replica + part * split.world_size, *bounds) for part, bounds in enumerate(parts)]
    rows = min(max(owned[0][0].stop, _STAND_IN_SAMPLES), size, most or size)
    start, stop = (mine[0].start, mine[-1].stop) if mine else (0, rows)
    return Chunk(
        start=start,
        stop=stop,
        pieces=tuple(mine),
        ranks=sum(map(bool, owned)),
        batch_samples=size,
        batch_replicas=-(-size // -(-size // split.chunks)),
    )


def require_same_reach(chunks: Sequence[Chunk], replicas: int | None) -> None:
    """Raise, on all ranks, unless several loaders' batches reach the same ranks, or the same replicas.

    No weight of the step can count samples of one loader and none of another.
    """
    if len({(chunk.ranks, chunk.stand_in, chunk.batch_replicas) for chunk in chunks}) == 1:
        return
    unit = "rank" if replicas is None else "replica"
    found = " and ".join(f"{chunk.batch_samples} samples in {chunk.batch_replicas}" for chunk in chunks)
    raise RuntimeError(
        f"the batches of the train loaders, now {found} {unit}s, do not reach the same {unit}s, so some {unit} has"
        f" samples of one loader and none of another. Set drop_last=True, or use batch sizes that give every {unit}"
        " samples of every loader."
    )
