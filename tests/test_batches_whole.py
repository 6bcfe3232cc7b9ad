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
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset, get_worker_info

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
    return [(each.replica, rows(taken.batch, each.start - first, each.stop - first)) for each in taken.chunk.pieces]


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
PAIR: Any = (1, 2)

IN_PARTS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: DataLoader(TensorDataset(torch.arange(4))),
    "list": lambda: DataLoader(ITEMS),
    "tuple": lambda: DataLoader(PAIR),
    "tensor": lambda: DataLoader(torch.arange(4)),
    "nested": lambda: DataLoader(Subset(ConcatDataset([ITEMS, PAIR, TensorDataset(torch.arange(4))]), [0])),
    "flagged dataset": lambda: DataLoader(flagged(Augmented())),
    "flagged loader": lambda: flagged(DataLoader(Augmented())),
}

WHOLE: dict[str, Callable[[], Any]] = {
    "dataset": lambda: DataLoader(Augmented()),
    "nested": lambda: DataLoader(Subset(ConcatDataset([ITEMS, Augmented()]), [0])),
    "subclass of a dataset": lambda: DataLoader(type("Jittered", (TensorDataset,), {})(torch.arange(4))),
    "collation": lambda: DataLoader(ITEMS, collate_fn=torch.tensor),
    "flagged, with collation": lambda: DataLoader(flagged(Augmented()), collate_fn=pad_and_mix),
    "subclass of a loader": lambda: Mixing(ITEMS),
    "stream": lambda: DataLoader(AugmentedStream()),
    "without batching": lambda: DataLoader([torch.arange(4)], batch_size=None),
    "batches": lambda: [torch.arange(4)],
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_parts_are_read_where_nobody_can_tell(name: str) -> None:
    """A rank loads its own samples alone if they cannot draw and torch's collation cannot mix; the log says so."""
    assert in_one_world(IN_PARTS[name](), whole=True).describe().endswith("; each rank loads its own samples only")


@pytest.mark.parametrize("name", WHOLE)
def test_all_else_is_read_whole(name: str) -> None:
    """Whatever may draw or mix is read whole by every rank; the log says so."""
    assert in_one_world(WHOLE[name](), whole=True).describe().endswith("; every rank reads whole batches")


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
