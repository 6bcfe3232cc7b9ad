"""One order of the data on all ranks, and how much of it training took: what a pass over a loader is determined by.

The order is that of one process with the random state of rank 0. What differs between ranks is that state, so they
agree on it twice in a pass: when the iterator is made, where workers and samplers draw that draw at once, and when the
first batch is asked for, where most samplers draw. Hooks and other loaders may have drawn in between. From there the
pass goes on by itself, and what it yields is compared.

A pass is determined by these states. A checkpoint holds them, and the number of loader batches that were taken since.
To go on, the pass is gone through again from the same states, and that many batches are passed over; a digest of them
proves that they are the same. Nothing of this depends on the number of ranks or of micro-batches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, TypedDict, cast

import torch

from lightning_gradavg.batches.chunks import Chunk
from lightning_gradavg.random_state import RandomState, random_state, restore_random_state, same_random_state
from lightning_gradavg.ranks import World
from lightning_gradavg.tree import fingerprint

__all__ = [
    "LoaderState",
    "Order",
    "PassState",
    "Taken",
    "checked_state",
    "generators_of",
    "length_of",
    "load_objects",
    "objects_of",
    "require_alike",
    "set_generators",
    "states_of",
]

_FORMAT = 1
_DEPTH = 4  # a sampler of a batch sampler, a dataset of a subset: more levels are not followed
_END = object()


class Snapshot(TypedDict):
    """What the draws of samplers depend on: the ranks' common random state, and the loader's own generators."""

    random: RandomState
    generators: list[torch.Tensor]


class PassState(TypedDict):
    """What determines one pass over a loader.

    Attributes:
        snapshots: What it was drawn from, by the name of the moment.
        objects: States that samplers and datasets had before it.
        common: The ranks' common random state when it was left.
    """

    snapshots: dict[str, Snapshot]
    objects: list[Any]
    common: RandomState


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


class Taken(NamedTuple):
    """How much of a pass training took: loader batches, samples in them, and the digest of their fingerprints."""

    batches: int = 0
    samples: int = 0
    digest: bytes = b""


class Order:
    """The order of one pass over a loader. Making it is a collective operation.

    Args:
        loader: The user's loader.
        world: The ranks that read the same batches.
        again: The pass of another run that is gone through again, or None.
        start: How much of that pass is passed over.
        seeded: Whether the worker processes have their seed from an earlier epoch, so that none is to be drawn. Where
            they had to be started anew, the draw is taken back.

    Attributes:
        taken: How much of the pass training took, of `start` and since.
    """

    def __init__(
        self,
        loader: Any,
        world: World,
        again: PassState | None = None,
        start: Taken = Taken(),  # noqa: B008  # immutable
        *,
        seeded: bool = False,
    ) -> None:
        self._world, self._start, self.taken = world, start, start
        self._generators, stateful = generators_of(loader), objects_of(loader)
        if again is not None:
            load_objects(stateful, again["objects"])
        self._objects = states_of(stateful)
        self._seen = {} if again is None else dict(again["snapshots"])
        self._snapshots: dict[str, Snapshot] = {}
        self._left = None if again is None else again["common"]
        self._drawing = False
        self._own: RandomState | None = None  # to put back after a draw
        self._hash, self._batches = blake2b(digest_size=16), 0
        self.agree("begin")
        if seeded:
            self._seen["made"] = self._snapshots["begin"]
        length = length_of(loader)
        self._sized = length is not None
        self.require(("length", length), f"the ranks' train loaders differ: on this rank the length is {length}.")

    def state(self) -> PassState:
        """Return what determines the pass."""
        return PassState(snapshots=dict(self._snapshots), objects=copy.deepcopy(self._objects), common=self._common)

    @property
    def _common(self) -> RandomState:
        return random_state() if self._drawing else self._state

    def agree(self, moment: Literal["begin", "made", "first"]) -> None:
        """Have further draws start from rank 0's random state, or from where the pass to go through again drew.

        A collective operation.

        Args:
            moment: `begin`, before an iterator is made; `made`, before that of a sampler is, or after that of an
                iterable; `first`, before the first batch is asked for. Within a draw, as where worker processes are fed
                their first indices, the state is rank 0's already.
        """
        if moment == "first" and moment in self._snapshots:
            return
        seen = self._seen.get(moment)
        if seen is None and not self._drawing:
            self._state: RandomState = self._world.from_first(random_state())
        elif seen is not None:
            self._state = seen["random"]
            set_generators(self._generators, seen["generators"])
            if self._drawing:
                restore_random_state(self._state)
        self._snapshots[moment] = Snapshot(
            random=self._common, generators=[generator.get_state() for generator in self._generators]
        )

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from the ranks' common random state inside.

        A rank whose own state is equal to it moves on with it, as a single process does. Any other has its own back at
        the end. So has every rank while batches are passed over: its own state is that of the run that is gone on with.
        """
        if self._drawing:
            yield
            return
        own = random_state()
        self._own = own if self.behind or not same_random_state(own, self._state) else None
        restore_random_state(self._state)
        self._drawing = True
        try:
            yield
        finally:
            self._state, self._drawing = random_state(), False
            restore_random_state(self._own or self._state)

    def go_on(self) -> None:
        """Draw from the state that the pass was left with, past draws that are not made again. Within a draw."""
        assert self._left is not None
        restore_random_state(self._left)
        if self._own is not None and same_random_state(self._own, self._left):
            self._own = None

    def drawn(self, batches: Iterator[Any], *, once: bool = False) -> Iterator[Any]:
        """Yield the batches, each drawn from the ranks' common random state, or only the first one if `once`."""
        self.agree("first")
        while True:
            with self.drawing():
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch
            if once:
                yield from batches
                return

    @property
    def behind(self) -> bool:
        """Whether batches are still to be passed over."""
        return self._batches < self._start.batches

    @property
    def caught_up(self) -> bool:
        """Whether no batch was noted but those to be passed over."""
        return self._batches == self._start.batches

    def note(self, key: bytes) -> bytes | None:
        """Note the next loader batch by its fingerprint, and compare. A collective operation.

        At batches 1, 2, 4, 8, and so on; without a known length at every batch, so that a rank that ends early and one
        that goes on meet here, and not in different collectives.

        Returns:
            The digest of all batches so far; None for one that is to be passed over.

        Raises:
            RuntimeError: If the batches so far are not the same on all ranks, or not those of the pass to go through.
        """
        passed_over = self.behind
        self._hash.update(key)
        self._batches += 1
        if self.caught_up:
            self._compare(f"batch {self._batches}, the last that the checkpoint counts as trained on")
            if self._hash.digest() != self._start.digest:
                raise self._other_batches("are not those of the checkpoint")
        elif not passed_over and not (self._sized and self._batches & (self._batches - 1)):
            self._compare(f"batch {self._batches}")
        return None if passed_over else self._hash.digest()

    def finish(self) -> None:
        """Compare at the end of the pass. A collective operation.

        Raises:
            RuntimeError: If the batches are not the same on all ranks, or some to pass over are missing.
        """
        self._compare(f"the end after batch {self._batches}")
        if self.behind:
            raise self._other_batches(f"are missing, it ends after {self._batches}")

    def take(self, chunk: Chunk, digest: bytes) -> None:
        """Note that training takes a micro-batch."""
        if chunk.is_last:
            self.taken = Taken(self.taken.batches + 1, self.taken.samples + chunk.batch_samples, digest)

    def require(self, value: Any, message: str) -> None:
        """Raise a ValueError on all ranks unless `value` is the same on all of them. A collective operation."""
        require_alike(self._world, value, message)

    def _compare(self, what: str) -> None:
        if not _alike(self._world, self._hash.digest()):
            raise RuntimeError(
                f"the train loader does not yield the same batches on all ranks: found at {what} of this epoch."
                " With split_batches=True every rank takes its chunk of the same batch. Make the sampler or the dataset"
                " independent of the rank, and seed generators of its own alike on every rank; or, where every rank is"
                " to read its own part of the data, set `sharded_by_rank = True` on the loader or on its dataset."
            )

    def _other_batches(self, found: str) -> RuntimeError:
        batches, samples, _ = self._start
        return RuntimeError(
            f"the checkpoint was saved after {batches} batches ({samples} samples) of its epoch, but the"
            f" first {batches} batches of the train loader {found}: going on would train on some samples twice"
            " and on others never. Resume with the dataset, batch size and sampler of that run. A sampler whose order"
            " does not come from `generator=` or the global random state needs methods `state_dict` and"
            " `load_state_dict`. Or resume from a checkpoint of the end of an epoch."
        )


def require_alike(world: World, value: Any, message: str) -> None:
    """Raise on all ranks unless `value` is the same on all of them. A collective operation.

    Raises:
        ValueError: With `message`.
    """
    if not _alike(world, fingerprint(value)):
        raise ValueError(f"{message} With split_batches=True it must be the same on all ranks.")


def _alike(world: World, digest: bytes) -> bool:
    rows = world.gather_integers([int.from_bytes(digest[:8], "little", signed=True)])
    return all(row == rows[0] for row in rows)


def length_of(loader: Any) -> int | None:
    """Return the length of `loader`, or None where it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def checked_state(state: Any, loader: Any) -> LoaderState:
    """Return `state` if `loader` can go on from it.

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
        ("generators of its own", generators_of(loader), state["generators"]),
        ("samplers and datasets with a state_dict", objects_of(loader), state["objects"]),
    ):
        if len(mine) != len(theirs):
            raise ValueError(
                f"the train loader has {len(mine)} {what}, but that of the checkpoint had {len(theirs)}. Resume"
                " with the sampler and dataset of the run that saved it."
            )
    return cast("LoaderState", state)


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


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that the loader, its samplers and its datasets own, each once."""
    owned = [getattr(part, "generator", None) for part in _parts(loader)]
    unique = {id(generator): generator for generator in owned if isinstance(generator, torch.Generator)}
    return list(unique.values())


def set_generators(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    """Give every generator its state."""
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def objects_of(loader: Any) -> list[Any]:
    """Return the samplers and datasets that have a state."""
    parts = _parts(loader)[1:]  # a loader with a state of its own resumes itself
    return [part for part in parts if hasattr(part, "state_dict") and hasattr(part, "load_state_dict")]


def states_of(objects: list[Any]) -> list[Any]:
    """Return the states of samplers and datasets, as they are now."""
    return [copy.deepcopy(part.state_dict()) for part in objects]


def load_objects(objects: list[Any], states: list[Any]) -> None:
    """Give every sampler and dataset a state of its own."""
    for part, state in zip(objects, states, strict=True):
        part.load_state_dict(copy.deepcopy(state))
