"""Resume of split loaders: the samples that remain, in their order, at any other world size."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from grids import grid
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities import CombinedLoader
from lockstep import Logged, Loop, Stream, Taken, Unsized, global_batches, numbered, on_ranks, splitter_of
from ranks import make_trainer
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.batches.chunks import Split
from lightning_gradavg.batches.loader import BatchSplitter
from lightning_gradavg.batches.progress import Progress

Make = Callable[[], list[Any]]


def loader(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(data) if isinstance(data, int) else data, **options)


class Lazy:
    """A batch sampler that draws anew for every batch, from a global generator."""

    def __init__(self, size: int, batch_size: int, source: str = "torch") -> None:
        self.size, self.batch_size, self.source = size, batch_size, source

    def __len__(self) -> int:
        return (self.size + self.batch_size - 1) // self.batch_size

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


class Memory:
    """A sampler whose order comes from a memory of its own: the number of passes begun."""

    def __init__(self, size: int) -> None:
        self.size, self.passes = size, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(random.Random(self.passes).sample(range(self.size), self.size))


class Remembering(Memory):
    """The same, with a state."""

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


class Batches(list[Any]):
    """Batches in memory."""

    def __init__(self, size: int, batch_size: int) -> None:
        super().__init__(torch.arange(size).split(batch_size))
        self.batch_size = batch_size


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
    "a sampler with a state": lambda size, batch: loader(size, batch_size=batch, sampler=Remembering(size)),
    "list": Batches,
    "unsized": lambda size, batch: Unsized(lambda: torch.randperm(size).split(batch)),
}


class Row(NamedTuple):
    """One step: for every loader what is in training, or None."""

    taken: list[Taken | None]


class Fit:
    """What Lightning and a strategy do with the loaders of one rank.

    Args:
        splitter: The rank's.
        make: Returns the user's loaders.
        states: What `save` returned in another run.
        mode: Of the `CombinedLoader`.
        limit: Most loader batches in an epoch, as `limit_train_batches`.
        window: Loader batches per optimizer step.
        draws: Whether the model draws random numbers for every loader batch, others on every rank.
        whole: Whether every rank reads whole batches.
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
        whole: bool = False,
    ) -> None:
        self.splitter, self.draws = splitter, draws
        splitter.whole_batches = whole
        self.loop = Loop()
        self.progress = Progress(self.loop, lambda: window)
        self.loaders, self.made = [], make()
        for index, user_loader in enumerate(self.made):
            iter(user_loader)  # as Lightning does, to see whether it can
            self.loaders.append(numbered(user_loader, splitter, self.progress))
            if states is not None:
                self.loaders[-1].load_state_dict(states[index])
        self.combined = CombinedLoader(self.loaders, mode)
        self.loop.read(self.combined)
        if limit is not None:
            self.combined.limits = limit
        self.fetcher = _PrefetchDataFetcher()
        self.fetcher.setup(self.combined)
        iter(self.fetcher)
        self._count(states[0]["batches"] if states else 0)
        self.fetcher.fetched += self.loop.ready
        torch.rand(3)  # as the validation loaders do while they are set up
        self.progress.end_set_up()
        self.begun = True

    def _count(self, batches: int) -> None:
        count = self.loop.count
        count.ready = count.processed = count.completed = batches

    def rows(self, stop: int | None = None) -> Iterator[Row]:
        """Train for the rest of an epoch, or for `stop` micro-batches of it."""
        if not self.begun:
            self.loop.ended = False
            self._count(0)
            iter(self.fetcher)
        self.begun = False
        count = 0
        while not self.fetcher.done and count != stop:
            try:
                batch, _, _ = next(self.fetcher)
            except StopIteration:  # of two loaders, one with a length and one without, the length may be too large
                self.loop.ended = True
                return
            self.progress.arrive()
            self.loop.ended = self.fetcher.done
            self.loop.count.ready += 1
            chunks = [None if each is None else each.chunk for each in self.progress.in_training()]
            if self.draws and any(chunk is not None for chunk in chunks):
                torch.rand(1 + self.splitter.split.rank), random.random(), np.random.random()  # noqa: NPY002  # likewise
            self._count(self.loop.ready)
            yield Row(
                [None if chunk is None else Taken(part, chunk) for part, chunk in zip(batch, chunks, strict=True)]
            )
            count += 1

    def epoch(self, stop: int | None = None) -> list[Row]:
        return list(self.rows(stop))

    def close(self) -> None:
        """End the worker processes."""
        self.fetcher.teardown()
        for user_loader in self.made:
            # Its persistent workers end with it; a garbage collector that finds them in a cycle waits 5 s for each.
            user_loader._iterator = None

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
    """Loader batches of the epoch that the states count; -1 for a whole epoch."""
    epochs: list[list[Row]]
    """What the run trained on that was saved and not interrupted."""


def saved(splitter: BatchSplitter, make: Make, *, epochs: int, stop: int, **options: Any) -> Saved:
    """Train `epochs` whole epochs, `stop` micro-batches of the next, save, and go on to the end of one more."""
    fit = Fit(splitter, make, **options)
    whole = [fit.epoch() for _ in range(epochs)]
    begun = fit.epoch(stop) if stop else []
    states = fit.save()
    batches = states[0]["epoch_batches"]
    if begun and fit.fetcher.done:
        batches, rest = -1, [begun, fit.epoch()]
    else:
        fit.begun = fit.begun or bool(begun)
        batches, rest = batches if begun else 0, [begun + fit.epoch(), fit.epoch()]
    fit.close()
    return Saved(states, batches, [*whole, *rest])


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
        epochs = [fit.epoch() for _ in range(count)]
        fit.close()
        return epochs

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
    options=st.fixed_dictionaries(
        {
            "window": st.integers(1, 3),
            "limit": st.none() | st.integers(1, 6),
            "draws": st.booleans(),
            "whole": st.booleans(),
        }
    ),
)
def test_what_remains_is_what_an_uninterrupted_run_trains_on(  # hypothesis passes them by name
    order: str,
    size: int,
    batch_size: int,
    worlds: list[int],
    limits: tuple[int | None, int | None],
    epochs: int,
    stop: int,
    options: dict[str, Any],
) -> None:
    """Stopped anywhere, the remaining global batches and the next epoch are those of the run that goes on, in order.

    Read whole, samples that draw in the process that trains are the same, too, bit for bit.
    """
    if order == "unsized":
        limits = (None, None)

    def make() -> list[Any]:
        made = ORDERS[order](size, batch_size)
        if options["whole"] and isinstance(made, DataLoader) and not isinstance(made.dataset, IterableDataset):
            vars(made)["dataset"] = Augmented(size)
        return [made]

    check(make, worlds, epochs=epochs, stop=stop, limits=limits, **options)


@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    orders=st.tuples(*[st.sampled_from(["shuffle", "generator", "lazy", "stream", "own stream", "unsized"])] * 2),
    mode=st.sampled_from(["max_size_cycle", "max_size", "min_size"]),
    worlds=st.lists(st.integers(1, 3), min_size=2, max_size=2),
    epochs=st.integers(1, 2),
    window=st.integers(1, 2),
)
def test_several_loaders_go_on_from_the_end_of_an_epoch(
    sizes: tuple[int, int], orders: tuple[str, str], mode: str, worlds: list[int], epochs: int, window: int
) -> None:
    """Of two loaders, cycled, exhausted or cut off, each has the samples that the uninterrupted run goes on with."""

    def make() -> list[Any]:
        return [ORDERS[order](4 * size, 4) for order, size in zip(orders, sizes, strict=True)]

    check(make, worlds, epochs=epochs, stop=0, mode=mode, window=window, loaders=2)


class Augmented(Dataset[Any]):
    """Draws from all three global generators for every sample."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return index + torch.rand(()) / 4 + random.random() / 4 + np.random.random() / 4  # noqa: NPY002  # likewise


def one(make: Callable[[], Any]) -> Make:
    return lambda: [make()]


def save_after(stop: int, make: Make, world_size: int = 1, epochs: int = 0, **options: Any) -> list[Any]:
    """Return the states of a run that stopped after so many micro-batches of an epoch."""
    limit = options.pop("max_samples", None)
    runs = on_ranks(
        world_size, lambda splitter: saved(splitter, make, epochs=epochs, stop=stop, **options), max_samples=limit
    )
    states: list[Any] = runs[0].states
    return states


def comparable(state: Any) -> str:
    """Return all values of a state."""
    return repr(tree_map(lambda value: value.tolist() if isinstance(value, torch.Tensor) else value, state))


class TestState:
    def test_a_state_loaded_and_saved_again_is_the_same(self) -> None:
        """A run that is resumed and stopped before its first batch saves what it was given."""
        make = one(lambda: ORDERS["shuffle"](24, 4))
        states = save_after(3, make)
        fit = Fit(splitter_of(Split()), make, states)

        assert comparable(states) == comparable(fit.save())
        assert 3 == fit.loop.processed


class TestOrderOfARest:
    def test_what_was_taken_is_not_loaded_again(self) -> None:
        """Of a map-style dataset only indices are passed over; each rank loads its chunks of what remains."""
        datasets: list[Logged] = []

        def make() -> list[Any]:
            datasets.append(Logged())
            return [DataLoader(datasets[-1], batch_size=4)]

        states = save_after(4, make, world_size=2)
        datasets.clear()
        resumed(2, make, states, 1)

        assert [[16, 17, 20, 21], [18, 19, 22, 23]] == [dataset.loaded for dataset in datasets]

    @pytest.mark.slow
    @pytest.mark.parametrize("persistent", [False, True])
    @pytest.mark.parametrize("generator", [False, True])
    @pytest.mark.parametrize(("epochs", "stop"), [(0, 3), (1, 6)])
    def test_workers_that_fetch_ahead_change_nothing(
        self, persistent: bool, generator: bool, epochs: int, stop: int
    ) -> None:
        """With worker processes, kept between epochs or not, the rest and the next epoch are those of the first run."""

        def make() -> list[Any]:
            return [
                loader(
                    24,
                    batch_sampler=BatchSampler(
                        RandomSampler(range(24), generator=torch.Generator() if generator else None), 4, False
                    ),
                    num_workers=1,
                    persistent_workers=persistent,
                )
            ]

        check(make, [2, 1], epochs=epochs, stop=stop)

    @pytest.mark.parametrize("order", ["shuffle", "generator", "lazy", "stream", "unsized"])
    @pytest.mark.parametrize(("looks", "stop"), [(True, 2), (False, 2), (False, 6)])
    def test_iterators_of_others_change_nothing(self, looks: bool, order: str, stop: int) -> None:
        """A user may look at the data, and Lightning makes a second iterator where validation ended the epoch."""
        make = one(lambda: ORDERS[order](24, 4))
        runs = on_ranks(2, lambda splitter: saved(splitter, make, epochs=1, stop=stop))
        expected = remaining(runs, 1)

        def body(splitter: BatchSplitter) -> list[list[Row]]:
            fit = Fit(splitter, make, runs[0].states)
            if looks:
                next(iter(fit.loaders[0]))
                list(fit.loaders[0])
            else:
                iter(fit.fetcher)
                fit.fetcher.fetched += fit.loop.processed
            return [fit.epoch() for _ in expected]

        ranks = on_ranks(3, body, seeds=[1, 2, 3])

        assert expected == [samples([rank[epoch] for rank in ranks]) for epoch in range(len(expected))]

    def test_the_random_state_of_a_rank_is_that_of_the_checkpoint(self) -> None:
        """Passing over batches draws from the common state; afterwards a model draws what it would have drawn."""

        def drawn(fit: Fit, steps: int) -> list[list[float]]:
            return [torch.rand(2).tolist() for _ in fit.rows(steps)]

        def first(splitter: BatchSplitter) -> Any:
            fit = Fit(splitter, make)
            drawn(fit, 3)
            states = fit.save()
            fit.begun = True
            return states, drawn(fit, 3)

        make = one(lambda: ORDERS["lazy"](24, 4))
        states, expected = on_ranks(2, first)[0]

        assert [expected] * 3 == on_ranks(3, lambda splitter: drawn(Fit(splitter, make, states), 3), seeds=[1, 2, 3])

    def test_another_order_is_an_error_on_all_ranks(self) -> None:
        """A sampler with a memory and no state is found out before a batch is trained on, with advice."""
        make = one(lambda: loader(24, batch_size=4, sampler=Memory(24)))
        states = save_after(2, make, epochs=1)

        errors = on_ranks(3, lambda splitter: Fit(splitter, make, states).epoch())

        for error in errors:
            assert isinstance(error, RuntimeError)
            assert "saved after 2 batches (8 samples)" in str(error)
            assert "are not those of the checkpoint" in str(error)
            assert "`generator=`" in str(error)

    @pytest.mark.parametrize("order", ["sequential", "list", "stream"])
    def test_a_loader_that_is_too_short_is_an_error_on_all_ranks(self, order: str) -> None:
        """A dataset that ends before the batches that the checkpoint counts is not taken for a finished epoch."""
        sizes = iter([24] + [8] * 2)
        make = one(lambda: ORDERS[order](next(sizes), 4) if order != "stream" else _counting(next(sizes)))
        states = save_after(4, make)

        for error in on_ranks(2, lambda splitter: list(Fit(splitter, make, states).loaders[0])):
            assert isinstance(error, RuntimeError)
            assert "first 4 batches of the train loader are missing, it ends after 2" in str(error)


def _counting(size: int) -> Any:
    class Counting(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(size))

    return DataLoader(Counting(), batch_size=4)


class TestRefusals:
    @pytest.mark.parametrize("state", [{"at": 3}, [1, 2], None, {"format": 2}, {"format": 1, "batches": 3}])
    def test_another_kind_of_state_is_refused(self, state: Any) -> None:
        """What was saved by another loader or strategy is quoted, with what to do."""
        found = "at" if state == {"at": 3} else "format" if isinstance(state, dict) else type(state).__name__

        with pytest.raises(ValueError, match=rf"not one of format 1.*it holds.*{found}.*Resume with the strategy"):
            numbered(ORDERS["shuffle"](8, 4), splitter_of(Split())).load_state_dict(state)

    def test_other_generators_are_refused(self) -> None:
        """A loader with a generator cannot go on from the state of one without, nor the other way round."""
        states = {order: save_after(1, one(partial(ORDERS[order], 8, 4))) for order in ("shuffle", "generator")}

        for saved_by, order, found in (
            ("shuffle", "generator", "has 1 .* had 0"),
            ("generator", "shuffle", "has 0 .* had 1"),
        ):
            with pytest.raises(ValueError, match=found):
                numbered(ORDERS[order](8, 4), splitter_of(Split())).load_state_dict(states[saved_by][0])


class _Noting(LightningModule):
    """Notes the epoch and samples of every step, and draws random numbers."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.noted: list[tuple[int, list[int]]] = []

    def train_dataloader(self) -> Any:
        return ORDERS[self.order](24, 4)

    def val_dataloader(self) -> Any:
        return DataLoader([1.0])  # type: ignore[arg-type]  # a list will do

    def training_step(self, batch: torch.Tensor) -> Any:
        self.noted.append((self.current_epoch, batch.tolist()))
        return self.weight * torch.rand(())

    def validation_step(self, batch: torch.Tensor) -> None:
        torch.rand(2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _SaveAt(Callback):
    """Saves a checkpoint once, at a named place."""

    def __init__(self, place: str, path: str) -> None:
        self.place, self.path = place, path
        self.steps = -1

    def _reach(self, trainer: Trainer, module: LightningModule, place: str) -> None:
        if place == self.place and self.steps < 0:
            trainer.save_checkpoint(self.path)
            assert isinstance(module, _Noting)
            self.steps = len(module.noted)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reach(trainer, pl_module, "start")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._reach(trainer, pl_module, f"epoch {trainer.current_epoch} step {args[2]}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reach(trainer, pl_module, f"validation {trainer.current_epoch}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reach(trainer, pl_module, f"end {trainer.current_epoch}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reach(trainer, pl_module, "end")


def _noted(order: str, seed: int, place: str, path: str, resume: str | None = None) -> Any:
    """Body: train 3 epochs, and save at a place."""
    torch.manual_seed(seed)
    save, module = _SaveAt(place, path), _Noting(order)
    trainer = make_trainer(GradAvgStrategy(split_batches=True), callbacks=[save], max_epochs=3, num_sanity_val_steps=0)
    trainer.fit(module, ckpt_path=resume)
    return module.noted, save.steps


PLACES = ["start", "epoch 0 step 1", "epoch 1 step 3", "validation 0", "validation 1", "end 0", "end 1"]


@pytest.mark.parametrize(
    ("order", "place"),
    [
        *grid(["shuffle", "generator", "lazy", "unsized"], PLACES, strength=1),
        # From the last step of an epoch Lightning goes on without its validation, and without what that draws.
        ("generator", "epoch 0 step 5"),
    ],
)
def test_wherever_lightning_saves(world: Any, order: str, place: str, tmp_path: Path) -> None:
    """Saved in any hook and resumed on 2 ranks, a run trains on what the run that saved goes on with."""
    path = str(tmp_path / "saved.ckpt")
    ((whole, steps),) = world(1).run(_noted, order, 7, place, path)
    ranks = [noted for noted, _ in world(2).run(_noted, order, 99, "", "", path)]

    assert 0 <= steps < len(whole) == 18
    assert whole[steps:] == [(epoch, one + other) for (epoch, one), (_, other) in zip(*ranks, strict=True)]
