"""Nested values: their samples, what slices keep of them, and what tells them apart."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.parallel import scatter
from torch.nn.parallel._functions import Scatter
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_flatten

from lightning_gradavg._support.tree import batch_samples, data_digest, rows_of, slice_rows
from lightning_gradavg.batches.chunks import chunk_bounds

PACKED = [pack_sequence([torch.ones(length) for length in lengths]) for lengths in ([1, 1, 1], [3], [3, 2])]


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Record:
    x: Any
    name: str = "all"
    made: int = field(default=0, init=False)


class Columns(MutableMapping[str, Any]):
    """A mapping of a user's own, of which `copy.copy` makes another view of the same items."""

    def __init__(self, **items: Any) -> None:
        self.items_by_name, self.source = items, "disk"

    def __getitem__(self, name: str) -> Any:
        return self.items_by_name[name]

    def __setitem__(self, name: str, item: Any) -> None:
        self.items_by_name[name] = item

    def __delitem__(self, name: str) -> None:
        del self.items_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_by_name)

    def __len__(self) -> int:
        return len(self.items_by_name)


def plain(batch: Any) -> Any:
    leaves, structure = tree_flatten(batch)
    return structure, [(leaf.dtype, leaf.tolist()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


@pytest.mark.parametrize("parts", range(1, 7))
def test_slices_are_what_scatter_makes(parts: int) -> None:
    """Cut at `chunk_bounds`, nested batches give the chunks of `torch.nn.parallel.scatter`, in the same types."""
    x, y = torch.arange(12), torch.arange(24.0).view(12, 2)
    batch = {"x": x, "nested": [y, (x, {"y": y, "text": "a"})], "pair": Pair(Pair(x, 5), [y, y, None]), "empty": ()}
    assert 12 == rows_of(batch)
    slices = [slice_rows(batch, start, stop) for start, stop in chunk_bounds(12, parts) if stop > start]

    with mock.patch.object(Scatter, "apply", lambda targets, _, dim, tensor: tensor.chunk(len(targets), dim)):
        expected = scatter(batch, list(range(parts)))

    assert list(map(plain, expected)) == list(map(plain, slices))


def test_every_structure_is_kept() -> None:
    """What scatter does not cut, arrays, lists of plain items and records, is sliced, too; numbers are shared."""
    batch = {
        "array": np.arange(4),
        "record": Record(torch.arange(4)),
        "ordered": OrderedDict(x=torch.arange(4)),
        "user": UserDict(x=torch.arange(4)),
        "names": ["a", "b", "c", "d"],
        "others": ("abcd", 4, None),
    }

    assert 4 == rows_of(batch)
    part = slice_rows(batch, 1, 3)

    assert [type(value) for value in batch.values()] == [type(value) for value in part.values()]
    assert [1, 2] == part["array"].tolist() == part["ordered"]["x"].tolist() == part["user"]["x"].tolist()
    assert ([1, 2], "all", 0) == (part["record"].x.tolist(), part["record"].name, part["record"].made)
    assert ["b", "c"] == part["names"]
    assert batch["others"] == part["others"]


def test_slicing_leaves_the_batch_as_it_is() -> None:
    """Each chunk is cut from the whole batch, also of a mapping whose copies share its items."""
    batch = Columns(x=torch.arange(4), names=["a", "b", "c", "d"])

    first, last = slice_rows(batch, 0, 1), slice_rows(batch, 2, 4)

    assert [[0], [2, 3], [0, 1, 2, 3]] == [columns["x"].tolist() for columns in (first, last, batch)]
    assert (["a"], ["c", "d"], "disk") == (first["names"], last["names"], last.source)
    assert last["x"].untyped_storage().data_ptr() == batch["x"].untyped_storage().data_ptr(), "a view"


FOUR = torch.ones(4)
UNCLEAR: list[tuple[Any, str]] = [
    # A ready-made batch, and what the error says of it.
    ((torch.zeros(4, 2), torch.zeros(2, 9)), r"differ: 2 of batch\[1\] and 4 of batch\[0\]"),
    (object(), "batch is a object, which has no rows"),
    ({"x": FOUR, "lr": torch.tensor(1.0)}, r"batch\['lr'\] has no dimensions"),
    ({"lr": 0.1}, "there is no tensor in it"),
    # One row per sample, of a loader's own kind.
    ({"x": FOUR, "boxes": [{"n": 1}] * 4}, r"batch\['boxes'\] is a list of 4 parts in a batch of 4 rows"),
    ({"x": FOUR, "boxes": [torch.ones(n, 2) for n in (4, 4, 4, 4)]}, r"batch\['boxes'\] is a list of 4 parts"),
    ({"x": FOUR, "boxes": [torch.ones(n, 2) for n in (1, 2, 3, 4)]}, "first dimensions differ"),
    ({"x": FOUR, "lists": [[1, 2], [3], [4, 5, 6], [7]]}, "first dimensions differ"),
    ({"x": FOUR, "scalars": [torch.tensor(1.0)] * 4}, r"batch\['scalars'\]\[0\] has no dimensions"),
    # About the batch as a whole, in a list.
    ({"x": FOUR, "classes": ["cat", "dog"]}, "first dimensions differ"),
    # A structure, or one tensor per row.
    ([torch.ones(2), torch.zeros(2)], "batch is a list of 2 parts in a batch of 2 rows.*Use a tuple"),
    ({"x": FOUR, "set": {1, 2}}, r"batch\['set'\] is a set, which has no rows"),
    # Also where its tensors happen to be equally long.
    *(({"x": torch.ones(3), "text": packed}, "PackedSequence, which has no rows") for packed in PACKED),
]


@pytest.mark.parametrize(("batch", "found"), UNCLEAR)
def test_unclear_batches_are_not_cut_at_a_guess(batch: Any, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        rows_of(batch)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        # A batch, and the weight that is read off it; None where nobody can tell.
        (FOUR, 4),
        ({"x": FOUR, "names": ["a", "b"], "lr": torch.tensor(0.1), "n": 3}, 4),
        ((FOUR, [FOUR, np.arange(4)]), 4),
        ((FOUR, torch.ones(8, 4)), None),
        ({"x": FOUR, "boxes": [torch.ones(3, 2), torch.ones(1, 2)]}, None),
        ({"x": FOUR, "graph": object()}, None),
        (["a", "b"], None),
        (torch.tensor(1.0), None),
        *((packed, None) for packed in PACKED),
    ],
)
def test_samples_are_read_off_where_all_tensors_have_one_first_dimension(batch: Any, samples: int | None) -> None:
    if samples is None:
        with pytest.raises(ValueError, match="first dimension"):
            batch_samples(batch)
    else:
        assert samples == batch_samples(batch)


def test_digests_tell_data_apart() -> None:
    """Case 40: equal data have equal digests, and other values, order, types, shapes or structures do not."""
    values = [
        [1, 2, 3],
        [3, 2, 1],
        [1.0, 2.0, 3.0],
        ["1", "2", "3"],
        [(0, 1), 2],
        torch.arange(6),
        torch.arange(6).flip(0),
        torch.arange(6).int(),
        torch.arange(6).view(2, 3),
        {"x": torch.arange(6)},
        {"x": torch.arange(6), "y": "text"},
        Pair(1, None),
        Record(torch.ones(2, dtype=torch.bfloat16)),
        np.arange(6.0),
        torch.empty(0, 3),
    ]

    assert len(values) == len({data_digest(value) for value in values})
    assert data_digest([object(), torch.ones(2)]) == data_digest([object(), torch.ones(2)])
    assert {16} == {len(data_digest(value)) for value in values}
