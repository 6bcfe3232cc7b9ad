"""The samples of a batch: how many there are, a part of them, several batches as one.

What a batch holds is known, or it is not: a wrong guess would join the targets of one image with those of another and
blame the run. Known are tensors and arrays with the samples along dimension 0, lists of one number or string per sample,
and values without samples that are the same in all batches, in any nesting of mappings, lists, tuples and dataclasses.
Everything else is `Unknown`: texts padded to another length in every batch, lists of one record per sample, graphs.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from lightning_gradavg.data.collated import batch_samples, slice_batch, with_items

__all__ = ["Unknown", "digest", "digests", "join", "samples_in"]

_CONSTANTS = (int, float, complex, str, bytes, type(None))


class Unknown(ValueError):
    """It is not known which samples a batch holds, or how batches become one."""


def samples_in(batch: Any, loader_size: int | None = None) -> int:
    """Return the number of samples in a batch.

    Args:
        batch: Of any structure.
        loader_size: The number of samples in a full batch, where the loader has one. It tells a list of four images,
            each with three channels along dimension 0, from a tensor of three samples.

    Raises:
        Unknown: If there is no such number, or another could be meant.
    """
    try:
        size = batch_samples(batch)
    except ValueError:
        size = -1
    if size < 0 or not _is_known(batch, size, {size, loader_size}):
        raise Unknown(f"which samples a batch of type {type(batch).__name__} holds is not known")
    return size


def join(batches: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the samples of all batches, of so many each, as one batch, with the structure and types of the first.

    Raises:
        Unknown: If the batches differ in anything but their samples.
    """
    first, children = batches[0], _children(batches[0])
    if len({type(batch) for batch in batches}) > 1:
        raise Unknown("batches of different types cannot be joined")
    if _is_array(first) and len(first.shape) > 0:
        return _concatenated(batches)
    if children is None:
        if len({digest(batch) for batch in batches}) > 1:
            raise Unknown(f"{first!r} is another value in another batch, and belongs to no sample")
        return first
    if isinstance(first, (list, tuple)) and all(isinstance(child, _CONSTANTS) for child in children):
        if [len(batch) for batch in batches] == list(sizes):
            return type(first)(item for batch in batches for item in batch)
    if len({len(_children(batch) or ()) for batch in batches}) > 1:
        raise Unknown("batches of different lengths cannot be joined")
    parts = [join(each, sizes) for each in zip(*(_children(batch) or () for batch in batches), strict=True)]
    return _rebuilt(first, parts)


def digests(batch: Any, loader_size: int | None = None) -> tuple[bytes, ...]:
    """Return a fingerprint of every sample; one for the batch as a whole where its samples are not known."""
    try:
        size = samples_in(batch, loader_size)
    except Unknown:
        return (digest(batch),)
    return tuple(digest(slice_batch(batch, index, index + 1)) for index in range(size))


def digest(value: Any) -> bytes:
    """Return 16 bytes that are equal for equal contents, of which every element is read."""
    state = blake2b(digest_size=16)
    for part in _contents(value):
        state.update(part)
    return state.digest()


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or (hasattr(value, "dtype") and hasattr(value, "shape"))


def _children(value: Any) -> Sequence[Any] | None:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Mapping):
        return [value[key] for key in sorted(value, key=repr)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def _rebuilt(like: Any, parts: Sequence[Any]) -> Any:
    """Return a value of the type of `like` with other children."""
    if isinstance(like, Mapping):
        return with_items(like, dict(zip(sorted(like, key=repr), parts, strict=True)))
    if isinstance(like, (list, tuple)):
        return like._make(parts) if hasattr(like, "_make") else type(like)(parts)
    record = copy.copy(like)
    for field, part in zip(dataclasses.fields(like), parts, strict=True):
        object.__setattr__(record, field.name, part)  # past a frozen class
    return record


def _is_known(value: Any, size: int, sizes: set[int | None]) -> bool:
    """Return whether nothing in a batch of `size` samples could hold one record for each of them."""
    if _is_array(value) or isinstance(value, _CONSTANTS):
        return True
    children = _children(value)
    if children is None:
        return False
    plain = all(isinstance(child, _CONSTANTS) or (_is_array(child) and size in child.shape[:1]) for child in children)
    per_sample = (
        isinstance(value, (list, tuple)) and not hasattr(value, "_fields") and len(value) in sizes and not plain
    )
    return not per_sample and all(_is_known(child, size, sizes) for child in children)


def _concatenated(values: Sequence[Any]) -> Any:
    first = values[0]
    if any(value.shape[1:] != first.shape[1:] or value.dtype != first.dtype for value in values):
        shapes = ", ".join(sorted({f"{tuple(value.shape)} of {value.dtype}" for value in values}))
        raise Unknown(f"tensors of these sizes or types cannot be joined along dimension 0: {shapes}")
    joined = torch.cat([torch.as_tensor(value) for value in values])
    return joined if isinstance(first, Tensor) else joined.numpy()


def _contents(value: Any) -> Iterator[bytes]:
    children = _children(value)
    if isinstance(value, Tensor):
        dense = (value.to_dense() if value.layout != torch.strided else value).detach().cpu().contiguous()
        yield f"{dense.dtype}{tuple(dense.shape)}".encode()
        # NumPy has no bfloat16; its bytes are the same.
        yield dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    elif _is_array(value) and hasattr(value, "tobytes"):
        yield f"{value.dtype}{value.shape}".encode() + value.tobytes()
    elif children is not None:
        yield f"{type(value).__qualname__}{sorted(value, key=repr) if isinstance(value, Mapping) else len(children)}:".encode()
        for item in children:
            yield from _contents(item)
    else:
        yield _bytes_of(value)


def _bytes_of(value: Any) -> bytes:
    try:
        return repr(value).encode() if isinstance(value, _CONSTANTS) else pickle.dumps(value)
    except Exception:  # noqa: BLE001  # of the user's objects; an address would be another one in every process
        return type(value).__qualname__.encode()
