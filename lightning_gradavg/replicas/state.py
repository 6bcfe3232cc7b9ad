"""What a replica owns: its own copies of the buffers, and its own random numbers.

All replicas of a rank are run one after another within one forward of the wrapper, as `nn.DataParallel` runs them on
its devices. What one computes depends neither on the rank that it is on nor on the replicas before it: each starts from
the module's buffers and draws from a stream of its own. What replica 0 writes into its buffers, the module keeps.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_gradavg.batches.part import ReplicaSlice
from lightning_gradavg.lightning_internals import broadcast_from_first, versions_of
from lightning_gradavg.ranks import World
from lightning_gradavg.replicas.batch_norm import not_counted
from lightning_gradavg.replicas.log import ReplicaLog, metrics_kept, without_traces
from lightning_gradavg.replicas.random_streams import ReplicaStreams
from lightning_gradavg.tree import bits

__all__ = ["ReplicaState"]

Step = Callable[[ReplicaSlice], Any]
"""Runs the user's training step on a part of the batch."""

Buffers = dict[str, Tensor]
"""Buffers by name."""


class ReplicaState:
    """Runs a module as this rank's replicas.

    Args:
        module: The module.
        streams: The random numbers of every replica.
        log: Is told how many samples has what the step logs now.
        world: The ranks that share the replicas. Rank 0 has replica 0.
        recompute: Whether replicas are computed again in the backward, one at a time, instead of being kept.
        several: Whether a rank may run the step more than once.
        keeps_assigned: Whether a tensor that is assigned in place of a buffer is kept, too, as on one device;
            `nn.DataParallel` drops it.
        ignored: Names of buffers that ranks keep for themselves.
    """

    def __init__(
        self,
        module: LightningModule,
        streams: ReplicaStreams,
        log: ReplicaLog,
        world: World,
        *,
        recompute: bool,
        several: bool,
        keeps_assigned: bool,
        ignored: Container[str],
    ) -> None:
        self._module, self._streams, self._log, self._world = module, streams, log, world
        self._compute = self._recomputed if recompute else self._once
        self._keeps_assigned, self._ignored = keeps_assigned, ignored
        self._owners = dict(module.named_modules())
        self._parameters = dict(module.named_parameters() if several else ())
        self._warned = False

    def run(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        slices: Sequence[ReplicaSlice],
        batch_index: int,
        *,
        check: bool,
    ) -> list[Any]:
        """Return the outputs of this rank's replicas, with the module's buffers those of replica 0 on all ranks.

        A collective operation. A stand-in, of no replica, leaves no trace.

        Args:
            step: The training step.
            args: What it gets after the batch.
            slices: The replicas, each with its part of the batch.
            batch_index: How many loader batches came before, which the random numbers depend on.
            check: Whether all ranks must have written the same into their buffers, as batch norm over all ranks does.

        Raises:
            RuntimeError: If the step wrote parameters, or made or removed buffers.
            ValueError: On all ranks, if they wrote different numbers where `check` is true.
        """
        outputs: list[Any] = []
        written: dict[int | None, Buffers] = {}
        versions = versions_of(self._parameters.values())

        def run_step(each: ReplicaSlice) -> Any:
            self._log.samples = each.samples
            return step(each.batch, *args)

        try:
            for each in slices:
                copies = self._copies(self._buffers())
                outputs.append(self._run(run_step, each, copies, batch_index))
                written[each.replica] = copies
        finally:
            # Of a step that fails on this rank only, the others know nothing yet.
            if check:
                self._require_alike(written)
            self._keep(written.get(0, {}))
        three = zip(self._parameters, versions, versions_of(self._parameters.values()), strict=True)
        changed = [name for name, before, after in three if before != after]
        if changed:
            raise RuntimeError(
                f"training_step has written the parameters {', '.join(changed)}, but it runs once per replica, and of"
                " those a rank has several. Write parameters in on_train_batch_end."
            )
        return outputs

    def _run(self, step: Step, each: ReplicaSlice, copies: Buffers, batch_index: int) -> Any:
        if each.replica is None:
            nobody = -1 - self._world.rank  # a number that no replica has
            with self._as_replica(copies, batch_index, nobody), not_counted(), metrics_kept(self._module):
                return step(each)
        return self._compute(step, each, copies, batch_index, each.replica)

    def _once(self, step: Step, each: ReplicaSlice, copies: Buffers, batch_index: int, replica: int) -> Any:
        with self._as_replica(copies, batch_index, replica):
            return step(each)

    def _recomputed(self, step: Step, each: ReplicaSlice, copies: Buffers, batch_index: int, replica: int) -> Any:
        """Run a step, and again in the backward, from the same buffers."""
        before, again = self._copies(copies), False

        def run(each: ReplicaSlice) -> Any:
            nonlocal again
            if not again:
                again = True
                return self._once(step, each, copies, batch_index, replica)
            with without_traces(self._module):
                return self._once(step, each, self._copies(before), batch_index, replica)

        # The stream gives the same random numbers again, whatever generator they are drawn from.
        return checkpoint(run, each, use_reentrant=False, preserve_rng_state=False)

    @contextmanager
    def _as_replica(self, copies: Buffers, batch_index: int, replica: int) -> Iterator[None]:
        """Have the module use `copies` within the context, which at its end hold what the replica has written."""
        originals = self._buffers()
        self._put(copies)
        try:
            with self._streams.of(batch_index, replica):
                yield
            written = self._buffers()
        finally:
            self._put(originals)
        changed = sorted(written.keys() ^ originals.keys())
        if changed:
            raise RuntimeError(
                f"the training step has made or removed buffers ({', '.join(changed)}), which replicas cannot share."
                " Register them in __init__, with a tensor."
            )
        for label, buffer in written.items():
            if buffer is not copies[label]:
                self._take_assigned(copies, label, buffer)

    def _take_assigned(self, copies: Buffers, label: str, buffer: Tensor) -> None:
        copy = copies[label]
        if self._keeps_assigned:
            if (buffer.shape, buffer.dtype) != (copy.shape, copy.dtype):
                raise RuntimeError(
                    f"the training step has assigned a tensor of shape {tuple(buffer.shape)} and {buffer.dtype} to the"
                    f" buffer {label} of shape {tuple(copy.shape)} and {copy.dtype}: keep them alike."
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
        """Return the module's buffers by name. A tensor that is registered twice is there twice."""
        return {
            label: buffer
            for path, owner in self._owners.items()
            for label, buffer in owner.named_buffers(path, recurse=False, remove_duplicate=False)
        }

    def _copies(self, buffers: Buffers) -> Buffers:
        """Return copies of buffers, so that no graph ever holds a buffer that is written to later."""
        copied = {id(buffer): buffer.detach().clone() for buffer in buffers.values()}
        return {label: copied[id(buffer)] for label, buffer in buffers.items()}

    def _put(self, buffers: Buffers) -> None:
        for label, buffer in buffers.items():
            path, _, name = label.rpartition(".")
            setattr(self._owners[path], name, buffer)

    def _keep(self, first: Buffers) -> None:
        """Write replica 0's buffers, which rank 0 has, into those of the module, on every rank."""
        originals = self._buffers()
        with torch.no_grad():
            for label, buffer in first.items():
                originals[label].copy_(buffer)
            shared = {id(buffer): buffer for label, buffer in originals.items() if label not in self._ignored}
            if self._world.size > 1:
                broadcast_from_first(list(shared.values()), self._world.group)

    def _require_alike(self, written: Mapping[int | None, Buffers]) -> None:
        """Raise, on all ranks, if ranks have written different numbers; a stand-in's do not count."""
        counted = [buffers for replica, buffers in written.items() if replica is not None]
        mine = [
            (label, blake2b(bits(buffer), digest_size=8).digest())
            for buffers in counted
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
