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
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.random_state import random_state, restore_random_state, seed_generators
from lightning_gradavg._support.tree import batch_samples, mapped
from lightning_gradavg.batches.chunks import Chunk
from lightning_gradavg.batches.part import Batches, ReplicaSlice, SplitBatches
from lightning_gradavg.evaluation.part import gathers_lists
from lightning_gradavg.reduction.gather import gather_refused, require_gather_allowed
from lightning_gradavg.reduction.reduction import Reduction
from lightning_gradavg.reduction.zero_loss import sparse_weights
from lightning_gradavg.replicas.batch_norm import count_rows, synchronized_batch_norm
from lightning_gradavg.replicas.buffers import SharedBuffers
from lightning_gradavg.replicas.joined import gather_outputs, join_steps
from lightning_gradavg.replicas.log import ReplicaLog, with_sync_dist
from lightning_gradavg.replicas.obstacles import has_step_end, remarks, require_none

__all__ = ["OneForward", "Replicas", "Step", "replica_stream"]

_REFUSED_IN_PIECES = (
    "training_step exchanges values with the other ranks (gather, global_mean, all_gather or a metric), but with"
    " num_replicas above the number of ranks, or max_device_batch_size, they run it different numbers of times, one"
    " piece after another. Use as many processes as replicas, and no max_device_batch_size"
)


class Step(NamedTuple):
    """What a training step is run by."""

    forward: Callable[..., Any]  # Lightning's training step: DDP's forward, then the user's `training_step`
    backward: Callable[[], None]  # of the pending loss of a piece that is not the step's last
    reduction: Reduction  # reads the loss and its weight
    batches: Batches  # knows which samples the batch holds


@contextmanager
def replica_stream(seed: int, step: int, replica: int, device: torch.device) -> Iterator[None]:
    """Within the context, draw from the random stream of a replica and a step; then restore all generators.

    The generators are torch's on the CPU and the device, Python's and NumPy's. Nothing waits for the device. What
    `torch.utils.checkpoint` recomputes later draws the same numbers from torch, whose states it keeps. For Python and
    NumPy, enter the context within the function that is recomputed.
    """
    # A hash, because a sum such as seed + step + replica repeats.
    digest = blake2b(f"{seed},{step},{replica}".encode(), digest_size=32).digest()
    host_seed = digest[:8] + digest[16:]  # 8 bytes for each of torch, Python and NumPy
    device_seed = int.from_bytes(digest[8:16], "little")

    accelerator: Any = None  # the module of the device's type, such as `torch.cuda`
    device_state: Tensor | None = None
    if device.type != "cpu":
        accelerator = getattr(torch, device.type)
        device_state = accelerator.get_rng_state()
    host_state = random_state()

    seed_generators(host_seed)
    if accelerator is not None:
        accelerator.manual_seed(device_seed)
    try:
        yield
    finally:
        restore_random_state(host_state)
        if accelerator is not None:
            accelerator.set_rng_state(device_state)


class OneForward(Part):
    """Runs the rank's samples of a training step at once, as stock DDP does.

    The strategy calls `run_step` for each training step, and `end_step` after the gradients of a step are reduced.
    """

    def __init__(self, options: Options, *, static_graph: bool = False) -> None:
        """Run steps by the strategy's options; `static_graph` is that of `DistributedDataParallel`."""
        self._options = options
        self._static_graph = static_graph

    def setup(self, run: Run) -> None:
        """Refuse what cannot be served. DDP, which wraps the module next, has objections of its own."""
        super().setup(run)
        if run.trainer.state.fn == TrainerFn.FITTING:
            require_none(run, self._options, static_graph=self._static_graph)
            for remark in remarks(run.module, self._options, world_size=run.world.size):
                rank_zero_warn(remark)

    def num_replicas(self, world_size: int) -> int:
        """Return the number of chunks that each loader batch is computed in."""
        if self._options.num_replicas is not None:
            return self._options.num_replicas
        return world_size

    def weight(self, chunk: Chunk | None) -> float | None:
        """Return the weight of a loss that has none: the samples of its batch, or None where they are not known."""
        if chunk is None:
            return None
        return chunk.samples

    def run_step(self, step: Step, batch: Any, *args: Any) -> Any:
        """Run a training step; return its output, whose loss has its weight."""
        with step.batches.training_step():
            output = step.forward(batch, *args)
            return step.reduction.read(output, self.weight(step.batches.chunk), batch)

    def end_step(self) -> None:
        """End a step whose gradients are reduced."""


class Replicas(OneForward):
    """Runs the pieces of the rank's samples, so that the number of ranks no longer matters.

    With `equivalent_to="single_device"`, a rank's samples are one piece, unless `max_device_batch_size` cuts it. Batch
    norm then normalizes over the samples of all ranks, and what ranks write must be what one device would write.

    The calls of a training step, in this order:

    1. `run_step`, in which for each piece the forward and, but for the last piece, the backward run.
    2. Lightning runs the backward of the last piece, and DDP reduces the gradients of all pieces.
    3. `end_step` makes the buffers those of the first piece. In manual optimization, and where Lightning runs no
       backward, `run_step` calls it: no backward follows.

    Between passes of training and evaluation, `on_evaluation_start` and `on_evaluation_end` exchange what is replaced
    of the module and of torch:

    | in         | replaced                                                                                        |
    |------------|-------------------------------------------------------------------------------------------------|
    | training   | of several ranks, how metrics gather list states; and, with `equivalent_to="single_device"`,    |
    |            | `torch.nn.functional.batch_norm`                                                                |
    | evaluation | `module.log`, if the run reproduces another one                                                 |
    """

    # Of the run that trains, from `configure_ddp` on.
    _log: ReplicaLog
    _buffers: SharedBuffers
    _buffers_from: World | None  # the ranks that take rank 0's buffers after a step; None if they are equal anyway
    _in_pieces: bool  # whether ranks may run a step different numbers of times
    _gathers_outputs: bool = False  # whether `training_step_end` gets the outputs of all replicas
    _sparse: list[Tensor]  # the parameters with sparse gradients
    _seed: int = 0  # of all replicas' random streams

    def __init__(self, options: Options, *, static_graph: bool = False) -> None:
        """Run steps in pieces by the strategy's options."""
        super().__init__(options, static_graph=static_graph)
        self._loaded_seed: int | None = None  # of a checkpoint that the next run resumes
        self._replacements = ExitStack()

    def setup(self, run: Run) -> None:
        """Keep Lightning from converting batch norm: this part also serves CPUs and ranks without samples."""
        if self._options.one_device:
            leave_batch_norm_alone(run.trainer.strategy)
        super().setup(run)

    def configure_ddp(self, run: Run) -> None:
        """Prepare the pieces of a run. A collective operation."""
        super().configure_ddp(run)
        options = self._options
        module = run.module
        self._buffers_from = None
        # Of one device, all ranks write the same: batch norm has the same statistics on all of them.
        if run.world.size > 1 and not options.one_device and (options.replicated or run.ddp.broadcast_buffers):
            self._buffers_from = run.world
        # DDP would broadcast buffers before the forward of each piece, and of each validation step. `end_step` does it
        # once, at the end of a step.
        run.ddp.broadcast_buffers = False
        self._log = ReplicaLog(module, run.world, whole=options.preset is not None)
        self._in_pieces = options.in_pieces(run.world.size)
        self._buffers = SharedBuffers(module, in_pieces=self._in_pieces)
        self._gathers_outputs = options.preset is not None and has_step_end(module)
        self._sparse = list(sparse_weights(module).values())
        seed = self._loaded_seed
        self._loaded_seed = None
        if seed is None:
            # `seed_everything` leaves its seed in the environment. Without it, torch's generator has a seed.
            seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))
        # Rank 0's, as the ranks of a run without a seed differ.
        self._seed = int(run.world.from_first(seed))
        self._replace_for_training()

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save the seed, from which all random numbers of training steps follow."""
        saved["replica_seed"] = self._seed

    def load(self, saved: Saved) -> None:
        """Keep the seed of a checkpoint for the next run."""
        self._loaded_seed = saved.get("replica_seed")

    def weight(self, chunk: Chunk | None) -> float | None:
        """Return the samples of the loss of a step: with `training_step_end`, those of all ranks."""
        if self._gathers_outputs and chunk is not None:
            return chunk.batch_samples
        return super().weight(chunk)

    def run_step(self, step: Step, batch: Any, *args: Any) -> Any:
        """Run all pieces of a training step; return their joined output, with the loss of the last piece."""
        assert isinstance(step.batches, SplitBatches)
        pieces = step.batches.slices(batch)
        outputs: list[Any] = []
        exchanges: AbstractContextManager[None] = nullcontext()
        if self._in_pieces:
            exchanges = gather_refused(_REFUSED_IN_PIECES)
        self._buffers.begin_step()
        try:
            with self._log.collecting(), exchanges:
                for index, piece in enumerate(pieces):
                    self._buffers.begin_piece(index)
                    is_last = index == len(pieces) - 1
                    outputs.append(self._run_piece(step, piece, args, is_last=is_last))
        except BaseException:
            self._buffers.restore()
            raise
        self._buffers.require_written_in_place()
        # In automatic optimization `Reduction` ends the step after the backward of the last piece, which may run parts
        # of the forward again.
        if not self.run.module.automatic_optimization or self.run.loop.skips_backward:
            self.end_step()
        return join_steps(outputs, [piece.samples for piece in pieces], self.run.device)

    def _run_piece(self, step: Step, piece: ReplicaSlice, args: tuple[Any, ...], *, is_last: bool) -> Any:
        """Run the forward of a piece, and its backward unless it is the last; return what `training_step` returned.

        | the module has      | weight of the loss                      | random numbers of the replica are drawn in |
        |---------------------|-----------------------------------------|--------------------------------------------|
        | `training_step_end` | samples of the whole batch              | `training_step`                            |
        | no such hook        | samples of the piece, if they are known | forward, loss and backward                 |
        """
        batch = piece.batch
        if self._options.reproducible:
            # Kernels choose the order of sums by alignment, and a slice begins wherever the samples before it end.
            batch = mapped(batch, _copied)
        # Under `reproducible` the engine of the run sums the gradients, in its own order.
        reducing: AbstractContextManager[None] = nullcontext()
        if self._options.reproducible or not is_last:
            reducing = self.run.ddp.no_sync()
        weight = self.weight(step.batches.chunk)
        batch_of_loss = batch
        if self._gathers_outputs:
            module = self.run.module
            with_step_end = partial(self._run_step_end, module.training_step, piece, step)
            around = replaced(module, "training_step", with_step_end)
            batch_of_loss = None  # the loss is that of the whole batch
        else:
            around = self._drawing(piece)
            if weight is not None:
                weight = piece.samples
        self._log.samples = piece.samples
        if weight is None and piece.samples > 0:
            self._log.samples = _samples_of_several_loaders(piece)
        count_rows(counted=piece.replica is not None)
        with reducing, around:
            output = step.forward(batch, *args)
            output = step.reduction.read(output, weight, batch_of_loss, is_last_piece=is_last)
            if self.run.loop.skips_backward:
                return mapped(output, _detached)  # a graph would be kept until the end of the step
            if not is_last:
                step.backward()
        return output

    def _stream(self, replica: int) -> AbstractContextManager[None]:
        """Draw from the stream of a replica of the loader batch that is in training."""
        batches_before = self.run.trainer.fit_loop.epoch_loop.total_batch_idx
        return replica_stream(self._seed, batches_before, replica, self.run.device)

    @contextmanager
    def _drawing(self, piece: ReplicaSlice) -> Iterator[None]:
        """Run a piece with its own random numbers. A stand-in leaves no trace in metrics and in what ranks gather.

        A backward after the context may run parts of the forward again.
        """
        number = piece.replica
        if number is None:
            number = -1 - self.run.world.rank  # no replica's stream
        counting: AbstractContextManager[None] = nullcontext()
        if piece.samples == 0:
            counting = uncounted(self.run.module)
        with self._stream(number), counting:
            yield

    def _run_step_end(self, training_step: Callable[..., Any], piece: ReplicaSlice, step: Step, *args: Any) -> Any:
        """Return what `training_step_end` makes of the outputs of all ranks, the same on every rank.

        It replaces `training_step` for a piece. A collective operation.
        """
        module = self.run.module
        world = self.run.world
        chunk = step.batches.chunk
        assert chunk is not None
        with self._drawing(piece):
            output = training_step(*args)
        # One process of one device has no outputs to gather. A replica's number becomes a row, as in DataParallel.
        if not self._options.one_device or world.size > 1:
            output = gather_outputs(
                output,
                self.run.device,
                world.group,
                counted=not chunk.stand_in,
                numbers=not self._options.one_device,
                sparse=self._sparse,
            )
        step_end: Callable[[Any], Any] = module.training_step_end  # type: ignore[assignment]  # of Lightning 1.x
        # Every rank has the whole batch now. What is summed over ranks, in logs and metrics, must hold it once.
        counting: AbstractContextManager[None] = nullcontext()
        if world.rank == 0:
            self._log.samples = chunk.batch_samples
        else:
            self._log.samples = 0
            counting = metrics_kept(module)
        with self._stream(world.size), counting:
            return step_end(output)

    def end_step(self) -> None:
        """Make the module's buffers those of the first piece, on all ranks. A collective operation."""
        self._buffers.end_step(self._buffers_from)
        count_rows(counted=True)

    def on_evaluation_start(self) -> None:
        """Have evaluation log the values of the whole run. Batch norm normalizes each batch on its rank."""
        self._replacements.close()
        if self._options.preset is not None:
            self._replacements.enter_context(logged_as(self.run.module, with_sync_dist))

    def on_evaluation_end(self) -> None:
        """Return to what training needs, if the run trains."""
        self._replace_for_training()

    def _replace_for_training(self) -> None:
        """Serve what takes the samples of all ranks: batch norm of one device, and metrics."""
        self._replacements.close()
        run = self.run
        if run.model is None or run.world.size == 1:
            return
        if self._options.one_device:
            self._replacements.enter_context(synchronized_batch_norm(run.world))
        # Ranks have list states of different lengths: one entry for each update, which are as many as pieces, or for
        # each sample.
        for metric in run.module.modules():
            if isinstance(metric, Metric) and metric.process_group is None:
                self._replacements.enter_context(gathers_lists(metric, run.world, _refuse_within_piece))

    def describe(self) -> str:
        """Return the start line's words about the run to reproduce, and its replicas."""
        text = ""
        if self._options.preset is not None:
            text += f"; equivalent to {self._options.preset}"
        replicas = self._options.shaping_replicas(self.run.world.size)
        if replicas is not None:
            text += f"; {replicas} replicas"
        if self._gathers_outputs:
            text += ", training_step_end gets all outputs"
        return text

    def teardown(self) -> None:
        """Restore the module's log, its metrics and batch norm."""
        count_rows(counted=True)
        self._replacements.close()


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _samples_of_several_loaders(piece: ReplicaSlice) -> int:
    """Return how many samples logged values stand for where no loader's batch counts those of several.

    A hook may have merged them into one batch, which tells. If not, those of the first loader count, as in Lightning.
    """
    try:
        return batch_samples(piece.batch)
    except ValueError:
        return piece.samples


def _refuse_within_piece() -> bool:
    """Raise a RuntimeError if a metric is reduced while ranks run pieces; otherwise, have it reduced."""
    require_gather_allowed()
    return False
