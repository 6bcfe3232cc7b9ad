"""Where a loader is split: at the indices it asks for, at the samples it collates, or at the batches it yields.

* `FromIndices`: a map-style dataset, so that a rank loads its own samples only.
* `FromSamples`: an iterable-style dataset, before the samples are collated.
* `FromBatches`: an iterable of batches, or `batch_size=None`.

Where the batches are to be those of one process with all that random numbers, padding and mixing make of them, every
rank reads whole batches and cuts its part out of what `collate_fn` returns (`FromBatches`, `FromWholeBatches`): in the
main process datasets draw from the random state of rank 0, and worker processes have the same seeds on all ranks. That
costs each rank the reading of all samples, so loaders that cannot tell the difference are still split at their indices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from lightning_gradavg.batches.chunks import EMPTY_BATCH, Chunk, Split
from lightning_gradavg.batches.order import Order, require_alike
from lightning_gradavg.lightning_internals import cloned
from lightning_gradavg.tree import batch_samples, data_digest, slice_batch

__all__ = [
    "FromBatches",
    "FromIndices",
    "FromSamples",
    "FromWholeBatches",
    "source_of",
]

Item: TypeAlias = tuple[Any, Chunk, bytes]
"""A micro-batch, what stands behind it, and the digest of all loader batches up to its own."""

# They draw from a global generator for their first index only, and are spared the 0.1 ms per batch of sharing it.
_DRAW_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)

# Their items are what they hold. A subclass may draw.
_DRAW_NOTHING = (TensorDataset, Tensor, list, tuple, range)


class FromBatches:
    """Splits the batches of any iterable, as they come.

    Args:
        loader: The user's loader.
        split: How its batches are split.
        count: Returns how many micro-batches a rank takes of each.
        replaced: Attributes that the loader is to have instead of the user's.

    Attributes:
        loader: What is iterated: the user's iterable, or a copy of a `DataLoader`.
        alike: Whether every rank reads every sample.
        reads: The same in words.
    """

    alike: ClassVar[bool] = True
    reads: ClassVar[str] = "every rank reads whole batches"

    def __init__(self, loader: Any, split: Split, count: Callable[[], int], **replaced: Any) -> None:
        self.loader: Any = cloned(loader, **replaced) if isinstance(loader, DataLoader) else loader
        self._user_loader = loader
        self._split = split
        self._count = count

    def __len__(self) -> int:
        return len(self.loader) * self._count()

    @property
    def name(self) -> str:
        """What the user knows the loader by."""
        return type(self._user_loader).__name__

    def read(self, order: Order) -> Iterator[Item]:
        """Start one pass over the loader at once, and return this rank's micro-batches of it."""
        with order.drawing():
            batches = iter(self.loader)
            order.agree("made")
        return self._cut(order.drawn(batches), order)

    def _cut(self, batches: Iterator[Any], order: Order) -> Iterator[Item]:
        count = self._count()
        for each in batches:
            batch, key, samples = self._opened(each, order)
            digest = order.note(key)
            if digest is not None:
                for chunk in self._split.cut(samples, count):
                    yield self._part(batch, chunk), chunk, digest
        order.finish()

    def _opened(self, batch: Any, order: Order) -> tuple[Any, bytes, int]:  # noqa: ARG002  # one signature for all sources
        """Return a batch, its digest and its number of samples."""
        return batch, data_digest(batch), batch_samples(batch)

    def _part(self, batch: Any, chunk: Chunk) -> Any:
        return slice_batch(batch, chunk.start, chunk.stop)


class _Collated(NamedTuple):
    """What the copy of an iterable-style loader yields, through worker processes and pinned memory."""

    samples: int
    key: bytes
    parts: list[Any]


@dataclass(frozen=True)
class _CollateParts:
    """Collates this rank's micro-batches of a list of samples. Sent to worker processes."""

    collate: Callable[[list[Any]], Any]
    split: Split
    count: int

    def __call__(self, samples: list[Any]) -> _Collated:
        key = data_digest((len(samples), samples[0], samples[-1]))
        chunks = self.split.cut(len(samples), self.count)
        return _Collated(len(samples), key, [self.collate(samples[chunk.start : chunk.stop]) for chunk in chunks])


class FromSamples(FromBatches):
    """Splits the samples that an iterable-style loader is about to collate, in the worker where there are workers."""

    def read(self, order: Order) -> Iterator[Item]:
        """Start one pass."""
        self.loader.collate_fn = _CollateParts(self._user_loader.collate_fn, self._split, self._count())
        return super().read(order)

    def _opened(self, batch: _Collated, order: Order) -> tuple[Any, bytes, int]:  # noqa: ARG002  # one signature for all sources
        return batch.parts, batch.key, batch.samples

    def _part(self, batch: list[Any], chunk: Chunk) -> Any:
        return batch[chunk.index]


class _IndexBatches(FromBatches):
    """Splits the batches of a batch sampler, indices of any kind."""

    def read(self, order: Order) -> Iterator[Item]:
        """Start one pass."""
        return self._cut(_index_batches(self.loader, order, once=_draws_once(self.loader)), order)

    def _opened(self, batch: Any, order: Order) -> tuple[Any, bytes, int]:  # noqa: ARG002  # one signature for all sources
        return _opened_indices(batch)

    def _part(self, batch: Any, chunk: Chunk) -> Any:
        return batch[chunk.start : chunk.stop]


def _index_batches(batch_sampler: Any, order: Order, *, once: bool = False) -> Iterator[Any]:
    """Return the batches of a user's batch sampler, which is asked at once for its iterator."""
    with order.drawing():
        order.agree("made")
        batches = iter(batch_sampler)
    return order.drawn(batches, once=once)


def _opened_indices(batch: Any) -> tuple[Any, bytes, int]:
    """Return a batch of indices as something that has a length, its digest, and its length."""
    indices = batch if hasattr(batch, "__len__") else list(batch)
    return indices, data_digest(indices.tolist() if isinstance(indices, Tensor) else list(indices)), len(indices)


def _draws_once(batch_sampler: Any) -> bool:
    """Whether a batch sampler is known to draw random numbers for its first indices only."""
    return type(batch_sampler) is BatchSampler and type(batch_sampler.sampler) in _DRAW_ONCE


class _FromBatchSampler(FromBatches):
    """Splits what a map-style loader makes of its indices. It is the batch sampler of a copy of the loader."""

    def __init__(self, loader: DataLoader[Any], split: Split, count: Callable[[], int]) -> None:
        super().__init__(loader, split, count, batch_sampler=self)
        self._batch_sampler: Any = loader.batch_sampler

    def __len__(self) -> int:
        return len(self._batch_sampler) * self._count()

    @property
    def name(self) -> str:
        """What the user knows the loader by, and its samplers."""
        samplers = f"{type(self._batch_sampler).__name__} and {type(self._user_loader.sampler).__name__}"
        return f"{super().name} with its {samplers}"


class FromIndices(_FromBatchSampler):
    """Splits the index batches, so that a rank loads its own samples only."""

    alike: ClassVar[bool] = False
    reads: ClassVar[str] = "each rank loads its own samples only"

    def __init__(self, loader: DataLoader[Any], split: Split, count: Callable[[], int]) -> None:
        super().__init__(loader, split, count)
        self._indices = _IndexBatches(loader.batch_sampler, split, count)

    def read(self, order: Order) -> Iterator[Item]:
        """Start one pass; the user's batch sampler is asked as the loader goes."""
        self._order = order
        self._asked: deque[tuple[Chunk, bytes]] = deque()
        with order.drawing():
            batches = iter(self.loader)
        return ((batch, *behind) for batch, behind in _matched(batches, self._asked, self._user_loader))

    def __iter__(self) -> Iterator[Any]:
        return self._noted(self._indices.read(self._order), self._asked)

    def _noted(self, items: Iterator[Item], asked: deque[tuple[Chunk, bytes]]) -> Iterator[Any]:
        for indices, chunk, digest in items:
            asked.append((chunk, digest))
            yield indices


def _matched(batches: Iterator[Any], asked: deque[Any], loader: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the batches of a copy of `loader`, each with what was noted when its indices were asked for."""
    for batch in batches:
        if not asked:
            raise _mismatch(loader, "more")
        yield batch, asked.popleft()
    if asked:
        raise _mismatch(loader, "fewer")


def _mismatch(loader: Any, what: str) -> RuntimeError:
    return RuntimeError(
        f"{type(loader).__name__} yielded {what} batches than its batch_sampler was asked for, so split_batches=True"
        " cannot tell which samples a batch holds. Use a loader whose __iter__ yields one batch per batch of indices,"
        " or wrap it in an iterable of your own, whose batches are split once they are collated."
    )


class FromWholeBatches(_FromBatchSampler):
    """Splits the batches that the copy of the loader collates.

    A resumed pass passes over batches at their indices, so that what was trained on is not loaded again; except where
    samples are loaded in this process and the sampler may draw between them: its draws then depend on theirs.
    """

    def read(self, order: Order) -> Iterator[Item]:
        """Start one pass; the batches are split as they come."""
        self._order, self._seen = order, 0
        self._asked: deque[tuple[bytes, int]] = deque()
        with order.drawing():
            batches = iter(self.loader)
        return self._cut(_matched(order.drawn(batches), self._asked, self._user_loader), order)

    def __iter__(self) -> Iterator[Any]:
        return self._noted(_index_batches(self._batch_sampler, self._order), self._order, self._asked)

    def _noted(self, batches: Iterator[Any], order: Order, asked: deque[tuple[bytes, int]]) -> Iterator[Any]:
        in_process = self.loader.num_workers == 0
        reloads = in_process and not _draws_once(self._batch_sampler)
        for batch in batches:
            indices, key, samples = _opened_indices(batch)
            if samples == 0:
                raise ValueError(EMPTY_BATCH)
            if order.behind and not reloads:
                order.note(key)
                if in_process and not order.behind:
                    # After the draws of the samples that were loaded then and are not now.
                    order.go_on()
                continue
            asked.append((key, samples))
            yield indices

    def _opened(self, item: tuple[Any, tuple[bytes, int]], order: Order) -> tuple[Any, bytes, int]:
        batch, (key, samples) = item
        rows, name = batch_samples(batch), type(self._user_loader).__name__
        if rows % samples != 0:
            raise ValueError(
                f"a batch of {samples} samples of {name} has {rows} rows along dimension 0,"
                " along which it would be cut into replicas. Have collate_fn put the samples along dimension 0 of all"
                " tensors, the same number of rows for each."
            )
        self._seen += 1
        if self._seen & (self._seen - 1) == 0:
            require_alike(
                order.world,
                batch,
                f"the ranks read other samples for the same indices: found at batch {self._seen} that {name} read in"
                " this epoch. With equivalent_to= or num_replicas= every rank reads the whole batch and takes its part."
                " Have the dataset and collate_fn draw from the global generators of torch, random or NumPy, which are"
                " those of rank 0, or from one that is seeded alike on every rank.",
            )
        return batch, key, rows


def source_of(loader: Any, *, whole: bool) -> type[FromBatches]:
    """Return where `loader` is to be split, if `whole` with every part as it is in the whole batch of one process."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return FromBatches
    if isinstance(loader.dataset, IterableDataset):
        return FromBatches if whole else FromSamples
    return FromWholeBatches if whole and not _may_be_read_in_parts(loader) else FromIndices


def _may_be_read_in_parts(loader: DataLoader[Any]) -> bool:
    """Whether the parts of a batch are the same if only they are read: no sample or batch depends on another."""
    said = any(getattr(owner, "draws_no_random_numbers", False) for owner in (loader, loader.dataset))
    return (
        (said or _draws_nothing(loader.dataset))
        and loader.collate_fn is default_collate
        and type(loader).__iter__ is DataLoader.__iter__
    )


def _draws_nothing(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return _draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_draws_nothing, dataset.datasets))
    return type(dataset) in _DRAW_NOTHING
