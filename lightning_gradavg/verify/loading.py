"""What the loaders of a process read: the samples of each batch, before `collate_fn` makes one of them.

Loaders load in this process, and a data set's random numbers depend on the index alone, so a sample is the same
wherever it is read.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from lightning_gradavg._support.random_state import random_state, restore_random_state, same_random_state, seeded
from lightning_gradavg._support.tree import bits
from lightning_gradavg.verify.borders import pieces_of, sources_of
from lightning_gradavg.verify.records import EpochReading, RankBatch, SampleId

__all__ = ["NO_COLLATE_FN", "Loading", "read_epoch", "seed_process"]

NO_COLLATE_FN = (
    "no collate_fn makes the loader's batches, so their samples are unknown: use one DataLoader with a batch_size"
)

_MOST_BATCHES = 20_000  # of an epoch that is read by its indices

_SAMPLERS = (SequentialSampler, RandomSampler, DistributedSampler)
"""Those that read every sample once."""


def seed_process(text: str) -> None:
    """Seed the generators of torch, Python and NumPy."""
    restore_random_state(seeded(hashlib.blake2b(text.encode(), digest_size=24).digest()))


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


def _id_of(packed: bytes) -> SampleId:
    return hashlib.blake2b(packed, digest_size=12).digest()


class _SeededDataset:
    """A data set whose random numbers depend on the index alone.

    Attributes:
        indices: The indices that were read since the list was last emptied.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.indices: list[Hashable] = []

    def __getitem__(self, index: Hashable) -> object:
        state = random_state()
        seed_process(f"sample {index}")
        self.indices.append(index)
        try:
            return self._dataset[index]
        finally:
            restore_random_state(state)


class _RecordingCollate:
    """Collates as the user's `collate_fn` does, and notes what the batch is made of.

    It stands in the fetcher of one pass of a loader, which calls it with the samples that it just read.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any], dataset: _SeededDataset, note: Callable[[object, RankBatch], None]
    ) -> None:
        self._collate, self._dataset, self._note = collate, dataset, note

    def __call__(self, samples: list[object]) -> object:
        # Before them, a strategy may have loaded samples to compare them between ranks.
        indices = self._dataset.indices[-len(samples) :]
        self._dataset.indices = []
        unknown_because = ""
        packed: list[bytes] = []
        try:
            packed = [_packed(sample) for sample in samples]
        except Exception:  # noqa: BLE001  # pickle raises nearly anything
            unknown_because = "a sample cannot be copied"
        # One process collates these samples again, with those of other ranks.
        before = random_state()
        collated = self._collate(samples)
        if not same_random_state(before, random_state()):
            unknown_because = "collate_fn draws random numbers"
        rank_batch = RankBatch(
            packed_samples=packed,
            sample_ids=[_id_of(sample) for sample in packed],
            indices=indices,
            size=len(samples),
            unknown_because=unknown_because,
        )
        self._note(collated, rank_batch)
        return collated


class _NotedBatch(NamedTuple):
    batch: object  # kept alive, so that no other object gets its id
    rank_batch: RankBatch


class Loading:
    """Lets the loaders of a process load in it, and knows what the batches that were not trained on yet are made of.

    `internals.fetched_here` calls `watch` when a pass of a loader begins. The collate function that it puts there calls
    `note` for each batch. The recorder calls `pop` when the batch arrives at training.
    """

    def __init__(self) -> None:
        self._noted: dict[int, _NotedBatch] = {}

    def watch(self, fetcher: Any) -> None:
        """Have a pass of a `DataLoader` note its batches."""
        if not fetcher.auto_collation:
            return  # the loader has batch_size=None, so there is no `collate_fn` of samples
        sources = sources_of(fetcher)
        dataset = _SeededDataset(sources.of_dataset.dataset)
        if not isinstance(sources.of_dataset.dataset, IterableDataset):
            sources.of_dataset.dataset = dataset
        collate = getattr(sources.of_collate, sources.collate_name)
        setattr(sources.of_collate, sources.collate_name, _RecordingCollate(collate, dataset, self.note))

    def note(self, batch: object, rank_batch: RankBatch) -> None:
        """Remember what a batch is made of."""
        self._noted[id(batch)] = _NotedBatch(batch, rank_batch)

    def pop(self, batch: object) -> RankBatch:
        """Return what a batch is made of, and forget it; of an unknown batch, that its samples are unknown."""
        of_pieces: list[RankBatch] = []
        for piece in pieces_of(batch):
            noted = self._noted.pop(id(piece), None)
            if noted is None:
                return RankBatch(unknown_because=NO_COLLATE_FN)
            of_pieces.append(noted.rank_batch)
        if len(of_pieces) == 1:
            return of_pieces[0]
        joined = RankBatch(size=0)
        for of_piece in of_pieces:
            joined = RankBatch(
                packed_samples=[*joined.packed_samples, *of_piece.packed_samples],
                sample_ids=[*joined.sample_ids, *of_piece.sample_ids],
                indices=[*joined.indices, *of_piece.indices],
                size=joined.size + of_piece.size,
                unknown_because=joined.unknown_because or of_piece.unknown_because,
                piece_sizes=[*joined.piece_sizes, of_piece.size],
            )
        return joined

    def first_samples(self, loader: Any, number: int) -> list[list[SampleId]]:
        """Return the samples of the first batches of a pass over a loader, until there are so many; none if unknown.

        The random state of the process is afterwards as before.
        """
        state = random_state()
        batches: list[list[SampleId]] = []
        read = 0
        try:
            for batch in loader:
                sample_ids = list(self.pop(batch).sample_ids)
                if not sample_ids:
                    return []
                batches.append(sample_ids)
                read += len(sample_ids)
                if read >= number:
                    break
        except Exception:  # noqa: BLE001  # of the user's loader, which may be read once only
            return []
        finally:
            restore_random_state(state)
        return batches


def read_epoch(loader: Any, batches: Sequence[Sequence[SampleId]] = ()) -> EpochReading:
    """Return what one pass over a loader reads.

    Args:
        loader: The user's loader.
        batches: The samples of its first batches, if they are known.
    """
    samples = [sample for batch in batches for sample in batch]
    batch_size = len(batches[0]) if batches else 0
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return EpochReading(samples, batch_size)
    if isinstance(loader.dataset, IterableDataset):
        return EpochReading(samples, batch_size)
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    # A plain list may be a batch sampler, too.
    package = type(loader.batch_sampler).__module__.partition(".")[0]
    state = random_state()
    try:
        read = list(islice(loader.batch_sampler, _MOST_BATCHES))
        dataset: Any = loader.dataset
        dataset_size = len(dataset)
    except Exception:  # noqa: BLE001  # of the user's sampler or data set
        return EpochReading(samples, batch_size)
    finally:
        restore_random_state(state)
    indices: list[Hashable] | None = None
    if len(read) < _MOST_BATCHES:
        indices = [index for batch in read for index in batch]
    return EpochReading(
        samples=samples,
        batch_size=batch_size,
        indices=indices,
        dataset_size=dataset_size,
        dropped=(loader.batch_size or 0) if loader.drop_last else 0,
        replaces=getattr(sampler, "replacement", False),
        own_sampler=package not in ("torch", "builtins") or not isinstance(sampler, _SAMPLERS),
    )
