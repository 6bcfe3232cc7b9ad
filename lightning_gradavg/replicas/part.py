"""Training steps run once per replica, the loss of all ranks' outputs, and evaluation as in the reproduced run.

What a replica computes depends neither on its rank nor on the replicas before it: each starts from the module's buffers
and draws from its own stream. What replica 0 writes into its buffers, the module keeps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from lightning_gradavg.batches.chunks import Chunk
from lightning_gradavg.batches.part import ReplicaSlice
from lightning_gradavg.lightning_internals import broadcast_from_first, buffers_of, leave_batch_norm_alone, version_of
from lightning_gradavg.methods import logged_as, replaced
from lightning_gradavg.options import Options
from lightning_gradavg.part import Run, Saved
from lightning_gradavg.random_state import random_state, restore_random_state, seeded
from lightning_gradavg.reduction.weights import sparse_weights
from lightning_gradavg.replicas.batch_norm import count_rows, synchronized_batch_norm
from lightning_gradavg.replicas.joined import gather_outputs, of_whole_run
from lightning_gradavg.replicas.obstacles import has_step_end
from lightning_gradavg.replicas.pieces import Pieces, Step
from lightning_gradavg.stand_in import metrics_kept, uncounted

__all__ = ["Replicas", "replica_stream"]


@contextmanager
def replica_stream(seed: int, step: int, replica: int, device: torch.device) -> Iterator[None]:
    """Draw inside from the stream of a replica and a step, and put all generators back, also after an exception.

    Those are torch's on the CPU and the device, Python's and NumPy's. Nothing waits for the device. What
    `torch.utils.checkpoint` recomputes later draws the same from torch, whose states it keeps; for Python and NumPy,
    enter it within the function that is recomputed.
    """
    # A hash, because a sum such as seed + step + replica repeats.
    digest = blake2b(f"{seed},{step},{replica}".encode(), digest_size=32).digest()
    accelerator: Any = None if device.type == "cpu" else getattr(torch, device.type)
    on_host, on_device = random_state(), accelerator and accelerator.get_rng_state()
    restore_random_state(seeded(digest[:8] + digest[16:]))
    if accelerator:
        accelerator.manual_seed(int.from_bytes(digest[8:16], "little"))
    try:
        yield
    finally:
        restore_random_state(on_host)
        if accelerator:
            accelerator.set_rng_state(on_device)


class Replicas(Pieces):
    """Runs the replicas of a loader batch, each a piece, so that the number of ranks no longer matters.

    Of one device, a rank's samples are its replica: batch norm normalizes over those of all ranks, and what ranks write
    must be what one device would.
    """

    def __init__(self, options: Options, *, static_graph: bool = False) -> None:
        super().__init__(options, static_graph=static_graph)
        self._saved_seed: int | None = None
        self._seed, self._gathers = 0, False
        self._replaced = ExitStack()  # of the module and torch, in training or in evaluation

    def setup(self, run: Run) -> None:
        """Leave batch norm to this part, which serves CPUs and ranks without samples, too."""
        if self._options.one_device:
            leave_batch_norm_alone(run.trainer.strategy)
        super().setup(run)

    def configure_ddp(self, run: Run) -> None:
        """Prepare the replicas of a run. A collective operation."""
        super().configure_ddp(run)
        # At the end of the step they are the same on all ranks.
        run.ddp.broadcast_buffers = False
        self._gathers = self._options.preset is not None and has_step_end(run.module)
        saved, self._saved_seed = self._saved_seed, None
        # Rank 0's, as unseeded ranks differ.
        own = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))
        self._seed = int(run.world.from_first(own if saved is None else saved))
        # A rank that runs the step more than once would write them as often.
        self._parameters = dict(run.module.named_parameters()) if self._in_pieces else {}
        self._sparse = list(sparse_weights(run.module).values())
        self._registered = [buffers_of(module) for module in run.module.modules()]
        self.on_evaluation_end()

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save what all random numbers of training steps follow from."""
        saved["replica_seed"] = self._seed

    def load(self, saved: Saved) -> None:
        """Remember it for the next run."""
        self._saved_seed = saved.get("replica_seed")

    def weight(self, chunk: Chunk | None) -> float | None:
        """Return the samples of the loss of a step: with `training_step_end`, those of all ranks."""
        return chunk.batch_samples if self._gathers and chunk is not None else super().weight(chunk)

    def run_step(self, step: Step, batch: Any, *args: Any) -> Any:
        """Return the output of a training step of all of this rank's replicas."""
        self._ran, self._kept, self._buffers = False, list[Tensor](), self._buffers_now()
        self._before = [buffer.clone() for buffer in self._buffers]
        versions = [version_of(parameter) for parameter in self._parameters.values()]
        try:
            output = super().run_step(step, batch, *args)
        except BaseException:
            self._write(self._before)
            raise
        self._require_shared(versions)
        if not self.run.module.automatic_optimization:
            self.end_step()
        return output

    def _buffers_now(self) -> list[Tensor]:
        # Twice a step; `named_buffers` takes ten times as long.
        return [buffer for owned in self._registered for buffer in owned.values() if buffer is not None]

    def _write(self, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=False):  # there may be none
            buffer.data.copy_(value)

    def _require_shared(self, versions: Sequence[int]) -> None:
        """Raise a RuntimeError if a step has written what a rank would write once for each of its replicas."""
        now = zip(self._parameters.items(), versions, strict=True)
        written = [name for (name, parameter), version in now if version_of(parameter) != version]
        if written:
            raise RuntimeError(
                f"training_step has written the parameters {', '.join(written)}, but it runs once per replica, and of"
                " those a rank has several. Write parameters in on_train_batch_end."
            )
        own = set(map(id, self._buffers))
        if own != set(map(id, self._buffers_now())):
            new = [name for name, buffer in self.run.module.named_buffers() if id(buffer) not in own]
            raise RuntimeError(
                f"training_step has assigned or made the buffers {', '.join(new)}, or removed one: replicas share what"
                " is written into buffers. Register them in __init__, with a tensor, and write by buffer.copy_(...)."
            )

    def _stream(self, replica: int) -> AbstractContextManager[None]:
        """Draw what belongs to a replica of the loader batch, of which there were so many before."""
        index = self.run.trainer.fit_loop.epoch_loop.total_batch_idx
        return replica_stream(self._seed, index, replica, self.run.device)

    @contextmanager
    def _piece(self, piece: ReplicaSlice) -> Iterator[None]:
        """Run a replica within the context: from the buffers at the beginning of the step, with its own random numbers.

        A backward after the context may run parts of the forward again. A piece of no samples, which only keeps the
        rank busy, leaves no trace.
        """
        if self._ran:
            self._kept = self._kept or [buffer.clone() for buffer in self._buffers]
            self._write(self._before)
        self._ran, counted = True, piece.replica is not None
        count_rows(counted=counted)
        stream = self._stream(-1 - self.run.world.rank if piece.replica is None else piece.replica)
        with stream, nullcontext() if counted else uncounted(self.run.module):
            yield

    def _as_piece(self, piece: ReplicaSlice, step: Step) -> AbstractContextManager[Any]:
        if not self._gathers:
            return self._piece(piece)
        module = self.run.module
        return replaced(module, "training_step", partial(self._run_step_end, module.training_step, piece, step))

    def end_step(self) -> None:
        """Have the module's buffers be replica 0's, on all ranks; of one device, ranks have written the same."""
        self._write(self._kept)
        count_rows(counted=True)
        if not self._options.one_device and self.run.world.size > 1:
            broadcast_from_first(self._buffers, self.run.world.group)

    def _run_step_end(self, training_step: Callable[..., Any], piece: ReplicaSlice, step: Step, *args: Any) -> Any:
        """Return what `training_step_end` makes of the outputs of all ranks, the same on every rank."""
        module, world, chunk = self.run.module, self.run.world, step.batches.chunk
        assert chunk is not None
        with self._piece(piece):
            output = training_step(*args)
        if not self._options.one_device or world.size > 1:
            how = {"counted": not chunk.stand_in, "numbers": not self._options.one_device}
            output = gather_outputs(output, self.run.device, world.group, sparse=self._sparse, **how)
        # All ranks have the whole batch: what is summed over them must hold it once.
        first = world.rank == 0
        self._log.samples = chunk.batch_samples * first
        step_end: Callable[[Any], Any] = module.training_step_end  # type: ignore[assignment]  # of Lightning 1.x
        with self._stream(world.size), nullcontext() if first else metrics_kept(module):
            return step_end(output)

    def on_evaluation_start(self) -> None:
        """Have evaluation log the values of the whole run. Batch norm normalizes each batch on its rank."""
        self._replaced.close()
        if self._options.preset is not None:
            self._replaced.enter_context(logged_as(self.run.module, of_whole_run))

    def on_evaluation_end(self) -> None:
        """Put `log` back, and have the batch norm of one device normalize over all ranks."""
        self._replaced.close()
        if self._options.one_device and self.run.model is not None and self.run.world.size > 1:
            self._replaced.enter_context(synchronized_batch_norm(self.run.world))

    def describe(self) -> str:
        """Return the run that is reproduced, and its replicas."""
        preset, replicas = self._options.preset, self.num_replicas(self.run.world.size)
        return (
            f"{f'; equivalent to {preset}' if preset else ''}"
            f"{'' if self._options.one_device else f'; {replicas} replicas'}"
            f"{', training_step_end gets all outputs' if self._gathers else ''}"
        )

    def teardown(self) -> None:
        """Put the module's log and batch norm back."""
        count_rows(counted=True)
        self._replaced.close()
