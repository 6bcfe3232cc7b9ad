"""Samples of collated batches: fingerprints of each, and batches joined into one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from lightning_gradavg.tree import batch_samples, slice_batch

__all__ = ["digest", "join_batches", "sample_fingerprints"]


def digest(value: Any) -> bytes:
    """Return 16 bytes that are equal for equal contents, of which every element is read."""
    state = blake2b(digest_size=16)
    for part in _contents(value):
        state.update(part)
    return state.digest()


def sample_fingerprints(batch: Any) -> tuple[bytes, ...]:
    """Return the fingerprint of every sample; one for the batch as a whole where its samples cannot be told apart."""
    try:
        size = batch_samples(batch)
    except ValueError:
        return (digest(batch),)
    return tuple(digest(slice_batch(batch, index, index + 1)) for index in range(size))


def join_batches(batches: Sequence[Any]) -> Any:
    """Return the samples of all batches as one batch, with the structure and the types of the first.

    Tensors and arrays are joined along dimension 0, lists of one plain object per sample are appended, and whatever has
    no samples must be the same in all batches.

    Raises:
        ValueError: If the batches cannot be joined.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if any(type(batch) is not type(first) for batch in batches):
        raise ValueError(f"batches of types {sorted({type(batch).__name__ for batch in batches})} cannot be joined")
    if isinstance(first, Tensor) or (hasattr(first, "dtype") and hasattr(first, "shape")):
        return _joined_arrays(batches)
    if isinstance(first, Mapping):
        return _joined_mappings(batches)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        record: Any = copy.copy(first)
        for field in dataclasses.fields(first):
            values = [getattr(batch, field.name) for batch in batches]
            object.__setattr__(record, field.name, join_batches(values))  # past a frozen class
        return record
    if isinstance(first, (list, tuple)):
        return _joined_lists(batches)
    if any(batch != first for batch in batches):
        raise ValueError(f"values of type {type(first).__name__} differ between the batches and have no samples")
    return first


def _joined_arrays(arrays: Sequence[Any]) -> Any:
    first = arrays[0]
    if any(array.shape[1:] != first.shape[1:] or array.dtype != first.dtype for array in arrays):
        found = ", ".join(sorted({f"{tuple(array.shape)} of {array.dtype}" for array in arrays}))
        raise ValueError(f"tensors of other sizes or types cannot be joined along dimension 0: {found}")
    if len(first.shape) == 0:
        if any(array != first for array in arrays):
            raise ValueError("a number without samples differs between the batches")
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(arrays))
    return torch.cat([torch.from_numpy(array) for array in arrays]).numpy()


def _joined_mappings(batches: Sequence[Any]) -> Any:
    first = batches[0]
    items = {key: join_batches([batch[key] for batch in batches]) for key in first}
    clone = copy.copy(first)
    if not hasattr(clone, "update"):
        return type(first)(items)
    clone.update(items)
    return clone


def _joined_lists(batches: Sequence[Any]) -> Any:
    first = batches[0]
    named = hasattr(first, "_make")
    plain = not named and not any(
        isinstance(item, (Tensor, Mapping, list, tuple)) or hasattr(item, "shape") or dataclasses.is_dataclass(item)
        for item in first
    )
    if plain:
        return type(first)(item for batch in batches for item in batch)
    if any(len(batch) != len(first) for batch in batches):
        raise ValueError(f"batches with {sorted({len(batch) for batch in batches})} parts cannot be joined")
    items = [join_batches([batch[index] for batch in batches]) for index in range(len(first))]
    return first._make(items) if named else type(first)(items)


def _contents(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        dense = (value.to_dense() if value.is_sparse else value).detach().cpu().contiguous()
        yield f"{dense.dtype}{tuple(dense.shape)}".encode()
        # NumPy has no bfloat16; its bytes are the same.
        yield dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    elif hasattr(value, "dtype") and hasattr(value, "tobytes"):
        yield f"{value.dtype}{value.shape}".encode() + value.tobytes()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{key!r}:".encode()
            yield from _contents(item)
    elif isinstance(value, (list, tuple)):
        yield f"{type(value).__qualname__}{len(value)}:".encode()
        for item in value:
            yield from _contents(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _contents(getattr(value, field.name))
    else:
        yield f"{value!r};".encode()
