"""Training and evaluation steps run once per replica, and the loss of all replicas' outputs."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn

from lightning_gradavg.collectives.gather import collectives_refused
from lightning_gradavg.data.batches import Chunk, chunk_bounds
from lightning_gradavg.data.collated import batch_samples, slice_batch
from lightning_gradavg.data.training_data import SplitTraining
from lightning_gradavg.presets import Plan
from lightning_gradavg.reduction.terms import zero_loss
from lightning_gradavg.replication.batch_norm import restore_batch_norm, synchronize_batch_norm
from lightning_gradavg.replication.equivalence import has_step_end
from lightning_gradavg.replication.log import (
    ReplicaLog,
    logged_of_whole_run,
    logged_on_all_ranks_alike,
    metrics_kept,
    nothing_logged,
)
from lightning_gradavg.replication.outputs import gather_outputs, join_outputs
from lightning_gradavg.replication.random_streams import ReplicaStreams
from lightning_gradavg.replication.replicas import Replicas

__all__ = ["OutputsOfReplicas", "ReplicaSteps", "evaluate"]


class OutputsOfReplicas(list[tuple[Any, int]]):
    """The output and the number of samples of each of a rank's replicas, each with a loss of its own."""


class ReplicaSteps:
    """Runs the training steps of one `fit`.

    Args:
        module: The module to train.
        plan: What the user's options come to.
        data: The training data of this rank.
        group: The process group whose ranks share the replicas.
        device: This rank's device.
        seed: The same on all ranks; all random numbers in training steps follow from it.
        parameters: Those that the reduction sees, and
        sparse: the `id` of those whose gradients are sparse.

    Attributes:
        gathers: Whether the loss is that of `training_step_end`.
    """

    def __init__(
        self,
        module: LightningModule,
        plan: Plan,
        data: SplitTraining,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        seed: int,
        parameters: Sequence[nn.Parameter],
        sparse: Container[int],
    ) -> None:
        self._module, self._plan, self._data = module, plan, data
        self._group, self._device = group, device
        self._parameters, self._sparse = parameters, sparse
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._num_replicas = plan.num_replicas or self._world_size
        self._one_device = plan.preset is not None and plan.preset.synchronizes_statistics
        self._runs, self._checked_uneven = 0, False
        self.gathers = plan.preset is not None and has_step_end(module)
        self._log = ReplicaLog(module, group, device, whole=plan.preset is not None)
        self._replicas = Replicas(
            module,
            ReplicaStreams(seed, device),
            group,
            quiet=partial(_without_traces, module),
            recompute=plan.recompute_replicas,
            several=self._num_replicas > self._world_size or plan.recompute_replicas,
            keeps_assigned=self._one_device or self._num_replicas == 1,
            ignored=getattr(module, "_ddp_params_and_buffers_to_ignore", ()),
        )

    @contextmanager
    def in_place_of(self, name: str) -> Iterator[None]:
        """Have Lightning's call of the method `name` of the module run it once per replica, within the context."""
        module = self._module
        own = vars(module).get(name)
        setattr(module, name, partial(self.run, getattr(module, name)))
        try:
            yield
        finally:
            delattr(module, name)
            if own is not None:
                setattr(module, name, own)

    def weight(self, chunk: Chunk, samples: int) -> float:
        """Return the weight of the loss of so many samples, of one replica or of all of them."""
        if self.gathers:
            return chunk.batch_samples
        return 1 / chunk.batch_replicas if self._plan.counts_replicas and samples > 0 else samples

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a training step on the batch that `data` has noted.

        Returns:
            What `training_step_end` returns, or `training_step` of the only replica, or `OutputsOfReplicas`.
        """
        chunk = self._data.chunk
        assert chunk is not None
        batch_index = self._module.trainer.fit_loop.epoch_loop.total_batch_idx
        batch, run = _separated(step, args, kwargs)

        def run_counted(part: tuple[int, Any]) -> Any:
            samples, samples_of_replica = part
            self._log.count(samples)
            return run(samples_of_replica)

        several = self._num_replicas > self._world_size or self._plan.recompute_replicas
        check = self._one_device and self._is_to_check(chunk)
        slices = [] if chunk.stand_in else self._data.slices(batch)
        parts = [(each.replica or 0, (each.samples, each.batch)) for each in slices]
        with self._log.collecting(), collectives_refused(_APART) if several else nullcontext(), self._together(chunk):
            if chunk.stand_in:
                nobody = self._num_replicas + 1 + self._rank
                with metrics_kept(self._module):
                    stand_in = self._replicas.run_stand_in(run_counted, (0, batch), batch_index, nobody, check=check)
                outputs = [stand_in]
            else:
                outputs = self._replicas.run(run_counted, parts, batch_index, check=check)
        if self.gathers:
            return self._run_step_end(outputs, chunk, batch_index)
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
        bounds = chunk_bounds(chunk.batch_samples, self._num_replicas)
        alone = not self._one_device and any(stop - start == 1 for start, stop in bounds)
        problem = None
        try:
            yield
        except ValueError as error:
            if not alone or "more than 1 value per channel" not in str(error):
                raise
            problem = error
        if not alone:
            return
        failed = [problem is not None]
        if self._world_size > 1:
            failed = [False] * self._world_size
            dist.all_gather_object(failed, problem is not None, group=self._group)
        if any(failed):
            raise ValueError(
                f"a batch of {chunk.batch_samples} samples in {self._num_replicas} replicas gives one of them a single"
                " sample, of which batch norm has one value per channel: it needs two. Choose a batch size that leaves"
                " no replica a single sample, such as by drop_last=True."
            ) from problem

    def _run_step_end(self, outputs: Sequence[Any], chunk: Chunk, batch_index: int) -> Any:
        """Return what `training_step_end` makes of the outputs of all replicas, the same on every rank."""
        step_end: Callable[[Any], Any] = self._module.training_step_end  # type: ignore[assignment]  # of Lightning 1.x
        if self._one_device and self._world_size == 1:
            gathered = outputs[0]
        else:
            gathered = gather_outputs(
                outputs,
                self._device,
                self._group,
                counted=not chunk.stand_in,
                numbers=not self._one_device,
                sparse=self._sparse,
            )
        with ExitStack() as stack:
            first = self._rank == 0
            stack.enter_context(logged_on_all_ranks_alike(self._module, chunk.batch_samples, counted=first))
            if not first:
                # All ranks add the whole batch: what is summed over them at the end must hold it once.
                stack.enter_context(metrics_kept(self._module))
            output = self._replicas.run_after(step_end, gathered, batch_index, self._num_replicas)
        if chunk.stand_in and not any(tensor.requires_grad for tensor in _tensors(gathered)):
            return self._with_zero_gradients(output)
        return output

    def _with_zero_gradients(self, output: Any) -> Any:
        """Give every parameter a gradient of zero, where no replica's output takes one home."""
        zero = zero_loss(self._parameters, self._sparse)
        if isinstance(output, Tensor):
            return output + zero
        if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
            return {**output, "loss": output["loss"] + zero}
        return output

    def start(self) -> None:
        """Have batch norm normalize over all ranks, where one device would."""
        if self._one_device and self._world_size > 1:
            synchronize_batch_norm(self._module, self._group)

    def stop(self) -> None:
        """Have batch norm normalize each rank's batch by itself, as in evaluation, where ranks have different ones."""
        if self._one_device:
            restore_batch_norm(self._module)


def evaluate(
    module: LightningModule,
    plan: Plan,
    num_replicas: int,
    stage: str,
    step: Callable[..., STEP_OUTPUT],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    context: Callable[[], AbstractContextManager[None]],
) -> STEP_OUTPUT:
    """Run an evaluation step, and the hook of Lightning 1.x after it, on a batch that is this rank's alone.

    Args:
        module: The module.
        plan: What the user's options come to.
        num_replicas: Chunks of the batch.
        stage: `"validation"` or `"test"`.
        step: The step, whose first argument is the batch.
        args: Its arguments, and
        kwargs: those given by name.
        context: What the precision runs a step in.
    """
    if plan.preset is None:
        return step(*args, **kwargs)
    step_end: Callable[[Any], STEP_OUTPUT] | None = getattr(module, f"{stage}_step_end", None)
    if step_end is None or plan.preset.synchronizes_statistics:
        with logged_of_whole_run(module):
            output = step(*args, **kwargs)
            if step_end is None:
                return output
            with context():
                return step_end(output)
    batch, run = _separated(step, args, kwargs)
    size, outputs = batch_samples(batch), []
    log = ReplicaLog(module, None, module.device, whole=True, own=True)
    with log.collecting():
        for start, stop in chunk_bounds(size, num_replicas):
            if stop > start:
                log.count(stop - start)
                outputs.append(run(slice_batch(batch, start, stop)))
    with logged_of_whole_run(module), context():
        return step_end(join_outputs(outputs, module.device))


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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
