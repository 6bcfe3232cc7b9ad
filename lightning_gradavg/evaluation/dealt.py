"""Loaders whose batches are dealt to the ranks: each batch is evaluated once, by one rank.

The batches stay whole, and of every `world_size` of them, which make up a *round*, each rank takes one. So each batch
is the one that a single process would see, nothing is repeated, and there are as many rounds as with
`DistributedSampler`: ceil(ceil(N / B) / W) = ceil(ceil(N / W) / B). The last round may have fewer batches than ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lightning_gradavg.lightning_internals import cloned, within_notes
from lightning_gradavg.loaders import LoaderWrapper, Shows
from lightning_gradavg.ranks import World
from lightning_gradavg.tree import data_digest

__all__ = ["EvaluationLoader", "compare_streams", "sampler_problem"]


class _DealtIndices(Shows):
    """This rank's share of what a sampler yields; in a copy of the loader it stands in the sampler's place."""

    def __init__(self, sampler: Any, limit: int | None, world: World) -> None:
        super().__init__(sampler)
        self._limit, self._world = limit, world

    def __iter__(self) -> Iterator[Any]:
        indices: Any = islice(self._shown, self._limit)
        inner = self._shown.sampler if type(self._shown) is BatchSampler else self._shown
        if type(inner) is not SequentialSampler:
            # It may draw from a generator that differs between the ranks. Each draws, to move on, and rank 0's counts.
            indices = self._world.from_first(list(indices))
        return islice(indices, self._world.rank, None, self._world.size)

    def __len__(self) -> int:
        return len(range(len(self._shown))[: self._limit][self._world.rank :: self._world.size])


def _dealt_copy(loader: DataLoader[Any], limit: int | None, world: World) -> DataLoader[Any]:
    """Return a copy of a map-style loader with its sampler dealt, without running a constructor."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    dealt = within_notes(getattr(loader, name), lambda sampler: _DealtIndices(sampler, limit, world))
    return cloned(loader, **{name: dealt})


class EvaluationLoader(LoaderWrapper):
    """This rank's batches of a user's evaluation loader, at most `limit` of it in all; it shows that one's attributes.

    Attributes:
        kept: Whether the user shares out the data; otherwise the batches are dealt.
        lengths: Each rank's number of batches; None if some rank does not know.
        begun: Whether a batch was taken in this pass, while there is one.
        read: How many rounds of a stream were read in this pass, and the digest of their batches.
    """

    def __init__(
        self, loader: Any, world: World, *, kept: bool, limit: int | None, lengths: Sequence[int] | None
    ) -> None:
        indexed = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        read = _dealt_copy(loader, limit, world) if indexed and not kept else loader
        self._streamed = not kept and read is loader
        super().__init__(loader, read=read, shown=read, shared=self._streamed)
        self.kept, self.lengths = kept, lengths
        self._world, self._limit = world, limit
        self.begun = False
        self.read = (0, b"")

    @property
    def uneven(self) -> bool:
        """Whether some rank may have no batch in some step. What a stream says of its length need not be so."""
        return self._streamed or self.lengths is None or len(set(self.lengths)) > 1

    def __iter__(self) -> Iterator[Any]:
        self.begun, self.read = False, (0, b"")
        batches = islice(self._read, self._limit)  # of what is dealt there are fewer already
        return self._noted(self._dealt(batches) if self._streamed else batches)

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.begun = True
            yield batch

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

    def describe(self) -> str:
        """Return one line that says what is done with the loader."""
        name = type(self.loader).__name__
        if self.kept:
            return f"{name}: every rank evaluates its own batches"
        if self._streamed:
            return f"{name}: every rank reads all batches and evaluates one of every {self._world.size}"
        return f"{name}: its batches are dealt to {self._world.size} ranks, each of them once"


def compare_streams(of_ranks: Sequence[Sequence[tuple[int, bytes]]], *, together: bool) -> None:
    """Raise unless all ranks read the same, by `EvaluationLoader.read` of each rank's loaders.

    Of loaders that were read `together`, one that ends may keep a rank from reading another on.
    """
    for index, reads in enumerate(zip(*of_ranks, strict=True)):
        of_equal_length = len({rounds for rounds, _ in reads}) == 1
        if len(set(reads)) > 1 and (of_equal_length or not together):
            raise RuntimeError(
                f"evaluation loader {index} does not yield the same batches on all ranks, so some were left out and"
                " others evaluated more than once. Where every rank reads its own part of the data, set"
                " `sharded_by_rank = True` on the loader or its dataset; otherwise make it independent of the rank."
            )


def sampler_problem(sampler: DistributedSampler[Any] | None, world_size: int) -> str | None:
    """Return why the sampler does not yield each sample once on so many ranks; None where it does, or is none."""
    if sampler is None:
        return None
    samples: int = len(sampler.dataset)  # type: ignore[arg-type]  # it takes sized data only
    if sampler.num_replicas == world_size and sampler.total_size == samples:
        return None
    return (
        f"the DistributedSampler of an evaluation loader yields {sampler.total_size} of {samples} samples, for"
        f" {sampler.num_replicas} replicas on {world_size} ranks, so it repeats or drops some. Leave the sampler out:"
        " the loader is dealt, and each of its batches evaluated once."
    )
