"""The laws of dealt loaders, rank by rank in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from lightning_gradavg.evaluation.dealt import EvaluationLoader
from lightning_gradavg.ranks import World


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


def wrapped(loader: Any, rank: int, size: int, count: float = math.inf) -> EvaluationLoader:
    return EvaluationLoader(loader, World(None, rank, size), kept=False, counts=[count] * size)


@given(
    size=st.integers(0, 30),
    batch=st.integers(1, 7),
    world_size=st.integers(1, 6),
    limit=st.just(math.inf) | st.integers(0, 9),
)
@pytest.mark.parametrize("make", [range, Stream], ids=["indexed", "streamed"])
def test_every_batch_of_one_process_is_dealt_once(make, size, batch, world_size, limit):
    """The ranks' batches, put into order, are those of one process; rounds are as many as with DistributedSampler."""
    loader = DataLoader(make(size), batch_size=batch)
    alone = [one.tolist() for one in loader][: None if limit == math.inf else limit]
    of_ranks = [[one.tolist() for one in wrapped(loader, rank, world_size, limit)] for rank in range(world_size)]
    rounds = range(max(map(len, of_ranks)))
    assert alone == [of_rank[n] for n in rounds for of_rank in of_ranks if n < len(of_rank)]
    if limit == math.inf:
        per_rank = -(-size // world_size)
        assert -(-per_rank // batch) == len(rounds)


def test_the_loader_is_the_users():
    """Type, attributes and sampler of the user's loader can be read; what Lightning sets reaches the copy only."""
    loader = DataLoader(range(5), batch_size=2, num_workers=0)
    ours = wrapped(loader, 1, 2, 3)
    assert (loader.dataset, 2, loader.sampler) == (ours.dataset, ours.batch_size, ours.batch_sampler.sampler)
    assert 2 == len(ours)
    ours.worker_init_fn = print
    assert (None, print) == (loader.worker_init_fn, ours._read.worker_init_fn)
    with pytest.raises(AttributeError, match="no_such"):
        ours.no_such  # noqa: B018  # reading it is the test
    with pytest.raises(TypeError, match="no length"):
        len(wrapped(Stream(3), 0, 2))  # as Lightning expects of a stream
