"""What can be asked of a user's loader, and what stands in its place."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sized
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, SequentialSampler

from lightning_gradavg._lightning.internals import iterator_of


@runtime_checkable
class Stateful(Protocol):
    """A loader or a sampler whose place a checkpoint holds, as Lightning's `_Stateful`: StatefulDataLoader, litData."""

    def state_dict(self) -> object:
        """Return where it is."""

    def load_state_dict(self, state: object) -> None:
        """Have the next pass begin there."""


class Shows:
    """Shows the attributes of another object, unless it has its own."""

    def __init__(self, shown: Any) -> None:
        self._shown = shown

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling look for special methods before there is an attribute `_shown`.
        if name.startswith("__") or "_shown" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._shown, name)


class LoaderWrapper(Shows):
    """Stands in for a user's loader, of which Lightning reads and sets more than batches.

    It shows the attributes of that loader. What is set on it is set on that loader, but for what a subclass declares.

    Args:
        loader: The user's loader.
        shared: Whether all ranks read the same batches, so that worker processes must not be seeded by rank.

    Attributes:
        loader: The user's loader.
    """

    loader: Any
    worker_init_fn: Any
    _copy: Any  # the copy that is read, if its workers persist; else None

    def __init__(self, loader: Any, *, shared: bool) -> None:
        super().__init__(loader)
        self.loader = loader
        self._shared = shared
        self._copy = None
        self._init_fn: tuple[Any] | None = None  # what was set on this loader, and not on the user's

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name.startswith("_") or any(
            name in vars(base).get("__annotations__", {}) for base in type(self).__mro__
        )
        if is_own:
            super().__setattr__(name, value)
        else:
            setattr(self.loader, name, value)

    # The attribute by which Lightning ends workers that persist: those of the copy, where that is what is read.
    _iterator = iterator_of(lambda self: self.loader if self._copy is None else self._copy)

    @property  # type: ignore[no-redef]  # declared above, so that setting it calls the setter
    def worker_init_fn(self) -> Any:
        """Run in every worker process. Lightning sets it, to seed workers by the rank (`_auto_add_worker_init_fn`)."""
        if self._init_fn is not None:
            return self._init_fn[0]
        function = self.loader.worker_init_fn
        if self._shared and function is not None:
            return _as_on_rank_0(function)
        return function

    @worker_init_fn.setter
    def worker_init_fn(self, function: Callable[..., None] | None) -> None:
        if self._shared and function is not None:
            function = _as_on_rank_0(function)
        self._init_fn = (function,)


def user_loader(loader: Any) -> Any:
    """Return the user's loader, unwrapped: Lightning writes ours into a user's `CombinedLoader`."""
    return loader.loader if isinstance(loader, LoaderWrapper) else loader


def loader_samplers(loader: object) -> list[Any]:
    """Return a loader's samplers, each once, in an order that is the same in every run."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    candidates = (batch_sampler, getattr(batch_sampler, "sampler", None), getattr(loader, "sampler", None))
    samplers: list[Any] = []
    for sampler in candidates:
        is_known = any(sampler is known for known in samplers)  # users may define `==`
        if sampler is not None and not is_known:
            samplers.append(sampler)
    return samplers


def draws_order(loader: object) -> bool:
    """Return whether a loader may draw its order from the random numbers of the process.

    A sampler that is neither sequential, nor seeded, nor has a generator of its own may: torch's random ones, and a
    user's. A stream has no order beside that in which it is read.
    """
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return False
    for sampler in loader_samplers(loader):
        is_fixed = type(sampler) is BatchSampler or isinstance(sampler, (SequentialSampler, DistributedSampler))
        if not is_fixed and getattr(sampler, "generator", None) is None:
            return True
    return False


def loader_parts(loader: object) -> list[Any]:
    """Return the loader, its samplers, and its dataset, which may be None."""
    return [loader, *loader_samplers(loader), getattr(loader, "dataset", None)]


def is_sharded(loader: object) -> bool:
    """Return whether the user declares that every rank reads its own part of the data."""
    return any(getattr(part, "sharded_by_rank", False) for part in loader_parts(loader))


def distributed_sampler(loader: object) -> DistributedSampler[Any] | None:
    """Return the sampler that splits a loader's data over ranks, if any."""
    for sampler in loader_samplers(loader):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            return sampler
    return None


def last_batch_size(loader: Any) -> int | None:
    """Return the number of samples in a loader's last batch of an epoch, where all are known; None else."""
    # Its own: a batch sampler of the user's has a sampler of its own, and may drop what is left.
    size = getattr(loader, "batch_size", None)
    sampler = getattr(loader, "sampler", None)
    if (
        not isinstance(size, int)
        or isinstance(getattr(loader, "dataset", None), IterableDataset)
        or not isinstance(sampler, Sized)
    ):
        return None
    if getattr(loader, "drop_last", False):
        return size
    remaining = len(sampler) % size
    return remaining if remaining > 0 else size


def loader_batch_size(loader: object) -> int | None:
    """Return the samples in a batch of a loader, if it tells."""
    for part in loader_parts(loader):
        size = getattr(part, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


def length_of(loader: Any) -> float:
    """Return the length of a loader; infinity if it tells none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # as in Lightning's `sized_len`
        return math.inf


def _as_on_rank_0(worker_init_fn: Callable[..., None]) -> Callable[..., None]:
    """Return a function that seeds a worker as rank 0's is seeded, where it takes the rank as `rank`."""
    try:
        parameters = inspect.signature(worker_init_fn).parameters
    except (TypeError, ValueError):  # a function in C may have no signature
        return worker_init_fn
    if "rank" in parameters:
        return functools.partial(worker_init_fn, rank=0)
    return worker_init_fn
