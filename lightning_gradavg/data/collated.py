"""Collated batches, whatever their structure: how many samples one has, a part of its samples, and its fingerprint."""

from __future__ import annotations

import copy
import dataclasses
from array import array
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from hashlib import blake2b
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["batch_samples", "fingerprint", "slice_batch", "with_items"]

_HASHED_ELEMENTS = 64


def _is_array(value: Any) -> bool:
    # NumPy arrays and their like are recognized by what they offer: the core needs no NumPy.
    return isinstance(value, Tensor) or (hasattr(value, "dtype") and hasattr(value, "shape"))


def _children(value: Any) -> Sequence[Any] | None:
    """Return the parts of a nested structure, or None where it is none."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Mapping):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def _is_column(value: Any) -> bool:
    """Whether `value` lists one plain object per sample, as `default_collate` lists strings."""
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields"):
        return False
    return not any(_is_array(item) or _children(item) is not None for item in value)


def _lengths(value: Any, arrays: set[int], columns: set[int]) -> None:
    if isinstance(value, PackedSequence):
        # A named tuple of tensors, but of time steps: cut along dimension 0 it would be another one.
        raise ValueError(  # noqa: TRY004  # like any other batch that cannot be cut
            "a PackedSequence cannot be split: it holds the samples step by step. Let collate_fn return the padded"
            " sequences and their lengths, and call pack_padded_sequence in training_step."
        )
    if _is_array(value):
        if len(value.shape) > 0:
            arrays.add(int(value.shape[0]))
    elif _is_column(value):
        columns.add(len(value))
    else:
        for child in _children(value) or ():
            _lengths(child, arrays, columns)


def batch_samples(batch: Any) -> int:
    """Return the number of samples in a collated batch: dimension 0 of its tensors and arrays.

    Without any, it is the length of its lists of plain objects.

    Raises:
        ValueError: If there is none, or they differ, or the batch holds a `PackedSequence`.
    """
    arrays: set[int] = set()
    columns: set[int] = set()
    _lengths(batch, arrays, columns)
    lengths = arrays or columns
    if len(lengths) == 1:
        return lengths.pop()
    found = f"dimension 0 is {' and '.join(map(str, sorted(lengths)))}" if lengths else "nothing in it has one"
    raise ValueError(
        f"a batch of type {type(batch).__name__} cannot be split: all its tensors must have the samples along dimension"
        f" 0, but {found}. Have collate_fn, or whatever makes the batch, put them there. Without equivalent_to= and"
        " num_replicas=, a DataLoader over single samples will do, whose indices are split before they are loaded; or"
        " read another part of the data on every rank and set `sharded_by_rank = True` on the loader or its dataset."
    )


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Return samples `start` to `stop` of a collated batch, with its structure and types kept.

    Tensors and arrays are sliced along dimension 0, as views, in any nesting of mappings, lists, tuples, named tuples
    and dataclasses, as `torch.nn.parallel.scatter` does. Everything else is shared, such as sets, numbers, strings and
    0-dimensional tensors. Unlike there, lists and tuples of one plain object per sample, such as names, are sliced.

    Raises:
        ValueError: If the number of samples in the batch is unclear, or the batch holds a `PackedSequence`.
    """
    size = batch_samples(batch)
    return batch if (start, stop) == (0, size) else _slice(batch, size, slice(start, stop))


def _slice(value: Any, size: int, part: slice) -> Any:
    if _is_array(value):
        return value[part] if len(value.shape) > 0 else value
    if _is_column(value):
        return value[part] if len(value) == size else value
    if isinstance(value, (list, tuple)):
        items = [_slice(item, size, part) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, Mapping):
        return with_items(value, {key: _slice(item, size, part) for key, item in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        record = copy.copy(value)
        for field in dataclasses.fields(value):
            # Past a frozen class, and without running `__init__` on values that it has already changed.
            object.__setattr__(record, field.name, _slice(getattr(value, field.name), size, part))
        return record
    return value


def with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of the same type. What else a mutable one holds is kept, as `torch.utils.data` does."""
    if not isinstance(mapping, MutableMapping):
        return type(mapping)(items)  # type: ignore[call-arg]  # there is no other way to build one
    clone = copy.copy(mapping)
    clone.update(items)
    return clone


def fingerprint(value: Any) -> bytes:
    """Return 16 bytes that are equal for equal data, on any rank: of indices, samples, or a collated batch.

    Of a tensor or array the type, the shape and the ends of its first and last row are read, and of one on an
    accelerator only the first two, so that nobody waits for it. Of unknown objects only the type is read.
    """
    digest = blake2b(digest_size=16)
    for part in _described(value):
        digest.update(part)
    return digest.digest()


def _described(value: Any) -> Iterator[bytes]:
    if _is_array(value):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            rows = (value[:1], value[-1:]) if len(value.shape) > 0 else (value,)
            for row in rows:
                yield repr(row.reshape(-1)[:_HASHED_ELEMENTS].tolist()).encode()
    elif isinstance(value, (int, float, complex, str, bytes, bool, type(None))):
        yield f"{value!r};".encode()
    elif (children := _children(value)) is not None:
        yield f"{type(value).__qualname__}{len(children)}:".encode()
        try:
            yield array("q", children).tobytes()  # indices, the common case, at the speed of C
        except (TypeError, OverflowError, RuntimeError, ValueError):
            for child in children:
                yield from _described(child)
    else:
        yield type(value).__qualname__.encode()
