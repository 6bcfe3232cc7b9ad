"""Nested values: batches, outputs, and whatever else comes as tensors in dicts, lists, tuples and dataclasses.

`torch.utils._pytree` knows neither arbitrary mappings nor dataclasses, and its private names change.
"""

from __future__ import annotations

import copy
import dataclasses
from array import array
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["batch_samples", "bits", "data_digest", "digest", "leaves", "mapped", "slice_batch"]

_PLAIN = (int, float, complex, str, bytes, type(None))
_HASHED_ELEMENTS = 64


def _is_array(value: Any) -> bool:
    """Return whether a value is a tensor or an array, without importing NumPy."""
    return hasattr(value, "dtype") and hasattr(value, "shape")


class _Opened(NamedTuple):
    """A structure's items with their places, and what makes the same structure of others."""

    items: list[tuple[str, Any]]
    made_of: Callable[[list[Any]], Any]


def _opened(value: Any) -> _Opened | None:
    """Return what a nested structure holds; None for a leaf, such as a `PackedSequence`."""
    if isinstance(value, MutableMapping):
        items = [(f"[{key!r}]", item) for key, item in value.items()]
        return _Opened(items, partial(_copied, value, [*value], type(value).__setitem__))
    if isinstance(value, (list, tuple)) and not isinstance(value, PackedSequence):
        return _Opened([(f"[{n}]", item) for n, item in enumerate(value)], getattr(value, "_make", type(value)))
    if dataclasses.is_dataclass(type(value)):
        names = [field.name for field in dataclasses.fields(value)]
        items = [(f".{name}", getattr(value, name)) for name in names]
        return _Opened(items, partial(_copied, value, names, object.__setattr__))  # the class may be frozen
    return None


def _copied(value: Any, names: list[Any], put: Callable[[Any, Any, Any], None], parts: list[Any]) -> Any:
    """Return a copy with other parts, and the other attributes."""
    copied = copy.copy(value)
    for name, part in zip(names, parts, strict=True):
        put(copied, name, part)
    return copied


IsLeaf: TypeAlias = Callable[[Any], bool]
"""Whether a structure counts as a leaf."""


def _never(_: Any) -> bool:
    return False


def leaves(value: Any, label: str = "", *, is_leaf: IsLeaf = _never) -> Iterator[tuple[str, Any]]:
    """Yield what a nested value holds, in order, each with its place, `label` and then such as `['image'][0]`."""
    opened = None if is_leaf(value) else _opened(value)
    if opened is None:
        yield label, value
        return
    for place, item in opened.items:
        yield from leaves(item, label + place, is_leaf=is_leaf)


def mapped(value: Any, function: Callable[[Any], Any], *, is_leaf: IsLeaf = _never) -> Any:
    """Return a value of the same structure and types with `function` of each leaf, in the order of `leaves`."""
    opened = None if is_leaf(value) else _opened(value)
    if opened is None:
        return function(value)
    return opened.made_of([mapped(item, function, is_leaf=is_leaf) for _, item in opened.items])


def _is_column(value: Any) -> bool:
    """Return whether a value lists one plain object per sample, as `default_collate` lists strings."""
    lists = isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
    return lists and not any(_is_array(item) or isinstance(item, PackedSequence) or _opened(item) for item in value)


def _rows(leaf: Any) -> int | None:
    """Return how many samples a leaf holds along dimension 0, if any."""
    if _is_array(leaf):
        return next(iter(leaf.shape), None)
    return len(leaf) if _is_column(leaf) else None


def batch_samples(batch: Any) -> int:
    """Return the samples in a collated batch: dimension 0 of its arrays, else the length of its lists of objects.

    Raises:
        ValueError: If there is no such number, or several.
    """
    held = [leaf for _, leaf in leaves(batch, is_leaf=_is_column)]
    if any(isinstance(leaf, PackedSequence) for leaf in held):  # it holds the samples step by step
        raise ValueError(
            "a PackedSequence cannot be split. Let collate_fn return the padded sequences and their lengths, and call"
            " pack_padded_sequence in training_step."
        )
    rows = [(_is_array(leaf), size) for leaf in held if (size := _rows(leaf)) is not None]
    lengths = {size for of_array, size in rows if of_array} or {size for _, size in rows}
    if len(lengths) == 1:
        return lengths.pop()
    found = f"dimension 0 is {' and '.join(map(str, sorted(lengths)))}" if lengths else "nothing in it has one"
    raise ValueError(
        f"a batch of type {type(batch).__name__} cannot be split: all its tensors must have the samples along dimension"
        f" 0, but {found}. Have collate_fn, or whatever makes the batch, put them there. Without equivalent_to= and"
        " num_replicas=, a DataLoader over single samples will do, whose indices are split before they are loaded; or"
        " leave split_batches out, and have every rank read another part of the data."
    )


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Return samples `start` to `stop` of a collated batch, of the same structure and types.

    Tensors and arrays are sliced along dimension 0, as views, as `torch.nn.parallel.scatter` does. Unlike there, lists
    and tuples of one plain object per sample, such as names, are sliced, too. Everything else is shared.
    """
    size = batch_samples(batch)
    if (start, stop) == (0, size):
        return batch
    return mapped(batch, lambda leaf: leaf[start:stop] if _rows(leaf) == size else leaf, is_leaf=_is_column)


def bits(array: Any) -> memoryview:
    """Return the bytes of the elements of a tensor, of any type, layout and device, or of an array."""
    flat = torch.as_tensor(array).detach().to_dense().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
    return flat.view(torch.uint8).numpy().data  # as bytes, because NumPy has no bfloat16


def data_digest(value: Any) -> bytes:
    """Return 16 bytes that are equal for equal indices, samples or batches, on any rank.

    They read the type and shape of an array and the begin of its first and last row; on an accelerator no row, so that
    nobody waits; of an unknown object the type.
    """
    return digest(value, _ends, size=16)


def digest(value: Any, of_array: Callable[[Any], bytes | memoryview], *, size: int) -> bytes:
    """Return so many bytes that are equal for equal nested values, of whose arrays `of_array` returns what counts."""
    found = blake2b(digest_size=size)
    for part in _described(value, of_array):
        found.update(part)
    return found.digest()


def _ends(array: Any) -> bytes:
    if isinstance(array, Tensor) and array.device.type != "cpu":
        return b""
    rows = array.reshape(array.shape or (1,))
    return b"".join(repr(row.reshape(-1)[:_HASHED_ELEMENTS].tolist()).encode() for row in (rows[:1], rows[-1:]))


def _described(value: Any, of_array: Callable[[Any], bytes | memoryview]) -> Iterator[bytes | memoryview]:
    # Checkpoints hold digests of it.
    if _is_array(value):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield of_array(value)
    elif isinstance(value, _PLAIN):
        yield f"{value!r};".encode()
    else:
        opened = _opened(value)
        items = [] if opened is None else [item for _, item in opened.items]
        yield f"{type(value).__qualname__}{len(items)}:".encode()
        try:
            yield array("q", items).tobytes()  # indices, the common case, at the speed of C
        except (TypeError, OverflowError, RuntimeError, ValueError):
            for item in items:
                yield from _described(item, of_array)
