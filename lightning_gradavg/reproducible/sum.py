"""The sum of a bucket over all replicas, by the tree: those of a rank first, then those of all ranks, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.hooks import OwnGroups
from lightning_gradavg.reduction.sums import SUM_DTYPES, as_real
from lightning_gradavg.reproducible.accumulation import ReplicaSums
from lightning_gradavg.reproducible.tree import Fold, subtrees
from lightning_gradavg.wire.codecs import Codec
from lightning_gradavg.wire.exchange import Exchange
from lightning_gradavg.wire.route import Hop, Route

__all__ = ["TreeSum"]

_IN_ANY_ORDER = 2
"""So many numbers have one sum, whatever their order."""

_STRETCH = 8
"""Nothing is converted on the way, so nothing is to be done beside it: longer segments take fewer calls."""


class TreeSum:
    """Sums buckets over all replicas. Making it is a collective operation of all ranks of the run.

    The ranks exchange parts, all with all and never node by node: a part is summed where all that it is made of
    arrives, so the grouping of ranks shows nowhere. Two ranks with one sum each need none of it: of two numbers the sum
    is one in any order, so they take an all-reduce, which is faster.

    A zero is always the positive one: a replica without samples is left out on its own rank, but a rank without samples
    sends zeros, and -0.0 + 0.0 is 0.0.

    Args:
        replicas: Replicas of each loader batch.
        world: The ranks, whose number divides that of the replicas, and
        group: their process group.
        sums: What this rank's replicas left before the bucket.
        own: Runs the exchange.
    """

    def __init__(
        self, replicas: int, world: World, group: dist.ProcessGroup, sums: ReplicaSums, own: OwnGroups
    ) -> None:
        self._replicas, self._world, self._sums = replicas, world, sums
        self._group, self._own = group, own
        each = replicas // world.size
        self._spans = [subtrees(replicas, range(rank * each, (rank + 1) * each)) for rank in range(world.size)]
        self._rows = max(map(len, self._spans))
        self._exchange: Exchange | None = None
        if world.size * self._rows > _IN_ANY_ORDER:
            hop = Hop(tuple(range(world.size)), world.rank, narrow=False)
            groups = own.make([hop.ranks], "reproducible=True")
            self._exchange = Exchange(Route((hop,)), Codec(torch.float32), groups, self._add_rows, self._rows, _STRETCH)

    def __call__(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Begin the sum of a bucket."""
        buffer, parameters, exchange = bucket.buffer(), bucket.parameters(), self._exchange
        if exchange is None:
            total = self._of_rank(buffer, parameters)[0].add_(0.0)
            future: Future[Any] = dist.all_reduce(total, group=self._group, async_op=True).get_future()
            return future.then(lambda _: total)

        def run() -> Tensor:
            rows = self._of_rank(buffer, parameters)
            exchange.sum_(rows)
            return rows[0]

        return self._own.submit(run)

    @torch.no_grad()
    def _of_rank(self, buffer: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Return the sums that this rank's replicas add up to, one in each row, in the type of sums."""
        wide = buffer.to(SUM_DTYPES[buffer.dtype])
        lengths = [as_real(parameter).numel() for parameter in parameters]
        nodes = self._sums.nodes(parameters, wide.split(lengths))
        rows = wide[None] if self._rows == 1 else wide.new_zeros(self._rows, len(wide))
        for row, (_, gradients) in zip(rows, nodes, strict=False):  # some ranks have fewer sums than others
            for part, gradient in zip(row.split(lengths), gradients, strict=True):
                if gradient is not None and gradient.data_ptr() != part.data_ptr():
                    part.copy_(gradient)
        return rows

    def _add_rows(self, others: Tensor, own: Tensor) -> Tensor:
        """Add up the rows of all ranks, each of which holds its sums one after another."""
        fold: Fold[Tensor] = Fold(self._replicas, Tensor.add_)
        rank = self._world.rank
        for spans, row in zip(self._spans, (*others[:rank], *own, *others[rank:]), strict=True):
            for span, part in zip(spans, row.view(self._rows, -1), strict=False):
                fold.push(span, part)
        ((_, total),) = fold.nodes
        return total.add_(0.0)[None]
