"""The order of one pass over a training loader: that of one process with the random state of rank 0.

A pass draws from that state at two moments: when its iterator is made, where workers and some samplers draw, and when
the first batch is asked for, where most samplers draw. Hooks and other loaders may draw in between. From there the pass
goes on independently of them, and of the number of ranks.

A checkpoint holds what the pass drew from, and the number of loader batches that training stepped on. To resume, the
pass is repeated from the same states, and that many batches are passed over; a digest proves that they are the same.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b
from itertools import islice
from typing import Any, Literal, NamedTuple, NoReturn, TypedDict

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_gradavg._lightning.loaders import length_of, loader_parts, loader_samplers
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.random_state import RandomState, RandomStream, forked, random_state
from lightning_gradavg._support.tree import data_digest
from lightning_gradavg.batches.chunks import Chunk, Split

__all__ = ["Behind", "LoaderState", "Order", "Place", "SharedIndices", "Sources", "loader_state"]

_BLOCK = 256
"""Batches of indices that are sent at once, where the sampler draws no random numbers and sees nothing of training."""

# They draw from a global generator for their first index only, whatever happens between the batches.
_DRAW_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Snapshot(TypedDict):
    """What draws depend on: rank 0's random state, and the loader's own generators."""

    random: RandomState
    generators: list[Tensor]


class LoaderState(TypedDict):
    """Where training stands in a loader: what determines the pass, and how far training is in it."""

    snapshots: dict[str, Snapshot]  # what the pass drew from, by moment; none after a complete epoch
    samplers: list[Any]  # the states of samplers before the pass
    now: Snapshot
    batches: int  # loader batches of the pass that were stepped on
    digest: str  # of the digests of these batches


def loader_state(saved: Any) -> LoaderState:
    """Return what a checkpoint holds of a loader, which 0.1.0 wrote in another form."""
    if "passes" not in saved:
        return saved  # type: ignore[no-any-return]  # read from a file
    begun = next(iter(saved["passes"]), {"snapshots": {}, "objects": saved["objects"]})
    return LoaderState(
        snapshots=begun["snapshots"],
        samplers=begun["objects"],
        now=Snapshot(random=saved["random"], generators=saved["generators"]),
        batches=saved["batches"],
        digest=saved["digest"],
    )


class Sources:
    """What the order of a loader depends on beside global random states: generators, and samplers with a state."""

    def __init__(self, loader: Any) -> None:
        owned = [getattr(part, "generator", None) for part in loader_parts(loader)]
        self._generators = list({id(each): each for each in owned if isinstance(each, torch.Generator)}.values())
        self._samplers = [each for each in loader_samplers(loader) if hasattr(each, "load_state_dict")]

    def snapshot(self) -> Snapshot:
        """Return what draws of this process depend on now."""
        return Snapshot(random=random_state(), generators=[each.get_state() for each in self._generators])

    def samplers(self) -> list[Any]:
        """Return the states of samplers."""
        return [copy.deepcopy(each.state_dict()) for each in self._samplers]

    def load(self, generators: Sequence[Tensor], samplers: Sequence[Any] = ()) -> None:
        """Give generators and samplers their states."""
        for generator, drawn in zip(self._generators, generators, strict=False):
            generator.set_state(drawn)
        for sampler, state in zip(self._samplers, samplers, strict=False):
            sampler.load_state_dict(copy.deepcopy(state))


class Place(NamedTuple):
    """A place in a pass: how many loader batches were read, and the digest of their digests."""

    batches: int
    digest: str


class Behind(NamedTuple):
    """What stands behind a batch: its samples of the loader batch, and the places before and after it in a pass."""

    chunk: Chunk
    order: Order
    before: Place
    after: Place


class Order:
    """The order of one pass over a loader. Making it is a collective operation.

    Where reading is `shared`, all ranks draw the same numbers. Otherwise rank 0 draws what one process draws, and each
    other rank from a stream of its own, so that no two ranks draw the same augmentation.

    Attributes:
        start: Where the pass begins: loader batches before it are passed over.
        place: Where reading is.
        asked: What stands behind the batches whose indices were asked for, and which are still to come.
        snapshots: What the pass drew from, by moment: complete once its first batch was asked for.
        samplers: The states of samplers before the pass.
    """

    def __init__(self, loader: Any, world: World, state: LoaderState | None, *, shared: bool) -> None:
        self.world, self._shared, self.forks = world, shared, not shared and world.rank > 0
        self._sources, self._sized = Sources(loader), length_of(loader) < math.inf
        self.start, self.place, self.snapshots = Place(0, ""), Place(0, ""), dict[str, Snapshot]()
        if state is not None:
            self.start, self.snapshots = Place(state["batches"], state["digest"]), state["snapshots"]
            self._sources.load(state["now"]["generators"], state["samplers"])
        self.samplers = self._sources.samplers()
        self._hash, self.stream, self.asked = blake2b(digest_size=16), RandomStream(), deque[Behind]()
        self.draw_on("begin")
        if self.forks:
            self.stream.state = forked(self.stream.state, world.rank)

    def draw_on(self, moment: Literal["begin", "first"]) -> None:
        """Have further draws start from rank 0's random state, or from where the pass to go through again drew.

        A collective operation at `begin`, and where the ranks draw the same numbers. Within a draw, as where worker
        processes are fed their first indices, the state is the pass's already.
        """
        if moment not in self.snapshots:
            now = self._sources.snapshot()
            if not self.stream.drawing_now and (self._shared or moment == "begin"):
                now = self.world.from_first(now)
            self.snapshots[moment] = now
        drawn = self.snapshots[moment]
        self.stream.state = drawn["random"]
        if not self.forks:
            self._sources.load(drawn["generators"])

    def drawing(self) -> AbstractContextManager[None]:
        """Draw from the random state of the pass inside.

        While batches are passed over, every rank has its own state back at the end: that of the resumed run.
        """
        return self.stream.drawing(apart=self.place.batches < self.start.batches)

    def follow(self, before: RandomState, after: RandomState) -> None:
        """Move on as rank 0 did, which drew, if this rank's state was rank 0's.

        A model expects that ranks with equal seeds keep drawing equal numbers.
        """
        if self.forks:
            self.stream.pull(before, after)

    def note(self, key: bytes, chunk: Chunk) -> Behind | None:
        """Note the next loader batch by its digest; return what stands behind it, None if it is to be passed over.

        Where all ranks read, they compare some batches, a collective operation; without a known length every batch, so
        that a rank that ends early and one that goes on meet here.
        """
        self._hash.update(key)
        before, number = self.place, self.place.batches + 1
        self.place = Place(number, self._hash.hexdigest())
        resumes, is_power_of_2 = number == self.start.batches, number & (number - 1) == 0
        if number >= self.start.batches and (resumes or not self._sized or is_power_of_2):
            self._compare(f"batch {number}" + ", the last that the checkpoint counts" * resumes)
        if resumes and self.place != self.start:
            self._refuse("are not those of the checkpoint")
        return Behind(chunk, self, before, self.place) if number > self.start.batches else None

    def finish(self) -> None:
        """Raise if some batches to pass over are missing, or ranks that all read had others."""
        self._compare(f"the end after batch {self.place.batches}")
        if self.place.batches < self.start.batches:
            self._refuse(f"are missing, it ends after {self.place.batches}")

    def _compare(self, what: str) -> None:
        if self._shared and not _equal(self.world, self._hash.digest()):
            raise RuntimeError(
                f"the train loader does not yield the same batches on all ranks: found at {what} of this epoch. Every"
                " rank takes its part of the same batch. Make dataset and collate_fn independent of the rank, and have"
                " them draw from the global generators of torch, random or NumPy, which are those of rank 0, or from"
                " one that is seeded equally on every rank; or, where every rank is to read its own part of the data,"
                " leave split_batches, equivalent_to and num_replicas out."
            )

    def _refuse(self, found: str) -> NoReturn:
        batches = self.start.batches
        raise RuntimeError(
            f"the checkpoint was saved after {batches} batches of its epoch, but the first {batches} batches of the"
            f" train loader {found}: going on would train on some samples twice and on others never. Resume with the"
            " dataset, batch size and sampler of that run. A sampler whose order does not come from `generator=` or the"
            " global random state needs methods `state_dict` and `load_state_dict`. Or resume from a checkpoint of the"
            " end of an epoch."
        )


class SharedIndices:
    """The batch sampler of a copy of the loader: this rank's part of what rank 0's yields, which is sent in blocks."""

    order: Order  # of the next pass
    _raised: Exception | None = None  # by rank 0's, on that rank

    def __init__(self, batch_sampler: Any, split: Split) -> None:
        self._batch_sampler, self._split = batch_sampler, split
        inner = getattr(batch_sampler, "sampler", None)
        self._draws_once = type(batch_sampler) is BatchSampler and type(inner) in _DRAW_ONCE

    def __len__(self) -> int:
        return len(self._batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        order = self.order
        with order.drawing():
            batches = iter(self._batch_sampler) if order.world.rank == 0 else iter(())
        return self._own(self._of_rank_0(batches, order), order)

    def _of_rank_0(self, batches: Iterator[Any], order: Order) -> Iterator[Any]:
        """Yield what rank 0's sampler yields, on all ranks."""
        first, size, read = order.world.rank == 0, 1, 0
        if first:
            order.draw_on("first")
        while True:
            own = self._next_block(batches, size, order) if first else None
            block, error, moved = order.world.from_first(own)
            order.follow(*moved)
            yield from block
            if error:
                told = f"the batch sampler of rank 0, whose order counts, raised {error}"
                raise self._raised or RuntimeError(told)
            if len(block) < size:
                return
            read += size
            # Not past the last batch: samplers draw from their generator again if they are asked for one more.
            size = max(1, min(2 * size, _BLOCK, len(self) - read)) if self._draws_once else 1

    def _next_block(self, batches: Iterator[Any], size: int, order: Order) -> tuple[list[Any], str, Any]:
        """Return the next indices, what was raised after them, and the random states before and after."""
        block, error = list[Any](), ""
        with order.drawing():
            try:
                block.extend(_listed(indices) for indices in islice(batches, size))
            except Exception as raised:  # noqa: BLE001  # the other ranks would wait for it
                self._raised, error = raised, repr(raised)
        return block, error, order.stream.moved

    def _own(self, batches: Iterator[Any], order: Order) -> Iterator[Any]:
        """Yield the indices that this rank loads, and pass over batches that were trained on."""
        for indices in batches:
            chunk = self._split.cut(len(indices))
            behind = order.note(data_digest(indices), chunk)
            if behind is not None:
                order.asked.append(behind)
                yield indices[chunk.start : chunk.stop]


def _listed(indices: Any) -> list[Any]:
    listed: list[Any] = indices.tolist() if isinstance(indices, Tensor) else list(indices)
    return listed


def _equal(world: World, digest: bytes) -> bool:
    rows = world.gather_integers([int.from_bytes(digest[:8], "little", signed=True)])
    return all(row == rows[0] for row in rows)
