"""Training loaders of every kind, each of so many samples in batches of so many."""

from __future__ import annotations

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
    """Has constructor arguments and an iterator of its own: it yields what is made of its batches."""

    def __init__(self, size: int, batch: int, change: Callable[[list[Any]], Iterable[Any]] = list) -> None:
        super().__init__(range(size), batch, shuffle=True)
        self.change = change

    def __iter__(self) -> Any:
        return iter(self.change(list(super().__iter__())))


class Remembering:
    """A sampler whose order comes from a state of its own: the number of passes begun."""

    def __init__(self, size: int) -> None:
        self.size, self.passes = size, 0

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
        self.size, self.generator = size, generator

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        order = torch.randperm(self.size, generator=self.generator).tolist()
        return iter(order if info is None else order[info.id :: info.num_workers])


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
    other, part = torch.randperm(len(samples)), np.random.beta(0.4, 0.4)  # noqa: NPY002  # global on purpose
    return {
        "x": part * padded + (1 - part) * padded[other],
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
    return [one.tolist() if isinstance(one, Tensor) else one for one in batch]


def seed(value: int) -> None:
    for function in (torch.manual_seed, random.seed, np.random.seed):
        function(value)


def loader(data: Any, batch_size: int = 1, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(data) if isinstance(data, int) else data, batch_size, **options)


def ranks_own() -> torch.Generator:
    """Return a generator of another seed on each rank, whose own random states differ."""
    return torch.Generator().manual_seed(torch.initial_seed() % 1000)


Order = Callable[[int, int], Any]


def of_indices(batches: Callable[[int, int], Iterable[Any]]) -> Order:
    return lambda size, batch: loader(size, batch_sampler=Sized(partial(batches, size, batch), -(-size // batch)))


def drawn(size: int, batch: int) -> Iterator[list[int]]:
    """Draw from every global generator anew for every batch."""
    for start in range(0, size, batch):
        own = int(torch.randint(size, ())) + random.randrange(size) + int(np.random.rand() * size)  # noqa: NPY002  # as above
        yield [(own + index) % size for index in range(min(batch, size - start))]


ORDERS: dict[str, Order] = {
    "sequential": loader,
    "shuffle": partial(loader, shuffle=True),
    "drop_last": partial(loader, shuffle=True, drop_last=True),
    "generator": lambda size, batch: loader(size, batch, shuffle=True, generator=ranks_own()),
    "replacement": lambda size, batch: loader(size, batch, sampler=WeightedRandomSampler(range(1, 1 + size), 40)),
    "epochs": lambda size, batch: loader(size, batch, sampler=DistributedSampler(range(size), 1, 0, shuffle=True)),
    "lazy": of_indices(drawn),
    "a sampler with a state": lambda size, batch: loader(size, batch, sampler=Remembering(size)),
    "stream": lambda size, batch: loader(Stream(size), batch),
    "own stream": lambda size, batch: loader(Stream(size, torch.Generator()), batch),
    "list": lambda size, batch: Sized(lambda: torch.arange(size).split(batch), -(-size // batch)),
    "unsized": lambda size, batch: Unsized(lambda: torch.randperm(size).split(batch)),
    "logged": lambda size, batch: loader(Logged(size), batch),
    "subclass": lambda size, batch: Changing(size, batch, lambda batches: [2 * each for each in batches]),
}
"""Loaders whose order is that of one process, also in a resumed run."""

WHOLE: dict[str, Callable[..., Any]] = {
    "augmented": lambda size, batch, **workers: loader(
        Augmented(size), batch, shuffle=True, collate_fn=pad_and_mix, **workers
    ),
    "augmented stream": lambda size, batch, **workers: loader(
        AugmentedStream(size), batch, collate_fn=pad_and_mix, **workers
    ),
}
"""Loaders whose samples are those of one process where batches are read whole."""


FORKED: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
WORKERS: dict[str, Order] = {
    "workers": partial(loader, shuffle=True, **FORKED),
    "persistent workers": lambda size, batch: loader(
        size, batch, shuffle=True, generator=torch.Generator(), persistent_workers=True, **FORKED
    ),
    **{f"{name}, workers": partial(make, **FORKED) for name, make in WHOLE.items()},
}
"""Loaders with worker processes."""

ODD: dict[str, Order] = {
    "indices as tensors": of_indices(lambda size, batch: torch.randperm(size).split(batch)),
    "indices without length": lambda size, batch: loader(
        size, batch_sampler=Unsized(lambda: map(iter, torch.randperm(size).split(batch)))
    ),
    "batches without batching": lambda size, batch: loader(list(torch.arange(size).split(batch)), batch_size=None),
    "graphs": lambda size, batch: loader(size, batch, shuffle=True, collate_fn=Graphs),
}
"""More loaders, which no test resumes."""
