"""The samples of a batch: how many there are, several batches as one, and fingerprints.

What a batch holds is known, or it is not: a wrong guess would join the targets of one image with those of another and
blame the run. Known are tensors and arrays with the samples along dimension 0, lists of one number or string per
sample, and values without samples that are the same in all batches, in any nesting of mappings, lists, tuples and
dataclasses. Everything else is not: texts padded to another length in every batch, lists of one record per sample,
graphs.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from lightning_gradavg.tree import batch_samples, slice_batch, with_items

__all__ = ["UnknownSamplesError", "digest", "digests", "join", "samples_in"]

_OF_A_TABLE = 2  # dimensions; an image has more
_CONSTANTS = (int, float, complex, str, bytes, type(None))


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
    if size < 0 or not _is_known(batch, size, {size, loader_size}):
        raise UnknownSamplesError(f"which samples a batch of type {type(batch).__name__} holds is not known")
    return size


def join(batches: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the samples of all batches, of so many each, as one batch, with the structure and types of the first.

    Raises:
        UnknownSamplesError: If the batches differ in anything but their samples.
    """
    first, children = batches[0], [_children(batch) for batch in batches]
    lengths = [None if each is None else len(each) for each in children]
    if len({type(batch) for batch in batches}) > 1:
        raise UnknownSamplesError("batches of different types cannot be joined")
    if _is_array(first) and len(first.shape) > 0:
        return _concatenated(batches)
    if isinstance(first, (list, tuple)) and _is_plain(first) and lengths == list(sizes):
        return type(first)(item for batch in batches for item in batch)
    if children[0] is None and len({digest(batch) for batch in batches}) > 1:
        raise UnknownSamplesError(f"{first!r} is another value in another batch, and belongs to no sample")
    if len(set(lengths)) > 1:
        raise UnknownSamplesError("batches of different lengths cannot be joined")
    return _rebuilt(first, [join(each, sizes) for each in zip(*(each or () for each in children), strict=True)])


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


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or (hasattr(value, "dtype") and hasattr(value, "shape"))


def _is_plain(items: Sequence[Any]) -> bool:
    return all(isinstance(item, _CONSTANTS) for item in items)


def _children(value: Any) -> Sequence[Any] | None:
    if isinstance(value, Mapping):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return value if isinstance(value, (list, tuple)) else None


def _rebuilt(like: Any, parts: Sequence[Any]) -> Any:
    """Return a value of the type of `like` with other children."""
    if isinstance(like, Mapping):
        return with_items(like, dict(zip(like, parts, strict=True)))
    if isinstance(like, (list, tuple)):
        return like._make(parts) if hasattr(like, "_make") else type(like)(parts)
    record = copy.copy(like)
    for field, part in zip(dataclasses.fields(like) if parts else (), parts, strict=True):
        object.__setattr__(record, field.name, part)  # past a frozen class
    return record


def _is_known(value: Any, size: int, sizes: set[int | None]) -> bool:
    """Return whether nothing in a batch of `size` samples could hold one record for each of them."""
    children = _children(value)
    if children is None:
        return _is_array(value) or isinstance(value, _CONSTANTS)
    several = type(value) in (list, tuple) and len(value) in sizes and not _is_plain(children)
    rows = all(_is_array(child) and size in child.shape[:1] for child in children)
    images = len(children) != size and all(len(getattr(child, "shape", ())) > _OF_A_TABLE for child in children)
    return not (several and (images or not rows)) and all(_is_known(child, size, sizes) for child in children)


def _concatenated(values: Sequence[Any]) -> Any:
    first = values[0]
    if any(value.shape[1:] != first.shape[1:] or value.dtype != first.dtype for value in values):
        shapes = ", ".join(sorted({f"{tuple(value.shape)} of {value.dtype}" for value in values}))
        raise UnknownSamplesError(f"tensors of these sizes or types cannot be joined along dimension 0: {shapes}")
    joined = torch.cat([torch.as_tensor(value) for value in values])
    return joined if isinstance(first, Tensor) else joined.numpy()
