"""What a replica owns: its own copies of the buffers, and its own random numbers.

What a replica computes depends neither on its rank nor on the replicas before it: each starts from the module's buffers
and draws from its own stream. What replica 0 writes into its buffers, the module keeps.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from itertools import chain

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_gradavg.batches.part import ReplicaSlice
from lightning_gradavg.lightning_internals import broadcast_from_first, versions_of
from lightning_gradavg.ranks import World
from lightning_gradavg.replicas.batch_norm import not_counted
from lightning_gradavg.replicas.random_streams import ReplicaStreams
from lightning_gradavg.stand_in import metrics_kept
from lightning_gradavg.tree import bits

__all__ = ["ReplicaState"]

Buffers = dict[str, Tensor]
"""Buffers by name."""


class ReplicaState:
    """Runs a module as this rank's replicas.

    Args:
        module: The module.
        streams: The random numbers of every replica.
        world: The ranks that share the replicas. Rank 0 has replica 0.
        several: Whether a rank may run the step more than once.
        keeps_assigned: Whether a tensor that is assigned in place of a buffer is kept, which `nn.DataParallel` drops.
        ignored: Names of buffers that ranks keep for themselves.
    """

    def __init__(
        self,
        module: LightningModule,
        streams: ReplicaStreams,
        world: World,
        *,
        several: bool,
        keeps_assigned: bool,
        ignored: Container[str],
    ) -> None:
        self._module, self._streams, self._world = module, streams, world
        self._keeps_assigned, self._ignored = keeps_assigned, ignored
        self._owners = dict(module.named_modules())
        self._parameters = dict(module.named_parameters() if several else ())
        self._warned = self._check = False
        self._originals: Buffers | None = None

    def begin(self, *, check: bool) -> None:
        """Begin a step; with `check`, all ranks must write the same into their buffers."""
        if self._originals is not None:  # of a step whose backward was never run
            self._put(self._originals)
        self._originals, self._check = self._buffers(), check
        self._written: dict[int | None, Buffers] = {}

    @contextmanager
    def piece(self, piece: ReplicaSlice, batch_index: int) -> Iterator[None]:
        """Run a replica within the context: from the buffers at the beginning of the step, with its own random numbers.

        The copies stay in place: a backward after the context may run parts of the forward again. A piece of no
        samples, which only keeps the rank busy, leaves no trace.
        """
        assert self._originals is not None
        copied = {id(buffer): buffer.detach().clone() for buffer in self._originals.values()}
        copies = {label: copied[id(buffer)] for label, buffer in self._originals.items()}
        self._put(copies)
        versions = versions_of(self._parameters.values())
        try:
            stream = -1 - self._world.rank if piece.replica is None else piece.replica
            with ExitStack() as around:
                around.enter_context(self._streams.of(batch_index, stream))
                if piece.replica is None:
                    around.enter_context(not_counted())
                    around.enter_context(metrics_kept(self._module))
                yield
        except BaseException:
            self._put(self._originals)
            raise
        after = versions_of(self._parameters.values())
        changed = [name for name, old, new in zip(self._parameters, versions, after, strict=True) if old != new]
        if changed:
            raise RuntimeError(
                f"training_step has written the parameters {', '.join(changed)}, but it runs once per replica, and of"
                " those a rank has several. Write parameters in on_train_batch_end."
            )
        written = self._buffers()
        changed = sorted(written.keys() ^ copies.keys())
        if changed:
            raise RuntimeError(
                f"the training step has made or removed buffers ({', '.join(changed)}), which replicas cannot share."
                " Register them in __init__, with a tensor."
            )
        for label, buffer in written.items():
            if buffer is not copies[label]:
                self._take_assigned(copies, label, buffer)
        self._written[piece.replica] = copies

    def end(self) -> None:
        """Have the module's buffers be replica 0's, on all ranks. A collective operation."""
        if self._originals is None:
            return
        originals, self._originals = self._originals, None
        self._put(originals)
        if self._check:
            self._require_equal(self._written)
        with torch.no_grad():
            for label, buffer in self._written.get(0, {}).items():
                originals[label].copy_(buffer)
            shared = {id(buffer): buffer for label, buffer in originals.items() if label not in self._ignored}
            if self._world.size > 1:
                broadcast_from_first(list(shared.values()), self._world.group)
        self._written = {}

    def _take_assigned(self, copies: Buffers, label: str, buffer: Tensor) -> None:
        copy = copies[label]
        if self._keeps_assigned:
            if (buffer.shape, buffer.dtype) != (copy.shape, copy.dtype):
                raise RuntimeError(
                    f"the training step has assigned a tensor of shape {tuple(buffer.shape)} and {buffer.dtype} to the"
                    f" buffer {label} of shape {tuple(copy.shape)} and {copy.dtype}: keep shape and dtype."
                )
            copies[label] = buffer.detach()
        elif not self._warned and self._world.rank == 0:
            self._warned = True
            warnings.warn(
                f"the training step assigns a new tensor to the buffer {label}: as with nn.DataParallel it is dropped."
                " Write into the buffer (buffer.copy_(...)) to have replica 0's kept.",
                stacklevel=2,
            )

    def _buffers(self) -> Buffers:
        """Return the module's buffers by name; one that is registered twice is there twice."""
        return {
            f"{path}.{name}" if path else name: buffer
            for path, owner in self._owners.items()
            for name, buffer in owner._buffers.items()  # twice a step; `named_buffers` takes ten times as long
            if buffer is not None
        }

    def _put(self, buffers: Buffers) -> None:
        for label, buffer in buffers.items():
            path, _, name = label.rpartition(".")
            setattr(self._owners[path], name, buffer)

    def _require_equal(self, written: Mapping[int | None, Buffers]) -> None:
        """Raise, on all ranks, if ranks have written different numbers; a stand-in's do not count."""
        mine = [
            (label, blake2b(bits(buffer), digest_size=8).digest())
            for replica, buffers in written.items()
            if replica is not None
            for label, buffer in buffers.items()
        ]
        found = Counter(label for label, _ in set(chain.from_iterable(self._world.gather_objects(mine))))
        different = [label for label in self._buffers() if found[label] > 1]
        if different:
            raise ValueError(
                f"the training step wrote different numbers into the buffers {', '.join(different)} on different ranks:"
                " they depend on the samples of a rank, and on one device they would depend on all. Compute them from"
                " the whole batch in training_step_end, or use equivalent_to='data_parallel', which keeps replica 0's."
            )
