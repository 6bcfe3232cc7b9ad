"""Training and evaluation steps run once per replica, and the loss of all replicas' outputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_gradavg.batches.chunks import Chunk, chunk_bounds
from lightning_gradavg.batches.part import Batches, SplitBatches
from lightning_gradavg.lightning_internals import syncs_batch_norm
from lightning_gradavg.options import Options
from lightning_gradavg.part import Part, Run, Saved
from lightning_gradavg.reduction.gather import collectives_refused
from lightning_gradavg.reduction.loss import zero_loss
from lightning_gradavg.reduction.reduction import Reduction
from lightning_gradavg.replicas.batch_norm import restore_batch_norm, synchronize_batch_norm
from lightning_gradavg.replicas.log import (
    ReplicaLog,
    logged_of_whole_run,
    logged_on_all_ranks_alike,
    metrics_kept,
    nothing_logged,
)
from lightning_gradavg.replicas.obstacles import has_step_end, obstacles, remarks
from lightning_gradavg.replicas.outputs import gather_outputs, join_outputs
from lightning_gradavg.replicas.random_streams import ReplicaStreams
from lightning_gradavg.replicas.state import ReplicaRuns
from lightning_gradavg.tree import batch_samples, leaves, slice_batch

__all__ = ["ManyReplicas", "OutputsOfReplicas", "Replicas"]


class OutputsOfReplicas(list[tuple[Any, int]]):
    """The output and the number of samples of each of a rank's replicas, each with a loss of its own."""


class Replicas(Part):
    """A rank's batch is computed as it is, by the module itself.

    Args:
        options: What the user's options come to.
    """

    def __init__(self, options: Options) -> None:
        self._options = options

    def setup(self, run: Run) -> None:
        """Remark what Lightning 2 would ignore, and what differs from the run that was asked for without harm."""
        super().setup(run)
        fits = run.trainer.state.fn == TrainerFn.FITTING
        for remark in remarks(run.module, self._options, world_size=run.world.size) if fits else ():
            rank_zero_warn(remark)

    def num_replicas(self, world_size: int) -> int:
        """Return the number of chunks that each loader batch is computed in."""
        return world_size

    def samples(self, chunk: Chunk | None) -> float | None:
        """Return the weight of a loss that has none: the samples of its batch, None where they are not known."""
        return None if chunk is None else chunk.samples

    def step(self, reduction: Reduction, batches: Batches) -> AbstractContextManager[Any]:
        """Surround a training step."""
        return batches.training_step()

    def read(self, output: Any, reduction: Reduction, chunk: Chunk | None) -> Any:
        """Return a training step's output with one loss, having handed its loss to the reduction."""
        return reduction.read(output, self.samples(chunk))

    def evaluate(
        self,
        stage: str,
        step: Callable[..., Any],
        context: Callable[[], Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run an evaluation step on a batch that is this rank's alone."""
        return step(*args, **kwargs)


class ManyReplicas(Replicas):
    """Runs the replicas of a loader batch on any number of ranks, so that the ranks no longer matter.

    Args:
        options: What the user's options come to.
        static_graph: Whether DDP was told that every iteration is alike.

    Attributes:
        gathers: Whether the loss is that of `training_step_end`.
    """

    def __init__(self, options: Options, *, static_graph: bool) -> None:
        super().__init__(options)
        self._static_graph = static_graph
        self._saved_seed: int | None = None
        self._seed = 0
        self.gathers = False

    def num_replicas(self, world_size: int) -> int:
        """Return the number of chunks that each loader batch is computed in."""
        return self._options.num_replicas or world_size

    def setup(self, run: Run) -> None:
        """Name what cannot be reproduced. Before DDP wraps the module, which has objections of its own."""
        options, preset = self._options, self._options.preset
        found = obstacles(
            run.module,
            options,
            world_size=run.world.size,
            device=run.device,
            static_graph=self._static_graph,
            sync_batchnorm=syncs_batch_norm(run.trainer.strategy) and not options.one_device,
        )
        if found and run.trainer.state.fn == TrainerFn.FITTING:
            what = f"equivalent_to={preset.name!r}" if preset is not None else f"num_replicas={options.num_replicas}"
            raise ValueError(f"{what} cannot hold:\n  " + "\n  ".join(found))
        super().setup(run)

    def configure_ddp(self, run: Run) -> None:
        """Prepare the replicas of a run."""
        super().configure_ddp(run)
        module, options = run.module, self._options
        # All ranks take replica 0's, at the end of the forward that changes them.
        run.ddp.broadcast_buffers = False
        group = run.world.group
        self._rank, self._world_size = run.world.rank, run.world.size
        self._seed = self._agreed_seed()
        self._runs, self._checked_uneven = 0, False
        self.gathers = options.preset is not None and has_step_end(module)
        self._log = ReplicaLog(module, group, run.device, whole=options.preset is not None)
        self._replicas = ReplicaRuns(
            module,
            ReplicaStreams(self._seed, run.device),
            group,
            quiet=partial(_without_traces, module),
            recompute=options.recompute_replicas,
            several=self._several or options.recompute_replicas,
            keeps_assigned=options.one_device or self.num_replicas(self._world_size) == 1,
            ignored=getattr(module, "_ddp_params_and_buffers_to_ignore", ()),
        )
        self.on_evaluation_end()

    def _agreed_seed(self) -> int:
        """Return rank 0's seed, or that of the run that is resumed: ranks that were not seeded differ."""
        saved, self._saved_seed = self._saved_seed, None
        seed: int = self.run.world.from_first(
            saved if saved is not None else int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))
        )
        return seed

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save what all random numbers of training steps follow from."""
        saved["replica_seed"] = self._seed

    def load(self, saved: Saved) -> None:
        """Remember it for the next run."""
        self._saved_seed = saved.get("replica_seed")

    @property
    def _several(self) -> bool:
        """Whether a rank may have several replicas."""
        return self.num_replicas(self._world_size) > self._world_size

    def samples(self, chunk: Chunk | None) -> float | None:
        """Return the weight of the loss of all replicas of a rank."""
        return None if chunk is None else self._weight(chunk, chunk.samples)

    def _weight(self, chunk: Chunk, samples: int) -> float:
        """Return the weight of the loss of so many samples, of one replica or of all of them."""
        if self.gathers:
            return chunk.batch_samples
        return 1 / chunk.batch_replicas if self._options.counts_replicas and samples > 0 else samples

    @contextmanager
    def step(self, reduction: Reduction, batches: Batches) -> Iterator[None]:
        """Have Lightning's call of `training_step` run it once per replica."""
        module, model = self.run.module, self.run.ddp
        own = vars(module).get("training_step")
        # A forward for several backwards: DDP must not expect the gradients of the first, which stay local.
        later = self._several and not self.gathers and model.require_backward_grad_sync
        if later:
            model.require_backward_grad_sync = False
            reduction.prepare_later()
        module.training_step = partial(self._run_step, module.training_step, reduction, batches)  # type: ignore[method-assign]  # for this step only
        try:
            yield
        finally:
            model.require_backward_grad_sync = model.require_backward_grad_sync or later
            del module.training_step
            if own is not None:
                module.training_step = own  # type: ignore[method-assign]  # the user's own

    def read(self, output: Any, reduction: Reduction, chunk: Chunk | None) -> Any:
        """Return a training step's output with one loss, having handed each replica's to the reduction."""
        assert chunk is not None
        if not isinstance(output, OutputsOfReplicas):
            self._refuse_weight(output)
            return super().read(output, reduction, chunk)
        values: list[Tensor] = []
        for of_replica, samples in output:
            self._refuse_weight(of_replica)
            named = isinstance(of_replica, Mapping)
            loss, weight = (of_replica.get("loss"), of_replica.get("weight")) if named else (of_replica, None)
            if loss is None:
                raise RuntimeError(
                    "training_step returned no loss for one of the replicas of a batch. Return"
                    ' {"loss": loss, "weight": 0} for samples that are not to count.'
                )
            values.append(reduction.add(loss, weight, self._weight(chunk, samples)).value * samples)
        mean = sum(values[1:], values[0]) / chunk.samples
        if not all(isinstance(of_replica, Mapping) for of_replica, _ in output):
            return mean
        keys = dict.fromkeys(key for of_replica, _ in output for key in of_replica if key != "loss")
        rest = {key: self._joined([of_replica.get(key) for of_replica, _ in output]) for key in keys}
        return {**rest, "loss": mean}

    def _joined(self, values: Sequence[Any]) -> Any:
        try:
            return join_outputs(values, self.run.device)
        except (TypeError, RuntimeError):  # of no tensors, or of shapes that do not fit
            return values

    def _refuse_weight(self, output: Any) -> None:
        if self._options.counts_replicas and isinstance(output, Mapping) and output.get("weight") is not None:
            raise ValueError(
                f'training_step returned "weight": {output["weight"]!r}, but reduction={self._options.rule.name!r} gives'
                " every replica the same say. Leave the weight out, or leave reduction out."
            )

    def _run_step(self, step: Callable[..., Any], reduction: Reduction, batches: Batches, *args: Any, **kwargs: Any) -> Any:
        """Run a training step on the batch that `batches` has noted.

        Returns:
            What `training_step_end` returns, or `training_step` of the only replica, or `OutputsOfReplicas`.
        """
        assert isinstance(batches, SplitBatches)
        chunk = batches.chunk
        assert chunk is not None
        batch_index = self.run.module.trainer.fit_loop.epoch_loop.total_batch_idx
        batch, run = _separated(step, args, kwargs)

        def run_counted(part: tuple[int, Any]) -> Any:
            samples, samples_of_replica = part
            self._log.count(samples)
            return run(samples_of_replica)

        several = self._several or self._options.recompute_replicas
        check = self._options.one_device and self._is_to_check(chunk)
        slices = [] if chunk.stand_in else batches.slices(batch)
        parts = [(each.replica or 0, (each.samples, each.batch)) for each in slices]
        with self._log.collecting(), collectives_refused(_APART) if several else nullcontext(), self._together(chunk):
            if chunk.stand_in:
                nobody = self.num_replicas(self._world_size) + 1 + self._rank
                with metrics_kept(self.run.module):
                    stand_in = self._replicas.run_stand_in(run_counted, (0, batch), batch_index, nobody, check=check)
                outputs = [stand_in]
            else:
                outputs = self._replicas.run(run_counted, parts, batch_index, check=check)
        if self.gathers:
            return self._run_step_end(outputs, chunk, batch_index, reduction)
        if len(outputs) == 1:
            return outputs[0]
        return OutputsOfReplicas(zip(outputs, (each.samples for each in slices), strict=True))

    def _is_to_check(self, chunk: Chunk) -> bool:
        """Return whether ranks compare their buffers now: ever more rarely, and once after an uneven batch."""
        self._runs += 1
        uneven = chunk.batch_samples % self._world_size != 0 and not self._checked_uneven
        self._checked_uneven = self._checked_uneven or uneven
        return uneven or self._runs & (self._runs - 1) == 0

    @contextmanager
    def _together(self, chunk: Chunk) -> Iterator[None]:
        """Raise on all ranks what batch norm says of a replica of one sample, which only some ranks may have."""
        bounds = chunk_bounds(chunk.batch_samples, self.num_replicas(self._world_size))
        alone = not self._options.one_device and any(stop - start == 1 for start, stop in bounds)
        problem = None
        try:
            yield
        except ValueError as error:
            if not alone or "more than 1 value per channel" not in str(error):
                raise
            problem = error
        if not alone:
            return
        if any(self.run.world.gather_objects(problem is not None)):
            raise ValueError(
                f"a batch of {chunk.batch_samples} samples in {self.num_replicas(self._world_size)} replicas gives one of them a single"
                " sample, of which batch norm has one value per channel: it needs two. Choose a batch size that leaves"
                " no replica a single sample, such as by drop_last=True."
            ) from problem

    def _run_step_end(self, outputs: Sequence[Any], chunk: Chunk, batch_index: int, reduction: Reduction) -> Any:
        """Return what `training_step_end` makes of the outputs of all replicas, the same on every rank."""
        step_end: Callable[[Any], Any] = self.run.module.training_step_end  # type: ignore[assignment]  # of Lightning 1.x
        if self._options.one_device and self._world_size == 1:
            gathered = outputs[0]
        else:
            gathered = gather_outputs(
                outputs,
                self.run.device,
                self.run.world.group,
                counted=not chunk.stand_in,
                numbers=not self._options.one_device,
                sparse=reduction.sparse,
            )
        with ExitStack() as stack:
            first = self._rank == 0
            stack.enter_context(logged_on_all_ranks_alike(self.run.module, chunk.batch_samples, counted=first))
            if not first:
                # All ranks add the whole batch: what is summed over them at the end must hold it once.
                stack.enter_context(metrics_kept(self.run.module))
            output = self._replicas.run_after(step_end, gathered, batch_index, self.num_replicas(self._world_size))
        if chunk.stand_in and not any(isinstance(leaf, Tensor) and leaf.requires_grad for _, leaf in leaves(gathered)):
            return _with_zero_gradients(output, reduction)
        return output

    def evaluate(
        self,
        stage: str,
        step: Callable[..., Any],
        context: Callable[[], Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run an evaluation step, and the hook of Lightning 1.x after it, on a batch that is this rank's alone.

        Args:
            stage: `"validation"` or `"test"`.
            step: The step, whose first argument is the batch.
            context: What the precision runs a step in.
            args: Its arguments, and
            kwargs: those given by name.
        """
        module = self.run.module
        if self._options.preset is None:
            return step(*args, **kwargs)
        step_end: Callable[[Any], Any] | None = getattr(module, f"{stage}_step_end", None)
        if step_end is None or self._options.one_device:
            with logged_of_whole_run(module):
                output = step(*args, **kwargs)
                if step_end is None:
                    return output
                with context():
                    return step_end(output)
        batch, run = _separated(step, args, kwargs)
        log, outputs = ReplicaLog(module, None, module.device, whole=True, own=True), []
        with log.collecting():
            for start, stop in chunk_bounds(batch_samples(batch), self.num_replicas(self.run.world.size)):
                if stop > start:
                    log.count(stop - start)
                    outputs.append(run(slice_batch(batch, start, stop)))
        with logged_of_whole_run(module), context():
            return step_end(join_outputs(outputs, module.device))

    def on_evaluation_start(self) -> None:
        """Have batch norm normalize each rank's batch by itself: in evaluation ranks have different ones."""
        if self._options.one_device:
            restore_batch_norm(self.run.module)

    def on_evaluation_end(self) -> None:
        """Have batch norm normalize over all ranks, where one device would."""
        if self._options.one_device and self.run.model is not None and self.run.world.size > 1:
            synchronize_batch_norm(self.run.module, self.run.world.group)

    def describe(self) -> str:
        """Return the run that is reproduced, and its replicas."""
        preset, world_size = self._options.preset, self.run.world.size
        gathered = ", training_step_end gets all outputs" if self.gathers else ""
        if self._options.one_device:
            return f"; equivalent to single_device{gathered}"
        replicas = self.num_replicas(world_size)
        idle = world_size - -(-replicas // -(-replicas // world_size))
        without = f" ({idle} of {world_size} ranks without one)" if idle else ""
        reference = f"; equivalent to {preset.name}" if preset is not None else ""
        return f"{reference}; {replicas} replicas{without}{gathered}"

    def teardown(self) -> None:
        """Put the module's batch norms back."""
        if self._run is not None:
            self.on_evaluation_start()


def _with_zero_gradients(output: Any, reduction: Reduction) -> Any:
    """Give every parameter a gradient of zero, where no replica's output takes one home."""
    zero = zero_loss(reduction.trained, reduction.sparse)
    if isinstance(output, Tensor):
        return output + zero
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        return {**output, "loss": output["loss"] + zero}
    return output


_APART = (
    "training_step gathers over the ranks, but with num_replicas above the number of ranks, or recompute_replicas=True,"
    " ranks run it different numbers of times, one replica after another. Return the outputs from training_step, with"
    " equivalent_to='data_parallel', and compute the loss in training_step_end, which gets those of all replicas"
)


def _separated(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Callable[[Any], Any]]:
    """Return the batch, and what runs the step on another one."""
    if args:
        return args[0], lambda batch: step(batch, *args[1:], **kwargs)
    name = next(iter(kwargs))
    return kwargs[name], lambda batch: step(**{**kwargs, name: batch})


@contextmanager
def _without_traces(module: LightningModule) -> Iterator[None]:
    with nothing_logged(module), metrics_kept(module, alike=False):
        yield
