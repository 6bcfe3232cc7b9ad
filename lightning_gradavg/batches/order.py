"""The order of one pass over a loader, the same on all ranks, and how much of the pass training took.

The order is that of one process with the random state of rank 0. What differs between ranks is that state, so they
agree on it twice in a pass: when the iterator is made, where workers and some samplers draw, and when the first batch
is asked for, where most samplers draw. Hooks and other loaders may draw in between. From there the pass goes on by
itself, and what it yields is compared.

A pass is determined by these states. A checkpoint holds them, and the number of loader batches that were taken since.
To go on, the pass is gone through again from the same states, and that many batches are passed over; a digest of them
proves that they are the same. Nothing of this depends on the number of ranks or of micro-batches.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, TypedDict

import torch

from lightning_gradavg.loaders import keeps_state, length_of
from lightning_gradavg.random_state import RandomState, random_state, restore_random_state, same_random_state
from lightning_gradavg.ranks import World
from lightning_gradavg.tree import data_digest

__all__ = ["LoaderParts", "Order", "PassState", "Start", "Taken", "require_alike"]

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


class Taken(NamedTuple):
    """How much of a pass training took: loader batches, samples in them, and a digest of them."""

    batches: int = 0
    samples: int = 0
    digest: bytes = b""


class Start(NamedTuple):
    """Where a pass starts.

    Attributes:
        again: The pass of another run that is gone through again; None for a new one.
        taken: How much of that pass is passed over.
        seeded: Whether the worker processes had their seed from an earlier epoch, so that none is to be drawn. Where
            they have to be started anew, the draw is taken back.
    """

    again: PassState | None = None
    taken: Taken = Taken()
    seeded: bool = False


class LoaderParts:
    """What has a state in a loader, each once, in an order that is the same in every run.

    Attributes:
        generators: The generators that the loader, its samplers and its datasets own.
        objects: The samplers and datasets that have a state. A loader with one of its own resumes itself.
    """

    def __init__(self, loader: Any) -> None:
        found, level = {id(loader): loader}, [loader]
        for _ in range(_DEPTH):
            inner = [getattr(part, name, None) for part in level for name in ("batch_sampler", "sampler", "dataset")]
            level = [part for part in inner if part is not None and id(part) not in found]
            found |= {id(part): part for part in level}
        owned = [getattr(part, "generator", None) for part in found.values()]
        unique = {id(each): each for each in owned if isinstance(each, torch.Generator)}
        self.generators = list(unique.values())
        inside = list(found.values())[1:]
        self.objects = list(filter(keeps_state, inside))

    def generator_states(self) -> list[torch.Tensor]:
        """Return the states of the generators."""
        return [generator.get_state() for generator in self.generators]

    def set_generators(self, states: Sequence[torch.Tensor]) -> None:
        """Give every generator its state."""
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)

    def object_states(self) -> list[Any]:
        """Return the states of samplers and datasets."""
        return [copy.deepcopy(part.state_dict()) for part in self.objects]

    def load_objects(self, states: Sequence[Any]) -> None:
        """Give every sampler and dataset a state of its own."""
        for part, state in zip(self.objects, states, strict=True):
            part.load_state_dict(copy.deepcopy(state))


class Order:
    """The order of one pass over a loader. Making it is a collective operation.

    Args:
        loader: The user's loader.
        world: The ranks that read the same batches.
        start: Where the pass starts.

    Attributes:
        world: Those ranks.
        taken: How much of the pass training took, before and since.
    """

    def __init__(self, loader: Any, world: World, start: Start) -> None:
        again, self._passed_over, seeded = start
        self.taken = self._passed_over
        self.world, self._parts = world, LoaderParts(loader)
        self._seen: dict[str, Snapshot] = {}
        if again is not None:
            self._parts.load_objects(again["objects"])
            self._seen, self._left = dict(again["snapshots"]), again["common"]
        self._objects = self._parts.object_states()
        self._snapshots: dict[str, Snapshot] = {}
        self._drawing = False
        self._own: RandomState | None = None  # to put back after a draw
        self._batches, self._hash = 0, blake2b(digest_size=16)
        self.agree("begin")
        if seeded:
            self._seen["made"] = self._snapshots["begin"]
        length = length_of(loader)
        self._sized = length < math.inf
        require_alike(
            world, ("length", length), f"the ranks' train loaders differ: on this rank the length is {length}."
        )

    def state(self) -> PassState:
        """Return what determines the pass."""
        return PassState(snapshots=dict(self._snapshots), objects=copy.deepcopy(self._objects), common=self._common)

    @property
    def _common(self) -> RandomState:
        """The state that the next draw starts from. Within a draw it is that of the process."""
        return random_state() if self._drawing else self._state

    @_common.setter
    def _common(self, state: RandomState) -> None:
        self._state = state
        if self._drawing:
            restore_random_state(state)

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
        if seen is not None:
            self._common = seen["random"]
            self._parts.set_generators(seen["generators"])
        elif not self._drawing:
            self._common = self.world.from_first(random_state())
        self._snapshots[moment] = Snapshot(random=self._common, generators=self._parts.generator_states())

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
        """Within a draw, draw from the state that the pass was left with, past draws that are not made again."""
        self._common = self._left
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
        return self._batches < self._passed_over.batches

    @property
    def yielded_nothing(self) -> bool:
        """Whether there was no batch but those to be passed over."""
        return self._batches == self._passed_over.batches

    def note(self, key: bytes) -> bytes | None:
        """Note the next loader batch by its digest, and compare. A collective operation.

        At batches 1, 2, 4, 8, and so on; without a known length at every batch, so that a rank that ends early and one
        that goes on meet here, and not in different collectives.

        Returns:
            The digest of all batches so far; None for one that is to be passed over.

        Raises:
            RuntimeError: If the batches so far are not the same on all ranks, or not those of the pass to go through.
        """
        self._hash.update(key)
        self._batches += 1
        if self.behind:
            return None
        if self.yielded_nothing:
            self._compare(f"batch {self._batches}, the last that the checkpoint counts as trained on")
            if self._hash.digest() != self._passed_over.digest:
                raise self._other_batches("are not those of the checkpoint")
            return None
        if not self._sized or self._batches & (self._batches - 1) == 0:
            self._compare(f"batch {self._batches}")
        return self._hash.digest()

    def finish(self) -> None:
        """Compare at the end of the pass. A collective operation.

        Raises:
            RuntimeError: If the batches are not the same on all ranks, or some to pass over are missing.
        """
        self._compare(f"the end after batch {self._batches}")
        if self.behind:
            raise self._other_batches(f"are missing, it ends after {self._batches}")

    def _compare(self, what: str) -> None:
        if not _alike(self.world, self._hash.digest()):
            raise RuntimeError(
                f"the train loader does not yield the same batches on all ranks: found at {what} of this epoch."
                " With split_batches=True every rank takes its chunk of the same batch. Make the sampler or the dataset"
                " independent of the rank, and seed generators of its own alike on every rank; or, where every rank is"
                " to read its own part of the data, set `sharded_by_rank = True` on the loader or on its dataset."
            )

    def _other_batches(self, found: str) -> RuntimeError:
        batches, samples, _ = self._passed_over
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
    if not _alike(world, data_digest(value)):
        raise ValueError(f"{message} With split_batches=True it must be the same on all ranks.")


def _alike(world: World, digest: bytes) -> bool:
    rows = world.gather_integers([int.from_bytes(digest[:8], "little", signed=True)])
    return all(row == rows[0] for row in rows)
