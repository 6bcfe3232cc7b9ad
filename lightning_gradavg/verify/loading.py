"""What the loaders of a process read: the samples of each batch, before `collate_fn` makes one of them.

Loaders load in this process, and a data set's random numbers depend on the index alone, so a sample is the same
wherever it is read.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset

from lightning_gradavg._lightning.loaders import distributed_sampler
from lightning_gradavg._support.random_state import (
    drawing_from,
    random_state,
    restore_random_state,
    same_random_state,
    stream_key,
)
from lightning_gradavg._support.tree import bits, digest_of, leaves
from lightning_gradavg.verify.borders import pieces_of, sources_of
from lightning_gradavg.verify.records import EpochReading, RankBatch, RecordedPiece, SampleId

__all__ = ["NO_COLLATE_FN", "Loading", "read_epoch"]

NO_COLLATE_FN = (
    "no collate_fn makes the loader's batches, so their samples are unknown: use one DataLoader with a batch_size"
)

_PROBED_SAMPLES = 8
"""So many samples of a data set are compared between the ranks."""


class _Packer(pickle.Pickler):
    """Writes equal samples as equal bytes, and of a view not the storage behind it."""

    def reducer_override(self, value: object) -> Any:
        if type(value) is not Tensor or value.layout != torch.strided:
            return NotImplemented
        return _unpacked_tensor, (bytearray(bits(value)), value.dtype, tuple(value.shape))


def _unpacked_tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:  # `torch.frombuffer` refuses an empty buffer
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def _packed(sample: object) -> bytes:
    stream = io.BytesIO()
    _Packer(stream).dump(sample)
    return stream.getvalue()


def _piece_of(samples: Sequence[object], indices: Sequence[Hashable]) -> RecordedPiece:
    """Return the record of samples, before `collate_fn` may change them."""
    try:
        packed = [_packed(sample) for sample in samples]
    except Exception:  # noqa: BLE001  # pickle raises nearly anything
        return RecordedPiece(size=len(samples), unknown_because="a sample cannot be copied")
    sample_ids = [hashlib.blake2b(sample, digest_size=12).digest() for sample in packed]
    return RecordedPiece(packed, sample_ids, indices, len(samples))


class _SeededDataset:
    """A data set whose random numbers depend on the index alone.

    Attributes:
        indices: The indices that were read since the list was last emptied.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.indices: list[Hashable] = []

    def __getitem__(self, index: Hashable) -> object:
        self.indices.append(index)
        with drawing_from(stream_key(0, f"sample {index}")):
            return self._dataset[index]


class Loading:
    """Lets the loaders of a process load in it, and knows what the batches that were not trained on yet are made of.

    `internals.fetched_here` calls `watch` when a pass of a loader begins. The collate function that it puts there calls
    `note` for each batch. The recorder calls `pop` when the batch arrives at training.
    """

    def __init__(self) -> None:
        # Each batch by its id, with itself, so that no other object gets its id.
        self._noted: dict[int, tuple[object, RecordedPiece]] = {}

    def watch(self, fetcher: Any) -> None:
        """Have a pass of a `DataLoader` note its batches."""
        if not fetcher.auto_collation:
            return  # the loader has batch_size=None, so there is no `collate_fn` of samples
        sources = sources_of(fetcher)
        dataset = _SeededDataset(sources.of_dataset.dataset)
        if not isinstance(sources.of_dataset.dataset, IterableDataset):
            sources.of_dataset.dataset = dataset
        user_collate = getattr(sources.of_collate, sources.collate_name)

        def collate(samples: list[object]) -> object:
            # Before them, a strategy may have loaded samples to compare them between ranks.
            indices = dataset.indices[-len(samples) :]
            dataset.indices = []
            piece = _piece_of(samples, indices)
            # One process collates these samples again, with those of other ranks.
            before = random_state()
            batch = user_collate(samples)
            if not same_random_state(before, random_state()):
                piece.unknown_because = "collate_fn draws random numbers"
            self.note(batch, piece)
            return batch

        setattr(sources.of_collate, sources.collate_name, collate)

    def note(self, batch: object, piece: RecordedPiece) -> None:
        """Remember what a batch is made of."""
        self._noted[id(batch)] = (batch, piece)

    def pop(self, batch: object) -> RankBatch:
        """Return what a batch is made of, and forget it; of an unknown batch, that its samples are unknown."""
        unknown = RecordedPiece(unknown_because=NO_COLLATE_FN)
        pieces = []
        for piece in pieces_of(batch):
            _, known = self._noted.pop(id(piece), (piece, unknown))
            pieces.append(known)
        return RankBatch(pieces)

    def first_samples(self, loader: Any, number: int) -> list[list[SampleId]]:
        """Return the samples of the first batches of a pass over a loader, until there are so many; none if unknown.

        The random state of the process is afterwards as before.
        """
        state = random_state()
        batches: list[list[SampleId]] = []
        try:
            for batch in loader:
                batches.append(self.pop(batch).sample_ids)
                number -= len(batches[-1])
                if number <= 0 or not batches[-1]:
                    break
        except Exception:  # noqa: BLE001  # of the user's loader, which may be read once only
            return []
        finally:
            restore_random_state(state)
        return batches


def read_epoch(loader: Any, batches: Sequence[Sequence[SampleId]] = ()) -> EpochReading:
    """Return what one pass over the user's loader reads, of which the samples of the first batches may be known."""
    samples = [sample for batch in batches for sample in batch]
    batch_size = 0
    if batches:
        batch_size = len(batches[0])
    length = math.nan
    # Any other batch sampler may read what it likes, as often as it likes.
    if type(getattr(loader, "batch_sampler", None)) is BatchSampler:
        with suppress(Exception):  # of the user's sampler
            length = len(loader.sampler)
    held = _held_by(getattr(loader, "dataset", None))
    return EpochReading(samples, batch_size, length, distributed_sampler(loader) is not None, held)


def _held_by(dataset: Any) -> dict[str, list[bytes]]:
    """Return digests of the parts of some samples of a data set, by their place, such as "sample[0]".

    All are loaded three times, each sample from one random state. A part of which any differs draws from a generator of
    its own, and is left out.
    """
    with suppress(Exception):  # of the user's data set, or a stream has no indices
        first, *others = [_digests(dataset) for _ in range(3)]
        return {place: parts for place, parts in first.items() if all(other.get(place) == parts for other in others)}
    return {}


def _digests(dataset: Any) -> dict[str, list[bytes]]:
    samples = _SeededDataset(dataset)
    held: dict[str, list[bytes]] = {}
    for number in range(_PROBED_SAMPLES):
        sample = samples[number * (len(dataset) - 1) // (_PROBED_SAMPLES - 1)]
        for place, part in leaves(sample, "sample", is_leaf=_is_list):
            held.setdefault(place, []).append(digest_of(part, bits, size=12))
    return held


def _is_list(part: object) -> bool:
    return isinstance(part, list)  # as of tokens
