"""Nested values: batches, outputs, and whatever else comes as tensors in dicts, lists, tuples and dataclasses.

A *leaf* is what is no such structure, as a tensor, a number or a `PackedSequence`. `torch.utils._pytree` knows neither
arbitrary mappings nor dataclasses, and its private names change.
"""

from __future__ import annotations

import copy
import dataclasses
from array import array
from collections.abc import Callable, Iterator, MutableMapping
from hashlib import blake2b
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["batch_samples", "bits", "data_digest", "digest_of", "leaves", "mapped", "rows_of", "slice_rows"]

_PLAIN = (int, float, complex, str, bytes, type(None))
"""Types whose `repr` is the value. Of other objects it may hold an address, which differs between processes."""
_HASHED_ELEMENTS = 64
"""So many elements of a row go into a digest of data: enough to tell samples apart, and few to read."""


def _is_array(value: object) -> bool:
    """Return whether a value is a tensor or an array, without importing NumPy."""
    # A nested tensor raises where it is asked for its shape.
    return isinstance(value, Tensor) or (hasattr(value, "dtype") and hasattr(value, "shape"))


def _first_dimension(array: Any) -> int | None:
    """Return the size of dimension 0 of a tensor or array, also of a nested one; None if it has no dimension."""
    if array.ndim == 0:
        return None
    if isinstance(array, Tensor):
        return array.size(0)
    return int(array.shape[0])


def _is_sequence(value: object) -> bool:
    """Return whether a value is a list or tuple of parts. A `PackedSequence` is one whose arrays belong together."""
    return isinstance(value, (list, tuple)) and not isinstance(value, PackedSequence)


def _items(value: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a structure, each with its place, such as `['image']`, `[0]` or `.name`; None for a leaf."""
    if isinstance(value, MutableMapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if _is_sequence(value):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if dataclasses.is_dataclass(type(value)):
        names = [field.name for field in dataclasses.fields(value)]
        return [(f".{name}", getattr(value, name)) for name in names]
    return None


def _with_parts(value: Any, parts: list[Any]) -> Any:
    """Return a structure of the type of `value` that holds other parts, in the order of `_items`.

    Mappings and dataclasses are copied, so that the result has their other attributes, too.
    """
    if isinstance(value, MutableMapping):
        keys = list(value)
        copied_mapping = _copied(value)
        for key, part in zip(keys, parts, strict=True):
            copied_mapping[key] = part
        return copied_mapping
    if _is_sequence(value):
        # Lists and tuples, and subclasses of them, are made of an iterable; the constructor of a named tuple takes one
        # argument per field.
        make = getattr(value, "_make", type(value))
        return make(parts)
    copied = copy.copy(value)
    for field, part in zip(dataclasses.fields(value), parts, strict=True):
        object.__setattr__(copied, field.name, part)  # past the `__setattr__` of a frozen class
    return copied


def _copied(mapping: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """Return a copy of a mapping, of which assigning items leaves the mapping as it is."""
    if isinstance(mapping, dict) or hasattr(mapping, "__copy__"):
        return copy.copy(mapping)
    # A plain copy shares the attribute in which a class of a user's keeps its items. A deep copy does not, and shares
    # the items, because it is told that they are copied already.
    return copy.deepcopy(mapping, {id(item): item for item in mapping.values()})


IsLeaf: TypeAlias = Callable[[object], bool]
"""Whether a structure counts as a leaf."""


def _never(_: object) -> bool:
    return False


def leaves(value: object, label: str = "", *, is_leaf: IsLeaf = _never) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested value, in order, each with its place: `label` and then such as `['image'][0]`."""
    items = None if is_leaf(value) else _items(value)
    if items is None:
        yield label, value
        return
    for place, item in items:
        yield from leaves(item, label + place, is_leaf=is_leaf)


def mapped(value: object, function: Callable[[Any], Any], *, is_leaf: IsLeaf = _never) -> Any:
    """Return a value of the same structure and types with `function` of each leaf, in the order of `leaves`."""
    items = None if is_leaf(value) else _items(value)
    if items is None:
        return function(value)
    parts = [mapped(item, function, is_leaf=is_leaf) for _, item in items]
    return _with_parts(value, parts)


def batch_samples(batch: object) -> int:
    """Return the first dimension that all tensors and arrays of a batch have, which is taken for its samples.

    Tensors without dimensions are about the batch as a whole.

    Raises:
        ValueError: If there is no such number, or several, or something in the batch has no dimensions to read.
    """
    sizes: set[int] = set()
    for label, leaf in leaves(batch):
        if _is_array(leaf):
            size = _first_dimension(leaf)
            if size is not None:
                sizes.add(size)
        elif not isinstance(leaf, _PLAIN):
            raise ValueError(f"batch{label} is a {type(leaf).__name__}, which has no first dimension")
    if len(sizes) == 1:
        return sizes.pop()
    if not sizes:
        raise ValueError("no tensor in it has a first dimension")
    raise ValueError(f"the first dimensions of its tensors are {' and '.join(map(str, sorted(sizes)))}")


def rows_of(batch: object) -> int:
    """Return the number of rows of a ready-made batch: the first dimension of every tensor and list in it.

    | in the batch | is |
    |---|---|
    | a tensor or array | rows along dimension 0 |
    | a list of numbers, texts or None | one row per item |
    | a list of tensors, mappings and the like; a tuple, mapping, dataclass | a structure, whose parts are rows |
    | a number, a text, None | about the batch as a whole |

    Raises:
        ValueError: If not all have one number of rows; a tensor has no dimensions; a list may be a structure or one
            item per row; or something else is in it.
    """
    sizes: dict[int, str] = {}
    lists: list[tuple[str, int]] = []
    _collect_rows(batch, "", sizes, lists)
    if not sizes:
        raise ValueError("there is no tensor in it")
    if len(sizes) > 1:
        found = " and ".join(f"{size} of batch{label}" for size, label in sorted(sizes.items()))
        raise ValueError(f"the first dimensions differ: {found}")
    (size,) = sizes
    for label, length in lists:
        if length == size:
            raise ValueError(
                f"batch{label} is a list of {length} parts in a batch of {size} rows: it may hold one part per row, or"
                " be a structure. Use a tuple for a structure"
            )
    return size


def _collect_rows(value: Any, label: str, sizes: dict[int, str], lists: list[tuple[str, int]]) -> None:
    """Collect where each number of rows was found first, and the lists that are taken for structures."""
    if _is_array(value):
        size = _first_dimension(value)
        if size is None:
            raise ValueError(f"batch{label} has no dimensions")
        if isinstance(value, Tensor) and not _is_plain_tensor(value):
            raise ValueError(f"batch{label} is a nested or sparse tensor, whose rows cannot be sliced")
        sizes.setdefault(size, label)
        return
    if _is_column(value):
        sizes.setdefault(len(value), label)
        return
    items = _items(value)
    if items is None:
        if not isinstance(value, _PLAIN):
            raise ValueError(f"batch{label} is a {type(value).__name__}, which has no rows")
        return
    if isinstance(value, list):
        lists.append((label, len(value)))
    for place, item in items:
        _collect_rows(item, label + place, sizes, lists)


def _is_column(value: object) -> bool:
    """Return whether a value is a list of one plain item per row, as `default_collate` lists texts."""
    return isinstance(value, list) and len(value) > 0 and all(isinstance(item, _PLAIN) for item in value)


def slice_rows(batch: Any, start: int, stop: int) -> Any:
    """Return rows `start` to `stop` of a batch that `rows_of` has accepted, of the same structure and types.

    Tensors and arrays are sliced along dimension 0, as views. What is about the batch as a whole is shared.
    """

    def sliced(leaf: Any) -> Any:
        if _is_array(leaf) or _is_column(leaf):
            return leaf[start:stop]
        return leaf

    return mapped(batch, sliced, is_leaf=_is_column)


def bits(array: Any) -> memoryview:
    """Return the bytes of the elements of a tensor, of any type, layout and device, or of an array."""
    tensor = torch.as_tensor(array).detach().to_dense().cpu()
    # Conjugation and negation of complex tensors are lazy: their bytes are those of the values without them.
    flat = tensor.resolve_conj().resolve_neg().reshape(-1).contiguous()
    return flat.view(torch.uint8).numpy().data  # as bytes, because NumPy has no bfloat16


def data_digest(value: object) -> bytes:
    """Return 16 bytes that are equal for equal indices, samples or batches, on any rank.

    They read the type and shape of an array and the begin of its first and last row; on an accelerator no row, so that
    nobody waits; of an unknown object the type.
    """
    return digest_of(value, _ends, size=16)


def digest_of(value: object, of_array: Callable[[Any], bytes | memoryview], *, size: int) -> bytes:
    """Return so many bytes that are equal for equal nested values, of whose arrays `of_array` returns what counts."""
    hashed = blake2b(digest_size=size)
    for part in _described(value, of_array):
        hashed.update(part)
    return hashed.digest()


def _is_plain_tensor(tensor: Tensor) -> bool:
    """Return whether a tensor is neither nested nor sparse: it has a shape, and its rows can be sliced."""
    return not tensor.is_nested and tensor.layout == torch.strided


def _ends(array: Any) -> bytes:
    """Return the begin of the first and of the last row of an array."""
    if isinstance(array, Tensor) and array.device.type != "cpu":
        return b""  # reading it would wait for the accelerator
    shape = array.shape if len(array.shape) > 0 else (1,)
    rows = array.reshape(shape)
    found = b""
    for row in (rows[:1], rows[-1:]):
        found += repr(row.reshape(-1)[:_HASHED_ELEMENTS].tolist()).encode()
    return found


def _described(value: Any, of_array: Callable[[Any], bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield what a digest reads of a value. Checkpoints hold digests, so this must not change."""
    if isinstance(value, Tensor) and not _is_plain_tensor(value):
        yield f"{value.dtype}{value.layout}{value.size(0)}:".encode()
        values = value.unbind() if value.is_nested else [value.to_dense()]
        for part in values:
            yield from _described(part, of_array)
        return
    if _is_array(value):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield of_array(value)
        return
    if isinstance(value, _PLAIN):
        yield f"{value!r};".encode()
        return
    items_with_places = _items(value)
    items = []
    if items_with_places is not None:
        items = [item for _, item in items_with_places]
    yield f"{type(value).__qualname__}{len(items)}:".encode()
    integers = _packed_integers(items)
    if integers is not None:
        yield integers
        return
    for item in items:
        yield from _described(item, of_array)


def _packed_integers(items: list[Any]) -> bytes | None:
    """Return integers as bytes, at the speed of C; None if there are other items. Indices are the common case."""
    try:
        return array("q", items).tobytes()
    except (TypeError, OverflowError, RuntimeError, ValueError):  # what items raise that are no integers of 64 bits
        return None
