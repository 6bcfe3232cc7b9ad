"""Resume of split loaders: the samples that remain, in their order, at any other world size."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities import CombinedLoader
from lockstep import Taken, global_batches, on_ranks
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

from lightning_gradavg.loaders import BatchSplitter

Make = Callable[[], list[Any]]


def loader(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(data) if isinstance(data, int) else data, **options)


class Lazy:
    """A batch sampler that draws anew for every batch, from a global generator."""

    def __init__(self, size: int, batch_size: int, source: str = "torch") -> None:
        self.size, self.batch_size, self.source = size, batch_size, source

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            if self.source == "torch":
                yield torch.randint(self.size, (self.batch_size,)).tolist()
            elif self.source == "random":
                yield [random.randrange(self.size) for _ in range(self.batch_size)]
            else:
                yield np.random.randint(self.size, size=self.batch_size).tolist()  # noqa: NPY002  # the global generator


class Eager(Lazy):
    """A batch sampler that draws when its iterator is made."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([part.tolist() for part in torch.randperm(self.size).split(self.batch_size)])


class Stream(IterableDataset[int]):
    def __init__(self, size: int, generator: torch.Generator | None = None) -> None:
        self.size, self.generator = size, generator

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size, generator=self.generator).tolist())


class Unsized:
    """An iterable of shuffled batches that hides its length: Lightning then fetches one batch ahead."""

    def __init__(self, size: int, batch_size: int) -> None:
        self.size, self.batch_size = size, batch_size

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(self.size).split(self.batch_size))


ORDERS: dict[str, Callable[[int, int], Any]] = {
    "sequential": lambda size, batch: loader(size, batch_size=batch),
    "shuffle": lambda size, batch: loader(size, batch_size=batch, shuffle=True),
    "drop_last": lambda size, batch: loader(size, batch_size=batch, shuffle=True, drop_last=True),
    "generator": lambda size, batch: loader(
        size, batch_size=batch, shuffle=True, generator=torch.Generator().manual_seed(size)
    ),
    "replacement": lambda size, batch: loader(
        size,
        batch_size=batch,
        sampler=RandomSampler(range(size), replacement=True, num_samples=40, generator=torch.Generator()),
    ),
    "weighted": lambda size, batch: loader(
        size, batch_size=batch, sampler=WeightedRandomSampler([1.0 + item for item in range(size)], size)
    ),
    "batches": lambda size, batch: loader(size, batch_sampler=BatchSampler(RandomSampler(range(size)), batch, False)),
    "lazy": lambda size, batch: loader(size, batch_sampler=Lazy(size, batch)),
    "lazy random": lambda size, batch: loader(size, batch_sampler=Lazy(size, batch, "random")),
    "lazy numpy": lambda size, batch: loader(size, batch_sampler=Lazy(size, batch, "numpy")),
    "eager": lambda size, batch: loader(size, batch_sampler=Eager(size, batch)),
    "stream": lambda size, batch: loader(Stream(size), batch_size=batch),
    "own stream": lambda size, batch: loader(Stream(size, torch.Generator()), batch_size=batch),
    "list": lambda size, batch: _batches(size, batch),
    "unsized": Unsized,
}


def _batches(size: int, batch_size: int) -> Any:
    class Batches(list[Any]):
        pass

    batches = Batches(torch.arange(size).split(batch_size))
    vars(batches)["batch_size"] = batch_size
    return batches


class Row(NamedTuple):
    """One step: for every loader what is in training, or None."""

    taken: list[Taken | None]


class Fit:
    """What Lightning and a strategy do with the loaders of one rank.

    Args:
        splitter: The rank's.
        make: Returns the user's loaders.
        states: What `save` returned in another run.
        draws: Whether the model draws random numbers, others on every rank.
    """

    def __init__(
        self,
        splitter: BatchSplitter,
        make: Make,
        states: list[Any] | None = None,
        *,
        mode: Any = "max_size_cycle",
        limit: int | None = None,
        window: int = 1,
        draws: bool = False,
    ) -> None:
        self.splitter, self.draws, self.last = splitter, draws, False
        splitter.window_batches = window
        splitter.epoch_ended = lambda: self.last
        if states is not None:
            splitter.resume(states)
        self.loaders = []
        for user_loader in make():
            iter(user_loader)  # as Lightning does, to see whether it can
            self.loaders.append(splitter.wrap(user_loader))
        self.combined = CombinedLoader(self.loaders, mode)
        if limit is not None:
            self.combined.limits = limit * splitter.micro_batches
        self.fetcher = _PrefetchDataFetcher()
        self.fetcher.setup(self.combined)
        iter(self.fetcher)
        self.fetcher.fetched += splitter.batches_taken * splitter.micro_batches
        torch.rand(3)  # as the validation loaders do while they are set up
        splitter.end_set_up()
        self.begun = True

    def rows(self, stop: int | None = None) -> Iterator[Row]:
        """Train for the rest of an epoch, or for `stop` micro-batches of it."""
        if not self.begun:
            iter(self.fetcher)
        self.begun = False
        count = 0
        while not self.fetcher.done and count != stop:
            try:
                batch, _, _ = next(self.fetcher)
            except StopIteration:  # of two loaders, one with a length and one without, the length may be too large
                self.last = True
                return
            self.last = self.fetcher.done
            chunks = self.splitter.take_each(self.combined)
            if self.draws:
                torch.rand(1 + self.splitter.split.rank), random.random(), np.random.random()  # noqa: NPY002  # likewise
            yield Row(
                [None if chunk is None else Taken(part, chunk) for part, chunk in zip(batch, chunks, strict=True)]
            )
            count += 1

    def epoch(self, stop: int | None = None) -> list[Row]:
        return list(self.rows(stop))

    def save(self) -> list[Any]:
        """Return the states as a checkpoint brings them back."""
        file = io.BytesIO()
        torch.save(self.combined._state_dicts(), file)
        file.seek(0)
        states: list[Any] = torch.load(file, weights_only=True)
        return states


class Saved(NamedTuple):
    states: list[Any]
    batches: int
    """Loader batches of the epoch that the states count."""
    epochs: list[list[Row]]
    """What the run trained on that was saved and not interrupted."""


def saved(splitter: BatchSplitter, make: Make, *, epochs: int, stop: int, **options: Any) -> Saved:
    """Train `epochs` whole epochs, `stop` micro-batches of the next, save, and go on to the end of one more."""
    fit = Fit(splitter, make, **options)
    whole = [fit.epoch() for _ in range(epochs)]
    begun = fit.epoch(stop) if stop else []
    states, batches = fit.save(), splitter.batches_taken
    if begun and fit.fetcher.done:
        return Saved(states, -1, [*whole, begun, fit.epoch()])
    if begun:
        fit.begun = True
    return Saved(states, batches if begun else 0, [*whole, begun + fit.epoch(), fit.epoch()])


def samples(ranks: list[list[Row]], index: int = 0) -> list[list[Any]]:
    """Return the samples of the global batches of one loader."""
    return global_batches([[each for row in rows if (each := row.taken[index]) is not None] for rows in ranks])


def remaining(runs: list[Saved], epochs: int, index: int = 0) -> list[list[list[Any]]]:
    """Return what an uninterrupted run trained on after the place that it saved, epoch by epoch."""
    whole = [samples([run.epochs[epoch] for run in runs], index) for epoch in range(len(runs[0].epochs))]
    (batches,) = {run.batches for run in runs}
    return whole[epochs + 1 :] if batches < 0 else [whole[epochs][batches:], *whole[epochs + 1 :]]


def resumed(world_size: int, make: Make, states: list[Any], count: int, **options: Any) -> list[list[list[Row]]]:
    """Return `count` epochs, of which the first may be the rest of one, of every rank of a new run."""
    limits = {"max_samples": options.pop("max_samples", None)}

    def body(splitter: BatchSplitter) -> list[list[Row]]:
        fit = Fit(splitter, make, states, **options)
        return [fit.epoch() for _ in range(count)]

    ranks = on_ranks(world_size, body, seeds=[1000 + rank for rank in range(world_size)], **limits)
    for rank in ranks:
        if isinstance(rank, Exception):
            raise rank
    return ranks


def check(
    make: Make,
    worlds: list[int],
    *,
    epochs: int,
    stop: int,
    limits: tuple[int | None, int | None] = (None, None),
    loaders: int = 1,
    **options: Any,
) -> None:
    """Save in the first world, and compare what the others train on with what the first goes on with."""
    runs = on_ranks(
        worlds[0],
        lambda splitter: saved(splitter, make, epochs=epochs, stop=stop, **options),
        max_samples=limits[0],
    )
    for run in runs:
        if isinstance(run, Exception):
            raise run
    for world_size in worlds[1:]:
        expected = [remaining(runs, epochs, index) for index in range(loaders)]
        ranks = resumed(world_size, make, runs[0].states, len(expected[0]), max_samples=limits[1], **options)
        for index in range(loaders):
            assert expected[index] == [
                samples([rank[epoch] for rank in ranks], index) for epoch in range(len(expected[0]))
            ]


@given(
    order=st.sampled_from(sorted(ORDERS)),
    size=st.integers(4, 30),
    batch_size=st.integers(1, 6),
    worlds=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    limits=st.tuples(st.none() | st.integers(1, 4), st.none() | st.integers(1, 4)),
    epochs=st.integers(0, 1),
    stop=st.integers(0, 40),
    window=st.integers(1, 3),
    draws=st.booleans(),
)
def test_what_remains_is_what_an_uninterrupted_run_trains_on(
    order: str,
    size: int,
    batch_size: int,
    worlds: list[int],
    limits: tuple[int | None, int | None],
    epochs: int,
    stop: int,
    window: int,
    draws: bool,
) -> None:
    """Stopped anywhere, the remaining global batches and the next epoch are those of the run that goes on, in order."""
    if order == "unsized":
        limits = (None, None)

    def make() -> list[Any]:
        return [ORDERS[order](size, batch_size)]

    check(make, worlds, epochs=epochs, stop=stop, limits=limits, window=window, draws=draws)


@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    orders=st.tuples(*[st.sampled_from(["shuffle", "generator", "lazy", "stream", "own stream", "unsized"])] * 2),
    mode=st.sampled_from(["max_size_cycle", "max_size", "min_size"]),
    worlds=st.lists(st.integers(1, 3), min_size=2, max_size=2),
    epochs=st.integers(0, 1),
    stop=st.integers(0, 8),
    window=st.integers(1, 2),
)
def test_every_loader_goes_on_from_its_own_place(
    sizes: tuple[int, int],
    orders: tuple[str, str],
    mode: str,
    worlds: list[int],
    epochs: int,
    stop: int,
    window: int,
) -> None:
    """Of two loaders, cycled, exhausted or cut off, each has the samples that the uninterrupted run goes on with."""
    def make() -> list[Any]:
        return [ORDERS[order](4 * size, 4) for order, size in zip(orders, sizes, strict=True)]

    check(make, worlds, epochs=epochs, stop=stop, mode=mode, window=window, loaders=2)
