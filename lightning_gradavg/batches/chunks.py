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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from lightning_gradavg._support.random_state import random_state, same_random_state
from lightning_gradavg._support.tree import batch_samples, data_digest, leaves, slice_batch

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
    """Samples of a loader batch that are computed at once."""

    replica: int | None  # its number, another one for each piece over all ranks; None of a stand-in
    start: int  # the first sample, as a position in the loader batch
    stop: int  # the sample after the last

    @property
    def samples(self) -> int:
        """Number of samples that count: none of a stand-in."""
        return 0 if self.replica is None else self.stop - self.start


class Chunk(NamedTuple):
    """What a rank has of a loader batch."""

    pieces: Sequence[Piece]  # in the order in which they are computed; of a rank without samples, its stand-in
    start: int  # the first sample, as a position in the loader batch
    stop: int  # the sample after the last
    samples: int | None  # that count: 0 of a stand-in; None of several loaders whose batches have no common number
    batch_samples: int  # number of samples of the loader batch
    layout: tuple[int, ...]  # number of pieces that count, of each rank

    @property
    def stand_in(self) -> bool:
        """Whether the rank has no samples of the batch, and its piece is a stand-in."""
        return self.samples == 0


STAND_IN = Chunk([Piece(None, 0, 0)], start=0, stop=0, samples=0, batch_samples=0, layout=())
"""Of a rank that has no loader batch left: it computes its last one again."""


@dataclass(frozen=True)
class Split:
    """How loader batches are split.

    Attributes:
        rank: This rank.
        world_size: Number of ranks W.
        replicas: Number of replicas R that every loader batch has, as `torch.chunk` cuts them. Of 4 replicas, 3 ranks
            have 2, 1 and 1. None where any cut gives the same result: each rank has an even part of the samples.
        max_samples: Most samples m of a piece; None for no limit, and where R is given.
        whole: Whether batches must be those of one process in all that random numbers, padding and mixing make of
            them. Then they are collated whole, and cut afterwards.
    """

    rank: int = 0
    world_size: int = 1
    replicas: int | None = None
    max_samples: int | None = None
    whole: bool = False

    @property
    def chunks(self) -> int:
        """Number of chunks that every loader batch has, of which some may be empty."""
        return self.world_size if self.replicas is None else self.replicas

    def cut(self, size: int) -> Chunk:
        """Return this rank's chunk of a loader batch of `size` samples, or raise a ValueError if there are none."""
        return _cut(self, size)


@lru_cache(maxsize=256)  # batches have few sizes, and each is asked for its chunk once per step
def _cut(split: Split, size: int) -> Chunk:
    # All ranks cut every batch, so all raise here. `batch_samples` counts 0 in silence.
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
    return Chunk(mine, mine[0].start, mine[-1].stop, samples, size, layout)


def _pieces(replica: int, start: int, stop: int, limit: int, world_size: int) -> Iterator[Piece]:
    """Cut a replica into pieces whose sizes differ by at most 1: batch norm sees many samples in each."""
    samples = stop - start
    count = -(-samples // limit)  # rounded up; none of an empty replica
    for index in range(count):
        first = start + index * samples // count
        last = start + (index + 1) * samples // count
        # With a limit there are as many replicas as ranks, so no two pieces have one number.
        yield Piece(replica + index * world_size, first, last)


class CollatedPieces(list[object]):
    """The pieces of a rank's chunk, each collated on its own, because what holds all of them cannot be cut."""


class Collated(NamedTuple):
    """A batch as it comes out of a worker. `torch` pins the memory inside, as of any tuple."""

    rows: int  # number of samples of the loader batch
    digest: bytes  # of what all ranks have of it: they compare it
    part: object  # this rank's samples, in the user's own type


def cut_out(batch: object, rows: int, split: Split) -> Collated:
    """Return this rank's part of a whole batch that has so many rows."""
    chunk = split.cut(rows)
    return Collated(rows, data_digest(batch), slice_batch(batch, chunk.start, chunk.stop))


@dataclass(frozen=True)
class PartCollator:
    """Collates this rank's part of a batch. It stands for the user's `collate_fn`, in the workers if there are any.

    | batches | collated, if a collated batch can be cut | if it cannot, such as a batch of graphs |
    |---|---|---|
    | not `whole` | the rank's samples, which `cut_pieces` cuts | each of the rank's pieces on its own |
    | `whole` | all samples, of which the rank's part is cut out | each of the rank's pieces; an error if it draws |
    """

    # A class, not a closure: workers that are spawned get it pickled.
    collate: Callable[[list[object]], object]
    split: Split

    def __call__(self, samples: list[object]) -> Collated:
        """Return this rank's part of the batch of these samples."""
        chunk = self.split.cut(len(samples))
        if self.split.whole:
            state = random_state()
            batch = self.collate(samples)
            rows = _rows(batch, samples)
            if rows is not None:
                return cut_out(batch, rows, self.split)
            if not same_random_state(state, random_state()):
                raise ValueError(
                    f"a batch of type {type(batch).__name__} cannot be cut into replicas, and collate_fn draws random"
                    " numbers, which would differ from those of the whole batch if it collated each replica separately."
                    " Draw them in the dataset or in training_step."
                )
            part = self._collate_pieces(samples, chunk)
        else:
            mine = samples[chunk.start : chunk.stop]
            part = self.collate(mine)
            if len(chunk.pieces) > 1 and _rows(part, mine) is None:
                part = self._collate_pieces(samples, chunk)
        # The whole batch is not collated on any rank here: its first and last sample stand for it.
        return Collated(len(samples), data_digest((len(samples), samples[0], samples[-1])), part)

    def _collate_pieces(self, samples: list[object], chunk: Chunk) -> object:
        """Return the rank's piece, collated on its own; of several, a list of them that `cut_pieces` knows."""
        pieces = CollatedPieces(self.collate(samples[start:stop]) for _, start, stop in chunk.pieces)
        return pieces if len(pieces) > 1 else pieces[0]


def _rows(batch: object, samples: list[object]) -> int | None:
    """Return how many rows a collated batch can be cut into, so many for each sample; None if it cannot be cut."""
    for _, leaf in leaves(batch):
        if hasattr(leaf, "to") and not isinstance(leaf, Tensor):
            return None  # such as a graph, which `slice_batch` would give to all pieces whole
    try:
        rows = batch_samples(batch)
    except ValueError:
        return None
    if rows % len(samples) != 0:
        return None
    # `collate_fn=list` returns the samples themselves: dimension 0 of a tensor in it is not that of the batch.
    if isinstance(batch, (list, tuple)) and len(batch) == len(samples):
        if rows != len(samples):
            return None
        if all(item is sample for item, sample in zip(batch, samples, strict=True)):
            return None
    return rows


def cut_pieces(part: object, chunk: Chunk) -> Sequence[object]:
    """Return the samples of each piece of a chunk.

    Args:
        part: The rank's part of the loader batch, as the user's hooks left it.
        chunk: What the rank has of the loader batch.

    Raises:
        ValueError: If the part has another number of samples than the chunk.
    """
    if isinstance(part, CollatedPieces):
        return part
    samples = batch_samples(part)
    expected = chunk.stop - chunk.start
    if samples != expected:
        raise ValueError(f"it has {samples} samples where the train loader yielded {expected}")
    return [slice_batch(part, start - chunk.start, stop - chunk.start) for _, start, stop in chunk.pieces]
