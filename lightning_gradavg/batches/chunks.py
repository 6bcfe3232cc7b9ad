"""Which samples of a loader batch a rank computes: the chunks of the batch, cut as `torch.chunk` cuts.

    loader batch --chunk_bounds--> R replicas --chunk_bounds--> W ranks --at most m samples each--> pieces

Where R is given, a rank's pieces are its replicas, and none is cut further; else R is W.

A rank without samples of a batch gets a *stand-in*: the first samples of the same batch, computed like any other, of
weight 0. A stand-in holds two samples where it can, so that batch norm can normalize it. Rank 0 always has samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from lightning_gradavg.random_state import random_state, same_random_state
from lightning_gradavg.tree import batch_samples, data_digest, leaves, slice_batch

_STAND_IN_SAMPLES = 2  # F.batch_norm refuses to train on one value per channel


@lru_cache(maxsize=256)
def chunk_bounds(size: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Return the bounds of `parts` contiguous chunks of `size` items, as `torch.chunk` cuts them.

    Every chunk has `ceil(size / parts)` items while they last, so later chunks may be short or empty: 5 over 4 gives
    2, 2, 1, 0. `torch.chunk` leaves the empty ones out; here they are kept.
    """
    step = -(-size // parts)
    return tuple((min(part * step, size), min((part + 1) * step, size)) for part in range(parts))


class Piece(NamedTuple):
    """Samples `start` to `stop` of a loader batch, computed at once; `replica` is another for each, over all ranks."""

    replica: int
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk:
    """What a rank has of a loader batch.

    Attributes:
        start: First sample, as a position in the loader batch.
        stop: Sample after the last.
        pieces: What is computed at once, in order; none for a stand-in.
        batch_samples: Number of samples of the loader batch.
        layout: Number of pieces of each rank.
    """

    start: int
    stop: int
    pieces: tuple[Piece, ...]
    batch_samples: int
    layout: tuple[int, ...]

    @cached_property
    def stand_in(self) -> bool:
        """Whether the samples only keep the rank busy, and must not count."""
        return not self.pieces

    @cached_property
    def samples(self) -> int:
        """Number of samples that count: 0 for a stand-in."""
        return 0 if self.stand_in else self.stop - self.start

    @property
    def ranks(self) -> int:
        """Number of ranks that have samples."""
        return sum(map(bool, self.layout))


@dataclass(frozen=True)
class Split:
    """How loader batches are split.

    Attributes:
        rank: This rank.
        world_size: Number of ranks W.
        replicas: Number of replicas R that every loader batch has. Rank r computes the r-th chunk of them: of 4
            replicas, 3 ranks have 2, 2 and 0. None for W, each a rank's.
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
    replicas = [Piece(replica, *bounds) for replica, bounds in enumerate(chunk_bounds(size, split.chunks))]
    most = size if split.max_samples is None else split.max_samples
    owned = [
        [part for replica in replicas[first:last] for part in _parts(replica, most, split.world_size)]
        for first, last in chunk_bounds(split.chunks, split.world_size)
    ]
    mine = owned[split.rank]
    rows = min(max(replicas[0].stop, _STAND_IN_SAMPLES), size, most)
    start, stop = (mine[0].start, mine[-1].stop) if mine else (0, rows)
    return Chunk(start, stop, tuple(mine), size, tuple(map(len, owned)))


def _parts(whole: Piece, most: int, ranks: int) -> Iterator[Piece]:
    """Cut into parts whose sizes differ by at most 1: batch norm sees many samples in each."""
    samples = whole.stop - whole.start
    count = -(-samples // most)
    for part in range(count):
        start, stop = (whole.start + end * samples // count for end in (part, part + 1))
        yield Piece(whole.replica + part * ranks, start, stop)


def require_same_reach(chunks: Sequence[Chunk]) -> None:
    """Raise on all ranks unless several loaders' batches are cut into the same pieces: each has one weight."""
    if len({chunk.layout for chunk in chunks}) > 1:
        found = " and ".join(
            f"{chunk.batch_samples} samples in {' + '.join(map(str, chunk.layout))} pieces" for chunk in chunks
        )
        raise RuntimeError(
            f"the batches of the train loaders, now {found} on the ranks, are not cut alike, so some piece has samples"
            " of one loader and none of another. Set drop_last=True, or use equal batch sizes."
        )


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
        """Return this rank's part of the batch of these samples, which all ranks read."""
        chunk, whole, before = self.split.cut(len(samples)), self.split.whole, random_state()
        own = samples if whole else samples[chunk.start : chunk.stop]
        batch = self.collate(own)
        rows = _rows(batch, len(own))
        if whole and rows is not None:
            return cut_out(batch, rows, self.split)
        if whole and not same_random_state(before, random_state()):
            raise ValueError(
                f"a batch of type {type(batch).__name__} cannot be cut into replicas, and collate_fn draws random"
                " numbers, which would differ from those of the whole batch if it collated each replica separately."
                " Draw them in the dataset or in training_step."
            )
        if whole or (rows is None and len(chunk.pieces) > 1):
            bounds = [(start, stop) for _, start, stop in chunk.pieces] or [(chunk.start, chunk.stop)]
            parts = Apart(self.collate(samples[start:stop]) for start, stop in bounds)
            batch = parts if len(parts) > 1 else parts[0]
        return Collated(len(samples), data_digest((len(samples), samples[0], samples[-1])), batch)


def _rows(batch: Any, samples: int) -> int | None:
    """Return how many rows a collated batch can be cut into, so many for each sample; None if it cannot be cut."""
    if any(hasattr(leaf, "to") and not isinstance(leaf, Tensor) for _, leaf in leaves(batch)):
        return None  # such as a graph, which would be shared
    try:
        rows = batch_samples(batch)
    except ValueError:
        return None
    return rows if rows % samples == 0 else None
