"""Where training stands in the loaders of a run, as Lightning counts: in batches that were stepped on.

A batch reaches the user's hooks in the user's own type, so nothing can travel inside it. What stands behind it is found
by its number in the epoch: reading fills the map, looking at a batch changes nothing, and what was fetched ahead or
failed is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

from lightning_gradavg.batches.loader import BatchSplitter, Pass, SplitLoader
from lightning_gradavg.batches.order import Behind, Mark
from lightning_gradavg.batches.state import FORMAT, LoaderParts, LoaderState, checked
from lightning_gradavg.lightning_internals import TrainingLoop
from lightning_gradavg.loaders import keeps_state
from lightning_gradavg.random_state import RandomState, random_state, restore_random_state

__all__ = ["NumberedLoader", "Numbers", "Progress"]


def _nothing() -> None:
    """Stand in for a weak reference."""


class Numbers:
    """What stands behind the batches of a loader, by the number that Lightning gives them in an epoch."""

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop
        # Weak: the workers of an epoch that is left must be able to end.
        self._of_epochs: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()

    def note(self, iterator: Any, behind: Any, *, first: int = 0, keep: int = 2) -> None:
        """Note what stands behind an iterator's next batch, unless it is one by which a user looks at the data.

        Two are kept at least: one batch is fetched ahead where the length is unknown. The epoch's first has number
        `first`.
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
    """A split loader that Lightning reads. A checkpoint holds its place, in loader batches, for any world size.

    What was trained on is not loaded again where the samples have indices. Of an iterable-style dataset, and of an
    iterable of batches, it has to be read again and is dropped. A loader that keeps its own state resumes itself.

    Attributes:
        progress: Where training stands.
        start: Where the next passes start, until something is trained on; None for the beginning of a pass.
        behind: What stands behind its batches.
    """

    def __init__(self, loader: Any, splitter: BatchSplitter, progress: Progress) -> None:
        super().__init__(loader, splitter)
        self.progress, self.behind = progress, Numbers(progress.loop)
        self.start: LoaderState | None = None

    def __iter__(self) -> NumberedIterator:
        return NumberedIterator(self)

    def state_dict(self) -> Any:
        """Return where training stands."""
        return self.read.state_dict() if keeps_state(self.loader) else self.progress.state_of(self)

    def load_state_dict(self, state_dict: Any) -> None:
        """Have the next passes go on from there."""
        if keeps_state(self.loader):
            self.read.load_state_dict(state_dict)
        else:
            self.start = checked(state_dict, self.loader)
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
        mine = progress.loop.iterators
        with progress.reading():
            # In the order in which they were made: they may draw from one random state.
            for each in mine if self.begun is None else ():
                each.begin()
            order, items = self.begin()
            item = next(items, None)
        if item is None:
            if self in mine or order.yielded_nothing:
                loader.start = None  # the next pass, perhaps of the same epoch, is a new one
            raise StopIteration
        batch, behind = item
        first = 0 if loader.start is None else loader.start["batches"]
        loader.behind.note(self, behind, first=first, keep=progress.window() + 2)
        return batch


class Progress:
    """Where training stands in the loaders of one rank.

    Attributes:
        loop: Lightning's, which counts.
        window: Returns the loader batches of an optimizer step.
    """

    def __init__(self, loop: TrainingLoop, window: Callable[[], int]) -> None:
        self.loop, self.window = loop, window
        self._random: RandomState | None = None  # of a resumed run that is being set up
        self._arrived = -1, random_state()  # the number of the window's first batch, and the state before it
        self._epoch: Callable[[], Any] = _nothing

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read, which may draw. Until a resumed run is set up, what others draw does not count."""
        if self._random is not None:
            restore_random_state(self._random)
        yield
        if self._random is not None:
            self._random = random_state()

    def arrive(self) -> list[Behind | None]:
        """Note the batch that Lightning is about to train on, and the random state before the window.

        Return what stands behind it; nothing where a user moves another batch to the device.
        """
        loop, ready = self.loop, self.loop.ready
        if ready > loop.completed:
            return []
        self._epoch = ref(loop.epoch)
        if ready % self.window() == 0:
            self._arrived = ready, random_state()
        loaders = [each.loader for each in loop.iterators]
        for loader in loaders:
            loader.start = None
        return [loader.behind.get(ready) for loader in loaders]

    def in_training(self) -> list[Behind | None]:
        """Return what stands behind the batches in training, for every loader in order; None for an exhausted one."""
        return [each.loader.behind.get(self.loop.ready - 1) for each in self.loop.iterators]

    def state_of(self, loader: NumberedLoader) -> LoaderState:
        """Return where training stands in a loader: after the last batch that an optimizer stepped on.

        An incomplete window is repeated.
        """
        if loader.start is not None:
            return loader.start
        loop, window = self.loop, self.window()
        over = loop.epoch_ended and loop.processed == loop.ready
        stepped = loop.processed if over else loop.processed // window * window
        # The iterators of an epoch that is over are there until the next one's are made.
        over = over or (loop.ready == 0 and self._epoch() is loop.epoch)
        passes = [each.begun.order for each in loop.iterators if each.loader is loader and each.begun is not None]
        order = None if over or not passes else passes[0]
        last = loader.behind.get(stepped - 1)
        mark = Mark() if order is None else order.start if last is None else last.mark
        (arrived, random), in_window = self._arrived, loop.ready > stepped
        parts = LoaderParts(loader.loader)
        return LoaderState(
            format=FORMAT,
            complete=order is None,
            batches=mark.batches,
            samples=mark.samples,
            epoch_batches=mark.batches,
            digest=mark.digest.hex(),
            passes=[] if order is None else [order.state],
            generators=parts.generator_states(),
            objects=parts.object_states(),
            seeded=loader.seeded,
            random=random if in_window and arrived == stepped else random_state(),
        )

    def go_on(self, random: RandomState) -> None:
        """Go on with the random state of a checkpoint."""
        self._random = random
        restore_random_state(random)

    def end_set_up(self) -> None:
        """Set the global random state to that of the checkpoint, before hooks of the resumed run may draw from it.

        To be called when the loaders have been set up. Lightning makes and drops iterators of training and validation
        loaders before that, which draw.
        """
        if self._random is not None:
            restore_random_state(self._random)
            self._random = None
