"""Training loaders of every kind: `ORDERS`, `WHOLE`, `WORKERS` and `ODD` have what makes one, by its name.

Each is a function of the number of samples and of the size of a batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    WeightedRandomSampler,
    get_worker_info,
)

__all__ = ["ODD", "ORDERS", "WHOLE", "WORKERS", "Augmented", "Graphs", "Logged", "Stream", "Unsized", "listed", "seed"]


class Unsized:
    """An iterable of batches that hides its length: Lightning then fetches one batch ahead."""

    def __init__(self, batches: Callable[[], Iterable[Any]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches())


class Sized(Unsized):
    """Batches, or the indices of a batch sampler: without base class, with constructor arguments of its own."""

    def __init__(self, batches: Callable[[], Iterable[Any]], length: int) -> None:
        super().__init__(batches)
        self.length = length

    def __len__(self) -> int:
        return self.length


class Changing(DataLoader[Any]):
    """A subclass of `DataLoader` with constructor arguments and an iterator of its own, which changes its batches."""

    def __init__(self, size: int, batch: int, change: Callable[[list[Any]], Iterable[Any]] = list) -> None:
        super().__init__(range(size), batch, shuffle=True)
        self.change = change

    def __iter__(self) -> Any:
        return iter(self.change(list(super().__iter__())))


class Remembering:
    """A sampler whose order comes from a state of its own: the number of passes begun."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.passes = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(random.Random(self.passes).sample(range(self.size), self.size))

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


class Stream(IterableDataset[Any]):
    """As many integers as asked for, in an order of the global random state or of a generator of its own."""

    def __init__(self, size: int, generator: torch.Generator | None = None) -> None:
        self.size = size
        self.generator = generator

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.size, generator=self.generator).tolist()
        worker = get_worker_info()
        if worker is None:
            return iter(order)
        return iter(order[worker.id :: worker.num_workers])


def augmented(index: int) -> tuple[int, Tensor]:
    """Return a sequence whose length depends on its index, with noise from every global generator."""
    noise = torch.randn(1 + index % 5) + random.random() + np.random.random()  # noqa: NPY002  # global on purpose
    return index, noise


class AugmentedStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        return map(augmented, super().__iter__())


class Augmented(Dataset[Any]):
    def __init__(self, size: int = 22) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return augmented(index)


class Logged(Augmented):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.loaded: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


def pad_and_mix(samples: list[tuple[int, Tensor]]) -> dict[str, Any]:
    """Pad to the longest of the batch, and add to every sample a part of another one, as mixup does."""
    padded = torch.nn.utils.rnn.pad_sequence([noise for _, noise in samples], batch_first=True)
    order = torch.randperm(len(samples))
    part = np.random.beta(0.4, 0.4)  # noqa: NPY002  # global on purpose
    return {
        "x": part * padded + (1 - part) * padded[order],
        "index": torch.tensor([index for index, _ in samples]),
        "name": [f"sample {index}" for index, _ in samples],
    }


class Graphs:
    """What a graph library collates: it has no rows, and is moved as one."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = list(samples)

    def to(self, device: Any) -> Graphs:
        return self


def listed(batch: Any) -> list[Any]:
    """Return the samples of a batch, as values that are equal where all bits are."""
    if isinstance(batch, Graphs):
        batch = batch.samples
    if isinstance(batch, dict):
        return list(zip(*map(listed, batch.values()), strict=True))
    return [sample.tolist() if isinstance(sample, Tensor) else sample for sample in batch]


def seed(value: int) -> None:
    """Seed every global generator."""
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002  # the global generator is what is seeded


MakeLoader = Callable[[int, int], Any]
"""`(number of samples, size of a batch) -> loader`."""


def make_loader(data: Any, batch_size: int | None = 1, **options: Any) -> DataLoader[Any]:
    """Return a loader of a dataset, or of so many integers."""
    if isinstance(data, int):
        data = torch.arange(data)
    return DataLoader(data, batch_size, **options)


def count_batches(size: int, batch: int) -> int:
    return math.ceil(size / batch)


# Loaders of datasets with a length, by the order of their samples.


def make_loader_with_generator(size: int, batch: int) -> DataLoader[Any]:
    """Return a loader that shuffles by a generator of its own, of another seed on each rank."""
    generator = torch.Generator().manual_seed(torch.initial_seed() % 1000)
    return make_loader(size, batch, shuffle=True, generator=generator)


def make_loader_with_replacement(size: int, batch: int) -> DataLoader[Any]:
    return make_loader(size, batch, sampler=WeightedRandomSampler(range(1, 1 + size), 40))


def make_loader_of_epochs(size: int, batch: int) -> DataLoader[Any]:
    """Return a loader whose sampler shuffles by the number of the epoch."""
    return make_loader(size, batch, sampler=DistributedSampler(range(size), 1, 0, shuffle=True))


def make_loader_with_state(size: int, batch: int) -> DataLoader[Any]:
    return make_loader(size, batch, sampler=Remembering(size))


def make_logged_loader(size: int, batch: int) -> DataLoader[Any]:
    return make_loader(Logged(size), batch)


def make_changing_loader(size: int, batch: int) -> DataLoader[Any]:
    return Changing(size, batch, lambda batches: [2 * samples for samples in batches])


# Loaders with batch samplers.


def make_loader_of_indices(batches: Callable[[int, int], Iterable[Any]]) -> MakeLoader:
    """Return what makes a loader with a batch sampler, which yields these batches of indices."""

    def make(size: int, batch: int) -> DataLoader[Any]:
        return make_loader(size, batch_sampler=Sized(partial(batches, size, batch), count_batches(size, batch)))

    return make


def draw_indices(size: int, batch: int) -> Iterator[list[int]]:
    """Draw from every global generator anew for every batch."""
    for start in range(0, size, batch):
        first = int(torch.randint(size, ())) + random.randrange(size) + int(np.random.rand() * size)  # noqa: NPY002  # as above
        yield [(first + index) % size for index in range(min(batch, size - start))]


def shuffle_indices(size: int, batch: int) -> Iterable[Tensor]:
    """Return batches of indices as tensors."""
    return torch.randperm(size).split(batch)


def make_loader_of_unsized_indices(size: int, batch: int) -> DataLoader[Any]:
    """Return a loader whose batch sampler has no length, and yields iterators of indices."""
    return make_loader(size, batch_sampler=Unsized(lambda: map(iter, shuffle_indices(size, batch))))


# Streams, and iterables of batches.


def make_stream_loader(size: int, batch: int) -> DataLoader[Any]:
    return make_loader(Stream(size), batch)


def make_loader_of_stream_with_generator(size: int, batch: int) -> DataLoader[Any]:
    return make_loader(Stream(size, torch.Generator()), batch)


def make_list(size: int, batch: int) -> Sized:
    return Sized(lambda: torch.arange(size).split(batch), count_batches(size, batch))


def make_unsized(size: int, batch: int) -> Unsized:
    return Unsized(lambda: torch.randperm(size).split(batch))


def make_loader_of_batches(size: int, batch: int) -> DataLoader[Any]:
    """Return a loader of a dataset whose samples are batches."""
    return make_loader(list(torch.arange(size).split(batch)), batch_size=None)


# Loaders whose samples or batches draw random numbers, and others.


def make_augmented_loader(size: int, batch: int, **workers: Any) -> DataLoader[Any]:
    return make_loader(Augmented(size), batch, shuffle=True, collate_fn=pad_and_mix, **workers)


def make_augmented_stream_loader(size: int, batch: int, **workers: Any) -> DataLoader[Any]:
    return make_loader(AugmentedStream(size), batch, collate_fn=pad_and_mix, **workers)


FORKED: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}


def make_loader_with_persistent_workers(size: int, batch: int) -> DataLoader[Any]:
    generator = torch.Generator()
    return make_loader(size, batch, shuffle=True, generator=generator, persistent_workers=True, **FORKED)


ORDERS: dict[str, MakeLoader] = {
    "sequential": make_loader,
    "shuffle": partial(make_loader, shuffle=True),
    "drop_last": partial(make_loader, shuffle=True, drop_last=True),
    "generator": make_loader_with_generator,
    "replacement": make_loader_with_replacement,
    "epochs": make_loader_of_epochs,
    "lazy": make_loader_of_indices(draw_indices),
    "a sampler with a state": make_loader_with_state,
    "stream": make_stream_loader,
    "own stream": make_loader_of_stream_with_generator,
    "list": make_list,
    "unsized": make_unsized,
    "logged": make_logged_loader,
    "subclass": make_changing_loader,
}
"""Loaders whose order is that of one process, also in a resumed run."""

WHOLE: dict[str, Callable[..., Any]] = {
    "augmented": make_augmented_loader,
    "augmented stream": make_augmented_stream_loader,
}
"""Loaders whose samples are those of one process where batches are read whole."""

WORKERS: dict[str, MakeLoader] = {
    "workers": partial(make_loader, shuffle=True, **FORKED),
    "persistent workers": make_loader_with_persistent_workers,
    "augmented, workers": partial(make_augmented_loader, **FORKED),
    "augmented stream, workers": partial(make_augmented_stream_loader, **FORKED),
}
"""Loaders with worker processes."""

ODD: dict[str, MakeLoader] = {
    "indices as tensors": make_loader_of_indices(shuffle_indices),
    "indices without length": make_loader_of_unsized_indices,
    "batches without batching": make_loader_of_batches,
    "graphs": partial(make_loader, shuffle=True, collate_fn=Graphs),
}
"""More loaders, which no test resumes."""
