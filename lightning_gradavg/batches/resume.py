"""How much of a loader training has taken, as a checkpoint holds it: free of the world size and of the micro-batches.

A pass over a loader is determined by the random states that its order was drawn from. A checkpoint holds these, and the
number of loader batches that were taken since. To go on, the pass is begun again from the same states, and that many
batches are passed over; a digest of them proves that they are the same.

Taken is not yielded: Lightning and worker processes fetch ahead, and a training loop may leave a pass early.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_gradavg.batches.chunks import Chunk
from lightning_gradavg.batches.loader_state import (
    FORMAT,
    LoaderState,
    PassState,
    generators_of,
    load_objects,
    objects_of,
    set_generators,
)
from lightning_gradavg.batches.order import Order, RandomState, Replay, random_state

__all__ = ["Pass", "Passes", "Pending"]


class Pass:
    """One pass over a loader.

    Attributes:
        number: Its place among the passes over the loader, from 0.
        order: The order of its batches.
        objects: States of the loader's samplers and datasets before it.
        batches: Loader batches that training took.
        samples: Samples in them.
        digest: The digest of their fingerprints.
        touched: Whether training took any of it.
        exhausted: Whether it was read to its end.
    """

    def __init__(self, passes: Passes, number: int, pending: deque[Pending], order: Order, objects: list[Any]) -> None:
        self._passes, self._pending = passes, weakref.ref(pending)
        self.number, self.order, self.objects = number, order, objects
        self.batches, self.samples, self.digest = 0, 0, b""
        self.touched = self.exhausted = False

    @property
    def alive(self) -> bool:
        """Whether batches of it may still be taken: what it yielded waits for that, or somebody can read on."""
        return self._pending() is not None

    def take(self, chunk: Chunk, digest: bytes) -> None:
        """Note that training took a micro-batch."""
        self.touched = True
        if chunk.index == chunk.count - 1:
            self.batches, self.samples, self.digest = self.batches + 1, self.samples + chunk.batch_samples, digest
        self._passes.taken(self)

    def reached(self) -> Reached:
        """Return the place in this pass up to which training took whole loader batches."""
        return Reached(self, self.batches, self.samples, self.digest)


class Reached(NamedTuple):
    """A place in a pass."""

    within: Pass
    batches: int
    samples: int
    digest: bytes

    def replay(self) -> Replay:
        """Return what is needed to begin the pass again and to go on from this place."""
        order = self.within.order
        return Replay(dict(order.snapshots), order.common, self.batches, self.samples, self.digest)


@dataclass(frozen=True)
class Pending:
    """A micro-batch that was yielded and not taken yet.

    Attributes:
        chunk: What stands behind it.
        digest: The digest of all loader batches up to its own.
        within: The pass that yielded it.
    """

    chunk: Chunk
    digest: bytes
    within: Pass

    def take(self) -> Chunk:
        """Note that training takes it now."""
        self.within.take(self.chunk, self.digest)
        return self.chunk


class _Left(NamedTuple):
    """The random states with which training went on from a marked place: of this rank, and in the passes begun."""

    own: RandomState
    passes: list[tuple[Pass, RandomState]]


class Passes:
    """The passes over one loader, and the place among them that training has reached.

    After a state was loaded, the first pass goes on from there. Until training takes something of it, readers made
    before it began, and one made when its reader is gone, begin the same pass again: Lightning may make two iterators
    before the first batch, and a user may look at the data.

    Args:
        loader: The user's loader.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._count = 0
        self._open: list[Pass] = []
        self._current: Pass | None = None
        self._mark: Reached | None = None
        self._left: _Left | None = None  # None where training is at the mark
        self._loaded: LoaderState | None = None
        self._first: Reached | None = None  # of the passes that went on from the loaded state
        self._following: deque[PassState] = deque()

    @property
    def continues(self) -> bool:
        """Whether a state was loaded of which training has taken nothing yet."""
        return self._loaded is not None

    @property
    def starts_at_state(self) -> bool:
        """Whether a reader made now goes on from the loaded state whatever others read before."""
        return self._loaded is not None and self._first is None

    @property
    def started_again(self) -> bool:
        """Whether the loaded state is within an epoch in which the loader had been read to its end before."""
        loaded = self._loaded
        return loaded is not None and not loaded["complete"] and loaded["epoch_batches"] > loaded["batches"]

    def begin(self, pending: deque[Pending], make: Callable[..., Order], *, at_state: bool, over: bool) -> Pass:
        """Begin a pass.

        Args:
            pending: Where what it yields will wait.
            make: Returns the order, given `generators`, `replay` and `seeded`.
            at_state: What `starts_at_state` was when the reader was made.
            over: Whether the epoch of the loaded state turned out to have no more batches.
        """
        replay, seeded = None, False
        generators, objects = generators_of(self._loader), objects_of(self._loader)
        loaded, first = self._loaded, self._first
        if loaded is not None and first is None:
            self._following = deque(loaded["passes"])
        if loaded is not None and first is not None and (at_state or (_is_left(first.within) and not over)):
            replay = first.replay()
            load_objects(objects, first.within.objects)
        elif loaded is not None and first is None and loaded["complete"]:
            seeded = loaded["seeded"]
            set_generators(generators, loaded["generators"])
        elif loaded is not None and first is not None and over and not first.within.exhausted:
            # Another loader had no more, so the batches to pass over were never asked for.
            set_generators(generators, loaded["generators"])
            load_objects(objects, loaded["objects"])
        elif self._following:
            begun = self._following.popleft()
            done = (loaded["batches"], loaded["samples"], loaded["digest"]) if loaded and not first else (0, 0, "")
            replay = Replay(begun["snapshots"], begun["common"], done[0], done[1], bytes.fromhex(done[2]))
            load_objects(objects, begun["objects"])
        states = [copy.deepcopy(part.state_dict()) for part in objects]
        new = Pass(self, self._count, pending, make(generators, replay, seeded=seeded), states)
        if replay is not None:
            new.batches, new.samples, new.digest = replay.batches, replay.samples, replay.digest
        if loaded is not None and first is None:
            self._first = new.reached()
        self._count += 1
        self._open = [*self._ahead_of(self._mark), new]
        return new

    def _ahead_of(self, mark: Reached | None) -> list[Pass]:
        """Return the passes after the marked one that training reads or has read: not those that users looked into."""
        number = -1 if mark is None else mark.within.number
        return [each for each in self._open if each.number > number and (each.alive or each.touched)]

    def taken(self, within: Pass) -> None:
        """Note that training took a micro-batch of a pass."""
        self._current, self._loaded, self._first = within, None, None

    def enter(self, within: Pass | None) -> None:
        """Note that training begins an epoch, or the rest of one, in a pass; None if it takes nothing of the loader."""
        self._current, self._loaded, self._first = within, None, None
        self.mark()

    def mark(self) -> None:
        """Have the state be the place that training has reached now."""
        self._mark = self._current.reached() if self._current is not None else None
        self._left = None

    def leave_mark(self, own: RandomState) -> None:
        """Note the random states before training goes on from the marked place.

        Args:
            own: The global random state of this rank.
        """
        if self._mark is not None:
            ahead = [self._mark.within, *self._ahead_of(self._mark)]
            self._left = _Left(own, [(each, each.order.common) for each in ahead])

    def state(self, *, ended: bool, spent: Collection[Pass], epoch_batches: int, seeded: bool) -> LoaderState:
        """Return where training stands.

        Args:
            ended: Whether the epoch of the marked place is over.
            spent: The passes that its iterators read last, of which nothing will be taken any more if it is.
            epoch_batches: Loader batches of the epoch that were trained on.
            seeded: Whether worker processes run that the next pass will use.
        """
        mark, left = self._mark, self._left
        if mark is None or ended:
            last = -1 if self._current is None else self._current.number
            ahead = [each for each in self._open if each.alive and each.number > last and each not in spent]
            if not ahead and self._loaded is not None:
                return self._loaded
            if ahead:
                epoch_batches = epoch_batches if mark is None else 0
                mark, left, ended = ahead[0].reached(), None, False
        passes: list[tuple[Pass, RandomState]] = []
        if mark is not None and not ended:
            passes = left.passes if left else [(p, p.order.common) for p in (mark.within, *self._ahead_of(mark))]
        return LoaderState(
            format=FORMAT,
            complete=not passes,
            batches=0 if mark is None else mark.batches,
            samples=0 if mark is None else mark.samples,
            epoch_batches=epoch_batches,
            digest="" if mark is None else mark.digest.hex(),
            passes=[
                PassState(snapshots=dict(each.order.snapshots), objects=copy.deepcopy(each.objects), common=common)
                for each, common in passes
            ],
            generators=[generator.get_state() for generator in generators_of(self._loader)],
            objects=[copy.deepcopy(part.state_dict()) for part in objects_of(self._loader)],
            seeded=seeded,
            random=left.own if left and passes else random_state(),
        )

    def load(self, state: LoaderState) -> None:
        """Have the next pass go on from `state`.

        Raises:
            ValueError: If the loader has other generators or stateful parts than the one whose state it is.
        """
        generators, objects = generators_of(self._loader), objects_of(self._loader)
        for what, mine, theirs in (
            ("generators of its own", generators, state["generators"]),
            ("samplers and datasets with a state_dict", objects, state["objects"]),
        ):
            if len(mine) != len(theirs):
                raise ValueError(
                    f"the train loader has {len(mine)} {what}, but that of the checkpoint had {len(theirs)}. Resume"
                    " with the sampler and dataset of the run that saved it."
                )
        if state["complete"]:
            set_generators(generators, state["generators"])
        load_objects(objects, state["objects"] if state["complete"] else state["passes"][0]["objects"])
        self._loaded, self._first, self._mark, self._left, self._current = state, None, None, None, None


def _is_left(within: Pass) -> bool:
    return not within.alive and not within.exhausted
