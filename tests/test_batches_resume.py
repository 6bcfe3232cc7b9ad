"""Resume of split loaders: the samples that remain, in their order, at any other world size."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from lockstep import Logged, Stream, Unsized
from ranks import make_trainer
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from lightning_gradavg import GradAvgStrategy

# Python 3.12 and later, of the workers that are forked from a rank.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


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


class Augmented(Dataset[Any]):
    """Draws from all three global generators for every sample."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return index + torch.rand(()) / 4 + random.random() / 4 + np.random.random() / 4  # noqa: NPY002  # likewise


def loader(data: Any, batch_size: int = 1, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(data) if isinstance(data, int) else data, batch_size, **options)


def of_workers(size: int, batch: int, *, own: bool, persistent: bool) -> Any:
    sampler = RandomSampler(range(size), generator=torch.Generator() if own else None)
    options: Any = {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": persistent}
    return loader(size, batch_sampler=BatchSampler(sampler, batch, False), **options)


ORDERS: dict[str, Callable[[int, int], Any]] = {
    "sequential": loader,
    "shuffle": partial(loader, shuffle=True),
    "drop_last": partial(loader, shuffle=True, drop_last=True),
    "generator": lambda size, batch: loader(size, batch, shuffle=True, generator=torch.Generator().manual_seed(size)),
    "replacement": lambda size, batch: loader(
        size, batch, sampler=RandomSampler(range(size), replacement=True, num_samples=40, generator=torch.Generator())
    ),
    "weighted": lambda size, batch: loader(
        size, batch, sampler=WeightedRandomSampler([1.0 + item for item in range(size)], size)
    ),
    "lazy": lambda size, batch: loader(size, batch_sampler=Lazy(size, batch)),
    "lazy random": lambda size, batch: loader(size, batch_sampler=Lazy(size, batch, "random")),
    "lazy numpy": lambda size, batch: loader(size, batch_sampler=Lazy(size, batch, "numpy")),
    "eager": lambda size, batch: loader(size, batch_sampler=Eager(size, batch)),
    "stream": lambda size, batch: loader(Stream(size), batch),
    "own stream": lambda size, batch: loader(Stream(size, torch.Generator()), batch),
    "a sampler with a state": lambda size, batch: loader(size, batch, sampler=Remembering(size)),
    "list": Batches,
    "unsized": lambda size, batch: Unsized(lambda: torch.randperm(size).split(batch)),
    "augmented": lambda size, batch: loader(Augmented(size), batch, shuffle=True),
}
WORKERS = {
    f"workers, own generator: {own}, persistent: {persistent}": partial(of_workers, own=own, persistent=persistent)
    for own in (False, True)
    for persistent in (False, True)
}


class Place(NamedTuple):
    """Where a run is saved: the name of a hook, in an epoch, and of batches the index, or that of the last."""

    hook: str
    epoch: int = 0
    batch: int = 0


class Noting(LightningModule):
    """Notes of every batch the epoch, each loader's samples, and what is drawn."""

    def __init__(self, *makes: Callable[[], Any], mode: str) -> None:
        super().__init__()
        self.makes, self.mode = makes, mode
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.noted: list[tuple[int, list[list[Any]], float]] = []

    def train_dataloader(self) -> Any:
        return CombinedLoader([make() for make in self.makes], self.mode)  # type: ignore[arg-type]  # a mode

    def val_dataloader(self) -> Any:
        return DataLoader([1.0])  # type: ignore[arg-type]  # a list will do

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.noted.append((self.current_epoch, [[] for _ in batch], torch.rand(()).item()))

    def training_step(self, batch: Any) -> Any:
        strategy: Any = self.trainer.strategy
        if not strategy._batches.chunk.stand_in:
            for samples, part in zip(self.noted[-1][1], batch, strict=True):
                samples.extend([] if part is None else part.tolist())
        return self.weight * 1.0

    def validation_step(self, batch: torch.Tensor) -> None:
        torch.rand(2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Saves(Callback):
    """Saves a checkpoint once; and looks at the data before training, of a resumed run, which changes nothing."""

    def __init__(self, place: Place, path: str, looks: bool) -> None:
        self.place, self.path, self.looks = place, path, looks
        self.stepped = -1

    def reach(self, trainer: Trainer, module: Any, hook: str, *, unstepped: int = 0) -> None:
        there = hook == self.place.hook and (hook == "start" or trainer.current_epoch == self.place.epoch)
        if there and self.stepped < 0:
            trainer.save_checkpoint(self.path)
            self.stepped = len(module.noted) - unstepped

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reach(trainer, pl_module, "start")
        if self.looks:
            (read,) = trainer.train_dataloader  # type: ignore[misc]  # of a CombinedLoader
            next(iter(read))
            list(read)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        last, window = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch, trainer.accumulate_grad_batches
        if last or args[2] == self.place.batch:
            self.reach(trainer, pl_module, "batch", unstepped=0 if last else (args[2] + 1) % window)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reach(trainer, pl_module, "validation")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reach(trainer, pl_module, "end")


def trained(
    orders: list[tuple[str, int, int]],
    place: Place,
    path: str,
    resume: str | None = None,
    *,
    strategy: dict[str, Any],
    mode: str = "max_size_cycle",
    looks: bool = False,
    **options: Any,
) -> Any:
    """Body: train 3 epochs, each rank with a random state of its own, and save at a place."""
    seed = dist.get_rank() + (7 if resume is None else 99)
    for seeds in (torch.manual_seed, random.seed, np.random.seed):
        seeds(seed)
    saves = Saves(place, path, looks and resume is not None)
    module = Noting(*[partial((ORDERS | WORKERS)[order], size, batch) for order, size, batch in orders], mode=mode)
    trainer = make_trainer(
        GradAvgStrategy(split_batches=True, **strategy),
        callbacks=[saves],
        max_epochs=3,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(module, ckpt_path=resume)
    return module.noted, saves.stepped


def of_all(ranks: list[Any]) -> list[Any]:
    """Return the noted batches, put together from the ranks'."""
    return [
        (of_ranks[0][0], [list(chain(*parts)) for parts in zip(*(samples for _, samples, _ in of_ranks), strict=True)])
        for of_ranks in zip(*(noted for noted, _ in ranks), strict=True)
    ]


def goes_on(
    pools: list[Any], folder: Any, place: Place, orders: list[Any], strategies: list[dict[str, Any]], **options: Any
) -> None:
    """Save in the first pool; resume in the second, which saves again at once, and from there in the others."""
    path = str(folder / "0")
    # From the last batch of an epoch Lightning goes on without its validation, and without what that draws.
    options["limit_val_batches"] = 0 if place.hook == "batch" else 1
    first = pools[0].run(trained, orders, place, path, strategy=strategies[0], **options)
    stepped = first[0][1]
    assert stepped >= 0
    for number, pool in enumerate(pools[1:], start=1):
        path, resume = str(folder / str(number)), path
        ranks = pool.run(trained, orders, Place("start"), path, resume, strategy=strategies[number], **options)
        assert of_all(first)[stepped:] == of_all(ranks)
        for noted, _ in ranks:
            assert [drawn for *_, drawn in first[0][0][stepped:]] == [drawn for *_, drawn in noted]


HOOKS = st.sampled_from([*["batch"] * 3, "validation", "end", "start"])


@settings(max_examples=60, phases=[Phase.generate])
@given(
    order=st.tuples(st.sampled_from(sorted(ORDERS)), st.integers(4, 30), st.integers(2, 6)),
    worlds=st.lists(st.integers(1, 3), min_size=2, max_size=3),
    limits=st.tuples(st.none() | st.integers(1, 4), st.none() | st.integers(1, 4)),
    place=st.tuples(HOOKS, st.integers(0, 1), st.integers(0, 15)),
    whole=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "accumulate_grad_batches": st.integers(1, 3),
            "limit_train_batches": st.just(1.0) | st.integers(1, 6),
            "looks": st.booleans(),
        }
    ),
)
def test_what_remains_is_what_an_uninterrupted_run_trains_on(
    world, tmp_path_factory, order, worlds, limits, place, whole, options
):
    """Saved anywhere, the remaining batches and the next epochs are those of the run that goes on, in order.

    Read whole, samples that draw in the process that trains are the same, too, bit for bit.
    """
    whole |= order[0] == "augmented"
    strategies = [{"num_replicas": 3} if whole else {"max_device_batch_size": limit} for limit in (*limits, None)]
    pools, folder = [world(size) for size in worlds], tmp_path_factory.mktemp("run")
    goes_on(pools, folder, Place(*place), [order], strategies, **options)


@settings(max_examples=25, phases=[Phase.generate])
@given(
    orders=st.tuples(
        *[
            st.tuples(
                st.sampled_from(["shuffle", "generator", "lazy", "stream", "own stream", "unsized"]),
                st.integers(1, 6).map(lambda batches: 4 * batches),
                st.just(4),
            )
        ]
        * 2
    ),
    mode=st.sampled_from(["max_size_cycle", "max_size", "min_size"]),
    worlds=st.lists(st.integers(1, 3), min_size=2, max_size=2),
    epoch=st.integers(0, 1),
    window=st.integers(1, 2),
)
def test_several_loaders_go_on_from_the_end_of_an_epoch(world, tmp_path_factory, orders, mode, worlds, epoch, window):
    """Of two loaders, cycled, exhausted or cut off, each has the samples that the uninterrupted run goes on with."""
    pools, folder = [world(size) for size in worlds], tmp_path_factory.mktemp("run")
    goes_on(pools, folder, Place("end", epoch), [*orders], [{}, {}], mode=mode, accumulate_grad_batches=window)


@pytest.mark.slow
@pytest.mark.parametrize("order", WORKERS)
def test_workers_that_fetch_ahead_change_nothing(world, tmp_path, order):
    """With worker processes, kept between epochs or not, the rest and the next epochs are those of the first run."""
    pools = [world(2), world(1)]
    for epoch in (0, 1):
        (folder := tmp_path / str(epoch)).mkdir()
        goes_on(pools, folder, Place("batch", epoch, 2), [(order, 24, 4)], [{}, {}])


def loaded(path: str, resume: str | None) -> list[int]:
    """Body: train on a dataset that notes what is loaded from it, and save after 4 of 6 batches."""
    data, saves = Logged(), Saves(Place("batch", 0, 3), path, looks=False)
    module = Noting(lambda: DataLoader(data, batch_size=4), mode="min_size")
    make_trainer(GradAvgStrategy(split_batches=True), callbacks=[saves], max_epochs=1).fit(module, ckpt_path=resume)
    return data.loaded


def test_what_was_taken_is_not_loaded_again(world, tmp_path):
    """Of a map-style dataset only indices are passed over; each rank loads its chunks of what remains."""
    paths = [str(tmp_path / name) for name in "ab"]
    world(2).run(loaded, paths[0], None)
    assert [[16, 17, 20, 21], [18, 19, 22, 23]] == world(2).run(loaded, paths[1], paths[0])


class Counting(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


ORDERS |= {
    "memory": lambda size, batch: loader(size, batch, sampler=Memory(size)),
    "counting": lambda size, batch: loader(Counting(size), batch),
}


@pytest.mark.parametrize(
    ("order", "size", "message"),
    [
        ("memory", 24, "batches of the train loader are not those of the checkpoint.*`generator=`"),
        *[(order, 8, "first 3 batches of the train loader are missing, it ends after 2") for order in
          ("sequential", "list", "counting")],
    ],
)  # fmt: skip
def test_another_order_is_an_error_on_all_ranks(world, tmp_path, order, size, message):
    """It is found out before a batch is trained on, with advice; what ends too early is no finished epoch."""
    path = str(tmp_path / "saved")
    world(1).run(trained, [(order, 24, 4)], Place("batch", 1, 2), path, strategy={})
    options = {"strategy": {}, "limit_train_batches": 6}
    for raised in world(2).run_expecting_errors(trained, [(order, size, 4)], Place("end"), "", path, **options):
        assert raised.type_name == "RuntimeError"
        assert re.search(rf"saved after 3 batches of its epoch.*{message}", raised.message)
