"""Split loaders: the ranks' parts of a batch are, batch for batch, what a plain loader yields to one process."""

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
from orders import ODD, ORDERS, WHOLE, WORKERS, Augmented, Changing, Graphs, Sized, Unsized, listed, seed
from ranks import grid
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data._utils.pin_memory import pin_memory
from toys import Stream

from lightning_gradavg._support.collectives import World
from lightning_gradavg.batches.chunks import Chunk, Collated, Split, chunk_bounds, cut_pieces, even_bounds
from lightning_gradavg.batches.loader import SplitLoader

# Python 3.12 and later, of the workers that are forked from a process with threads.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")

EIGHT: Any = range(8)
LIMITS = st.none() | st.integers(min_value=1, max_value=7)


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
    assert len(pieces) == len({piece.replica for piece in pieces})
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
        assert (chunk.start, chunk.stop) == (chunk.pieces[0].start, chunk.pieces[-1].stop)
        assert 0 <= chunk.start < chunk.stop <= size
        parts = [piece.samples for piece in own]
        assert limit is None or not parts or (max(parts) <= limit and max(parts) - min(parts) <= 1)
        assert (sum(parts), not parts) == (chunk.samples, chunk.stand_in)
        for piece in own:
            first, last = bounds[rank if replicas is None else piece.replica or 0]
            assert first <= piece.start < piece.stop <= last
        assert parts or chunk.stop - chunk.start >= min(2, size, limit or size), "batch norm needs two"
    layout = tuple(map(len, counted))
    assert {(size, layout)} == {(chunk.batch_samples, chunk.layout) for chunk in chunks}
    assert counted[0]


def split(loader: Any, world: World | None = None, **cut: Any) -> SplitLoader:
    """Return a loader split for the ranks of a test, or for one that nobody compares with others."""
    world = world or World()
    return SplitLoader(loader, Split(**{"rank": world.rank, "world_size": world.size, **cut}), world)


def samples_of(batch: Any, chunk: Chunk) -> list[Any]:
    parts = cut_pieces(batch, chunk) if len(chunk.pieces) > 1 else [batch]
    rows = list(zip(chunk.pieces, map(listed, parts), strict=True))
    assert all(len(of_piece) == piece.stop - piece.start for piece, of_piece in rows)
    return [row for piece, of_piece in rows if piece.samples for row in of_piece]


def read(order: Order, seeds: list[int], draws: list[int], **cut: Any) -> Any:
    """Body: return the rank's samples of each batch of two epochs, and its random state."""
    world, epochs = World.of(None), []
    seed(seeds[world.rank])
    loader = split(KINDS[order.kind](order.size, order.batch), world, **cut)
    for _ in range(2):
        items = loader.begin().items
        torch.rand(draws[world.rank])
        epochs.append([samples_of(batch, record.chunk) for batch, record in items])
    return epochs, torch.get_rng_state()


def assert_as_one_process(ranks: Any, order: Order, seeds: list[int], draws: list[int], **cut: Any) -> None:
    """In two epochs the ranks' parts are what one process reads with rank 0's seed, and its random state is rank 0's.

    Hooks of a rank may draw between the begin of an epoch and its first batch.
    """
    seed(seeds[0])
    loader, expected = KINDS[order.kind](order.size, order.batch), []
    for _ in range(2):
        batches = iter(loader)
        torch.rand(draws[0])
        expected.append([listed(batch) for batch in batches])
    state = torch.get_rng_state()

    found = ranks.run(read, order, seeds, draws, **cut)

    for epoch, *of_ranks in zip(expected, *(epochs for epochs, _ in found), strict=True):
        assert epoch == [list(chain(*step)) for step in zip(*of_ranks, strict=True)]
    for own, drawn, (_, after) in zip(seeds, draws, found, strict=False):
        if own != seeds[0]:  # it keeps its own, undisturbed
            torch.manual_seed(own)
            torch.rand(2 * drawn)
            assert torch.equal(torch.get_rng_state(), after)
        elif drawn == draws[0]:
            assert torch.equal(state, after)


PER_RANK = st.tuples(*[st.sampled_from([7, 8])] * 4), st.tuples(*[st.integers(0, 2)] * 4)
"""The seed of each rank, and how many numbers it draws before its first batch."""


@settings(max_examples=50)
@given(
    world_size=st.integers(1, 4),
    whole=st.booleans(),
    order=st.builds(Order, st.sampled_from(sorted(ORDERS | ODD | WHOLE)), st.integers(1, 40), st.integers(1, 12)),
    per_rank=st.tuples(*PER_RANK),
    limit=LIMITS,
    replicas=st.none() | st.integers(1, 8),
)
def test_ranks_read_the_batches_of_one_process(world, world_size, whole, order, per_rank, limit, replicas) -> None:
    """Whatever the loader is, nothing is lost or repeated, and the order is that of one process, bit for bit."""
    whole |= order.kind in WHOLE
    cut = {"replicas": replicas, "whole": whole, "max_samples": None if whole or replicas else limit}
    assert_as_one_process(world(world_size), order, *map(list, per_rank), **cut)


@pytest.mark.parametrize(("kind", "world_size"), grid([*WORKERS], [3, 1], strength=1))
def test_worker_processes_change_nothing(world, kind, world_size) -> None:
    cut = {"replicas": 4, "whole": True} if "augmented" in kind else {}
    assert_as_one_process(world(world_size), Order(kind, 22, 8), [7, 8, 7], [0] * 3, **cut)


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


def test_all_arguments_of_the_loader_are_kept() -> None:
    """The copy that is read has every attribute of the user's loader, but a batch sampler that asks the user's."""
    options: dict[str, Any] = {"pin_memory": True, "timeout": 9, "worker_init_fn": print, "prefetch_factor": 5}
    loader: DataLoader[Any] = DataLoader(EIGHT, 4, num_workers=1, persistent_workers=True, **options)
    vars(loader)["_iterator"] = object()  # persistent workers that have already been used
    before = dict(vars(loader))

    copy = split(loader)

    read = vars(copy._read)
    assert before == vars(loader)
    assert {"batch_sampler", "_iterator"} == {name for name in read if read[name] is not before[name]}
    assert read["_iterator"] is None, "its workers are its own"
    assert copy.batch_sampler is loader.batch_sampler
    again = split(copy)
    assert again.loader is loader, "a CombinedLoader of a user, split in an earlier run, is split anew"


def test_what_workers_send_can_be_pinned() -> None:
    """`torch` pins memory inside what the copy of the loader yields, and leaves the rest as it is."""
    sent = pin_memory(Collated(3, b"digest", Mock(**{"pin_memory.return_value": "pinned"})))
    assert (3, b"digest", "pinned") == (sent.rows, sent.digest, sent.part)


def flagged(value: Any) -> Any:
    return with_attribute(value, "draws_no_random_numbers", True)


def with_attribute(owner: Any, name: str, value: Any) -> Any:
    vars(owner)[name] = value
    return owner


OWN, BATCHES = "each rank loads its own samples only", "every rank reads whole batches"
UNCHANGED = "used unchanged; each batch is a global batch, split into 2 chunks on 2 ranks"
SAMPLES: Any = torch.arange(4)

READ: list[tuple[Any, bool, str]] = [
    # A loader, whether its batches are those of one process in all that is drawn, and what the log says.
    (DataLoader(SAMPLES, shuffle=True), False, f"with its BatchSampler and RandomSampler: {UNCHANGED}; {OWN}"),
    (DataLoader(flagged(Augmented(4))), True, OWN),
    (flagged(DataLoader(Augmented(4))), True, OWN),
    (DataLoader(Augmented(4)), True, f"{BATCHES}, so that random .* set draws_no_random_numbers = True.*"),
    (DataLoader(flagged(Augmented(4)), collate_fn=list), True, f"{BATCHES}, as your collate_fn .*"),
    (flagged(Changing(4, 1)), True, f"{BATCHES}, as your collate_fn or your loader.*"),
    (DataLoader(Stream([])), False, f"^DataLoader with its BatchSampler: .*; {BATCHES}, as a stream has no indices.*"),
    ([SAMPLES], False, f"^list: {UNCHANGED}; {BATCHES}, as only a DataLoader .*"),
]


@pytest.mark.parametrize(("loader", "whole", "told"), READ)
def test_the_log_says_how_a_loader_is_read(loader: Any, whole: bool, told: str) -> None:
    """All is read whole that must be so, unless the user says that it draws nothing."""
    assert re.search(f"{told}$", split(loader, whole=whole, world_size=2).describe())


def test_the_log_says_on_one_rank_what_is_done_with_a_loader() -> None:
    """What a rank reads of a batch is no question there."""
    told = "list: used unchanged; each batch is a global batch, split into 1 chunk on 1 rank"
    assert split([SAMPLES]).describe() == told


def test_workers_are_seeded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds of workers do not depend on the rank, whether Lightning or the user has them seeded, in the copy alone."""
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    data = Augmented(4)
    plain: DataLoader[Any] = DataLoader(data)
    copy = split(plain, whole=True)
    _auto_add_worker_init_fn(copy, rank=3)
    assert (None, {"rank": 0}) == (plain.worker_init_fn, copy.worker_init_fn.keywords)
    for function in (pl_worker_init_function, partial(pl_worker_init_function, rank=3)):
        given: DataLoader[Any] = DataLoader(data, worker_init_fn=function)
        copy = split(given, whole=True)
        assert (function, {"rank": 0}) == (given.worker_init_fn, copy.worker_init_fn.keywords)
    others: list[Any] = [print, dict]  # without a rank, and without a signature
    for other in others:
        assert split(DataLoader(data, worker_init_fn=other), whole=True).worker_init_fn is other


def failing() -> Iterator[list[int]]:
    yield from ([0, 1], [2])
    raise KeyError("out of batches")


def drawing(samples: list[Any]) -> Graphs:
    torch.rand(())
    return Graphs(samples)


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
        lambda rank: DataLoader(EIGHT, batch_sampler=Sized(failing, 3)), {},
        ["out of batches", "the batch sampler of rank 0, whose order counts, raised KeyError('out of batches')"]),
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
    "more batches": (
        lambda rank: Changing(8, 2, lambda batches: [*batches, batches[0]]), {}, ["Changing yielded more batches"]),
    "other samples": (
        lambda rank: DataLoader([rank] * 8, 4), {"whole": True, "replicas": 2},
        ["does not yield the same batches on all ranks: found at batch 1 of this epoch"]),
    "sharded on one rank": (
        lambda rank: DataLoader(with_attribute(Augmented(8), "sharded_by_rank", rank == 1), 4), {"replicas": 4},
        ["split, on rank 1: DataLoader or its dataset Augmented has sharded_by_rank = True"]),
    "graphs, collated with draws": (
        lambda rank: DataLoader(EIGHT, collate_fn=drawing), {"whole": True},
        ["Graphs cannot be cut into replicas, and collate_fn draws random numbers"]),
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
