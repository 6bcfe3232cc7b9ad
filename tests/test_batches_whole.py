"""Whole-batch reading: what a dataset draws and a collate function does is that of one process, on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.seed import pl_worker_init_function
from lockstep import Augmented, Graphs, Rank, Taken, in_one_world, on_ranks, pad_and_mix, take_all
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

SIZE, BATCH = 22, 8


class AugmentedStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        mine = slice(None) if info is None else slice(info.id, None, info.num_workers)
        return ((index, torch.randn(1 + index % 5) + random.random()) for index in torch.randperm(SIZE).tolist()[mine])


def rows(batch: Any, start: int, stop: int) -> list[Any]:
    """Return samples of a collated batch as plain numbers and names."""
    return [batch["x"][start:stop].tolist(), batch["index"][start:stop].tolist(), batch["name"][start:stop]]


def pieces(taken: Taken) -> list[tuple[int, list[Any]]]:
    """Return what every replica of a micro-batch gets."""
    first = taken.chunk.start
    counted = (each for each in taken.chunk.pieces if each.replica is not None)
    return [(each.replica, rows(taken.batch, each.start - first, each.stop - first)) for each in counted]  # type: ignore[misc]


LOADERS: dict[str, Callable[[], Any]] = {
    "map": lambda: DataLoader(Augmented(), BATCH, shuffle=True, collate_fn=pad_and_mix),
    "stream": lambda: DataLoader(AugmentedStream(), BATCH, collate_fn=pad_and_mix),
    "map, workers": lambda: DataLoader(Augmented(), BATCH, shuffle=True, collate_fn=pad_and_mix, num_workers=2),
    "map, persistent workers": lambda: DataLoader(
        Augmented(), BATCH, shuffle=True, collate_fn=pad_and_mix, num_workers=2, persistent_workers=True
    ),
    "stream, workers": lambda: DataLoader(AugmentedStream(), BATCH, collate_fn=pad_and_mix, num_workers=2),
}


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # the global generator is the point


@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=pytest.mark.slow) if "workers" in name else name for name in LOADERS]
)
def test_replicas_are_cut_out_of_the_batches_of_a_plain_loader(kind: str) -> None:
    """In two epochs the 4 replicas get, on 1 to 4 ranks, the parts of what a plain loader yields, bit for bit."""
    loader = LOADERS[kind]()
    seed_all(7)
    plain = [list(loader) for _ in range(2)]
    replicas = [[batch["index"].chunk(4) for batch in epoch] for epoch in plain]
    expected = [
        [
            [(part, rows(batch, part * len(cut[0]), (part + 1) * len(cut[0]))) for part in range(len(cut))]
            for batch, cut in zip(*epoch, strict=True)
        ]
        for epoch in zip(plain, replicas, strict=True)
    ]

    def body(rank: Rank) -> list[list[Taken]]:
        seed_all(7 + rank.split.rank)
        split = rank.load(LOADERS[kind]())
        taken = [take_all(split) for _ in range(2)]
        split._iterator = None  # ends persistent workers
        return taken

    sizes = [8, 8, 3, 3] if kind == "stream, workers" else [8, 8, 6]
    assert [sizes] * 2 == [[len(batch["x"]) for batch in epoch] for epoch in plain]
    for world_size in (1, 2, 3, 4):
        ranks = on_ranks(world_size, body, replicas=4, whole=True)
        for epoch in range(2):
            steps = zip(*(rank[epoch] for rank in ranks), strict=True)
            assert expected[epoch] == [[piece for taken in step for piece in pieces(taken)] for step in steps]


class Mixing(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (batch.flip(0) for batch in super().__iter__())


def flagged(value: Any) -> Any:
    vars(value)["draws_no_random_numbers"] = True
    return value


ITEMS: Any = [1, 2]

READ: dict[str, tuple[Callable[[], Any], bool]] = {
    # Whether each rank reads its own samples only.
    "flagged dataset": (lambda: DataLoader(flagged(Augmented())), True),
    "flagged loader": (lambda: flagged(DataLoader(Augmented())), True),
    "tensors": (lambda: DataLoader(TensorDataset(torch.arange(4))), False),
    "flagged, with collation": (lambda: DataLoader(flagged(Augmented()), collate_fn=pad_and_mix), False),
    "flagged, of a subclass": (lambda: flagged(Mixing(ITEMS)), False),
    "stream": (lambda: DataLoader(AugmentedStream()), False),
    "without batching": (lambda: DataLoader([torch.arange(4)], batch_size=None), False),  # type: ignore[arg-type]
    "batches": (lambda: [torch.arange(4)], False),
}


@pytest.mark.parametrize("name", READ)
def test_all_is_read_whole_unless_the_user_says_that_it_draws_nothing(name: str) -> None:
    make, in_parts = READ[name]
    told = "each rank loads its own samples only" if in_parts else "every rank reads whole batches"
    assert in_one_world(make(), whole=True).describe().endswith(f"; {told}")


def test_workers_are_seeded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds of workers do not depend on the rank, whether Lightning or the user has them seeded, in the copy alone."""
    monkeypatch.setenv("PL_SEED_WORKERS", "1")

    for dataset in (Augmented(), AugmentedStream()):
        plain: DataLoader[Any] = DataLoader(dataset)
        split = in_one_world(plain, whole=True)
        _auto_add_worker_init_fn(split, rank=3)
        assert (None, {"rank": 0}) == (plain.worker_init_fn, split.worker_init_fn.keywords)
        for function in (pl_worker_init_function, partial(pl_worker_init_function, rank=3)):
            given: DataLoader[Any] = DataLoader(dataset, worker_init_fn=function)
            split = in_one_world(given, whole=True)
            assert (function, {"rank": 0}) == (given.worker_init_fn, split.worker_init_fn.keywords)
        others: list[Any] = [print, dict]  # without a rank, and without a signature
        for other in others:
            assert in_one_world(DataLoader(dataset, worker_init_fn=other), whole=True).worker_init_fn is other


@pytest.mark.parametrize("replicas", [None, 4])
def test_what_cannot_be_cut_is_collated_apart(replicas: int | None) -> None:
    """Batches of 8 graphs on 2 ranks: each rank, and each of 4 replicas, has its own samples, collated by the user."""

    def body(rank: Rank) -> Any:
        loader: Any = DataLoader(range(16), batch_size=8, collate_fn=Graphs)  # type: ignore[arg-type]
        return take_all(rank.load(loader))

    ranks = on_ranks(2, body, replicas=replicas, whole=True)
    for step in range(2):
        parts = [part for rank in ranks for part in (rank[step].batch if replicas else [rank[step].batch])]
        size = 8 // len(parts)
        assert len(parts) == (replicas or 2)
        assert all(isinstance(part, Graphs) for part in parts)
        expected = [list(range(8 * step + size * index, 8 * step + size * (index + 1))) for index in range(len(parts))]
        assert expected == [part.samples for part in parts]
