"""The loaders that Lightning reads in training, and where training stands in them, in batches that were stepped on.

A batch reaches the user's hooks in the user's own type, so nothing can travel inside it. Its record is found by its
number in the epoch when the batch arrives in training. Reading adds records; looking at a batch changes nothing, and
what was fetched ahead or failed is not counted.

For each batch, Lightning calls in this order:

1. `TrainingIterator.__next__`, perhaps one batch ahead: the record is added;
2. the hooks that move the batch to the device;
3. `Progress.arrive`, by the strategy's own callback, the first in `on_train_batch_start`: the record is found;
4. the training step, and perhaps the optimizer's;
5. `TrainingLoader.state_dict`, where a checkpoint is saved.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import IterableDataset

from lightning_gradavg._lightning.internals import TrainingLoop
from lightning_gradavg._lightning.loaders import LoaderWrapper, Stateful, length_of, user_loader
from lightning_gradavg._support.collectives import ReducedRow, World
from lightning_gradavg._support.random_state import RandomState, random_state
from lightning_gradavg.batches.chunks import Split
from lightning_gradavg.batches.draws import RunDraws, RunPhase, Sources
from lightning_gradavg.batches.loader import Pass, SplitLoader
from lightning_gradavg.batches.order import BatchRecord, LoaderState, Order, PassPosition
from lightning_gradavg.faults.drift import SameData

__all__ = ["JoinedLoader", "Progress", "StatefulJoinedLoader", "TrainingLoader", "join"]

_END = object()  # not None, which a user's loader may yield

_Record = TypeVar("_Record")


class Records(Generic[_Record]):
    """The records of the batches of a loader that were fetched last, by epoch and number.

    An epoch is the object by which Lightning reads it, `TrainingLoop.epoch`. It is held weakly, so that the worker
    processes of an epoch that was left early end with it.
    """

    def __init__(self) -> None:
        self._of_epochs: WeakKeyDictionary[object, dict[int, _Record]] = WeakKeyDictionary()

    def add(self, epoch: object, record: _Record, *, first: int = 0) -> None:
        """Add the record of the next batch. `first` is the number of the first batch of a resumed epoch."""
        records = self._of_epochs.setdefault(epoch, {})
        number = first
        if records:
            number = max(records) + 1
        records[number] = record
        # Two are kept: of a loader without length, Lightning fetches one batch ahead of the one in training.
        records.pop(number - 2, None)

    def get(self, epoch: object, number: int) -> _Record | None:
        """Return the record of a batch, or None if the loader had no batch of that number."""
        return self._of_epochs.get(epoch, {}).get(number)


class Progress:
    """How far a run is, for all its loaders.

    Attributes:
        loop: Lightning's training loop.
        draws: The random states that checkpoints need.
    """

    def __init__(self, loop: TrainingLoop) -> None:
        self.loop = loop
        self.draws = RunDraws()

    def arrive(self, number: int, loaders: Sequence[TrainingLoader], records: Sequence[BatchRecord | None]) -> None:
        """Begin to train on a batch of this number in its epoch.

        Args:
            number: The number of the batch in its epoch.
            loaders: The loaders of the run.
            records: The record of the batch of each loader, None where it has no more.
        """
        begins_window = number % self.loop.accumulation == 0
        self.draws.note_arrival(begins_window=begins_window)
        for loader, record in zip(loaders, records, strict=True):
            loader.start = None
            loader.current = record
            if begins_window:
                loader.window_start = record


class TrainingLoader(SplitLoader):
    """A split loader that Lightning reads. A checkpoint holds its place, in loader batches, for any world size.

    Attributes:
        progress: How far the run is.
        records: The records of the batches that were fetched.
        current: The record of the batch in training; None before the first, and where the loader has no more.
        window_start: The record of the first batch of its window.
        start: Where the next passes begin in a resumed run, until a batch is trained on; else None.
    """

    _loaded: LoaderState  # of the checkpoint, unchanged, as long as `start` is set

    def __init__(self, loader: object, split: Split, world: World, progress: Progress) -> None:
        super().__init__(loader, split, world)
        self.progress = progress
        self.records: Records[BatchRecord] = Records()
        self.current: BatchRecord | None = None
        self.window_start: BatchRecord | None = None
        self.start: LoaderState | None = None

    def __iter__(self) -> TrainingIterator:
        return TrainingIterator(self)

    def state_dict(self) -> LoaderState:
        """Return where training stands: after the last batch that an optimizer stepped on.

        | case | batches | random state of a resumed run |
        |---|---|---|
        | resumed, and nothing trained on yet | those of the loaded checkpoint | likewise |
        | no pass is in progress: before the first, or after a complete epoch | 0 of a new pass | that of now |
        | the last batch was stepped on | up to that batch | that of now; if the next was read, that after the read |
        | an incomplete window, which is repeated | up to the batch before it | that before the window |
        | no batch of the pass has arrived | those that the pass has passed over | that of now |
        """
        if self.start is not None:
            return self._loaded
        sources = Sources(self.loader)
        state = LoaderState(
            snapshots={}, samplers=sources.sampler_states(), now=sources.snapshot(), batches=0, digest=""
        )
        order = self._order_in_progress()
        if order is None:
            return state
        loop = self.progress.loop
        draws = self.progress.draws
        current = _of_pass(order, self.current)
        window_start = _of_pass(order, self.window_start)
        is_trained_on = loop.ready == loop.processed  # the last batch that arrived
        if is_trained_on and loop.epoch_ended:
            return state
        if loop.ready == 0 and current is not None:
            # The epoch is over: its iterators stay until those of the next epoch are made, and so do these records.
            return state
        if current is not None and is_trained_on and loop.processed % loop.accumulation == 0:
            position = current.after
            if draws.phase is RunPhase.BETWEEN_BATCHES:
                # A hook that moves the next batch saves or failed (`test_a_batch_that_could_not_be_moved_is_repeated`).
                # The resumed run moves that batch once more, so what the hook has drawn is not kept.
                state["now"]["random"] = draws.after_read
        elif window_start is not None:
            position = window_start.before
            state["now"]["random"] = draws.before_window
        else:
            position = order.start
        return _state_within(state, order, position)

    def _order_in_progress(self) -> Order | None:
        """Return the order of the pass that Lightning reads in this epoch, None if none has begun."""
        for iterator in self.progress.loop.iterators:
            if iterator.loader is self and iterator.begun is not None:
                order: Order = iterator.begun.order
                return order
        return None

    def load_state_dict(self, state_dict: LoaderState) -> None:
        """Begin the next passes where the checkpoint was saved."""
        self._loaded = state_dict
        # A copy, in which passes note what they draw from. Saved with that, the end of an epoch would be taken for its
        # begin (`test_a_resumed_loader_that_saves_at_once_saves_what_it_has_loaded`).
        self.start = {**state_dict, "snapshots": dict(state_dict["snapshots"])}
        self.progress.draws.resume(state_dict["now"]["random"])


def _of_pass(order: Order, record: BatchRecord | None) -> BatchRecord | None:
    """Return a record if it is of this pass, else None: of an earlier epoch, or an earlier cycle of a short loader."""
    if record is None or record.order is not order:
        return None
    return record


def _state_within(state: LoaderState, order: Order, position: PassPosition) -> LoaderState:
    """Return the state of a loader within a pass."""
    return LoaderState(
        snapshots=order.draws.snapshots,
        samplers=order.sampler_states,
        now=state["now"],
        batches=position.batches,
        digest=position.digest,
    )


class TrainingIterator(Iterator[object]):
    """One pass over a loader that Lightning reads.

    In a resumed run, the pass begins when it is read, not when it is made: in between, Lightning draws random numbers,
    sets the epoch of samplers, and may drop the iterator. Until a batch is trained on, every iterator begins at the
    checkpoint.

    Attributes:
        loader: The loader.
        begun: The pass, None before it begins.
    """

    def __init__(self, loader: TrainingLoader) -> None:
        self.loader = loader
        self.begun: Pass | None = None
        if loader.start is None:
            self.begin()

    def begin(self) -> Pass:
        """Begin the pass, unless it has begun. A collective operation."""
        if self.begun is None:
            self.begun = self.loader.begin(self.loader.start)
        return self.begun

    def __next__(self) -> object:
        loader = self.loader
        progress = loader.progress
        epoch = progress.loop.epoch_of(self)
        if epoch is None:
            # A user looks at the data, as by `next(iter(trainer.train_dataloader))`: nothing is noted.
            return next(self.begin().items).part
        if self.begun is None:
            # In the order in which they were made: loaders may draw from one random state.
            for iterator in progress.loop.iterators:
                iterator.begin()
        current = self.begin()
        read = next(current.items, None)
        if read is None:
            # Not that of the pass: Lightning asks a loader that has ended again, beside longer ones.
            progress.draws.note_read(random_state())
            loader.start = None  # The next pass, perhaps of the same epoch, is a new one.
            raise StopIteration
        progress.draws.note_read(self._own_state(current))
        first = 0
        if loader.start is not None:
            first = loader.start["batches"]
        loader.records.add(epoch, read.record, first=first)
        return read.part

    def _own_state(self, current: Pass) -> RandomState:
        """Return the own random state of the process, right after a batch of a pass was read."""
        if self.loader.reads_together:
            # The pass has noted it when its stream was drawn from. Reading a state takes 0.1 ms.
            return current.order.draws.own
        return random_state()


class FetchRecord(NamedTuple):
    """What is known of a batch of a joined loader."""

    has_batch: bool  # whether this rank has one; else it computes its last one again, as a stand-in
    counts: ReducedRow  # over all ranks: how many have a batch, and how many never had one
    state: object  # of a loader that has one, after it has yielded this rank's last batch; else None


class JoinedLoader(LoaderWrapper):
    """A training loader that ends on all ranks at once. Each rank has batches of its own.

    With each batch, a rank begins an exchange of who has one, and waits for nobody. A rank that has none left waits for
    the exchange. As long as another rank has a batch, it gets its own last batch again as a *stand-in*, of weight 0. So
    all ranks train the same number of steps, and end the epoch together.

    Its length is that of the rank that has most batches, if all ranks know theirs.

    Args:
        loader: The user's loader.
        world: All ranks.
        device: Where the exchange runs.
        loop: Lightning's training loop.
        length: The largest length on any rank; infinity if a rank does not know its own.

    Attributes:
        records: What is known of the batches that were fetched.
    """

    def __init__(self, loader: object, world: World, device: torch.device, loop: TrainingLoop, length: float) -> None:
        super().__init__(loader, read=loader, shown=loader, shared=False)
        self.world = world
        self.loop = loop
        self.records: Records[FetchRecord] = Records()
        self._device = device
        self._length = length
        self._last: object = _END  # this rank's last batch, of any pass
        self._arriving_epoch: weakref.ref[object] | None = None  # the epoch whose batches arrive
        self._first_number = 0  # in Lightning's count, of the first batch of that epoch that has arrived
        described = f"batches of {type(loader).__name__}"
        dataset = getattr(loader, "dataset", None)
        if dataset is not None:
            described = f"{described} over {type(dataset).__name__}"
        self._same = SameData(described)

    def __iter__(self) -> JoinedIterator:
        return JoinedIterator(self, self._joined(iter(self._read)))

    def arrive(self, epoch: object, number: int) -> FetchRecord | None:
        """Return the record of a batch that arrives in training, by Lightning's number; None if there is none.

        Lightning's count of a resumed epoch goes on from the checkpoint, and the loader yields the first batch of its
        pass then. Numbered by Lightning, a stand-in was not found after a resume, and its samples counted
        (`test_a_resumed_stream_counts_no_stand_in`).
        """
        if self._arriving_epoch is None or self._arriving_epoch() is not epoch:
            self._arriving_epoch = weakref.ref(epoch)
            self._first_number = number
        return self.records.get(epoch, number - self._first_number)

    def _state(self) -> object:
        """Return the state of the loader after the batch that it has yielded, None of a loader without one."""
        return None

    def __len__(self) -> int:
        if self._length == math.inf:
            raise TypeError(f"{type(self.loader).__name__} has no length on all ranks")
        return int(self._length)

    def _joined(self, batches: Iterator[object]) -> Iterator[tuple[object, FetchRecord]]:
        """Yield this rank's batches, and then its last one, until all ranks have had theirs.

        Each is a collective operation. Ranks wait for it in the first round, where one may have no batch at all and
        needs one of another rank, and from then on where they have none themselves.
        """
        is_first = True
        has_batch = True
        state: object = None
        while True:
            batch: object = _END
            if has_batch:
                batch = next(batches, _END)
            has_batch = batch is not _END
            if has_batch:
                self._last = batch
                # Not for a stand-in: a loader that has ended begins a new pass where it resumes, and this pass goes on.
                state = self._state()
            # Not the stand-in: it may be another rank's batch, which would be taken for the same data.
            self._same.compare(batch if has_batch else None)
            with torch.profiler.record_function("GradAvg: exchange who has a batch"):
                counts = ReducedRow([has_batch, self._last is _END], "sum", self._device, self.world.group)
            if is_first or not has_batch:
                with torch.profiler.record_function("GradAvg: wait for who has a batch"):
                    ranks_with_batch, ranks_without_any = counts.read()
                if ranks_with_batch == 0:
                    return
                # In later rounds none can be without: it has got a batch in the first one, which it keeps.
                if ranks_without_any > 0:
                    self._share_last_batch()
            is_first = False
            yield self._last, FetchRecord(has_batch, counts, state)

    def _share_last_batch(self) -> None:
        """Give ranks that never had a batch that of the first rank that has one. A collective operation."""
        mine = None
        if self._last is not _END:
            mine = (self._last,)  # in a tuple, as a batch may be None
        of_ranks = self.world.gather_objects(mine)
        if mine is not None:
            return
        for shared in of_ranks:
            if shared is not None:
                (self._last,) = shared
                return


class StatefulJoinedLoader(JoinedLoader):
    """A joined loader of which a checkpoint holds the state that the user's loader had after the batch in training.

    Lightning fetches one batch ahead of a loader without length. The state of that moment would leave this batch out of
    a resumed run (`test_a_stream_with_a_state_resumes_at_the_next_batch`).

    The methods stand here, and are not found by `__getattr__`: from Python 3.12 on, `isinstance` of a protocol looks up
    attributes statically, and Lightning asks `isinstance(loader, _Stateful)`.
    """

    _read: Stateful
    _trained: FetchRecord | None = None  # of the batch in training; None before the first one of a pass

    def __iter__(self) -> JoinedIterator:
        self._trained = None
        return super().__iter__()

    def arrive(self, epoch: object, number: int) -> FetchRecord | None:
        """Return the record of a batch that arrives in training, and note it."""
        self._trained = super().arrive(epoch, number)
        return self._trained

    def _state(self) -> object:
        return copy.deepcopy(self._read.state_dict())  # a loader may return the very dict that it changes

    def state_dict(self) -> object:
        """Return where training stands in this rank's data."""
        if self._trained is None or self._trained.state is None or self.loop.epoch_ended:
            return self._read.state_dict()
        return self._trained.state

    def load_state_dict(self, state: object) -> None:
        """Have the next pass begin after the last batch that was trained on."""
        self._read.load_state_dict(state)


class JoinedIterator(Iterator[object]):
    """One pass over a joined loader."""

    def __init__(self, loader: JoinedLoader, items: Iterator[tuple[object, FetchRecord]]) -> None:
        self.loader = loader
        self._items = items

    def __next__(self) -> object:
        batch, record = next(self._items)
        epoch = self.loader.loop.epoch_of(self)
        if epoch is not None:  # else a user looks at the data
            self.loader.records.add(epoch, record)
        return batch


def join(loader: object, world: World, device: torch.device, loop: TrainingLoop) -> object:
    """Return a loader, joined unless all ranks are known to have as many batches. A collective operation."""
    loader = user_loader(loader)
    length = length_of(loader)
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        length = math.inf  # what a stream says of its length need not be so
    lengths = [of_rank for (of_rank,) in world.gather_floats([length])]
    are_equal = math.inf not in lengths and len(set(lengths)) == 1
    if world.size == 1 or are_equal:
        return loader
    if isinstance(loader, Stateful):
        return StatefulJoinedLoader(loader, world, device, loop, max(lengths))
    return JoinedLoader(loader, world, device, loop, max(lengths))
