"""A training loader that yields this rank's micro-batches of the user's batches, and keeps its place in them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

from torch import Generator

from lightning_gradavg.batches.chunks import Chunk, Split
from lightning_gradavg.batches.loader_state import LoaderState, checked_state
from lightning_gradavg.batches.order import Agree, Broadcast, Order, RandomState, Replay
from lightning_gradavg.batches.resume import Pass, Passes, Pending
from lightning_gradavg.batches.sources import FromIndices, Item, Source
from lightning_gradavg.batches.whole_batches import FromWholeBatches, as_on_rank_0

__all__ = ["ResumableSplitLoader", "SplitIterator", "SplitLoader", "StatefulSplitLoader", "length_of"]

_Yielded: TypeAlias = tuple[Any, Chunk, bytes]
"""A micro-batch, what stands behind it, and the digest of all loader batches up to its own."""


class Splitter(Protocol):
    """What the split loaders of a rank have in common; see `lightning_gradavg.batches.loaders.BatchSplitter`."""

    split: Split
    broadcast: Broadcast | None
    agree: Agree | None
    micro_batches: int
    epoch_ended: Callable[[], bool] | None
    batches_taken: int
    waiting: deque[weakref.ref[SplitIterator]]
    over: bool

    def source_of(self, loader: Any) -> type[Source]:
        """Return where a loader is to be split."""
        ...

    def passes_read(self) -> list[Pass]:
        """Return the passes that the iterators of the current epoch read now."""
        ...

    def set_up(self) -> AbstractContextManager[None]:
        """Read a loader."""
        ...

    def before_read(self, iterator: SplitIterator) -> None:
        """Note what reading the iterator may change."""
        ...

    def go_on(self, state: LoaderState) -> None:
        """Take over what the state of a loader says of the whole run."""
        ...


class SplitIterator(Iterator[Any]):
    """One pass over a split loader.

    Attributes:
        loader: The loader.
        pending: What stands behind the batches that were yielded and not taken yet, oldest first.
        before: Those of the iterator that it replaces, which was read to its end; None where there is none.
    """

    def __init__(self, loader: SplitLoader) -> None:
        self.loader = loader
        self.pending: deque[Pending] = deque()
        self.before: deque[Pending] | None = loader._ended() if loader._ended is not None else None
        self._at_state = loader._passes.starts_at_state
        self._pass: Pass | None = None
        self._items: Iterator[_Yielded] = iter(())
        # Where a checkpoint is gone on from, Lightning draws random numbers and sets the epoch of samplers after this.
        if loader._passes.continues:
            loader._splitter.waiting.append(weakref.ref(self))
        else:
            self._begin()

    def _begin(self) -> Pass:
        if self._pass is None:
            make, over = self.loader._new_order, self.loader._splitter.over
            self._pass = self.loader._passes.begin(self.pending, make, at_state=self._at_state, over=over)
            self._items = self.loader._read(self._pass.order)
        return self._pass

    def __next__(self) -> Any:
        self.loader._splitter.before_read(self)
        with self.loader._splitter.set_up():
            # In the order in which they were made, as if they had not waited: they may draw from one random state.
            waiting = self.loader._splitter.waiting
            while waiting:
                iterator = waiting.popleft()()
                if iterator is not None:
                    iterator._begin()
            within = self._begin()
            item = next(self._items, None)
        if item is None:
            within.exhausted = True
            if self.loader._passes.continues and within.batches == within.order.batches:
                self.loader._splitter.over = True
            self.loader._ended = weakref.ref(self.pending)
            raise StopIteration
        batch, chunk, digest = item
        self.pending.append(Pending(chunk, digest, within))
        return batch

    @property
    def newest(self) -> Pass | None:
        """The pass that it reads; None where that has not begun."""
        return self._pass

    @property
    def oldest(self) -> Pass | None:
        """The pass of the batch to take next."""
        return self.pending[0].within if self.pending else self._pass


def _compared(items: Iterator[Item], order: Order, *, sized: bool) -> Iterator[_Yielded]:
    digest = b""
    for batch, chunk, key in items:
        if chunk.index == 0:
            order.add(key, sized=sized)
            digest = order.digest
        yield batch, chunk, digest
    order.finish()


class SplitLoader:
    """A training loader that yields this rank's micro-batches of the user's batches.

    All other attributes are those of the user's loader. `len()` is the number of micro-batches per epoch: those of the
    user's loader times `BatchSplitter.micro_batches`.

    Attributes:
        loader: The user's loader, untouched.
    """

    def __init__(self, loader: Any, splitter: Splitter, split: Split, *, sharded: bool) -> None:
        self.loader = loader
        self._splitter = splitter
        self._passes = Passes(loader)
        self._ended: weakref.ref[deque[Pending]] | None = None
        self._sharded = sharded
        self._source: Source = splitter.source_of(loader)(loader, split, lambda: splitter.micro_batches)

    def __iter__(self) -> SplitIterator:
        return SplitIterator(self)

    def _new_order(self, generators: Sequence[Generator], replay: Replay | None, *, seeded: bool) -> Order:
        """Return the order of the next pass. A collective operation."""
        if self._sharded:
            return Order()
        return Order(self._splitter.broadcast or _alone, self._splitter.agree, generators, replay, seeded=seeded)

    def _read(self, order: Order) -> Iterator[_Yielded]:
        """Start one pass in that order. A collective operation."""
        length = length_of(self)
        order.require(("length", length), f"the ranks' train loaders differ: on this rank the length is {length}.")
        return _compared(self._source.read(order), order, sized=length is not None)

    def __len__(self) -> int:
        return len(self._source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)

    @property
    def _iterator(self) -> Any:
        # Lightning shuts down persistent workers through this attribute.
        return self._source.loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._source.loader._iterator = iterator

    @property
    def worker_init_fn(self) -> Any:
        """Run in every worker process. Lightning sets it, to seed workers by the rank."""
        return self._source.loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        # Seeded by its rank, a worker might read in another order.
        reads_alike = self._source.alike and not self._sharded
        self._source.loader.worker_init_fn = as_on_rank_0(function) if reads_alike else function

    def describe(self) -> str:
        """Return one line that says what is done with the loader."""
        what = type(self.loader).__name__
        samplers = [getattr(self.loader, name, None) for name in ("batch_sampler", "sampler")]
        kept = " and ".join(type(sampler).__name__ for sampler in samplers if sampler is not None)
        split = self._splitter.split
        if self._sharded:
            return f"{what}: every rank trains on its own batches (sharded_by_rank is set)"
        if isinstance(self._source, (FromIndices, FromWholeBatches)):
            what += f" with its {kept}"
        reads = "every rank reads whole batches" if self._source.alike else "each rank loads its own samples only"
        parts = f"{split.replicas or split.world_size} chunks on {split.world_size} ranks"
        return (
            f"{what}: used as it is, its batches are the global batches, in {parts}"
            + (
                f", in {self._splitter.micro_batches} micro-batches of at most {split.max_samples} samples per rank"
                if split.max_samples
                else ""
            )
            + f"; {reads}"
        )


class ResumableSplitLoader(SplitLoader):
    """A split loader whose place a checkpoint holds, in loader batches and samples of the global order.

    What was taken is not loaded again where the samples have indices. Of an iterable-style dataset, and of an iterable
    of batches, it has to be read again and is dropped.
    """

    def state_dict(self) -> LoaderState:
        """Return where training stands: the same on all ranks, for any world size and any size of micro-batches.

        Samples of an incomplete window, see `BatchSplitter.window_batches`, count as not taken.
        """
        source = self._source.loader
        workers = getattr(self.loader, "persistent_workers", False) and getattr(source, "_iterator", None) is not None
        splitter = self._splitter
        return self._passes.state(
            ended=splitter.epoch_ended is not None and splitter.epoch_ended(),
            spent=splitter.passes_read(),
            epoch_batches=splitter.batches_taken,
            seeded=bool(workers),
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """Have the next pass go on from there: at once where an epoch was over, or after the batches taken.

        Raises:
            ValueError: If it is not the state of such a loader.
        """
        state = checked_state(state_dict)
        self._passes.load(state)
        self._splitter.go_on(state)


class StatefulSplitLoader(SplitLoader):
    """A split loader whose user's loader keeps its place itself; only then Lightning may see these two methods."""

    def state_dict(self) -> Any:
        """Return what the user's loader returns."""
        return self._source.loader.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Give the user's loader its state."""
        self._source.loader.load_state_dict(state_dict)


def _alone(value: RandomState) -> RandomState:
    """Stand in for a broadcast in a world of one, whose order is drawn as that of any other world."""
    return value


def length_of(loader: Any) -> int | None:
    """Return the length of `loader`, or None where it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
