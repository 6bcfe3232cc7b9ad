"""Replicas: a training step run once per chunk of a batch, as `nn.DataParallel` runs it on its devices.

All replicas of a rank are run one after another within one forward of the wrapper. Each has its own copies of the
buffers and its own random numbers, so what a replica computes does not depend on the rank that it is on.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gradavg.batch_norm import not_counted
from lightning_gradavg.random_streams import ReplicaStreams
from lightning_gradavg.replica_buffers import ReplicaBuffers

__all__ = ["Replicas"]

Step = Callable[[Any], Any]
"""Runs the user's training step on a part of the batch."""


class Replicas:
    """Runs this rank's replicas of a module.

    Args:
        module: The module.
        streams: The random numbers of every replica.
        group: The process group whose ranks share the replicas.
        quiet: What a replica is computed again in; it must not leave traces, as of logging.
        recompute: Whether replicas are computed again in the backward, one at a time, instead of being kept.
        alike: Whether all ranks must write the same into their buffers, as batch norm over all ranks does. The first
            run is checked.
        ignored: Names of buffers that ranks keep for themselves.
    """

    def __init__(
        self,
        module: nn.Module,
        streams: ReplicaStreams,
        group: dist.ProcessGroup | None,
        *,
        quiet: Callable[[], AbstractContextManager[None]],
        recompute: bool = False,
        alike: bool = False,
        ignored: Container[str] = (),
    ) -> None:
        self._buffers = ReplicaBuffers(module, group, ignored)
        self._streams = streams
        self._quiet = quiet
        self._recompute = recompute
        self._unchecked = alike

    def run(self, step: Step, parts: Sequence[tuple[int, Any]], batch_index: int) -> list[Any]:
        """Return the outputs of this rank's replicas, with the module's buffers those of replica 0.

        A collective operation.

        Args:
            step: The training step.
            parts: The index of each replica, and its part of the batch.
            batch_index: How many loader batches came before, which the random numbers depend on.
        """
        outputs: list[Any] = []
        first: dict[str, Tensor] | None = None
        copies: dict[str, Tensor] | None = None
        before = self._buffers.copies() if self._recompute else {}
        for replica, part in parts:
            copies = self._buffers.copies()
            with self._as_replica(copies, batch_index, replica):
                outputs.append(self._run(step, part, before, batch_index, replica))
            if replica == 0:
                first = copies
        self._keep(first, copies)
        return outputs

    def run_stand_in(self, step: Step, batch: Any, batch_index: int, replica: int) -> Any:
        """Return the output of a step whose samples do not count, and which leaves no trace in the buffers.

        It takes part in the collectives of `run`.

        Args:
            step: The training step.
            batch: Samples of the batch.
            batch_index: As in `run`.
            replica: A number that no replica has.
        """
        with self._as_replica(self._buffers.copies(), batch_index, replica), not_counted():
            output = step(batch)
        self._keep(None, None)
        return output

    def run_after(self, step: Step, value: Any, batch_index: int, replica: int) -> Any:
        """Return `step(value)`, run on the module itself with random numbers that are the same on all ranks."""
        with self._streams.of(batch_index, replica):
            return step(value)

    def _keep(self, first: dict[str, Tensor] | None, written: dict[str, Tensor] | None) -> None:
        if self._unchecked:
            self._unchecked = False
            self._buffers.require_alike(written)
        self._buffers.keep(first)

    @contextmanager
    def _as_replica(self, copies: dict[str, Tensor], batch_index: int, replica: int) -> Iterator[None]:
        with self._buffers.replaced(copies), self._streams.of(batch_index, replica):
            yield

    def _run(self, step: Step, part: Any, before: dict[str, Tensor], batch_index: int, replica: int) -> Any:
        if not self._recompute:
            return step(part)

        @contextmanager
        def again() -> Iterator[None]:
            with self._as_replica(self._buffers.copies(before), batch_index, replica), self._quiet():
                yield

        # The stream gives the same random numbers again, whatever generator they are drawn from.
        return checkpoint(
            step,
            part,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), again()),
        )
