"""Loaders whose batches are dealt to the ranks: each batch is evaluated once, by one rank.

The batches stay whole, and of every `world_size` of them, which make up a *round*, each rank takes one. So each batch
is the one that a single process would see, nothing is repeated, and there are as many rounds as with
`DistributedSampler`: ceil(ceil(N / B) / W) = ceil(ceil(N / W) / B). The last round may have fewer batches than ranks.

Each batch is loaded, moved and evaluated from a random stream of its own, which names no rank (`EvaluationStreams`). So
what is logged does not depend on the number of ranks, and evaluation never moves the random state of training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_gradavg._lightning.internals import forget_noted_indices
from lightning_gradavg._lightning.loaders import LoaderWrapper, Shows
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.random_state import (
    RandomState,
    drawing_from,
    random_state,
    restore_random_state,
    seed_generators,
    seeded,
)
from lightning_gradavg._support.tree import data_digest
from lightning_gradavg.batches.cut import LoadedBatch, Request, indices_copy
from lightning_gradavg.batches.loader import Reading, reading_of
from lightning_gradavg.batches.streams import OrderStream

__all__ = ["EvaluationLoader", "EvaluationStreams", "PassRecord", "StreamKey", "require_each_once"]

_END = object()  # not None, which a user's loader may yield
_MANY = 2**32
"""More batches than a rank evaluates: numbers of batches that ranks have to themselves begin at multiples of it."""


def _length_of_share(length: int, rank: int, world_size: int) -> int:
    """Return how many of a number of batches are dealt to a rank."""
    return len(range(rank, length, world_size))


StreamKey: TypeAlias = Callable[..., bytes | None]
"""Returns the key of the stream of something in a loader, such as `("step", number of the batch)`.

None where a user looks at the data outside of evaluation: then nothing but the process's own state is drawn from.
"""


class EvaluationStreams:
    """The random streams of the passes over evaluation loaders.

    A loader's iterator calls `enter` with each batch that it yields: from there to the next batch, hooks, transfer and
    step draw from the batch's stream. `restore` ends the pass.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own: RandomState | None = None  # the process's own state, within a pass
        self._own_of_device: Any = None

    def enter(self, key: bytes | None) -> None:
        """Draw from the stream of a key from here on; without a key, change nothing."""
        if key is None:
            return
        on_accelerator = self._device.type != "cpu"
        if self._own is None:
            self._own = random_state()
            if on_accelerator:
                self._own_of_device = getattr(torch, self._device.type).get_rng_state()
        seed_generators(key, self._device)

    @contextmanager
    def drawing_own(self) -> Iterator[None]:
        """Draw from the process's own state within the context, also between two loaders of a pass."""
        if self._own is None:
            yield
            return
        of_batch = random_state()
        restore_random_state(self._own)
        try:
            yield
        finally:
            self._own = random_state()
            restore_random_state(of_batch)

    def own_state(self) -> RandomState:
        """Return the process's own state, to which `restore` returns."""
        if self._own is not None:
            return self._own
        return random_state()

    def restore(self) -> None:
        """Return to the process's own state, at the end of a pass."""
        if self._own is None:
            return
        restore_random_state(self._own)
        if self._own_of_device is not None:
            getattr(torch, self._device.type).set_rng_state(self._own_of_device)
        self._own = None
        self._own_of_device = None


class _DealtSampler(Shows):
    """This rank's share of what a sampler yields. In a copy of the loader it stands in the sampler's place.

    Attributes:
        digest: Of all that the sampler yielded in the pass that runs, or ran last.
    """

    def __init__(self, sampler: Any, limit: Callable[[], int | None], world: World, key: StreamKey) -> None:
        """Deal what a sampler yields, or as many of its first items as `limit` returns when a pass begins."""
        super().__init__(sampler)
        self._limit = limit
        self._world = world
        self._key = key
        self.digest = b""

    def __iter__(self) -> Iterator[Request]:
        # All ranks ask their samplers from one stream, so all have the same order. It is drawn at once: between
        # the batches other streams are drawn from. `limit_*_batches` counts batches before they are dealt.
        with drawing_from(self._key("order")):
            batches = [_as_yielded(batch) for batch in islice(self._shown, self._limit())]
        self.digest = data_digest(batches)
        # Lightning notes all that a sampler yields, for prediction writers: here only this rank's batches count.
        noted = forget_noted_indices(self._shown)
        for number in range(self._world.rank, len(batches), self._world.size):
            noted.append(batches[number])
            yield Request(number, [batches[number]], [self._key("load", number)])

    def __len__(self) -> int:
        length = len(self._shown)
        limit = self._limit()
        if limit is not None:
            length = min(length, limit)
        return _length_of_share(length, self._world.rank, self._world.size)


def _as_yielded(batch: Any) -> Any:
    """Return what a sampler yields, but for an iterator of indices a list: it is read twice."""
    return list(batch) if isinstance(batch, Iterator) else batch


class _Source(Enum):
    """What a rank reads its batches from. `EvaluationLoader` has the table."""

    OWN = "the loader, whose data the user shares out"
    DEALT_INDICES = "a copy of the loader, whose sampler is dealt"
    DEALT_BATCHES = "all batches of the loader, and keeps its share of them"


class PassRecord(NamedTuple):
    """What a rank has read in a pass, of which it evaluates a part. Ranks compare it: they must have read the same."""

    rounds: int  # of a stream; 0 where indices are dealt
    digest: bytes  # of all batches, or of all indices


class EvaluationLoader(LoaderWrapper):
    """This rank's batches of a user's evaluation loader. It shows the attributes of that loader.

    | the loader                                     | what each rank reads          | its length     |
    |------------------------------------------------|-------------------------------|----------------|
    | any, where the user shares out the data        | the loader                    | as it says     |
    | a `DataLoader` of a map-style dataset          | a copy with a dealt sampler   | as it says     |
    | any other, a *stream*: all ranks read the same | the loader, and keeps a share | may be another |

    A subclass of `DataLoader` with an `__iter__` of its own is a stream: it may read ahead, or ask its sampler when it
    likes.

    Attributes:
        is_empty: Whether this rank has no batch in the pass that runs, or ran last. Known at its start, or at its end.
        is_dealt: Whether the batches are dealt; if not, the user shares out the data.
    """

    is_dealt: bool
    is_empty: bool

    def __init__(
        self,
        loader: Any,
        world: World,
        streams: EvaluationStreams,
        key: StreamKey,
        drawing_order: Callable[[], AbstractContextManager[None]],
        *,
        is_dealt: bool,
        counts: Sequence[float],
        most: Callable[[], float],
    ) -> None:
        """Take this rank's batches of a loader.

        Args:
            loader: The user's loader.
            world: The ranks.
            streams: The streams of the run's passes.
            key: The keys of this loader's streams.
            drawing_order: The context in which seeds of workers are drawn, as one process draws them.
            is_dealt: As the attribute.
            counts: How many batches each rank's loader has, as far as they are to be evaluated; infinity if it does
                not say. They are equal if the batches are dealt.
            most: Returns how many batches a pass evaluates at most, if they are dealt: a sanity check has a limit.
        """
        source = _Source.DEALT_BATCHES
        if not is_dealt:
            source = _Source.OWN
        elif reading_of(loader) is Reading.INDICES:
            source = _Source.DEALT_INDICES
        super().__init__(loader, shared=source is _Source.DEALT_BATCHES)
        self._source = source
        self._streams = streams
        self._key = key
        self._drawing_order = drawing_order
        self._counts = counts
        self._most = most
        self._sampler: _DealtSampler | None = None  # of the pass that runs, or ran last
        self.is_dealt = is_dealt
        self._world = world
        self._pass_record = PassRecord(0, b"")
        self.is_empty = False

    def _limit(self) -> int | None:
        """Return how many batches this rank reads of its loader, or all ranks of one that is dealt; None for all."""
        limit = self._counts[self._world.rank]
        if self.is_dealt:
            limit = min(limit, self._most())
        if limit == math.inf:
            return None
        return int(limit)

    def _lengths(self, most: float) -> list[int] | None:
        """Return each rank's number of batches, if at most so many are dealt; None if some rank does not know."""
        if math.inf in self._counts:
            return None
        if self.is_dealt:
            length = int(min(self._counts[0], most))
            return [_length_of_share(length, rank, self._world.size) for rank in range(self._world.size)]
        return [int(count) for count in self._counts]

    @property
    def ranks_without_batch(self) -> list[int]:
        """The ranks that have no batch in the pass at hand, as far as lengths tell."""
        lengths = self._lengths(self._most())
        if lengths is None or self._source is _Source.DEALT_BATCHES:
            return []
        return [rank for rank, length in enumerate(lengths) if length == 0]

    @property
    def pass_record(self) -> PassRecord:
        """What this rank has read in the pass that runs, or ran last. It is the same on all ranks if their data are."""
        if self._sampler is not None:
            return PassRecord(0, self._sampler.digest)
        return self._pass_record

    def __iter__(self) -> Iterator[Any]:
        self._pass_record = PassRecord(0, b"")
        self.is_empty = self._world.rank in self.ranks_without_batch
        read: Any = self.loader
        if self._source is _Source.DEALT_INDICES:
            read = self._copy_of_pass()
        with self._streams.drawing_own(), self._drawing_order():
            # A `DataLoader` draws the seed of its workers here. On one process the order of training follows from it.
            batches = iter(read)
        if self._source is _Source.DEALT_INDICES:
            return self._evaluated(self._loaded(batches))
        # Dealt indices are loaded each from its own stream. Here a reader draws as it goes on from batch to batch.
        batches = self._read_apart(islice(batches, self._limit()))
        if self._source is _Source.DEALT_BATCHES:
            return self._noting_whether_empty(self._evaluated(self._dealt(batches)))
        numbered = enumerate(batches, start=self._world.rank * _MANY)
        if math.inf in self._counts:
            return self._noting_whether_empty(self._evaluated(numbered))
        return self._evaluated(numbered)

    def _copy_of_pass(self) -> DataLoader[Any]:
        """Return the copy of the loader that is read, made anew for each pass unless its workers persist."""
        if self._copy is not None:
            copy: DataLoader[Any] = self._copy
            return copy
        loader: DataLoader[Any] = self.loader
        sampler = loader.sampler
        if loader.batch_sampler is not None:
            sampler = loader.batch_sampler
        self._sampler = _DealtSampler(sampler, self._limit, self._world, self._key)
        copy = indices_copy(loader, self._sampler, worker_init_fn=self.worker_init_fn, generator=loader.generator)
        if loader.num_workers > 0 and loader.persistent_workers:
            self._copy = copy
        return copy

    def _loaded(self, batches: Iterator[LoadedBatch]) -> Iterator[tuple[int, Any]]:
        """Yield the batches that this rank loads, each with its number in the loader."""
        for loaded in batches:
            (batch,) = loaded.pieces
            yield loaded.number, batch

    def _read_apart(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield what a loader yields. What it draws as it is read comes from one stream of the pass, "read"."""
        key = self._key("read")
        if key is None:
            yield from batches
            return
        reader = OrderStream(seeded(key))
        while True:
            with reader.drawing(apart=True):
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch

    def _evaluated(self, numbered: Iterator[tuple[int, Any]]) -> Iterator[Any]:
        """Yield the batches, each to be evaluated from its own stream."""
        for number, batch in numbered:
            self._streams.enter(self._key("step", number))
            yield batch
        self._streams.enter(self._key("end"))

    def _noting_whether_empty(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and note at their end whether there was none."""
        is_empty = True
        for batch in batches:
            is_empty = False
            yield batch
        self.is_empty = is_empty

    def _dealt(self, batches: Iterator[Any]) -> Iterator[tuple[int, Any]]:
        """Yield every `world_size`-th batch of a stream that all ranks read, with its number."""
        digest = blake2b(digest_size=16)
        rounds = 0
        while True:
            # A round is read to its end before its batch is used: so all ranks have read, and compare, the same part.
            size = 0
            local_batches: list[tuple[int, Any]] = []  # at most one; no other is kept in memory
            for batch in islice(batches, self._world.size):
                digest.update(data_digest(batch))
                if size == self._world.rank:
                    local_batches.append((rounds * self._world.size + size, batch))
                size += 1
            if size > 0:
                rounds += 1
            self._pass_record = PassRecord(rounds, digest.digest())
            yield from local_batches
            if size < self._world.size:
                return

    def __len__(self) -> int:
        # Without the limit of a sanity check: Lightning asks once for all passes.
        lengths = self._lengths(math.inf)
        if lengths is None:
            raise TypeError(f"{type(self.loader).__name__} has no length on some rank")
        # The same on all ranks: of a length of 0, Lightning skips the loop on this rank alone, or refuses the loader.
        return max(lengths)


def require_each_once(sampler: DistributedSampler[Any], world_size: int) -> None:
    """Raise a ValueError unless the sampler yields each sample once, all ranks together."""
    samples: int = len(sampler.dataset)  # type: ignore[arg-type]  # it takes sized data only
    if sampler.num_replicas != world_size or sampler.total_size != samples:
        raise ValueError(
            f"the DistributedSampler of an evaluation loader yields {sampler.total_size} of {samples} samples, for"
            f" {sampler.num_replicas} replicas on {world_size} ranks, so it repeats or drops some. Leave the sampler"
            " out: the loader is dealt, and each of its batches evaluated once."
        )
