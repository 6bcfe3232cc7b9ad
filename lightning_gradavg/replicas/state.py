"""What a replica owns: its own copies of the buffers, and its own random numbers.

What a replica computes depends neither on its rank nor on the replicas before it: each starts from the module's buffers
and draws from its own stream. What replica 0 writes into its buffers, the module keeps.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from itertools import chain

import torch
from torch import Tensor

from lightning_gradavg.batches.part import ReplicaSlice
from lightning_gradavg.lightning_internals import broadcast_from_first, version_of
from lightning_gradavg.options import Options
from lightning_gradavg.part import Run
from lightning_gradavg.replicas.batch_norm import count_rows
from lightning_gradavg.replicas.random_streams import ReplicaStreams
from lightning_gradavg.stand_in import metrics_kept
from lightning_gradavg.tree import bits

__all__ = ["ReplicaState"]

Buffers = dict[str, Tensor]
"""Buffers by name."""


class ReplicaState:
    """Runs a module as this rank's replicas.

    Args:
        run: The run. Rank 0 has replica 0.
        options: Say which run is reproduced. Of one device, ranks must write the same into their buffers.
        streams: The random numbers of every replica.
    """

    def __init__(self, run: Run, options: Options, streams: ReplicaStreams) -> None:
        self._module, self._world, self._streams = run.module, run.world, streams
        self._ignored = run.ddp.parameters_to_ignore
        # A tensor that is assigned in place of a buffer is kept, which nn.DataParallel drops.
        self._keeps_assigned = options.one_device or (options.num_replicas or run.world.size) == 1
        self._compares, self._compared_uneven = options.one_device, False
        self._owners = dict(run.module.named_modules())
        # A rank that runs the step more than once would write them as often.
        self._parameters = dict(run.module.named_parameters() if options.in_pieces(run.world.size) else ())
        self._warned = self._check = False
        self._originals: Buffers | None = None
        self._written: dict[int, Buffers] = {}

    def begin(self, index: int, *, uneven: bool) -> None:
        """Begin the step of a loader batch, which may be uneven: ranks have different numbers of its samples."""
        if self._originals is not None:  # of a step whose backward was never run
            self._put(self._originals)
        self._originals, self._written = self._buffers(), {}
        # Ever more rarely, in steps 1, 2, 4, 8, ..., and once after an uneven batch.
        first, self._compared_uneven = uneven and not self._compared_uneven, self._compared_uneven or uneven
        self._check = self._compares and (first or (index + 1) & index == 0)

    @contextmanager
    def piece(self, piece: ReplicaSlice, index: int) -> Iterator[None]:
        """Run a replica within the context: from the buffers at the beginning of the step, with its own random numbers.

        The copies stay in place: a backward after the context may run parts of the forward again. A piece of no
        samples, which only keeps the rank busy, leaves no trace.
        """
        assert self._originals is not None
        copied = {id(buffer): buffer.detach().clone() for buffer in self._originals.values()}
        copies = {label: copied[id(buffer)] for label, buffer in self._originals.items()}
        self._put(copies)
        versions = [version_of(parameter) for parameter in self._parameters.values()]
        count_rows(counted=piece.replica is not None)
        try:
            with ExitStack() as around:
                if piece.replica is None:
                    around.enter_context(self._streams.of(index, -1 - self._world.rank))
                    around.enter_context(metrics_kept(self._module))
                else:
                    around.enter_context(self._streams.of(index, piece.replica))
                yield
        except BaseException:
            self._put(self._originals)
            raise
        written, pairs = self._buffers(), zip(self._parameters.items(), versions, strict=True)
        _require_none(
            (name for (name, parameter), version in pairs if version_of(parameter) != version),
            "training_step has written the parameters {}, but it runs once per replica, and of those a rank has"
            " several. Write parameters in on_train_batch_end.",
        )
        _require_none(
            sorted(written.keys() ^ copies.keys()),
            "the training step has made or removed buffers ({}), which replicas cannot share. Register them in"
            " __init__, with a tensor.",
        )
        assigned = {label: buffer.detach() for label, buffer in written.items() if buffer is not copies[label]}
        if self._keeps_assigned:
            kinds = {label: [(one.shape, one.dtype) for one in (copies[label], new)] for label, new in assigned.items()}
            _require_none(
                (label for label, (kind, of_new) in kinds.items() if kind != of_new),
                "the training step has assigned tensors of another shape or dtype to the buffers {}: keep both.",
            )
            copies |= assigned
        elif assigned and not self._warned and self._world.rank == 0:
            self._warned = True
            warnings.warn(
                f"the training step assigns a new tensor to the buffer {', '.join(assigned)}: as with nn.DataParallel"
                " it is dropped. Write into the buffer (buffer.copy_(...)) to have replica 0's kept.",
                stacklevel=2,
            )
        if piece.replica is not None:
            self._written[piece.replica] = copies

    def end(self) -> None:
        """Have the module's buffers be replica 0's, on all ranks. A collective operation."""
        if self._originals is None:
            return
        originals, self._originals = self._originals, None
        count_rows(counted=True)
        self._put(originals)
        if self._check:
            self._require_equal()
        with torch.no_grad():
            for label, buffer in self._written.get(0, {}).items():
                originals[label].copy_(buffer)
            shared = {id(buffer): buffer for label, buffer in originals.items() if label not in self._ignored}
            if self._world.size > 1:
                broadcast_from_first(list(shared.values()), self._world.group)
        self._written = {}

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

    def _require_equal(self) -> None:
        """Raise, on all ranks, if ranks have written different numbers; a stand-in's do not count."""
        written = chain.from_iterable(buffers.items() for buffers in self._written.values())
        mine = [(label, blake2b(bits(buffer), digest_size=8).digest()) for label, buffer in written]
        found = Counter(label for label, _ in set(chain.from_iterable(self._world.gather_objects(mine))))
        different = [label for label in self._buffers() if found[label] > 1]
        if different:
            raise ValueError(
                f"the training step wrote different numbers into the buffers {', '.join(different)} on different ranks:"
                " they depend on the samples of a rank, and on one device they would depend on all. Compute them from"
                " the whole batch in training_step_end, or use equivalent_to='data_parallel', which keeps replica 0's."
            )


def _require_none(names: Iterable[str], message: str) -> None:
    """Raise a RuntimeError that lists the names, if there are any."""
    listed = ", ".join(names)
    if listed:
        raise RuntimeError(message.format(listed))
