"""The sum of all replicas' gradients, in an order that depends on the number of replicas alone.

A sum of floating-point numbers depends on its order. This one is a binary tree over the replicas: a node at height h
holds the leaves from i 2^h to (i + 1) 2^h, as far as there are so many, and is the sum of the two nodes below.

    R = 6:   ((0 1) (2 3)) (4 5)

A rank has consecutive leaves and adds up what it can; where they are no whole subtree, it is left with several sums:
of 3 leaves on each of 2 ranks (0 1) and 2, and 3 and (4 5). The ranks exchange segments of these sums, all with all.
Each adds up its own segment by the same tree, and sends it to all: DDP's number of bytes, where a rank has one sum.
While one bucket is packed or added up, the others travel. Nothing is sent during a backward: on CPUs, whose cores
compute it, that cost more than it hid.

The memory of a window is used again in the next. Large new tensors cost more than what is written to them: for each of
their pages, the first write waits for the system (`python -m benchmarks.step`, docs/performance.md).
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, MutableMapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.flat import views_of

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
    if (start, stop) in known:
        return True
    if stop - start == 1:
        return False
    middle = middle_of(start, stop)
    # Add up both sides, also if one of them is incomplete: each may hold sums that go no further.
    left_is_known = add_up(known, start, middle, add)
    right_is_known = add_up(known, middle, stop, add)
    if not (left_is_known and right_is_known):
        return False
    left = known.pop((start, middle))
    right = known.pop((middle, stop))
    known[start, stop] = add(left, right)
    return True


def middle_of(start: int, stop: int) -> int:
    """Return where the right one of the two below a node begins: the left one is as large a power of two as fits."""
    return start + (1 << (stop - start - 1).bit_length() - 1)


def subtrees(leaves: int, held: range) -> tuple[Span, ...]:
    """Return the nodes that consecutive leaves add up to by themselves."""
    known = {(leaf, leaf + 1): leaf for leaf in held}
    add_up(known, 0, leaves, operator.add)  # of any values: only the nodes count
    return tuple(sorted(known))


class TreeSum:
    """The sums of the gradients of all replicas, of which each rank has as many, one window after another.

    The calls of a window: `add` for each replica of this rank, in order, and `gradients`. Both are collective
    operations.

    Args:
        parameters: The parameters that train.
        replicas: Number of replicas on all ranks.
        world: The ranks that add up.
        bucket_bytes: About how many bytes of gradients travel in one exchange.
    """

    def __init__(
        self, parameters: Sequence[Tensor], *, replicas: int, world: World, bucket_bytes: int = _BUCKET_BYTES
    ) -> None:
        replicas_of_rank = replicas // world.size
        spans = []
        for rank in range(world.size):
            held = range(rank * replicas_of_rank, (rank + 1) * replicas_of_rank)
            spans.append(subtrees(replicas, held))
        self._buckets = [_Bucket(members, spans, world) for members in _cut(parameters, bucket_bytes)]

    @torch.no_grad()
    def add(self, replica: int, gradients: Gradients) -> None:
        """Add the gradients of this rank's next replica, which are taken out of `gradients`. A collective operation."""
        for bucket in self._buckets:
            bucket.add(replica, gradients)

    @torch.no_grad()
    def gradients(self, factor: float) -> Gradients:
        """Return the sums that there are, times a factor, and end the window. A collective operation."""
        # Each bucket's exchange is begun before the first is waited for.
        for bucket in self._buckets:
            bucket.add_up_segment(factor)
        parameters: list[Tensor] = []
        sums: list[Tensor] = []
        counts: list[Tensor] = []
        for bucket in self._buckets:
            total = bucket.total()
            parameters.extend(bucket.parameters)
            sums.extend(total.gradients)
            counts.append(total.counts)
        if not counts:
            return {}
        # Read once, as the host waits for an accelerator.
        are_used = torch.cat([count != 0 for count in counts]).tolist()
        gradients: Gradients = {}
        for parameter, total_of_parameter, is_used in zip(parameters, sums, are_used, strict=True):
            if not is_used:
                continue
            if total_of_parameter.dtype != parameter.dtype:  # of parameters in 16 bits
                total_of_parameter = total_of_parameter.to(parameter.dtype)  # noqa: PLW2901  # the same gradient
            gradients[id(parameter)] = total_of_parameter
        return gradients


class _Kind(NamedTuple):
    """What the parameters of a bucket have in common."""

    dtype: torch.dtype  # in which their gradients are summed
    device: torch.device


def _cut(parameters: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Return parameters in buckets of one kind and about that many bytes, in their order within a kind."""
    buckets: dict[tuple[_Kind, int], list[Tensor]] = defaultdict(list)
    bytes_of_kind = Counter[_Kind]()
    for parameter in parameters:
        kind = _Kind(_summed_in(parameter), parameter.device)
        number = bytes_of_kind[kind] // bucket_bytes
        buckets[kind, number].append(parameter)
        bytes_of_kind[kind] += parameter.numel() * kind.dtype.itemsize
    return list(buckets.values())


def _summed_in(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which gradients of a parameter are summed: float32 for those in 16 bits."""
    return torch.promote_types(parameter.dtype, torch.float32)


class _Total(NamedTuple):
    """The parts of a row."""

    gradients: list[Tensor]  # in the shapes of the parameters
    counts: Tensor  # of each parameter, how many replicas have a gradient


class _Bucket:
    """Parameters of one dtype: their gradients make a row, with how many replicas have one of each at its end.

    The calls of a window: `add` for each replica of this rank, `add_up_segment`, `total`. The exchanges:

    | begun by | sends | received in `_arriving` |
    |---|---|---|
    | the last `add` | each rank its segment of this rank's sums | this rank's segment of all ranks' sums |
    | `add_up_segment` | to all, this rank's segment of the total | the total |

    Rows are allocated in the first window. In later windows every row is free when the first replica is added.
    """

    def __init__(self, parameters: Sequence[Tensor], spans: Sequence[Sequence[Span]], world: World) -> None:
        self.parameters = parameters
        self._spans = spans  # of each rank, the nodes of the sums that it has after its last replica
        self._world = world
        self._leaves = spans[-1][-1][1]  # where the last node of the last rank ends
        self._dtype = _summed_in(parameters[0])
        self._end = sum(parameter.numel() for parameter in parameters)  # of the gradients in a row
        needed = self._end + len(parameters)
        self._length = -(-needed // world.size) * world.size  # rounded up to equal segments
        self._rows: list[Tensor] = []  # all that were allocated
        self._free_rows: list[Tensor] = []  # those of them that hold nothing that is needed
        self._sums: dict[Span, Tensor] = {}
        self._arriving: list[Tensor] = []
        self._works: list[dist.Work] = []

    def add(self, replica: int, gradients: Gradients) -> None:
        """Add a row; after the last one, begin to send the others their segments of the sums."""
        row = self._free_row()
        self._write(row, gradients)
        self._sums[replica, replica + 1] = row
        add_up(self._sums, 0, self._leaves, self._sum_of_rows)
        _, last = self._spans[self._world.rank][-1]
        if replica + 1 == last:
            self._begin_to_share_sums()

    def _free_row(self) -> Tensor:
        """Return a row that may be written to."""
        if not self._free_rows:
            row = torch.empty(self._length, dtype=self._dtype, device=self.parameters[0].device)
            # Complex numbers are sent as real ones: not every backend knows others.
            row = row.view(self._dtype.to_real())
            self._rows.append(row)
            return row
        return self._free_rows.pop()

    def _sum_of_rows(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the sum, in the left row; the right one is free then."""
        self._free_rows.append(right)
        return left.add_(right)

    def _begin_to_share_sums(self) -> None:
        rows = list(self._sums.values())
        # All ranks exchange as many rows. Some have fewer sums than others, and send rows that nobody reads.
        most = max(len(spans) for spans in self._spans)
        while len(rows) < most:
            rows.append(self._free_row())
        if self._world.group is None:
            self._arriving = rows
            return
        self._arriving = []
        for row in rows:
            received = self._free_row()
            self._exchange(received, row)
            self._arriving.append(received)

    def _exchange(self, received: Tensor, sent: Tensor) -> None:
        """Begin to send every rank a segment; the segments of all ranks are there when the works are done."""
        work = dist.all_to_all_single(received, sent, group=self._world.group, async_op=True)
        assert work is not None
        self._works.append(work)

    def _wait(self) -> None:
        while self._works:
            self._works.pop().wait()

    def add_up_segment(self, factor: float) -> None:
        """Begin to send this rank's segment of the sum over all replicas, times a factor, to all.

        A zero is always positive: a rank without a gradient sends zeros, and 0.0 + factor * -0.0 is 0.0.
        """
        self._wait()
        known: dict[Span, Tensor] = {}
        for number, row in enumerate(self._arriving):
            for rank, segment in enumerate(row.chunk(self._world.size)):
                spans = self._spans[rank]
                if number < len(spans):  # else it is a row that nobody reads
                    known[spans[number]] = segment
        add_up(known, 0, self._leaves, Tensor.add_)
        # The sum is in its first summand: rank 0's segment of the first row.
        row = self._arriving[0]
        total = row.view(self._world.size, -1)
        torch.add(total.new_zeros(()), total[0], alpha=factor, out=total[0])  # one pass, not two
        if self._world.group is not None:
            total[1:] = total[0]
            received = next(iter(self._sums.values()))  # a row whose numbers were sent
            self._exchange(received, row)
            row = received
        self._arriving = [row]
        self._sums = {}

    def total(self) -> _Total:
        """Return the sums of the gradients, and how many replicas have one, as views that the next window writes to."""
        self._wait()
        (row,) = self._arriving
        self._arriving = []
        self._free_rows = list(self._rows)
        values = row.view(self._dtype)
        counts = values[self._end : self._end + len(self.parameters)]
        return _Total(views_of(values[: self._end], self.parameters), counts)

    def _write(self, row: Tensor, gradients: Gradients) -> None:
        """Write a replica's gradients to a row, and take them out of `gradients`."""
        flat: list[Tensor] = []
        counts = [0.0] * (self._length - self._end)  # with zeros at the end, up to equal segments
        for number, parameter in enumerate(self.parameters):
            gradient = gradients.pop(id(parameter), None)
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            else:
                counts[number] = 1.0
                if gradient.is_sparse:
                    gradient = gradient.to_dense()
            flat.append(gradient.reshape(-1))
        values = row.view(self._dtype)
        # One kernel. Copying into views of the row, one for each parameter, took twice as long for many small ones.
        torch.cat(flat, out=values[: self._end])
        values[self._end :] = values.new_tensor(counts)
