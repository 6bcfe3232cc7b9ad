"""Which micro-batch is in training, and where training stands in the loaders of a run.

A batch reaches the user's hooks in the user's own type, so nothing can travel inside it: what stands behind it waits in
the iterator that yielded it, and is taken once per training step, in order. A queue, because Lightning fetches one
batch ahead where the length is unknown. One per iterator, and those of the training loop are asked: an epoch may be
left early, and a user may look at a batch of the loader.

Where training stands is told by the same queues: the pass of the next batch to take, and those begun after it. Taken is
not yielded: Lightning and worker processes fetch ahead, and a training loop may leave a pass early.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypedDict, cast

import torch

from lightning_gradavg.batches.chunks import Chunk
from lightning_gradavg.batches.order import LoaderParts, Order, PassState, Start, Taken
from lightning_gradavg.batches.sources import FromBatches
from lightning_gradavg.lightning_internals import TrainingLoop
from lightning_gradavg.loaders import LoaderWrapper
from lightning_gradavg.random_state import RandomState, random_state, restore_random_state
from lightning_gradavg.ranks import World

__all__ = ["LoaderState", "PassedLoader", "Progress", "SplitIterator"]

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
        digest: Of the digests of these batches, in hexadecimal digits.
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


class PassedLoader(LoaderWrapper):
    """What passes over a split loader know of it.

    Attributes:
        source: Where it is split.
        world: The ranks that read the same batches.
        begun: The order of the pass that began last, since a state was loaded.
        resumable: Whether a checkpoint holds where training stands in it, as a `LoaderState`.
    """

    resumable: ClassVar[bool] = False

    def __init__(self, loader: Any, source: FromBatches, world: World, *, alike: bool) -> None:
        super().__init__(loader, read=source.loader, shown=loader, alike=alike)
        self.source, self.world = source, world
        self.begun: Order | None = None

    @property
    def seeded(self) -> bool:
        """Whether there are worker processes that outlive the epoch, so that the next pass draws no seed for them."""
        return bool(getattr(self.loader, "persistent_workers", False) and self._iterator is not None)


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

    def __init__(self, loader: PassedLoader, progress: Progress) -> None:
        self.loader, self._progress = loader, progress
        self.order: Order | None = None
        self.ended = False
        self.following: deque[PassState] = deque()
        self._pending: deque[tuple[Chunk, bytes, Order]] = deque()
        self._start = Start()
        before = next((each for each in progress.iterators_of(loader) if each.ended), None)
        resumed = progress.resumed.get(loader)
        if before is not None:
            self._pending, self.following = before._pending, before.following
        elif resumed is not None:
            begun = [] if loader.begun is None else [loader.begun.state()]
            self.following.extend(resumed["passes"] or begun)
            # Of a complete epoch nothing was taken: the next pass starts at its first batch.
            taken = Taken(resumed["batches"], resumed["samples"], bytes.fromhex(resumed["digest"]))
            self._start = Start(taken=taken, seeded=resumed["complete"] and resumed["seeded"])
        if resumed is None:
            self.begin()

    def begin(self) -> None:
        """Begin the pass, unless it has begun. A collective operation."""
        if self.order is None:
            again = self.following.popleft() if self.following else None
            self.order = Order(self.loader.loader, self.loader.world, self._start._replace(again=again))
            self.loader.begun = self.order
            self._items = self.loader.source.read(self.order)

    def __next__(self) -> Any:
        progress = self._progress
        progress.begin_reading(self)
        item = next(self._items, None)
        progress.end_reading()
        assert self.order is not None
        if item is None:
            self.ended = True
            if self.order.yielded_nothing:
                progress.end_resumed_epoch()
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
        if chunk.is_last:
            order.taken = Taken(order.taken.batches + 1, order.taken.samples + chunk.batch_samples, digest)
        return chunk

    @property
    def orders(self) -> list[Order]:
        """The passes that are begun and not taken to their end, oldest first."""
        return list(filter(None, dict.fromkeys([*(order for _, _, order in self._pending), self.order])))


class Progress:
    """Where training stands in the loaders of one rank.

    Args:
        loop: The training loop that reads the loaders.
        window: Returns how many loader batches an optimizer step takes.

    Attributes:
        micro_batches: How many micro-batches every rank takes of each loader batch: the number of batches to accumulate
            for one loader batch. The most that any loader split so far needs.
        batches: How many loader batches of the epoch training took.
        states: What `state_dict` of the loaders returned in the run to go on with, in the order in which they are
            split; None where none is gone on with. Lightning would load them only within an epoch, and not at its end.
        resumed: The states that loaders go on from, until training takes something.
    """

    def __init__(self, loop: TrainingLoop, window: Callable[[], int]) -> None:
        self.loop, self.window = loop, window
        self.micro_batches, self.batches = 1, 0
        self.states: deque[Any] | None = None
        self.resumed: dict[PassedLoader, LoaderState] = {}
        self._random: RandomState | None = None  # of a resumed run that is being set up
        # Not the epoch itself: the workers of one that is left must be able to end.
        self._epoch: Callable[[], Any] = lambda: None
        self._in_window = False
        self._before_window: dict[PassedLoader, LoaderState] = {}

    def next_state(self) -> Any:
        """Return the state that the loader which is split now is to go on from.

        Raises:
            ValueError: If the checkpoint is of a run with fewer loaders.
        """
        if not self.states:
            raise ValueError(
                "the checkpoint holds the states of fewer train loaders than this run has. Resume with the train"
                " loaders of the run that saved it."
            )
        return self.states.popleft()

    def iterators_of(self, loader: PassedLoader) -> list[SplitIterator]:
        """Return those of the training loop that pass over a loader."""
        return [each for each in self.loop.iterators if each.loader is loader]

    def begin_reading(self, iterator: SplitIterator) -> None:
        """Prepare the reading of a batch, which may draw."""
        iterators = self.loop.iterators
        if iterator in iterators[:1]:
            self._begin_row(iterators)
        # Until a resumed run is set up, what others draw does not count.
        if self._random is not None:
            restore_random_state(self._random)
        if iterator.order is None:
            # In the order in which they were made: they may draw from one random state.
            for each in (*iterators, iterator):
                each.begin()

    def end_reading(self) -> None:
        """Note what the reading of a batch has drawn."""
        if self._random is not None:
            self._random = random_state()

    def _begin_row(self, iterators: Sequence[SplitIterator]) -> None:
        """Keep the states before the first batches of a window are read. What was fetched ahead is read by then."""
        epoch = self.loop.epoch
        if self._epoch() is not epoch:
            self._epoch, self._in_window = weakref.ref(epoch), False
            self.batches = self.resumed_batches or 0
        if not self._in_window and self.window() * self.micro_batches > 1:
            loaders = [each.loader for each in iterators if each.loader.resumable]
            self._before_window = {each: self.resumed.get(each) or self._state_now(each) for each in loaders}

    def take(self) -> list[Chunk | None]:
        """Return what stands behind the batches to train on now, for every loader in order; None for an exhausted one.

        To be called once for every batch, in order.
        """
        self.resumed.clear()
        self._in_window = True
        taken = [each.take() for each in self.loop.iterators]
        if any(chunk.is_last for chunk in filter(None, taken)):
            self.batches += 1
            self._in_window = self.batches % self.window() != 0
        return taken

    def state_of(self, loader: PassedLoader) -> LoaderState:
        """Return where training stands in a loader, at the end of the last complete window."""
        ended = self.loop.epoch_ended
        kept = self._before_window.get(loader) if self._in_window and not ended else None
        return self.resumed.get(loader) or kept or self._state_now(loader, ended=ended)

    def _state_now(self, loader: PassedLoader, *, ended: bool = False) -> LoaderState:
        """Return where training stands in a loader, whatever the window, and whether the epoch is over."""
        mine = [] if ended else self.iterators_of(loader)
        orders = [order for each in mine for order in each.orders]
        taken, parts = orders[0].taken if orders else Taken(), LoaderParts(loader.loader)
        return LoaderState(
            format=_FORMAT,
            complete=not orders,
            batches=taken.batches,
            samples=taken.samples,
            epoch_batches=self.batches,
            digest=taken.digest.hex(),
            passes=[order.state() for order in orders] + [state for each in mine for state in each.following],
            generators=parts.generator_states(),
            objects=parts.object_states(),
            seeded=loader.seeded,
            random=random_state(),
        )

    def go_on(self, loader: PassedLoader, state: Any) -> None:
        """Have the next pass over a loader go on from a state: at once after a whole epoch, or after what was taken.

        Raises:
            ValueError: If it is not the state of such a loader.
        """
        checked = _checked(state, LoaderParts(loader.loader))
        loader.begun = None
        _begin_at(loader, checked)
        self.resumed[loader] = checked
        self.batches = self.resumed_batches or 0
        self._random = checked["random"]
        restore_random_state(self._random)

    def end_resumed_epoch(self) -> None:
        """Note that nothing was left of the epoch that was to be gone on with, in one of the loaders."""
        for each in self.loop.iterators:
            state = self.resumed.pop(each.loader, None)
            if state is not None and not each.ended:
                _begin_at(each.loader, state)  # the batches to pass over were never asked for

    @property
    def resumed_batches(self) -> int | None:
        """How many loader batches of the epoch to go on with were trained on; None where none is gone on with."""
        batches = (state["epoch_batches"] for state in self.resumed.values() if not state["complete"])
        return next(batches, None)

    def end_set_up(self) -> None:
        """Set the global random state to that of the checkpoint, before hooks of the resumed run may draw from it.

        To be called when the loaders have been set up. Lightning makes and drops iterators of training and validation
        loaders before that, which draw. It is told which loaders were already started again in the epoch.

        Raises:
            ValueError: If the checkpoint is of a run with more loaders.
        """
        if self.states:
            raise ValueError(
                f"the checkpoint holds the states of {len(self.states)} more train loaders than this run has. Resume"
                " with the train loaders of the run that saved it."
            )
        self.states = None
        if self._random is not None:
            restore_random_state(self._random)
            self._random = None
        for index, iterator in enumerate(self.loop.iterators):
            state = self.resumed.get(iterator.loader)
            if state is not None and not state["complete"] and state["epoch_batches"] > state["batches"]:
                self.loop.count_as_read(index)


def _begin_at(loader: PassedLoader, state: LoaderState) -> None:
    """Have the next pass begin where the one of a state ended."""
    parts = LoaderParts(loader.loader)
    parts.set_generators(state["generators"])
    parts.load_objects(state["objects"])


def _checked(state: Any, parts: LoaderParts) -> LoaderState:
    """Return `state` if the loader of these parts can go on from it."""
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
