"""How this rank's part of a batch is collated, in worker processes where there are some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lightning_gradavg.batches.chunks import Chunk, Split
from lightning_gradavg.random_state import random_state, same_random_state
from lightning_gradavg.tree import batch_samples, data_digest, leaves, slice_batch

__all__ = ["Apart", "Collated", "PartCollator", "cut_out"]


class Apart(list[Any]):
    """The pieces of a rank's chunk, each collated on its own, because what holds all of them cannot be cut."""


class Collated(NamedTuple):
    """A batch as it comes out of a worker: its rows, a digest of what all ranks have of it, and this rank's part."""

    rows: int
    key: bytes
    part: Any


@dataclass(frozen=True)
class PartCollator:
    """Collates this rank's part of a batch from the samples that all ranks read.

    What cannot be cut, such as a batch of graphs, is collated piece by piece.

    Attributes:
        collate: The user's function.
        split: Says which samples are this rank's.
        whole: Whether it collates all samples and cuts the part out, for padding and mixing to be those of one process.
    """

    collate: Callable[[list[Any]], Any]
    split: Split
    whole: bool = False

    def __call__(self, samples: list[Any]) -> Collated:
        """Return this rank's part of the batch of these samples."""
        chunk, before = self.split.cut(len(samples)), random_state() if self.whole else None
        own = samples if self.whole else samples[chunk.start : chunk.stop]
        batch = self.collate(own)
        rows, key = _rows(batch, len(own)), data_digest((len(samples), samples[0], samples[-1]))
        if self.whole and rows is not None:
            return cut_out(batch, rows, self.split.cut(rows))
        if not self.whole and (rows is not None or len(chunk.pieces) <= 1):
            return Collated(len(samples), key, batch)
        if before is not None and not same_random_state(before, random_state()):
            raise ValueError(
                f"a batch of type {type(batch).__name__} cannot be cut into replicas, and collate_fn draws random"
                " numbers, which would differ from those of the whole batch if it collated each replica separately."
                " Draw them in the dataset or in training_step."
            )
        bounds = [(start, stop) for _, start, stop in chunk.pieces] or [(chunk.start, chunk.stop)]
        parts = Apart(self.collate(samples[start:stop]) for start, stop in bounds)
        return Collated(len(samples), key, parts if len(parts) > 1 else parts[0])


def _rows(batch: Any, samples: int) -> int | None:
    """Return how many rows a collated batch can be cut into, so many for each sample; None if it cannot be cut."""
    if any(hasattr(leaf, "to") and not isinstance(leaf, Tensor) for _, leaf in leaves(batch)):
        return None  # such as a graph, which would be shared
    try:
        rows = batch_samples(batch)
    except ValueError:
        return None
    return rows if rows % samples == 0 else None


def cut_out(batch: Any, rows: int, chunk: Chunk) -> Collated:
    """Return this rank's part of a whole batch that has so many rows."""
    return Collated(rows, data_digest(batch), slice_batch(batch, chunk.start, chunk.stop))
