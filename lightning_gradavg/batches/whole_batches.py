"""Loaders that read whole batches on every rank, as one process does, and cut them once they are collated.

A dataset that draws random numbers, and a `collate_fn` that pads or mixes, see on every rank what they see on one
process: in the main process they draw from the random state of rank 0, and worker processes have the same seeds on all
ranks. Every rank then cuts its part out of the same batch. That costs each rank the reading of all samples, so loaders
that cannot tell the difference are still split at their indices.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeAlias, cast

from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from lightning_gradavg.batches.chunks import EMPTY_BATCH, Split
from lightning_gradavg.batches.order import Order, RandomState, restore_random_state
from lightning_gradavg.batches.sources import (
    FromBatches,
    FromIndices,
    Item,
    Source,
    clone,
    draws_once,
    indices_of,
    mismatch,
    rest,
)
from lightning_gradavg.tree import batch_samples, slice_batch

__all__ = ["FromWholeBatches", "FromWholeStream", "as_on_rank_0", "no_common_batch", "whole_source_of"]

_Asked: TypeAlias = "deque[tuple[bytes, int]]"

_END = object()

# Their items are what they hold. A subclass may draw.
_DRAW_NOTHING = (TensorDataset, Tensor, list, tuple, range)


def as_on_rank_0(worker_init_fn: Any) -> Any:
    """Return a function that seeds a worker as rank 0's is seeded, where it takes the rank as `rank`."""
    try:
        parameters = inspect.signature(worker_init_fn).parameters
    except (TypeError, ValueError):
        return worker_init_fn
    return functools.partial(worker_init_fn, rank=0) if "rank" in parameters else worker_init_fn


def _draws_nothing(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return _draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_draws_nothing, dataset.datasets))
    return type(dataset) in _DRAW_NOTHING


def _may_be_read_in_parts(loader: DataLoader[Any]) -> bool:
    """Whether the parts of a batch are the same if only they are read: no sample or batch depends on another."""
    said = any(getattr(owner, "draws_no_random_numbers", False) for owner in (loader, loader.dataset))
    return (
        (said or _draws_nothing(loader.dataset))
        and loader.collate_fn is default_collate
        and type(loader).__iter__ is DataLoader.__iter__
    )


def whole_source_of(loader: Any) -> type[Source]:
    """Return where `loader` is to be split, with every part as it is in the whole batch of one process."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return FromBatches
    if isinstance(loader.dataset, IterableDataset):
        return FromWholeStream
    return FromIndices if _may_be_read_in_parts(loader) else FromWholeBatches


def no_common_batch(loader: Any) -> str:
    """Return why a loader whose ranks read their own data cannot be cut into the replicas of one batch."""
    return (
        f"{type(loader).__name__} or its dataset {type(getattr(loader, 'dataset', None)).__name__} has"
        " sharded_by_rank = True: the ranks' batches are not one batch, whose replicas equivalent_to= and num_replicas="
        " share out over the ranks. Remove the attribute and have every rank read the same data; or leave these"
        " options out and set split_batches=False."
    )


class FromWholeStream(FromBatches):
    """Splits the batches that a copy of an iterable-style loader collates."""

    def __init__(self, loader: DataLoader[Any], split: Split, count: Callable[[], int]) -> None:
        super().__init__(clone(loader, worker_init_fn=as_on_rank_0(loader.worker_init_fn)), split, count)


class _IndexBatches:
    """The user's batches of indices, noted as they are asked for. The batch sampler of a copy of the loader."""

    def __init__(self, batch_sampler: Any) -> None:
        self._batch_sampler = batch_sampler
        self._order = Order()
        self._asked: _Asked = deque()
        self._in_process = self._reloads = False
        self._left: RandomState | None = None

    def begin(self, order: Order, *, in_process: bool) -> tuple[_Asked, bool]:
        """Begin a pass.

        Args:
            order: Its order.
            in_process: Whether samples are loaded in this process, between the draws of the sampler.

        Returns:
            Where the fingerprint and the number of samples of every batch asked for wait, and whether batches to pass
            over are among them, because the draws of the sampler depend on those that loading them makes.
        """
        replay = order.replay
        self._order, self._asked, self._in_process = order, deque(), in_process
        self._left = replay.common if replay is not None and in_process else None
        self._reloads = in_process and not draws_once(self._batch_sampler)
        return self._asked, self._reloads

    def __len__(self) -> int:
        return len(self._batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        order = self._order
        with order.shared():
            order.reach("made")
            batches = iter(self._batch_sampler)
        # Loaded in this process, the first batch is asked for where the pass reads it, which has told the order.
        drawn = rest(batches, order, once=draws_once(self._batch_sampler), reached=self._in_process)
        return self._noted(drawn, order, self._asked)

    def _noted(self, batches: Iterator[Any], order: Order, asked: _Asked) -> Iterator[Any]:
        hashed = order.shares
        for batch in batches:
            indices, key = indices_of(batch, hashed=hashed)
            if len(indices) == 0:
                raise ValueError(EMPTY_BATCH)
            if not self._reloads and order.skips(key):
                if self._left is not None and order.replay is None:
                    # After the draws of the samples that were loaded then and are not now.
                    restore_random_state(self._left)
                continue
            asked.append((key, len(indices)))
            yield indices


class FromWholeBatches:
    """Splits the batches that a copy of a map-style loader collates.

    A resumed pass passes over batches at their indices, so that what was trained on is not loaded again; except where
    samples are loaded in this process and the sampler may draw between them: its draws then depend on theirs.
    """

    alike: ClassVar[bool] = True

    def __init__(self, loader: DataLoader[Any], split: Split, count: Callable[[], int]) -> None:
        self._user_loader = loader
        self._split = split
        self._count = count
        self._indices = _IndexBatches(cast("Any", loader.batch_sampler))
        self.loader = clone(loader, batch_sampler=self._indices, worker_init_fn=as_on_rank_0(loader.worker_init_fn))

    def __len__(self) -> int:
        return len(self._indices) * self._count()

    def read(self, order: Order) -> Iterator[Item]:
        """Start one pass; the batches are split as they come."""
        in_process = self.loader.num_workers == 0
        asked, reloads = self._indices.begin(order, in_process=in_process)
        with order.shared():
            batches = iter(self.loader)
        return self._chunks(self._matched(batches, asked, order, in_process=in_process), order, reloads=reloads)

    def _matched(
        self, batches: Iterator[Any], asked: _Asked, order: Order, *, in_process: bool
    ) -> Iterator[tuple[Any, bytes]]:
        for batch in rest(batches, order, reached=not in_process):
            if not asked:
                raise mismatch(self._user_loader, "more")
            key, samples = asked.popleft()
            self._require_rows(batch, samples)
            yield batch, key
        if asked:
            raise mismatch(self._user_loader, "fewer")

    def _require_rows(self, batch: Any, samples: int) -> None:
        rows = batch_samples(batch)
        if rows % samples != 0:
            raise ValueError(
                f"a batch of {samples} samples of {type(self._user_loader).__name__} has {rows} rows along dimension 0,"
                " along which it would be cut into replicas. Have collate_fn put the samples along dimension 0 of all"
                " tensors, the same number of rows for each."
            )

    def _chunks(self, batches: Iterator[tuple[Any, bytes]], order: Order, *, reloads: bool) -> Iterator[Item]:
        seen = 0
        for batch, key in batches:
            if reloads and order.skips(key):
                continue
            seen += 1
            if seen & (seen - 1) == 0:
                order.require(
                    batch,
                    f"the ranks read other samples for the same indices: found at batch {seen} that"
                    f" {type(self._user_loader).__name__} read in this epoch. With equivalent_to= or num_replicas="
                    " every rank reads the whole batch and takes its part. Have the dataset and collate_fn draw from"
                    " the global generators of torch, random or NumPy, which are those of rank 0, or from one that is"
                    " seeded alike on every rank.",
                )
            for chunk in self._split.cut(batch_samples(batch), self._count()):
                yield slice_batch(batch, chunk.start, chunk.stop), chunk, key
