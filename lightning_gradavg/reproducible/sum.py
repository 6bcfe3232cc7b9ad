"""The sum of all replicas' gradients, in an order that depends on the number of replicas alone.

A sum of floating-point numbers depends on its order. This one is a binary tree over the replicas: a node at height h
holds the leaves from i 2^h to (i + 1) 2^h, as far as there are so many, and is the sum of the two nodes below.

    R = 6:   ((0 1) (2 3)) (4 5)

A rank has consecutive leaves and adds up what it can; where they are no whole subtree, it is left with several sums:
of 3 leaves on each of 2 ranks (0 1) and 2, and 3 and (4 5). The ranks exchange segments of these sums, all with all.
Each adds up its own segment by the same tree, and sends it to all: DDP's number of bytes, where a rank has one sum.
While one bucket is packed or added up, the others travel. Nothing is sent during a backward: on CPUs, whose cores
compute it, that cost more than it hid.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg._lightning.internals import copy_each, views_of
from lightning_gradavg._support.collectives import World

__all__ = ["Gradients", "Span", "TreeSum", "add_up", "subtrees"]

T = TypeVar("T")

Span: TypeAlias = tuple[int, int]
"""The leaves of a node: `(start, stop)`, half open."""

Gradients: TypeAlias = MutableMapping[int, Tensor]
"""Gradients by the `id` of their parameters, without those that the loss does not use."""

_BUCKET_BYTES = 25 * 2**20  # as DDP's: larger ones gain no bandwidth


def add_up(known: dict[Span, T], start: int, stop: int, add: Callable[[T, T], T]) -> bool:
    """Replace what is known of the leaves from `start` to `stop` by sums, as far as the tree allows.

    `add` returns the sum of a left and a right value, and may write into either. Return whether one sum is left.
    """
    if (start, stop) in known or stop - start == 1:
        return (start, stop) in known
    middle = middle_of(start, stop)
    # Both, as either may hold sums that go no further.
    if not all([add_up(known, start, middle, add), add_up(known, middle, stop, add)]):
        return False
    known[start, stop] = add(known.pop((start, middle)), known.pop((middle, stop)))
    return True


def middle_of(start: int, stop: int) -> int:
    """Return where the right one of the two below a node begins: the left one is as large a power of two as fits."""
    return start + (1 << (stop - start - 1).bit_length() - 1)


def subtrees(leaves: int, held: range) -> tuple[Span, ...]:
    """Return the nodes that consecutive leaves add up to by themselves."""
    known = {(leaf, leaf + 1): leaf for leaf in held}
    add_up(known, 0, leaves, operator.add)
    return tuple(sorted(known))


class TreeSum:
    """The sums of the gradients of all replicas, of which each rank has as many, one window after another."""

    def __init__(
        self, parameters: Sequence[Tensor], *, replicas: int, world: World, bucket_bytes: int = _BUCKET_BYTES
    ) -> None:
        each = replicas // world.size
        spans = [subtrees(replicas, range(rank * each, (rank + 1) * each)) for rank in range(world.size)]
        cut: dict[Any, list[Tensor]] = defaultdict(list)
        used = Counter[Any]()
        for one in parameters:
            kind = torch.promote_types(one.dtype, torch.float32), one.device
            cut[kind, used[kind] // bucket_bytes].append(one)
            used[kind] += one.numel() * kind[0].itemsize
        self._buckets = [_Bucket(members, spans, world) for members in cut.values()]

    @torch.no_grad()
    def add(self, replica: int, gradients: Gradients) -> None:
        """Add the gradients of this rank's next replica, which are taken out of `gradients`. A collective operation."""
        for bucket in self._buckets:
            bucket.add(replica, gradients)

    @torch.no_grad()
    def gradients(self, factor: float) -> Gradients:
        """Return the sums that there are, times a factor, and end the window. A collective operation."""
        for bucket in self._buckets:
            bucket.add_up_segment(factor)
        opened = [(bucket.parameters, *bucket.total()) for bucket in self._buckets]
        found = [pair for parameters, parts, _ in opened for pair in zip(parameters, parts, strict=True)]
        # Read once, as the host waits for an accelerator.
        used = torch.cat([counts != 0 for *_, counts in opened]).tolist() if opened else []
        return {id(one): part.to(one.dtype) for (one, part), is_used in zip(found, used, strict=True) if is_used}


class _Bucket:
    """Parameters of one dtype: their gradients make a row, with how many replicas have one of each at its end."""

    def __init__(self, parameters: Sequence[Tensor], spans: Sequence[Sequence[Span]], world: World) -> None:
        self.parameters, self._spans, self._world = parameters, spans, world
        self._dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        self._end = sum(one.numel() for one in parameters)
        self._length = -(-(self._end + len(parameters)) // world.size) * world.size
        self._sums: dict[Span, Tensor] = {}
        self._arriving: list[Tensor] = []
        self._works: list[Any] = []

    def add(self, replica: int, gradients: Gradients) -> None:
        """Add a row; after the last one, begin to send the others their segments of the sums."""
        own, (_, leaves) = self._spans[self._world.rank], self._spans[-1][-1]
        self._sums[replica, replica + 1] = self._row_of(gradients)
        add_up(self._sums, 0, leaves, Tensor.add_)
        if replica + 1 == own[-1][1]:
            rows = list(self._sums.values())
            # Some ranks have fewer sums than others, which nobody reads.
            rows += [torch.empty_like(rows[0]) for _ in range(max(map(len, self._spans)) - len(rows))]
            self._arriving = [self._exchanged(torch.empty_like(row), row) for row in rows]

    def _exchanged(self, received: Tensor, sent: Tensor) -> Tensor:
        """Return where a segment from every rank arrives until the works are done."""
        if self._world.group is None:
            return sent
        self._works.append(dist.all_to_all_single(received, sent, group=self._world.group, async_op=True))
        return received

    def _wait(self) -> None:
        while self._works:
            self._works.pop().wait()

    def add_up_segment(self, factor: float) -> None:
        """Begin to send this rank's segment of the sum over all replicas, times a factor, to all.

        A zero is always positive: a rank without a gradient sends zeros, and -0.0 + 0.0 is 0.0.
        """
        self._wait()
        segments = [row.chunk(self._world.size) for row in self._arriving]
        of_ranks = (zip(spans, segments, strict=False) for spans in self._spans)
        known = {span: rows[rank] for rank, of_rank in enumerate(of_ranks) for span, rows in of_rank}
        add_up(known, 0, self._spans[-1][-1][1], Tensor.add_)
        total = self._arriving[0].view(self._world.size, -1)  # whose first segment was the first summand
        total[0].add_(0.0).mul_(factor)
        total[1:] = total[0]
        (first, *_), self._sums = self._sums.values(), {}
        self._arriving = [self._exchanged(first, total.view(-1))]

    def total(self) -> tuple[list[Tensor], Tensor]:
        """Return the sums of the gradients, and how many replicas have one."""
        self._wait()
        (row,), self._arriving = self._arriving, []
        return self._opened(row)

    def _opened(self, row: Tensor) -> tuple[list[Tensor], Tensor]:
        values = row.view(self._dtype)
        return views_of(values[: self._end], self.parameters), values[self._end :][: len(self.parameters)]

    def _row_of(self, gradients: Gradients) -> Tensor:
        """Return a row of a replica's gradients, which are taken out of `gradients`."""
        row = self.parameters[0].new_empty(self._length, dtype=self._dtype).view(self._dtype.to_real())
        parts, counts = self._opened(row)
        held = [gradients.pop(id(one), None) for one in self.parameters]
        sources = [
            torch.zeros_like(part) if one is None else one.to_dense() for part, one in zip(parts, held, strict=True)
        ]
        copy_each(parts, sources)
        counts.copy_(torch.tensor([one is not None for one in held]))
        return row
