"""Training loaders whose batches are the global batches: every rank gets its own chunk of each.

Map-style datasets are read *in parts*: rank 0 asks its samplers and sends what they yield to all ranks, in blocks, so
that a rank loads its own samples only. Everything else is *shared*: all ranks read the same batches with the random
state of rank 0, in the main process and in workers, and each takes its part, where it can before they are collated.

Where the batches are to be those of one process with all that random numbers, padding and mixing make of them
(`Split.whole`), map-style datasets are shared, too, unless the user says that they draw nothing.

Iterating is a collective operation: all ranks do it, or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_gradavg._lightning.internals import cloned
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
from lightning_gradavg._support.tree import batch_samples
from lightning_gradavg.batches.chunks import Collated, PartCollator, Split, cut_out
from lightning_gradavg.batches.order import Behind, LoaderState, Order, SharedIndices

__all__ = ["Pass", "SplitLoader", "split_batches"]

_END = object()


class Pass(NamedTuple):
    """One pass over a split loader. No cycle of references holds it, so that worker processes end with it."""

    order: Order
    items: Iterator[tuple[Any, Behind]]


class SplitLoader(LoaderWrapper):
    """A training loader that yields this rank's parts of the user's batches, and shows the attributes of theirs.

    Making it is a collective operation.

    Attributes:
        samples: Samples of the batch yielded last that count: 0 where the rank has none of the global batch, and the
            batch only keeps it busy. None outside of a pass.

    Raises:
        ValueError: On all ranks, if the loader cannot be split, or the ranks' loaders differ.
    """

    samples: int | None = None

    def __init__(self, loader: Any, split: Split, world: World) -> None:
        loader = user_loader(loader)
        batched = isinstance(loader, DataLoader) and loader.batch_sampler is not None
        streams = not batched or isinstance(loader.dataset, IterableDataset)
        in_parts = not (streams or (split.whole and not _may_be_read_in_parts(loader)))
        _require_splittable(loader, world, shared=not in_parts)
        self.split, self._world = split, world
        self._indices = SharedIndices(loader.batch_sampler, split) if in_parts else None
        replaced: dict[str, Any] = {}
        if in_parts:
            replaced["batch_sampler"] = self._indices
            if world.rank > 0:
                replaced["generator"] = None  # the seed of workers is drawn from a stream of the rank's own
        # A loader with an `__iter__` of its own expects what the user's collate_fn returns.
        plain = batched and type(loader).__iter__ is DataLoader.__iter__
        if plain and (split.max_samples is not None or not in_parts):
            of_read = Split(max_samples=split.max_samples) if in_parts else split
            replaced["collate_fn"] = PartCollator(loader.collate_fn, of_read)
        read = cloned(loader, **replaced) if isinstance(loader, DataLoader) else loader
        # Seeded by its rank, a worker might read in another order.
        super().__init__(loader, read=read, shown=loader, shared=not in_parts)
        if isinstance(loader, DataLoader):
            self.worker_init_fn = loader.worker_init_fn

    def __iter__(self) -> Iterator[Any]:
        try:
            for batch, behind in self.begin().items:
                self.samples = behind.chunk.samples
                yield batch
        finally:
            self.samples = None

    def __len__(self) -> int:
        return len(self.loader)

    def begin(self, start: LoaderState | None = None) -> Pass:
        """Begin a pass. A collective operation, and so is each step of it. For `start` see `Order`."""
        order = Order(self.loader, self._world, start, shared=self._indices is None)
        if self._indices is not None:
            self._indices.order = order
        with order.drawing():
            batches = iter(self._read)
        if self._indices is None:
            return Pass(order, self._read_together(order, batches))
        order.follow(order.snapshots["begin"]["random"], self._world.from_first(order.stream.state))
        return Pass(order, self._read_in_parts(order, batches))

    def _read_together(self, order: Order, batches: Iterator[Any]) -> Iterator[tuple[Any, Behind]]:
        """Yield this rank's part of each batch that all ranks read."""
        order.draw_on("first")
        while True:
            with order.drawing():
                batch = next(batches, _END)
            if batch is _END:
                return order.finish()
            if not isinstance(batch, Collated):
                batch = cut_out(batch, batch_samples(batch), self.split)
            behind = order.note(batch.key, self.split.cut(batch.rows))
            if behind is not None:
                yield batch.part, behind

    def _read_in_parts(self, order: Order, batches: Iterator[Any]) -> Iterator[tuple[Any, Behind]]:
        """Yield what this rank loads."""
        drawing = order.drawing if order.forks else nullcontext
        while True:
            with drawing():
                batch = next(batches, _END)
            ends = batch is _END
            if ends is bool(order.asked):
                raise RuntimeError(
                    f"{type(self.loader).__name__} yielded {'fewer' if ends else 'more'} batches than its batch_sampler"
                    " was asked for, so split_batches=True cannot tell which samples a batch holds. Wrap it in an"
                    " iterable of your own, whose batches are split once they are collated."
                )
            if ends:
                return order.finish()
            yield batch.part if isinstance(batch, Collated) else batch, order.asked.popleft()

    def describe(self) -> str:
        """Return one line that says what is done with the loader."""
        samplers = " and ".join(type(each).__name__ for each in loader_samplers(self.loader))
        return (
            f"{type(self.loader).__name__}{f' with its {samplers}' if samplers else ''}: used as it is, its batches are"
            f" the global batches, in {self.split.chunks} chunks on {self.split.world_size} ranks;"
            f" {'every rank reads whole batches' if self._indices is None else 'each rank loads its own samples only'}"
        )


_ALONE = (
    "leave split_batches, equivalent_to and num_replicas out, and every rank trains on its own batches: with"
    " reduction='weighted_mean' it gives the mean over all samples, however many a rank has."
)


def _require_splittable(loader: Any, world: World, *, shared: bool) -> None:
    """Raise on all ranks if the loader cannot be split on some, or they differ."""
    dealing = getattr(distributed_sampler(loader), "num_replicas", 0)
    name, workers = type(loader).__name__, getattr(loader, "num_workers", None)

    def contribute() -> Contribution:
        problems = {
            f"{name} or its dataset {type(getattr(loader, 'dataset', None)).__name__} has sharded_by_rank = True: the"
            " ranks' batches are not one batch, which can be shared out. Remove the attribute and have every rank read"
            f" the same data; or {_ALONE}": is_sharded(loader),
            f"the train loader has a DistributedSampler for {dealing} replicas, but with split_batches=True the"
            " loader's batches are the global batches, which the strategy splits. Give the loader the sampler of a run"
            " on one device. Where a library adds this sampler automatically for every DDPStrategy,"
            f" {_ALONE}": dealing > 0,
            "in_order=False lets the workers hand over batches in an order of their own, so the ranks' chunks would not"
            " make up one batch. Use in_order=True with split_batches=True.": (
                bool(workers) and not getattr(loader, "in_order", True)
            ),
        }
        if found := [problem for problem, applies in problems.items() if applies]:
            raise ValueError(found[0])
        read = (
            f"batch size {loader_batch_size(loader)}, length {length_of(loader)}, {'whole' if shared else 'in parts'}"
        )
        # Ranks that prefetch differently would ask for their indices at different times.
        ahead = f"num_workers={workers}, prefetch_factor={getattr(loader, 'prefetch_factor', None)}"
        return Contribution([f"{read}, {ahead}"])

    world.agree("the ranks' train loaders cannot be split", contribute)


def _may_be_read_in_parts(loader: DataLoader[Any]) -> bool:
    """Whether the parts of a batch are the same if only they are read: no sample or batch depends on another."""
    said = any(getattr(owner, "draws_no_random_numbers", False) for owner in (loader, loader.dataset))
    return said and loader.collate_fn is default_collate and type(loader).__iter__ is DataLoader.__iter__


def split_batches(loader: Any, *, group: dist.ProcessGroup | None = None) -> SplitLoader:
    """Return a loader that yields this rank's chunk of each batch of `loader`, which is the global batch.

    Every rank gets its contiguous chunk, in the order of one process. Chunks differ by at most one sample: 4 on 3 ranks
    are 2, 1 and 1. Samplers are used unchanged, with the random state of rank 0. A rank loads only its own samples. If
    a batch has fewer samples than there are ranks, a rank that gets none has a sample of another rank, to take part in
    the backward, and `samples` of the returned loader is 0: the weight of that batch.

    Creating the loader and iterating over it are collective operations.

    Args:
        loader: A `DataLoader` with the global batch size and no `DistributedSampler`, or an iterable of batches.
        group: The ranks that share the batches; those of the default group if None.

    Raises:
        ValueError: On all ranks, if the loader cannot be split, or the ranks' loaders differ.
    """
    world = World.of(group)
    return SplitLoader(loader, Split(world.rank, world.size), world)
