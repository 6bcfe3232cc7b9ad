"""Training loaders whose batches are the global batches: every rank gets its own chunk of each.

`BatchSplitter.wrap(loader)` returns a `SplitLoader`, an iterable of this rank's micro-batches. The user's
samplers are asked as they are, on every rank, and what they yield is split, see `lightning_gradavg.batches.sources`.
Iterating is a collective operation: all ranks do it, or none.

**Which micro-batch is in training** is told by `BatchSplitter.take()`. A batch reaches the user's hooks in the user's
own type, so nothing can travel inside it: what stands behind it waits in the iterator that yielded it, and is taken
once per training step, in order. A queue, because Lightning fetches one batch ahead where the length is unknown. One
per iterator, and those of the training loop are asked: an epoch may be left early, and a user may look at a batch of
the loader.

**Where training stands** is told by the same queues: the pass of the next batch to take, and those begun after it.
Taken is not yielded: Lightning and worker processes fetch ahead, and a training loop may leave a pass early.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypedDict, cast

import torch
from torch.utils.data import DataLoader

from lightning_gradavg.batches.chunks import Chunk, Split
from lightning_gradavg.batches.order import LoaderParts, Order, PassState, Start, Taken, require_alike
from lightning_gradavg.batches.sources import FromIndices, FromWholeBatches, source_of
from lightning_gradavg.lightning_internals import TrainingLoop
from lightning_gradavg.loaders import LoaderWrapper, distributed_sampler, is_sharded, loader_batch_size, user_loader
from lightning_gradavg.random_state import RandomState, random_state, restore_random_state
from lightning_gradavg.ranks import World

__all__ = ["BatchSplitter", "ResumableSplitLoader", "SplitIterator", "SplitLoader", "StatefulSplitLoader"]

_FORMAT = 1


class LoaderState(TypedDict):
    """Where training stands in a loader. The same on all ranks, and for every world size.

    Attributes:
        format: Version of this format.
        complete: Whether the epoch is over, so that the next pass starts at its first batch.
        batches: Loader batches of the first of `passes` that were trained on.
        samples: Samples in them.
        epoch_batches: Loader batches of the epoch that were trained on. Of a loader that was started again within the
            epoch, being shorter than another, it is more than `batches`.
        digest: Of the fingerprints of these batches, in hexadecimal digits.
        passes: The pass; then those that were already begun after it, because Lightning fetches ahead. None after a
            complete epoch.
        generators: States of the loader's own generators now.
        objects: States of the samplers and datasets that have some, now.
        seeded: Whether worker processes outlive the epoch, so that the next pass draws no seed for them.
        random: Rank 0's global random state after these batches.
    """

    format: int
    complete: bool
    batches: int
    samples: int
    epoch_batches: int
    digest: str
    passes: list[PassState]
    generators: list[torch.Tensor]
    objects: list[Any]
    seeded: bool
    random: RandomState


def checked_state(state: Any, parts: LoaderParts) -> LoaderState:
    """Return `state` if the loader of these parts can go on from it.

    Raises:
        ValueError: If it is no state of a split loader, or that of one with other generators or stateful parts.
    """
    if not (
        isinstance(state, dict) and state.get("format") == _FORMAT and LoaderState.__required_keys__ <= state.keys()
    ):
        found = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"the checkpoint's state of a train loader is not one of format {_FORMAT} of a loader split with"
            f" split_batches=True; it holds {found}. Resume with the strategy and the train loaders that saved it."
        )
    for what, mine, theirs in (
        ("generators of its own", parts.generators, state["generators"]),
        ("samplers and datasets with a state_dict", parts.objects, state["objects"]),
    ):
        if len(mine) != len(theirs):
            raise ValueError(
                f"the train loader has {len(mine)} {what}, but that of the checkpoint had {len(theirs)}. Resume"
                " with the sampler and dataset of the run that saved it."
            )
    return cast("LoaderState", state)


class SplitIterator(Iterator[Any]):
    """One pass over a split loader.

    Where a checkpoint is gone on from, the pass begins when it is read: Lightning draws random numbers and sets the
    epoch of samplers after it is made, and may drop it. Until training takes something, any that is made goes on from
    there.

    Attributes:
        loader: The loader.
        order: The order of the pass; None before it began.
        ended: Whether it ended and nothing was taken since. Then the training loop makes another one only to start the
            shorter of two loaders again, while its last batch, fetched ahead, may still be to be trained on.
        following: The passes of another run that are gone through again by those that follow it in this way.
    """

    def __init__(self, loader: SplitLoader) -> None:
        splitter = loader._splitter
        before = next((each for each in splitter.loop.iterators if each.loader is loader and each.ended), None)
        resumed = splitter.resumed.get(loader)
        self.loader, self.ended = loader, False
        self.order: Order | None = None
        self._pending: deque[tuple[Chunk, bytes, Order]] = deque() if before is None else before._pending
        self.following: deque[PassState] = deque() if before is None else before.following
        self._taken, self._seeded = Taken(), False
        if resumed is not None and before is None:
            begun = [] if loader.begun is None else [loader.begun.state()]
            self.following.extend(resumed["passes"] or begun)
            self._seeded = resumed["complete"] and resumed["seeded"]
            # Of a complete epoch nothing was taken: the next pass starts at its first batch.
            self._taken = Taken(resumed["batches"], resumed["samples"], bytes.fromhex(resumed["digest"]))
        if resumed is None:
            self.begin()

    def begin(self) -> None:
        """Begin the pass, unless it has begun. A collective operation."""
        if self.order is None:
            again = self.following.popleft() if self.following else None
            self.order = Order(self.loader.loader, self.loader._world, Start(again, self._taken, self._seeded))
            self.loader.begun = self.order
            self._items = self.loader._source.read(self.order)

    def __next__(self) -> Any:
        splitter = self.loader._splitter
        with splitter.reading(self):
            if self.order is None:
                # In the order in which they were made: they may draw from one random state.
                for each in (*splitter.loop.iterators, self):
                    each.begin()
            item = next(self._items, None)
        assert self.order is not None
        if item is None:
            self.ended = True
            if self.order.yielded_nothing:
                splitter.end_resumed_epoch()
            raise StopIteration
        batch, chunk, digest = item
        self._pending.append((chunk, digest, self.order))
        return batch

    def take(self) -> Chunk | None:
        """Return what stands behind the oldest batch that was not taken yet, and take it; None where there is none."""
        self.ended = False
        if not self._pending:
            return None
        chunk, digest, order = self._pending.popleft()
        order.take(chunk, digest)
        return chunk

    @property
    def orders(self) -> list[Order]:
        """The passes that are begun and not taken to their end, oldest first."""
        begun = dict.fromkeys([order for _, _, order in self._pending] + [self.order] * (self.order is not None))
        return [order for order in begun if order is not None]


class SplitLoader(LoaderWrapper):
    """A training loader that yields this rank's micro-batches of the user's batches.

    All other attributes are those of the user's loader. `len()` is the number of micro-batches per epoch: those of the
    user's loader times `BatchSplitter.micro_batches`.
    """

    def __init__(self, loader: Any, splitter: BatchSplitter, *, sharded: bool) -> None:
        kind = source_of(loader, whole=splitter.whole_batches)
        self._source = kind(loader, splitter.split_of(sharded=sharded), lambda: splitter.micro_batches)
        # Seeded by its rank, a worker might read in another order.
        super().__init__(loader, read=self._source.loader, shown=loader, alike=kind.alike and not sharded)
        self._splitter, self._sharded = splitter, sharded
        self._world = World() if sharded else splitter.world
        self.begun: Order | None = None
        if isinstance(loader, DataLoader):
            self.worker_init_fn = loader.worker_init_fn

    def __iter__(self) -> SplitIterator:
        return SplitIterator(self)

    def __len__(self) -> int:
        return len(self._source)

    def describe(self) -> str:
        """Return one line that says what is done with the loader."""
        what = type(self.loader).__name__
        if self._sharded:
            return f"{what}: every rank trains on its own batches (sharded_by_rank is set)"
        if isinstance(self._source, (FromIndices, FromWholeBatches)):
            samplers = [getattr(self.loader, name, None) for name in ("batch_sampler", "sampler")]
            what += f" with its {' and '.join(type(each).__name__ for each in samplers if each is not None)}"
        split, micro_batches = self._splitter.split, self._splitter.micro_batches
        most = f", in {micro_batches} micro-batches of at most {split.max_samples} samples per rank"
        return (
            f"{what}: used as it is, its batches are the global batches, in {split.replicas or split.world_size} chunks"
            f" on {split.world_size} ranks{most if split.max_samples else ''};"
            f" {'every rank reads whole batches' if self._source.alike else 'each rank loads its own samples only'}"
        )


class ResumableSplitLoader(SplitLoader):
    """A split loader whose place a checkpoint holds, in loader batches and samples of the global order.

    What was taken is not loaded again where the samples have indices. Of an iterable-style dataset, and of an iterable
    of batches, it has to be read again and is dropped.
    """

    def state_dict(self) -> LoaderState:
        """Return where training stands: the same on all ranks, for any world size and any size of micro-batches.

        Samples of an incomplete window count as not taken: its gradients are not in a checkpoint, so it is repeated.
        """
        return self._splitter.state_of(self)

    def state_now(self, *, ended: bool) -> LoaderState:
        """Return where training stands, whatever the window.

        Args:
            ended: Whether the epoch is over, so that the next one begins a new pass.
        """
        mine = [] if ended else [each for each in self._splitter.loop.iterators if each.loader is self]
        orders = [order for each in mine for order in each.orders]
        taken, parts = orders[0].taken if orders else Taken(), LoaderParts(self.loader)
        running = getattr(self.loader, "persistent_workers", False) and self._iterator is not None
        return LoaderState(
            format=1,
            complete=not orders,
            batches=taken.batches,
            samples=taken.samples,
            epoch_batches=self._splitter.batches,
            digest=taken.digest.hex(),
            passes=[order.state() for order in orders] + [state for each in mine for state in each.following],
            generators=parts.generator_states(),
            objects=parts.object_states(),
            seeded=bool(running),
            random=random_state(),
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """Have the next pass go on from there: at once where an epoch was over, or after the batches taken.

        Raises:
            ValueError: If it is not the state of such a loader.
        """
        state = checked_state(state_dict, LoaderParts(self.loader))
        self.begun = None
        self.begin_at(state)
        self._splitter.go_on(self, state)

    def begin_at(self, state: LoaderState) -> None:
        """Have the next pass begin where the one of a state ended."""
        parts = LoaderParts(self.loader)
        parts.set_generators(state["generators"])
        parts.load_objects(state["objects"])


class StatefulSplitLoader(SplitLoader):
    """A split loader whose user's loader keeps its place itself; only then Lightning may see these two methods."""

    def state_dict(self) -> Any:
        """Return what the user's loader returns."""
        return self._source.loader.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Give the user's loader its state."""
        self._source.loader.load_state_dict(state_dict)


class BatchSplitter:
    """Makes the split loaders of one rank, and holds what they have in common.

    Args:
        split: How loader batches are split, and which part is this rank's.
        world: The ranks that share the batches.
        loop: The training loop that reads the loaders.
        window: Returns how many loader batches an optimizer step takes.
        whole_batches: Whether every rank reads whole batches, so that random numbers, padding and mixing are those of
            one process, unless a loader is known to be the same without.

    Attributes:
        micro_batches: How many micro-batches every rank takes of each loader batch: the number of batches to accumulate
            for one loader batch. The most that any loader wrapped so far needs.
        batches: How many loader batches of the epoch training took.
        resumed: The states that loaders go on from, until training takes something.
    """

    def __init__(
        self, split: Split, world: World, loop: TrainingLoop, window: Callable[[], int], *, whole_batches: bool = False
    ) -> None:
        self.split, self.world, self.loop, self.whole_batches = split, world, loop, whole_batches
        self.window = window
        self.micro_batches, self.batches = 1, 0
        self.resumed: dict[SplitLoader, LoaderState] = {}
        self._random: RandomState | None = None  # of a resumed run that is being set up
        # Not the epoch itself: the workers of one that is left must be able to end.
        self._epoch: weakref.ref[Any] | None = None
        self._in_window = False
        self._before_window: dict[ResumableSplitLoader, LoaderState] = {}

    def split_of(self, *, sharded: bool) -> Split:
        """Return how a loader's batches are split, if every rank reads its own only into micro-batches."""
        return Split(max_samples=self.split.max_samples) if sharded else self.split

    def wrap(self, loader: Any, states: deque[Any] | None = None) -> SplitLoader:
        """Return `loader` split. A collective operation.

        Args:
            loader: A `DataLoader`, of any subclass, or an iterable of batches. Where it or its dataset has a true
                attribute `sharded_by_rank`, every rank reads its own part of the data: then its batches are not shared
                out, and only cut into micro-batches.
            states: What `state_dict` of the loaders returned in the run to go on with, in the order in which they are
                wrapped. Lightning loads them itself only within an epoch, and not at its end.

        Raises:
            ValueError: If the loader cannot be split, the ranks' loaders differ, or a state is not the loader's.
        """
        loader = user_loader(loader)
        sharded = is_sharded(loader)
        split, largest = self.split_of(sharded=sharded), loader_batch_size(loader)
        problem = self._problem(loader, largest, sharded=sharded)
        count = 0 if problem else split.count(largest)
        workers = getattr(loader, "num_workers", 0) > 0
        # A problem that only some ranks have is raised by them all: nobody waits for a rank that has given up.
        require_alike(
            self.world,
            (source_of(loader, whole=self.whole_batches).__name__, sharded, count, workers),
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
        wrapped = kind(loader, self, sharded=sharded)
        if states is not None and isinstance(wrapped, (ResumableSplitLoader, StatefulSplitLoader)):
            if not states:
                raise ValueError(
                    "the checkpoint holds the states of fewer train loaders than this run has. Resume with the train"
                    " loaders of the run that saved it."
                )
            wrapped.load_state_dict(states.popleft())
        return wrapped

    def _problem(self, loader: Any, largest: int | None, *, sharded: bool) -> str | None:
        """Return why `loader` cannot be split, or None."""
        sampler = distributed_sampler(loader)
        if sharded and (self.whole_batches or self.split.replicas is not None):
            return (
                f"{type(loader).__name__} or its dataset {type(getattr(loader, 'dataset', None)).__name__} has"
                " sharded_by_rank = True: the ranks' batches are not one batch, whose replicas equivalent_to= and"
                " num_replicas= share out over the ranks. Remove the attribute and have every rank read the same data;"
                " or leave these options out and set split_batches=False."
            )
        if sampler is not None and not sharded:
            return (
                f"the train loader has a DistributedSampler for {sampler.num_replicas} replicas, but with"
                " split_batches=True the loader's batches are the global batches, which the strategy splits. Give the"
                " loader the sampler of a run on one device, or set split_batches=False."
            )
        if not getattr(loader, "in_order", True) and getattr(loader, "num_workers", 0) > 0:
            return (
                "in_order=False lets the workers hand over batches in an order of their own, so the ranks' chunks would"
                " not make up one batch. Use in_order=True with split_batches=True."
            )
        if self.split.max_samples is not None and largest is None:
            return (
                f"max_device_batch_size={self.split.max_samples} needs to know the largest batch of"
                f" {type(loader).__name__}, to have all ranks accumulate alike. Give the loader, its batch sampler or"
                " its dataset an attribute `batch_size` with it, or leave max_device_batch_size out and set"
                " accumulate_grad_batches."
            )
        return None

    def take(self) -> list[Chunk | None]:
        """Return what stands behind the batches to train on now, for every loader in order; None for an exhausted one.

        To be called once for every batch, in order.

        Raises:
            RuntimeError: If a rank or a replica would have samples of one loader and none of another: no weight of the
                step can count the one and not the other. Raised on all ranks alike.
        """
        taken = self.take_each()
        chunks = [chunk for chunk in taken if chunk is not None]
        if len({(chunk.ranks, chunk.stand_in, chunk.batch_replicas) for chunk in chunks}) > 1:
            replicas = self.split.replicas
            unit = "rank" if replicas is None else "replica"
            found = " and ".join(
                f"{chunk.batch_samples}"
                if replicas is None
                else f"{chunk.batch_samples} samples in {chunk.batch_replicas}"
                for chunk in chunks
            )
            raise RuntimeError(
                f"the batches of the train loaders, now {found}"
                f"{' samples' if replicas is None else f' of num_replicas={replicas}'}, do not reach the same {unit}s,"
                f" so some {unit} has samples of one loader and none of another."
                " Set drop_last=True, or use batch sizes that give every"
                f" {unit} samples of every loader."
            )
        return taken

    def take_each(self) -> list[Chunk | None]:
        """Return what `take` returns, whether or not one step can count it all."""
        self.resumed.clear()
        self._in_window = True
        taken = [each.take() for each in self.loop.iterators]
        if any(chunk is not None and chunk.is_last for chunk in taken):
            self.batches += 1
            if self.batches % self.window() == 0:
                self._in_window = False
        return taken

    @contextmanager
    def reading(self, iterator: SplitIterator) -> Iterator[None]:
        """Surround the reading of a batch, which may draw."""
        if iterator in self.loop.iterators[:1]:
            self._begin_row()
        # Until a resumed run is set up, what others draw does not count.
        if self._random is not None:
            restore_random_state(self._random)
        yield
        if self._random is not None:
            self._random = random_state()

    def _begin_row(self) -> None:
        """Keep the states before the first batches of a window are read. What was fetched ahead is read by then."""
        epoch = self.loop.epoch
        if self._epoch is None or self._epoch() is not epoch:
            self._epoch, self._in_window = weakref.ref(epoch), False
            self.batches = self.resumed_batches or 0
        if not self._in_window and self.window() * self.micro_batches > 1:
            loaders = [each.loader for each in self.loop.iterators]
            resumable = [each for each in loaders if isinstance(each, ResumableSplitLoader)]
            self._before_window = {each: self.resumed.get(each) or each.state_now(ended=False) for each in resumable}

    def state_of(self, loader: ResumableSplitLoader) -> LoaderState:
        """Return where training stands in a loader, at the end of the last complete window."""
        ended = self.loop.epoch_ended
        kept = self._before_window.get(loader) if self._in_window and not ended else None
        return self.resumed.get(loader) or kept or loader.state_now(ended=ended)

    def go_on(self, loader: ResumableSplitLoader, state: LoaderState) -> None:
        """Have a loader go on from a state. Called by the loader."""
        self.resumed[loader] = state
        self.batches = self.resumed_batches or 0
        self._random = state["random"]
        restore_random_state(self._random)

    def end_resumed_epoch(self) -> None:
        """Note that nothing was left of the epoch that was to be gone on with, in one of the loaders."""
        for each in self.loop.iterators:
            state = self.resumed.pop(each.loader, None)
            if state is not None and not each.ended:
                each.loader.begin_at(state)  # the batches to pass over were never asked for

    @property
    def resumed_batches(self) -> int | None:
        """How many loader batches of the epoch to go on with were trained on; None where none is gone on with."""
        batches = (state["epoch_batches"] for state in self.resumed.values() if not state["complete"])
        return next(batches, None)

    def end_set_up(self) -> None:
        """Set the global random state to that of the checkpoint, before hooks of the resumed run may draw from it.

        To be called when the loaders have been set up. Lightning makes and drops iterators of training and validation
        loaders before that, which draw. It is told which loaders were already started again in the epoch.
        """
        if self._random is not None:
            restore_random_state(self._random)
            self._random = None
        for index, iterator in enumerate(self.loop.iterators):
            state = self.resumed.get(iterator.loader)
            if state is not None and not state["complete"] and state["epoch_batches"] > state["batches"]:
                self.loop.count_as_read(index)
