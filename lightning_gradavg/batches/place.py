"""The order of one pass over a training loader, and where training stands in it.

The order is that of one process with the random state of rank 0. A pass draws from that state at three moments: when it
begins, when the iterator is made, where workers and some samplers draw, and when the first batch is asked for, where
most samplers draw. Hooks and other loaders may draw in between. From there the pass goes on by itself.

A pass is determined by these states. A checkpoint holds them, and the number of loader batches that training stepped
on. To go on, the pass is gone through again from the same states, and that many batches are passed over; a digest of
them proves that they are the same. Nothing of this depends on the number of ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, TypedDict, cast

import torch

from lightning_gradavg.batches.chunks import Chunk
from lightning_gradavg.loaders import keeps_state, length_of
from lightning_gradavg.random_state import RandomState, forked, random_state, restore_random_state, same_random_state
from lightning_gradavg.ranks import World
from lightning_gradavg.tree import data_digest

__all__ = ["Behind", "LoaderState", "Mark", "Order", "PassState", "checked", "require_alike", "state_of"]

_FORMAT = 1
_DEPTH = 4  # a sampler of a batch sampler, a dataset of a subset: more levels are not followed


class Snapshot(TypedDict):
    """What the draws of samplers depend on: rank 0's random state, and the loader's own generators."""

    random: RandomState
    generators: list[torch.Tensor]


class PassState(TypedDict):
    """What determines one pass over a loader.

    Attributes:
        snapshots: What it was drawn from, by the name of the moment.
        objects: States that samplers and datasets had before it.
        common: The random state of the pass before the first batch that is still to be trained on.
    """

    snapshots: dict[str, Snapshot]
    objects: list[Any]
    common: RandomState


class LoaderState(TypedDict):
    """Where training stands in a loader. The same for every world size.

    Attributes:
        format: Version of this format.
        complete: Whether the epoch is over, so that the next pass starts at its first batch.
        batches: Loader batches of the pass that were trained on.
        samples: Samples in them.
        epoch_batches: The same number. Before version 0.2, of a loader that was started again within the epoch, more.
        digest: Of the digests of these batches, in hexadecimal digits.
        passes: The pass; none after a complete epoch.
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


class Mark(NamedTuple):
    """A place in a pass: the loader batches before it, the samples in them, and their digest."""

    batches: int = 0
    samples: int = 0
    digest: bytes = b""


class Behind(NamedTuple):
    """What stands behind a batch.

    Attributes:
        chunk: Which samples of the loader batch it holds.
        mark: The place after the loader batch.
        before: The random state of the pass before the loader batch was read.
        order: The pass.
    """

    chunk: Chunk
    mark: Mark
    before: RandomState
    order: Order


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
        self.objects = list(filter(keeps_state, list(found.values())[1:]))

    def generator_states(self) -> list[torch.Tensor]:
        """Return the states of the generators."""
        return [generator.get_state() for generator in self.generators]

    def object_states(self) -> list[Any]:
        """Return the states of samplers and datasets."""
        return [copy.deepcopy(part.state_dict()) for part in self.objects]

    def load(self, generators: Sequence[torch.Tensor] = (), objects: Sequence[Any] = ()) -> None:
        """Give generators, samplers and datasets states of their own."""
        for generator, state in zip(self.generators, generators, strict=False):
            generator.set_state(state)
        for part, state in zip(self.objects, objects, strict=False):
            part.load_state_dict(copy.deepcopy(state))


class Order:
    """The order of one pass over a loader. Making it is a collective operation.

    Args:
        loader: The user's loader.
        world: The ranks that read the same batches.
        start: Where the pass starts; None at its beginning.
        begun: The state of a pass that began there before and is gone through again.
        shared: Whether all ranks draw the same numbers as they read. Otherwise rank 0 draws what one process draws, and
            each other rank from a stream of its own, so that no two augment their samples alike.

    Attributes:
        world: Those ranks.
        start: The place where it starts: batches before it are passed over.
        mark: The place after the last batch that was noted.
        begun: Rank 0's random state at its beginning.
        common: The random state that the pass draws from next.
    """

    def __init__(
        self, loader: Any, world: World, start: LoaderState | None, begun: PassState | None, *, shared: bool
    ) -> None:
        self.world, self.shared, self.mark = world, shared, Mark()
        self.forks = not shared and world.rank > 0
        self._parts, self.start = LoaderParts(loader), Mark()
        self._seen: dict[str, Snapshot] = {}
        if start is not None:
            self.start = Mark(start["batches"], start["samples"], bytes.fromhex(start["digest"]))
            self._parts.load(start["generators"], start["objects"])
            begun = next(iter(start["passes"]), begun)
        if begun is not None:
            self._parts.load(objects=begun["objects"])
            self._seen, self._left = dict(begun["snapshots"]), begun["common"]
        self._objects = self._parts.object_states()
        self._snapshots: dict[str, Snapshot] = {}
        self._drawing = False
        self._own: RandomState | None = None  # to put back after a draw
        self._hash = blake2b(digest_size=16)
        self.agree("begin")
        self.begun = self.common
        if self.forks:
            self.common = forked(self.common, world.rank)
        if start is not None and start["complete"] and start["seeded"]:
            # The workers had their seed from an earlier epoch: where they are started anew, the draw is taken back.
            self._seen["made"] = self._snapshots["begin"]
        length = length_of(loader)
        self._sized = length < math.inf
        require_alike(
            world, ("length", length), f"the ranks' train loaders differ: on this rank the length is {length}."
        )

    def state(self, common: RandomState | None = None) -> PassState:
        """Return what determines the pass, which goes on from a random state, by default from that of now."""
        return PassState(
            snapshots=dict(self._snapshots), objects=copy.deepcopy(self._objects), common=common or self.common
        )

    @property
    def common(self) -> RandomState:
        """Within a draw it is the state of the process."""
        return random_state() if self._drawing else self._state

    @common.setter
    def common(self, state: RandomState) -> None:
        self._state = state
        if self._drawing:
            restore_random_state(state)

    def agree(self, moment: Literal["begin", "made", "first"]) -> None:
        """Have further draws start from rank 0's random state, or from where the pass to go through again drew.

        A collective operation at `begin`, and where the ranks draw the same numbers.

        Args:
            moment: `begin`, before an iterator is made; `made`, before that of a sampler is, or after that of an
                iterable; `first`, before the first batch is asked for. Within a draw, as where worker processes are fed
                their first indices, the state is rank 0's already.
        """
        if (moment == "first" and moment in self._snapshots) or (moment != "begin" and self.forks):
            return
        seen = self._seen.get(moment)
        if seen is not None:
            self.common = seen["random"]
            self._parts.load(seen["generators"])
        elif not self._drawing:
            exchanges = self.shared or moment == "begin"
            self.common = self.world.from_first(random_state()) if exchanges else random_state()
        self._snapshots[moment] = Snapshot(random=self.common, generators=self._parts.generator_states())

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from the random state of the pass inside.

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

    def follow(self, before: RandomState, after: RandomState) -> None:
        """Move on as rank 0 did, which drew: where the ranks draw the same numbers, or this one's state was rank 0's.

        Of ranks that were seeded alike a model expects that they go on drawing alike.
        """
        if not self.forks:
            self.common = after
        elif not self._drawing and same_random_state(random_state(), before):
            restore_random_state(after)
        elif self._own is not None and same_random_state(self._own, before):
            self._own = after

    def go_on(self) -> None:
        """Within a draw, draw from the state that the pass was left with, past draws that are not made again."""
        self.common = self._left
        if self._own is not None and same_random_state(self._own, self._left):
            self._own = None

    @property
    def behind(self) -> bool:
        """Whether batches are still to be passed over."""
        return self.mark.batches < self.start.batches

    @property
    def yielded_nothing(self) -> bool:
        """Whether there was no batch but those to be passed over."""
        return self.mark.batches == self.start.batches

    def note(self, key: bytes, samples: int, *, compares: bool = False) -> Mark | None:
        """Note the next loader batch by its digest.

        Args:
            key: The digest.
            samples: Its samples.
            compares: Whether to compare with the other ranks, a collective operation: at batches 1, 2, 4, 8, and so on;
                without a known length at every batch, so that a rank that ends early and one that goes on meet here.

        Returns:
            The place after the batch; None for one that is to be passed over.

        Raises:
            RuntimeError: If the batches so far are not the same on all ranks, or not those of the pass to go through.
        """
        self._hash.update(key)
        count = self.mark.batches + 1
        self.mark = Mark(count, self.mark.samples + samples, self._hash.digest())
        if self.behind:
            return None
        resumes = self.yielded_nothing
        if compares and (resumes or not self._sized or count & (count - 1) == 0):
            self.compare(f"batch {count}" + ", the last that the checkpoint counts as trained on" * resumes)
        if resumes and self.mark.digest != self.start.digest:
            raise self._other_batches("are not those of the checkpoint")
        return None if resumes else self.mark

    def finish(self) -> None:
        """End the pass.

        Raises:
            RuntimeError: If some batches to pass over are missing.
        """
        if self.behind:
            raise self._other_batches(f"are missing, it ends after {self.mark.batches}")

    def compare(self, what: str) -> None:
        """Raise on all ranks unless they noted the same batches. A collective operation."""
        if not _alike(self.world, self._hash.digest()):
            raise RuntimeError(
                f"the train loader does not yield the same batches on all ranks: found at {what} of this epoch."
                " With split_batches=True every rank takes its chunk of the same batch. Make the dataset"
                " independent of the rank, and seed generators of its own alike on every rank; or, where every rank is"
                " to read its own part of the data, set `sharded_by_rank = True` on the loader or on its dataset."
            )

    def _other_batches(self, found: str) -> RuntimeError:
        batches, samples, _ = self.start
        return RuntimeError(
            f"the checkpoint was saved after {batches} batches ({samples} samples) of its epoch, but the"
            f" first {batches} batches of the train loader {found}: going on would train on some samples twice"
            " and on others never. Resume with the dataset, batch size and sampler of that run. A sampler whose order"
            " does not come from `generator=` or the global random state needs methods `state_dict` and"
            " `load_state_dict`. Or resume from a checkpoint of the end of an epoch."
        )


def state_of(
    loader: Any, order: Order | None, mark: Mark, common: RandomState | None, random: RandomState, *, seeded: bool
) -> LoaderState:
    """Return where training stands in a loader.

    Args:
        loader: The user's loader.
        order: That of the pass; None after a complete epoch.
        mark: The place in it.
        common: The random state of the pass before the next batch, where that was read already.
        random: Rank 0's global random state.
        seeded: As in `LoaderState`.
    """
    parts = LoaderParts(loader)
    return LoaderState(
        format=_FORMAT,
        complete=order is None,
        batches=mark.batches,
        samples=mark.samples,
        epoch_batches=mark.batches,
        digest=mark.digest.hex(),
        passes=[] if order is None else [order.state(common)],
        generators=parts.generator_states(),
        objects=parts.object_states(),
        seeded=seeded,
        random=random,
    )


def checked(state: Any, loader: Any) -> LoaderState:
    """Return `state` if a loader can go on from it.

    Raises:
        ValueError: If it is not the state of such a loader.
    """
    if not (
        isinstance(state, dict) and state.get("format") == _FORMAT and LoaderState.__required_keys__ <= state.keys()
    ):
        found = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"the checkpoint's state of a train loader is not one of format {_FORMAT} of a loader split with"
            f" split_batches=True; it holds {found}. Resume with the strategy and the train loaders that saved it."
        )
    parts = LoaderParts(loader)
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
