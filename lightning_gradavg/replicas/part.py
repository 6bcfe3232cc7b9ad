"""Training and evaluation steps run once per replica, and the loss of all replicas' outputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lightning_gradavg.batches.chunks import Chunk, chunk_bounds
from lightning_gradavg.batches.part import Batches, ReplicaSlice, SplitBatches
from lightning_gradavg.lightning_internals import syncs_batch_norm
from lightning_gradavg.methods import logged_as, replaced
from lightning_gradavg.options import Options
from lightning_gradavg.part import Part, Run, Saved
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.gather import collectives_refused
from lightning_gradavg.reduction.reduction import Reduction
from lightning_gradavg.replicas.log import ReplicaLog, metrics_kept, of_whole_run
from lightning_gradavg.replicas.obstacles import has_step_end, obstacles, remarks
from lightning_gradavg.replicas.outputs import gather_outputs, join_outputs
from lightning_gradavg.replicas.random_streams import ReplicaStreams
from lightning_gradavg.replicas.state import ReplicaState
from lightning_gradavg.tree import batch_samples, slice_batch

__all__ = ["ManyReplicas", "OutputsOfReplicas", "Replicas", "logged_whole"]


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
        return self._options.num_replicas or world_size

    def samples(self, chunk: Chunk | None) -> float | None:
        """Return the weight of a loss that has none: the samples of its batch, None where they are not known."""
        return None if chunk is None else self._weight(chunk, chunk.samples)

    def _weight(self, chunk: Chunk, samples: int) -> float:
        """Return the weight of the loss of so many samples of a chunk."""
        return samples

    def step(self, reduction: Reduction, batches: Batches) -> AbstractContextManager[Any]:
        """Surround a training step."""
        return batches.training_step()

    def read(self, output: Any, reduction: Reduction, chunk: Chunk | None) -> Any:
        """Return a training step's output with one loss, having handed its loss to the reduction."""
        return reduction.read(output, self.samples(chunk))


class ManyReplicas(Replicas):
    """Runs the replicas of a loader batch on any number of ranks, so that the ranks no longer matter.

    A training step of Lightning runs the user's once per replica of this rank (`ReplicaState`), collects what they log
    (`ReplicaLog`), and hands on the losses of all of them, or the one that `training_step_end` makes of their outputs.

    Args:
        options: What the user's options come to.
        static_graph: Whether DDP was told that every iteration is alike.

    Attributes:
        gathers: Whether the loss is that of `training_step_end`.
    """

    def __init__(self, options: Options, *, static_graph: bool) -> None:
        super().__init__(options)
        self._static_graph, self._counts_replicas = static_graph, options.counts_replicas
        self._saved_seed: int | None = None
        self._seed = 0
        self.gathers = False
        self._evaluating = ExitStack()

    def setup(self, run: Run) -> None:
        """Name what cannot be reproduced. Before DDP wraps the module, which has objections of its own."""
        options, preset = self._options, self._options.preset
        found = obstacles(
            run.module,
            options,
            world_size=run.world.size,
            device=run.device,
            static_graph=self._static_graph,
            sync_batchnorm=syncs_batch_norm(run.trainer.strategy),
        )
        if found and run.trainer.state.fn == TrainerFn.FITTING:
            what = f"equivalent_to={preset.name!r}" if preset is not None else f"num_replicas={options.num_replicas}"
            raise ValueError(f"{what} cannot hold:\n  " + "\n  ".join(found))
        super().setup(run)

    def configure_ddp(self, run: Run) -> None:
        """Prepare the replicas of a run."""
        super().configure_ddp(run)
        module, options, world = run.module, self._options, run.world
        self._ddp = run.ddp
        # All ranks take replica 0's, at the end of the forward that changes them.
        self._ddp.broadcast_buffers = False
        self._replicas = self.num_replicas(world.size)
        several = self._replicas > world.size
        # Ranks then run a step different numbers of times.
        apart = several or options.recompute_replicas
        self._refusing: Callable[[], AbstractContextManager[Any]] = (
            partial(collectives_refused, _APART) if apart else nullcontext
        )
        self.gathers = options.preset is not None and has_step_end(module)
        self._later = several and not self.gathers
        self._seed = self._agreed_seed(world)
        self._streams = ReplicaStreams(self._seed, run.device)
        self._log = ReplicaLog(module, world, whole=options.preset is not None)
        self._state = ReplicaState(
            module,
            self._streams,
            self._log,
            world,
            recompute=options.recompute_replicas,
            several=apart,
            keeps_assigned=self._keeps_assigned,
            ignored=self._ddp.parameters_to_ignore,
        )
        self.on_evaluation_end()

    @property
    def _keeps_assigned(self) -> bool:
        """Whether a tensor that is assigned in place of a buffer is kept."""
        return self._replicas == 1

    def _agreed_seed(self, world: World) -> int:
        """Return rank 0's seed, or that of the run that is resumed: ranks that were not seeded differ."""
        saved, self._saved_seed = self._saved_seed, None
        own = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))
        seed: int = world.from_first(own if saved is None else saved)
        return seed

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Save what all random numbers of training steps follow from."""
        saved["replica_seed"] = self._seed

    def load(self, saved: Saved) -> None:
        """Remember it for the next run."""
        self._saved_seed = saved.get("replica_seed")

    def _weight(self, chunk: Chunk, samples: int) -> float:
        """Return the weight of the loss of so many samples, of one replica or of all of them."""
        if self.gathers:
            return chunk.batch_samples
        if self._counts_replicas:
            return (samples > 0) / chunk.batch_replicas
        return samples

    @contextmanager
    def step(self, reduction: Reduction, batches: Batches) -> Iterator[None]:
        """Have Lightning's call of `training_step` run it once per replica."""
        module, model = self.run.module, self._ddp
        with ExitStack() as stack:
            if self._later and model.require_backward_grad_sync:
                # A forward for several backwards: DDP must not expect the gradients of the first, which stay local.
                reduction.prepare_later()
                stack.enter_context(model.no_sync())
            step = partial(self._run_step, module.training_step, reduction, batches)
            stack.enter_context(replaced(module, "training_step", step))
            yield

    def _run_step(
        self, step: Callable[..., Any], reduction: Reduction, batches: Batches, batch: Any, *args: Any
    ) -> Any:
        """Run a training step on the batch that `batches` has noted.

        Returns:
            What `training_step_end` returns, or `training_step` of the only replica, or `OutputsOfReplicas`.
        """
        assert isinstance(batches, SplitBatches)
        chunk = batches.chunk
        assert chunk is not None
        batch_index = self.run.trainer.fit_loop.epoch_loop.total_batch_idx
        slices, check = self.slices(batches, batch), self._is_to_check(chunk, batch_index)
        with self._log.collecting():
            with self._together(chunk), self._refusing():
                outputs = self._state.run(step, args, slices, batch_index, check=check)
            if self.gathers:
                return self._run_step_end(outputs, chunk, batch_index, reduction)
        if len(outputs) == 1:
            return outputs[0]
        return OutputsOfReplicas(zip(outputs, (each.samples for each in slices), strict=True))

    def slices(self, batches: SplitBatches, batch: Any) -> list[ReplicaSlice]:
        """Return the rank's replicas, each with its part of the batch."""
        return batches.slices(batch)

    def _is_to_check(self, chunk: Chunk, batch_index: int) -> bool:
        """Return whether ranks compare their buffers now."""
        return False

    @contextmanager
    def _together(self, chunk: Chunk) -> Iterator[None]:
        """Raise on all ranks what batch norm says of a replica of one sample, which only some ranks may have."""
        sizes = [stop - start for start, stop in chunk_bounds(chunk.batch_samples, self._replicas)]
        if 1 not in sizes:
            yield
            return
        problem = None
        try:
            yield
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            problem = error
        if any(self.run.world.gather_objects(problem is not None)):
            raise ValueError(
                f"a batch of {chunk.batch_samples} samples in {self._replicas} replicas gives one of them a single"
                " sample, of which batch norm has one value per channel: it needs two. Choose a batch size that leaves"
                " no replica a single sample, such as by drop_last=True."
            ) from problem

    def _run_step_end(self, outputs: Sequence[Any], chunk: Chunk, batch_index: int, reduction: Reduction) -> Any:
        """Return what `training_step_end` makes of the outputs of all replicas, the same on every rank."""
        module, world = self.run.module, self.run.world
        step_end: Callable[[Any], Any] = module.training_step_end  # type: ignore[assignment]  # of Lightning 1.x
        gathered = self._gathered(outputs, counted=not chunk.stand_in, sparse=reduction.sparse)
        # All ranks have the whole batch: what is summed over them must hold it once.
        first = world.rank == 0
        self._log.samples = chunk.batch_samples * first
        with self._streams.of(batch_index, self._replicas), nullcontext() if first else metrics_kept(module):
            return step_end(gathered)

    def _gathered(self, outputs: Sequence[Any], **options: Any) -> Any:
        """Return the outputs of all replicas as one, with options of `gather_outputs`. A collective operation."""
        return gather_outputs(outputs, self.run.device, self.run.world.group, **options)

    def read(self, output: Any, reduction: Reduction, chunk: Chunk | None) -> Any:
        """Return a training step's output with one loss, having handed each replica's to the reduction."""
        if not isinstance(output, OutputsOfReplicas):
            return self._read(output, reduction, self.samples(chunk))
        assert chunk is not None
        read = [self._read(of_replica, reduction, self._weight(chunk, samples)) for of_replica, samples in output]
        named = [one if isinstance(one, Mapping) else {"loss": one} for one in read]
        losses: list[Any] = [one.get("loss") for one in named]
        if any(loss is None for loss in losses):
            raise RuntimeError(
                "training_step returned no loss for one of the replicas of a batch. Return"
                ' {"loss": loss, "weight": 0} for samples that are not to count.'
            )
        of_samples = [loss * samples for loss, (_, samples) in zip(losses, output, strict=True)]
        keys = dict.fromkeys(key for one in named for key in one)
        joined = {key: self._joined([one.get(key) for one in named]) for key in keys if key != "loss"}
        return {**joined, "loss": sum(of_samples[1:], of_samples[0]) / chunk.samples}

    def _read(self, output: Any, reduction: Reduction, weight: float | None) -> Any:
        if self._counts_replicas and isinstance(output, Mapping) and output.get("weight") is not None:
            raise ValueError(
                f'training_step returned "weight": {output["weight"]!r}, but reduction={self._options.rule.name!r}'
                " gives every replica the same say. Leave the weight out, or leave reduction out."
            )
        return reduction.read(output, weight)

    def _joined(self, values: Sequence[Any]) -> Any:
        try:
            return join_outputs(values, self.run.device)
        except (TypeError, RuntimeError):  # of no tensors, or of shapes that do not fit
            return values

    def on_evaluation_start(self) -> None:
        """Have evaluation steps log the values of the whole run, and call the hooks of Lightning 1.x after them."""
        if self._options.preset is None:
            return
        module, stage = self.run.module, "test" if self.run.trainer.testing else "validation"
        step, step_end = getattr(module, f"{stage}_step"), getattr(module, f"{stage}_step_end", None)
        evaluate = partial(logged_whole, module, step) if step_end is None else partial(self._evaluate, step, step_end)
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
        return logged_whole(module, step_end, join_outputs(outputs, module.device))

    def on_evaluation_end(self) -> None:
        """Put the steps back."""
        self._evaluating.close()

    def describe(self) -> str:
        """Return the run that is reproduced, and its replicas."""
        preset, replicas, world_size = self._options.preset, self._replicas, self.run.world.size
        idle = world_size - -(-replicas // -(-replicas // world_size))
        without = f" ({idle} of {world_size} ranks without one)" if idle else ""
        reference = f"; equivalent to {preset.name}" if preset is not None else ""
        return f"{reference}; {replicas} replicas{without}{self._describe_gathering()}"

    def _describe_gathering(self) -> str:
        return ", training_step_end gets all outputs" if self.gathers else ""

    def teardown(self) -> None:
        """Put the module's steps back."""
        self._evaluating.close()


def logged_whole(module: LightningModule, step: Callable[..., Any], *args: Any) -> Any:
    """Run a step that logs values of the whole run."""
    with logged_as(module, of_whole_run):
        return step(*args)


_APART = (
    "training_step gathers over the ranks, but with num_replicas above the number of ranks, or recompute_replicas=True,"
    " ranks run it different numbers of times, one replica after another. Return the outputs from training_step, with"
    " equivalent_to='data_parallel', and compute the loss in training_step_end, which gets those of all replicas"
)
