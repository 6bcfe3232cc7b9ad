"""Training steps run once per replica, the loss of all ranks' outputs, and evaluation as in the reproduced run."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial, update_wrapper
from typing import Any, NoReturn

import torch

from lightning_gradavg.batches.chunks import Chunk, chunk_bounds
from lightning_gradavg.batches.part import ReplicaSlice
from lightning_gradavg.lightning_internals import leave_batch_norm_alone
from lightning_gradavg.methods import logged_as, replaced
from lightning_gradavg.options import Options
from lightning_gradavg.part import Run, Saved
from lightning_gradavg.ranks import World
from lightning_gradavg.replicas.batch_norm import restore_batch_norm, synchronize_batch_norm
from lightning_gradavg.replicas.log import ReplicaLog, of_whole_run
from lightning_gradavg.replicas.obstacles import has_step_end
from lightning_gradavg.replicas.outputs import gather_outputs, join_outputs, require_rows
from lightning_gradavg.replicas.pieces import Pieces, Step, has_one_value
from lightning_gradavg.replicas.random_streams import ReplicaStreams
from lightning_gradavg.replicas.state import ReplicaState
from lightning_gradavg.stand_in import metrics_kept
from lightning_gradavg.tree import batch_samples, slice_batch

__all__ = ["Replicas"]


class Replicas(Pieces):
    """Runs the replicas of a loader batch, each a piece, so that the number of ranks no longer matters.

    Of one device, a rank's samples are its replica: batch norm normalizes over those of all ranks, and what ranks write
    must be what one device would.

    Attributes:
        gathers: Whether the loss is that of `training_step_end`.
    """

    def __init__(self, options: Options, *, static_graph: bool = False) -> None:
        super().__init__(options, static_graph=static_graph)
        self._saved_seed: int | None = None
        self._seed, self.gathers = 0, False
        self._evaluating = ExitStack()

    def setup(self, run: Run) -> None:
        """Leave batch norm to this part, which serves CPUs and ranks without samples, too."""
        if self._options.one_device:
            leave_batch_norm_alone(run.trainer.strategy)
        super().setup(run)

    def configure_ddp(self, run: Run) -> None:
        """Prepare the replicas of a run. A collective operation."""
        super().configure_ddp(run)
        # All ranks take replica 0's, at the end of the step.
        run.ddp.broadcast_buffers = False
        self.gathers = self._options.preset is not None and has_step_end(run.module)
        saved, self._saved_seed = self._saved_seed, None
        # Rank 0's, as unseeded ranks differ.
        own = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))
        self._seed = int(run.world.from_first(own if saved is None else saved))
        self._streams = ReplicaStreams(self._seed, run.device)
        self._state = ReplicaState(run, self._options, self._streams)
        self.on_evaluation_end()

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save what all random numbers of training steps follow from."""
        saved["replica_seed"] = self._seed

    def load(self, saved: Saved) -> None:
        """Remember it for the next run."""
        self._saved_seed = saved.get("replica_seed")

    def weight(self, chunk: Chunk | None) -> float | None:
        """Return the samples of the loss of a step: with `training_step_end`, those of all ranks."""
        return chunk.batch_samples if self.gathers and chunk is not None else super().weight(chunk)

    @property
    def _batch_index(self) -> int:
        """How many loader batches came before, which the random numbers depend on."""
        return int(self.run.trainer.fit_loop.epoch_loop.total_batch_idx)

    def run_step(self, step: Step, batch: Any, *args: Any) -> Any:
        """Return the output of a training step of all of this rank's replicas."""
        output = super().run_step(step, batch, *args)
        if not self.run.module.automatic_optimization:
            self.end_step()
        return output

    def _begin(self, chunk: Chunk) -> None:
        self._state.begin(self._batch_index, uneven=chunk.batch_samples % self.run.world.size != 0)

    def _as_piece(self, piece: ReplicaSlice, step: Step) -> AbstractContextManager[Any]:
        if not self.gathers:
            return self._state.piece(piece, self._batch_index)
        module = self.run.module
        return replaced(module, "training_step", partial(self._run_step_end, module.training_step, piece, step))

    def end_step(self) -> None:
        """Have the module's buffers be replica 0's, on all ranks. A collective operation."""
        self._state.end()

    def _run_step_end(self, training_step: Callable[..., Any], piece: ReplicaSlice, step: Step, *args: Any) -> Any:
        """Return what `training_step_end` makes of the outputs of all ranks, the same on every rank."""
        module, world, index, chunk = self.run.module, self.run.world, self._batch_index, step.batches.chunk
        assert chunk is not None
        try:
            with self._state.piece(piece, index):
                output = training_step(*args)
        except ValueError as error:
            if has_one_value(error):  # perhaps on this rank alone, and the others are about to agree on a gather
                world.agree("the outputs of training_step cannot be gathered", partial(_fail, error))
            raise
        if not self._options.one_device or world.size > 1:
            if self._options.one_device:
                require_rows(output)
            sparse, counted = step.reduction.sparse, not chunk.stand_in
            output = gather_outputs(output, self.run.device, world.group, counted=counted, sparse=sparse)
        self.end_step()
        # All ranks have the whole batch: what is summed over them must hold it once.
        first = world.rank == 0
        self._log.samples = chunk.batch_samples * first
        step_end: Callable[[Any], Any] = module.training_step_end  # type: ignore[assignment]  # of Lightning 1.x
        with self._streams.of(index, world.size), nullcontext() if first else metrics_kept(module):
            return step_end(output)

    def on_evaluation_start(self) -> None:
        """Have evaluation steps log the values of the whole run, and call the hooks of Lightning 1.x after them.

        Batch norm normalizes each batch on its rank: ranks have different ones.
        """
        module, stage = self.run.module, "test" if self.run.trainer.testing else "validation"
        restore_batch_norm(module)
        if self._options.preset is None:
            return
        step, step_end = getattr(module, f"{stage}_step"), getattr(module, f"{stage}_step_end", None)
        evaluate = update_wrapper(partial(self._evaluate, step, step_end), step)  # Lightning looks at its parameters
        self._evaluating.enter_context(replaced(module, f"{stage}_step", evaluate))

    def _evaluate(self, step: Callable[..., Any], step_end: Callable[[Any], Any] | None, batch: Any, *args: Any) -> Any:
        """Run an evaluation step, and the hook of Lightning 1.x after it, on a batch that is this rank's alone."""
        module = self.run.module
        with logged_as(module, of_whole_run):
            if step_end is None or self._options.one_device:
                output = step(batch, *args)
                return output if step_end is None else step_end(output)
            log, outputs = ReplicaLog(module, World(), whole=False), []
            with log.collecting():
                for start, stop in chunk_bounds(batch_samples(batch), self.num_replicas(self.run.world.size)):
                    if stop > start:
                        log.samples = stop - start
                        outputs.append(step(slice_batch(batch, start, stop), *args))
            return step_end(join_outputs(outputs, module.device))

    def on_evaluation_end(self) -> None:
        """Put the steps back, and have the batch norm of one device normalize over all ranks."""
        self._evaluating.close()
        if self._options.one_device and self.run.model is not None and self.run.world.size > 1:
            synchronize_batch_norm(self.run.module)

    def describe(self) -> str:
        """Return the run that is reproduced, and its replicas."""
        preset, world_size = self._options.preset, self.run.world.size
        replicas = self.num_replicas(world_size)
        idle = world_size - -(-replicas // -(-replicas // world_size))
        without = f" ({idle} of {world_size} ranks without one)" if idle else ""
        return (
            f"{f'; equivalent to {preset}' if preset else ''}"
            f"{'' if self._options.one_device else f'; {replicas} replicas{without}'}"
            f"{', training_step_end gets all outputs' if self.gathers else ''}"
        )

    def teardown(self) -> None:
        """Put the module's steps and batch norms back."""
        self._evaluating.close()
        restore_batch_norm(self.run.module)


def _fail(error: Exception) -> NoReturn:
    raise error
