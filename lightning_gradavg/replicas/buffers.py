"""Buffers of replicas: each replica writes into its own copies, and the module keeps what replica 0 wrote."""

from __future__ import annotations

import warnings
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

    A replica gets tensors of its own, so no graph ever holds a buffer that is written to later. What counts is what
    replica 0 writes into its buffers.

    Args:
        module: The module.
        group: The process group whose ranks share the replicas. Rank 0 has replica 0.
        keeps_assigned: Whether a tensor that is assigned in place of a buffer is kept, too, as on one device;
            `nn.DataParallel` drops it.
        ignored: Names of buffers that are not to be broadcast.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        *,
        keeps_assigned: bool = False,
        ignored: Container[str] = (),
    ) -> None:
        self._modules = [(path, owner, len(owner._buffers)) for path, owner in module.named_modules()]
        self._owners = [
            (owner, name, f"{path}.{name}" if path else name) for path, owner, _ in self._modules for name in owner._buffers
        ]
        self._group = group
        self._keeps_assigned = keeps_assigned
        self._ignored = ignored
        self._warned = False

    def originals(self) -> dict[str, Tensor]:
        """Return the module's buffers by name. A tensor that is registered twice is there twice."""
        return {label: buffer for owner, name, label in self._owners if (buffer := owner._buffers.get(name)) is not None}

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
        """Have the module use `copies` within the context, which at its end holds what the replica has written.

        Raises:
            RuntimeError: If a buffer has come to be that was not there before.
        """
        originals = [(owner, name, label, owner._buffers.get(name)) for owner, name, label in self._owners]
        for owner, name, label, original in originals:
            if original is not None:
                owner._buffers[name] = copies[label]
        written: dict[str, Tensor | None] = {}
        try:
            yield
            written = {label: owner._buffers.get(name) for owner, name, label, _ in originals}
            self._refuse_new(
                [label for _, _, label, original in originals if (original is None) != (written[label] is None)]
            )
        finally:
            for owner, name, _, original in originals:
                owner._buffers[name] = original
        for label, copy in list(copies.items()):
            buffer = written[label]
            if buffer is not copy and buffer is not None:
                self._take_assigned(copies, label, buffer)

    def _refuse_new(self, changed: list[str]) -> None:
        for path, owner, count in self._modules:
            if len(owner._buffers) != count:
                changed.append(f"those of {path or 'the module'}: {', '.join(owner._buffers)}")
        if changed:
            raise RuntimeError(
                f"the training step has made or removed buffers ({'; '.join(changed)}), which replicas cannot share."
                " Register them in __init__, with a tensor."
            )

    def _take_assigned(self, copies: dict[str, Tensor], label: str, buffer: Tensor) -> None:
        if self._keeps_assigned:
            if (buffer.shape, buffer.dtype) != (copies[label].shape, copies[label].dtype):
                raise RuntimeError(
                    f"the training step has assigned a tensor of shape {tuple(buffer.shape)} and {buffer.dtype} to the"
                    f" buffer {label} of shape {tuple(copies[label].shape)} and {copies[label].dtype}: keep them alike."
                )
            copies[label] = buffer.detach()
        elif not self._warned and dist.get_rank(self._group) == 0:
            self._warned = True
            warnings.warn(
                f"the training step assigns a new tensor to the buffer {label}: as with nn.DataParallel it is dropped."
                " Write into the buffer (buffer.copy_(...)) to have replica 0's kept.",
                stacklevel=2,
            )

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
