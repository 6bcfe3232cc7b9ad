"""Which samples of a loader batch a rank computes: the chunks of the batch, cut as `torch.chunk` cuts.

    loader batch --chunk_bounds--> R replicas --chunk_bounds--> W ranks --at most m samples each--> micro-batches

Where R is given, a micro-batch holds all replicas of its rank, one after another, and none is cut further; else R is W.

All ranks take the same number of micro-batches per loader batch, because their collectives must match. A rank with
fewer pieces of the batch fills up with *stand-ins*: the first samples of the same batch, computed like any other, of
weight 0. A stand-in holds two samples where it can, so that batch norm can normalize it. Stand-ins come *before* the
rank's own samples: rank 0, whose share is never the smallest, then computes a stand-in only where no rank has samples
(`Chunk.ranks` is 0), and the last micro-batch, whose backward reduces the gradients, always has samples on rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

__all__ = ["EMPTY_BATCH", "Chunk", "Piece", "Split", "chunk_bounds", "require_same_reach"]

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
    """The samples of one replica in a micro-batch.

    Attributes:
        replica: The replica, from 0, over all ranks.
        start: Its first sample here, as a position in the loader batch.
        stop: The sample after its last one here.
    """

    replica: int
    start: int
    stop: int


def _even_parts(piece: Piece, most: int) -> list[Piece]:
    """Cut into as few parts as can be, whose sizes differ by at most 1: batch norm sees many samples in each."""
    replica, start, stop = piece
    count = -(-(stop - start) // most)
    bounds = [start + part * (stop - start) // count for part in range(count + 1)]
    return [Piece(replica, first, last) for first, last in pairwise(bounds)]


@dataclass(frozen=True)
class Chunk:
    """What stands behind one micro-batch that a rank gets.

    Attributes:
        start: First sample, as a position in the loader batch.
        stop: Sample after the last.
        pieces: The replicas that it holds samples of, in order; none for a stand-in.
        index: Position among the micro-batches that the rank takes of this loader batch, from 0.
        count: Number of micro-batches that every rank takes of this loader batch.
        ranks: Number of ranks that have samples in this position; 0 where nobody has.
        batch_samples: Number of samples of the loader batch.
        batch_replicas: Number of replicas of the loader batch that have samples, over all ranks. They are the first.
    """

    start: int
    stop: int
    pieces: tuple[Piece, ...]
    index: int
    count: int
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
        return sum(piece.stop - piece.start for piece in self.pieces)

    @cached_property
    def is_last(self) -> bool:
        """Whether it is the rank's last micro-batch of the loader batch."""
        return self.index == self.count - 1


@dataclass(frozen=True)
class Split:
    """How loader batches are split.

    Attributes:
        rank: This rank.
        world_size: Number of ranks W.
        replicas: Number of replicas R that every loader batch has. Rank r computes the r-th chunk of them, in one
            micro-batch: of 4 replicas, 3 ranks have 2, 2 and 0. None for W, each a rank's.
        max_samples: Most samples m in a micro-batch; None for no limit, and where R is given.
    """

    rank: int = 0
    world_size: int = 1
    replicas: int | None = None
    max_samples: int | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks that every loader batch has, of which some may be empty."""
        return self.replicas or self.world_size

    def count(self, batch_size: int | None) -> int:
        """Return how many micro-batches every rank takes of each loader batch of at most `batch_size` samples.

        Args:
            batch_size: The largest loader batch. Only needed where `max_samples` is set.
        """
        if self.max_samples is None:
            return 1
        assert batch_size is not None
        rank_samples = -(-batch_size // self.world_size)
        return max(1, -(-rank_samples // self.max_samples))

    def cut(self, size: int, count: int) -> tuple[Chunk, ...]:
        """Return this rank's `count` micro-batches of a loader batch of `size` samples.

        Raises:
            ValueError: If the batch is empty, or too large for `count` micro-batches.
        """
        return _cut(self, size, count)

    def _shared_out(self, size: int) -> list[list[tuple[Piece, ...]]]:
        """Return, for every rank, the pieces in each of its micro-batches that have samples."""
        pieces = [Piece(replica, *bounds) for replica, bounds in enumerate(chunk_bounds(size, self.chunks))]
        owned = [
            [piece for piece in pieces[first:last] if piece.stop > piece.start]
            for first, last in chunk_bounds(self.chunks, self.world_size)
        ]
        if self.max_samples is None:
            return [[tuple(of_rank)] if of_rank else [] for of_rank in owned]
        most = self.max_samples
        return [[(part,) for piece in of_rank for part in _even_parts(piece, most)] for of_rank in owned]


@lru_cache(maxsize=256)
def _cut(split: Split, size: int, count: int) -> tuple[Chunk, ...]:
    if size < 1:
        raise ValueError(EMPTY_BATCH)
    shared_out = split._shared_out(size)
    if len(shared_out[0]) > count:
        raise ValueError(
            f"a loader batch of {size} samples makes {len(shared_out[0])} micro-batches of at most"
            f" max_device_batch_size={split.max_samples} samples on a rank, but the loader's batch_size promised at"
            f" most {count}. Let `batch_size` of the loader or of its batch sampler be the largest batch."
        )
    mine = shared_out[split.rank]
    rows = min(max(shared_out[0][0][0].stop, _STAND_IN_SAMPLES), size, split.max_samples or size)
    stand_ins: list[tuple[int, int, tuple[Piece, ...]]] = [(0, rows, ())] * (count - len(mine))
    own = [(pieces[0].start, pieces[-1].stop, pieces) for pieces in mine]
    return tuple(
        Chunk(
            start=start,
            stop=stop,
            pieces=pieces,
            index=index,
            count=count,
            ranks=sum(len(theirs) >= count - index for theirs in shared_out),
            batch_samples=size,
            batch_replicas=-(-size // -(-size // split.chunks)),
        )
        for index, (start, stop, pieces) in enumerate([*stand_ins, *own])
    )


def require_same_reach(chunks: Sequence[Chunk], replicas: int | None) -> None:
    """Require of several loaders' batches that are trained on together to reach the same ranks, or the same replicas.

    No weight of the step can count samples of one loader and none of another.

    Raises:
        RuntimeError: On all ranks alike, if they do not.
    """
    if len({(chunk.ranks, chunk.stand_in, chunk.batch_replicas) for chunk in chunks}) == 1:
        return
    unit, found = "rank", " and ".join(f"{chunk.batch_samples}" for chunk in chunks) + " samples"
    if replicas is not None:
        each = (f"{chunk.batch_samples} samples in {chunk.batch_replicas}" for chunk in chunks)
        unit, found = "replica", f"{' and '.join(each)} of num_replicas={replicas}"
    raise RuntimeError(
        f"the batches of the train loaders, now {found}, do not reach the same {unit}s, so some {unit} has samples of"
        f" one loader and none of another. Set drop_last=True, or use batch sizes that give every {unit} samples of"
        " every loader."
    )
