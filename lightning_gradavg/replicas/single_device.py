"""The run of a single device: one replica, of which every rank computes a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_gradavg.batches.chunks import Chunk
from lightning_gradavg.lightning_internals import leave_batch_norm_alone
from lightning_gradavg.options import Options
from lightning_gradavg.part import Run
from lightning_gradavg.replicas.batch_norm import restore_batch_norm, synchronize_batch_norm
from lightning_gradavg.replicas.outputs import require_rows
from lightning_gradavg.replicas.part import ManyReplicas, logged_whole
from lightning_gradavg.replicas.pieces import Pieces, Replicas

__all__ = ["SingleDevice", "replicas_of"]


class SingleDevice(ManyReplicas):
    """Batch norm normalizes over the samples of all ranks, and what ranks write must be what one device would."""

    def setup(self, run: Run) -> None:
        """Leave batch norm to this part, which serves CPUs and ranks without samples, too."""
        leave_batch_norm_alone(run.trainer.strategy)
        super().setup(run)

    def configure_ddp(self, run: Run) -> None:
        """Prepare a run."""
        self._checked_uneven = False
        super().configure_ddp(run)

    def _is_to_check(self, chunk: Chunk, batch_index: int) -> bool:
        """Return whether ranks compare their buffers now: ever more rarely, and once after an uneven batch."""
        uneven = chunk.batch_samples % self.run.world.size != 0 and not self._checked_uneven
        self._checked_uneven |= uneven
        return uneven or (batch_index + 1) & batch_index == 0  # in steps 1, 2, 4, 8, ...

    def _gathered(self, output: Any, **options: Any) -> Any:
        if self.run.world.size == 1:
            return output
        require_rows(output)
        return super()._gathered(output, **options)

    def on_evaluation_start(self) -> None:
        """Have batch norm normalize each batch by itself: in evaluation ranks have different ones."""
        restore_batch_norm(self.run.module)
        super().on_evaluation_start()

    def _evaluate(self, step: Callable[..., Any], step_end: Callable[[Any], Any], batch: Any, *args: Any) -> Any:
        return logged_whole(self.run.module, lambda: step_end(step(batch, *args)))

    def on_evaluation_end(self) -> None:
        """Put the steps back, and have batch norm normalize over all ranks."""
        super().on_evaluation_end()
        if self.run.model is not None and self.run.world.size > 1:
            synchronize_batch_norm(self.run.module, self.run.world.group)

    def describe(self) -> str:
        """Return the run that is reproduced."""
        return f"; equivalent to single_device{self._describe_gathering()}"

    def teardown(self) -> None:
        """Put the module's steps and batch norms back."""
        super().teardown()
        restore_batch_norm(self.run.module)


def replicas_of(options: Options, *, static_graph: bool) -> Replicas:
    """Return the part that computes a rank's batch, by the user's options and whether DDP's graph is static."""
    in_parts = Pieces if options.max_device_batch_size is not None else Replicas
    kind = SingleDevice if options.one_device else ManyReplicas if options.replicated else in_parts
    return kind(options, static_graph=static_graph)
