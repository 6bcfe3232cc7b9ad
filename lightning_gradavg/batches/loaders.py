"""Training loaders whose batches are the global batches: every rank gets its own chunk of each.

`BatchSplitter.wrap(loader)` returns a `SplitLoader`, an iterable of this rank's micro-batches. The user's samplers are
asked as they are, on every rank, and what they yield is split:

* a map-style dataset: the batch sampler's indices, so that only the rank's own samples are loaded;
* an iterable-style dataset: the samples, before they are collated;
* an iterable of batches, or `batch_size=None`: the collated batch (`slice_batch`).

With `whole_batches` the collated batch is split in the first two cases, too, see
`lightning_gradavg.batches.whole_batches`.

**The order** is that of one process with the random state of rank 0. When an epoch's iterator is made, and when its
first batch is asked for, rank 0 sends the state of torch's, Python's and NumPy's global generators; samplers draw from
it on every rank. A rank whose own state was equal moves on as one process would; another keeps its own. Fingerprints
of the batches are compared between the ranks: at batch 1, 2, 4, 8, ..., or at every batch where the length is unknown.
Iterating is therefore a collective operation: all ranks do it, or none.

**Which micro-batch is in training** is told by `BatchSplitter.take()`. A batch reaches the user's hooks in the user's
own type, so nothing can travel inside it: what stands behind it waits in a queue of the iterator that yielded it, and
is taken once per training step, in order. A queue, because Lightning fetches one batch ahead where the length is
unknown. One per iterator, and those of the training loop are asked for: an epoch may be left early, a user may look at
a batch of the loader, and Lightning restarts the shorter of two loaders while its last batch is still to be trained on.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DistributedSampler

from lightning_gradavg.batches.chunks import Chunk, Split
from lightning_gradavg.batches.loader_state import LoaderState
from lightning_gradavg.batches.order import Agree, Broadcast, Order, RandomState, random_state, restore_random_state
from lightning_gradavg.batches.resume import Pass, Pending
from lightning_gradavg.batches.sources import Source, loader_batch_size, source_of
from lightning_gradavg.batches.split_loader import ResumableSplitLoader, SplitIterator, SplitLoader, StatefulSplitLoader
from lightning_gradavg.batches.whole_batches import no_common_batch, whole_source_of

__all__ = ["BatchSplitter", "ResumableSplitLoader", "SplitIterator", "SplitLoader"]


@dataclass
class BatchSplitter:
    """Makes the split loaders of one rank, and holds what they have in common.

    Attributes:
        split: How loader batches are split, and which part is this rank's.
        broadcast: Returns rank 0's object on every rank; None in a world of one.
        agree: Returns, on every rank, whether all ranks gave the same bytes; None in a world of one.
        whole_batches: Whether every rank reads whole batches, so that random numbers, padding and mixing are those of
            one process, unless a loader is known to be the same without.
        taken: What stands behind the batches in training now, for every split loader in order; None for one that is
            exhausted.
        micro_batches: How many micro-batches every rank takes of each loader batch: the number of batches to accumulate
            for one loader batch. The most that any loader wrapped so far needs.
        window_batches: How many loader batches an optimizer step takes. States of loaders are those of the last
            complete window of the epoch: the gradients of another are not in a checkpoint, so it is repeated.
        epoch_ended: Returns whether no further batch of the epoch will be trained on, although loaders may have some;
            None for never. Asked when a state is saved: resumed from it, the next epoch begins a new pass.
        waiting: The iterators that begin when one of them is read: those of a resumed run.
        over: Whether a loader of a resumed run ended before training took anything.
        batches_taken: How many loader batches of the epoch were trained on, up to the last complete window.
    """

    split: Split
    broadcast: Broadcast | None = None
    agree: Agree | None = None
    whole_batches: bool = False
    taken: list[Chunk | None] = field(default_factory=list, init=False)
    micro_batches: int = field(default=1, init=False)
    window_batches: int = field(default=1, init=False)
    epoch_ended: Callable[[], bool] | None = field(default=None, init=False)
    batches_taken: int = field(default=0, init=False)
    over: bool = field(default=False, init=False)
    waiting: deque[weakref.ref[SplitIterator]] = field(default_factory=deque, init=False)
    # Not the iterators themselves: the workers of an epoch that is left must be able to end.
    _epoch: weakref.ref[Any] | None = field(default=None, init=False)
    _queues: list[deque[Pending]] = field(default_factory=list, init=False)
    _batches: int = field(default=0, init=False)
    _in_window: bool = field(default=False, init=False)
    _left: list[Pass | None] | None = field(default=None, init=False)
    _states: deque[Any] | None = field(default=None, init=False)
    _random: RandomState | None = field(default=None, init=False)

    def resume(self, states: Sequence[Any]) -> None:
        """Give the loaders that are wrapped next, in this order, the states that a checkpoint holds.

        Lightning does this itself only within an epoch, and not at its end.

        Args:
            states: What `state_dict` of the loaders returned, in the order of `CombinedLoader.flattened`.
        """
        self._states = deque(states) if states else None

    def source_of(self, loader: Any) -> type[Source]:
        """Return where `loader` is to be split."""
        return whole_source_of(loader) if self.whole_batches else source_of(loader)

    def go_on(self, state: LoaderState) -> None:
        """Count the batches and restore the random state of a loader's state. Called by the loaders."""
        self.batches_taken = 0 if state["complete"] else state["epoch_batches"]
        self._batches, self._epoch, self._queues = self.batches_taken, None, []
        self._random, self.over = state["random"], False
        restore_random_state(self._random)

    def passes_read(self) -> list[Pass]:
        """Return the passes that the iterators of the current epoch read now. Called by the loaders."""
        return [iterator.newest for iterator in self._iterators() if iterator.newest is not None]

    @contextmanager
    def set_up(self) -> Iterator[None]:
        """Read a loader. Until a resumed run is set up, what others draw does not count."""
        if self._random is not None:
            restore_random_state(self._random)
        yield
        if self._random is not None:
            self._random = random_state()

    def end_set_up(self, combined_loader: Any = None) -> None:
        """Set the global random state to that of the checkpoint, before hooks of the resumed run may draw from it.

        To be called when the loaders have been set up. Lightning makes and drops iterators of training and validation
        loaders before that, which draw.

        Args:
            combined_loader: The `CombinedLoader` that the training loop reads. It is told which loaders were already
                started again in the epoch: without lengths, it ends an epoch once all of them have been.
        """
        if self._random is not None:
            restore_random_state(self._random)
            self._random = None
        epoch: Any = getattr(combined_loader, "_iterator", None)
        if hasattr(epoch, "_consumed"):
            for index, iterator in enumerate(epoch.iterators):
                if isinstance(iterator, SplitIterator) and iterator.loader._passes.started_again:
                    epoch._consumed[index] = True

    def wrap(self, loader: Any) -> SplitLoader:
        """Return `loader` split. A collective operation.

        Args:
            loader: A `DataLoader`, of any subclass, or an iterable of batches. Where it or its dataset has a true
                attribute `sharded_by_rank`, every rank reads its own part of the data: then its batches are not shared
                out, and only cut into micro-batches.

        Raises:
            ValueError: If the loader cannot be split, or the ranks' loaders differ.
        """
        if isinstance(loader, SplitLoader):
            loader = loader.loader
        owners = (loader, getattr(loader, "dataset", None))
        sharded = any(getattr(owner, "sharded_by_rank", False) for owner in owners)
        split = Split(max_samples=self.split.max_samples) if sharded else self.split
        largest = loader_batch_size(loader)
        problem = _problem(loader, split, largest, sharded=sharded)
        if sharded and (self.whole_batches or self.split.replicas is not None):
            problem = no_common_batch(loader)
        count = 0 if problem else split.count(largest)
        workers = getattr(loader, "num_workers", 0) > 0
        # A problem that only some ranks have is raised by them all: nobody waits for a rank that has given up.
        Order(agree=self.agree).require(
            (self.source_of(loader).__name__, sharded, count, workers),
            problem
            or f"the ranks' train loaders differ: on this rank it is a {type(loader).__name__} of batch size {largest},"
            f" {'with' if workers else 'without'} workers{', sharded_by_rank' if sharded else ''}.",
        )
        if problem:
            raise ValueError(problem)
        self.micro_batches = max(self.micro_batches, count)
        kept = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        # Rank 0 saves: it knows nothing of the other ranks' own data.
        kind = StatefulSplitLoader if kept else SplitLoader if sharded else ResumableSplitLoader
        wrapped = kind(loader, self, split, sharded=sharded)
        if self._states is not None and isinstance(wrapped, (ResumableSplitLoader, StatefulSplitLoader)):
            if not self._states:
                raise ValueError(
                    "the checkpoint holds the states of fewer train loaders than this run has. Resume with the train"
                    " loaders of the run that saved it."
                )
            wrapped.load_state_dict(self._states.popleft())
        return wrapped

    def take(self, combined_loader: Any) -> Chunk | None:
        """Return what stands behind the batch to train on now. To be called once for every batch, in order.

        Args:
            combined_loader: The `CombinedLoader` that the training loop reads, of split and other loaders.

        Returns:
            The chunk of the first split loader that is not exhausted; None where there is none.

        Raises:
            RuntimeError: If a rank or a replica would have samples of one loader and none of another: no weight of the
                step can count the one and not the other. Raised on all ranks alike.
        """
        self.taken = self.take_each(combined_loader)
        chunks = [chunk for chunk in self.taken if chunk is not None]
        if self.split.replicas is not None and len({chunk.batch_replicas for chunk in chunks}) > 1:
            sizes = " and ".join(f"{chunk.batch_samples} samples in {chunk.batch_replicas}" for chunk in chunks)
            raise RuntimeError(
                f"the batches of the train loaders, now {sizes} of num_replicas={self.split.replicas}, do not reach the"
                " same replicas, so some replica has samples of one loader and none of another. Set drop_last=True, or"
                " use batch sizes that give every replica samples of every loader."
            )
        if len({(chunk.ranks, chunk.stand_in) for chunk in chunks}) > 1:
            sizes = " and ".join(str(chunk.batch_samples) for chunk in chunks)
            raise RuntimeError(
                f"the batches of the train loaders, now {sizes} samples, do not reach the same ranks, so some rank has"
                " samples of one loader and none of another. Set drop_last=True, or use batch sizes that give every"
                " rank samples of every loader."
            )
        return chunks[0] if chunks else None

    def take_each(self, combined_loader: Any) -> list[Chunk | None]:
        """Return what `take` returns for every split loader, in order; None for one that is exhausted."""
        epoch = combined_loader._iterator  # a new one for every epoch, whose iterators are replaced as they end
        iterators = [iterator for iterator in epoch.iterators if isinstance(iterator, SplitIterator)]
        queues = [iterator.pending for iterator in iterators]
        if self._epoch is not None and self._epoch() is epoch:
            for before, now in zip(self._queues, queues, strict=True):
                if before is not now:
                    _move(before, now)
        else:
            for iterator in iterators:
                # Lightning fetches ahead, and may start a loader of one batch again before that is taken.
                if iterator.before and not any(iterator.before is queue for queue in self._queues):
                    _move(iterator.before, iterator.pending)
            self._begin_epoch(iterators)
        self._epoch, self._queues = weakref.ref(epoch), queues
        if not self._in_window and self._left != [iterator.newest for iterator in iterators]:
            self._leave_mark(iterators)
        self._in_window, self._left = True, None
        chunks = [queue.popleft().take() if queue else None for queue in queues]
        if any(chunk is not None and chunk.index == chunk.count - 1 for chunk in chunks):
            self._batches += 1
            if self._batches % self.window_batches == 0:
                self.batches_taken, self._in_window = self._batches, False
                for iterator in iterators:
                    iterator.loader._passes.mark()
        return chunks

    def before_read(self, iterator: SplitIterator) -> None:
        """Note the random states before the first batch of a window is read, which may draw. Called by iterators."""
        iterators = self._iterators()
        # Fetched ahead, it would be read within the window before.
        if not self._in_window and self._left is None and iterator in iterators and not iterator.pending:
            self._leave_mark(iterators)
            self._left = [each.newest for each in iterators]

    def _leave_mark(self, iterators: Sequence[SplitIterator]) -> None:
        if self.window_batches * self.micro_batches > 1:
            own = random_state()
            for iterator in iterators:
                iterator.loader._passes.leave_mark(own)

    def _iterators(self) -> list[SplitIterator]:
        """Return those of the current epoch."""
        epoch = self._epoch() if self._epoch is not None else None
        return [] if epoch is None else [each for each in epoch.iterators if isinstance(each, SplitIterator)]

    def _begin_epoch(self, iterators: Sequence[SplitIterator]) -> None:
        if self._states:
            raise ValueError(
                f"the checkpoint holds the states of {len(self._states)} more train loaders than this run has. Resume"
                " with the train loaders of the run that saved it."
            )
        if self._epoch is not None:
            self._batches = 0
        self._states, self._random, self.over = None, None, False
        self.batches_taken, self._in_window = self._batches, False
        for iterator in iterators:
            iterator.loader._passes.enter(iterator.oldest)


def _move(before: deque[Pending], now: deque[Pending]) -> None:
    """Have what waits in `before` be taken first from `now`."""
    while before:
        now.appendleft(before.pop())


def _problem(loader: Any, split: Split, largest: int | None, *, sharded: bool) -> str | None:
    """Return why `loader` cannot be split, or None."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    for sampler in samplers:
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1 and not sharded:
            return (
                f"the train loader has a DistributedSampler for {sampler.num_replicas} replicas, but with"
                " split_batches=True the loader's batches are the global batches, which the strategy splits. Give the"
                " loader the sampler of a run on one device, or set split_batches=False."
            )
    if not getattr(loader, "in_order", True) and getattr(loader, "num_workers", 0) > 0:
        return (
            "in_order=False lets the workers hand over batches in an order of their own, so the ranks' chunks would not"
            " make up one batch. Use in_order=True with split_batches=True."
        )
    if split.max_samples is not None and largest is None:
        return (
            f"max_device_batch_size={split.max_samples} needs to know the largest batch of {type(loader).__name__}, to"
            " have all ranks accumulate alike. Give the loader, its batch sampler or its dataset an attribute"
            " `batch_size` with it, or leave max_device_batch_size out and set accumulate_grad_batches."
        )
    return None
