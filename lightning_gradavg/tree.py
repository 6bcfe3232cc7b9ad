"""Nested values: batches, outputs, and whatever else comes as tensors in dicts, lists, tuples and dataclasses.

One walk serves all: `leaves` lists what a value holds, each with the place that messages call it by, and `rebuilt` puts
other leaves into the same structure. `torch.utils._pytree` knows neither arbitrary mappings nor dataclasses, and its
private names change.
"""

from __future__ import annotations

import copy
import dataclasses
from array import array
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from hashlib import blake2b
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["batch_samples", "fingerprint", "is_array", "leaves", "mapped", "rebuilt", "slice_batch", "with_items"]

_HASHED_ELEMENTS = 64


def is_array(value: Any) -> bool:
    """Return whether a value is a tensor or an array; NumPy's are told by what they offer, so it need not be there."""
    return isinstance(value, Tensor) or (hasattr(value, "dtype") and hasattr(value, "shape"))


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _children(value: Any) -> Sequence[tuple[str, Any]] | None:
    """Return what a nested structure holds, each with its place in it; None where it is no structure."""
    if isinstance(value, PackedSequence):  # a named tuple, of time steps
        return None
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if _is_record(value):
        return [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def leaves(value: Any, label: str = "", *, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield what a nested value holds, in order, each with its place such as `['image'][0]`.

    Args:
        value: The value; if it is no structure, it is the only leaf.
        label: What places begin with.
        is_leaf: Says of a structure that it is not to be looked into.
    """
    children = None if is_leaf is not None and is_leaf(value) else _children(value)
    if children is None:
        yield label, value
        return
    for place, child in children:
        yield from leaves(child, label + place, is_leaf=is_leaf)


def rebuilt(value: Any, items: Iterator[Any], *, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return a value of the same structure and types that holds other leaves.

    Args:
        value: The value whose structure it is.
        items: As many leaves as `leaves` yields of it, in that order.
        is_leaf: As given to `leaves`.
    """
    children = None if is_leaf is not None and is_leaf(value) else _children(value)
    if children is None:
        return next(items)
    parts = [rebuilt(child, items, is_leaf=is_leaf) for _, child in children]
    if isinstance(value, Mapping):
        return with_items(value, dict(zip(value, parts, strict=True)))
    if isinstance(value, (list, tuple)):
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    record = copy.copy(value)
    for field, part in zip(dataclasses.fields(value), parts, strict=True):
        # Past a frozen class, and without running `__init__` on values that it has already changed.
        object.__setattr__(record, field.name, part)
    return record


def mapped(value: Any, function: Callable[[Any], Any], *, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return a value of the same structure with `function` of each leaf."""
    return rebuilt(value, (function(leaf) for _, leaf in leaves(value, is_leaf=is_leaf)), is_leaf=is_leaf)


def with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of the same type. What else a mutable one holds is kept, as `torch.utils.data` does."""
    if not isinstance(mapping, MutableMapping):
        return type(mapping)(items)  # type: ignore[call-arg]  # there is no other way to build one
    clone = copy.copy(mapping)
    clone.update(items)
    return clone


def _is_column(value: Any) -> bool:
    """Return whether a value lists one plain object per sample, as `default_collate` lists strings."""
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields"):
        return False
    nested = (is_array(item) or isinstance(item, PackedSequence) or _children(item) is not None for item in value)
    return not any(nested)


def batch_samples(batch: Any) -> int:
    """Return the number of samples in a collated batch: dimension 0 of its tensors and arrays.

    Without any, it is the length of its lists of plain objects.

    Raises:
        ValueError: If there is none, or they differ, or the batch holds a `PackedSequence`.
    """
    held = [leaf for _, leaf in leaves(batch, is_leaf=_is_column)]
    if any(isinstance(leaf, PackedSequence) for leaf in held):
        raise ValueError(
            "a PackedSequence cannot be split: it holds the samples step by step. Let collate_fn return the padded"
            " sequences and their lengths, and call pack_padded_sequence in training_step."
        )
    arrays = {int(leaf.shape[0]) for leaf in held if is_array(leaf) and len(leaf.shape) > 0}
    lengths = arrays or {len(leaf) for leaf in held if _is_column(leaf)}
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

    def cut(leaf: Any) -> Any:
        if is_array(leaf):
            return leaf[start:stop] if len(leaf.shape) > 0 else leaf
        return leaf[start:stop] if _is_column(leaf) and len(leaf) == size else leaf

    return batch if (start, stop) == (0, size) else mapped(batch, cut, is_leaf=_is_column)


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
    if is_array(value):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            rows = (value[:1], value[-1:]) if len(value.shape) > 0 else (value,)
            for row in rows:
                yield repr(row.reshape(-1)[:_HASHED_ELEMENTS].tolist()).encode()
    elif isinstance(value, (int, float, complex, str, bytes, bool, type(None))):
        yield f"{value!r};".encode()
    elif (children := _children(value)) is not None:
        yield f"{type(value).__qualname__}{len(children)}:".encode()
        items = [item for _, item in children]
        try:
            yield array("q", items).tobytes()  # indices, the common case, at the speed of C
        except (TypeError, OverflowError, RuntimeError, ValueError):
            for item in items:
                yield from _described(item)
    else:
        yield type(value).__qualname__.encode()
