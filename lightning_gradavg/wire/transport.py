"""How the parts of buckets get from rank to rank."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg.wire.route import Hop

__all__ = ["GlooTransport", "NcclTransport", "Transport", "Work", "gloo_transports"]


class Work(Protocol):
    """Messages under way."""

    def wait(self) -> Any:
        """Wait until all are sent and received, and raise what went wrong."""
        ...


class Transport(Protocol):
    """A group of ranks. What is received is complete once the work, if any, was waited for."""

    def scatter(self, payload: Tensor, received: Tensor) -> Work | None:
        """Send the rows of a matrix to the other ranks of the group, in their order, and receive theirs in another."""
        ...

    def gather(self, payload: Tensor) -> Work | None:
        """Fill a matrix of equally many rows for each rank of the group, of which this rank's own are there."""
        ...


class GlooTransport:
    """Messages in a gloo process group of its own, which no other thread may use.

    Of gloo's collectives, a process group runs two at a time, each in one thread more, and an all-to-all leaves a part
    of a full-duplex link idle: a tenth with messages of 1 MB, a quarter with 4 MB.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._numbers = count()
        rank, size = backend.rank(), backend.size()
        # Each rank begins with the one after it: they do not all send to the same one.
        self._others = [(rank + distance) % size for distance in range(1, size)]

    def scatter(self, payload: Tensor, received: Tensor) -> Work | None:
        """As in `Transport`."""
        row_of = {other: other - (other > self._backend.rank()) for other in self._others}
        return self._exchange([(other, payload[row], received[row]) for other, row in row_of.items()])

    def gather(self, payload: Tensor) -> Work | None:
        """As in `Transport`."""
        blocks = payload.unflatten(0, (self._backend.size(), -1))
        return self._exchange([(other, blocks[self._backend.rank()], blocks[other]) for other in self._others])

    def _exchange(self, messages: Sequence[tuple[int, Tensor, Tensor]]) -> Work:
        """Begin to send to, and to receive from, each of some ranks."""
        # A tag is an int32; before one is used again, its first message has long arrived.
        tag = next(self._numbers) % 2**30
        works = [self._backend.recv([received], other, tag) for other, _, received in messages]
        works += [self._backend.send([sent], other, tag) for other, sent, _ in messages]
        return _All(works)


class _All:
    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class NcclTransport:
    """The process group of DDP, on the current stream: nothing is waited for on the host."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rows = _to_others(dist.get_world_size(group), dist.get_rank(group))

    def scatter(self, payload: Tensor, received: Tensor) -> Work | None:
        """As in `Transport`."""
        dist.all_to_all_single(received, payload, self._rows, self._rows, group=self._group)
        return None

    def gather(self, payload: Tensor) -> Work | None:
        """As in `Transport`."""
        # Renamed in torch 2.13, which warns of the old name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        blocks = payload.view(dist.get_world_size(self._group), -1)
        gather(payload.view(-1), blocks[dist.get_rank(self._group)], group=self._group)
        return None


def _to_others(ranks: int, rank: int) -> list[int]:
    """Return how many rows each rank gets: what a rank keeps for itself is not copied."""
    return [int(other != rank) for other in range(ranks)]


def gloo_transports(hops: Sequence[Hop], group: dist.ProcessGroup | None) -> list[Transport]:
    """Return a transport for each hop, each with a process group of its own. Call it on all ranks of `group`.

    The process groups are not registered with `torch.distributed`, whose names for groups that only some ranks form
    depend on how many others a rank has.
    """
    tokens: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(tokens, uuid.uuid4().hex, group=group)
    ours = group if group is not None else dist.group.WORLD
    assert ours is not None
    timeout = ours._get_backend(torch.device("cpu")).options._timeout
    store = dist.distributed_c10d._get_default_store()
    return [
        GlooTransport(
            dist.ProcessGroupGloo(
                dist.PrefixStore(f"gradavg/{tokens[0]}/{number}/{hop.name}", store), hop.index, len(hop.ranks), timeout
            )
        )
        for number, hop in enumerate(hops)
    ]
