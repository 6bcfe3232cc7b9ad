"""The order of one pass over a training loader: that of one process with the random state of rank 0.

A pass draws from that state at three moments: when it begins, when the iterator is made, where workers and some
samplers draw, and when the first batch is asked for, where most samplers draw. Hooks and other loaders may draw in
between. From there the pass goes on independently of them, and of the number of ranks.

Where samples have indices, rank 0 asks its samplers, and sends what they yield to all ranks, in blocks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from hashlib import blake2b
from itertools import islice
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_gradavg.batches.chunks import EMPTY_BATCH, Chunk, Split
from lightning_gradavg.batches.state import LoaderParts, LoaderState, PassState, Snapshot
from lightning_gradavg.loaders import length_of
from lightning_gradavg.random_state import RandomState, RandomStream, forked, random_state
from lightning_gradavg.ranks import World
from lightning_gradavg.tree import data_digest

__all__ = ["Behind", "Mark", "Order", "SharedIndices", "require_equal"]

_BLOCK = 256
"""Batches of indices that are sent at once, where the sampler draws no random numbers and sees nothing of training."""

# They draw from a global generator for their first index only, whatever happens between the batches.
_DRAW_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Mark(NamedTuple):
    """A place in a pass: the loader batches before it, the samples in them, and their digest."""

    batches: int = 0
    samples: int = 0
    digest: bytes = b""


class Behind(NamedTuple):
    """What stands behind a batch: which samples of the loader batch it holds, and the place after that batch.

    There is no such place (None) for a batch that is passed over.
    """

    chunk: Chunk
    mark: Mark | None


class Order:
    """The order of one pass over a loader. Making it is a collective operation.

    Args:
        loader: The user's loader.
        world: The ranks that read the same batches.
        start: Where the pass starts; None at its beginning.
        shared: Whether all ranks draw the same numbers as they read. Otherwise rank 0 draws what one process draws, and
            each other rank from a stream of its own, so that no two ranks draw the same augmentation.

    Attributes:
        start: The place where it starts: batches before it are passed over.
        mark: The place after the last batch that was noted.
        stream: What it draws from.
        asked: What stands behind the batches whose indices were asked for, and which are still to come.
        state: What determines the pass, complete once its first batch was asked for.
    """

    def __init__(self, loader: Any, world: World, start: LoaderState | None, *, shared: bool) -> None:
        self.world, self.shared = world, shared
        self.forks = not shared and world.rank > 0
        self.start = self.mark = Mark()
        self.asked = deque[Behind]()
        self._parts = LoaderParts(loader)
        self._seen: dict[str, Snapshot] = {}
        if start is not None:
            self.start = Mark(start["batches"], start["samples"], bytes.fromhex(start["digest"]))
            self._parts.load(start["generators"], start["objects"])
            for begun in start["passes"]:
                self._parts.load(objects=begun["objects"])
                self._seen = dict(begun["snapshots"])
        self.state = PassState(snapshots={}, objects=self._parts.object_states())
        self.stream = RandomStream()
        self._hash = blake2b(digest_size=16)
        self.agree("begin")
        self._begun = self.stream.state
        if self.forks:
            self.stream.state = forked(self._begun, world.rank)
        if start is not None and start["complete"] and start["seeded"]:
            # The workers had their seed from an earlier epoch: where they are started anew, the draw is taken back.
            self._seen["made"] = self.state["snapshots"]["begin"]
        length = length_of(loader)
        self._sized = length < math.inf
        require_equal(
            world, ("length", length), f"the ranks' train loaders differ: on this rank the length is {length}."
        )

    def agree(self, moment: Literal["begin", "made", "first"]) -> None:
        """Have further draws start from rank 0's random state, or from where the pass to go through again drew.

        A collective operation at `begin`, and where the ranks draw the same numbers. `begin` is before an iterator is
        made, `made` before that of a sampler is, or after that of an iterable, `first` before the first batch is asked
        for. Within a draw, as where worker processes are fed their first indices, the state is rank 0's already.
        """
        snapshots = self.state["snapshots"]
        if (moment == "first" and moment in snapshots) or (moment != "begin" and self.forks):
            return
        seen = self._seen.get(moment)
        if seen is not None:
            self.stream.state = seen["random"]
            self._parts.load(seen["generators"])
        elif not self.stream.drawing_now:
            exchanges = self.shared or moment == "begin"
            self.stream.state = self.world.from_first(random_state()) if exchanges else random_state()
        snapshots[moment] = Snapshot(random=self.stream.state, generators=self._parts.generator_states())

    def drawing(self) -> AbstractContextManager[None]:
        """Draw from the random state of the pass inside.

        While batches are passed over, every rank has its own state back at the end: that of the resumed run.
        """
        return self.stream.drawing(apart=self.behind)

    def follow(self, before: RandomState, after: RandomState) -> None:
        """Move on as rank 0 did, which drew: where the ranks draw the same numbers, or this one's state was rank 0's.

        A model expects that ranks with equal seeds keep drawing equal numbers.
        """
        if self.forks:
            self.stream.pull(before, after)
        else:
            self.stream.state = after

    def end_making(self) -> None:
        """Move on as rank 0 did when it made its iterator. A collective operation unless `shared`."""
        if not self.shared:
            self.follow(self._begun, self.world.from_first(self.stream.state))

    @property
    def behind(self) -> bool:
        """Whether batches are still to be passed over."""
        return self.mark.batches < self.start.batches

    @property
    def yielded_nothing(self) -> bool:
        """Whether there was no batch but those to be passed over."""
        return self.mark.batches == self.start.batches

    def note(self, key: bytes, samples: int, *, compares: bool = False) -> Mark | None:
        """Note the next loader batch by its digest; return the place after it, None if it is to be passed over.

        With `compares` the ranks compare some batches, a collective operation; without a known length every batch, so
        that a rank that ends early and one that goes on meet here.

        Raises:
            RuntimeError: If the batches so far are not the same on all ranks, or not those of the pass to go through.
        """
        self._hash.update(key)
        count = self.mark.batches + 1
        self.mark = Mark(count, self.mark.samples + samples, self._hash.digest())
        if self.behind:
            return None
        resumes = self.yielded_nothing
        if compares and (resumes or not self._sized or _is_compared(count)):
            self._compare(self.mark.digest, f"batch {count}" + ", the last that the checkpoint counts" * resumes)
        if resumes and self.mark.digest != self.start.digest:
            raise self._other_batches("are not those of the checkpoint")
        return None if resumes else self.mark

    def compare_read(self, key: bytes, batch: int) -> None:
        """Raise on all ranks unless they read the same for the same indices. A collective operation for some batches.

        Args:
            key: A digest of what was read.
            batch: The number of the batch in the pass.
        """
        if _is_compared(batch - self.start.batches):
            self._compare(key, f"batch {batch}")

    def finish(self, *, compares: bool) -> None:
        """Raise if some batches to pass over are missing, or ranks had others. A collective operation if `compares`."""
        if compares:
            self._compare(self._hash.digest(), f"the end after batch {self.mark.batches}")
        if self.behind:
            raise self._other_batches(f"are missing, it ends after {self.mark.batches}")

    def _compare(self, digest: bytes, what: str) -> None:
        if not _equal(self.world, digest):
            raise RuntimeError(
                f"the train loader does not yield the same batches on all ranks: found at {what} of this epoch. Every"
                " rank takes its part of the same batch. Make dataset and collate_fn independent of the rank, and have"
                " them draw from the global generators of torch, random or NumPy, which are those of rank 0, or from"
                " one that is seeded equally on every rank; or, where every rank is to read its own part of the data,"
                " leave split_batches, equivalent_to and num_replicas out."
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


class SharedIndices:
    """The batch sampler of a copy of the loader: what rank 0's yields, on every rank whole or its own part of it.

    Args:
        batch_sampler: The user's.
        split: Says which samples are this rank's.
        whole: Whether this rank loads all samples.
        loads_again: Whether batches that were trained on are loaded again.

    Attributes:
        order: That of the next pass.
    """

    order: Order

    def __init__(self, batch_sampler: Any, split: Split, *, whole: bool, loads_again: bool) -> None:
        self._batch_sampler, self._split, self._whole, self._loads_again = batch_sampler, split, whole, loads_again
        inner = getattr(batch_sampler, "sampler", None)
        self._draws_once = type(batch_sampler) is BatchSampler and type(inner) in _DRAW_ONCE

    def __len__(self) -> int:
        return len(self._batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        order = self.order
        with order.drawing():
            order.agree("made")
            batches = iter(self._batch_sampler) if order.world.rank == 0 else iter(())
        return self._parts(self._of_rank_0(batches, order), order)

    def _of_rank_0(self, batches: Iterator[Any], order: Order) -> Iterator[Any]:
        """Yield what rank 0's sampler yields, on all ranks."""
        size = 1
        order.agree("first")
        while True:
            block, error, drawn = [], None, None
            if order.world.rank == 0:
                with order.drawing():
                    before = order.stream.state
                    try:
                        block = list(map(_listed, islice(batches, size)))
                    except Exception as raised:  # noqa: BLE001  # the other ranks would wait for it
                        error = raised
                    drawn = (before, order.stream.state) if size == 1 else None
            block, message, drawn = order.world.from_first((block, error and repr(error), drawn))
            if drawn is not None:
                order.follow(*drawn)
            yield from block
            if message:
                raise error or RuntimeError(f"the batch sampler of rank 0, whose order counts, raised {message}")
            if len(block) < size:
                return
            size = min(2 * size, _BLOCK) if self._draws_once else 1

    def _parts(self, batches: Iterator[Any], order: Order) -> Iterator[Any]:
        """Yield the indices that this rank loads, and pass over batches that were trained on."""
        for indices in batches:
            chunk, mark = self._split.cut(len(indices)), order.note(data_digest(indices), len(indices))
            if mark is not None or self._loads_again:
                order.asked.append(Behind(chunk, mark))
                yield indices if self._whole else indices[chunk.start : chunk.stop]


def _listed(indices: Any) -> list[Any]:
    listed: list[Any] = indices.tolist() if isinstance(indices, Tensor) else list(indices)
    if not listed:
        raise ValueError(EMPTY_BATCH)
    return listed


def _is_compared(count: int) -> bool:
    return count & (count - 1) == 0  # 1, 2, 4, 8, and so on


def require_equal(world: World, value: Any, message: str) -> None:
    """Raise `message` on all ranks unless `value` is the same on all of them. A collective operation."""
    if not _equal(world, data_digest(value)):
        raise ValueError(f"{message} With split_batches=True it must be the same on all ranks.")


def _equal(world: World, digest: bytes) -> bool:
    rows = world.gather_integers([int.from_bytes(digest[:8], "little", signed=True)])
    return all(row == rows[0] for row in rows)
