"""The loaders that Lightning reads in training, and where training stands in them, in batches that were stepped on.

A batch reaches the user's hooks in the user's own type, so nothing can travel inside it. What stands behind it is found
by its number in the epoch: reading fills the map, looking at a batch changes nothing, and what was fetched ahead or
failed is not counted.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils.data import IterableDataset

from lightning_gradavg.batches.chunks import Split
from lightning_gradavg.batches.loader import Pass, SplitLoader
from lightning_gradavg.batches.order import Behind, LoaderState, Sources
from lightning_gradavg.device import Tally
from lightning_gradavg.faults.drift import SameData
from lightning_gradavg.lightning_internals import TrainingLoop
from lightning_gradavg.loaders import LoaderWrapper, length_of, user_loader
from lightning_gradavg.random_state import RandomState, random_state, restore_random_state
from lightning_gradavg.ranks import World

__all__ = ["JoinedIterator", "NumberedLoader", "Progress", "join"]

_END = object()


class Numbers:
    """What stands behind the batches of a loader, by the number that Lightning gives them in an epoch."""

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop
        # Weak: the workers of an epoch that is left must be able to end.
        self._of_epochs: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()

    def note(self, iterator: Any, behind: Any, *, first: int = 0, keep: int = 2) -> None:
        """Note what stands behind an iterator's next batch, unless it is one by which a user looks at the data.

        Two are kept at least: one batch is fetched ahead where the length is unknown.
        """
        if iterator in self._loop.iterators:
            numbers = self._of_epochs.setdefault(self._loop.epoch, {})
            number = max(numbers, default=first - 1) + 1
            numbers[number] = behind
            numbers.pop(number - keep, None)

    def get(self, number: int) -> Any:
        """Return what stands behind a batch of this epoch, if it was noted."""
        epoch = self._loop.epoch
        return None if epoch is None else self._of_epochs.get(epoch, {}).get(number)


class NumberedLoader(SplitLoader):
    """A split loader that Lightning reads. A checkpoint holds its place, in loader batches, for any world size."""

    def __init__(self, loader: Any, split: Split, world: World, progress: Progress) -> None:
        super().__init__(loader, split, world)
        self.progress, self.behind = progress, Numbers(progress.loop)
        self.start: LoaderState | None = None  # of the next passes, until something is trained on

    def __iter__(self) -> NumberedIterator:
        return NumberedIterator(self)

    def state_dict(self) -> LoaderState:
        """Return where training stands."""
        return self.progress.state_of(self)

    def load_state_dict(self, state_dict: LoaderState) -> None:
        """Have the next passes go on from there."""
        self.start = copy.copy(state_dict)
        self.progress.go_on(self.start["random"])


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
            start = self.loader.start
            self.begun = self.loader.begin(start)
            if start is not None and not start["passes"]:
                start["passes"] = [self.begun.order.state]
        return self.begun

    def __next__(self) -> Any:
        progress, loader = self.loader.progress, self.loader
        together = progress.loop.iterators
        looks = self not in together  # a user's
        # In the order in which they were made: they may draw from one random state.
        for each in () if looks or self.begun is not None else together:
            each.begin()
        order, items = self.begin()
        item = next(items, None)
        if not looks:
            progress.note_draws()
        if item is None:
            if not looks or order.batches == order.start:
                loader.start = None  # the next pass, perhaps of the same epoch, is a new one
            raise StopIteration
        batch, behind = item
        first = 0 if loader.start is None else loader.start["batches"]
        loader.behind.note(self, behind, first=first, keep=progress.loop.accumulation + 2)
        return batch


class Progress:
    """Where training stands in the loaders of one rank."""

    def __init__(self, loop: TrainingLoop) -> None:
        self.loop = loop
        self._random: RandomState | None = None  # of a resumed run that is being set up
        self._arrived = -1, random_state()  # the number of the window's first batch, and the state before it
        self._epoch: Callable[[], Any] = lambda: None

    def arrive(self) -> list[Behind]:
        """Note the batch that Lightning is about to train on, and the random state before the window.

        Return what stands behind it; nothing where a user moves another batch to the device.
        """
        loop, ready = self.loop, self.loop.ready
        if ready > loop.completed:
            return []
        self._epoch = ref(loop.epoch)
        if ready % loop.accumulation == 0:
            self._arrived = ready, random_state()
        loaders = [each.loader for each in loop.iterators]
        for loader in loaders:
            loader.start = None
        return [behind for loader in loaders if (behind := loader.behind.get(ready)) is not None]

    def behind(self, number: int) -> list[Behind | None]:
        """Return what stands behind the batches of a number, for every loader in order; None for an exhausted one."""
        return [each.loader.behind.get(number) for each in self.loop.iterators]

    def state_of(self, loader: NumberedLoader) -> LoaderState:
        """Return where training stands in a loader: after the last batch that an optimizer stepped on.

        An incomplete window is repeated.
        """
        if loader.start is not None:
            return loader.start
        loop, window, sources = self.loop, self.loop.accumulation, Sources(loader.loader)
        over = loop.epoch_ended and loop.processed == loop.ready
        stepped = loop.processed if over else loop.processed // window * window
        arrived, random = self._arrived
        orders = [each.begun.order for each in loop.iterators if each.loader is loader and each.begun is not None]
        # The iterators of an epoch that is over are there until the next one's are made.
        over = over or not orders or (loop.ready == 0 and self._epoch() is loop.epoch)
        last: Behind | None = None if over else loader.behind.get(stepped - 1)
        begun = (0, "") if over else (orders[0].start, orders[0].digest)
        batches, digest = begun if last is None else (last.batches, last.digest)
        return LoaderState(
            complete=over,
            batches=batches,
            digest=digest,
            passes=[] if over else [orders[0].state],
            generators=sources.generators(),
            objects=sources.objects(),
            random=random if loop.ready > stepped == arrived else random_state(),
        )

    def go_on(self, random: RandomState) -> None:
        """Go on with the random state of a checkpoint. Until a resumed run is set up, only what it reads may draw."""
        self._random = random
        restore_random_state(random)

    def note_draws(self) -> None:
        """Note that Lightning read, perhaps while a resumed run is set up."""
        self._random = self._random and random_state()

    def end_set_up(self) -> None:
        """Go on where the last read left the random state, before hooks of the resumed run may draw.

        Lightning makes and drops iterators of training and validation loaders before that, which draw.
        """
        if self._random is not None:
            restore_random_state(self._random)
            self._random = None


class Fetched(NamedTuple):
    """What stands behind a batch of a joined loader: whether it is the rank's own, and what all ranks have."""

    own: bool
    tally: Tally


class JoinedLoader(LoaderWrapper):
    """A training loader that ends on all ranks at once; its length is that of the rank that has most, if all tell.

    With each batch that a rank fetches it tells the others that it has one, and waits for nobody. A rank that has none
    left waits for what the others say, and gets its last batch again as a *stand-in*, computed like any other, of
    weight 0, as long as one of them has one. So all ranks train the same number of steps, and end the epoch together.
    """

    def __init__(self, loader: Any, world: World, device: torch.device, loop: TrainingLoop, length: float) -> None:
        super().__init__(loader, read=loader, shown=loader, shared=False)
        self.world, self._device, self._length = world, device, length
        self.behind = Numbers(loop)
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
            tally = Tally([own, self._last is _END], "sum", self._device, self.world.group)
            if begins or not own:
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
        self.loader.behind.note(self, fetched)
        return batch


def join(loader: Any, world: World, device: torch.device, loop: TrainingLoop) -> Any:
    """Return a loader, joined unless all ranks are known to have as many batches. A collective operation."""
    loader = user_loader(loader)
    # What a stream says of its length need not be so.
    streams = isinstance(getattr(loader, "dataset", None), IterableDataset)
    lengths = [length for (length,) in world.gather_floats([math.inf if streams else length_of(loader)])]
    differ = len(set(lengths)) > 1 or math.inf in lengths
    return JoinedLoader(loader, world, device, loop, max(lengths)) if world.size > 1 and differ else loader
