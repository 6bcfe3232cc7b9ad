"""Training loaders whose batches are the global batches: every rank gets its own chunk of each.

How the batches are read depends on the loader:

| the user's loader | read |
|---|---|
| a `DataLoader` with a batch sampler over a map-style dataset | in parts |
| the same, where batches must be those of one process in all that is drawn, padded and mixed (`Split.whole`) | shared |
| the same, but the user says that nothing draws (`draws_no_random_numbers`), and collating mixes nothing | in parts |
| any other: over an `IterableDataset`, with `batch_size=None`, or an iterable of batches | shared |

*In parts*, rank 0 asks its sampler and sends the indices to all ranks, in blocks, so that a rank loads its own samples
only. *Shared*, all ranks read the same batches with the random state of rank 0, in the main process and in workers, and
each takes its part, where it can before the samples are collated.

Iterating is a collective operation: all ranks do it, or none.

What stands in for a loader must answer what Lightning asks of one. Of a training loader, lightning 2.6 uses:

| attribute | when | in Lightning | answered by |
|---|---|---|---|
| `worker_init_fn`, read and set | the loader is prepared | `_auto_add_worker_init_fn` | `LoaderWrapper` |
| `len()` | likewise, and whenever an iterator is made | `has_len_all_ranks`, `sized_len` | `SplitLoader` |
| `dataset` | likewise, to warn of a stream with a length | `has_iterable_dataset` | the user's loader |
| `iter()` | the loader is prepared, and each later epoch begins | `CombinedLoader.__iter__` | `progress.py` |
| `sampler`, `batch_sampler.sampler` | an epoch begins | `_set_sampler_epoch` | the user's loader |
| `state_dict` | a checkpoint is saved | `CombinedLoader._state_dicts` | `progress.py` |
| `load_state_dict` | a loader has a state if it has both methods | `CombinedLoader._state_dicts` | `progress.py` |
| `_iterator`, read and set | training ends, and the workers with it | `CombinedLoader.reset` | `LoaderWrapper` |

`LoaderWrapper` passes everything else on to the user's loader: callbacks look at `trainer.train_dataloader`. Of a
prepared loader, only `_worker_check` asks whether it is a `DataLoader`, for warnings about its workers.
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
from lightning_gradavg._support.text import plural
from lightning_gradavg._support.tree import batch_samples
from lightning_gradavg.batches.chunks import Collated, PartCollator, Split, cut_out
from lightning_gradavg.batches.order import BatchRecord, LoaderState, Order, SharedIndices

__all__ = ["Pass", "ReadBatch", "SplitLoader", "split_batches"]

_END = object()  # not None, which a user's loader may yield


class ReadBatch(NamedTuple):
    """What a pass yields."""

    part: object  # this rank's samples of the loader batch, in the user's own type
    record: BatchRecord


class Pass(NamedTuple):
    """One pass over a split loader.

    A tuple beside the loader, because no cycle of references may hold it: worker processes end with the iterator.
    """

    order: Order
    items: Iterator[ReadBatch]


class SplitLoader(LoaderWrapper):
    """A training loader that yields this rank's parts of the user's batches, and shows the attributes of theirs.

    Making it is a collective operation.

    Attributes:
        samples: Samples that count of the batch yielded last: 0 where the rank has none of the global batch, and gets
            a stand-in. None outside of a pass.

    Raises:
        ValueError: On all ranks, if the loader cannot be split, or the ranks' loaders differ.
    """

    samples: int | None = None

    def __init__(self, loader: object, split: Split, world: World) -> None:
        loader = user_loader(loader)
        in_parts = _is_read_in_parts(loader, split)
        _require_splittable(loader, world, in_parts=in_parts)
        self.split = split
        self._world = world
        self._indices: SharedIndices | None = None
        read = loader
        if isinstance(loader, DataLoader):
            if in_parts:
                self._indices = SharedIndices(loader.batch_sampler, split)
            read = cloned(loader, **_attributes_to_replace(loader, split, self._indices, world))
        super().__init__(loader, read=read, shown=loader, shared=not in_parts)
        if isinstance(loader, DataLoader):
            # Through the setter of `LoaderWrapper`: workers that are seeded by their rank would read another order.
            self.worker_init_fn = loader.worker_init_fn

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's part of each batch: in Fabric, or in a loop of the user's own."""
        try:
            for part, record in self.begin().items:
                self.samples = record.chunk.samples
                yield part
        finally:
            self.samples = None

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def reads_together(self) -> bool:
        """Whether all ranks read the same batches; else each loads its own samples."""
        return self._indices is None

    def begin(self, start: LoaderState | None = None) -> Pass:
        """Begin a pass. A collective operation, and so is each of its batches.

        Args:
            start: Where the pass begins; None for a new one. See `Order`.
        """
        order = Order(self.loader, self._world, start, shared=self.reads_together)
        if self._indices is not None:
            self._indices.order = order
        with order.drawing():
            # A `DataLoader` draws the seed of its workers here, and with workers asks for the first batches.
            batches = iter(self._read)
        if self._indices is None:
            return Pass(order, self._read_together(order, batches))
        # Rank 0 has drawn the seed of its workers, and perhaps the order: the other ranks' own states move on alike.
        order.draws.follow(self._world.from_first(order.draws.last_draw))
        return Pass(order, self._read_in_parts(order, batches))

    def _read_together(self, order: Order, batches: Iterator[object]) -> Iterator[ReadBatch]:
        """Yield this rank's part of each batch that all ranks read."""
        order.draws.begin_reading()
        while True:
            with order.drawing():
                batch = next(batches, _END)
            if batch is _END:
                order.finish()
                return
            if not isinstance(batch, Collated):
                # No `PartCollator` has made it: see `_attributes_to_replace`.
                batch = cut_out(batch, batch_samples(batch), self.split)
            record = order.record(batch.digest, self.split.cut(batch.rows))
            if record is not None:
                yield ReadBatch(batch.part, record)

    def _read_in_parts(self, order: Order, batches: Iterator[object]) -> Iterator[ReadBatch]:
        """Yield the samples of each batch that this rank loads. `SharedIndices` has recorded the batches."""
        # What the dataset draws on rank 0 comes from its own state, as in one process.
        drawing = order.drawing if order.draws.forks else nullcontext
        while True:
            with drawing():
                batch = next(batches, _END)
            if batch is _END:
                if order.pending:
                    raise RuntimeError(self._other_number_of_batches("fewer"))
                order.finish()
                return
            if not order.pending:
                raise RuntimeError(self._other_number_of_batches("more"))
            part = batch
            if isinstance(batch, Collated):
                part = batch.part
            yield ReadBatch(part, order.pending.popleft())

    def _other_number_of_batches(self, fewer_or_more: str) -> str:
        return (
            f"{type(self.loader).__name__} yielded {fewer_or_more} batches than its batch_sampler"
            " was asked for, so split_batches=True cannot tell which samples a batch holds. Wrap it in an"
            " iterable of your own, whose batches are split once they are collated."
        )

    def describe(self) -> str:
        """Return one line that says what is done with the loader."""
        names = [type(sampler).__name__ for sampler in loader_samplers(self.loader)]
        # A name such as torch's `_InfiniteConstantSampler`, of a stream, tells a user nothing.
        public_names = [name for name in names if not name.startswith("_")]
        with_samplers = ""
        if public_names:
            with_samplers = f" with its {' and '.join(public_names)}"
        chunks = plural(self.split.chunks, "chunk")
        ranks = plural(self.split.world_size, "rank")
        reads = ""
        if self.split.world_size > 1:
            reads = f"; {self._describe_reading()}"
        return (
            f"{type(self.loader).__name__}{with_samplers}: used unchanged; each batch is a global batch, split into"
            f" {chunks} on {ranks}{reads}"
        )

    def _describe_reading(self) -> str:
        """Return what a rank reads of each batch, and why. The cases are those of `_is_read_in_parts`."""
        loader = self.loader
        if self._indices is not None:
            return "each rank loads its own samples only"
        whole = "every rank reads whole batches"
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
            return f"{whole}, as only a DataLoader that makes batches by indices can load a part of one"
        if isinstance(loader.dataset, IterableDataset):
            return f"{whole}, as a stream has no indices by which a rank could load its own samples only"
        if loader.collate_fn is default_collate and _iterates_as_torch(loader):
            return (
                f"{whole}, so that random numbers are drawn as in one process. If loading draws none, set"
                " draws_no_random_numbers = True on the dataset, and each rank loads its own samples only"
            )
        return f"{whole}, as your collate_fn or your loader's __iter__ may depend on the whole batch"


def _is_read_in_parts(loader: object, split: Split) -> bool:
    """Return whether a rank can load its own samples only. The module's docstring has the cases."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return False
    if isinstance(loader.dataset, IterableDataset):
        return False
    if not split.whole:
        return True
    # The user's word is needed: whether a dataset draws, as augmentation does, cannot be seen.
    draws_nothing = any(getattr(owner, "draws_no_random_numbers", False) for owner in (loader, loader.dataset))
    return draws_nothing and loader.collate_fn is default_collate and _iterates_as_torch(loader)


def _iterates_as_torch(loader: DataLoader[Any]) -> bool:
    """Return whether a loader has no `__iter__` of its own, which may change batches after they are collated."""
    return type(loader).__iter__ is DataLoader.__iter__


def _attributes_to_replace(
    loader: DataLoader[Any], split: Split, indices: SharedIndices | None, world: World
) -> dict[str, Any]:
    """Return the attributes in which the loader that is read, a copy, differs from the user's.

    Args:
        loader: The user's loader.
        split: How its batches are split.
        indices: What yields this rank's indices where it is read in parts, or None.
        world: The ranks that read it.
    """
    replaced: dict[str, Any] = {}
    if indices is not None:
        replaced["batch_sampler"] = indices
        if world.rank > 0:
            # The seed of workers is drawn from the rank's own stream, so that no two ranks draw the same augmentation
            # (`test_no_two_ranks_augment_alike`).
            replaced["generator"] = None
    if loader.batch_sampler is None or not _iterates_as_torch(loader):
        # Without batches there is nothing to collate, and an `__iter__` of the user's expects what their collate_fn
        # returns. `_read_together` cuts what comes out.
        return replaced
    if indices is None:
        replaced["collate_fn"] = PartCollator(loader.collate_fn, split)
    elif split.max_samples is not None:
        # The rank's samples are the whole batch here, to be cut into pieces.
        replaced["collate_fn"] = PartCollator(loader.collate_fn, Split(max_samples=split.max_samples))
    return replaced


_WITHOUT_SPLITTING = (
    "leave split_batches, equivalent_to and num_replicas out, and every rank trains on its own batches: with"
    " reduction='weighted_mean' it gives the mean over all samples, however many a rank has."
)


def _require_splittable(loader: object, world: World, *, in_parts: bool) -> None:
    """Raise on all ranks if the loader cannot be split on some, or they differ. A collective operation."""

    def contribute() -> Contribution:
        _require_splittable_here(loader)
        how = "in parts" if in_parts else "whole"
        # Ranks that prefetch differently would ask for their indices at different times, and wait for each other.
        workers = getattr(loader, "num_workers", None)
        prefetch_factor = getattr(loader, "prefetch_factor", None)
        read = f"batch size {loader_batch_size(loader)}, length {length_of(loader)}, {how}"
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
    # Torch has `in_order` since 2.6. It changes nothing without workers.
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        raise ValueError(
            "in_order=False lets the workers hand over batches in an order of their own, so the ranks' chunks would not"
            " make up one batch. Use in_order=True with split_batches=True."
        )


def split_batches(loader: Any, *, group: dist.ProcessGroup | None = None) -> SplitLoader:
    """Return a loader that yields this rank's chunk of each batch of `loader`, which is the global batch.

    Every rank gets its contiguous chunk, in the order of one process. Chunks differ by at most one sample: 4 on 3 ranks
    are 2, 1 and 1. Samplers are used unchanged, with the random state of rank 0. A rank loads only its own samples. If
    a batch has fewer samples than there are ranks, a rank that gets none has a stand-in, the first samples of
    that batch, to take part in the backward, and `samples` of the returned loader is 0: the weight of that batch.

    Creating the loader and iterating over it are collective operations.

    Args:
        loader: A `DataLoader` with the global batch size and no `DistributedSampler`, or an iterable of batches.
        group: The ranks that share the batches; those of the default group if None.

    Raises:
        ValueError: On all ranks, if the loader cannot be split, or the ranks' loaders differ.
    """
    world = World.of(group)
    return SplitLoader(loader, Split(world.rank, world.size), world)
