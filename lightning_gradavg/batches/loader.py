"""Training loaders whose batches are the global batches: every rank gets its own chunk of each.

`BatchSplitter.wrap(loader)` returns a `SplitLoader`, an iterable of this rank's micro-batches. The user's
samplers are asked as they are, on every rank, and what they yield is split, see `lightning_gradavg.batches.sources`.
Iterating is a collective operation: all ranks do it, or none.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from lightning_gradavg.batches.chunks import Split
from lightning_gradavg.batches.order import require_alike
from lightning_gradavg.batches.progress import LoaderState, PassedLoader, Progress, SplitIterator
from lightning_gradavg.batches.sources import source_of
from lightning_gradavg.loaders import distributed_sampler, is_sharded, keeps_state, loader_batch_size, user_loader
from lightning_gradavg.ranks import World

__all__ = ["BatchSplitter", "ResumableSplitLoader", "SplitLoader", "StatefulSplitLoader"]


class SplitLoader(PassedLoader):
    """A training loader that yields this rank's micro-batches of the user's batches.

    All other attributes are those of the user's loader. `len()` is the number of micro-batches per epoch: those of the
    user's loader times `Progress.micro_batches`. No checkpoint holds where training stands in it: where every rank
    reads data of its own, rank 0, which saves, knows nothing of the others.
    """

    def __init__(self, loader: Any, splitter: BatchSplitter, *, sharded: bool) -> None:
        kind, progress = source_of(loader, whole=splitter.whole_batches), splitter.progress
        source = kind(loader, splitter.split_of(sharded=sharded), lambda: progress.micro_batches)
        # Seeded by its rank, a worker might read in another order.
        super().__init__(loader, source, World() if sharded else splitter.world, alike=kind.alike and not sharded)
        self._splitter, self._progress, self._sharded = splitter, progress, sharded
        if isinstance(loader, DataLoader):
            self.worker_init_fn = loader.worker_init_fn

    def __iter__(self) -> SplitIterator:
        return SplitIterator(self, self._progress)

    def __len__(self) -> int:
        return len(self.source)

    def describe(self) -> str:
        """Return one line that says what is done with the loader."""
        if self._sharded:
            return f"{type(self.loader).__name__}: every rank trains on its own batches (sharded_by_rank is set)"
        split = self._splitter.split
        most = f", in {self._progress.micro_batches} micro-batches of at most {split.max_samples} samples per rank"
        return (
            f"{self.source.name}: used as it is, its batches are the global batches, in {split.chunks} chunks"
            f" on {split.world_size} ranks{most if split.max_samples else ''}; {self.source.reads}"
        )


class ResumableSplitLoader(SplitLoader):
    """A split loader whose place a checkpoint holds, in loader batches and samples of the global order.

    What was taken is not loaded again where the samples have indices. Of an iterable-style dataset, and of an iterable
    of batches, it has to be read again and is dropped.
    """

    resumable = True

    def state_dict(self) -> LoaderState:
        """Return where training stands: the same on all ranks, for any world size and any size of micro-batches.

        Samples of an incomplete window count as not taken: its gradients are not in a checkpoint, so it is repeated.
        """
        return self._progress.state_of(self)

    def load_state_dict(self, state_dict: Any) -> None:
        """Have the next pass go on from there."""
        self._progress.go_on(self, state_dict)


class StatefulSplitLoader(SplitLoader):
    """A split loader whose user's loader keeps its place itself; only then Lightning may see these two methods."""

    def state_dict(self) -> Any:
        """Return what the user's loader returns."""
        return self.source.loader.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Give the user's loader its state."""
        self.source.loader.load_state_dict(state_dict)


class BatchSplitter:
    """Makes the split loaders of one rank, and holds what they have in common.

    Args:
        split: How loader batches are split, and which part is this rank's.
        world: The ranks that share the batches.
        progress: Where training stands in the loaders.
        whole_batches: Whether every rank reads whole batches, so that random numbers, padding and mixing are those of
            one process, unless a loader is known to be the same without.
    """

    def __init__(self, split: Split, world: World, progress: Progress, *, whole_batches: bool = False) -> None:
        self.split, self.world, self.progress, self.whole_batches = split, world, progress, whole_batches

    def split_of(self, *, sharded: bool) -> Split:
        """Return how a loader's batches are split, if every rank reads its own only into micro-batches."""
        return Split(max_samples=self.split.max_samples) if sharded else self.split

    def wrap(self, loader: Any) -> SplitLoader:
        """Return `loader` split. A collective operation.

        Args:
            loader: A `DataLoader`, of any subclass, or an iterable of batches. Where it or its dataset has a true
                attribute `sharded_by_rank`, every rank reads its own part of the data: then its batches are not shared
                out, and only cut into micro-batches.

        Raises:
            ValueError: If the loader cannot be split, the ranks' loaders differ, or the state to go on from is not the
                loader's.
        """
        loader = user_loader(loader)
        sharded, largest = is_sharded(loader), loader_batch_size(loader)
        problem = self._problem(loader, largest, sharded=sharded)
        count = 0 if problem else self.split_of(sharded=sharded).count(largest)
        workers = getattr(loader, "num_workers", 0)
        # A problem that only some ranks have is raised by them all: nobody waits for a rank that has given up.
        require_alike(
            self.world,
            (source_of(loader, whole=self.whole_batches).__name__, sharded, count, workers > 0),
            problem
            or f"the ranks' train loaders differ: on this rank it is a {type(loader).__name__} of batch size {largest},"
            f" num_workers={workers}, sharded_by_rank={sharded}.",
        )
        if problem:
            raise ValueError(problem)
        progress = self.progress
        progress.micro_batches = max(progress.micro_batches, count)
        of_us = SplitLoader if sharded else ResumableSplitLoader
        kind = StatefulSplitLoader if keeps_state(loader) else of_us
        wrapped = kind(loader, self, sharded=sharded)
        if progress.states is not None and kind is not SplitLoader:
            wrapped.load_state_dict(progress.next_state())
        return wrapped

    def _problem(self, loader: Any, largest: int | None, *, sharded: bool) -> str | None:
        """Return why `loader` cannot be split, or None."""
        name, most = type(loader).__name__, self.split.max_samples
        dealing = getattr(distributed_sampler(loader), "num_replicas", None)
        problems = {
            f"{name} or its dataset {type(getattr(loader, 'dataset', None)).__name__} has"
            " sharded_by_rank = True: the ranks' batches are not one batch, whose replicas equivalent_to= and"
            " num_replicas= share out over the ranks. Remove the attribute and have every rank read the same data;"
            " or leave these options out and set split_batches=False.": (
                sharded and (self.whole_batches or self.split.replicas is not None)
            ),
            f"the train loader has a DistributedSampler for {dealing} replicas, but with"
            " split_batches=True the loader's batches are the global batches, which the strategy splits. Give the"
            " loader the sampler of a run on one device, or set split_batches=False.": (
                dealing is not None and not sharded
            ),
            "in_order=False lets the workers hand over batches in an order of their own, so the ranks' chunks would"
            " not make up one batch. Use in_order=True with split_batches=True.": (
                not getattr(loader, "in_order", True) and getattr(loader, "num_workers", 0) > 0
            ),
            f"max_device_batch_size={most} needs to know the largest batch of"
            f" {name}, to have all ranks accumulate alike. Give the loader, its batch sampler or"
            " its dataset an attribute `batch_size` with it, or leave max_device_batch_size out and set"
            " accumulate_grad_batches.": most is not None and largest is None,
        }
        return next((problem for problem, applies in problems.items() if applies), None)
