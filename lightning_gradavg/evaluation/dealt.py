"""Loaders whose batches are dealt to the ranks: each batch is evaluated once, by one rank.

The batches stay whole, and of every `world_size` of them, which make up a *round*, each rank takes one. So each batch
is the one that a single process would see, nothing is repeated, and there are as many rounds as with
`DistributedSampler`: ceil(ceil(N / B) / W) = ceil(ceil(N / W) / B). The last round may have fewer batches than ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lightning_gradavg._lightning.internals import cloned, within_notes
from lightning_gradavg._lightning.loaders import LoaderWrapper, Shows
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.tree import data_digest

__all__ = ["EvaluationLoader", "require_each_once"]


class _DealtIndices(Shows):
    """This rank's share of what a sampler yields; in a copy of the loader it stands in the sampler's place."""

    def __init__(self, sampler: Any, limit: int | None, world: World) -> None:
        super().__init__(sampler)
        self._limit, self._world = limit, world

    def __iter__(self) -> Iterator[Any]:
        indices: Iterator[Any] = islice(self._shown, self._limit)
        inner = self._shown.sampler if type(self._shown) is BatchSampler else self._shown
        of_all = indices if type(inner) is SequentialSampler else self._of_first(indices)
        return islice(of_all, self._world.rank, None, self._world.size)

    def _of_first(self, indices: Iterator[Any]) -> Iterator[Any]:
        # They may be drawn from a generator that differs between the ranks. Each draws, to move on, and rank 0's count.
        # They are drawn for the first batch, as on one process, where the loader itself draws before.
        yield from self._world.from_first(list(indices))

    def __len__(self) -> int:
        return len(range(len(self._shown))[: self._limit][self._world.rank :: self._world.size])


def _dealt_copy(loader: DataLoader[Any], limit: int | None, world: World) -> DataLoader[Any]:
    """Return a copy of a map-style loader with its sampler dealt, without running a constructor."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    dealt = within_notes(getattr(loader, name), lambda sampler: _DealtIndices(sampler, limit, world))
    return cloned(loader, **{name: dealt})


class EvaluationLoader(LoaderWrapper):
    """This rank's batches of a user's evaluation loader; it shows that one's attributes.

    Args:
        loader: The user's loader.
        world: The ranks.
        kept: Whether the user shares out the data; otherwise the batches are dealt.
        counts: How many batches each rank's loader has, as far as they are to be evaluated; infinity if it tells none.

    Attributes:
        lengths: Each rank's number of batches to evaluate; None if some rank does not know.
        ranks_without_batch: The ranks that will have no batch, as far as lengths tell.
        read: How many rounds of a stream were read in this pass, and the digest of their batches.
        is_empty: Whether this rank has no batch in this pass: known from the start, or at the end.
    """

    def __init__(self, loader: Any, world: World, *, kept: bool, counts: Sequence[float]) -> None:
        finite = None if math.inf in counts else list(map(int, counts))
        dealt = finite and [len(range(rank, finite[0], world.size)) for rank in range(world.size)]
        self.lengths = finite if kept else dealt
        self._limit = None if counts[world.rank] == math.inf else int(counts[world.rank])
        indexed = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        read = _dealt_copy(loader, self._limit, world) if indexed and not kept else loader
        self._streamed = not kept and read is loader
        super().__init__(loader, read=read, shown=read, shared=self._streamed)
        self.kept, self._world, self.read = kept, world, (0, b"")
        self.is_empty = False
        # What a stream says of its length need not be so.
        lengths = [] if self._streamed or self.lengths is None else self.lengths
        self.ranks_without_batch = [rank for rank, length in enumerate(lengths) if length == 0]

    @property
    def uneven(self) -> bool:
        """Whether some rank may have no batch in some step. What a stream says of its length need not be so."""
        return self._streamed or self.lengths is None or len(set(self.lengths)) > 1

    def __iter__(self) -> Iterator[Any]:
        self.read = 0, b""
        self.is_empty = self._world.rank in self.ranks_without_batch
        batches = islice(self._read, self._limit)  # of what is dealt there are fewer already
        if self._streamed:
            return self._noted(self._dealt(batches))
        return self._noted(batches) if self.lengths is None else batches

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and note whether there was none."""
        is_empty = True
        for batch in batches:
            is_empty = False
            yield batch
        self.is_empty = is_empty

    def _dealt(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield every `world_size`-th batch of a stream that all ranks read."""
        rank, world_size = self._world.rank, self._world.size
        digest, size, rounds = blake2b(digest_size=16), world_size, 0
        while size == world_size:
            # A round is read to its end before its batch is used: so all ranks have read, and compare, the same part.
            size, own = 0, []
            for batch in islice(batches, world_size):
                digest.update(data_digest(batch))
                if size == rank:
                    own.append(batch)  # no other is kept in memory
                size += 1
            rounds += size > 0
            self.read = (rounds, digest.digest())
            yield from own

    def __len__(self) -> int:
        if self.lengths is None:
            raise TypeError(f"{type(self.loader).__name__} has no length on some rank")
        # The same on all ranks: Lightning skips a loop, and refuses a loader, whose own rank has nothing.
        return max(self.lengths)


def require_each_once(sampler: DistributedSampler[Any], world_size: int) -> None:
    """Raise a ValueError unless the sampler yields each sample once on so many ranks."""
    samples: int = len(sampler.dataset)  # type: ignore[arg-type]  # it takes sized data only
    if (sampler.num_replicas, sampler.total_size) != (world_size, samples):
        raise ValueError(
            f"the DistributedSampler of an evaluation loader yields {sampler.total_size} of {samples} samples, for"
            f" {sampler.num_replicas} replicas on {world_size} ranks, so it repeats or drops some. Leave the sampler"
            " out: the loader is dealt, and each of its batches evaluated once."
        )
