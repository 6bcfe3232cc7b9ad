"""Training steps run once per replica, or per part of at most `max_device_batch_size` samples: a *piece* of a batch.

All backwards but that of the last piece run within `training_step`, and their gradients stay on the rank: a rank holds
the activations of one piece at a time. Lightning sees one step, runs the last backward, and reduces the gradients of
all. Where Lightning runs no backward, no piece does. What a piece computes depends neither on its rank nor on the
pieces before it: each starts from the module's buffers and draws from its own stream. What the first piece writes into
its buffers, the module keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_gradavg._lightning.methods import logged_as
from lightning_gradavg._lightning.options import Options
from lightning_gradavg._lightning.part import Part, Run
from lightning_gradavg._lightning.stand_in import metrics_kept
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.running import running
from lightning_gradavg._support.tree import batch_samples, mapped
from lightning_gradavg.batches.chunks import Chunk
from lightning_gradavg.batches.part import Batches, PieceOfBatch, SplitBatches
from lightning_gradavg.evaluation.metrics import is_merged, merged_over_ranks
from lightning_gradavg.reduction.reduction import Reduction
from lightning_gradavg.replicas.batch_norm import synchronized_batch_norm
from lightning_gradavg.replicas.buffers import SharedBuffers
from lightning_gradavg.replicas.joined import join_steps
from lightning_gradavg.replicas.log import ReplicaLog, with_sync_dist
from lightning_gradavg.replicas.obstacles import remarks, require_none

__all__ = ["OneForward", "Replicas", "Step"]

_REFUSED_IN_PIECES = (
    "training_step exchanges values with the other ranks (gather, global_mean, all_gather, a metric or batch norm of"
    " one device), but with num_replicas above the number of ranks, or max_device_batch_size, they run it different"
    " numbers of times, one piece after another. Use as many processes as replicas, and no max_device_batch_size"
)


class Step(NamedTuple):
    """What a training step is run by."""

    forward: Callable[..., Any]  # Lightning's training step: DDP's forward, then the user's `training_step`
    backward: Callable[[], None]  # of the pending loss of a piece that is not the step's last
    reduction: Reduction  # reads the loss and its weight
    batches: Batches  # knows which samples the batch holds


class OneForward(Part):
    """Runs the rank's samples of a training step at once, as stock DDP does.

    The strategy calls `run_step` for each training step.
    """

    def __init__(self, options: Options, *, static_graph: bool = False) -> None:
        """Run steps by the strategy's options; `static_graph` is that of `DistributedDataParallel`."""
        self._options = options
        self._static_graph = static_graph

    def setup(self, run: Run) -> None:
        """Refuse what cannot be served. DDP, which wraps the module next, has objections of its own."""
        super().setup(run)
        if run.trainer.state.fn == TrainerFn.FITTING:
            self._require_no_obstacle(run)
            for remark in remarks(run.module, self._options, world_size=run.world.size):
                rank_zero_warn(remark)

    def configure_ddp(self, run: Run) -> None:
        """Refuse what Lightning has made of the module: `Trainer(sync_batchnorm=True)` has converted batch norm."""
        super().configure_ddp(run)
        self._require_no_obstacle(run)

    def _require_no_obstacle(self, run: Run) -> None:
        require_none(run, self._options, static_graph=self._static_graph)

    def num_replicas(self, world_size: int) -> int:
        """Return the number of chunks that each loader batch is computed in."""
        if self._options.num_replicas is not None:
            return self._options.num_replicas
        return world_size

    def run_step(self, step: Step, batch: object, *args: Any) -> object:
        """Run a training step; return its output, whose loss has its weight."""
        (piece,) = step.batches.pieces(batch)
        batches = step.batches
        forward = batches.make_forward(piece, step.reduction.exchanging)
        with running(forward), batches.training_step(), batches.computing("forward", piece):
            output = step.forward(batch, *args)
            return step.reduction.read(output, batch, forward)


class Replicas(OneForward):
    """Runs the pieces of the rank's samples, so that the number of ranks no longer matters.

    With `equivalent_to="single_device"`, a rank's samples are one piece, unless `max_device_batch_size` cuts it. Batch
    norm then normalizes over the samples of all ranks, and what ranks write must be what one device would write.

    The calls of a training step, in this order:

    1. `run_step`, in which for each piece the forward and, but for the last piece, the backward run.
    2. Lightning runs the backward of the last piece, and DDP reduces the gradients of all pieces.
    3. `end_step` makes the buffers those of the first piece. In manual optimization, and where Lightning runs no
       backward, `run_step` calls it: no backward follows.

    What is replaced, and for how long:

    | for                                             | replaced                                                   |
    |-------------------------------------------------|------------------------------------------------------------|
    | the forward of a piece, and its backward        | `torch.nn.functional.batch_norm` and the forward of        |
    |                                                 | `nn.SyncBatchNorm`, with `equivalent_to="single_device"`   |
    | a training step                                 | `module.log`                                               |
    | a pass of training                              | of several ranks, how metrics gather list states           |
    | a pass of evaluation                            | `module.log`, if the run reproduces another one            |
    """

    # Of the run that trains, from `configure_ddp` on.
    _log: ReplicaLog
    _buffers: SharedBuffers
    _buffers_from: World | None  # the ranks that take rank 0's buffers after a step; None if they are equal anyway
    _in_pieces: bool  # whether ranks may run a step different numbers of times

    def __init__(self, options: Options, *, static_graph: bool = False) -> None:
        """Run steps in pieces by the strategy's options."""
        super().__init__(options, static_graph=static_graph)
        self._replacements = ExitStack()

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
        self._replace_for_training()

    def run_step(self, step: Step, batch: object, *args: Any) -> object:
        """Run all pieces of a training step; return their joined output, with the loss of the last piece."""
        assert isinstance(step.batches, SplitBatches)
        pieces = step.batches.pieces(batch)
        outputs: list[object] = []
        self._buffers.begin_step()
        try:
            with self._log.collecting():
                for index, piece in enumerate(pieces):
                    self._buffers.begin_piece(index)
                    is_last = index == len(pieces) - 1
                    outputs.append(self._run_piece(step, piece, args, several=len(pieces) > 1, is_last=is_last))
        except BaseException:
            self._buffers.restore()
            raise
        self._buffers.require_written_in_place()
        self._require_no_count_of_samples(step.batches.chunk, pieces[0])
        # In automatic optimization `Reduction` ends the step after the backward of the last piece, which may run parts
        # of the forward again.
        if not self.run.module.automatic_optimization or self.run.loop.skips_backward:
            self.end_step()
        return join_steps(outputs, [piece.samples for piece in pieces], self.run.device)

    def _require_no_count_of_samples(self, chunk: Chunk | None, piece: PieceOfBatch) -> None:
        """Raise a RuntimeError if a buffer counts the samples of a piece, and not those of the run to reproduce.

        Replicas keep the buffers of the first one, as `nn.DataParallel` does. Without a preset, buffers are a rank's.
        """
        assert chunk is not None
        if self._options.one_device:
            self._buffers.require_no_count_of_samples(piece.samples, chunk.batch_samples)
        elif not self._options.replicated and chunk.samples is not None:
            self._buffers.require_no_count_of_samples(piece.samples, chunk.samples)

    def _run_piece(
        self, step: Step, piece: PieceOfBatch, args: tuple[object, ...], *, several: bool, is_last: bool
    ) -> object:
        """Run the forward of a piece, and its backward unless it is the last; return what `training_step` returned."""
        batches = step.batches
        assert isinstance(batches, SplitBatches)
        batch = piece.batch
        if several:
            batch = batches.moved(piece)
        if self._options.reproducible:
            # Kernels choose the order of sums by alignment, which depends on where a batch was loaded.
            batch = mapped(batch, _copied)
        # Under `reproducible` the engine of the run sums the gradients, in its own order.
        reducing: AbstractContextManager[None] = nullcontext()
        if self._options.reproducible or not is_last:
            reducing = self.run.ddp.no_sync()
        counting: AbstractContextManager[None] = nullcontext()
        if piece.samples == 0:
            counting = metrics_kept(self.run.module, is_merged)
        samples = batches.samples
        self._log.samples = piece.samples
        if samples is None and piece.samples > 0:
            self._log.samples = _samples_of_several_loaders(piece, batch)
        if samples is not None:
            samples = piece.samples
        forward = batches.make_forward(piece, step.reduction.exchanging)
        forward = replace(
            forward,
            samples=samples,
            normalizes_over_ranks=self._normalizes_over_ranks,
            refusal=_REFUSED_IN_PIECES if self._in_pieces else "",
            in_backward=partial(self._normalizing, forward.in_backward),
        )
        with reducing, counting, running(forward), self._normalizing():
            with batches.computing("forward", piece):
                output = step.forward(batch, *args)
                output = step.reduction.read(output, batch, forward, is_last_piece=is_last)
            if self.run.loop.skips_backward:
                return mapped(output, _detached)  # a graph would be kept until the end of the step
            if not is_last:
                step.backward()
        return output

    @property
    def _normalizes_over_ranks(self) -> bool:
        """Whether batch norm is that of one device. In pieces it is refused, as it cannot see the whole batch."""
        return self._options.one_device and (self.run.world.size > 1 or self._in_pieces)

    @contextmanager
    def _normalizing(self, within: Callable[[], AbstractContextManager[None]] = nullcontext) -> Iterator[None]:
        """Have batch norm of one device normalize over all ranks, within another context."""
        normalizing: AbstractContextManager[None] = nullcontext()
        if self._normalizes_over_ranks:
            normalizing = synchronized_batch_norm()
        with normalizing, within():
            yield

    def end_step(self) -> None:
        """Make the module's buffers those of the first piece, on all ranks. A collective operation."""
        self._buffers.end_step(self._buffers_from)

    def on_evaluation_start(self) -> None:
        """Have evaluation log the values of the whole run, and leave the metrics to it."""
        self._replacements.close()
        if self._options.preset is not None:
            self._replacements.enter_context(logged_as(self.run.module, with_sync_dist))

    def on_evaluation_end(self) -> None:
        """Return to what training needs, if the run trains."""
        self._replace_for_training()

    def _replace_for_training(self) -> None:
        """Serve metrics, which take the samples of all ranks."""
        self._replacements.close()
        run = self.run
        if run.model is None or run.world.size == 1:
            return
        # Ranks have list states of different lengths: one entry for each update, which are as many as pieces, or for
        # each sample.
        for metric in run.module.modules():
            if isinstance(metric, Metric) and metric.process_group is None:
                self._replacements.enter_context(merged_over_ranks(metric, run.world))

    def teardown(self) -> None:
        """Restore the module's log, and its metrics."""
        self._replacements.close()


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _samples_of_several_loaders(piece: PieceOfBatch, batch: object) -> int:
    """Return how many samples logged values stand for where no loader's batch counts those of several.

    A hook may have merged them into one batch, which tells. If not, those of the first loader count, as in Lightning.
    """
    try:
        return batch_samples(batch)
    except ValueError:
        return piece.samples
