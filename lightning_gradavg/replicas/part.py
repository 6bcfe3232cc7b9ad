"""Training steps run once per replica, or per part of at most `max_device_batch_size` samples: a *piece* of a batch.

All backwards but that of the last piece run within `training_step`, and their gradients stay on the rank: a rank holds
the activations of one piece at a time. Lightning sees one step, runs the last backward, and reduces the gradients of
all. Where Lightning runs no backward, no piece does. What a piece computes depends neither on its rank nor on the
pieces before it: each starts from the module's buffers and draws from its own stream. What the first piece writes into
its buffers, the module keeps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_gradavg._lightning.internals import leave_batch_norm_alone
from lightning_gradavg._lightning.methods import logged_as, replaced
from lightning_gradavg._lightning.options import Options
from lightning_gradavg._lightning.part import Part, Run, Saved
from lightning_gradavg._lightning.stand_in import metrics_kept, uncounted
from lightning_gradavg._support.random_state import random_state, restore_random_state, seeded
from lightning_gradavg._support.tree import mapped
from lightning_gradavg.batches.chunks import Chunk
from lightning_gradavg.batches.part import Batches, ReplicaSlice, SplitBatches
from lightning_gradavg.evaluation.part import gathers_lists
from lightning_gradavg.reduction.gather import gather_refused, require_gather_allowed
from lightning_gradavg.reduction.reduction import Reduction
from lightning_gradavg.reduction.zero_loss import sparse_weights
from lightning_gradavg.replicas.batch_norm import count_rows, synchronized_batch_norm
from lightning_gradavg.replicas.buffers import SharedBuffers
from lightning_gradavg.replicas.joined import gather_outputs, join_steps
from lightning_gradavg.replicas.log import ReplicaLog, of_whole_run
from lightning_gradavg.replicas.obstacles import has_step_end, remarks, require_none

__all__ = ["OneForward", "Replicas", "Step", "replica_stream"]


class Step(NamedTuple):
    """How a training step is run."""

    forward: Callable[..., Any]
    backward: Callable[[], None]  # of a loss that is not the step's last
    reduction: Reduction
    batches: Batches


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


class OneForward(Part):
    """Runs the rank's samples of a training step at once, as stock DDP does."""

    def __init__(self, options: Options, *, static_graph: bool = False) -> None:
        self._options, self._static_graph = options, static_graph

    def setup(self, run: Run) -> None:
        """Name what cannot be served, before DDP wraps the module, which has objections of its own."""
        super().setup(run)
        if run.trainer.state.fn == TrainerFn.FITTING:
            require_none(run, self._options, static_graph=self._static_graph)
            for remark in remarks(run.module, self._options, world_size=run.world.size):
                rank_zero_warn(remark)

    def num_replicas(self, world_size: int) -> int:
        """Return the number of chunks that each loader batch is computed in."""
        return self._options.num_replicas or world_size

    def weight(self, chunk: Chunk | None) -> float | None:
        """Return the weight of a loss that has none: the samples of its batch, None where they are not known."""
        return None if chunk is None else chunk.samples

    def end_step(self) -> None:
        """End a step whose gradients are reduced."""

    def run_step(self, step: Step, batch: Any, *args: Any) -> Any:
        """Return the output of a training step, with its loss weighed."""
        with step.batches.training_step():
            return step.reduction.read(step.forward(batch, *args), self.weight(step.batches.chunk), batch)


class Replicas(OneForward):
    """Runs the pieces of the rank's samples, so that the number of ranks no longer matters.

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
        """Prepare the pieces of a run. A collective operation."""
        super().configure_ddp(run)
        options, module = self._options, run.module
        # Of one device, ranks have written the same.
        shares = run.world.size > 1 and not options.one_device and (options.replicated or run.ddp.broadcast_buffers)
        self._sharing = run.world if shares else None
        run.ddp.broadcast_buffers = False  # at the end of the step they are the same on all ranks
        self._log = ReplicaLog(module, run.world, whole=options.preset is not None)
        # Ranks may then run a step different numbers of times.
        self._in_pieces = options.in_pieces(run.world.size)
        self._buffers = SharedBuffers(module, in_pieces=self._in_pieces)
        self._gathers = options.preset is not None and has_step_end(module)
        self._sparse = list(sparse_weights(module).values())
        saved, self._saved_seed = self._saved_seed, None
        # Rank 0's, as unseeded ranks differ.
        own = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))
        self._seed = int(run.world.from_first(own if saved is None else saved))
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
        """Return the output of all pieces of a training step, with the loss of the last to be run."""
        assert isinstance(step.batches, SplitBatches)
        pieces, outputs = step.batches.slices(batch), list[Any]()
        self._buffers.begin_step()
        try:
            with self._log.collecting(), gather_refused(_APART) if self._in_pieces else nullcontext():
                for index, piece in enumerate(pieces):
                    self._buffers.begin_piece(index)
                    outputs.append(self._run_piece(step, piece, args, last=piece is pieces[-1]))
        except BaseException:
            self._buffers.put_back()
            raise
        self._buffers.require_written_in_place()
        # Else the step ends after the backward, which may run parts of the forward again.
        if not self.run.module.automatic_optimization or self.run.loop.skips_backward:
            self.end_step()
        return join_steps(outputs, [piece.samples for piece in pieces], self.run.device)

    def _run_piece(self, step: Step, piece: ReplicaSlice, args: Any, *, last: bool) -> Any:
        module, whole, reproducible = self.run.module, self.weight(step.batches.chunk), self._options.reproducible
        # Kernels choose the order of sums by alignment, and a slice begins wherever the samples before it end.
        batch = mapped(piece.batch, _copied) if reproducible else piece.batch
        local = self.run.ddp.no_sync() if reproducible or not last else nullcontext()
        around = self._drawing(piece)
        if self._gathers:
            around = replaced(module, "training_step", partial(self._run_step_end, module.training_step, piece, step))
        self._log.samples = piece.samples
        count_rows(counted=piece.replica is not None)
        with local, around:
            weight = whole if whole is None or self._gathers else piece.samples
            output = step.forward(batch, *args)
            output = step.reduction.read(output, weight, None if self._gathers else batch, is_last_piece=last)
            if self.run.loop.skips_backward:
                return mapped(output, _detached)  # a graph would be kept until the end of the step
            if not last:
                step.backward()
        return output

    def _stream(self, replica: int) -> AbstractContextManager[None]:
        """Draw what belongs to a replica of the loader batch, of which there were so many before."""
        index = self.run.trainer.fit_loop.epoch_loop.total_batch_idx
        return replica_stream(self._seed, index, replica, self.run.device)

    @contextmanager
    def _drawing(self, piece: ReplicaSlice) -> Iterator[None]:
        """Run a piece with its own random numbers. One of no samples, which only keeps the rank busy, leaves no trace.

        A backward after the context may run parts of the forward again.
        """
        number = -1 - self.run.world.rank if piece.replica is None else piece.replica
        with self._stream(number), nullcontext() if piece.samples else uncounted(self.run.module):
            yield

    def end_step(self) -> None:
        """Have the module's buffers be those of the first piece, on all ranks. A collective operation."""
        self._buffers.end_step(self._sharing)
        count_rows(counted=True)

    def _run_step_end(self, training_step: Callable[..., Any], piece: ReplicaSlice, step: Step, *args: Any) -> Any:
        """Return what `training_step_end` makes of the outputs of all ranks, the same on every rank."""
        module, world, chunk = self.run.module, self.run.world, step.batches.chunk
        assert chunk is not None
        with self._drawing(piece):
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
        """Put `log` back, and serve what takes the samples of all ranks: batch norm of one device, and metrics."""
        self._replaced.close()
        run, enter = self.run, self._replaced.enter_context
        if run.model is None or run.world.size == 1:
            return
        if self._options.one_device:
            enter(synchronized_batch_norm(run.world))
        # Of as many updates as there are pieces, or entries as samples, ranks have lists of different lengths.
        for metric in run.module.modules():
            if isinstance(metric, Metric) and metric.process_group is None:
                enter(gathers_lists(metric, run.world, _within_a_piece))

    def describe(self) -> str:
        """Return the run that is reproduced, and its replicas."""
        preset, replicas = self._options.preset, self._options.shaping_replicas(self.run.world.size)
        return (
            f"{f'; equivalent to {preset}' if preset else ''}"
            f"{f'; {replicas} replicas' if replicas else ''}"
            f"{', training_step_end gets all outputs' if self._gathers else ''}"
        )

    def teardown(self) -> None:
        """Put the module's log and batch norm back."""
        count_rows(counted=True)
        self._replaced.close()


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _within_a_piece() -> bool:
    """Raise where ranks run what is reduced now different numbers of times; leave nothing out."""
    require_gather_allowed()
    return False


_APART = (
    "training_step exchanges values with the other ranks (gather, global_mean, all_gather or a metric), but with"
    " num_replicas above the number of ranks, or max_device_batch_size, they run it different numbers of times, one"
    " piece after another. Use as many processes as replicas, and no max_device_batch_size"
)
