"""The samples: what each batch is made of, and what an epoch reads.

Loaders load in this process, so that the samples of a batch are known by the batch itself.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from lightning_gradavg.lightning_internals import fetched_here
from lightning_gradavg.random_state import random_state, restore_random_state, same_random_state
from lightning_gradavg.tree import batch_samples, bits, is_array, leaves, mapped

__all__ = ["Loading", "Part", "Read", "first_loader", "is_part", "seed"]

_MOST_BATCHES, _MOST_SAMPLES = 20_000, 5_000  # of an epoch that is read without training; samples are loaded
_KEPT_BATCHES = 512  # that are read ahead


def _digest(value: Any) -> bytes | None:
    """Return what is equal for equal data; None where it is not known."""
    made = hashlib.blake2b(digest_size=12)
    try:
        for place, leaf in leaves(value):
            array = leaf.tobytes() if is_array(leaf) and not isinstance(leaf, Tensor) else None
            made.update(f"{place}{getattr(leaf, 'shape', '')};".encode())
            made.update(bits(leaf) if isinstance(leaf, Tensor) else array or pickle.dumps(leaf))
    except Exception:  # noqa: BLE001  # pickle raises nearly anything
        return None
    return made.digest()


def _packed(value: Any) -> bytes | None:
    """Return a copy of a value, as it is now; None where it cannot be copied."""

    def owned(leaf: Any) -> Any:
        return leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf  # a view would drag its storage along

    try:
        return pickle.dumps(mapped(value, owned))
    except Exception:  # noqa: BLE001  # likewise
        return None


@dataclass(frozen=True)
class Part:
    """A batch of one loader."""

    size: int | None = None  # samples
    samples: bytes | None = None  # as `collate_fn` was given them
    batch: bytes | None = None  # as the loader made it, where that is needed
    why: str = "its batches are made by no collate_fn"  # there are no samples
    ids: Sequence[Any] = ()  # of the samples: the index in the dataset, and a digest
    keys: Sequence[tuple[int, ...]] = ()  # of the samples, on one process


def is_part(value: Any) -> bool:
    """Return whether a value is a `Part`."""
    return isinstance(value, Part)


def first_loader(given: Any) -> Any:
    """Return the first loader in what `fit` takes, in which a list may be a loader; None without any."""
    if isinstance(given, (dict, tuple)):
        given = list(given.values() if isinstance(given, dict) else given)
    elif not (isinstance(given, list) and any(isinstance(each, DataLoader) for each in given)):
        return given
    return next((first_loader(each) for each in given), None)


class Loading:
    """Lets the loaders of a process load in it, and remembers what the batches are made of.

    Attributes:
        made: The batches that were made and not yet trained on, by their identity, and what they are made of.
        skims: Whether batches are only counted: a map-style loader yields indices, and loads nothing.
    """

    def __init__(self) -> None:
        self.made: dict[int, tuple[Any, Part]] = {}
        self.skims = False

    def watching(self) -> AbstractContextManager[None]:
        """Watch every `DataLoader` within."""
        return fetched_here(self._watch)

    def _watch(self, fetcher: Any) -> None:
        has_indices = not isinstance(fetcher.dataset, IterableDataset)
        if has_indices:
            fetcher.dataset = _Seeded(fetcher.dataset)
        if not fetcher.auto_collation:
            return
        fetch, collate, indices = fetcher.fetch, fetcher.collate_fn, list[Any]()
        inner = getattr(collate, "collate", None)  # of a loader that collates each rank's part of a list of samples
        whole = inner or collate

        def collated(samples: Any) -> Any:
            ids = tuple(zip(indices or repeat(None), map(_digest, samples), strict=False))
            packed, before = _packed(list(samples)), random_state()
            batch = whole(samples)
            why = "" if packed is not None else "a sample cannot be copied"
            why = why if same_random_state(before, random_state()) else "collate_fn draws random numbers"
            return self.note(batch, Part(len(samples), None if why else packed, why=why, ids=ids))

        def fetched(index: Any) -> Any:
            if has_indices:
                indices[:] = list(index)
            if not (self.skims and has_indices):
                return fetch(index)
            batch = torch.tensor(indices) if all(isinstance(one, int) for one in indices) else list(indices)
            return self.note(batch, Part(len(indices), ids=tuple((one, None) for one in indices)))

        fetcher.collate_fn = replace(collate, collate=collated) if inner else collated
        fetcher.fetch = fetched

    def note(self, batch: Any, part: Part) -> Any:
        """Remember what a batch is made of, and return it."""
        self.made[id(batch)] = (batch, part)
        for oldest in list(islice(self.made, max(0, len(self.made) - _KEPT_BATCHES))):
            del self.made[oldest]
        return batch

    def parts(self, batch: Any) -> Any:
        """Return a `Part` for a batch, or a structure of them for the batches of several loaders."""

        def is_batch(value: Any) -> bool:
            return id(value) in self.made

        if any(is_batch(leaf) for _, leaf in leaves(batch, is_leaf=is_batch)):
            return mapped(batch, self._part, is_leaf=is_batch)
        return self._part(batch)

    def _part(self, batch: Any) -> Part:
        _, part = self.made.pop(id(batch), (batch, Part()))
        if not part.why:
            return part
        with suppress(ValueError):
            part = replace(part, size=part.size or batch_samples(batch))
        packed = None if self.skims else _packed(batch)
        return replace(part, batch=packed, ids=part.ids or tuple(_row_ids(batch, part.size)))

    def read(self, given: Any) -> Read:
        """Read the first loader of a run once, without training."""
        loader = first_loader(getattr(given, "iterables", given))
        dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "sampler", None)
        streams = isinstance(dataset, IterableDataset)
        indexed = hasattr(dataset, "__len__") and not streams
        own = type(getattr(loader, "batch_sampler", None)).__module__.partition(".")[0]
        plain = isinstance(sampler, (SequentialSampler, RandomSampler, DistributedSampler, type(None)))
        own_choice = not plain or own not in ("torch", "lightning_gradavg", "builtins")
        found: list[Any] = []
        self.skims, self.made, loaded = True, {}, 0
        try:
            for batch in islice(loader, _MOST_BATCHES):
                (_, part), *_ = leaves(self.parts(batch), is_leaf=is_part)
                found.append(part.ids)
                loaded += sum(index is None for index, _ in found[-1])
                if loaded >= _MOST_SAMPLES:
                    break
        except Exception:  # noqa: BLE001  # a loader that can be read once only
            found = []
        finally:
            self.skims = False
        return Read(
            tuple(found),
            _probed(dataset) if indexed and hasattr(dataset, "__getitem__") else (),
            0 < len(found) < _MOST_BATCHES and loaded < _MOST_SAMPLES,
            isinstance(sampler, RandomSampler) or bool(getattr(sampler, "shuffle", False)),
            indexed and (own_choice or bool(getattr(sampler, "replacement", False))),
            streams,
            isinstance(sampler, DistributedSampler),
        )


def _row_ids(batch: Any, size: int | None) -> Iterator[tuple[None, bytes | None]]:
    """Yield a digest of each row of a batch, or of the batch where its rows are not known."""
    if size is None:
        yield None, _digest(batch)
    for index in range(size or 0):
        yield None, _digest([leaf[index] for _, leaf in leaves(batch) if is_array(leaf) and leaf.shape[:1] == (size,)])


class _Seeded:
    """A dataset whose random numbers depend on the index alone, so that a sample is the same wherever it is read."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        state = random_state()
        seed(f"sample {index}")
        try:
            return self._dataset[index]
        finally:
            restore_random_state(state)


def seed(text: str) -> None:
    """Seed the generators of torch, Python and NumPy by a text."""
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def _probed(dataset: Any) -> tuple[Any, ...]:
    """Return the length of a dataset, and digests of its first sample and of one in the middle."""
    with suppress(Exception):
        size, seeded = len(dataset), _Seeded(dataset)
        return (size, *(_digest(seeded[place]) for place in range(0, size, size // 2 or 1)))
    return ()


@dataclass(frozen=True)
class Read:
    """What one pass over the training data reads on this rank."""

    batches: Sequence[Sequence[Any]] = ()  # the ids of each
    probes: Sequence[Any] = ()  # the length of a map-style dataset, and digests of some of its samples
    complete: bool = False
    shuffles: bool = False
    chooses: bool = False  # a sampler of the user's own, which may leave out or repeat samples
    streams: bool = False
    dealt: bool = False  # by a DistributedSampler
