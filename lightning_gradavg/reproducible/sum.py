"""The sum of all replicas' gradients, in an order that depends on the number of replicas alone.

A sum of floating-point numbers depends on its order. This one is a binary tree over the replicas: a node at height h
holds the leaves from i 2^h to (i + 1) 2^h, as far as there are so many, and is the sum of the two nodes below.

    R = 6:   ((0 1) (2 3)) (4 5)

A rank has consecutive leaves and adds up what it can; where they are no whole subtree, it is left with several sums:
of 3 leaves on each of 2 ranks (0 1) and 2, and 3 and (4 5). The ranks exchange segments of these sums, all with all.
Each adds up its own segment by the same tree, and sends it to all: DDP's number of bytes, where a rank has one sum.
Ranks are never grouped by node, so the grouping shows nowhere.

A gradient is copied once, into the row that is sent. Sums are made in place, and received in that row, whose parts are
then the gradients. While one bucket is packed or added up, the others travel. Nothing is sent during a backward: on
CPUs, whose cores compute it, that cost more than it hid.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg.lightning_internals import copy_each, views_of
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.sums import SUM_DTYPES

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
    """The sums of the gradients of all replicas, the same bits on any number of ranks, one window after another.

    Args:
        parameters: The parameters, the same on all ranks.
        replicas: Replicas of all ranks; the number of ranks divides it.
        world: The ranks, of which each has as many replicas, those of rank 0 first.
        bucket_bytes: About how many bytes travel at once.
    """

    def __init__(
        self, parameters: Sequence[Tensor], *, replicas: int, world: World, bucket_bytes: int = _BUCKET_BYTES
    ) -> None:
        each = replicas // world.size
        self._replicas, self._world = replicas, world
        self._spans = [subtrees(replicas, range(rank * each, (rank + 1) * each)) for rank in range(world.size)]
        cut = _partition(parameters, bucket_bytes)
        self._buckets = [_Bucket(members, world.size) for members in cut]
        self._begin()

    def _begin(self) -> None:
        self._sums: list[dict[Span, Tensor]] = [{} for _ in self._buckets]
        self._sent: list[list[tuple[Tensor, dist.Work | None]]] = []

    @torch.no_grad()
    def add(self, replica: int, gradients: Gradients) -> None:
        """Add the gradients of this rank's next replica, which are taken out of `gradients`.

        After its last one every rank begins to send the others their segments of its sums. A collective operation.
        """
        _, last = self._spans[self._world.rank][-1]
        for bucket, sums in zip(self._buckets, self._sums, strict=True):
            sums[replica, replica + 1] = bucket.row_of(gradients)
            add_up(sums, 0, self._replicas, Tensor.add_)
            if replica + 1 == last:
                rows = list(sums.values())
                # Some ranks have fewer sums than others, which nobody reads.
                rows += [torch.empty_like(rows[0]) for _ in range(max(map(len, self._spans)) - len(rows))]
                self._sent.append([self._exchanged(row, torch.empty_like(row)) for row in rows])

    def _exchanged(self, row: Tensor, received: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Return where a segment from every rank arrives, and what to wait for."""
        if self._world.group is None:
            return row, None
        return received, dist.all_to_all_single(received, row, group=self._world.group, async_op=True)

    @torch.no_grad()
    def gradients(self, factor: float) -> Gradients:
        """Return the sums times a factor, in the dtypes of the parameters, and end the window. A collective operation.

        A parameter that no replica has a gradient of has none. A zero is always positive: a rank without a gradient
        sends zeros, and -0.0 + 0.0 is 0.0.
        """
        totals = []
        for sent, sums in zip(self._sent, self._sums, strict=True):
            added_up = self._added_up(sent).view(self._world.size, -1)
            added_up[0].add_(0.0).mul_(factor)
            added_up[1:] = added_up[0]
            totals.append(self._exchanged(added_up.view(-1), next(iter(sums.values()))))
        self._begin()
        found: list[tuple[Tensor, Tensor]] = []
        counts: list[Tensor] = []
        for bucket, (total, work) in zip(self._buckets, totals, strict=True):
            if work is not None:
                work.wait()
            parts, counted = bucket.open(total)
            found += zip(bucket.parameters, parts, strict=True)
            counts.append(counted != 0)
        # Read once, as the host waits for an accelerator.
        used = torch.cat(counts).tolist() if counts else []
        return {id(one): part.to(one.dtype) for (one, part), is_used in zip(found, used, strict=True) if is_used}

    def _added_up(self, sent: Sequence[tuple[Tensor, dist.Work | None]]) -> Tensor:
        """Return a row that begins with this rank's segment of the sum over all replicas."""
        for _, work in sent:
            if work is not None:
                work.wait()
        segments = [received.chunk(self._world.size) for received, _ in sent]
        of_ranks = (zip(spans, segments, strict=False) for spans in self._spans)
        known = {span: rows[rank] for rank, of_rank in enumerate(of_ranks) for span, rows in of_rank}
        add_up(known, 0, self._replicas, Tensor.add_)
        return sent[0][0]  # whose first segment is the first summand, and so the sum


class _Bucket:
    """Parameters of one dtype, whose gradients make a row of real numbers.

    Each has the memory format of its parameter. Behind them stands how many replicas have one of each.
    """

    def __init__(self, parameters: Sequence[Tensor], ranks: int) -> None:
        self.parameters, self.keys = parameters, [*map(id, parameters)]
        self._dtype = SUM_DTYPES[parameters[0].dtype]
        self._end = sum(one.numel() for one in parameters)
        self._length = -(-(self._end + len(parameters)) // ranks) * ranks
        # `views_of` makes all others.
        self._strides = {
            index: torch.empty_like(one, device="meta").stride()
            for index, one in enumerate(parameters)
            if not one.is_contiguous()
        }

    def open(self, row: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the gradients in a row, and the counts."""
        values = row.view(self._dtype)
        parts = views_of(values[: self._end], self.parameters)
        for index, stride in self._strides.items():
            parts[index] = parts[index].as_strided(self.parameters[index].shape, stride)
        return parts, values[self._end : self._end + len(parts)]

    def row_of(self, gradients: Gradients) -> Tensor:
        """Return a row of a replica's gradients, which are taken out of `gradients`."""
        row = self.parameters[0].new_empty(self._length, dtype=self._dtype)
        row = torch.view_as_real(row).view(-1) if row.is_complex() else row
        parts, counts = self.open(row)
        counts.fill_(1)
        held = []
        for index, (part, key) in enumerate(zip(parts, self.keys, strict=True)):
            gradient = gradients.pop(key, None)
            if gradient is None:
                part.zero_()
                counts[index] = 0
            else:
                held.append((part, gradient))
        if held:
            copy_each(*zip(*held, strict=True))
        return row


def _partition(parameters: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Cut the parameters that have elements into buckets of one dtype to sum in and about so many bytes."""
    open_buckets: dict[Any, tuple[list[Tensor], int]] = {}
    for one in (each for each in parameters if each.numel() > 0):
        kind, size = (SUM_DTYPES[one.dtype], one.device), one.numel() * SUM_DTYPES[one.dtype].itemsize
        members, used = open_buckets.get(kind, ([], 0))
        if members and used + size > most:
            yield members
            members, used = [], 0
        members.append(one)
        open_buckets[kind] = members, used + size
    yield from (members for members, _ in open_buckets.values())
