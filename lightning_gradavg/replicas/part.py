"""Training steps run once per replica, the loss of all ranks' outputs, and evaluation as in the reproduced run."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial, update_wrapper
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_gradavg.batches.chunks import Chunk, chunk_bounds
from lightning_gradavg.batches.part import Batches, ReplicaSlice, SplitBatches
from lightning_gradavg.lightning_internals import leave_batch_norm_alone
from lightning_gradavg.methods import logged_as, replaced
from lightning_gradavg.options import Options
from lightning_gradavg.part import Run, Saved
from lightning_gradavg.ranks import World
from lightning_gradavg.replicas.batch_norm import restore_batch_norm, synchronize_batch_norm
from lightning_gradavg.replicas.log import ReplicaLog, of_whole_run
from lightning_gradavg.replicas.obstacles import has_step_end
from lightning_gradavg.replicas.outputs import gather_outputs, join_outputs, require_rows
from lightning_gradavg.replicas.pieces import ONE_VALUE, Pieces, Replicas, Step
from lightning_gradavg.replicas.random_streams import ReplicaStreams
from lightning_gradavg.replicas.state import ReplicaState
from lightning_gradavg.stand_in import metrics_kept
from lightning_gradavg.tree import batch_samples, slice_batch

__all__ = ["ManyReplicas", "replicas_of"]


class ManyReplicas(Pieces):
    """Runs the replicas of a loader batch, each a piece, so that the number of ranks no longer matters.

    Attributes:
        gathers: Whether the loss is that of `training_step_end`.
    """

    def __init__(self, options: Options, *, static_graph: bool = False) -> None:
        super().__init__(options, static_graph=static_graph)
        self._saved_seed: int | None = None
        self._seed, self.gathers = 0, False
        self._evaluating = ExitStack()

    def configure_ddp(self, run: Run) -> None:
        """Prepare the replicas of a run."""
        super().configure_ddp(run)
        # All ranks take replica 0's, at the end of the step.
        run.ddp.broadcast_buffers = False
        self.gathers = self._options.preset is not None and has_step_end(run.module)
        self._seed = self._agreed_seed(run.world)
        self._streams = ReplicaStreams(self._seed, run.device)
        self._state = ReplicaState(
            run.module,
            self._streams,
            run.world,
            several=self._options.in_pieces(run.world.size),
            keeps_assigned=self._options.one_device or self.num_replicas(run.world.size) == 1,
            ignored=run.ddp.parameters_to_ignore,
        )
        self.on_evaluation_end()

    def _agreed_seed(self, world: World) -> int:
        """Return the seed of the run that is resumed, or rank 0's: unseeded ranks differ."""
        saved, self._saved_seed = self._saved_seed, None
        own = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))
        return int(world.from_first(own if saved is None else saved))

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
        if not self.gathers:
            output = super().run_step(step, batch, *args)
        else:
            chunk = step.batches.chunk
            assert chunk is not None
            self._begin(chunk)
            step_end = partial(self._run_step_end, self.run.module.training_step, step)
            with replaced(self.run.module, "training_step", step_end), self._log.collecting():
                self._log.samples = chunk.samples
                output = self._forward(step, self.weight(chunk), batch, *args)
        if not self.run.module.automatic_optimization:
            self.end_step()
        return output

    def _begin(self, chunk: Chunk) -> None:
        self._state.begin(check=self._is_to_check(chunk, self._batch_index))

    def _as_piece(self, piece: ReplicaSlice, batches: Batches) -> AbstractContextManager[Any]:
        return self._state.piece(piece, self._batch_index)

    def end_step(self) -> None:
        """Have the module's buffers be replica 0's, on all ranks. A collective operation."""
        self._state.end()

    def _is_to_check(self, chunk: Chunk, batch_index: int) -> bool:
        """Return whether ranks compare their buffers now."""
        return False

    def _run_step_end(self, training_step: Callable[..., Any], step: Step, batch: Any, *args: Any) -> Any:
        """Return what `training_step_end` makes of the outputs of all ranks, the same on every rank."""
        module, chunk = self.run.module, step.batches.chunk
        assert chunk is not None
        assert isinstance(step.batches, SplitBatches)
        (piece,) = step.batches.slices(batch)
        bounds, problem = chunk_bounds(chunk.batch_samples, self.run.world.size), None
        try:
            with self._state.piece(piece, self._batch_index):
                output = training_step(piece.batch, *args)
        except ValueError as error:
            if ONE_VALUE not in str(error):
                raise
            problem = error
        # Of a single sample, which only some ranks may have; over one device, batch norm has the samples of all.
        single = not self._options.one_device and any(stop - start == 1 for start, stop in bounds)
        if single and any(chain(*self.run.world.gather_integers([problem is not None]))):
            raise ValueError(
                f"batch norm needs two values per channel, but a batch of {chunk.batch_samples} samples gives a rank a"
                " single sample. Choose a batch size that leaves no rank a single sample, such as by drop_last=True."
            ) from problem
        if problem is not None:
            raise problem
        self.end_step()
        gathered = self._gathered(output, counted=not chunk.stand_in, sparse=step.reduction.sparse)
        # All ranks have the whole batch: what is summed over them must hold it once.
        first = self.run.world.rank == 0
        self._log.samples = chunk.batch_samples * first
        step_end: Callable[[Any], Any] = module.training_step_end  # type: ignore[assignment]  # of Lightning 1.x
        with self._streams.of(self._batch_index, self.run.world.size), nullcontext() if first else metrics_kept(module):
            return step_end(gathered)

    def _gathered(self, output: Any, **options: Any) -> Any:
        """Return the outputs of all ranks as one, with options of `gather_outputs`. A collective operation."""
        return gather_outputs([output], self.run.device, self.run.world.group, **options)

    def on_evaluation_start(self) -> None:
        """Have evaluation steps log the values of the whole run, and call the hooks of Lightning 1.x after them."""
        if self._options.preset is None:
            return
        module, stage = self.run.module, "test" if self.run.trainer.testing else "validation"
        step, step_end = getattr(module, f"{stage}_step"), getattr(module, f"{stage}_step_end", None)
        evaluate = partial(_logged_whole, module, step) if step_end is None else partial(self._evaluate, step, step_end)
        # Lightning looks at the parameters of the step.
        self._evaluating.enter_context(replaced(module, f"{stage}_step", update_wrapper(evaluate, step)))

    def _evaluate(self, step: Callable[..., Any], step_end: Callable[[Any], Any], batch: Any, *args: Any) -> Any:
        """Run an evaluation step, and the hook of Lightning 1.x after it, on a batch that is this rank's alone."""
        module = self.run.module
        log, outputs = ReplicaLog(module, World(), whole=True), []
        with log.collecting():
            for start, stop in chunk_bounds(batch_samples(batch), self.num_replicas(self.run.world.size)):
                if stop > start:
                    log.samples = stop - start
                    outputs.append(step(slice_batch(batch, start, stop), *args))
        return _logged_whole(module, step_end, join_outputs(outputs, module.device))

    def on_evaluation_end(self) -> None:
        """Put the steps back."""
        self._evaluating.close()

    def describe(self) -> str:
        """Return the run that is reproduced, and its replicas."""
        preset, world_size = self._options.preset, self.run.world.size
        replicas = self.num_replicas(world_size)
        idle = world_size - -(-replicas // -(-replicas // world_size))
        without = f" ({idle} of {world_size} ranks without one)" if idle else ""
        reference = f"; equivalent to {preset}" if preset is not None else ""
        return f"{reference}; {replicas} replicas{without}{self._describe_gathering()}"

    def _describe_gathering(self) -> str:
        return ", training_step_end gets all outputs" if self.gathers else ""

    def teardown(self) -> None:
        """Put the module's steps back."""
        self._evaluating.close()


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
        """Have batch norm normalize each batch on its rank: in evaluation ranks have different ones."""
        restore_batch_norm(self.run.module)
        super().on_evaluation_start()

    def _evaluate(self, step: Callable[..., Any], step_end: Callable[[Any], Any], batch: Any, *args: Any) -> Any:
        return _logged_whole(self.run.module, lambda: step_end(step(batch, *args)))

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


def _logged_whole(module: LightningModule, step: Callable[..., Any], *args: Any) -> Any:
    """Run a step that logs values of the whole run."""
    with logged_as(module, of_whole_run):
        return step(*args)
