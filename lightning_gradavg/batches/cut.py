"""What loads a rank's pieces of a loader batch, in this process or in a worker, by the user's dataset and `collate_fn`.

A loader batch is a list of indices until somebody loads it. So the list is cut, and not what `collate_fn` makes of it:

    loader batch  [7 2 9 4 0 5 1]      the user's batch sampler, in one order on all ranks
    pieces        [7 2 9] [4 0 5] [1]  as `chunks.py` says
    rank 1 of 2                   [1]  loads and collates its own, each piece by itself, from a stream of its own

`indices_copy` returns a copy of a `DataLoader` that is asked for `Request`s, and yields a `LoadedBatch` for each. All
pieces of a rank are one item: so a rank with many pieces asks its sampler no further ahead than one with one piece.

A stream of samples has no indices: every rank reads all of it, and `stream_copy` collates the rank's samples only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_gradavg._lightning.internals import cloned, show_dataset_of_worker
from lightning_gradavg._support.random_state import drawing_from, stream_key
from lightning_gradavg._support.tree import data_digest
from lightning_gradavg.batches.chunks import Split
from lightning_gradavg.batches.streams import PassPlace

__all__ = [
    "CollatedSamples",
    "CutDataset",
    "LoadedBatch",
    "Probe",
    "Probed",
    "Request",
    "StreamCollator",
    "indices_copy",
    "stream_copy",
]


_LOADS_TO_COMPARE = 5
"""How often a sample is loaded that ranks compare.

Of one that is flipped by a coin that follows no seed, two loads are alike on each of 2 ranks, and differ between them,
in one run of 8; five loads are so in one of 512.
"""


class Probe(NamedTuple):
    """What a rank loads once beside its own pieces, to find out what cannot be seen from outside."""

    sample: object  # the indices of one sample, which all ranks load and compare
    key: bytes  # of the stream that it is loaded from
    parts: Sequence[object]  # the indices of all pieces of the batch; none where collating is not compared


class Request(NamedTuple):
    """What a rank loads of one loader batch. It goes to a worker, if there are any."""

    number: int  # of the loader batch in its pass
    pieces: Sequence[Any]  # the indices of each piece; of a batch that comes ready made, what the sampler yielded
    keys: Sequence[bytes | None]  # of the stream that each piece is loaded from; None for the process's own state
    probe: Probe | None = None  # what else is loaded, if anything


class Probed(NamedTuple):
    """What a rank found out by a `Probe`."""

    sample: bytes  # the digest of the sample
    is_stable: bool  # whether it was the same each time that it was loaded
    difference: str  # in what the collated parts of the batch differ from the collated batch; empty for nothing


class LoadedBatch(NamedTuple):
    """A rank's pieces of a loader batch. `torch` pins the memory inside, as of any tuple."""

    number: int  # of the loader batch in its pass
    pieces: list[Any]  # each of the user's own type
    probed: Probed | None


class CutDataset(Dataset[Any]):
    """The user's dataset and `collate_fn`, asked for all pieces of a rank at once.

    Attributes:
        dataset: The user's dataset.
        collate: The user's `collate_fn`.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.dataset = loader.dataset
        self.collate = loader.collate_fn
        self._collates_samples = loader.batch_sampler is not None

    def __getitems__(self, request: Request) -> LoadedBatch:
        """Return the pieces of a batch sampler's batch: torch's fetcher asks for all of its samples by this method."""
        return self[request]

    def __getitem__(self, request: Request) -> LoadedBatch:
        probed = None
        if request.probe is not None:
            # First: `collate_fn` may change samples that the dataset keeps.
            probed = self._probed(request.probe)
        pieces: list[Any] = []
        for indices, key in zip(request.pieces, request.keys, strict=True):
            with drawing_from(key):
                pieces.append(self._collated(indices))
        return LoadedBatch(request.number, pieces, probed)

    def _collated(self, indices: Any) -> Any:
        return self.collate(self._loaded(indices))

    def _loaded(self, indices: Any) -> Any:
        """Return samples, as torch's fetcher loads them (`_MapDatasetFetcher.fetch`)."""
        dataset: Any = self.dataset
        if not self._collates_samples:
            return dataset[indices]
        load_together = getattr(dataset, "__getitems__", None)
        if load_together:
            return load_together(indices)
        return [dataset[index] for index in indices]

    def _probed(self, probe: Probe) -> Probed:
        digests: list[bytes] = []
        for _ in range(_LOADS_TO_COMPARE):
            with drawing_from(probe.key):
                digests.append(data_digest(self._loaded(probe.sample)))
        difference = ""
        if probe.parts:
            difference = self._difference(probe)
        return Probed(digests[0], len(set(digests)) == 1, difference)

    def _difference(self, probe: Probe) -> str:
        """Collate the batch of a probe in parts, and whole; return where they differ, empty for nowhere."""
        loaded: list[Any] = []
        with drawing_from(probe.key):
            for indices in probe.parts:
                loaded.append(list(self._loaded(indices)))
        try:
            samples: list[Any] = []
            for of_part in copy.deepcopy(loaded):  # `collate_fn` may change samples
                samples.extend(of_part)
            with drawing_from(probe.key):
                whole = self.collate(samples)
            parts: list[Any] = []
            for of_part in copy.deepcopy(loaded):
                with drawing_from(probe.key):
                    parts.append(self.collate(of_part))
            return difference_of_parts(whole, parts)
        except Exception as error:  # noqa: BLE001  # a comparison must not end a run that trains
            return f"a comparison that failed with {error!r:.200}"


def difference_of_parts(whole: object, parts: Sequence[object], place: str = "") -> str:
    """Return where a collated batch is not what its collated parts are end to end; empty if it is, or nobody can tell.

    Nobody can tell of an object of another type than those below.
    """
    if isinstance(whole, Mapping):
        return _difference_of_mappings(whole, parts, place)
    if isinstance(whole, (list, tuple)):
        return _difference_of_sequences(whole, parts, place)
    agree = True
    if isinstance(whole, Tensor) or hasattr(whole, "dtype"):
        agree = _tensors_agree(whole, parts)
    elif isinstance(whole, (int, float, complex, str, bytes, type(None))):
        agree = all(part == whole for part in parts)
    return "" if agree else f"batch{place}"


def _difference_of_mappings(whole: Mapping[Any, Any], parts: Sequence[Any], place: str) -> str:
    """Return where a mapping is not its parts: it has the same keys, and each value is what those of its parts are."""
    if any(set(part) != set(whole) for part in parts):
        return f"the keys of batch{place}"
    for name, value in whole.items():
        found = difference_of_parts(value, [part[name] for part in parts], f"{place}[{name!r}]")
        if found:
            return found
    return ""


def _difference_of_sequences(whole: Sequence[Any], parts: Sequence[Any], place: str) -> str:
    """Return where a list or tuple is not its parts: a structure that all of them have, or their items end to end."""
    is_structure = all(len(part) == len(whole) for part in parts)
    if is_structure and not _difference_of_items(whole, parts, place):
        return ""
    items: list[Any] = []
    for part in parts:
        items.extend(part)
    if len(items) != len(whole):
        return f"batch{place}"
    return _difference_of_items(whole, [items], place)


def _difference_of_items(whole: Sequence[object], parts: Sequence[Sequence[object]], place: str) -> str:
    for index, value in enumerate(whole):
        found = difference_of_parts(value, [part[index] for part in parts], f"{place}[{index}]")
        if found:
            return found
    return ""


def _tensors_agree(whole: object, parts: Sequence[object]) -> bool:
    """Return whether a tensor or array equals each of its parts, or is what they are end to end."""
    tensor = torch.as_tensor(whole)
    tensors = [torch.as_tensor(part) for part in parts]
    if any(part.is_nested or part.layout != torch.strided for part in (tensor, *tensors)):
        return True  # nobody can tell
    if all(_equal(part, tensor) for part in tensors):
        return True
    if tensor.ndim == 0 or any(part.shape[1:] != tensor.shape[1:] for part in tensors):
        return False
    return _equal(torch.cat(tensors), tensor)


def _equal(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits, but for NaN, which equals NaN."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    is_equal = (tensor == other) | ((tensor != tensor) & (other != other))  # noqa: PLR0124  # NaN differs from itself
    return bool(is_equal.all())


class _WorkerInit:
    """The user's `worker_init_fn`. It, and the dataset, find the user's own dataset in `get_worker_info()`."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._function = function

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None, "it runs in workers"
        dataset: Any = info.dataset
        show_dataset_of_worker(dataset.dataset)
        if self._function is not None:
            self._function(worker_id)


def _as_it_is(loaded: LoadedBatch) -> LoadedBatch:
    """Stand for `collate_fn` in a copy that loads pieces, which are collated."""
    return loaded


def indices_copy(
    loader: DataLoader[Any],
    sampler: Any,
    *,
    worker_init_fn: Callable[[int], None] | None,
    generator: torch.Generator | None,
) -> DataLoader[Any]:
    """Return a copy of a loader of a map-style dataset that loads what a sampler of `Request`s asks for.

    Args:
        loader: The user's loader.
        sampler: It stands for the batch sampler, or for the sampler of a loader without batches.
        worker_init_fn: The user's, or Lightning's.
        generator: What torch draws the seed of workers from; None for the process's own state.
    """
    name = "batch_sampler"
    if loader.batch_sampler is None:  # `DataLoader(batch_size=None)`: what the sampler yields is a batch
        name = "sampler"
    changed: dict[str, Any] = {
        name: sampler,
        "dataset": CutDataset(loader),
        "collate_fn": _as_it_is,
        "worker_init_fn": _WorkerInit(worker_init_fn),
        "generator": generator,
    }
    return cloned(loader, **changed)


class CollatedSamples(NamedTuple):
    """A rank's pieces of a batch of a stream."""

    samples: int  # of the loader batch
    digest: bytes  # of what all ranks read of it
    pieces: list[Any]  # each of the user's own type


class StreamCollator:
    """Collates this rank's pieces of a batch that every rank reads, in the place of the user's `collate_fn`."""

    # A class, not a closure: workers that are spawned get it pickled.
    def __init__(self, collate: Callable[[list[Any]], Any], split: Split, place: PassPlace) -> None:
        self.collate = collate
        self._split = split
        self._place = place
        # That this process has collated: those of one worker in one pass, as workers do not persist.
        self._batches = 0

    def __call__(self, samples: list[object]) -> CollatedSamples:
        """Return this rank's pieces of a batch of these samples."""
        worker = get_worker_info()
        worker_id = -1 if worker is None else worker.id
        digest = data_digest((len(samples), samples[0], samples[-1]))  # before `collate_fn`, which may change them
        pieces: list[Any] = []
        for piece in self._split.cut(len(samples)).pieces:
            # A batch that is not cut is drawn from the process's own state.
            key = None
            if self._split.cuts:
                # A stand-in, which a rank without samples computes, has no number among the pieces of all ranks.
                number: int | str = piece.number if piece.number is not None else f"stand-in {self._split.rank}"
                seed, loader, pass_number = self._place
                key = stream_key(seed, "collate", loader, pass_number, worker_id, self._batches, number)
            with drawing_from(key):
                pieces.append(self.collate(samples[piece.start : piece.stop]))
        self._batches += 1
        return CollatedSamples(len(samples), digest, pieces)


def stream_copy(
    loader: DataLoader[Any], split: Split, place: PassPlace, *, worker_init_fn: Callable[[int], None] | None
) -> DataLoader[Any]:
    """Return a copy of a loader of a stream that reads all samples, and collates this rank's pieces.

    Its workers do not persist: what a reader in a worker draws would go on from one pass to the next, and no resumed
    run could repeat it.
    """
    return cloned(
        loader,
        collate_fn=StreamCollator(loader.collate_fn, split, place),
        worker_init_fn=worker_init_fn,
        persistent_workers=False,
    )
