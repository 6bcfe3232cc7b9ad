"""How much of a loader training has taken, as a checkpoint holds it: free of the world size and of the micro-batches.

A pass over a loader is determined by the random states that its order was drawn from. A checkpoint holds these, and the
number of loader batches that were taken since. To go on, the pass is begun again from the same states, and that many
batches are passed over; a digest of them proves that they are the same.

Taken is not yielded: Lightning and worker processes fetch ahead, and a training loop may leave a pass early.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict, cast

import torch

from lightning_gradavg.batches import Chunk
from lightning_gradavg.order import Order, RandomState, Replay, Snapshot, random_state

__all__ = ["LoaderState", "Pass", "Passes", "Pending", "checked_state"]

_FORMAT = 1
_DEPTH = 4  # a sampler of a batch sampler, a dataset of a subset: more levels are not followed


class LoaderState(TypedDict):
    """Where training stands in a loader. The same on all ranks, and for every world size.

    Attributes:
        format: Version of this format.
        complete: Whether the epoch is over, so that the next pass starts at its first batch.
        batches: Loader batches of the pass that were trained on.
        samples: Samples in them.
        epoch_batches: Loader batches of the epoch that were trained on. Of a loader that was started again within the
            epoch, being shorter than another, it is more than `batches`.
        digest: Of the fingerprints of these batches, in hexadecimal digits.
        snapshots: What the pass was drawn from.
        common: The ranks' common random state at that time.
        generators: States of the loader's own generators after a complete epoch.
        objects: States of the samplers and datasets that have some: before the pass, or after a complete epoch.
        seeded: Whether worker processes outlive the epoch, so that the next pass draws no seed for them.
        random: Rank 0's global random state after these batches.
    """

    format: int
    complete: bool
    batches: int
    samples: int
    epoch_batches: int
    digest: str
    snapshots: dict[str, Snapshot]
    common: RandomState
    generators: list[torch.Tensor]
    objects: list[Any]
    seeded: bool
    random: RandomState


def checked_state(state: Any) -> LoaderState:
    """Return `state` if it is one of a split loader.

    Raises:
        ValueError: If it is something else.
    """
    if isinstance(state, dict) and state.get("format") == _FORMAT and LoaderState.__required_keys__ <= state.keys():
        return cast("LoaderState", state)
    found = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
    raise ValueError(
        f"the checkpoint's state of a train loader is not one of format {_FORMAT} of a loader split with"
        f" split_batches=True; it holds {found}. Resume with the strategy and the train loaders that saved it."
    )


def _parts(loader: Any) -> list[Any]:
    """Return the loader's samplers and datasets, each once, in an order that is the same in every run."""
    found, level = [loader], [loader]
    for _ in range(_DEPTH):
        inner = [getattr(part, name, None) for part in level for name in ("batch_sampler", "sampler", "dataset")]
        level = []
        for part in inner:
            if part is not None and not any(part is known for known in found):
                found.append(part)
                level.append(part)
    return found


def _generators(loader: Any) -> list[torch.Generator]:
    owned = [getattr(part, "generator", None) for part in _parts(loader)]
    unique = {id(generator): generator for generator in owned if isinstance(generator, torch.Generator)}
    return list(unique.values())


def _objects(loader: Any) -> list[Any]:
    parts = _parts(loader)[1:]  # a loader with a state of its own resumes itself
    return [part for part in parts if hasattr(part, "state_dict") and hasattr(part, "load_state_dict")]


class Pass:
    """One pass over a loader.

    Attributes:
        number: Its place among the passes over the loader, from 0.
        order: The order of its batches.
        objects: States of the loader's samplers and datasets before it.
        batches: Loader batches that training took.
        samples: Samples in them.
        digest: The digest of their fingerprints.
        exhausted: Whether it was read to its end.
    """

    def __init__(self, passes: Passes, number: int, reader: Any, order: Order, objects: list[Any]) -> None:
        self._passes, self._reader = passes, weakref.ref(reader)
        self.number, self.order, self.objects = number, order, objects
        self.batches, self.samples, self.digest = 0, 0, b""
        self.exhausted = False

    @property
    def alive(self) -> bool:
        """Whether anybody can still read on."""
        return self._reader() is not None

    def take(self, chunk: Chunk, digest: bytes) -> None:
        """Note that training took a micro-batch."""
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
        self._left: tuple[RandomState, RandomState] | None = None  # the own and the common state at the mark
        self._loaded: LoaderState | None = None
        self._first: Reached | None = None  # of the passes that went on from the loaded state

    @property
    def continues(self) -> bool:
        """Whether a state was loaded of which training has taken nothing yet."""
        return self._loaded is not None

    @property
    def starts_at_state(self) -> bool:
        """Whether a reader made now goes on from the loaded state whatever others read before."""
        return self._loaded is not None and self._first is None

    def begin(self, reader: Any, make: Callable[..., Order], *, at_state: bool) -> Pass:
        """Begin a pass.

        Args:
            reader: The iterator that reads it.
            make: Returns the order, given `generators`, `replay` and `seeded`.
            at_state: What `starts_at_state` was when the reader was made.
        """
        replay, seeded = None, False
        generators, objects = _generators(self._loader), _objects(self._loader)
        loaded, first = self._loaded, self._first
        if loaded is not None and first is not None and (at_state or _is_left(first.within)):
            replay = first.replay()
            _load(objects, first.within.objects)
        elif loaded is not None and first is None and loaded["complete"]:
            seeded = loaded["seeded"]
            _set(generators, loaded["generators"])
        elif loaded is not None and first is None:
            digest = bytes.fromhex(loaded["digest"])
            replay = Replay(loaded["snapshots"], loaded["common"], loaded["batches"], loaded["samples"], digest)
            _load(objects, loaded["objects"])
        states = [copy.deepcopy(part.state_dict()) for part in objects]
        begun = Pass(self, self._count, reader, make(generators, replay, seeded=seeded), states)
        if replay is not None:
            begun.batches, begun.samples, begun.digest = replay.batches, replay.samples, replay.digest
        if loaded is not None and first is None:
            self._first = begun.reached()
        self._count += 1
        self._open = [*filter(lambda each: each.alive, self._open), begun]
        return begun

    def taken(self, within: Pass) -> None:
        """Note that training took a micro-batch of a pass."""
        self._current, self._loaded, self._first = within, None, None

    def mark(self, within: Pass | None = None) -> None:
        """Have the state be the place that training has reached now, in `within` or in the pass that it took from."""
        within = within or self._current
        self._mark = within.reached() if within is not None else None
        self._left = None

    def leave_mark(self, own: RandomState) -> None:
        """Note the random states before training goes on from the marked place.

        Args:
            own: The global random state of this rank.
        """
        if self._mark is not None:
            self._left = own, self._mark.within.order.common

    def state(self, *, ended: bool, epoch_batches: int, seeded: bool) -> LoaderState:
        """Return where training stands.

        Args:
            ended: Whether the epoch of the marked place is over.
            epoch_batches: Loader batches of the epoch that were trained on.
            seeded: Whether worker processes run that the next pass will use.
        """
        mark = self._mark
        if mark is None or ended:
            last = -1 if self._current is None else self._current.number
            ahead = [each for each in self._open if each.alive and each.number > last]
            if not ahead and self._loaded is not None:
                return self._loaded
            if ahead:
                epoch_batches = epoch_batches if mark is None else 0
                mark, ended = ahead[-1].reached(), False
        complete = mark is None or ended
        objects = [part.state_dict() for part in _objects(self._loader)]
        own = random_state()
        common = own if mark is None else mark.within.order.common
        if self._left is not None and mark is self._mark and not complete:
            own, common = self._left
        return LoaderState(
            format=_FORMAT,
            complete=complete,
            batches=0 if mark is None else mark.batches,
            samples=0 if mark is None else mark.samples,
            epoch_batches=epoch_batches,
            digest="" if mark is None else mark.digest.hex(),
            snapshots={} if mark is None or complete else dict(mark.within.order.snapshots),
            common=common,
            generators=[generator.get_state() for generator in _generators(self._loader)],
            objects=copy.deepcopy(objects if mark is None or complete else mark.within.objects),
            seeded=seeded,
            random=own,
        )

    def load(self, state: LoaderState) -> None:
        """Have the next pass go on from `state`.

        Raises:
            ValueError: If the loader has other generators or stateful parts than the one whose state it is.
        """
        generators, objects = _generators(self._loader), _objects(self._loader)
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
            _set(generators, state["generators"])
        _load(objects, state["objects"])
        self._loaded, self._first, self._mark, self._left, self._current = state, None, None, None, None


def _is_left(within: Pass) -> bool:
    return not within.alive and not within.exhausted


def _set(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _load(objects: list[Any], states: list[Any]) -> None:
    for part, state in zip(objects, states, strict=True):
        part.load_state_dict(copy.deepcopy(state))
