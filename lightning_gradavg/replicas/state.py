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

from lightning_gradavg.replicas.batch_norm import not_counted
from lightning_gradavg.replicas.buffers import ReplicaBuffers
from lightning_gradavg.replicas.random_streams import ReplicaStreams

__all__ = ["ReplicaRuns"]

Step = Callable[[Any], Any]
"""Runs the user's training step on a part of the batch."""


class ReplicaRuns:
    """Runs this rank's replicas of a module.

    Args:
        module: The module.
        streams: The random numbers of every replica.
        group: The process group whose ranks share the replicas.
        quiet: What a replica is computed again in; it must not leave traces, as of logging.
        recompute: Whether replicas are computed again in the backward, one at a time, instead of being kept.
        several: Whether a rank may have several replicas.
        keeps_assigned: As in `ReplicaBuffers`.
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
        several: bool = False,
        keeps_assigned: bool = False,
        ignored: Container[str] = (),
    ) -> None:
        self._buffers = ReplicaBuffers(module, group, keeps_assigned=keeps_assigned, ignored=ignored)
        self._parameters = list(module.named_parameters())
        self._streams = streams
        self._quiet = quiet
        self._recompute = recompute
        self._several = several

    def run(self, step: Step, parts: Sequence[tuple[int, Any]], batch_index: int, *, check: bool = False) -> list[Any]:
        """Return the outputs of this rank's replicas, with the module's buffers those of replica 0.

        A collective operation.

        Args:
            step: The training step.
            parts: The index of each replica, and its part of the batch.
            batch_index: How many loader batches came before, which the random numbers depend on.
            check: Whether all ranks must have written the same into their buffers, as batch norm over all ranks does.
        """
        outputs: list[Any] = []
        first: dict[str, Tensor] | None = None
        copies: dict[str, Tensor] | None = None
        before = self._buffers.copies() if self._recompute else {}
        versions = self._versions()
        try:
            for replica, part in parts:
                copies = self._buffers.copies()
                with self._as_replica(copies, batch_index, replica):
                    outputs.append(self._run(step, part, before, batch_index, replica))
                if replica == 0:
                    first = copies
        finally:
            # Of a step that fails on this rank only, the others know nothing yet.
            self._keep(first, copies, check=check)
        changed = [name for name, version in self._versions().items() if version != versions[name]]
        if changed:
            raise RuntimeError(
                f"training_step has written the parameters {', '.join(changed)}, but it runs once per replica, and of"
                " those a rank has several. Write parameters in on_train_batch_end."
            )
        return outputs

    def _versions(self) -> dict[str, int]:
        return {name: parameter._version for name, parameter in self._parameters} if self._several else {}

    def run_stand_in(self, step: Step, batch: Any, batch_index: int, replica: int, *, check: bool = False) -> Any:
        """Return the output of a step whose samples do not count, and which leaves no trace in the buffers.

        It takes part in the collectives of `run`.

        Args:
            step: The training step.
            batch: Samples of the batch.
            batch_index: As in `run`.
            replica: A number that no replica has.
            check: As in `run`.
        """
        try:
            with self._as_replica(self._buffers.copies(), batch_index, replica), not_counted():
                return step(batch)
        finally:
            self._keep(None, None, check=check)

    def run_after(self, step: Step, value: Any, batch_index: int, replica: int) -> Any:
        """Return `step(value)`, run on the module itself with random numbers that are the same on all ranks."""
        with self._streams.of(batch_index, replica):
            return step(value)

    def _keep(self, first: dict[str, Tensor] | None, written: dict[str, Tensor] | None, *, check: bool) -> None:
        if check:
            self._buffers.require_alike(written)
        self._buffers.keep(first)

    @contextmanager
    def _as_replica(self, copies: dict[str, Tensor], batch_index: int, replica: int) -> Iterator[None]:
        with self._buffers.replaced(copies), self._streams.of(batch_index, replica):
            yield

    def _run(self, step: Step, part: Any, before: dict[str, Tensor], batch_index: int, replica: int) -> Any:
        if not self._recompute:
            return step(part)

        def as_before() -> AbstractContextManager[None]:
            return self._again(self._buffers.copies(before), batch_index, replica)

        # The stream gives the same random numbers again, whatever generator they are drawn from.
        return checkpoint(
            step,
            part,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), _Reentrant(as_before)),
        )

    @contextmanager
    def _again(self, copies: dict[str, Tensor], batch_index: int, replica: int) -> Iterator[None]:
        with self._as_replica(copies, batch_index, replica), self._quiet():
            yield


class _Reentrant(AbstractContextManager[None]):
    """A context that can be entered again: a replica is computed again in every backward through it."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: object) -> bool | None:
        return self._entered.pop().__exit__(*error)  # type: ignore[arg-type]  # the three that it gets
