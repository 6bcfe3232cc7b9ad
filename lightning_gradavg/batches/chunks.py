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
from operator import is_
from typing import Any, NamedTuple

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
    step = -(-size // parts)
    return tuple((min(part * step, size), min((part + 1) * step, size)) for part in range(parts))


@lru_cache(maxsize=256)
def even_bounds(size: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Return the bounds of `parts` contiguous parts of `size` items, whose sizes differ by at most 1.

    The larger parts come first, so an empty one never comes before another: 4 over 3 gives 2, 1, 1.
    """
    smaller, larger_parts = divmod(size, parts)
    starts = [part * smaller + min(part, larger_parts) for part in range(parts + 1)]
    return tuple(pairwise(starts))


class Piece(NamedTuple):
    """Samples `start` to `stop` of a loader batch, computed at once.

    `replica` is another for each piece, over all ranks; None of a stand-in.
    """

    replica: int | None
    start: int
    stop: int

    @property
    def samples(self) -> int:
        """Number of samples that count."""
        return 0 if self.replica is None else self.stop - self.start


class Chunk(NamedTuple):
    """What a rank has of a loader batch.

    Attributes:
        pieces: What is computed at once, in order; of a rank without samples, its stand-in.
        start: First sample, as a position in the loader batch.
        stop: Sample after the last.
        samples: Number of samples that count: 0 for a stand-in, which only keeps the rank busy; None of several loaders
            whose batches have no common number.
        batch_samples: Number of samples of the loader batch.
        layout: Number of pieces that count, of each rank.
    """

    pieces: Sequence[Piece]
    start: int
    stop: int
    samples: int | None
    batch_samples: int
    layout: tuple[int, ...]

    @property
    def stand_in(self) -> bool:
        """Whether the samples only keep the rank busy, and must not count."""
        return self.samples == 0


STAND_IN = Chunk([Piece(None, 0, 0)], start=0, stop=0, samples=0, batch_samples=0, layout=())
"""Of a rank that has no loader batch: what it computes is another one."""


@dataclass(frozen=True)
class Split:
    """How loader batches are split.

    Attributes:
        rank: This rank.
        world_size: Number of ranks W.
        replicas: Number of replicas R that every loader batch has, as `torch.chunk` cuts them. Of 4 replicas, 3 ranks
            have 2, 1 and 1. None where any cut gives the same result: each rank has an even part of the samples.
        max_samples: Most samples m of a piece; None for no limit, and where R is given.
        whole: Whether batches are those of one process in all that random numbers, padding and mixing make of them.
    """

    rank: int = 0
    world_size: int = 1
    replicas: int | None = None
    max_samples: int | None = None
    whole: bool = False

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
        raise ValueError("a loader batch has no samples: leave out empty batches")
    cut = even_bounds if split.replicas is None else chunk_bounds
    bounds = cut(size, split.chunks)
    most = split.max_samples or size
    owned = [
        [piece for replica in range(*of_rank) for piece in _pieces(replica, *bounds[replica], most, split.world_size)]
        for of_rank in even_bounds(split.chunks, split.world_size)
    ]
    stand_in = Piece(None, 0, min(max(bounds[0][1], _STAND_IN_SAMPLES), size, most))
    pieces, layout = owned[split.rank] or [stand_in], tuple(map(len, owned))
    samples = sum(piece.samples for piece in pieces)
    return Chunk(pieces, pieces[0].start, pieces[-1].stop, samples, size, layout)


def _pieces(replica: int, start: int, stop: int, most: int, ranks: int) -> Iterator[Piece]:
    """Cut a replica into pieces whose sizes differ by at most 1: batch norm sees many samples in each."""
    samples = stop - start
    count = -(-samples // most)
    for piece in range(count):
        first, last = (start + end * samples // count for end in (piece, piece + 1))
        yield Piece(replica + piece * ranks, first, last)


class Apart(list[Any]):
    """The pieces of a rank's chunk, each collated on its own, because what holds all of them cannot be cut."""


class Collated(NamedTuple):
    """A batch as it comes out of a worker: its rows, a digest of what all ranks have of it, and this rank's part."""

    rows: int
    key: bytes
    part: Any


def cut_out(batch: Any, rows: int, split: Split) -> Collated:
    """Return this rank's part of a whole batch that has so many rows."""
    chunk = split.cut(rows)
    return Collated(rows, data_digest(batch), slice_batch(batch, chunk.start, chunk.stop))


@dataclass(frozen=True)
class PartCollator:
    """Collates this rank's part of a batch; what cannot be cut, such as a batch of graphs, piece by piece."""

    collate: Callable[[list[Any]], Any]
    split: Split

    def __call__(self, samples: list[Any]) -> Collated:
        """Return this rank's part of the batch of these samples."""
        split, chunk, before = self.split, self.split.cut(len(samples)), random_state()
        own = samples if split.whole else samples[chunk.start : chunk.stop]
        part = self.collate(own)
        rows = _rows(part, own)
        if split.whole and rows is not None:
            return cut_out(part, rows, split)
        if split.whole and not same_random_state(before, random_state()):
            raise ValueError(
                f"a batch of type {type(part).__name__} cannot be cut into replicas, and collate_fn draws random"
                " numbers, which would differ from those of the whole batch if it collated each replica separately."
                " Draw them in the dataset or in training_step."
            )
        if split.whole or (rows is None and len(chunk.pieces) > 1):
            parts = Apart(self.collate(samples[start:stop]) for _, start, stop in chunk.pieces)
            part = parts if len(parts) > 1 else parts[0]
        return Collated(len(samples), data_digest((len(samples), samples[0], samples[-1])), part)


def _rows(batch: Any, samples: list[Any]) -> int | None:
    """Return how many rows a collated batch can be cut into, so many for each sample; None if it cannot be cut."""
    if any(hasattr(leaf, "to") and not isinstance(leaf, Tensor) for _, leaf in leaves(batch)):
        return None  # such as a graph, which would be shared
    try:
        rows = batch_samples(batch)
    except ValueError:
        return None
    # Dimension 0 of what is listed sample by sample, as by `collate_fn=list`, is a sample's own.
    listed = isinstance(batch, (list, tuple)) and len(batch) == len(samples)
    apart = listed and (rows != len(samples) or all(map(is_, batch, samples)))
    return rows if rows % len(samples) == 0 and not apart else None


def cut_pieces(part: Any, chunk: Chunk) -> Sequence[Any]:
    """Return the samples of each piece of a chunk, of the rank's part of a batch, which hooks may have changed."""
    if isinstance(part, Apart):
        return part
    if (found := batch_samples(part)) != chunk.stop - chunk.start:
        raise ValueError(f"it has {found} samples where the train loader yielded {chunk.stop - chunk.start}")
    return [slice_batch(part, start - chunk.start, stop - chunk.start) for _, start, stop in chunk.pieces]
