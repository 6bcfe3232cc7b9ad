"""Training loaders whose batches are the global batches: every rank gets its own chunk of each.

`BatchSplitter.wrap(loader)` returns a `SplitLoader`. Its batches are cut

* at the indices, of a map-style dataset: rank 0 asks its samplers and sends what they yield to all ranks, in blocks, so
  that a rank loads its own samples only;
* at the samples, of an iterable-style dataset, which every rank reads: before they are collated, in the worker where
  there are workers;
* as they come, of an iterable of batches, or with `batch_size=None`.

Where the batches are to be those of one process with all that random numbers, padding and mixing make of them
(`whole`), every rank loads and collates whole batches and takes its part: datasets then draw from the random state of
rank 0, in the main process and in workers. That costs each rank the reading of all samples, so loaders that cannot tell
the difference are still split at their indices. What cannot be cut once it is collated, such as a batch of graphs, is
collated anew from the rank's own samples.

Iterating is a collective operation: all ranks do it, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from lightning_gradavg.batches.chunks import Split
from lightning_gradavg.batches.collate import Collated, PartCollator, cut_out
from lightning_gradavg.batches.order import Behind, Order, SharedIndices, require_equal
from lightning_gradavg.batches.state import LoaderState
from lightning_gradavg.lightning_internals import cloned
from lightning_gradavg.loaders import LoaderWrapper, distributed_sampler, is_sharded, loader_batch_size, user_loader
from lightning_gradavg.ranks import World
from lightning_gradavg.tree import batch_samples

__all__ = ["BatchSplitter", "Pass", "SplitLoader", "split_batches"]

_END = object()
Loader = TypeVar("Loader", bound="SplitLoader")
# Their items are what they hold. A subclass may draw.
_DRAW_NOTHING = (TensorDataset, Tensor, list, tuple, range)


def _drawn(order: Order, batches: Iterator[Any]) -> Iterator[Any]:
    """Read batches, which may draw from the random state of the pass."""
    drawing = order.drawing if order.shared or order.forks else nullcontext
    if order.shared:
        order.agree("first")
    while True:
        with drawing():
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


class Pass(NamedTuple):
    """One pass over a split loader: this rank's parts of the batches, each with what stands behind it.

    No cycle of references holds it, so worker processes end with it, and not whenever the garbage collector runs.
    """

    order: Order
    items: Iterator[tuple[Any, Behind]]


class SplitLoader(LoaderWrapper):
    """A training loader that yields this rank's parts of the user's batches, and shows the attributes of theirs.

    Attributes:
        split: How batches are split.
        whole: Whether every rank loads whole batches and takes its part of them.
        shared: Whether all ranks draw the same random numbers as they read.
        world: The ranks that read the same batches.
        read: What is iterated: the user's iterable, or a copy of a `DataLoader`.
        indices: The copy's batch sampler, where batches are split at their indices.
        samples: Samples of the batch yielded last that count: 0 where the rank has none of the global batch, and the
            batch only keeps it busy. None outside of a pass.
    """

    samples: int | None = None

    def __init__(self, loader: Any, splitter: BatchSplitter) -> None:
        self.split, self.world = splitter.split, splitter.world
        batched = isinstance(loader, DataLoader) and loader.batch_sampler is not None
        streams = not batched or isinstance(loader.dataset, IterableDataset)
        self.whole = splitter.whole_batches and (streams or not _may_be_read_in_parts(loader))
        self.shared = streams or self.whole
        self.indices: SharedIndices | None = None
        replaced: dict[str, Any] = {}
        if not streams:
            # Whole batches that this process loads are loaded again: what is drawn next may depend on their draws.
            again = self.whole and loader.num_workers == 0
            self.indices = SharedIndices(loader.batch_sampler, self.split, whole=self.whole, loads_again=again)
            replaced["batch_sampler"] = self.indices
        if not self.shared and self.world.rank > 0:
            replaced["generator"] = None  # the seed of workers is drawn from a stream of the rank's own
        # A loader with an `__iter__` of its own expects what the user's collate_fn returns.
        if batched and type(loader).__iter__ is DataLoader.__iter__:
            if streams or self.whole:
                replaced["collate_fn"] = PartCollator(loader.collate_fn, self.split, self.whole)
            elif self.split.max_samples is not None:
                replaced["collate_fn"] = PartCollator(loader.collate_fn, Split(max_samples=self.split.max_samples))
        self.read: Any = cloned(loader, **replaced) if isinstance(loader, DataLoader) else loader
        # Seeded by its rank, a worker might read in another order.
        super().__init__(loader, read=self.read, shown=loader, shared=self.shared)
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
        order = Order(self.loader, self.world, start, shared=self.shared)
        if self.indices is not None:
            self.indices.order = order
        with order.drawing():
            batches = iter(self.read)
            if self.indices is None:
                order.agree("made")
        order.end_making()
        return Pass(order, self._parts(order, _drawn(order, batches)))

    def _parts(self, order: Order, batches: Iterator[Any]) -> Iterator[tuple[Any, Behind]]:
        """Yield this rank's part of every batch that is not passed over."""
        for batch in batches:
            if self.indices is None:
                rows, key, part = self._opened(batch)
                behind = Behind(self.split.cut(rows), order.note(key, rows, compares=True))
            elif not order.asked:
                raise self._mismatch("more")
            else:
                behind, part = order.asked.popleft(), batch.part if isinstance(batch, Collated) else batch
                if self.whole:
                    rows, key, part = self._opened(batch, behind.chunk.batch_samples)
                    behind = behind._replace(chunk=self.split.cut(rows))
                    if behind.mark is not None:
                        order.compare_read(key, behind.mark.batches)
            if behind.mark is not None:
                yield part, behind
        if order.asked:
            raise self._mismatch("fewer")
        order.finish(compares=self.indices is None)

    def _opened(self, batch: Any, samples: int = 1) -> Collated:
        """Return a whole batch, of which every rank takes its part, as a worker hands it over."""
        if isinstance(batch, Collated):
            return batch
        rows = batch_samples(batch)
        if rows % samples != 0:
            raise ValueError(
                f"a batch of {samples} samples of {self.name} has {rows} rows along dimension 0, along which it would"
                " be cut into replicas. Have its __iter__ put the samples along dimension 0 of all tensors, the same"
                " number of rows for each."
            )
        return cut_out(batch, rows, self.split.cut(rows))

    @property
    def seeded(self) -> bool:
        """Whether there are worker processes that outlive the epoch, so that the next pass draws no seed for them."""
        return bool(getattr(self.loader, "persistent_workers", False) and self._iterator is not None)

    @property
    def name(self) -> str:
        """What the user knows the loader by."""
        return type(self.loader).__name__

    def describe(self) -> str:
        """Return one line that says what is done with the loader."""
        split, name = self.split, self.name
        if self.indices is not None:
            name += f" with its {type(self.loader.batch_sampler).__name__} and {type(self.loader.sampler).__name__}"
        limited = f", in parts of at most {split.max_samples} samples" if split.max_samples else ""
        return (
            f"{name}: used as it is, its batches are the global batches, in {split.chunks} chunks on"
            f" {split.world_size} ranks{limited};"
            f" {'every rank reads whole batches' if self.shared else 'each rank loads its own samples only'}"
        )

    def _mismatch(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{self.name} yielded {what} batches than its batch_sampler was asked for, so split_batches=True"
            " cannot tell which samples a batch holds. Use a loader whose __iter__ yields one batch per batch of"
            " indices, or wrap it in an iterable of your own, whose batches are split once they are collated."
        )


@dataclass
class BatchSplitter:
    """Makes the split loaders of one rank, and holds what they have in common.

    With `whole_batches` every rank reads whole batches, so that random numbers, padding and mixing are those of one
    process, unless a loader is known to be the same without.
    """

    split: Split
    world: World
    whole_batches: bool = False

    def wrap(self, loader: Any, kind: Callable[..., Loader]) -> Loader:
        """Return `loader` split, as a `kind` that takes the arguments of `SplitLoader`. A collective operation.

        Raises:
            ValueError: If the loader cannot be split, or the ranks' loaders differ.
        """
        loader = user_loader(loader)
        largest, problem = loader_batch_size(loader), _problem(loader)
        workers = [getattr(loader, name, None) for name in ("num_workers", "prefetch_factor")]
        wrapped = None if problem else kind(loader, self)
        traits = None if wrapped is None else (wrapped.indices is None, wrapped.whole)
        # A problem that only some ranks have is raised by them all: nobody waits for a rank that has given up. Ranks
        # that prefetch differently ask for their indices at different times.
        require_equal(
            self.world,
            (traits, largest, workers),
            problem
            or f"the ranks' train loaders differ: on this rank it is a {type(loader).__name__} of batch size {largest},"
            f" num_workers={workers[0]}, prefetch_factor={workers[1]}.",
        )
        if wrapped is None:
            raise ValueError(problem)
        return wrapped


def _problem(loader: Any) -> str | None:
    """Return why `loader` cannot be split, or None."""
    dealing = getattr(distributed_sampler(loader), "num_replicas", None)
    alone = "with reduction='weighted_mean' it gives the mean over all samples, however many a rank has."
    problems = {
        f"{type(loader).__name__} or its dataset {type(getattr(loader, 'dataset', None)).__name__} has"
        " sharded_by_rank = True: the ranks' batches are not one batch, which can be shared out. Remove the attribute"
        " and have every rank read the same data; or leave split_batches, equivalent_to and num_replicas out, and every"
        f" rank trains on its own batches: {alone}": is_sharded(loader),
        f"the train loader has a DistributedSampler for {dealing} replicas, but with split_batches=True the loader's"
        " batches are the global batches, which the strategy splits. Give the loader the sampler of a run on one"
        " device. Where a library adds this sampler automatically for every DDPStrategy, leave split_batches,"
        f" equivalent_to and num_replicas out: {alone}": dealing is not None,
        "in_order=False lets the workers hand over batches in an order of their own, so the ranks' chunks would not"
        " make up one batch. Use in_order=True with split_batches=True.": (
            not getattr(loader, "in_order", True) and getattr(loader, "num_workers", 0) > 0
        ),
    }
    return next((problem for problem, applies in problems.items() if applies), None)


def _may_be_read_in_parts(loader: DataLoader[Any]) -> bool:
    """Whether the parts of a batch are the same if only they are read: no sample or batch depends on another."""
    said = any(getattr(owner, "draws_no_random_numbers", False) for owner in (loader, loader.dataset))
    return (
        (said or _draws_nothing(loader.dataset))
        and loader.collate_fn is default_collate
        and type(loader).__iter__ is DataLoader.__iter__
    )


def _draws_nothing(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return _draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_draws_nothing, dataset.datasets))
    return type(dataset) in _DRAW_NOTHING


def split_batches(loader: Any, *, group: dist.ProcessGroup | None = None) -> SplitLoader:
    """Return a loader that yields this rank's chunk of each batch of `loader`, which is the global batch.

    Every rank gets its contiguous chunk, cut as `torch.chunk` cuts, in the order of one process. Samplers are used
    unchanged, with the random state of rank 0. A rank loads only its own samples. If a short batch leaves a rank none,
    it gets a sample of another rank, to take part in the backward, and `samples` of the returned loader is 0: the
    weight of that batch.

    Creating the loader and iterating over it are collective operations.

    Args:
        loader: A `DataLoader` with the global batch size and no `DistributedSampler`, or an iterable of batches. If it
        group: The ranks that share the batches; those of the default group if None.

    Raises:
        ValueError: On all ranks, if the loader cannot be split, or the ranks' loaders differ.
    """
    world = World.of(group)
    return BatchSplitter(Split(world.rank, world.size), world).wrap(loader, SplitLoader)
