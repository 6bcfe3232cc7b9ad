"""Where a loader is split: at the indices it asks for, at the samples it collates, or at the batches it yields."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, cast

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_gradavg.batches.chunks import Chunk, Split
from lightning_gradavg.batches.order import Order
from lightning_gradavg.tree import batch_samples, fingerprint, slice_batch

__all__ = [
    "FromBatches",
    "FromIndices",
    "FromSamples",
    "Item",
    "Source",
    "clone",
    "draws_once",
    "indices_of",
    "loader_batch_size",
    "mismatch",
    "rest",
    "source_of",
]

Item: TypeAlias = tuple[Any, Chunk, bytes]
"""A micro-batch, what stands behind it, and the fingerprint of the loader batch."""

_Asked: TypeAlias = "deque[tuple[Chunk, bytes]]"

_END = object()

# They draw from a global generator for their first index only, and are spared the 0.1 ms per batch of sharing it.
_DRAW_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Source(Protocol):
    """One rank's micro-batches of a user's loader.

    Attributes:
        loader: What is iterated: the user's loader, or a copy of it.
        alike: Whether every rank reads every sample.
    """

    loader: Any
    alike: ClassVar[bool]

    def __init__(self, loader: Any, split: Split, count: Callable[[], int]) -> None: ...

    def __len__(self) -> int: ...

    def read(self, order: Order) -> Iterator[Item]:
        """Start one pass over the loader at once, and return its micro-batches, `count()` per loader batch."""
        ...


def clone(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a copy with other attributes, of any subclass, without running a constructor that may not know them."""
    copy = object.__new__(type(loader))
    copy.__dict__.update({**loader.__dict__, "_iterator": None, **attributes})
    return copy


def _read(loader: Iterable[Any], order: Order) -> Iterator[Any]:
    with order.shared():
        batches = iter(loader)
        order.reach("made")
    return rest(batches, order)


def rest(batches: Iterator[Any], order: Order, *, once: bool = False, reached: bool = False) -> Iterator[Any]:
    """Yield the batches, each drawn from the ranks' common random state.

    Args:
        batches: What yields them.
        order: The order of the pass.
        once: Whether only the first one is drawn.
        reached: Whether the order has been told that the first batch is asked for.
    """
    if not reached:
        order.reach("first")
    while True:
        with order.shared():
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch
        if once:
            yield from batches
            return


def draws_once(batch_sampler: Any) -> bool:
    """Whether a batch sampler is known to draw random numbers for its first indices only."""
    return type(batch_sampler) is BatchSampler and type(batch_sampler.sampler) in _DRAW_ONCE


def indices_of(batch: Any, *, hashed: bool) -> tuple[Any, bytes]:
    """Return a batch of indices, of any kind, as something that has a length, and its fingerprint."""
    indices = batch if hasattr(batch, "__len__") else list(batch)
    key = fingerprint(indices.tolist() if isinstance(indices, Tensor) else list(indices)) if hashed else b""
    return indices, key


def mismatch(loader: Any, what: str) -> RuntimeError:
    """Return the error for a loader that does not yield one batch for each batch of indices."""
    return RuntimeError(
        f"{type(loader).__name__} yielded {what} batches than its batch_sampler was asked for, so split_batches=True"
        " cannot tell which samples a batch holds. Use a loader whose __iter__ yields one batch per batch of indices,"
        " or wrap it in an iterable of your own, whose batches are split once they are collated."
    )


class FromIndices:
    """Splits the index batches of a map-style loader. It is the batch sampler of a copy of the loader."""

    alike: ClassVar[bool] = False

    def __init__(self, loader: DataLoader[Any], split: Split, count: Callable[[], int]) -> None:
        self._user_loader = loader
        self._split = split
        self._count = count
        self._order = Order()
        self._asked: _Asked = deque()
        self.loader = clone(loader, batch_sampler=self)

    def read(self, order: Order) -> Iterator[Item]:
        """Start one pass; the user's batch sampler is asked as the loader goes."""
        self._order, self._asked = order, deque()
        with order.shared():
            batches = iter(self.loader)
        return self._matched(batches, self._asked)

    def _matched(self, batches: Iterator[Any], asked: _Asked) -> Iterator[Item]:
        for batch in batches:
            if not asked:
                raise mismatch(self._user_loader, "more")
            yield batch, *asked.popleft()
        if asked:
            raise mismatch(self._user_loader, "fewer")

    def __len__(self) -> int:
        return len(cast("Any", self._user_loader.batch_sampler)) * self._count()

    def __iter__(self) -> Iterator[Any]:
        batch_sampler = cast("Any", self._user_loader.batch_sampler)
        with self._order.shared():
            self._order.reach("made")
            batches = iter(batch_sampler)
        return self._chunks(rest(batches, self._order, once=draws_once(batch_sampler)), self._asked, self._order)

    def _chunks(self, batches: Iterator[Any], asked: _Asked, order: Order) -> Iterator[Any]:
        hashed = order.shares
        for batch in batches:
            indices, key = indices_of(batch, hashed=hashed)
            if order.skips(key):
                continue
            for chunk in self._split.cut(len(indices), self._count()):
                asked.append((chunk, key))
                yield indices[chunk.start : chunk.stop]


class _Collated(NamedTuple):
    """What the copy of an iterable-style loader yields, through worker processes and pinned memory."""

    samples: int
    key: bytes
    batches: list[Any]


@dataclass(frozen=True)
class _ChunkCollate:
    """Collates this rank's micro-batches of a list of samples. Sent to worker processes."""

    collate: Callable[[list[Any]], Any]
    split: Split
    count: int
    hashed: bool

    def __call__(self, samples: list[Any]) -> _Collated:
        key = fingerprint((len(samples), samples[0], samples[-1])) if self.hashed else b""
        chunks = self.split.cut(len(samples), self.count)
        return _Collated(len(samples), key, [self.collate(samples[chunk.start : chunk.stop]) for chunk in chunks])


class FromSamples:
    """Splits the samples that an iterable-style loader is about to collate."""

    alike: ClassVar[bool] = True

    def __init__(self, loader: DataLoader[Any], split: Split, count: Callable[[], int]) -> None:
        self._collate = loader.collate_fn
        self._split = split
        self._count = count
        self.loader = clone(loader)

    def read(self, order: Order) -> Iterator[Item]:
        """Start one pass; the samples are split before they are collated, in the worker where there are workers."""
        count = self._count()
        self.loader.collate_fn = _ChunkCollate(self._collate, self._split, count, order.shares)
        return self._chunks(_read(self.loader, order), count, order)

    def _chunks(self, collated: Iterator[_Collated], count: int, order: Order) -> Iterator[Item]:
        for samples, key, batches in collated:
            if order.skips(key):
                continue
            yield from zip(batches, self._split.cut(samples, count), [key] * count, strict=True)

    def __len__(self) -> int:
        return len(self.loader) * self._count()


class FromBatches:
    """Splits the batches of any iterable."""

    alike: ClassVar[bool] = True

    def __init__(self, loader: Any, split: Split, count: Callable[[], int]) -> None:
        self._split = split
        self._count = count
        self.loader = loader

    def read(self, order: Order) -> Iterator[Item]:
        """Start one pass; the batches are split as they come."""
        return self._chunks(_read(self.loader, order), order)

    def _chunks(self, batches: Iterator[Any], order: Order) -> Iterator[Item]:
        hashed = order.shares
        for batch in batches:
            key = fingerprint(batch) if hashed else b""
            if order.skips(key):
                continue
            for chunk in self._split.cut(batch_samples(batch), self._count()):
                yield slice_batch(batch, chunk.start, chunk.stop), chunk, key

    def __len__(self) -> int:
        return len(self.loader) * self._count()


def source_of(loader: Any) -> type[Source]:
    """Return where `loader` is to be split."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return FromBatches
    return FromSamples if isinstance(loader.dataset, IterableDataset) else FromIndices


def loader_batch_size(loader: Any) -> int | None:
    """Return the samples in a batch of `loader`, or None where it does not say."""
    holders = (loader, getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None))
    sizes = (getattr(holder, "batch_size", None) for holder in holders)
    return next((size for size in sizes if isinstance(size, int)), None)
