"""The two collectives that buckets travel by."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gradavg.wire.route import Hop

__all__ = ["GlooTransport", "NcclTransport", "Transport", "Work", "gloo_transports"]


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Wait for its result, and raise what went wrong."""
        ...


class Transport(Protocol):
    """Collectives on a group of ranks. What is returned is complete once the work, if any, was waited for."""

    def scatter(self, payload: Tensor) -> tuple[Tensor, Work | None]:
        """Send the rows of a matrix to the other ranks of the group, in their order, and return theirs."""
        ...

    def gather(self, payload: Tensor) -> tuple[Tensor, Work | None]:
        """Return the numbers of the contiguous tensors of all ranks, in one dimension and in the order of the group."""
        ...


class GlooTransport:
    """A gloo process group of its own, which no other thread may use."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._rows = _to_others(backend.size(), backend.rank())

    def scatter(self, payload: Tensor) -> tuple[Tensor, Work | None]:
        """As in `Transport`."""
        received = torch.empty_like(payload)
        return received, self._backend.alltoall_base(received, payload, self._rows, self._rows)

    def gather(self, payload: Tensor) -> tuple[Tensor, Work | None]:
        """As in `Transport`."""
        received = payload.new_empty(self._backend.size() * payload.numel())
        return received, self._backend._allgather_base(received, payload.flatten())


class NcclTransport:
    """The process group of DDP, on the current stream: nothing is waited for on the host."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rows = _to_others(dist.get_world_size(group), dist.get_rank(group))

    def scatter(self, payload: Tensor) -> tuple[Tensor, Work | None]:
        """As in `Transport`."""
        received = torch.empty_like(payload)
        dist.all_to_all_single(received, payload, self._rows, self._rows, group=self._group)
        return received, None

    def gather(self, payload: Tensor) -> tuple[Tensor, Work | None]:
        """As in `Transport`."""
        received = payload.new_empty(dist.get_world_size(self._group) * payload.numel())
        # Renamed in torch 2.13, which warns of the old name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(received, payload.flatten(), group=self._group)
        return received, None


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
