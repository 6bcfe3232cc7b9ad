"""The split loaders that Lightning reads in training, and where training stands in them, in batches stepped on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypedDict

from lightning_gradavg._lightning.internals import TrainingLoop
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.random_state import RandomState, random_state
from lightning_gradavg.batches.chunks import Split
from lightning_gradavg.batches.loader import Pass, ReadBatch, SplitLoader
from lightning_gradavg.batches.order import BatchRecord, LoaderState, Order, PassPosition, Sources, SourceStates, Watch
from lightning_gradavg.batches.records import Records
from lightning_gradavg.batches.streams import OrderStream

__all__ = ["DataState", "Fetched", "Progress", "TrainingLoader"]


class DataState(TypedDict):
    """What a checkpoint holds of the training data of a run."""

    seed: int  # of the streams that pieces of batches draw from
    order: RandomState  # of the stream that the order of training data is drawn from
    own: RandomState  # of the process's own generators, on rank 0
    loaders: list[LoaderState]


class Fetched(NamedTuple):
    """What is known of a batch that Lightning has fetched."""

    read: ReadBatch
    own: RandomState | None  # the process's state before it was read, of the first batch of a window


class Progress:
    """How far a run is, for all its loaders.

    Attributes:
        loop: Lightning's training loop.
        seed: The seed of the run.
        watch: What is checked on the first batch of each loader.
        passes: Passes that began, by the position of the loader in the run: Lightning may replace the loader.
        window_own: The process's own state before the first batch of the window.
        resumed_order: In a resumed run, where the order's stream was, until a batch is trained on; else None.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        seed: int,
        resumed_order: RandomState | None,
        watch: Watch,
        world: World,
        own_state: Callable[[], RandomState],
    ) -> None:
        """Begin a run.

        Args:
            loop: Lightning's training loop.
            seed: The seed of the run.
            resumed_order: Where the order's stream was, in a resumed run; else None.
            watch: What is checked on the first batch of each loader.
            world: The ranks that read the loaders.
            own_state: Returns the process's own random state of now; within an evaluation, that of before it.
        """
        self._own_state = own_state
        self.loop = loop
        self.seed = seed
        self.watch = watch
        self.passes: dict[int, int] = {}
        self._stream: OrderStream | None = None
        self.resumed_order = resumed_order
        if resumed_order is not None:
            self._stream = OrderStream(resumed_order)
        self._world = world
        self.window_own: RandomState | None = None
        self._transfer_own: RandomState | None = None  # of a batch that is moved, and has not arrived

    @property
    def has_order(self) -> bool:
        """Whether the order's stream has begun."""
        return self._stream is not None

    @property
    def order(self) -> OrderStream:
        """The stream of the order of training data. It begins when it is asked for first, a collective operation.

        That is when Lightning makes the first iterator of a training loader: the last moment before an order is drawn,
        and so the same as on one process. Before it, Lightning tries whether the loaders are iterable, which may draw.
        """
        if self._stream is None:
            self._stream = OrderStream(self._world.from_first(random_state()))
        return self._stream

    def begin_passes(self, iterators: Sequence[TrainingIterator]) -> None:
        """Begin the passes of all iterators of an epoch, in the order in which they were made: they share one stream.

        A resumed run may do it several times before it trains: Lightning reads ahead, and makes other iterators.
        """
        if self.resumed_order is not None and all(iterator.begun is None for iterator in iterators):
            self.order.state = self.resumed_order
        for iterator in iterators:
            iterator.begin()

    def begin_transfer(self, fetched: Sequence[Fetched | None]) -> None:
        """Note the own state from which a resumed run would go on with the batch that is about to be moved.

        Called before the hooks of the transfer, which may draw or fail.
        """
        if self.loop.ready % self.loop.accumulation != 0:
            return  # within a window, which is repeated from its first batch on
        for of_loader in fetched:
            # A loader without length was read ahead, while training drew.
            if of_loader is not None and of_loader.own is not None and of_loader.read.record.order.has_length:
                self._transfer_own = of_loader.own
                return
        self._transfer_own = random_state()

    def own_state(self) -> RandomState:
        """Return the own state of the process from which a resumed run goes on.

        | training | the state |
        |---|---|
        | has stepped on all batches that arrived | that of now |
        | the same, and the transfer of the next one has begun, and failed | that before it was read |
        | is within a window, which is repeated | that before the window |
        """
        if self._transfer_own is not None:
            return self._transfer_own
        if self.is_within_window and self.window_own is not None:
            return self.window_own
        return self._own_state()

    @property
    def is_within_window(self) -> bool:
        """Whether batches have arrived that no optimizer has stepped on."""
        loop = self.loop
        if loop.ready != loop.processed:
            return True
        # The last window of an epoch may be short.
        return loop.processed % loop.accumulation != 0 and not loop.epoch_ended

    def arrive(self, number: int, loaders: Sequence[TrainingLoader], fetched: Sequence[Fetched | None]) -> None:
        """Begin to train on a batch.

        Args:
            number: The number of the batch in its epoch.
            loaders: The loaders of the run.
            fetched: What is known of the batch of each loader, None where it has no more.
        """
        self.resumed_order = None
        begins_window = number % self.loop.accumulation == 0
        if begins_window:
            self.window_own = self._transfer_own
        self._transfer_own = None
        for loader, of_loader in zip(loaders, fetched, strict=True):
            record = None
            if of_loader is not None:
                record = of_loader.read.record
            loader.resumed = None
            loader.current = record
            if begins_window:
                loader.window_start = record


class TrainingLoader(SplitLoader):
    """A split loader that Lightning reads. A checkpoint holds its place, in loader batches, for any world size.

    Attributes:
        progress: How far the run is.
        records: What is known of the batches that were fetched.
        current: The record of the batch in training; None before the first, and where the loader has no more.
        window_start: The record of the first batch of its window.
        resumed: Where the next passes begin in a resumed run, until a batch is trained on; else None.
        watch: What is checked on the first batch that Lightning reads; None afterwards.
    """

    progress: Progress
    records: Records[Fetched]
    current: BatchRecord | None
    window_start: BatchRecord | None
    resumed: LoaderState | None
    watch: Watch | None

    def __init__(self, loader: object, split: Split, world: World, progress: Progress, *, position: int) -> None:
        super().__init__(loader, split, world, position=position)
        self.progress = progress
        self.records = Records()
        self.current = None
        self.window_start = None
        self.resumed = None
        self.watch = progress.watch
        self.passes = progress.passes.get(position, 0)

    def __iter__(self) -> TrainingIterator:
        return TrainingIterator(self)

    def load_state_dict(self, state: LoaderState) -> None:
        """Begin the next passes where the checkpoint was saved."""
        self.resumed = state

    def state_dict(self) -> LoaderState:
        """Return where training stands: after the last batch that an optimizer stepped on.

        Lightning warns of a loader without this method in a run that resumes within an epoch.

        | case | batches |
        |---|---|
        | resumed, and nothing trained on yet | those of the loaded checkpoint |
        | no pass is in progress: before the first, or after a complete epoch | 0 of a new pass |
        | the last batch was stepped on | up to that batch |
        | an incomplete window, which is repeated | up to the batch before it |
        | no batch of the pass has arrived | those that the pass has passed over |
        """
        if self.resumed is not None:
            return self.resumed
        order = self._order_in_progress()
        loop = self.progress.loop
        if order is None or (loop.ready == loop.processed and loop.epoch_ended):
            return self._state_between_passes()
        current = _of_pass(order, self.current)
        if loop.ready == 0 and current is not None:
            # The epoch is over: its iterators stay until those of the next epoch are made, and so do these records.
            return self._state_between_passes()
        window_start = _of_pass(order, self.window_start)
        if current is not None and not self.progress.is_within_window:
            position = current.after
        elif window_start is not None:
            position = window_start.before
        else:
            position = order.start
        return _state_within(order, position)

    def _state_between_passes(self) -> LoaderState:
        states = Sources(self.loader).states()
        return LoaderState(passes=self.passes, sources=states, order=None, asked=0, batches=0, digest="")

    def _order_in_progress(self) -> Order | None:
        """Return the order of the pass that Lightning reads in this epoch, None if none has begun."""
        for iterator in self.progress.loop.iterators:
            if iterator.loader is self and iterator.begun is not None:
                order: Order = iterator.begun.order
                return order
        return None


def _of_pass(order: Order, record: BatchRecord | None) -> BatchRecord | None:
    """Return a record if it is of this pass, else None: of an earlier epoch, or an earlier cycle of a short loader."""
    if record is None or record.order is not order:
        return None
    return record


def _state_within(order: Order, position: PassPosition) -> LoaderState:
    """Return the state of a loader within a pass."""
    return LoaderState(
        passes=order.place.number,
        sources=order.sources_began,
        order=order.began,
        asked=order.asked,
        batches=position.batches,
        digest=position.digest,
    )


class TrainingIterator(Iterator[object]):
    """One pass over a loader that Lightning reads.

    The pass begins when it is read, not when it is made: in between, Lightning sets the epoch of samplers, and may drop
    the iterator. Until a batch is trained on, every iterator of a resumed run begins at the checkpoint.

    Attributes:
        loader: The loader.
        begun: The pass that Lightning reads, None before it begins.
    """

    def __init__(self, loader: TrainingLoader) -> None:
        self.loader = loader
        self._order = loader.progress.order  # which begins here, at the latest
        self.begun: Pass | None = None
        self._look: Iterator[ReadBatch] | None = None  # where a user reads it
        self._sources_of_look: SourceStates | None = None

    def begin(self) -> Pass:
        """Begin the pass, unless it has begun."""
        if self.begun is None:
            loader = self.loader
            progress = loader.progress
            watch, loader.watch = loader.watch, None
            self.begun = loader.begin(self._order, progress.seed, resumed=loader.resumed, watch=watch)
            progress.passes[loader.position] = loader.passes
        return self.begun

    def __next__(self) -> object:
        loader = self.loader
        progress = loader.progress
        loop = progress.loop
        epoch = loop.epoch_of(self)
        if epoch is None:
            return self._next_of_look()
        if self.begun is None:
            progress.begin_passes(loop.iterators)
        current = self.begin()
        first = 0
        if loader.resumed is not None:
            first = loader.resumed["batches"]
        number = loader.records.next_number(epoch, first=first)
        own = None
        if number % loop.accumulation == 0:
            own = random_state()
        read = next(current.items, None)
        if read is None:
            loader.resumed = None  # The next pass, perhaps of the same epoch, is a new one.
            raise StopIteration
        loader.records.add(epoch, number, Fetched(read, own))
        return read.batch

    def _next_of_look(self) -> object:
        """Return a batch to a user who looks at the data, as by `next(iter(trainer.train_dataloader))`.

        Nothing is noted or exchanged, so one rank may look alone. The order's stream stays where it is, and so do the
        loader's own generators and stateful samplers.
        """
        loader = self.loader
        sources = Sources(loader.loader)
        states = sources.states()
        if self._sources_of_look is not None:
            sources.load(self._sources_of_look)
        try:
            if self._look is None:
                passes = loader.passes
                self._look = loader.begin(self._order.copy(), loader.progress.seed, is_look=True).items
                loader.passes = passes
            return next(self._look).batch
        finally:
            self._sources_of_look = sources.states()
            sources.load(states)
