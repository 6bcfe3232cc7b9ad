"""Training loaders of which some ranks have more batches than others: all ranks go on until none has one.

With each batch that a rank fetches it tells the others that it has one, and waits for nobody. A rank that has none left
waits for what the others say, and gets its last batch again as a *stand-in*, computed like any other, of weight 0, as
long as one of them has one. So all ranks train the same number of steps, and end the epoch together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from lightning_gradavg.batches.progress import Numbers
from lightning_gradavg.device import Tally
from lightning_gradavg.faults.drift import SameData
from lightning_gradavg.lightning_internals import TrainingLoop
from lightning_gradavg.loaders import LoaderWrapper, length_of, user_loader
from lightning_gradavg.ranks import World

__all__ = ["Fetched", "JoinedLoader", "fetched_now", "join"]

_END = object()


class Fetched(NamedTuple):
    """What stands behind a batch: whether it is the rank's own, and what all ranks have."""

    own: bool
    tally: Tally


class JoinedIterator(Iterator[Any]):
    """One pass over a joined loader. A collective operation."""

    def __init__(self, loader: JoinedLoader) -> None:
        self.loader, self._items = loader, iter(loader.read)
        self._begun = False

    def __next__(self) -> Any:
        loader, begins = self.loader, not self._begun
        batch, self._begun = next(self._items, _END), True
        own = batch is not _END
        if own:
            loader.last = batch
        else:
            self._items = iter(())
        lacks = loader.last is _END
        loader.same.compare(batch if own else None)
        tally = Tally([own, lacks], "sum", loader.device, loader.world.group)
        if begins or not own:
            having, lacking = tally.read()
            if having == 0:
                raise StopIteration
            if lacking > 0:
                loader.lend()
        loader.behind.note(self, Fetched(own, tally))
        return loader.last


class JoinedLoader(LoaderWrapper):
    """A training loader that ends on all ranks at once; its length is that of the rank that has most, if all tell."""

    def __init__(self, loader: Any, world: World, device: torch.device, loop: TrainingLoop, length: int | None) -> None:
        super().__init__(loader, read=loader, shown=loader, shared=False)
        self.read, self.device, self.world, self._length = loader, device, world, length
        self.behind = Numbers(loop)
        self.last: Any = _END
        dataset = getattr(loader, "dataset", None)
        of = "" if dataset is None else f" over {type(dataset).__name__}"
        self.same = SameData(f"batches of {type(loader).__name__}{of}")

    def __iter__(self) -> JoinedIterator:
        return JoinedIterator(self)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length on all ranks")
        return self._length

    def lend(self) -> None:
        """Give ranks that never had a batch the one of a rank that has. A collective operation."""
        lent = self.world.gather_objects(None if self.last is _END else (self.last,))
        if self.last is _END:
            (self.last,) = next(one for one in lent if one is not None)


def join(loader: Any, world: World, device: torch.device, loop: TrainingLoop) -> Any:
    """Return a loader, joined unless all ranks are known to have as many batches. A collective operation."""
    loader = user_loader(loader)
    # What a stream says of its length need not be so.
    streams = isinstance(getattr(loader, "dataset", None), IterableDataset)
    lengths = [length for (length,) in world.gather_floats([math.inf if streams else length_of(loader)])]
    known = math.inf not in lengths
    if world.size == 1 or (known and len(set(lengths)) == 1):
        return loader
    return JoinedLoader(loader, world, device, loop, int(max(lengths)) if known else None)


def fetched_now(loop: TrainingLoop, world_size: int) -> tuple[bool, int]:
    """Return whether the batch in training is the rank's own, and how many ranks have none.

    Raises:
        RuntimeError: On all ranks, if there are other loaders beside one that has fewer batches on some.
    """
    joined = [each.loader for each in loop.iterators if isinstance(each, JoinedIterator)]
    fetched = [now for now in (loader.behind.get(loop.ready - 1) for loader in joined) if now is not None]
    missing = max((world_size - each.tally.read()[0] for each in fetched), default=0)
    if missing > 0 and len(loop.iterators) > 1:
        raise RuntimeError(
            f"one of the {len(loop.iterators)} train loaders has no more batches on {missing} of {world_size} ranks: no"
            " weight of the step can count one loader and not the other. Give all ranks the same number of batches, or"
            " read them by one loader."
        )
    return all(each.own for each in fetched), missing
