"""Training loaders of ranks that have batches of their own, some of them perhaps fewer than others."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_gradavg._lightning.internals import TrainingLoop
from lightning_gradavg._lightning.loaders import LoaderWrapper, Stateful, length_of, user_loader
from lightning_gradavg._support.collectives import ReducedRow, World
from lightning_gradavg._support.tree import mapped
from lightning_gradavg.batches.records import Records
from lightning_gradavg.faults.drift import SameData

__all__ = ["FetchRecord", "JoinedLoader", "StatefulJoinedLoader", "join"]

_END = object()  # not None, which a user's loader may yield


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

    world: World
    loop: TrainingLoop
    records: Records[FetchRecord]

    def __init__(self, loader: object, world: World, device: torch.device, loop: TrainingLoop, length: float) -> None:
        super().__init__(loader, shared=False)
        self.world = world
        self.loop = loop
        self.records = Records()
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
        return JoinedIterator(self, iter(self.loader))

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

    def joined(self, batches: Iterator[object]) -> Iterator[tuple[object, FetchRecord]]:
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
                self._last = self._copied(batch)
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
            if not has_batch:
                batch = self._copied(self._last)
            yield batch, FetchRecord(has_batch, counts, state)

    def _copied(self, batch: object) -> object:
        """Return a copy of a batch, which a step may change: by `batch.pop("labels")`, or `labels -= 1` in place.

        An accelerator's batch is a copy of what is loaded already, so tensors are shared there.
        """
        copies_tensors = self._device.type == "cpu"

        def copied(leaf: object) -> object:
            if isinstance(leaf, Tensor):
                return leaf.clone() if copies_tensors else leaf
            try:
                return copy.copy(leaf)  # a class of the user's, whose attributes a step may remove
            except TypeError:  # as of a generator
                return leaf

        return mapped(batch, copied)

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

    loader: Stateful
    _trained: FetchRecord | None = None  # of the batch in training; None before the first one of a pass

    def __iter__(self) -> JoinedIterator:
        self._trained = None
        return super().__iter__()

    def arrive(self, epoch: object, number: int) -> FetchRecord | None:
        """Return the record of a batch that arrives in training, and note it."""
        self._trained = super().arrive(epoch, number)
        return self._trained

    def _state(self) -> object:
        return copy.deepcopy(self.loader.state_dict())  # a loader may return the very dict that it changes

    def state_dict(self) -> object:
        """Return where training stands in this rank's data."""
        if self._trained is None or self._trained.state is None or self.loop.epoch_ended:
            return self.loader.state_dict()
        return self._trained.state

    def load_state_dict(self, state: object) -> None:
        """Have the next pass begin after the last batch that was trained on."""
        self.loader.load_state_dict(state)


class JoinedIterator(Iterator[object]):
    """One pass over a joined loader; over this rank's own batches alone where a user looks at the data."""

    def __init__(self, loader: JoinedLoader, batches: Iterator[object]) -> None:
        self.loader = loader
        self._batches = batches
        self._items = loader.joined(batches)

    def __next__(self) -> object:
        epoch = self.loader.loop.epoch_of(self)
        if epoch is None:
            return next(self._batches)  # nothing is exchanged, so one rank may look alone
        batch, record = next(self._items)
        records = self.loader.records
        records.add(epoch, records.next_number(epoch), record)
        return batch


def join(loader: object, world: World, device: torch.device, loop: TrainingLoop) -> object:
    """Return a loader, joined unless all ranks are known to have as many batches. A collective operation."""
    loader = user_loader(loader)
    # What a stream says of its length need not be so.
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    of_ranks = world.gather_floats([length_of(loader), is_stream])
    lengths = [length for length, _ in of_ranks]
    are_equal = math.inf not in lengths and len(set(lengths)) == 1
    if any(is_stream for _, is_stream in of_ranks):
        are_equal = False
    if world.size == 1 or are_equal:
        return loader
    if isinstance(loader, Stateful):
        return StatefulJoinedLoader(loader, world, device, loop, max(lengths))
    return JoinedLoader(loader, world, device, loop, max(lengths))
