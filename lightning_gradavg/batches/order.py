"""One pass over a training loader: which batches, in which order, and how far training is in them.

Every rank asks its own sampler, from the order's stream (`streams.py`), so all have the same order without an exchange.
A digest of all that was read is compared, and proves it.

A checkpoint holds where the pass began, and how many loader batches training has stepped on. To resume, the pass is
repeated from there, and that many batches are passed over. The digest proves that they are the same batches.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_gradavg._lightning.loaders import Stateful, length_of, loader_parts, loader_samplers
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.random_state import RandomState, stream_key
from lightning_gradavg._support.tree import data_digest
from lightning_gradavg.batches.chunks import Chunk, Piece, Split
from lightning_gradavg.batches.cut import Probe, Probed, Request
from lightning_gradavg.batches.streams import OrderStream, PassPlace

__all__ = [
    "BatchRecord",
    "LoaderState",
    "Order",
    "PassPosition",
    "RequestSampler",
    "SourceStates",
    "Sources",
    "Watch",
    "sliceable",
]

_END = object()  # not None, which a user's sampler may yield

# They draw from a global generator for their first index only, whatever happens between the batches.
_DRAW_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class SourceStates(TypedDict):
    """What the order of a loader depends on beside the order's stream."""

    generators: list[Tensor]  # the states of the loader's own generators
    samplers: list[object]  # the states of its stateful samplers


class Sources:
    """The loader's own generators and stateful samplers."""

    def __init__(self, loader: object) -> None:
        # By identity: `DataLoader(shuffle=True, generator=g)` gives its RandomSampler the same generator.
        generators: dict[int, torch.Generator] = {}
        for part in loader_parts(loader):
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator):
                generators[id(generator)] = generator
        self._generators = list(generators.values())
        self._samplers: list[Stateful] = [
            sampler for sampler in loader_samplers(loader) if hasattr(sampler, "load_state_dict")
        ]

    def states(self) -> SourceStates:
        """Return the states, copied: a sampler may return the very dict that it changes."""
        return SourceStates(
            generators=[generator.get_state() for generator in self._generators],
            samplers=[copy.deepcopy(sampler.state_dict()) for sampler in self._samplers],
        )

    def load(self, states: SourceStates) -> None:
        """Set the states."""
        # Not strict: the loader of a resumed run may have fewer. If that changes the order, the digests differ.
        for generator, state in zip(self._generators, states["generators"], strict=False):
            generator.set_state(state)
        for sampler, sampler_state in zip(self._samplers, states["samplers"], strict=False):
            sampler.load_state_dict(copy.deepcopy(sampler_state))


class LoaderState(TypedDict):
    """What a checkpoint holds of a loader: where the pass in progress began, and how far training is in it."""

    passes: int  # that began before it
    sources: SourceStates  # where it began; of now, if no pass is in progress
    order: RandomState | None  # the order's stream where it began; None if no pass is in progress
    asked: int  # batches that were asked for, perhaps ahead of training
    batches: int  # loader batches that were stepped on
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


class Watch(NamedTuple):
    """What is checked on the first batch of each loader of a run."""

    compares_parts: bool = False  # this rank also collates it as a whole, and compares that with its parts
    requires_streams: bool = False  # a sample must be the same each time that it is loaded from one stream


class Order:
    """The order of one pass over a loader.

    Args:
        loader: The user's loader.
        split: How its batches are cut.
        world: The ranks that read it.
        stream: The order's stream of the run.
        place: The place of the pass in the run.
        resumed: Where a pass to be repeated began, and how many batches to pass over; None for a new pass.
        watch: What is checked on the first batch; None for nothing.

    Attributes:
        start: Where training begins in the pass: loader batches before it are passed over.
        position: Where reading is.
        length: Batches of the pass, as the loader says; infinity if it doesn't.
        asked: Batches that the sampler, or the reader of a stream, was asked for.
        pending: The records of the batches whose indices were asked for, and which are still to come from the loader.
        began: The order's stream where the pass began.
        sources_began: The loader's own generators and samplers there.
        requires_streams: Whether all that is drawn must come from the streams.
        place: As the argument.
    """

    def __init__(
        self,
        loader: object,
        split: Split,
        world: World,
        stream: OrderStream,
        place: PassPlace,
        resumed: LoaderState | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.place = place
        self.start = PassPosition(0, "")
        self.position = PassPosition(0, "")
        self.asked = 0
        self.pending: deque[BatchRecord] = deque()
        self.length = length_of(loader)
        self._collates_samples = getattr(loader, "batch_sampler", None) is not None
        self._split = split
        self._world = world
        self._stream = stream
        self._watch = watch
        self.requires_streams = watch is not None and watch.requires_streams
        self._hash = blake2b(digest_size=16)  # of the digests of the batches so far
        self._reached: PassPosition | None = None  # what `start` must be, once the pass is there
        self._asked_before = 0  # batches that the run before had asked for: so far the stream repeats its draws
        self._now: RandomState | None = None  # where the stream goes on after that
        sources = Sources(loader)
        if resumed is not None:
            sources.load(resumed["sources"])
            if resumed["order"] is not None:
                self.start = PassPosition(resumed["batches"], resumed["digest"])
                self._asked_before = resumed["asked"]
                self._now = stream.state
                stream.state = resumed["order"]
        self.began = stream.state
        self.sources_began = sources.states()
        self._resumes = self.start.batches > 0

    @property
    def has_length(self) -> bool:
        """Whether the loader says how many batches a pass has."""
        return self.length < math.inf

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from the order's stream within the context."""
        with self._stream.drawing(apart=self._now is not None):
            yield
        self.settle()

    def settle(self, *, draws_no_more: bool = False) -> None:
        """Have the stream go on from where it was when the checkpoint was saved, once its draws are repeated.

        Beside the pass, the seeds of validation loaders are drawn from it.

        Args:
            draws_no_more: Whether the sampler draws nothing in the rest of the pass.
        """
        if self._now is None or self._stream.is_drawing:
            return
        if draws_no_more or self.asked >= self._asked_before:
            self._stream.state = self._now
            self._now = None

    def key(self, piece: Piece) -> bytes | None:
        """Return the key of the stream from which a piece of the next batch is loaded; None where nothing is cut."""
        if not self._split.cuts:
            return None
        return self.place.key(self.position.batches, piece, self._split.rank)

    def request(self, indices: object) -> Request | None:
        """Return what this rank loads of the batch that a sampler yields next; None if it is passed over."""
        self.asked += 1
        if self._lists_samples(indices):
            return self._request_of_list(sliceable(indices))
        # What stands for a batch that is ready made. Its rows are known once it is loaded.
        key = None
        if self._split.cuts:
            key = stream_key(
                self.place.seed, "load a batch", self.place.loader, self.place.number, self.position.batches
            )
        number = self.position.batches
        record = self.record(data_digest(indices), _UNKNOWN)
        if record is None:
            return None
        self.pending.append(record)
        return Request(number, [indices], [key])

    def _lists_samples(self, indices: object) -> bool:
        """Return whether what a sampler yields lists the samples of a batch; else it stands for a batch as a whole."""
        if self._collates_samples:
            return not isinstance(indices, (str, bytes, Mapping)) and isinstance(indices, Iterable)
        # Of a loader without batches: a tuple is an index of an array.
        return isinstance(indices, list) or bool(getattr(indices, "ndim", 0))

    def _request_of_list(self, indices: Any) -> Request | None:
        chunk = self._split.cut(len(indices))
        pieces = [indices[piece.start : piece.stop] for piece in chunk.pieces]
        keys = [self.key(piece) for piece in chunk.pieces]
        number = self.position.batches
        record = self.record(data_digest(indices), chunk)
        if record is None:
            return None
        self.pending.append(record)
        probe = None
        if self._watch is not None:
            probe = self._probe(indices, self._watch)
            self._watch = None
        return Request(number, pieces, keys, probe)

    def _probe(self, indices: Any, watch: Watch) -> Probe:
        """Return what is loaded of the first batch of the run, beside what ranks train on."""
        parts: list[Any] = []
        if watch.compares_parts:
            for rank in range(self._split.world_size):
                of_rank = replace(self._split, rank=rank).cut(len(indices))
                parts.extend(indices[piece.start : piece.stop] for piece in of_rank.pieces if piece.samples > 0)
        return Probe(indices[:1], stream_key(self.place.seed, "load a sample to compare"), parts)

    def record(self, digest: bytes, chunk: Chunk) -> BatchRecord | None:
        """Count the next loader batch; return its record, or None if it is passed over."""
        self._hash.update(digest)
        before = self.position
        self.position = PassPosition(before.batches + 1, self._hash.hexdigest())
        if before.batches < self.start.batches:
            if self.position.batches == self.start.batches:
                self._reached = self.position
            return None
        return BatchRecord(chunk, self, before, self.position)

    def require_resumed(self) -> None:
        """Raise a RuntimeError on all ranks if a resumed pass is not that of the checkpoint. A collective operation.

        Called once, after the first batch of a pass was read. In a pass that resumes nothing there is no exchange.
        """
        if not self._resumes:
            return
        self._resumes = False
        found = ""
        if self._reached is None:
            found = f"are missing, it ends after {self.position.batches}"
        elif self._reached != self.start:
            found = "are not those of the checkpoint"
        of_ranks = self._world.gather_integers([bool(found)])
        if not any(differs for (differs,) in of_ranks):
            return
        batches = self.start.batches
        raise RuntimeError(
            f"the checkpoint was saved after {batches} batches of its epoch, but the first {batches} batches of the"
            f" train loader {found or 'differ on another rank'}: going on would train on some samples twice and on"
            " others never. Resume with the dataset, batch size and sampler of that run. A sampler whose order does not"
            " come from `generator=` or the global random state needs methods `state_dict` and `load_state_dict`. Or"
            " resume from a checkpoint of the end of an epoch."
        )

    def compare(self, position: PassPosition, probed: Probed | None = None, *, what: str = "") -> None:
        """Raise a RuntimeError on all ranks if they have not read the same up to a position. A collective operation.

        Args:
            position: How far all ranks are.
            probed: What this rank found out by loading a sample that all ranks load.
            what: What messages call the position; batch N if empty.
        """
        sample = 0
        is_stable = 1
        if probed is not None:
            sample = _as_integer(probed.sample)
            is_stable = int(probed.is_stable)
        order = _as_integer(bytes.fromhex(position.digest))
        rows = self._world.gather_integers([order, position.batches, sample, is_stable])
        if len({(order, batches) for order, batches, _, _ in rows}) > 1:
            what = what or f"batch {position.batches}"
            raise RuntimeError(
                f"the train loader does not yield the same batches on all ranks: found at {what} of this epoch. Every"
                " rank takes its part of the same batch. Make dataset, sampler and collate_fn independent of the rank,"
                " and of the order of a set. Have them draw from the global generators of torch, random or NumPy, or"
                " from one that is seeded equally on every rank; or, where every rank is to read its own part of the"
                " data, leave split_batches, equivalent_to and num_replicas out."
            )
        samples_are_stable = all(stable for _, _, _, stable in rows)
        if not samples_are_stable and self.requires_streams:
            raise RuntimeError(
                "a sample that the dataset loads again from the same random state differs: it draws from a generator of"
                " its own, or depends on what was loaded before, so reproducible=True cannot give the same bits on"
                " another number of ranks. Have the dataset draw from the global generators of torch, random or NumPy,"
                " and let an item depend on its index alone."
            )
        # Of a sample that differs between two loads on one rank, nothing is known.
        if samples_are_stable and len({sample for _, _, sample, _ in rows}) > 1:
            raise RuntimeError(
                "the datasets of the ranks differ: the sample of one index is not the same on all of them. Every rank"
                " loads its part of the same batch, by the same indices. Give every rank the whole dataset, and not a"
                " part such as data[rank::world_size], and seed what splits or shuffles it, equally on every rank; or,"
                " where every rank is to read its own part of the data, leave split_batches, equivalent_to and"
                " num_replicas out."
            )


_UNKNOWN = Chunk([], samples=None, batch_samples=0, layout=())
"""Of a ready-made batch that is not loaded yet."""


def sliceable(indices: Any) -> Any:
    """Return the indices of a batch as the sampler yields them, or as a list if they cannot be sliced."""
    if isinstance(indices, (list, tuple, range)) or hasattr(indices, "ndim"):
        return indices
    return list(indices)


def _as_integer(digest: bytes) -> int:
    # 64 bits do: they guard against mistakes, not against forgery.
    return int.from_bytes(digest[:8], "little", signed=True)


class RequestSampler:
    """Stands for the user's batch sampler in the copy of the loader that is read, and asks it for this rank's part.

    Attributes:
        order: Of the next pass. It is set before an iterator is made: of workers that persist, the loader stays.
        seed_workers: Called once, within the order's stream, after the sampler has begun: where torch draws a seed.
    """

    order: Order
    seed_workers: Callable[[], None] | None = None

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler  # the user's: any iterable with a length, or without
        inner = getattr(sampler, "sampler", None)
        # Exact types: a subclass may draw whenever it likes.
        self._draws_once = type(sampler) is BatchSampler and type(inner) in _DRAW_ONCE

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Request]:
        order = self.order
        with order.drawing():  # a sampler may draw when its iterator is made
            indices = iter(self._sampler)
            if self.seed_workers is not None:
                self.seed_workers()
                self.seed_workers = None
        return self._requests(order, indices)

    def _requests(self, order: Order, batches: Iterator[object]) -> Iterator[Request]:
        has_drawn = False
        while True:
            drawing: AbstractContextManager[None] = order.drawing()
            if has_drawn and self._draws_once:
                drawing = nullcontext()  # reading the states of generators takes 0.1 ms
            with drawing:
                indices = next(batches, _END)
                if indices is _END:
                    return
                request = order.request(indices)
            order.settle(draws_no_more=self._draws_once)
            has_drawn = True
            if request is not None:
                yield request
