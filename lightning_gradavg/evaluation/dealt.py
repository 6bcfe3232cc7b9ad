"""Loaders whose batches are dealt to the ranks: each batch is evaluated once, by one rank.

The batches stay whole, and of every `world_size` of them, which make up a *round*, each rank takes one. So each batch
is the one that a single process would see, nothing is repeated, and there are as many rounds as with
`DistributedSampler`: ceil(ceil(N / B) / W) = ceil(ceil(N / W) / B). The last round may have fewer batches than ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import Enum
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lightning_gradavg._lightning.internals import cloned, within_notes
from lightning_gradavg._lightning.loaders import LoaderWrapper, Shows
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.tree import data_digest

__all__ = ["EvaluationLoader", "StreamRecord", "require_each_once"]


def _length_of_share(length: int, rank: int, world_size: int) -> int:
    """Return how many of a number of batches are dealt to a rank."""
    return len(range(rank, length, world_size))


class _DealtIndices(Shows):
    """This rank's share of what a sampler yields. In a copy of the loader it stands in the sampler's place."""

    def __init__(self, sampler: Any, limit: int | None, world: World) -> None:
        """Deal what a sampler yields, or its first `limit` items."""
        super().__init__(sampler)
        self._limit = limit
        self._world = world

    def __iter__(self) -> Iterator[Any]:
        # `limit_*_batches` counts the batches of the loader, so it comes before they are dealt.
        indices: Iterator[Any] = islice(self._shown, self._limit)
        sampler = self._shown
        if type(sampler) is BatchSampler:
            sampler = sampler.sampler
        # These two types exactly: a subclass may draw. A sequence is the same on all ranks, without an exchange.
        if type(sampler) is not SequentialSampler:
            indices = self._indices_of_first_rank(indices)
        return islice(indices, self._world.rank, None, self._world.size)

    def _indices_of_first_rank(self, indices: Iterator[Any]) -> Iterator[Any]:
        """Yield rank 0's indices. A collective operation, when the first is asked for.

        They may be drawn from a generator that differs between the ranks. Every rank draws its own, so that its
        generator moves on as on one process. A generator function draws when the loader asks for the first batch, as on
        one process: before that the loader itself draws, the seed of its workers.
        """
        yield from self._world.from_first(list(indices))

    def __len__(self) -> int:
        length = len(self._shown)
        if self._limit is not None:
            length = min(length, self._limit)
        return _length_of_share(length, self._world.rank, self._world.size)


def _dealt_copy(loader: DataLoader[Any], limit: int | None, world: World) -> DataLoader[Any]:
    """Return a copy of a map-style loader with its sampler dealt. It runs no constructor of the user's."""
    name = "batch_sampler"
    if loader.batch_sampler is None:  # `DataLoader(batch_size=None)`: each index is a batch
        name = "sampler"
    dealt = within_notes(getattr(loader, name), lambda sampler: _DealtIndices(sampler, limit, world))
    return cloned(loader, **{name: dealt})


class _Reading(Enum):
    """What a rank reads of a loader. `EvaluationLoader` has the table."""

    OWN = "the loader, whose data the user shares out"
    DEALT_INDICES = "a copy of the loader, whose sampler is dealt"
    DEALT_BATCHES = "all batches of the loader, and keeps its share of them"


class StreamRecord(NamedTuple):
    """What a rank has read of a stream in a pass. It is the same on all ranks if they read the same batches."""

    rounds: int
    digest: bytes  # of all batches


class EvaluationLoader(LoaderWrapper):
    """This rank's batches of a user's evaluation loader. It shows the attributes of that loader.

    | the loader                                     | what each rank reads          | its length     |
    |------------------------------------------------|-------------------------------|----------------|
    | any, where the user shares out the data        | the loader                    | as it says     |
    | a `DataLoader` of a map-style dataset          | a copy with a dealt sampler   | as it says     |
    | any other, a *stream*: all ranks read the same | the loader, and keeps a share | need not be so |

    Attributes:
        lengths: Each rank's number of batches to evaluate; None if some rank does not know.
        ranks_without_batch: The ranks that will have no batch, as far as lengths tell.
        stream_record: What this rank has read of a stream in the pass that runs, or ran last.
        is_empty: Whether this rank has no batch in that pass: known from the start, or at its end.
        is_dealt: Whether the batches are dealt; if not, the user shares out the data.
    """

    def __init__(self, loader: Any, world: World, *, is_dealt: bool, counts: Sequence[float]) -> None:
        """Take this rank's batches of a loader.

        Args:
            loader: The user's loader.
            world: The ranks.
            is_dealt: As the attribute.
            counts: How many batches each rank's loader has, as far as they are to be evaluated; infinity if it does
                not say. They are equal if the batches are dealt.
        """
        self._limit = None if counts[world.rank] == math.inf else int(counts[world.rank])
        read = loader
        if not is_dealt:
            self._reading = _Reading.OWN
        elif isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            self._reading = _Reading.DEALT_INDICES
            read = _dealt_copy(loader, self._limit, world)
        else:
            self._reading = _Reading.DEALT_BATCHES
        super().__init__(loader, read=read, shown=read, shared=self._reading is _Reading.DEALT_BATCHES)
        self.is_dealt = is_dealt
        self._world = world
        self.lengths = self._lengths(counts)
        self.stream_record = StreamRecord(0, b"")
        self.is_empty = False
        self.ranks_without_batch: list[int] = []
        if self.lengths is not None and self._reading is not _Reading.DEALT_BATCHES:
            self.ranks_without_batch = [rank for rank, length in enumerate(self.lengths) if length == 0]

    def _lengths(self, counts: Sequence[float]) -> list[int] | None:
        """Return each rank's number of batches to evaluate; None if some rank does not know."""
        if math.inf in counts:
            return None
        if self.is_dealt:
            length = int(counts[0])
            return [_length_of_share(length, rank, self._world.size) for rank in range(self._world.size)]
        return [int(length) for length in counts]

    @property
    def uneven(self) -> bool:
        """Whether some rank may have no batch in some step."""
        # A stream may be shorter than it says.
        if self._reading is _Reading.DEALT_BATCHES or self.lengths is None:
            return True
        return len(set(self.lengths)) > 1

    def __iter__(self) -> Iterator[Any]:
        self.stream_record = StreamRecord(0, b"")
        self.is_empty = self._world.rank in self.ranks_without_batch
        batches = islice(self._read, self._limit)  # a dealt copy has fewer already
        if self._reading is _Reading.DEALT_BATCHES:
            return self._noting_whether_empty(self._dealt(batches))
        if self.lengths is None:
            return self._noting_whether_empty(batches)
        return batches

    def _noting_whether_empty(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and note at their end whether there was none."""
        is_empty = True
        for batch in batches:
            is_empty = False
            yield batch
        self.is_empty = is_empty

    def _dealt(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield every `world_size`-th batch of a stream that all ranks read."""
        digest = blake2b(digest_size=16)
        rounds = 0
        size = self._world.size
        while size == self._world.size:
            # A round is read to its end before its batch is used: so all ranks have read, and compare, the same part.
            size = 0
            local_batches: list[Any] = []  # at most one; no other is kept in memory
            for batch in islice(batches, self._world.size):
                digest.update(data_digest(batch))
                if size == self._world.rank:
                    local_batches.append(batch)
                size += 1
            if size > 0:
                rounds += 1
            self.stream_record = StreamRecord(rounds, digest.digest())
            yield from local_batches

    def __len__(self) -> int:
        if self.lengths is None:
            raise TypeError(f"{type(self.loader).__name__} has no length on some rank")
        # The same on all ranks: of a length of 0, Lightning skips the loop on this rank alone, or refuses the loader.
        return max(self.lengths)


def require_each_once(sampler: DistributedSampler[Any], world_size: int) -> None:
    """Raise a ValueError unless the sampler yields each sample once, all ranks together."""
    samples: int = len(sampler.dataset)  # type: ignore[arg-type]  # it takes sized data only
    if sampler.num_replicas != world_size or sampler.total_size != samples:
        raise ValueError(
            f"the DistributedSampler of an evaluation loader yields {sampler.total_size} of {samples} samples, for"
            f" {sampler.num_replicas} replicas on {world_size} ranks, so it repeats or drops some. Leave the sampler"
            " out: the loader is dealt, and each of its batches evaluated once."
        )
