"""Ranks simulated one after another in one process: what they would exchange is recorded, then replayed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_gradavg.batches.chunks import Chunk, Split
from lightning_gradavg.batches.loader import SplitLoader
from lightning_gradavg.ranks import World


@dataclass
class Rank:
    """One rank: how it splits batches, and with whom."""

    split: Split
    world: Any = field(default_factory=World)

    def load(self, loader: Any) -> SplitLoader:
        return SplitLoader(loader, self.split, self.world)


def in_one_world(loader: Any, **options: Any) -> SplitLoader:
    """Return a loader split for one rank that nobody compares with others."""
    return Rank(Split(**options)).load(loader)


Body = Callable[[Rank], Any]


class Taken(NamedTuple):
    """One micro-batch in training."""

    batch: Any
    chunk: Chunk


class _Exchange:
    """Runs a body on every rank: once to record all comparisons, and again where one of them fails."""

    def __init__(self, world_size: int, options: dict[str, Any], seeds: Sequence[int]) -> None:
        self.world_size, self.options, self.seeds = world_size, options, seeds
        self.sent: list[Any] = []
        self.compared: list[list[int]] = [[] for _ in range(world_size)]

    def rank(self, rank: int, verdicts: Sequence[bool] | None) -> Rank:
        received = iter(self.sent)
        count = iter(range(10**9))

        def from_first(value: Any) -> Any:
            if rank == 0:
                if verdicts is None:
                    self.sent.append(value)
                return value
            return next(received)

        def gather_integers(row: list[int]) -> list[list[int]]:
            if verdicts is not None:
                return [row, row if verdicts[next(count)] else []]
            self.compared[rank].append(row[0])
            return [row, row]

        world = SimpleNamespace(rank=rank, size=self.world_size, from_first=from_first, gather_integers=gather_integers)
        return Rank(Split(rank, self.world_size, **self.options), world)

    def run(self, body: Body, verdicts: Sequence[bool] | None = None) -> list[Any]:
        results = []
        for rank in range(self.world_size):
            torch.manual_seed(self.seeds[rank])
            try:
                results.append(body(self.rank(rank, verdicts)))
            except Exception as error:  # noqa: BLE001  # what it should not raise is raised below
                results.append(error)
        return results


def on_ranks(
    world_size: int,
    body: Body,
    seeds: Sequence[int] | None = None,
    raises: tuple[type[Exception], ...] = (),
    **options: Any,
) -> list[Any]:
    """Return what `body(rank)` returns or raises on every rank, each with its own random state.

    The test fails where the ranks would not come to every comparison together: real ones would wait forever.
    """
    exchange = _Exchange(world_size, options, seeds or [7 + rank for rank in range(world_size)])
    results = exchange.run(body)
    verdicts = []
    for met in range(max(map(len, exchange.compared))):
        values = {compared[met] if met < len(compared) else None for compared in exchange.compared}
        assert None not in values, f"only some ranks come to comparison {met}"
        verdicts.append(len(values) == 1)
        if not verdicts[-1]:
            results = exchange.run(body, verdicts)
            break
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, (RuntimeError, ValueError, *raises)):
            raise result
    return results


def take_all(loader: SplitLoader) -> list[Taken]:
    """Return one epoch of micro-batches."""
    return [Taken(batch, behind.chunk) for batch, behind in loader.begin().items]


def epochs(make: Callable[[], Any], count: int = 1) -> Body:
    """Return a body that reads a new loader for some epochs."""

    def body(rank: Rank) -> list[list[Taken]]:
        loader = rank.load(make())
        return [take_all(loader) for _ in range(count)]

    return body


def global_batches(ranks: Sequence[Sequence[Taken]]) -> list[list[Any]]:
    """Return the samples of every global batch, put together from the ranks' samples in order."""
    batches: list[list[Any]] = []
    per_rank = [iter(taken) for taken in ranks]
    while True:
        first = [next(taken, None) for taken in per_rank]
        if first[0] is None:
            assert not any(first)
            return batches
        whole: list[Any] = []
        for taken in first:
            assert taken is not None
            samples = list(taken.batch.tolist() if isinstance(taken.batch, torch.Tensor) else taken.batch)
            assert len(samples) == taken.chunk.stop - taken.chunk.start
            whole += samples if not taken.chunk.stand_in else []
        batches.append(whole)


def plain(loader: DataLoader[Any], seed: int = 7) -> list[list[Any]]:
    """Return the batches of one epoch of one process."""
    torch.manual_seed(seed)
    return [batch.tolist() for batch in loader]


class Augmented(Dataset[Any]):
    """Sequences of different length, with noise from every global generator."""

    def __init__(self, size: int = 22) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        noise = torch.randn(1 + index % 5) + random.random() + np.random.random()  # noqa: NPY002  # global on purpose
        return index, noise


def pad_and_mix(samples: list[tuple[int, Tensor]]) -> dict[str, Any]:
    """Pad to the longest of the batch, and add to every sample a part of another one, as mixup does."""
    padded = torch.nn.utils.rnn.pad_sequence([noise for _, noise in samples], batch_first=True)
    other, part = torch.randperm(len(samples)), np.random.beta(0.4, 0.4)  # noqa: NPY002  # global on purpose
    return {
        "x": part * padded + (1 - part) * padded[other],
        "index": torch.tensor([index for index, _ in samples]),
        "name": [f"sample {index}" for index, _ in samples],
    }


class Logged(Dataset[int]):
    """Remembers what was loaded from it."""

    def __init__(self, size: int = 24) -> None:
        self.size = size
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Stream(IterableDataset[int]):
    """As many integers as asked for, in an order of the global random state or of a generator of its own."""

    def __init__(self, size: int, generator: torch.Generator | None = None) -> None:
        self.size, self.generator = size, generator

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        order = torch.randperm(self.size, generator=self.generator).tolist()
        return iter(order if info is None else order[info.id :: info.num_workers])


class Unsized:
    """An iterable of batches that hides its length: Lightning then fetches one batch ahead."""

    def __init__(self, batches: Callable[[], Iterable[Any]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches())


class Graphs:
    """What a graph library collates: it has no rows, and is moved as one."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = list(samples)

    def to(self, device: Any) -> Graphs:
        return self
