"""The order of one pass over a training loader: that of one process with the random state of rank 0.

A checkpoint holds what the pass drew from, and how many loader batches training has stepped on. To resume, the pass is
repeated from the same states, and that many batches are passed over. A digest proves that they are the same batches.
`draws.py` says what a pass draws, and when.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple, TypedDict

from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_gradavg._lightning.loaders import length_of
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.tree import data_digest
from lightning_gradavg.batches.chunks import Chunk, Split
from lightning_gradavg.batches.draws import Draw, PassDraws, Snapshot, Sources

__all__ = ["BatchRecord", "LoaderState", "Order", "PassPosition", "SharedIndices"]

_BLOCK = 256
"""Most batches of indices that are sent at once. Blocks grow to it from one, so that the first batch comes soon."""

# They draw from a global generator for their first index only, whatever happens between the batches.
_DRAW_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class LoaderState(TypedDict):
    """What a checkpoint holds of a loader: what determines the pass in progress, and how far training is in it."""

    snapshots: dict[str, Snapshot]  # what the pass drew from, by moment; none after a complete epoch
    samplers: list[object]  # the states of stateful samplers before the pass
    now: Snapshot  # what the resumed run goes on drawing from
    batches: int  # loader batches of the pass that were stepped on
    digest: str  # of the digests of these batches


class PassPosition(NamedTuple):
    """How far a pass is."""

    batches: int  # loader batches that were read
    digest: str  # of the digests of these batches; empty before the first


class BatchRecord(NamedTuple):
    """What is known of a loader batch that was read. A batch is of the user's own type, and cannot carry it."""

    chunk: Chunk  # this rank's samples of the batch
    order: Order  # of the pass that read it
    before: PassPosition
    after: PassPosition


class Order:
    """The order of one pass over a loader. Making it is a collective operation.

    `record` is called for each loader batch in turn, and `finish` at the end of the pass.

    Args:
        loader: The user's loader.
        world: The ranks that read it.
        state: Where a pass to be repeated has begun, and how many batches to pass over; None for a new pass. What a
            new pass draws from is written into its snapshots, which all passes from this state share.
        shared: Whether all ranks read the same batches; else each rank reads its own samples.

    Attributes:
        start: Where training begins in the pass: loader batches before it are passed over.
        position: Where reading is.
        pending: The records of the batches whose indices were asked for, and which are still to come from the loader.
        draws: The random stream of the pass.
        sampler_states: The states of stateful samplers before the pass.
    """

    def __init__(self, loader: object, world: World, state: LoaderState | None, *, shared: bool) -> None:
        self.world = world
        self._shared = shared
        self._has_length = length_of(loader) < math.inf
        self._hash = blake2b(digest_size=16)  # of the digests of the batches so far
        self.start = PassPosition(0, "")
        self.position = PassPosition(0, "")
        self.pending: deque[BatchRecord] = deque()
        sources = Sources(loader)
        snapshots: dict[str, Snapshot] = {}
        if state is not None:
            self.start = PassPosition(state["batches"], state["digest"])
            snapshots = state["snapshots"]
            sources.load_generators(state["now"]["generators"])
            sources.load_samplers(state["samplers"])
        self.sampler_states = sources.sampler_states()
        self.draws = PassDraws(world, sources, snapshots, shared=shared)
        self.draws.begin()

    def drawing(self) -> AbstractContextManager[None]:
        """Draw from the random stream of the pass inside."""
        # While batches are passed over, the own state is the one to resume, which has moved on with them already.
        passes_over = self.position.batches < self.start.batches
        return self.draws.drawing(apart=passes_over)

    def record(self, digest: bytes, chunk: Chunk) -> BatchRecord | None:
        """Count the next loader batch; return its record, or None if it is passed over.

        Where all ranks read the same, they compare some batches, a collective operation:

        - of a loader without length, every batch: a rank whose loader ends early and one whose loader goes on meet
          there, and do not wait for each other forever;
        - of a loader with a length, batches 1, 2, 4, 8, ...;
        - the last one that is passed over.

        Raises:
            RuntimeError: If the batches differ between the ranks, or are not those of the checkpoint.
        """
        self._hash.update(digest)
        before = self.position
        number = before.batches + 1
        self.position = PassPosition(number, self._hash.hexdigest())
        if number < self.start.batches:
            return None
        if number == self.start.batches:
            self._compare(f"batch {number}, the last that the checkpoint counts")
            if self.position != self.start:
                raise RuntimeError(self._not_resumable("are not those of the checkpoint"))
            return None
        is_power_of_2 = number & (number - 1) == 0
        if is_power_of_2 or not self._has_length:
            self._compare(f"batch {number}")
        return BatchRecord(chunk, self, before, self.position)

    def finish(self) -> None:
        """End the pass. A collective operation where all ranks read the same.

        Raises:
            RuntimeError: If the loader ends earlier than on another rank, or than the checkpoint counts.
        """
        self._compare(f"the end after batch {self.position.batches}")
        if self.position.batches < self.start.batches:
            raise RuntimeError(self._not_resumable(f"are missing, it ends after {self.position.batches}"))

    def _compare(self, what: str) -> None:
        if not self._shared:
            return
        if not _equal_on_all_ranks(self.world, self._hash.digest()):
            raise RuntimeError(
                f"the train loader does not yield the same batches on all ranks: found at {what} of this epoch. Every"
                " rank takes its part of the same batch. Make dataset and collate_fn independent of the rank, and have"
                " them draw from the global generators of torch, random or NumPy, which are those of rank 0, or from"
                " one that is seeded equally on every rank; or, where every rank is to read its own part of the data,"
                " leave split_batches, equivalent_to and num_replicas out."
            )

    def _not_resumable(self, found: str) -> str:
        batches = self.start.batches
        return (
            f"the checkpoint was saved after {batches} batches of its epoch, but the first {batches} batches of the"
            f" train loader {found}: going on would train on some samples twice and on others never. Resume with the"
            " dataset, batch size and sampler of that run. A sampler whose order does not come from `generator=` or the"
            " global random state needs methods `state_dict` and `load_state_dict`. Or resume from a checkpoint of the"
            " end of an epoch."
        )


class _Block(NamedTuple):
    """What rank 0 sends of its sampler at once."""

    batches: list[list[object]]  # the indices of each loader batch
    draw: Draw  # what the sampler has drawn for them
    error: str  # the repr of what it raised after them; empty if nothing


class SharedIndices:
    """A batch sampler that yields this rank's part of each batch of rank 0's sampler.

    The loader that is read, a copy of the user's, has it for its `batch_sampler`. `SplitLoader` sets `order` before it
    makes an iterator of that loader. Each block of indices is a collective operation: all ranks ask for it, rank 0
    reads its sampler, and the others take no part in the draw.
    """

    order: Order  # of the next pass

    def __init__(self, batch_sampler: Any, split: Split) -> None:
        self._batch_sampler = batch_sampler  # the user's: any iterable with a length, or without
        self._split = split
        self._raised: Exception | None = None  # by the sampler of rank 0, on that rank
        inner = getattr(batch_sampler, "sampler", None)
        # Exact types: a subclass may draw whenever it likes.
        self._draws_once = type(batch_sampler) is BatchSampler and type(inner) in _DRAW_ONCE

    def __len__(self) -> int:
        return len(self._batch_sampler)

    def __iter__(self) -> Iterator[object]:
        order = self.order
        batches: Iterator[object] = iter(())
        if order.world.rank == 0:
            with order.drawing():  # a sampler may draw when its iterator is made
                batches = iter(self._batch_sampler)
        return self._parts(self._batches_of_rank_0(batches, order), order)

    def _batches_of_rank_0(self, batches: Iterator[object], order: Order) -> Iterator[list[object]]:
        """Yield the indices of each loader batch, which rank 0 sends to all ranks."""
        world = order.world
        if world.rank == 0:
            order.draws.begin_reading()
        size = 1
        read = 0
        while True:
            block = None
            if world.rank == 0:
                block = self._next_block(batches, size, order)
            block = world.from_first(block)
            order.draws.follow(block.draw)
            yield from block.batches
            if block.error:
                if self._raised is not None:
                    raise self._raised
                raise RuntimeError(f"the batch sampler of rank 0, whose order counts, raised {block.error}")
            if len(block.batches) < size:
                return
            read += size
            # Any other sampler is asked for one batch at a time: it may draw for each, or look at how training goes.
            if self._draws_once:
                # Not past the last batch: samplers draw from their generator again if they are asked for one more.
                size = max(1, min(2 * size, _BLOCK, len(self) - read))

    def _next_block(self, batches: Iterator[object], size: int, order: Order) -> _Block:
        """Read up to so many batches of rank 0's sampler."""
        block: list[list[object]] = []
        error = ""
        with order.drawing():
            try:
                block.extend(_listed(indices) for indices in islice(batches, size))
            except Exception as raised:  # noqa: BLE001  # the other ranks wait for this block, and raise as well
                self._raised = raised
                error = repr(raised)
        return _Block(block, order.draws.last_draw, error)

    def _parts(self, batches: Iterator[list[object]], order: Order) -> Iterator[list[object]]:
        """Yield the indices that this rank loads, and pass over batches that were trained on."""
        for indices in batches:
            chunk = self._split.cut(len(indices))
            record = order.record(data_digest(indices), chunk)
            if record is not None:
                order.pending.append(record)
                yield indices[chunk.start : chunk.stop]


def _listed(indices: Any) -> list[Any]:
    """Return the indices of a batch, which a sampler yields as a tensor, a list or any iterable, as a list."""
    if isinstance(indices, Tensor):
        listed: list[Any] = indices.tolist()
        return listed
    return list(indices)


def _equal_on_all_ranks(world: World, digest: bytes) -> bool:
    # 64 bits do: they guard against mistakes, not against forgery.
    rows = world.gather_integers([int.from_bytes(digest[:8], "little", signed=True)])
    return all(row == rows[0] for row in rows)
