"""The samples of a batch: how many there are, several batches as one, and fingerprints.

What a batch holds is known, or it is not: a wrong guess would join the targets of one image with those of another and
blame the run. Known are tensors and arrays with the samples along dimension 0, lists of one number or string per
sample, and values without samples that are the same in all batches, in any nesting of mappings, lists, tuples and
dataclasses. Everything else is not: texts padded to another length in every batch, lists of one record per sample,
graphs.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from lightning_gradavg.tree import batch_samples, is_array, leaves, rebuilt, slice_batch

__all__ = ["CONSTANTS", "UnknownSamplesError", "digest", "digests", "join", "samples_in"]

CONSTANTS = (int, float, complex, str, bytes, type(None))
"""What is no tensor, and still plain."""

_OF_A_TABLE = 2  # dimensions; an image has more


class UnknownSamplesError(ValueError):
    """It is not known which samples a batch holds, or how batches become one."""


def samples_in(batch: Any, loader_size: int | None = None) -> int:
    """Return the number of samples in a batch.

    Args:
        batch: Of any structure.
        loader_size: The number of samples in a full batch, where the loader has one. It tells a list of four images,
            each with three channels along dimension 0, from a tensor of three samples.

    Raises:
        UnknownSamplesError: If there is no such number, or another could be meant.
    """
    try:
        size = batch_samples(batch)
    except ValueError:
        size = -1
    known = all(is_array(leaf) or isinstance(leaf, CONSTANTS) for _, leaf in leaves(batch))
    if size < 0 or not known or any(_may_be_samples(each, size, {size, loader_size}) for each in _lists(batch)):
        raise UnknownSamplesError(f"which samples a batch of type {type(batch).__name__} holds is not known")
    return size


def _lists(value: Any) -> list[Sequence[Any]]:
    """Return the lists and tuples in a batch, at any depth, that hold anything but plain values."""
    found: list[Sequence[Any]] = []

    def note(each: Any) -> bool:
        if type(each) in (list, tuple) and not _is_column(each):
            found.append(each)
        return False

    list(leaves(value, is_leaf=note))
    return found


def _may_be_samples(items: Sequence[Any], size: int, sizes: set[int | None]) -> bool:
    """Return whether a list in a batch of `size` samples could hold one record for each of them."""
    rows = all(is_array(item) and size in item.shape[:1] for item in items)
    images = len(items) != size and all(len(getattr(item, "shape", ())) > _OF_A_TABLE for item in items)
    return len(items) in sizes and (images or not rows)


def _is_column(value: Any) -> bool:
    return type(value) in (list, tuple) and all(isinstance(item, CONSTANTS) for item in value)


def join(batches: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the samples of all batches, of so many each, as one batch, with the structure and types of the first.

    Raises:
        UnknownSamplesError: If the batches differ in anything but their samples.
    """
    held = [dict(leaves(batch, is_leaf=_is_column)) for batch in batches]
    if len({tuple((place, type(leaf)) for place, leaf in of_batch.items()) for of_batch in held}) > 1:
        raise UnknownSamplesError("batches of different types or lengths cannot be joined")
    joined = (_joined([of_batch[place] for of_batch in held], list(sizes)) for place in held[0])
    return rebuilt(batches[0], joined, is_leaf=_is_column)


def _joined(parts: Sequence[Any], sizes: list[int]) -> Any:
    first = parts[0]
    if is_array(first) and len(first.shape) > 0:
        return _concatenated(parts)
    if _is_column(first) and [len(part) for part in parts] == sizes:
        return type(first)(item for part in parts for item in part)
    if len({digest(part) for part in parts}) > 1:
        raise UnknownSamplesError(f"{first!r} is another value in another batch, and belongs to no sample")
    return first


def _concatenated(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if any(part.shape[1:] != first.shape[1:] or part.dtype != first.dtype for part in parts):
        shapes = ", ".join(sorted({f"{tuple(part.shape)} of {part.dtype}" for part in parts}))
        raise UnknownSamplesError(f"tensors of these sizes or types cannot be joined along dimension 0: {shapes}")
    joined = torch.cat([torch.as_tensor(part) for part in parts])
    return joined if isinstance(first, Tensor) else joined.numpy()


def digests(batch: Any, loader_size: int | None = None) -> tuple[bytes, ...]:
    """Return a fingerprint of every sample; one for the batch as a whole where its samples are not known."""
    try:
        size = samples_in(batch, loader_size)
    except UnknownSamplesError:
        return (digest(batch),)
    return tuple(digest(slice_batch(batch, index, index + 1)) for index in range(size))


class _Pickler(pickle.Pickler):
    """Pickles tensors by their elements alone, whatever storage they are a part of."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        dense = (value.to_dense() if value.layout != torch.strided else value).detach().cpu().contiguous()
        # NumPy has no bfloat16; its bytes are the same.
        elements = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        return str, (f"{dense.dtype}{tuple(dense.shape)}", elements)


class _Hash:
    def __init__(self) -> None:
        self.state = blake2b(digest_size=16)

    def write(self, data: Any) -> None:
        self.state.update(data)


def digest(value: Any) -> bytes:
    """Return 16 bytes that are equal for equal contents, of which every element is read."""
    found = _Hash()
    pickler = _Pickler(found)
    pickler.fast = True  # or equal values would differ by which of their parts are one object
    try:
        pickler.dump(value)
    except Exception:  # noqa: BLE001  # of the user's objects, of which no more is known
        return type(value).__qualname__.encode()
    return found.state.digest()
