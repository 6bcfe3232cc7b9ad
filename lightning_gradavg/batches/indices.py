"""The indices of a map-style loader: rank 0 asks its samplers, and sends what they yield to all ranks, in blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_gradavg.batches.chunks import EMPTY_BATCH, Split
from lightning_gradavg.batches.order import Mark, Order
from lightning_gradavg.tree import data_digest

__all__ = ["Asked", "SharedIndices"]

_BLOCK = 256
"""Batches of indices that are sent at once, where the sampler draws no random numbers and sees nothing of training."""

# They draw from a global generator for their first index only, whatever happens between the batches.
_DRAW_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Asked(NamedTuple):
    """A batch whose indices were asked for: the place after it, None where it is passed over, and its samples."""

    mark: Mark | None
    samples: int


class SharedIndices:
    """The batch sampler of a copy of the loader: what rank 0's yields, on every rank whole or its own part of it.

    Args:
        batch_sampler: The user's.
        split: Says which samples are this rank's; None if it loads all.
        loads_again: Whether batches that were trained on are loaded again.

    Attributes:
        order: That of the next pass.
        noted: What the copy of the loader has still to yield.
    """

    order: Order
    noted: deque[Asked]

    def __init__(self, batch_sampler: Any, split: Split | None, *, loads_again: bool) -> None:
        self._batch_sampler, self._split, self._loads_again = batch_sampler, split, loads_again
        inner = getattr(batch_sampler, "sampler", None)
        self._draws_once = type(batch_sampler) is BatchSampler and type(inner) in _DRAW_ONCE

    def __len__(self) -> int:
        return len(self._batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        order = self.order
        with order.drawing():
            order.agree("made")
            batches = iter(self._batch_sampler) if order.world.rank == 0 else iter(())
        return self._shared(self._asked(batches, order), order, self.noted)

    def _asked(self, batches: Iterator[Any], order: Order) -> Iterator[Any]:
        """Yield what rank 0's sampler yields, on all ranks."""
        size = 1
        order.agree("first")
        while True:
            block, error, drawn = [], None, None
            if order.world.rank == 0:
                with order.drawing():
                    before = order.stream.state
                    try:
                        block = list(map(_listed, islice(batches, size)))
                    except Exception as raised:  # noqa: BLE001  # the other ranks would wait for it
                        error = raised
                    drawn = (before, order.stream.state) if size == 1 else None
            block, message, drawn = order.world.from_first((block, error and repr(error), drawn))
            if drawn is not None:
                order.follow(*drawn)
            yield from block
            if message:
                raise error or RuntimeError(f"the batch sampler of rank 0, whose order counts, raised {message}")
            if len(block) < size:
                return
            size = min(2 * size, _BLOCK) if self._draws_once else 1

    def _shared(self, batches: Iterator[Any], order: Order, noted: deque[Asked]) -> Iterator[Any]:
        """Yield the indices that this rank loads, and pass over batches that were trained on."""
        for indices in batches:
            mark = order.note(data_digest(indices), len(indices))
            if mark is not None or self._loads_again:
                noted.append(Asked(mark, len(indices)))
                chunk = None if self._split is None else self._split.cut(len(indices))
                yield indices if chunk is None else indices[chunk.start : chunk.stop]


def _listed(indices: Any) -> list[Any]:
    listed: list[Any] = indices.tolist() if isinstance(indices, Tensor) else list(indices)
    if not listed:
        raise ValueError(EMPTY_BATCH)
    return listed
