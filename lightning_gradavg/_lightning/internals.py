"""Every private name of Lightning, torch and torchmetrics that this package touches, each with its reason.

No public interface offers these, read in lightning 2.5.0 and 2.6.6, torch 2.4.0 and 2.13.0, and torchmetrics 1.4.0 and
1.9.0. No other file may touch one (ruff's SLF001 and PLC2701, `tests/test_tools.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

if TYPE_CHECKING:  # the core, which touches names of torch, works without Lightning and torchmetrics
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
    from lightning.pytorch.trainer.states import RunningStage
    from torchmetrics import Metric

BatchNorm = torch.nn.modules.batchnorm._BatchNorm
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend of one device: `torch.distributed.get_backend` may return `cpu:gloo,cuda:nccl`."""
    backend: Any = group._get_backend(device)
    return str(backend.name())


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the timeout of a process group, if its backend tells it."""
    options: Any = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def flushes_static_graph(strategy: Any) -> bool:
    """Return whether Lightning (since 2.6) starts the reduction of a static graph's first manual backward."""
    return hasattr(strategy, "_pl_static_graph_delay_done")


def syncs_batch_norm(strategy: Any) -> bool:
    """Return whether `Trainer(sync_batchnorm=True)` is about to convert batch norm."""
    return strategy._layer_sync is not None


def signal_hooks(trainer: Any) -> list[tuple[Any, str]]:
    """Return where lightning 2.6 agrees on the end of the run, and answers SIGTERM and SLURM's signal; none before."""
    loop, connector = trainer.fit_loop.epoch_loop, getattr(trainer, "_signal_connector", None)
    own = ["_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"]
    methods = [(loop, "_broadcast_sigterm_tensor"), *((connector, name) for name in own)]
    return methods if all(hasattr(type(owner), name) for owner, name in methods) else []


def leave_batch_norm_alone(strategy: Any) -> None:
    """Have Lightning keep batch norm as it is."""
    strategy._layer_sync = None


SYNC, REDUCTIONS = "_sync_dist", "_reductions"
"""How a metric of torchmetrics reduces its states over the ranks, and the reduction of each."""
UPDATES, COMPUTED = "_update_count", "_computed"
"""How often it was updated, and its last value."""


def put_back(metric: Metric, states: Mapping[str, Any], updates: int) -> None:
    """Give a metric earlier states and number of updates; its `reset` gives it the first ones."""
    for name, value in {**states, UPDATES: updates, COMPUTED: None}.items():
        setattr(metric, name, value)


_BROADCAST_BYTES = 250 * 2**20  # as DistributedDataParallel broadcasts its buffers


def broadcast_from_first(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Write rank 0's tensors into those of all ranks of a group, in few messages; `broadcast` sends one at a time."""
    if tensors:
        of_all: Any = dist.group.WORLD
        dist._broadcast_coalesced(of_all if group is None else group, list(tensors), _BROADCAST_BYTES, 0)


def injects_samplers(trainer: Any) -> bool:
    """Return whether Lightning gives every loader a distributed sampler."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def set_injection_of_samplers(trainer: Any, value: bool) -> None:
    """Have Lightning give the loaders that it prepares next a distributed sampler, or not."""
    trainer._accelerator_connector.use_distributed_sampler = value


def _of_epoch(progress: str) -> property:
    return property(lambda self: getattr(self._loop.epoch_loop.batch_progress.current, progress))


class TrainingLoop:
    """What Lightning's training loop reads, and how far it is: a batch does not say which iterator it came from."""

    def __init__(self, fit_loop: Any) -> None:
        self._loop = fit_loop

    @property
    def epoch(self) -> Any:
        """What reads the loaders in this epoch, a new object in each; None before the first."""
        return getattr(self._loop._combined_loader, "_iterator", None)

    @property
    def iterators(self) -> list[Any]:
        """Those of the loaders in this epoch, in order. The shorter of two loaders gets several in turn."""
        return getattr(self.epoch, "iterators", [])

    def epoch_of(self, iterator: Any) -> Any:
        """Return the epoch in progress if it reads this iterator; None of one by which a user looks at the data."""
        epoch = self.epoch
        return epoch if iterator in getattr(epoch, "iterators", ()) else None

    @property
    def structure(self) -> Any:
        """The structure of the loaders and their batches: a `TreeSpec` of `torch.utils._pytree`."""
        return self._loop._combined_loader._spec

    @property
    def epoch_ended(self) -> bool:
        """Whether the epoch trains on no further batch, although loaders may have some, or fewer than they said."""
        return bool(self._loop.epoch_loop._num_ready_batches_reached() or self._loop._data_fetcher.done)

    @property
    def batch_number(self) -> int:
        """The number in its epoch of the batch whose hooks run."""
        return int(self.ready) - 1

    # Batches of the epoch: those that reached training, and those that were trained on.
    ready, processed = map(_of_epoch, ("ready", "processed"))

    @property
    def skips_backward(self) -> bool:
        """Whether training steps run without a backward, as where weight averaging (SWA) updates batch norm."""
        return bool(self._loop._skip_backward)

    @property
    def accumulates(self) -> bool:
        """Whether the window goes on after the batch in training."""
        return bool(self._loop._should_accumulate())

    @property
    def accumulation(self) -> int:
        """Batches per optimizer step. A `GradientAccumulationScheduler` tells the Trainer when the epoch begins."""
        trainer = self._loop.trainer
        schedules = (each for each in trainer.callbacks if hasattr(each, "get_accumulate_grad_batches"))
        told = (each.get_accumulate_grad_batches(trainer.current_epoch) for each in schedules)
        return int(next(told, trainer.accumulate_grad_batches))

    @property
    def step(self) -> int:
        """Optimizer steps before this one: the step that Lightning's own callbacks log with."""
        return int(self._loop.epoch_loop._batches_that_stepped)

    def leave_ended_epoch(self) -> None:
        """Have a run that is resumed at the last batch of an epoch begin the next one."""
        epochs, loop = self._loop.epoch_progress.total, self._loop.epoch_loop
        if epochs.ready == epochs.processed:
            # Lightning 2.6 ends the epoch in `reset`, but takes itself to be within it: the next one would not count as
            # begun, and another checkpoint would not resume it.
            self._loop.reset_restart_stage()
        if loop.batch_progress.is_last_batch and getattr(loop, "restarted_on_train_batch_end", False):
            # Of loaders without length Lightning would go on counting the batches of the old one.
            loop.batch_progress.increment_completed()
            for progress in (loop.batch_progress, loop.scheduler_progress, loop.automatic_optimization.optim_progress):
                progress.reset_on_run()
            loop.val_loop.batch_progress.total.reset()
            loop.reset_restart_stage()

    def restart_at(self, batch: int) -> None:
        """Have a resumed epoch go on at a batch, even if it was trained on before."""
        loop = self._loop.epoch_loop
        progress = loop.batch_progress
        processed, repeats = self.processed, self.ready > self.processed or batch < self.processed
        for name in ("ready", "started", "processed", "completed"):
            ahead = getattr(progress.current, name) - processed
            setattr(progress.total, name, getattr(progress.total, name) + batch - processed)
            setattr(progress.current, name, batch + ahead)
        if repeats and not self.accumulates:
            # Lightning takes the last batch to have stepped, without having been counted.
            loop._batches_that_stepped -= 1


class LoaderSetUp:
    """The loaders of a stage that Lightning prepares, from its barrier on until its loop has them.

    Args:
        trainer: The trainer that prepares them.
        stage: `"train"`, `"val"`, `"test"` or `"predict"`.
    """

    def __init__(self, trainer: Any, stage: str) -> None:
        self.stage = stage
        self._loop = _loop_of(trainer, stage)
        self._before = self._loaders

    @property
    def _loaders(self) -> tuple[int, int]:
        # A user's own CombinedLoader stays, and gets another list. Until then the loop holds both.
        combined = self._loop._combined_loader
        return id(combined), id(getattr(combined, "_flattened", None))

    @property
    def under_way(self) -> bool:
        """Whether the loop still lacks the loaders: a loader that is processed then is one of them."""
        return self._loaders == self._before


def _loop_of(trainer: Any, stage: str) -> Any:
    if stage == "train":
        return trainer.fit_loop
    if stage == "val" and trainer.state.fn == "fit":
        return trainer.fit_loop.epoch_loop.val_loop
    return {"val": trainer.validate_loop, "test": trainer.test_loop, "predict": trainer.predict_loop}[stage]


def finds_learning_rate(trainer: Any) -> bool:
    """Return whether Lightning is searching for a learning rate."""
    return any(type(callback).__name__ == "_LRCallback" for callback in trainer.callbacks)


def limited_batches(stage: RunningStage, length: float, limit: float) -> float:
    """Return how many batches of a loader `limit_*_batches` leaves, or raise Lightning's errors."""
    from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches  # noqa: PLC0415  # as above

    return _parse_num_batches(stage, length, limit)


class EvaluationPass:
    """The evaluation loop under way: no hook comes between its last batch and the computation of its results."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._loop = trainer, trainer._active_loop
        combined = self._loop._combined_loader
        self.mode: str = combined._mode
        self.loaders: list[Any] = list(combined.flattened)

    @property
    def begun(self) -> bool:
        """Whether a batch was taken."""
        return bool(self._loop.batch_progress.current.ready)

    @property
    def predictions(self) -> list[list[Any]]:
        """The predictions per loader that the Trainer returns, if any."""
        return self._loop._predictions if self._loop.return_predictions else []

    def compute_at_end(self, complete: Callable[[dict[str, Any]], None]) -> None:
        """Compute the results of all loaders at the end, after `complete` got what was logged, by key.

        Stock computes each loader's after it, so that ranks without a batch of one compute fewer than the others.
        """
        loop, connector = self._loop, self._trainer._logger_connector

        def end() -> Any:
            complete(loop._results)
            count = loop.num_dataloaders
            for index in range(count) if count > 1 else (None,):
                loop._results.dataloader_idx = index
                loop._logged_outputs.append(connector.update_eval_epoch_metrics())
            _restore(loop)
            return loop.on_run_end()

        loop._store_dataloader_outputs, loop.on_run_end = connector.epoch_end_reached, end


def _restore(loop: Any) -> None:
    for name in ("on_run_end", "_store_dataloader_outputs"):
        vars(loop).pop(name, None)


def neutral(entry: _ResultMetric) -> _ResultMetric:
    """Return what adds nothing to other ranks' values of what was logged. To be sent, it lacks what reduces it."""
    meta = entry.meta
    made = type(entry)(replace(meta, _sync=type(meta.sync)(_should=meta.sync.should)), entry.is_tensor)
    made._update_count = 1
    vars(made).setdefault("value", None)  # of a metric, whose text is pickled
    for state in made.metric_state:
        setattr(made, state, getattr(made, state).to(getattr(entry, state).dtype))
    return made


def reduce_by(entry: _ResultMetric, reduce: Callable[..., Any]) -> None:
    """Have a value that was sent be reduced as those that were logged; Lightning compares this in the next epoch."""
    entry.meta.sync = type(entry.meta.sync)(_should=entry.meta.sync.should, fn=reduce)


def restore_evaluation_loops(trainer: Any) -> None:
    """Leave the loops as they were, even if their evaluation failed."""
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        _restore(loop)


def within_notes(batch_sampler: Any, function: Callable[[Any], Any]) -> Any:
    """Return `function` of a batch sampler, inside the wrapper that notes its indices for prediction writers."""
    if type(batch_sampler).__name__ == "_IndexBatchSamplerWrapper":
        return type(batch_sampler)(function(batch_sampler._batch_sampler))
    return function(batch_sampler)


def cloned(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a copy of a `DataLoader` of any subclass with other attributes and without its worker processes."""
    copy = object.__new__(type(loader))
    copy.__dict__.update({**loader.__dict__, "_iterator": None, **attributes})
    return copy


def iterator_of(read: Callable[[Any], Any]) -> property:
    """Return the attribute `_iterator`, through which Lightning shuts down workers, of what stands for `read(self)`."""
    return property(lambda self: read(self)._iterator, lambda self, value: setattr(read(self), "_iterator", value))


def store_of_world() -> Any:
    """Return the store that the default process group was made with."""
    of_all: Any = dist.group.WORLD
    return dist.distributed_c10d._world.pg_map[of_all][1]


class _AfterBackward:
    """Queued callbacks of autograd: `ended` after the backward and what others have queued in it, else `failed`.

    The engine drops its queue when a backward, or a callback in the queue, raises. A dropped callback is freed.
    """

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        self._ended, self._failed, self._has_run, self._is_queued_again = ended, failed, False, False

    def __call__(self) -> None:
        if not self._is_queued_again:
            # DDP queued the end of its reduction while the backward ran, and it may raise: behind that.
            self._is_queued_again = True
            torch.autograd.Variable._execution_engine.queue_callback(self)
            return
        self._has_run = True
        self._ended()

    def __del__(self) -> None:
        if not self._has_run:
            self._failed()


def after_backward(ended: Callable[[], None], failed: Callable[[], None]) -> None:
    """Call `ended` after the backward that runs now and DDP's reduction, or `failed` if one of them raises."""
    torch.autograd.Variable._execution_engine.queue_callback(_AfterBackward(ended, failed))


def parameters_known_to(model: Any) -> int:
    """Return how many parameters DDP reduces: those that trained when it was made."""
    return int(model._get_ddp_logging_data()["num_parameter_tensors"])


version_of = attrgetter("_version")
"""Returns how often a tensor was written in place."""

buffers_of = attrgetter("_buffers")
"""Returns the mapping in which a module keeps its own buffers."""


def stored(tensor: Tensor) -> Tensor:
    """Return the values of a sparse tensor, this rank's part of a DTensor, and any other tensor itself."""
    if hasattr(tensor, "to_local"):  # torch 2.4 has DTensor elsewhere
        local: Tensor = tensor.to_local()
        return local
    return tensor._values() if tensor.is_sparse else tensor


def sharded_modules(module: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was called on. Torch 2.4 and 2.5 have `FSDPModule` here only."""
    from torch.distributed._composable.fsdp import FSDPModule  # noqa: PLC0415  # slow, and only for sharded models

    return [each for each in module.modules() if isinstance(each, FSDPModule)]


def averages_of(module: Any) -> list[tuple[int, float]]:
    """Return over how many ranks a sharded module sums gradients, and what it divides them by."""
    state = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    found = []
    for group in filter(None, groups):
        sizes = ("shard_mesh_size", "replicate_mesh_size")
        ranks = math.prod(getattr(group.mesh_info, size, 1) for size in sizes)
        divisor = getattr(group, "gradient_divide_factor", getattr(group, "reduce_scatter_divide_factor", None))
        found.append((ranks, divisor or ranks))
    return found


def discard_unsharded_gradients(module: nn.Module) -> None:
    """Free what backwards without a reduction have accumulated in the unsharded parameters of a sharded model."""
    for submodule in sharded_modules(module):
        state = submodule._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in filter(None, groups):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                unsharded = getattr(parameter, "_unsharded_param", None)
                if unsharded is not None:
                    unsharded.grad = None


def buckets_of(tensors: Sequence[Tensor], size: int) -> list[list[Tensor]]:
    """Return tensors in buckets of one dtype and device and about that many bytes, as DDP cuts them."""
    if not tensors:
        return []
    indices, _ = dist._compute_bucket_assignment_by_size(list(tensors), [size])
    return [[tensors[index] for index in of_bucket] for of_bucket in indices]


def views_of(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a flat tensor in the shapes of others."""
    return list(torch._C._nn.unflatten_dense_tensors(flat, list(like)))


def copy_each(destinations: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy tensors into others by one kernel. The foreach functions have no public names."""
    torch._foreach_copy_(list(destinations), list(sources))


def scale_each(tensors: Iterable[Tensor], factor: Any) -> None:
    """Multiply tensors by a number or a 0-dim tensor, by one kernel."""
    held = list(tensors)
    if held:
        torch._foreach_mul_(held, factor)


class SyncControl:
    """What `fabric.no_backward_sync` enters from here on; it notes whether the backward that runs now is `holding`."""

    def __init__(self, strategy: Any) -> None:
        self._stock, self.holding = strategy._backward_sync_control, False
        strategy._backward_sync_control = self

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:  # Fabric's signature
        """Enter the stock context if it is enabled: at the end of any other one, Fabric stops the reduction."""
        with self._stock.no_backward_sync(module, enabled) if enabled else nullcontext():
            self.holding = enabled
            try:
                yield
            finally:
                self.holding = False


def start_no_processes(strategy: Any) -> None:
    """Have a strategy start no processes, even one by name such as "ddp_spawn"."""
    strategy._start_method = "popen"


writes_in_place = attrgetter("_schema.is_mutable")
"""Returns whether an operator of torch changes an argument."""


@contextmanager
def fetched_here(watch: Callable[[Any], None]) -> Iterator[None]:
    """Have every `DataLoader` load in this process, and call `watch` with the fetcher of every pass that begins."""
    own = DataLoader._get_iterator

    def begun(loader: Any) -> Any:
        alone = {"num_workers": 0, "timeout": 0, "prefetch_factor": None, "persistent_workers": False}
        kept = {name: vars(loader)[name] for name in alone if name in vars(loader)}
        vars(loader).update(alone)  # past its __setattr__, which refuses
        try:
            iterator: Any = own(loader)
        finally:
            vars(loader).update(kept)
        if hasattr(iterator, "_dataset_fetcher"):
            watch(iterator._dataset_fetcher)
        return iterator

    DataLoader._get_iterator = begun  # type: ignore[assignment]  # replaced on purpose
    try:
        yield
    finally:
        DataLoader._get_iterator = own  # type: ignore[method-assign]  # put back
