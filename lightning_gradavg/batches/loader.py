"""Training loaders whose batches are the global batches: every rank gets its own chunk of each.

What a rank reads depends on the loader:

| the user's loader | read by | a rank |
|---|---|---|
| a `DataLoader` over a map-style dataset | INDICES | loads and collates the samples of its own pieces |
| a `DataLoader` with a batch size over an `IterableDataset` | SAMPLES | reads all samples, collates its own pieces |
| any other: an iterable of batches, a subclass of `DataLoader` with an `__iter__` of its own | BATCHES | reads all \
batches, and keeps the rows of its own pieces |

Iterating is a collective operation where ranks compare what they have read: all ranks do it, or none.

What stands in for a loader must answer what Lightning asks of one. Of a training loader, lightning 2.6 uses:

| attribute | when | in Lightning | answered by |
|---|---|---|---|
| `worker_init_fn`, read and set | the loader is prepared | `_auto_add_worker_init_fn` | `LoaderWrapper` |
| `len()` | likewise, and whenever an iterator is made | `has_len_all_ranks`, `sized_len` | `SplitLoader` |
| `dataset` | likewise, to warn of a stream with a length | `has_iterable_dataset` | the user's loader |
| `iter()` | the loader is prepared, and each later epoch begins | `CombinedLoader.__iter__` | `progress.py` |
| `sampler`, `batch_sampler.sampler` | an epoch begins | `_set_sampler_epoch` | the user's loader |
| `_iterator`, read and set | training ends, and the workers with it | `CombinedLoader.reset` | `LoaderWrapper` |

`LoaderWrapper` passes everything else on to the user's loader: callbacks look at `trainer.train_dataloader`, and set
attributes of it. Of a prepared loader, only `_worker_check` asks whether it is a `DataLoader`, for warnings about its
workers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from lightning_gradavg._lightning.loaders import (
    LoaderWrapper,
    distributed_sampler,
    is_sharded,
    length_of,
    loader_batch_size,
    loader_samplers,
    user_loader,
)
from lightning_gradavg._support.collectives import Contribution, World
from lightning_gradavg._support.random_state import random_state, stream_key
from lightning_gradavg._support.text import plural
from lightning_gradavg._support.tree import data_digest, rows_of, slice_rows
from lightning_gradavg.batches.chunks import Chunk, Pieces, Split, chunk_bounds
from lightning_gradavg.batches.cut import CollatedSamples, LoadedBatch, Probed, indices_copy, stream_copy
from lightning_gradavg.batches.order import BatchRecord, LoaderState, Order, RequestSampler, Sources, Watch
from lightning_gradavg.batches.streams import OrderStream, PassPlace, seed_of_state

__all__ = [
    "Pass",
    "ReadBatch",
    "Reading",
    "SplitLoader",
    "compare_at_times",
    "reading_of",
    "split_batches",
]

_END = object()  # not None, which a user's loader may yield


class Reading(Enum):
    """What a rank reads of a loader. The module's docstring has the table."""

    INDICES = "the samples of its own pieces"
    SAMPLES = "all samples of a stream, of which it collates its own"
    BATCHES = "all batches, of which it keeps its own rows"


def reading_of(loader: object) -> Reading:
    """Return what a rank reads of a user's loader."""
    # A subclass with an `__iter__` of its own may read ahead, skip batches or keep one iterator over all epochs.
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return Reading.BATCHES
    if not isinstance(loader.dataset, IterableDataset):
        return Reading.INDICES
    if loader.batch_sampler is not None:
        return Reading.SAMPLES
    return Reading.BATCHES


class ReadBatch(NamedTuple):
    """What a pass yields."""

    pieces: list[Any]  # this rank's pieces of the loader batch, each of the user's own type
    record: BatchRecord
    probed: Probed | None  # of the first batch of a run

    @property
    def batch(self) -> Any:
        """What the user's hooks get: the one piece of the rank, or all of them."""
        return self.pieces[0] if len(self.pieces) == 1 else Pieces(self.pieces)


class Pass(NamedTuple):
    """One pass over a split loader.

    A tuple beside the loader, because no cycle of references may hold it: worker processes end with the iterator.
    """

    order: Order
    items: Iterator[ReadBatch]


class SplitLoader(LoaderWrapper):
    """A training loader that yields this rank's parts of the user's batches, and shows the attributes of theirs.

    Making it is a collective operation.

    Args:
        loader: The user's loader.
        split: How its batches are cut.
        world: The ranks that read it.
        position: Its position among the loaders of the run.

    Attributes:
        samples: Samples that count of the batch yielded last: 0 where the rank has none of the global batch, and gets
            a stand-in. None outside of a pass.
        split: As the argument.
        reading: What a rank reads of it.
        passes: Passes that began.
        position: As the argument.

    Raises:
        ValueError: On all ranks, if the loader cannot be split, or the ranks' loaders differ.
    """

    samples: int | None
    split: Split
    reading: Reading
    passes: int
    position: int

    def __init__(self, loader: object, split: Split, world: World, *, position: int = 0) -> None:
        loader = user_loader(loader)
        reading = reading_of(loader)
        _require_splittable(loader, world, reading)
        # Workers of a copy by indices draw from the streams of their pieces.
        super().__init__(loader, shared=reading is not Reading.INDICES)
        self.samples = None
        self.split = split
        self.reading = reading
        self.passes = 0
        self._world = world
        self.position = position
        # Where ranks seed them differently, rank 0's count.
        sources = Sources(loader)
        sources.load(world.from_first(sources.states()))
        self._copy_sampler: RequestSampler | None = None  # of the copy whose workers persist

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's part of each batch: in Fabric, or in a loop of the user's own."""
        # In a loop of the user's own there is no run. Each pass follows from rank 0's state when it begins, as on one
        # process: what the script has drawn until then, and other loaders, move it.
        state = self._world.from_first(random_state())
        watch = None
        if self.passes == 0:
            watch = Watch()
        reading = self.begin(OrderStream(state), seed_of_state(state), watch=watch)
        try:
            for read in reading.items:
                compare_at_times(read)
                self.samples = read.record.chunk.samples
                yield read.batch
        finally:
            self.samples = None

    def __len__(self) -> int:
        return len(self.loader)

    def begin(
        self,
        stream: OrderStream,
        seed: int,
        *,
        resumed: LoaderState | None = None,
        watch: Watch | None = None,
        is_look: bool = False,
    ) -> Pass:
        """Begin a pass.

        Args:
            stream: The order's stream.
            seed: The seed of the run.
            resumed: Where the pass begins; None for a new one. See `Order`.
            watch: What is checked on the first batch.
            is_look: Whether a user looks at the data, perhaps on one rank. Then ranks don't compare what they have
                read, a collective operation, and no worker process persists.
        """
        if resumed is not None:
            self.passes = resumed["passes"]
        place = PassPlace(seed, self.position, self.passes)
        order = Order(self.loader, self.split, self._world, stream, place, resumed, watch)
        self.passes += 1
        batches = self._begin_reading(order, is_look=is_look)
        return Pass(order, self._items(order, batches, compares=not is_look))

    def _begin_reading(self, order: Order, *, is_look: bool) -> Iterator[Any]:
        """Return what the loader yields, of a copy where it is cut before it is collated."""
        if self.reading is Reading.INDICES:
            return self._begin_reading_indices(order, is_look=is_look)
        loader: Any = self.loader
        if self.reading is Reading.SAMPLES:
            loader = stream_copy(loader, self.split, order.place, worker_init_fn=self.worker_init_fn)
        with order.drawing():
            batches: Iterator[Any] = iter(loader)
        if self.reading is Reading.BATCHES and order.requires_streams:
            return _refusing_threads(batches, type(loader).__name__)
        return batches

    def _begin_reading_indices(self, order: Order, *, is_look: bool) -> Iterator[Any]:
        """Return what the loader yields, asked for this rank's pieces.

        Torch draws one number for each iterator, from which it seeds the workers:

        | the iterator | is seeded by |
        |---|---|
        | goes on with workers of the pass before | nothing: torch draws no number |
        | is the first of a resumed run whose workers persist | the seed of the run and the rank: nothing was drawn |
        | cuts batches | the number that torch would draw from the order's stream, and the rank |
        | cuts nothing | the number that torch draws from the order's stream |
        """
        loader: DataLoader[Any] = self.loader
        persists = loader.num_workers > 0 and loader.persistent_workers and not is_look
        if persists and self._copy is not None and self._copy_sampler is not None:
            self._copy_sampler.order = order
            going_on: Iterator[Any] = iter(self._copy)
            return going_on
        sampler = RequestSampler(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler)
        sampler.order = order
        generator = loader.generator
        if persists and order.place.number > 0:
            # By the pass, too: a loader that is replaced in each epoch starts its workers anew.
            key = stream_key(order.place.seed, "workers of a resumed run", order.place.number, self.split.rank)
            generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little", signed=True))
        elif self.split.cuts:
            generator = torch.Generator()
            sampler.seed_workers = partial(self._seed_workers, order, generator)
        copy = indices_copy(loader, sampler, worker_init_fn=self.worker_init_fn, generator=generator)
        if is_look:
            vars(copy)["persistent_workers"] = False
        if persists:
            self._copy = copy
            self._copy_sampler = sampler
        if self.split.cuts:
            return iter(copy)
        with order.drawing():
            batches = iter(copy)
        order.settle()
        return batches

    def _seed_workers(self, order: Order, generator: torch.Generator) -> None:
        """Have torch draw another seed for the workers of each rank, where it would draw the same for all.

        Users seed generators by it, such as `dataset.rng` in a `worker_init_fn`. Torch makes the sampler's iterator,
        and then draws (`_BaseDataLoaderIter`): so the sampler calls this, once its iterator is made.
        """
        drawn = int(torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator).item())
        key = stream_key(order.place.seed, "workers", drawn, self.split.rank)
        generator.manual_seed(int.from_bytes(key[:8], "little", signed=True))

    def _items(self, order: Order, batches: Iterator[object], *, compares: bool) -> Iterator[ReadBatch]:
        """Yield this rank's pieces of each batch."""
        while True:
            read = self._next(order, batches)
            if compares:
                order.require_resumed()
                # Of a loader with a length, batches are compared when they are trained on.
                if not order.has_length:
                    what = f"the end after batch {order.position.batches}" if read is None else ""
                    order.compare(order.position, read.probed if read is not None else None, what=what)
            if read is None:
                return
            yield read

    def _next(self, order: Order, batches: Iterator[object]) -> ReadBatch | None:
        """Return the next batch that is not passed over; None at the end."""
        if self.reading is Reading.INDICES:
            return self._next_of_indices(order, batches)
        while True:
            with order.drawing():
                batch = next(batches, _END)
                if batch is _END:
                    return None
                order.asked += 1
            order.settle()
            if isinstance(batch, CollatedSamples):
                record = order.record(batch.digest, self.split.cut(batch.samples))
                pieces = batch.pieces
            else:
                chunk, cut = self._cut_ready(batch)
                record = order.record(data_digest(batch), chunk)
                pieces = cut
            if record is not None:
                return ReadBatch(pieces, record, None)

    def _next_of_indices(self, order: Order, batches: Iterator[object]) -> ReadBatch | None:
        loaded = next(batches, _END)
        if loaded is _END:
            if order.pending:
                raise RuntimeError(self._other_number_of_batches("fewer"))
            return None
        if not order.pending:
            raise RuntimeError(self._other_number_of_batches("more"))
        record = order.pending.popleft()
        assert isinstance(loaded, LoadedBatch)
        assert loaded.number == record.before.batches, "torch yields batches in the order in which it asks for them"
        if record.chunk.pieces:
            return ReadBatch(loaded.pieces, record, loaded.probed)
        # A ready-made batch, of which all ranks asked for the same index. Whether they got the same is compared, too.
        (batch,) = loaded.pieces
        chunk, pieces = self._cut_ready(batch)
        probed = None
        if is_compared(record):
            digest = data_digest(batch)
            probed = Probed(digest, is_stable=True, difference="")
        return ReadBatch(pieces, record._replace(chunk=chunk), probed)

    def _cut_ready(self, batch: object) -> tuple[Chunk, list[object]]:
        """Return this rank's chunk of a batch that comes ready made, and its pieces."""
        try:
            rows = rows_of(batch)
        except ValueError as error:
            if not self.split.cuts:
                return self.split.cut(1)._replace(samples=None), [batch]
            raise ValueError(
                f"{type(self.loader).__name__} yields a ready-made batch of type {type(batch).__name__} that cannot be"
                f" cut into rows: {error}. Let a DataLoader collate it: give it a dataset of single samples, a"
                " batch_size and a collate_fn, and each rank loads and collates its own samples; or have every tensor"
                " and list of the batch hold the samples along its first dimension."
            ) from error
        chunk = self.split.cut(rows)
        if not self.split.cuts:
            return chunk, [batch]
        return chunk, [slice_rows(batch, piece.start, piece.stop) for piece in chunk.pieces]

    def _other_number_of_batches(self, fewer_or_more: str) -> str:
        return (
            f"{type(self.loader).__name__} yielded {fewer_or_more} batches than its batch_sampler was asked for, so"
            " split_batches=True cannot tell which samples a batch holds. Wrap it in an iterable of your own, whose"
            " batches are split once they are collated."
        )

    def describe(self) -> str:
        """Return one line that says what is done with the loader."""
        names = [type(sampler).__name__ for sampler in loader_samplers(self.loader)]
        # A name such as torch's `_InfiniteConstantSampler`, of a stream, tells a user nothing.
        public_names = [name for name in names if not name.startswith("_")]
        with_samplers = ""
        if public_names:
            with_samplers = f" with its {' and '.join(public_names)}"
        chunks = self._describe_chunks()
        ranks = plural(self.split.world_size, "rank")
        reads = ""
        if self.split.cuts:
            reads = f"; {self._describe_reading()}"
        return (
            f"{type(self.loader).__name__}{with_samplers}: used unchanged; each batch is a global batch, split into"
            f" {chunks} on {ranks}{reads}"
        )

    def _describe_chunks(self) -> str:
        """Return the number of chunks, and how many of them `torch.chunk` leaves empty in a full batch."""
        text = plural(self.split.chunks, "chunk")
        size = loader_batch_size(self.loader)
        if size is None or self.split.replicas is None:
            return text
        filled = sum(stop > start for start, stop in chunk_bounds(size, self.split.replicas))
        if filled < self.split.replicas:
            text += f" (torch.chunk fills {filled} of them with {plural(size, 'sample')})"
        return text

    def _describe_reading(self) -> str:
        """Return what a rank reads of each batch."""
        size = loader_batch_size(self.loader)
        own = "its own samples"
        if size is not None:
            sizes = {self._samples_of_rank(rank, size) for rank in range(self.split.world_size)}
            own = f"its own {' or '.join(map(str, sorted(sizes)))} of {plural(size, 'sample')}"
        if self.reading is Reading.INDICES:
            return f"each rank loads {own}"
        if self.reading is Reading.SAMPLES:
            return f"every rank reads the whole stream, and collates {own}"
        return "every rank reads whole batches, and takes dimension 0 of every tensor and list for the samples"

    def _samples_of_rank(self, rank: int, size: int) -> int:
        split = Split(rank, self.split.world_size, self.split.replicas, self.split.max_samples)
        return split.cut(size).samples or 0


def is_compared(record: BatchRecord) -> bool:
    """Return whether ranks compare what they have read at a batch: 1, 2, 4, 8, ... and the last of a pass."""
    number = record.after.batches
    is_power_of_2 = number & (number - 1) == 0
    return is_power_of_2 or number == record.order.length


def compare_at_times(read: ReadBatch) -> None:
    """Compare what all ranks have read, at some batches of a pass with a length. A collective operation."""
    order = read.record.order
    if order.has_length and (is_compared(read.record) or read.probed is not None):
        order.compare(read.record.after, read.probed)


def _refusing_threads(batches: Iterator[object], name: str) -> Iterator[object]:
    """Yield batches, or raise a RuntimeError if a thread of this process reads them ahead.

    What it draws comes from whatever stream the training step draws from at that moment. A thread that `iter()` has
    started is not found: there, torch starts its own, which move what workers have read.
    """
    before = set(threading.enumerate())
    for batch in batches:
        if set(threading.enumerate()) - before:
            raise RuntimeError(
                f"{name} reads ahead in a thread of this process, whose random numbers would be drawn beside those of"
                " the training step, so reproducible=True cannot give the same bits. Read the data by a DataLoader with"
                " num_workers=1, or without the thread."
            )
        yield batch


_WITHOUT_SPLITTING = (
    "leave split_batches, equivalent_to and num_replicas out, and every rank trains on its own batches: with"
    " reduction='weighted_mean' it gives the mean over all samples, however many a rank has."
)


def _require_splittable(loader: object, world: World, reading: Reading) -> None:
    """Raise on all ranks if the loader cannot be split on some, or they differ. A collective operation."""

    def contribute() -> Contribution:
        _require_splittable_here(loader)
        # Ranks that prefetch differently would ask their samplers differently far ahead.
        workers = getattr(loader, "num_workers", None)
        prefetch_factor = getattr(loader, "prefetch_factor", None)
        read = f"batch size {loader_batch_size(loader)}, length {length_of(loader)}, reading {reading.name.lower()}"
        return Contribution([f"{read}, num_workers={workers}, prefetch_factor={prefetch_factor}"])

    world.agree("the ranks' train loaders cannot be split", contribute)


def _require_splittable_here(loader: object) -> None:
    """Raise on this rank if its loader cannot be split."""
    name = type(loader).__name__
    if is_sharded(loader):
        raise ValueError(
            f"{name} or its dataset {type(getattr(loader, 'dataset', None)).__name__} has sharded_by_rank = True: the"
            " ranks' batches are not one batch, which can be shared out. Remove the attribute and have every rank read"
            f" the same data; or {_WITHOUT_SPLITTING}"
        )
    sampler = distributed_sampler(loader)
    if sampler is not None:
        raise ValueError(
            f"the train loader has a DistributedSampler for {sampler.num_replicas} replicas, but with"
            " split_batches=True the loader's batches are the global batches, which the strategy splits. Give the"
            " loader the sampler of a run on one device. Where a library adds this sampler automatically for every"
            f" DDPStrategy, {_WITHOUT_SPLITTING}"
        )
    # It changes nothing without workers.
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        raise ValueError(
            "in_order=False lets the workers hand over batches in an order of their own, so the ranks' chunks would not"
            " make up one batch. Use in_order=True with split_batches=True."
        )


def split_batches(loader: object, *, group: dist.ProcessGroup | None = None) -> SplitLoader:
    """Return a loader that yields this rank's chunk of each batch of `loader`, which is the global batch.

    Every rank gets its contiguous chunk, in the order of one process. Chunks differ by at most one sample: 4 on 3 ranks
    are 2, 1 and 1. A rank asks your sampler for the whole batch, and loads and collates only its own samples. Their
    order, and what they draw, follow from rank 0's random state when a pass begins. If a batch has fewer samples than
    there are ranks, a rank that gets none has a stand-in, the first samples of that batch, to take part in the
    backward, and `samples` of the returned loader is 0: the weight of that batch.

    Creating the loader and iterating over it are collective operations.

    Args:
        loader: A `DataLoader` with the global batch size and no `DistributedSampler`, or an iterable of batches.
        group: The ranks that share the batches; those of the default group if None.

    Raises:
        ValueError: On all ranks, if the loader cannot be split, or the ranks' loaders differ.
    """
    world = World.of(group)
    return SplitLoader(loader, Split(world.rank, world.size), world)
