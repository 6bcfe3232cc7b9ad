"""How this rank's part of a batch is collated, in worker processes where there are some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lightning_gradavg.batches.chunks import Chunk, Split, even_parts
from lightning_gradavg.random_state import random_state, same_random_state
from lightning_gradavg.tree import batch_samples, data_digest, leaves, slice_batch

__all__ = ["Apart", "Collated", "collate_of_stream", "collate_own", "collate_whole", "collated"]


class Apart(list[Any]):
    """The pieces of a rank's chunk, each collated on its own, because what holds all of them cannot be cut."""


class Collated(NamedTuple):
    """A batch as it comes out of a worker: its rows, a digest of what all ranks have of it, and this rank's part."""

    rows: int
    key: bytes
    part: Any


def collate_own(collate: Callable[[list[Any]], Any], most: int, samples: list[Any]) -> Any:
    """Collate this rank's samples of a batch, in parts of at most `most` where the batch cannot be cut."""
    batch, count = collate(samples), -(-len(samples) // most)
    if count == 1 or _rows(batch, len(samples)) is not None:
        return batch
    return Apart(collate(samples[start:stop]) for start, stop in even_parts(0, len(samples), count))


def collate_of_stream(collate: Callable[[list[Any]], Any], split: Split, samples: list[Any]) -> Collated:
    """Collate this rank's part of the samples that all ranks read."""
    chunk = split.cut(len(samples))
    own = collate_own(collate, split.max_samples or len(samples), samples[chunk.start : chunk.stop])
    return Collated(len(samples), _key_of_samples(samples), own)


def collate_whole(collate: Callable[[list[Any]], Any], split: Split, samples: list[Any]) -> Collated:
    """Collate all samples and cut this rank's part out of the batch, or collate each of its pieces anew."""
    before = random_state()
    batch = collate(samples)
    rows = _rows(batch, len(samples))
    if rows is not None:
        return collated(batch, rows, split.cut(rows))
    if not same_random_state(before, random_state()):
        raise ValueError(
            f"a batch of type {type(batch).__name__} cannot be cut into replicas, and collate_fn draws random numbers,"
            " which would differ from those of the whole batch if it collated each replica separately. Draw them in the"
            " dataset or in training_step."
        )
    chunk = split.cut(len(samples))
    bounds = [(start, stop) for _, start, stop in chunk.pieces] or [(chunk.start, chunk.stop)]
    parts = Apart(collate(samples[start:stop]) for start, stop in bounds)
    return Collated(len(samples), _key_of_samples(samples), parts if len(parts) > 1 else parts[0])


def _key_of_samples(samples: list[Any]) -> bytes:
    return data_digest((len(samples), samples[0], samples[-1]))


def _rows(batch: Any, samples: int) -> int | None:
    """Return how many rows a collated batch can be cut into, so many for each sample; None if it cannot be cut."""
    if any(hasattr(leaf, "to") and not isinstance(leaf, Tensor) for _, leaf in leaves(batch)):
        return None  # such as a graph, which would be shared
    try:
        rows = batch_samples(batch)
    except ValueError:
        return None
    return rows if rows % samples == 0 else None


def collated(batch: Any, rows: int, chunk: Chunk) -> Collated:
    """Return this rank's part of a whole batch that has so many rows."""
    return Collated(rows, data_digest(batch), slice_batch(batch, chunk.start, chunk.stop))
