"""The sum of all replicas' gradients, in an order that depends on the number of replicas alone.

A sum of floating-point numbers depends on its order. This one is a binary tree over the replicas: a node at height h
holds the leaves from i 2^h to (i + 1) 2^h, as far as there are so many, and is the sum of the two nodes below.

    R = 6:   ((0 1) (2 3)) (4 5)

A rank has consecutive leaves and adds up what it can; where they are no whole subtree, it is left with several sums:
of 3 leaves on each of 2 ranks (0 1) and 2, and 3 and (4 5). The ranks exchange segments of these sums, all with all.
Each adds up its own segment by the same tree, and gathers those of the others: DDP's number of bytes, where a rank has
one sum. Ranks are never grouped by node, so the grouping shows nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg.ranks import World

__all__ = ["Fold", "Gradients", "Node", "Span", "add_gradients", "subtrees", "sum_over_ranks"]

T = TypeVar("T")

Span: TypeAlias = tuple[int, int]
"""The leaves of a node: `(start, stop)`, half open."""

Gradients: TypeAlias = Sequence[Tensor | None]
"""A gradient for each parameter; None where the loss does not use it."""

Node: TypeAlias = tuple[Span, Gradients]
"""What consecutive replicas add up to."""

_BUCKET_BYTES = 25 * 2**20


class Fold(Generic[T]):
    """Adds up consecutive nodes as far as the tree allows, as a binary counter carries.

    Args:
        leaves: Leaves of the tree.
        add: Returns the sum of a left and a right value; it may write into either.

    Attributes:
        nodes: What is added up so far, in order.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self._leaves, self._add = leaves, add
        self.nodes: list[tuple[Span, T]] = []

    def push(self, span: Span, value: T) -> None:
        """Append the node that follows."""
        while self.nodes and self._completes(span):
            (start, _), left = self.nodes.pop()
            span, value = (start, span[1]), self._add(left, value)
        self.nodes.append((span, value))

    def _completes(self, span: Span) -> bool:
        """Return whether a node is the right one of the two below a node, of which the last one so far is the left."""
        start, middle = self.nodes[-1][0]
        size = middle - start
        # A left node is whole: as many leaves as a power of two, from a multiple of that of the node above.
        is_left = size & (size - 1) == 0 and start % (2 * size) == 0
        return is_left and span[1] == min(start + 2 * size, self._leaves)


def subtrees(leaves: int, held: range) -> tuple[Span, ...]:
    """Return the nodes that consecutive leaves add up to by themselves."""
    fold: Fold[None] = Fold(leaves, lambda left, right: None)  # noqa: ARG005  # there is nothing to add
    for leaf in held:
        fold.push((leaf, leaf + 1), None)
    return tuple(span for span, _ in fold.nodes)


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Return the sums of two replicas' gradients in the dtype of sums, in the memory of the first that has it."""
    return [
        other if one is None else one if other is None else one.to(_wide(one)).add_(other)
        for one, other in zip(left, right, strict=True)
    ]


@torch.no_grad()
def sum_over_ranks(
    nodes: Sequence[Node],
    parameters: Sequence[Tensor],
    *,
    replicas: int,
    world: World,
    factor: float = 1.0,
    bucket_bytes: int = _BUCKET_BYTES,
) -> list[Tensor | None]:
    """Return the sum of the gradients of all replicas, the same bits on any number of ranks. A collective operation.

    A zero is always positive: a rank without a gradient sends zeros, and -0.0 + 0.0 is 0.0.

    Args:
        nodes: The nodes of a `Fold` of all replicas with `add_gradients`, into which this rank's were pushed.
        parameters: The parameters, the same on all ranks.
        replicas: Replicas of all ranks; the number of ranks divides it.
        world: The ranks, of which each has as many replicas, those of rank 0 first.
        factor: What the sums are multiplied by before they are rounded to the dtype of their parameter.
        bucket_bytes: About how many bytes are summed at once, which bounds the memory that is needed.

    Returns:
        The sums; None for a parameter that no replica has a gradient of.
    """
    totals: list[Tensor] = []
    counted: list[Tensor] = []
    for bucket in _buckets(parameters, bucket_bytes):
        like = parameters[bucket.start : bucket.stop]
        rows = [_row([gradients[index] for index in bucket], like) for _, gradients in nodes]
        total = _sum(rows, replicas, world)
        *parts, counts = total.split([*(_real(one).numel() for one in like), len(like)])
        for one, part in zip(like, parts, strict=True):
            totals.append(torch.empty_like(one))
            _real(totals[-1]).copy_(part.mul_(factor).view(_real(one).shape))
        counted.append(counts.float())
    # Read once, as the host waits for an accelerator.
    used = torch.cat(counted).tolist() if counted else []
    return [total if count else None for total, count in zip(totals, used, strict=True)]


def _buckets(parameters: Sequence[Tensor], most: int) -> Iterator[range]:
    """Cut the parameters into consecutive ones of one kind that have about so many bytes."""
    start, size, kind = 0, 0, None
    for index, one in enumerate(parameters):
        added, its = _real(one).numel() * _row_dtype(one).itemsize, (_row_dtype(one), one.device)
        if index > start and (size + added > most or its != kind):
            yield range(start, index)
            start, size = index, 0
        size, kind = size + added, its
    if parameters:
        yield range(start, len(parameters))


def _row(gradients: Gradients, like: Sequence[Tensor]) -> Tensor:
    """Return gradients as one row of real numbers in the dtype of sums, behind them how many there are of each."""
    lengths = [*(_real(one).numel() for one in like), len(like)]
    row = like[0].new_zeros(sum(lengths), dtype=_row_dtype(like[0]))
    *parts, counts = row.split(lengths)
    for part, gradient in zip(parts, gradients, strict=True):
        if gradient is not None:
            part.view(_real(gradient).shape).copy_(_real(gradient))
    counts.copy_(torch.tensor([float(gradient is not None) for gradient in gradients]))
    return row


def _sum(rows: Sequence[Tensor], replicas: int, world: World) -> Tensor:
    """Return the sum of the rows of all ranks by the tree."""
    each, fold = replicas // world.size, Fold[Tensor](replicas, Tensor.add_)
    spans = [subtrees(replicas, range(rank * each, (rank + 1) * each)) for rank in range(world.size)]
    if world.group is None:
        return rows[0].add_(0.0)
    length, most = len(rows[0]), max(map(len, spans))
    segment = -(-length // world.size)
    sent = rows[0].new_zeros(world.size, most, segment)
    for index, row in enumerate(rows):
        for part, one in zip(sent[:, index], row.split(segment), strict=False):
            part[: len(one)] = one
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=world.group)
    for of_rank, those in zip(spans, received, strict=True):
        for span, part in zip(of_rank, those, strict=False):  # some ranks have fewer sums than others
            fold.push(span, part)
    ((_, mine),) = fold.nodes
    total = rows[0].new_empty(world.size * segment)
    dist.all_gather([*total.split(segment)], mine.add_(0.0), group=world.group)
    return total[:length]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _row_dtype(tensor: Tensor) -> torch.dtype:
    return _wide(_real(tensor))
