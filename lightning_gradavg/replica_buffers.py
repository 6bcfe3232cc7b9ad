"""Buffers of replicas: each replica writes into its own copies, and the module keeps what replica 0 wrote."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["ReplicaBuffers"]

_BROADCAST_BYTES = 250 * 2**20  # as DistributedDataParallel broadcasts its buffers


class ReplicaBuffers:
    """The buffers of a module that runs as several replicas, like those of `nn.DataParallel`.

    A replica gets tensors of its own, so no graph ever holds a buffer that is written to later. As with DataParallel,
    what counts is what replica 0 writes *into* its buffers; a tensor that it assigns in their place is dropped.

    Args:
        module: The module.
        group: The process group whose ranks share the replicas. Rank 0 has replica 0.
        ignored: Names of buffers that are not to be broadcast.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None, ignored: Container[str] = ()) -> None:
        self._owners = [
            (owner, name, f"{path}.{name}" if path else name)
            for path, owner in module.named_modules()
            for name in owner._buffers
        ]
        self._group = group
        self._ignored = ignored

    def originals(self) -> dict[str, Tensor]:
        """Return the module's buffers by name. A tensor that is registered twice is there twice."""
        return {
            label: buffer for owner, name, label in self._owners if (buffer := owner._buffers.get(name)) is not None
        }

    def copies(self, of: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return copies of buffers by name, as a replica starts from: those of the module, or `of`."""
        copied: dict[int, Tensor] = {}
        originals = self.originals() if of is None else of
        for buffer in originals.values():
            if id(buffer) not in copied:
                copied[id(buffer)] = buffer.detach().clone()
        return {label: copied[id(buffer)] for label, buffer in originals.items()}

    @contextmanager
    def replaced(self, copies: dict[str, Tensor]) -> Iterator[None]:
        """Have the module use `copies` within the context."""
        places = [(owner, name, label) for owner, name, label in self._owners if label in copies]
        originals = [owner._buffers[name] for owner, name, _ in places]
        for owner, name, label in places:
            owner._buffers[name] = copies[label]
        try:
            yield
        finally:
            for (owner, name, _), original in zip(places, originals, strict=True):
                owner._buffers[name] = original

    def keep(self, first: dict[str, Tensor] | None) -> None:
        """Write the buffers of replica 0 into those of the module, on every rank. A collective operation.

        Args:
            first: The copies that replica 0 used, on rank 0; None elsewhere.
        """
        originals = self.originals()
        with torch.no_grad():
            if first is not None:
                for label, buffer in originals.items():
                    buffer.copy_(first[label])
            if dist.is_initialized() and dist.get_world_size(self._group) > 1:
                shared = {id(buffer): buffer for label, buffer in originals.items() if label not in self._ignored}
                self._broadcast(list(shared.values()))

    def require_alike(self, written: Mapping[str, Tensor] | None) -> None:
        """Raise, on all ranks, if ranks have written different numbers. A collective operation.

        Args:
            written: This rank's copies, or None where its samples do not count.

        Raises:
            ValueError: If a buffer differs between ranks.
        """
        mine = {label: _digest(buffer) for label, buffer in written.items()} if written is not None else None
        every: list[Any] = [mine]
        if dist.is_initialized() and dist.get_world_size(self._group) > 1:
            every = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(every, mine, group=self._group)
        counted = [digests for digests in every if digests is not None]
        different = [label for label in counted[0] if any(digests[label] != counted[0][label] for digests in counted)]
        if different:
            raise ValueError(
                f"the training step wrote different numbers into the buffers {', '.join(different)} on different ranks:"
                " they depend on the samples of a rank, and on one device they would depend on all. Compute them from"
                " the whole batch in training_step_end, or use equivalent_to='data_parallel', which keeps replica 0's."
            )

    def _broadcast(self, buffers: Sequence[Tensor]) -> None:
        if buffers:
            group: Any = self._group if self._group is not None else dist.group.WORLD
            dist._broadcast_coalesced(group, list(buffers), _BROADCAST_BYTES, 0)


def _digest(buffer: Tensor) -> bytes:
    contiguous = buffer.detach().cpu().contiguous()
    return blake2b(contiguous.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=8).digest()
