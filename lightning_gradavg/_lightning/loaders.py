"""What can be asked of a user's loader, and what stands in its place."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

from torch.utils.data import DistributedSampler

from lightning_gradavg._lightning.internals import iterator_of


class Shows:
    """Shows the attributes of another object, unless it has its own."""

    def __init__(self, shown: Any) -> None:
        self._shown = shown

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_shown" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._shown, name)


class LoaderWrapper(Shows):
    """Stands in for a user's loader, or for the copy that is read, of which Lightning reads and sets more than batches.

    Of a `shared` one all ranks read the same, so that worker processes must not be seeded by rank.
    """

    def __init__(self, loader: Any, *, read: Any, shown: Any, shared: bool) -> None:
        super().__init__(shown)
        self.loader, self._read, self._shared = loader, read, shared

    _iterator = iterator_of(lambda self: self._read)

    @property
    def worker_init_fn(self) -> Any:
        """Run in every worker process. Lightning sets it, to seed workers by the rank."""
        return self._read.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self._read.worker_init_fn = _as_on_rank_0(function) if self._shared else function


def user_loader(loader: Any) -> Any:
    """Return the user's loader, unwrapped: Lightning writes ours into a user's `CombinedLoader`."""
    return loader.loader if isinstance(loader, LoaderWrapper) else loader


def loader_samplers(loader: Any) -> list[Any]:
    """Return a loader's samplers, each once, in an order that is the same in every run."""
    batch_sampler, sampler = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    found = (batch_sampler, getattr(batch_sampler, "sampler", None), sampler)
    return list({id(one): one for one in found if one is not None}.values())


def loader_parts(loader: Any) -> list[Any]:
    """Return the loader, its samplers, and its dataset, which may be None."""
    return [loader, *loader_samplers(loader), getattr(loader, "dataset", None)]


def is_sharded(loader: Any) -> bool:
    """Return whether the user declares that every rank reads its own part of the data."""
    return any(getattr(part, "sharded_by_rank", False) for part in loader_parts(loader))


def distributed_sampler(loader: Any) -> DistributedSampler[Any] | None:
    """Return the sampler that splits a loader's data over ranks, if any."""
    samplers = loader_samplers(loader)
    return next((one for one in samplers if isinstance(one, DistributedSampler) and one.num_replicas > 1), None)


def loader_batch_size(loader: Any) -> int | None:
    """Return the samples in a batch of a loader, if it tells."""
    sizes = (getattr(part, "batch_size", None) for part in loader_parts(loader))
    return next((size for size in sizes if isinstance(size, int)), None)


def length_of(loader: Any) -> float:
    """Return the length of a loader; infinity if it tells none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return math.inf


def _as_on_rank_0(worker_init_fn: Any) -> Any:
    """Return a function that seeds a worker as rank 0's is seeded, where it takes the rank as `rank`."""
    try:
        parameters = inspect.signature(worker_init_fn).parameters
    except (TypeError, ValueError):
        return worker_init_fn
    return functools.partial(worker_init_fn, rank=0) if "rank" in parameters else worker_init_fn
