"""Which samples of a loader batch a rank computes.

There are two cases:

1. Replicas are reproduced, so their sizes change the result: they are those of `torch.chunk`. Which rank computes a
   replica changes nothing: the ranks share the replicas evenly.

       loader batch --chunk_bounds--> R replicas --even_bounds--> W ranks

2. Any cut of the batch gives the same result: the ranks share the samples evenly.

       loader batch --even_bounds--> W ranks --at most m samples each--> pieces

A rank without samples of a batch gets a *stand-in*: the first samples of the same batch, computed like any other, of
weight 0. A stand-in holds two samples where it can, so that batch norm can normalize it. Rank 0 always has samples. In
the second case, only a batch of fewer samples than ranks leaves a rank without any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

__all__ = ["STAND_IN", "Chunk", "Piece", "Pieces", "Split", "chunk_bounds", "even_bounds"]

_STAND_IN_SAMPLES = 2  # F.batch_norm refuses to train on one value per channel


@lru_cache(maxsize=256)
def chunk_bounds(size: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Return the bounds of `parts` contiguous chunks of `size` items, as `torch.chunk` cuts them.

    Every chunk has `ceil(size / parts)` items while they last, so later chunks may be short or empty: 5 over 4 gives
    2, 2, 1, 0. `torch.chunk` leaves the empty ones out; here they are kept.
    """
    step = -(-size // parts)  # rounded up
    ends = [min(part * step, size) for part in range(parts + 1)]
    return tuple(pairwise(ends))


@lru_cache(maxsize=256)
def even_bounds(size: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Return the bounds of `parts` contiguous parts of `size` items, whose sizes differ by at most 1.

    The larger parts come first, so an empty one never comes before another: 4 over 3 gives 2, 1, 1.
    """
    smaller, larger_parts = divmod(size, parts)
    starts = [part * smaller + min(part, larger_parts) for part in range(parts + 1)]
    return tuple(pairwise(starts))


class Piece(NamedTuple):
    """Samples of a loader batch that are loaded, collated and computed at once."""

    number: (
        int | None
    )  # another one for each piece over all ranks: the replica's, if replicas are given; None: stand-in
    start: int  # the first sample, as a position in the loader batch
    stop: int  # the sample after the last

    @property
    def samples(self) -> int:
        """Number of samples that count: none of a stand-in."""
        return 0 if self.number is None else self.stop - self.start


class Chunk(NamedTuple):
    """What a rank has of a loader batch."""

    pieces: Sequence[Piece]  # in the order in which they are computed; of a rank without samples, its stand-in
    samples: int | None  # that count: 0 of a stand-in; None if nobody can tell, or of loaders without a common number
    batch_samples: int  # number of samples of the loader batch
    layout: tuple[int, ...]  # number of pieces that count, of each rank

    @property
    def stand_in(self) -> bool:
        """Whether the rank has no samples of the batch, and its piece is a stand-in."""
        return self.samples == 0


STAND_IN = Chunk([Piece(None, 0, 0)], samples=0, batch_samples=0, layout=())
"""Of a rank that has no loader batch left: it computes its last one again."""


class Pieces(list[object]):
    """The pieces of a rank's chunk, where it has several: a list of batches of the user's own type.

    Lightning passes it from the loader to `training_step` as one batch. Hooks of a batch, such as
    `on_train_batch_start`, see it; those that transfer a batch, and `training_step`, see one piece after another.
    """


@dataclass(frozen=True)
class Split:
    """How loader batches are split.

    Attributes:
        rank: This rank.
        world_size: Number of ranks W.
        replicas: Number of replicas R that every loader batch has, as `torch.chunk` cuts them. Of 4 replicas, 3 ranks
            have 2, 1 and 1. None where any cut gives the same result: each rank has an even part of the samples.
        max_samples: Most samples m of a piece; None for no limit, and where R is given.
    """

    rank: int = 0
    world_size: int = 1
    replicas: int | None = None
    max_samples: int | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks that every loader batch has, of which some may be empty."""
        return self.world_size if self.replicas is None else self.replicas

    @property
    def cuts(self) -> bool:
        """Whether a loader batch may be cut. If not, it is loaded and computed whole, as without this package."""
        return self.world_size > 1 or self.replicas is not None or self.max_samples is not None

    def cut(self, size: int) -> Chunk:
        """Return this rank's chunk of a loader batch of `size` samples, or raise a ValueError if there are none."""
        return _cut(self, size)


@lru_cache(maxsize=256)  # batches have few sizes, and each is asked for its chunk once per step
def _cut(split: Split, size: int) -> Chunk:
    # All ranks cut every batch, so all raise here.
    if size < 1:
        raise ValueError("a loader batch has no samples: leave out empty batches")
    if split.replicas is None:
        bounds = even_bounds(size, split.chunks)
    else:
        bounds = chunk_bounds(size, split.chunks)
    limit = size if split.max_samples is None else split.max_samples
    of_ranks: list[list[Piece]] = []
    for first, last in even_bounds(split.chunks, split.world_size):
        pieces: list[Piece] = []
        for replica in range(first, last):
            start, stop = bounds[replica]
            pieces.extend(_pieces(replica, start, stop, limit, split.world_size))
        of_ranks.append(pieces)
    layout = tuple(len(pieces) for pieces in of_ranks)
    mine = of_ranks[split.rank]
    samples = sum(piece.samples for piece in mine)
    if not mine:
        # Those of the first chunk, which is never empty.
        stop = min(max(bounds[0][1], _STAND_IN_SAMPLES), size, limit)
        mine = [Piece(None, 0, stop)]
    return Chunk(mine, samples, size, layout)


def _pieces(replica: int, start: int, stop: int, limit: int, world_size: int) -> Iterator[Piece]:
    """Cut a replica into pieces whose sizes differ by at most 1: batch norm sees many samples in each."""
    samples = stop - start
    count = -(-samples // limit)  # rounded up; none of an empty replica
    for index in range(count):
        first = start + index * samples // count
        last = start + (index + 1) * samples // count
        # With a limit there are as many replicas as ranks, so no two pieces have one number.
        yield Piece(replica + index * world_size, first, last)
