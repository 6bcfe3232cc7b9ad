"""Laws of the split, for all sizes: nothing is lost, nothing is repeated, and the order is that of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from lockstep import Stream, Unsized, epochs, global_batches, on_ranks
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from lightning_gradavg.batches.chunks import Split, chunk_bounds

sizes = st.integers(min_value=1, max_value=40)
worlds = st.integers(min_value=1, max_value=6)
limits = st.none() | st.integers(min_value=1, max_value=7)


@given(size=st.integers(0, 200), parts=st.integers(1, 20))
def test_chunks_are_those_of_torch(size: int, parts: int) -> None:
    """`chunk_bounds` cuts as `torch.chunk` does, and only adds the empty chunks at the end."""
    expected = [chunk.tolist() for chunk in torch.arange(size).chunk(parts)] if size else []

    chunks = [list(range(start, stop)) for start, stop in chunk_bounds(size, parts)]

    assert parts == len(chunks)
    assert expected == [chunk for chunk in chunks if chunk]
    assert list(range(size)) == [item for chunk in chunks for item in chunk]


@given(size=sizes, world_size=worlds, replicas=st.none() | st.integers(1, 8), limit=limits)
def test_pieces_cover_the_batch_once(size: int, world_size: int, replicas: int | None, limit: int | None) -> None:
    """The ranks' pieces hold every sample once, in order, and never too many."""
    limit = limit if replicas is None else None
    splits = [Split(rank, world_size, replicas, limit) for rank in range(world_size)]

    chunks = [split.cut(size) for split in splits]

    pieces = [piece for chunk in chunks for piece in chunk.pieces if piece.samples]
    assert list(range(size)) == [sample for _, start, stop in pieces for sample in range(start, stop)]
    assert len(pieces) == len({piece.replica for piece in pieces})
    bounds = chunk_bounds(size, replicas or world_size)
    for rank, chunk in enumerate(chunks):
        assert 0 <= chunk.start < chunk.stop <= size
        parts = [piece.samples for piece in chunk.pieces if piece.samples]
        assert limit is None or not parts or (max(parts) <= limit and max(parts) - min(parts) <= 1)
        assert chunk.samples == sum(parts)
        if parts:
            assert (chunk.start, chunk.stop) == (chunk.pieces[0].start, chunk.pieces[-1].stop)
        for piece in chunk.pieces[: len(parts)]:
            replica = piece.replica if replicas is not None and piece.replica is not None else rank
            assert bounds[replica][0] <= piece.start < piece.stop <= bounds[replica][1]
        if chunk.stand_in and min(size, limit or size) > 1:
            assert chunk.stop - chunk.start >= 2
    layout = tuple(len(chunk.pieces) * (not chunk.stand_in) for chunk in chunks)
    assert {(size, layout)} == {(one.batch_samples, one.layout) for one in chunks}
    assert not chunks[0].stand_in


ORDERS: dict[str, Callable[[int, int, bool], Any]] = {
    # Of a number of samples, in batches of so many, without a short one.
    "sequential": lambda size, batch, drop: DataLoader(of(size), batch, drop_last=drop),
    "shuffle": lambda size, batch, drop: DataLoader(of(size), batch, drop_last=drop, shuffle=True),
    "generator": lambda size, batch, drop: DataLoader(
        of(size), batch, drop_last=drop, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "weighted": lambda size, batch, drop: DataLoader(
        of(size), batch, drop_last=drop, sampler=WeightedRandomSampler([1.0 + item for item in range(size)], size)
    ),
    "replacement": lambda size, batch, drop: DataLoader(
        of(size), batch, drop_last=drop, sampler=RandomSampler(of(size), replacement=True, num_samples=2 * size)
    ),
    "batches": lambda size, batch, drop: DataLoader(
        of(size), batch_sampler=BatchSampler(RandomSampler(of(size)), batch, drop)
    ),
    "eager": lambda size, batch, drop: DataLoader(
        of(size), batch_sampler=Unsized(lambda: [part.tolist() for part in torch.randperm(size).split(batch)])
    ),
    "stream": lambda size, batch, drop: DataLoader(Stream(size), batch, drop_last=drop),
    "list": lambda size, batch, drop: list(of(size).split(batch)),
}


def of(size: int) -> Any:
    return torch.arange(size)


@given(
    size=sizes,
    batch_size=st.integers(1, 12),
    world_size=worlds,
    limit=limits,
    drop_last=st.booleans(),
    order=st.sampled_from(sorted(ORDERS)),
)
def test_global_batches_are_those_of_one_process(
    size: int, batch_size: int, world_size: int, limit: int | None, drop_last: bool, order: str
) -> None:
    """Over two epochs, every global batch holds the samples of the plain loader in its order, whatever it is."""

    def make() -> Any:
        return ORDERS[order](size, batch_size, drop_last)

    loader = make()
    torch.manual_seed(7)
    expected = [[batch.tolist() for batch in loader] for _ in range(2)]
    state = torch.get_rng_state()

    ranks = on_ranks(world_size, epochs(make, 2), max_samples=limit)

    for epoch in range(2):
        assert expected[epoch] == global_batches([taken[epoch] for taken in ranks])
    on_ranks(1, epochs(make, 2), seeds=[7], max_samples=limit)
    assert torch.equal(state, torch.get_rng_state()), "rank 0 draws what one process draws"
