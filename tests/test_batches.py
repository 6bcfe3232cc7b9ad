"""Split loaders: the ranks' pieces of a batch are, batch for batch, what a plain loader yields to one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.seed import pl_worker_init_function
from noted import KINDS, Order
from orders import ODD, ORDERS, WHOLE, WORKERS, Augmented, Changing, Sized, Unsized, listed, seed
from torch.utils.data import DataLoader, DistributedSampler, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory
from toys import Stream

from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.random_state import random_state
from lightning_gradavg.batches.chunks import Split, chunk_bounds, even_bounds
from lightning_gradavg.batches.cut import LoadedBatch
from lightning_gradavg.batches.loader import Reading, SplitLoader, reading_of
from lightning_gradavg.batches.streams import OrderStream

# Python 3.12 and later, of the workers that are forked from a process with threads.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")

EIGHT: Any = range(8)
LIMITS = st.none() | st.integers(min_value=1, max_value=7)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ({"x": torch.zeros(4, 2), "y": torch.zeros(4)}, 4),
        ({"nodes": torch.zeros(7, 2), "edges": torch.zeros(2, 9)}, None),
        ([torch.zeros(2), torch.zeros(2)], None),
        ("a text", None),
    ],
)
def test_the_samples_of_a_ready_made_batch_that_nobody_cuts(batch, samples):
    """Where they are not known, no number stands for them: else batches of any size would weigh alike."""
    loader = SplitLoader([batch], Split(), World())
    read = []
    for found in loader:
        assert batch is found
        read.append(loader.samples)
    assert [samples] == read


@given(size=st.integers(1, 40), world_size=st.integers(1, 6), replicas=st.none() | st.integers(1, 8), limit=LIMITS)
def test_pieces_cover_the_batch_once(size: int, world_size: int, replicas: int | None, limit: int | None) -> None:
    """The ranks' pieces hold every sample once, in order, and never too many.

    Replicas are those of `torch.chunk`, of which a rank has at most one more than another. Without replicas that holds
    for samples, and only a batch smaller than the number of ranks leaves one without.
    """
    limit = limit if replicas is None else None
    chunks = [Split(rank, world_size, replicas, limit).cut(size) for rank in range(world_size)]

    counted = [[piece for piece in chunk.pieces if piece.samples] for chunk in chunks]
    pieces = [piece for own in counted for piece in own]
    assert list(range(size)) == [sample for _, start, stop in pieces for sample in range(start, stop)]
    assert len(pieces) == len({piece.number for piece in pieces})
    if replicas is None:
        bounds = even_bounds(size, world_size)
        sizes = [chunk.samples or 0 for chunk in chunks]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
        assert any(chunk.stand_in for chunk in chunks) == (size < world_size)
    else:
        bounds = chunk_bounds(size, replicas)
        chunked = [(int(chunk[0]), int(chunk[-1]) + 1) for chunk in torch.arange(size).chunk(replicas)]
        assert (replicas, chunked) == (len(bounds), [(start, stop) for start, stop in bounds if start < stop])
        if size % replicas == 0:
            assert max(map(len, counted)) - min(map(len, counted)) <= 1
    for rank, (chunk, own) in enumerate(zip(chunks, counted, strict=True)):
        start, stop = chunk.pieces[0].start, chunk.pieces[-1].stop
        assert 0 <= start < stop <= size
        parts = [piece.samples for piece in own]
        assert limit is None or not parts or (max(parts) <= limit and max(parts) - min(parts) <= 1)
        assert (sum(parts), not parts) == (chunk.samples, chunk.stand_in)
        for piece in own:
            first, last = bounds[rank if replicas is None else piece.number or 0]
            assert first <= piece.start < piece.stop <= last
        assert parts or stop - start >= min(2, size, limit or size), "batch norm needs two"
    layout = tuple(map(len, counted))
    assert {(size, layout)} == {(chunk.batch_samples, chunk.layout) for chunk in chunks}
    assert counted[0]


def split(loader: Any, world: World | None = None, **cut: Any) -> SplitLoader:
    """Return a loader split for the ranks of a test, or for one that nobody compares with others."""
    world = world or World()
    return SplitLoader(loader, Split(**{"rank": world.rank, "world_size": world.size, **cut}), world)


def read(order: Order, seeds: list[int], draws: list[int], **cut: Any) -> Any:
    """Body: return the rank's samples of each batch of two epochs, and its random state.

    Between the begin of an epoch and its first batch, and after each batch, the rank draws numbers of its own.
    """
    world, epochs = World.of(None), []
    seed(seeds[world.rank])
    loader = split(KINDS[order.kind](order.size, order.batch), world, **cut)
    stream = OrderStream(world.from_first(random_state()))
    for _ in range(2):
        items = loader.begin(stream, seed=3).items
        torch.rand(draws[world.rank])
        batches = []
        for pieces, record, _ in items:
            torch.rand(draws[world.rank])
            counted = zip(record.chunk.pieces, pieces, strict=True)
            batches.append([listed(batch) for piece, batch in counted if piece.samples])
        epochs.append(batches)
    return epochs, torch.get_rng_state()


def joined(ranks: Any) -> list[list[list[Any]]]:
    """Return the pieces of all ranks, in rank order, of each batch of each epoch."""
    return [[list(chain(*step)) for step in zip(*epoch, strict=True)] for epoch in zip(*ranks, strict=True)]


PER_RANK = st.tuples(*[st.sampled_from([7, 8])] * 4), st.tuples(*[st.integers(0, 2)] * 4)
"""The seed of each rank, and how many numbers it draws between the batches."""


@settings(max_examples=50)
@given(
    world_size=st.integers(1, 4),
    order=st.builds(Order, st.sampled_from(sorted(ORDERS | ODD)), st.integers(1, 40), st.integers(1, 12)),
    per_rank=st.tuples(*PER_RANK),
    limit=LIMITS,
    replicas=st.none() | st.integers(1, 8),
)
def test_ranks_read_the_batches_of_one_process(world, world_size, order, per_rank, limit, replicas) -> None:
    """Nothing is lost or repeated, and the order is that of a plain loader in one process in which nothing else draws.

    A rank's own random state moves with the order where it equals it, and stays where it is else.
    """
    seeds, draws = map(list, per_rank)
    seed(seeds[0])
    loader, expected = KINDS[order.kind](order.size, order.batch), []
    for _ in range(2):
        expected.append([listed(batch) for batch in loader])
    state = torch.get_rng_state()

    found = world(world_size).run(read, order, seeds, draws, replicas=replicas, max_samples=None if replicas else limit)

    samples = [[list(chain(*pieces)) for pieces in epoch] for epoch in joined([epochs for epochs, _ in found])]
    assert expected == samples
    for own, drawn, (_, after) in zip(seeds, draws, found, strict=False):
        if own == seeds[0] and drawn == 0:
            assert torch.equal(state, after)
        elif own != seeds[0]:  # it keeps its own, undisturbed
            torch.manual_seed(own)
            for count in (1 + len(expected[0]), 1 + len(expected[1])):
                for _ in range(count):
                    torch.rand(drawn)
            assert torch.equal(torch.get_rng_state(), after)


@settings(max_examples=20)
@given(
    order=st.builds(Order, st.sampled_from(sorted(WHOLE)), st.integers(1, 40), st.integers(1, 12)),
    per_rank=st.tuples(*PER_RANK),
    replicas=st.integers(1, 8),
)
def test_a_piece_draws_the_same_on_any_number_of_ranks(world, order, per_rank, replicas) -> None:
    """What dataset and `collate_fn` draw from torch, Python and NumPy follows from the piece, bit for bit."""
    seeds, draws = map(list, per_rank)
    ((alone, _),) = world(1).run(read, order, seeds, draws, replicas=replicas)
    for world_size in (2, 3):
        ranks = world(world_size).run(read, order, seeds, draws, replicas=replicas)
        assert joined([alone]) == joined([epochs for epochs, _ in ranks])


@pytest.mark.parametrize("kind", WORKERS)
def test_worker_processes_change_nothing(world, kind) -> None:
    """With workers, pieces are the same on 1 and 3 ranks; of a map-style dataset also as without workers."""
    order, seeds, draws = Order(kind, 22, 8), [7, 8, 7], [1, 0, 2]
    ((alone, _),) = world(1).run(read, order, seeds, draws, replicas=4)
    ranks = world(3).run(read, order, seeds, draws, replicas=4)
    assert joined([alone]) == joined([epochs for epochs, _ in ranks])
    without_workers = {"workers": "shuffle", "augmented, workers": "augmented"}
    if kind in without_workers:
        ((plain, _),) = world(1).run(read, order._replace(kind=without_workers[kind]), seeds, draws, replicas=4)
        assert alone == plain


class Noise(Augmented):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(())


def noise(workers: int, generator: int | None) -> list[float]:
    """Body: return what the rank's samples of a batch drew."""
    seed(7)
    own = None if generator is None else torch.Generator().manual_seed(generator)
    loader = split(DataLoader(Noise(8), 8, num_workers=workers, generator=own), World.of(None))
    return [number for batch in loader for number in batch.tolist()]


@pytest.mark.parametrize(("workers", "generator"), [(0, None), (1, None), (1, 5)])
def test_no_two_ranks_augment_alike(world, workers, generator) -> None:
    """Sample k of every chunk draws numbers of its own, in this process and in workers, whatever the seeds."""
    assert 8 == len(set(chain(*world(4).run(noise, workers, generator))))


class WorkerSeeds(Noise):
    """A dataset whose samples are the seeds of the workers that load them."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return info.seed


def seeds_of_workers(passes: int) -> list[int]:
    """Return the seeds of the persistent workers of a loader that is new in a pass."""
    loader = split(DataLoader(WorkerSeeds(8), 4, num_workers=2, persistent_workers=True))
    loader.passes = passes
    stream = OrderStream(random_state())
    return [seed for pieces, _, _ in loader.begin(stream, seed=3).items for batch in pieces for seed in batch.tolist()]


def test_a_loader_that_is_replaced_starts_its_workers_anew() -> None:
    """`reload_dataloaders_every_n_epochs` replaces it: `worker_init_fn` must not see one seed in all epochs."""
    second, third = seeds_of_workers(1), seeds_of_workers(2)
    assert 8 == len(second) == len(third)
    assert set(second).isdisjoint(third)
    assert second == seeds_of_workers(1)


def test_all_arguments_of_the_loader_are_kept() -> None:
    """The user's loader stays as it is, and what is set on ours is set on theirs: `collate_fn`, `set_epoch`."""
    options: dict[str, Any] = {"pin_memory": True, "timeout": 9, "worker_init_fn": print, "prefetch_factor": 5}
    loader: DataLoader[Any] = DataLoader(EIGHT, 4, num_workers=1, persistent_workers=True, **options)
    vars(loader)["_iterator"] = object()  # persistent workers that have already been used
    before = dict(vars(loader))

    ours = split(loader)

    assert before == vars(loader)
    assert (5, True, loader.batch_sampler) == (ours.prefetch_factor, ours.pin_memory, ours.batch_sampler)
    ours.collate_fn = tuple
    assert loader.collate_fn is tuple
    again = split(ours)
    assert again.loader is loader, "a CombinedLoader of a user, split in an earlier run, is split anew"


def test_what_is_set_on_a_loader_counts_in_the_next_pass() -> None:
    """`trainer.train_dataloader` shows the user's own loader, and a callback sets its attributes."""
    ours = split(DataLoader(EIGHT, 4), replicas=2)
    assert [[0, 1], [2, 3]] == [batch.tolist() for batch in next(iter(ours))]
    ours.collate_fn = list
    assert [[0, 1], [2, 3]] == next(iter(ours))


def test_what_workers_send_can_be_pinned() -> None:
    """`torch` pins memory inside what the copy of the loader yields, and leaves the rest as it is."""
    pieces = [Mock(**{"pin_memory.return_value": f"pinned {number}"}) for number in range(2)]
    sent = pin_memory(LoadedBatch(3, pieces, None))
    assert (3, ["pinned 0", "pinned 1"], None) == (sent.number, sent.pieces, sent.probed)


def with_attribute(owner: Any, name: str, value: Any) -> Any:
    vars(owner)[name] = value
    return owner


UNCHANGED = "used unchanged; each batch is a global batch, split into 2 chunks on 2 ranks"
SAMPLES: Any = torch.arange(4)

READ: list[tuple[Any, Reading, str]] = [
    # A loader, what a rank reads of it, and what the log says.
    (
        DataLoader(SAMPLES, 4, shuffle=True),
        Reading.INDICES,
        f"with its BatchSampler and RandomSampler: {UNCHANGED}; each rank loads its own 2 of 4 samples",
    ),
    (DataLoader(SAMPLES, 3), Reading.INDICES, "each rank loads its own 1 or 2 of 3 samples"),
    (DataLoader(SAMPLES, batch_sampler=Sized(lambda: [[0]], 1)), Reading.INDICES, "each rank loads its own samples"),
    (
        DataLoader(Stream([]), 4),
        Reading.SAMPLES,
        "^DataLoader with its BatchSampler: .*; every rank reads the whole stream, and collates its own 2 of 4 samples",
    ),
    (DataLoader(Stream([]), None), Reading.BATCHES, "every rank reads whole batches, and takes dimension 0 of .*"),
    ([SAMPLES], Reading.BATCHES, f"^list: {UNCHANGED}; every rank reads whole batches, and takes dimension 0 of .*"),
    (Changing(4, 4), Reading.BATCHES, "every rank reads whole batches, and takes dimension 0 of .*"),
]


@pytest.mark.parametrize(("loader", "reading", "told"), READ)
def test_the_log_says_how_a_loader_is_read(loader: Any, reading: Reading, told: str) -> None:
    assert reading is reading_of(loader)
    assert re.search(f"{told}$", split(loader, world_size=2).describe())


def test_the_log_says_which_chunks_are_empty() -> None:
    """8 samples fill 4 of 6 chunks, and 1 sample fills 1."""
    told = "split into 6 chunks (torch.chunk fills 4 of them with 8 samples) on 3 ranks; "
    assert told in split(DataLoader(SAMPLES, 8), world_size=3, replicas=6).describe()
    assert "(torch.chunk fills 1 of them with 1 sample)" in split(DataLoader(SAMPLES, 1), replicas=2).describe()
    assert "into 4 chunks on 1 rank" in split(DataLoader(SAMPLES, 8), replicas=4).describe()


def test_the_log_says_on_one_rank_what_is_done_with_a_loader() -> None:
    """What a rank reads of a batch is no question there."""
    told = "list: used unchanged; each batch is a global batch, split into 1 chunk on 1 rank"
    assert split([SAMPLES]).describe() == told


def test_workers_of_a_stream_are_seeded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds of workers that all read the same don't depend on the rank, whether Lightning or the user seeds them."""
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    data = Stream([])
    plain: DataLoader[Any] = DataLoader(data)
    ours = split(plain)
    _auto_add_worker_init_fn(ours, rank=3)
    assert (None, {"rank": 0}) == (plain.worker_init_fn, ours.worker_init_fn.keywords)
    for function in (pl_worker_init_function, partial(pl_worker_init_function, rank=3)):
        given: DataLoader[Any] = DataLoader(data, worker_init_fn=function)
        ours = split(given)
        assert (function, {"rank": 0}) == (given.worker_init_fn, ours.worker_init_fn.keywords)
    others: list[Any] = [print, dict]  # without a rank, and without a signature
    for other in others:
        assert split(DataLoader(data, worker_init_fn=other)).worker_init_fn is other


def failing() -> Iterator[list[int]]:
    yield from ([0, 1], [2])
    raise KeyError("out of batches")


DEALT: Any = DistributedSampler(EIGHT, num_replicas=2, rank=0)
TWO_WORKERS: list[dict[str, Any]] = [{"num_workers": 1}, {}]

# fmt: off
REFUSED: dict[str, tuple[Callable[[int], Any], dict[str, Any], list[str]]] = {
    # What returns the loader of a rank, how it is split, and what the errors of ranks 0 and 1 say, or that of all.
    "workers": (lambda rank: DataLoader(EIGHT, **TWO_WORKERS[rank]), {}, [" on rank 0; batch size "]),
    "streams of different length": (
        lambda rank: Unsized(lambda: torch.arange(20 + 4 * rank).split(4)), {},
        ["found at the end after batch 5", "found at batch 6 of"]),
    "failing sampler": (
        lambda rank: DataLoader(EIGHT, batch_sampler=Sized(failing, 3)), {}, ["out of batches"]),
    "empty indices": (
        lambda rank: DataLoader(EIGHT, batch_sampler=Sized(lambda: [[0], []], 2)), {},
        ["a loader batch has no samples: leave out empty batches"]),
    "dealt": (
        lambda rank: DataLoader(EIGHT, sampler=DEALT), {},
        ["DistributedSampler for 2 replicas, but with split_batches=True"]),
    "out of order": (
        lambda rank: with_attribute(DataLoader(EIGHT, num_workers=1), "in_order", False),
        {},
        ["Use in_order=True"],
    ),
    "a sampler by the rank": (
        lambda rank: DataLoader(EIGHT, batch_sampler=Sized(lambda: [[rank, 2], [3]], 2)), {},
        ["does not yield the same batches on all ranks: found at batch 1 of this epoch"]),
    "other samples": (
        lambda rank: DataLoader([rank] * 8, 4), {"replicas": 2},
        ["the datasets of the ranks differ: the sample of one index is not the same on all of them"]),
    "other samples of a stream": (
        lambda rank: DataLoader(Stream([rank] * 8), 4), {"replicas": 2},
        ["does not yield the same batches on all ranks: found at batch 1 of this epoch"]),
    "other batches": (
        lambda rank: [torch.full((4,), rank)], {},
        ["does not yield the same batches on all ranks: found at batch 1 of this epoch"]),
    "rows in a list beside a tensor": (
        lambda rank: [{"x": torch.ones(4), "meta": [{"target": 1}] * 4}], {},
        ["yields a ready-made batch of type dict that cannot be cut into rows: batch['meta'] is a list of 4 parts"]),
    "sharded on one rank": (
        lambda rank: DataLoader(with_attribute(Augmented(8), "sharded_by_rank", rank == 1), 4), {"replicas": 4},
        ["split, on rank 1: DataLoader or its dataset Augmented has sharded_by_rank = True"]),
}
# fmt: on


def read_refused(name: str) -> None:
    world, (make, options, _) = World.of(None), REFUSED[name]
    list(split(make(world.rank), world, **options))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_an_error_on_all_ranks(world, name) -> None:
    messages = REFUSED[name][2]
    errors = world(2).run_expecting_errors(read_refused, name)
    for error, message in zip(errors, messages if len(messages) == 2 else messages * 2, strict=True):
        assert error.type_name in ("ValueError", "RuntimeError", "KeyError")
        assert message in error.message
