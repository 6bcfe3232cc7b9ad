"""The loaders that Lightning reads in training, and where training stands in them, in batches that were stepped on.

A batch reaches the user's hooks in the user's own type, so nothing can travel inside it. What stands behind it is found
by its number in the epoch when it arrives in training: reading fills the map, looking at a batch changes nothing, and
what was fetched ahead or failed is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import IterableDataset

from lightning_gradavg._lightning.internals import TrainingLoop
from lightning_gradavg._lightning.loaders import LoaderWrapper, length_of, user_loader
from lightning_gradavg._support.collectives import ReducedRow, World
from lightning_gradavg._support.random_state import RandomState, random_state, restore_random_state
from lightning_gradavg.batches.chunks import Split
from lightning_gradavg.batches.loader import Pass, SplitLoader
from lightning_gradavg.batches.order import Behind, LoaderState, Sources
from lightning_gradavg.faults.drift import SameData

__all__ = ["JoinedLoader", "NumberedLoader", "Progress", "join"]

_END = object()


Numbers: TypeAlias = WeakKeyDictionary[Any, dict[int, Any]]
"""What stands behind the batches of a loader, by epoch and number; weak, so that workers of an epoch left can end."""


def _note(numbers: Numbers, epoch: Any, behind: Any, *, first: int = 0) -> None:
    """Note what stands behind the next batch of an epoch."""
    of_epoch = numbers.setdefault(epoch, {})
    number = max(of_epoch, default=first - 1) + 1
    of_epoch[number] = behind
    of_epoch.pop(number - 2, None)  # one batch is fetched ahead where the length is unknown


class Progress:
    """How far a run is, the random state before the window in training, and that of a resumed run to go on with.

    Attributes:
        before_window: The random state before the first batch of the window was moved to the device.
        after_read: The random state after the last read.
        moves: Whether a batch was read that is not in training yet: it is moved to the device, or failed there.
    """

    def __init__(self, loop: TrainingLoop) -> None:
        self.loop = loop
        self.before_window = self.after_read = random_state()
        self.moves = False
        self._random: RandomState | None = None  # of a resumed run that is being set up

    def arrive(self, number: int, loaders: Sequence[NumberedLoader], behind: Sequence[Behind | None]) -> None:
        """Note what stands behind a batch that arrived, perhaps the first of a window."""
        begins = number % self.loop.accumulation == 0
        # Not the state of now: a resumed run moves the batch to the device again, and the user's hooks may draw there.
        self.before_window = self.after_read if begins else self.before_window
        self.moves = False
        for loader, now in zip(loaders, behind, strict=True):
            loader.start, loader.now = None, now
            loader.window = now if begins else loader.window

    def go_on(self, random: RandomState) -> None:
        """Go on with the random state of a checkpoint. Until a resumed run is set up, only what it reads may draw."""
        self._random = random
        restore_random_state(random)

    def note_draws(self) -> None:
        """Note that Lightning read: the last time before a batch arrives, or while a resumed run is set up."""
        self.after_read = random_state()
        self.moves = True
        if self._random is not None:
            self._random = self.after_read

    def end_set_up(self) -> None:
        """Go on where the last read left the random state, before hooks of the resumed run may draw.

        Lightning makes and drops iterators of training and validation loaders before that, which draw.
        """
        if self._random is not None:
            restore_random_state(self._random)
            self._random = None


class NumberedLoader(SplitLoader):
    """A split loader that Lightning reads. A checkpoint holds its place, in loader batches, for any world size.

    Attributes:
        behind: What stands behind the batches that were fetched.
        now: What stands behind the batch in training; None where the loader has no more, or before the first.
        window: What stands behind the first batch of its window.
        start: Where the next passes begin, until something is trained on.
    """

    _loaded: LoaderState  # of the checkpoint that the run resumes

    def __init__(self, loader: Any, split: Split, world: World, progress: Progress) -> None:
        super().__init__(loader, split, world)
        self.progress, self.behind = progress, Numbers()
        self.now: Behind | None = None
        self.window: Behind | None = None
        self.start: LoaderState | None = None

    def __iter__(self) -> NumberedIterator:
        return NumberedIterator(self)

    def state_dict(self) -> LoaderState:
        """Return where training stands: after the last batch that an optimizer stepped on.

        An incomplete window is repeated.
        """
        if self.start is not None:
            return self._loaded
        progress, loop, sources = self.progress, self.progress.loop, Sources(self.loader)
        state = LoaderState(snapshots={}, samplers=sources.samplers(), now=sources.snapshot(), batches=0, digest="")
        order = next((each.begun.order for each in loop.iterators if each.loader is self and each.begun), None)
        now, window = (each if each is not None and each.order is order else None for each in (self.now, self.window))
        trained = loop.ready == loop.processed  # on the last batch that arrived
        # The iterators of an epoch that is over are there until the next one's are made.
        over = (trained and loop.epoch_ended) or (loop.ready == 0 and now is not None)
        if order is None or over:
            return state
        if now is not None and trained and loop.processed % loop.accumulation == 0:
            place = now.after
            if progress.moves:
                state["now"]["random"] = progress.after_read
        elif window is not None:
            place, state["now"]["random"] = window.before, progress.before_window
        else:
            place = order.start
        batches, digest = place
        return {**state, "snapshots": order.snapshots, "samplers": order.samplers, "batches": batches, "digest": digest}

    def load_state_dict(self, state_dict: LoaderState) -> None:
        """Have the next passes go on from there."""
        self._loaded = state_dict
        # Passes note there what they draw from; saved with that, the end of an epoch would be taken for its begin.
        self.start = {**state_dict, "snapshots": dict(state_dict["snapshots"])}
        self.progress.go_on(state_dict["now"]["random"])


class NumberedIterator(Iterator[Any]):
    """One pass over a loader that Lightning reads.

    After a checkpoint, the pass begins when it is read: Lightning draws random numbers and sets the epoch of samplers
    after it is made, and may drop it. Until something is trained on, every iterator resumes there.
    """

    def __init__(self, loader: NumberedLoader) -> None:
        self.loader = loader
        self.begun: Pass | None = None
        if loader.start is None:
            self.begin()

    def begin(self) -> Pass:
        """Begin the pass, unless it has begun. A collective operation."""
        if self.begun is None:
            self.begun = self.loader.begin(self.loader.start)
        return self.begun

    def __next__(self) -> Any:
        loader, progress = self.loader, self.loader.progress
        epoch = progress.loop.epoch_of(self)  # None of a user, who looks at the data
        if self.begun is None:
            # In the order in which they were made: they may draw from one random state.
            for each in [self] if epoch is None else progress.loop.iterators:
                each.begin()
        batch, behind = next(self.begin().items, (_END, None))
        if epoch is not None:
            progress.note_draws()
            if batch is _END:
                loader.start = None  # The next pass, perhaps of the same epoch, is a new one.
            else:
                _note(loader.behind, epoch, behind, first=0 if loader.start is None else loader.start["batches"])
        if batch is _END:
            raise StopIteration
        return batch


class Fetched(NamedTuple):
    """What stands behind a batch of a joined loader: whether it is the rank's own, and what all ranks have."""

    own: bool
    tally: ReducedRow


class JoinedLoader(LoaderWrapper):
    """A training loader that ends on all ranks at once; its length is that of the rank that has most, if all tell.

    With each batch that a rank fetches it tells the others that it has one, and waits for nobody. A rank that has none
    left waits for what the others say, and gets its last batch again as a *stand-in*, computed like any other, of
    weight 0, as long as one of them has one. So all ranks train the same number of steps, and end the epoch together.
    """

    def __init__(self, loader: Any, world: World, device: torch.device, loop: TrainingLoop, length: float) -> None:
        super().__init__(loader, read=loader, shown=loader, shared=False)
        self.world, self.loop, self.behind = world, loop, Numbers()
        self._device, self._length = device, length
        self._last: Any = _END
        dataset = getattr(loader, "dataset", None)
        of = "" if dataset is None else f" over {type(dataset).__name__}"
        self._same = SameData(f"batches of {type(loader).__name__}{of}")

    def __iter__(self) -> JoinedIterator:
        return JoinedIterator(self, self._joined(iter(self._read)))

    def __len__(self) -> int:
        if self._length == math.inf:
            raise TypeError(f"{type(self.loader).__name__} has no length on all ranks")
        return int(self._length)

    def _joined(self, batches: Iterator[Any]) -> Iterator[tuple[Any, Fetched]]:
        """Yield this rank's batches, and then its last one, until all ranks have had theirs. A collective operation."""
        begins = own = True
        while True:
            batch = next(batches, _END) if own else _END
            own = batch is not _END
            self._last = batch if own else self._last
            self._same.compare(batch if own else None)
            with torch.profiler.record_function("GradAvg: exchange who has a batch"):
                tally = ReducedRow([own, self._last is _END], "sum", self._device, self.world.group)
            if begins or not own:
                with torch.profiler.record_function("GradAvg: wait for who has a batch"):
                    having, lacking = tally.read()
                if having == 0:
                    return
                if lacking > 0:
                    self._lend()
            begins = False
            yield self._last, Fetched(own, tally)

    def _lend(self) -> None:
        """Give ranks that never had a batch the one of a rank that has. A collective operation."""
        lent = self.world.gather_objects(None if self._last is _END else (self._last,))
        if self._last is _END:
            (self._last,) = next(one for one in lent if one is not None)


class JoinedIterator(Iterator[Any]):
    """One pass over a joined loader."""

    def __init__(self, loader: JoinedLoader, items: Iterator[tuple[Any, Fetched]]) -> None:
        self.loader, self._items = loader, items

    def __next__(self) -> Any:
        batch, fetched = next(self._items)
        if (epoch := self.loader.loop.epoch_of(self)) is not None:
            _note(self.loader.behind, epoch, fetched)
        return batch


def join(loader: Any, world: World, device: torch.device, loop: TrainingLoop) -> Any:
    """Return a loader, joined unless all ranks are known to have as many batches. A collective operation."""
    loader = user_loader(loader)
    # What a stream says of its length need not be so.
    streams = isinstance(getattr(loader, "dataset", None), IterableDataset)
    lengths = [length for (length,) in world.gather_floats([math.inf if streams else length_of(loader)])]
    differ = len(set(lengths)) > 1 or math.inf in lengths
    return JoinedLoader(loader, world, device, loop, max(lengths)) if world.size > 1 and differ else loader
