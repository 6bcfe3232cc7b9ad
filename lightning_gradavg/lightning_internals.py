"""Every private name of Lightning, torch and torchmetrics that this package touches, each with its reason.

Public interfaces do not offer what is done here. `PRIVATE` lists the names by their owner, read in lightning 2.5.0 and
2.6.6, torch 2.4.0 and 2.13.0, and torchmetrics 1.4.0 and 1.9.0; `NEWER` those that came with a later
release, whose absence is an answer. `missing()` tells which of them the installed releases have not: look there first
when a release breaks something. No other file of the package may touch one (`tests/test_lightning_internals.py`).
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision as MixedPrecision
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

if TYPE_CHECKING:  # the core, which touches names of torch, works without Lightning and torchmetrics
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
    from lightning.pytorch.trainer.states import RunningStage
    from torchmetrics import Metric

__all__ = [
    "BEFORE_TRANSFER",
    "NEWER",
    "PRIVATE",
    "BatchNorm",
    "EvaluationPass",
    "MetricInside",
    "MixedPrecision",
    "SignalHooks",
    "TorchDispatchMode",
    "TrainingLoop",
    "after_backward",
    "averages_of",
    "backend_name",
    "broadcast_from_first",
    "cloned",
    "copy_each",
    "defers_reduction",
    "fetched_here",
    "finds_learning_rate",
    "flushes_static_graph",
    "in_backward",
    "injects_samplers",
    "is_interactive",
    "iterator_of",
    "last_rates",
    "leave_batch_norm_alone",
    "let_go",
    "limited_batches",
    "missing",
    "neutral_result",
    "put_back",
    "reduced_parameters",
    "replace_sync_control",
    "require_dimensions",
    "restore_evaluation_loops",
    "scale_each",
    "set_injection_of_samplers",
    "sharded_modules",
    "sparse_parts",
    "start_method",
    "start_no_processes",
    "store_of_world",
    "stored",
    "syncs_batch_norm",
    "timeout_of",
    "version_of",
    "versions_of",
    "views_of",
    "within_notes",
    "without_gradient_hooks",
    "writes_in_place",
]

_LOOPS = "lightning.pytorch.loops"
_CONNECTORS = "lightning.pytorch.trainer.connectors"
_DDP = "torch.nn.parallel.distributed:DistributedDataParallel"

PRIVATE: Mapping[str, str] = {
    "lightning.fabric.strategies:ModelParallelStrategy": "_backward_sync_control",
    "lightning.fabric.utilities.imports:": "_IS_INTERACTIVE",
    f"{_LOOPS}.evaluation_loop:_EvaluationLoop": (
        "_combined_loader _logged_outputs _results _store_dataloader_outputs"
    ),
    f"{_LOOPS}.fit_loop:_FitLoop": "_combined_loader _should_accumulate",
    f"{_LOOPS}.prediction_loop:_PredictionLoop": "_combined_loader _predictions",
    f"{_LOOPS}.training_epoch_loop:_TrainingEpochLoop": "_batches_that_stepped _num_ready_batches_reached",
    "lightning.pytorch.overrides.distributed:": "_IndexBatchSamplerWrapper",
    "lightning.pytorch.overrides.distributed:_IndexBatchSamplerWrapper": "_batch_sampler",
    "lightning.pytorch.strategies:DDPStrategy": "_ddp_comm_state _layer_sync _register_ddp_hooks _start_method",
    "lightning.pytorch.trainer.trainer:Trainer": "_accelerator_connector _active_loop _logger_connector",
    "lightning.pytorch.core.module:LightningModule": "_on_before_batch_transfer",
    f"{_CONNECTORS}.data_connector:": "_parse_num_batches",
    f"{_CONNECTORS}.logger_connector.result:": "_Metadata _ResultMetric _Sync",
    f"{_CONNECTORS}.logger_connector.result:_Sync": "_should",
    "lightning.pytorch.tuner.lr_finder:": "_LRCallback",
    "lightning.pytorch.utilities.combined_loader:CombinedLoader": "_iterator _mode _spec",
    "torch:": "_C _foreach_copy_ _foreach_mul_",
    "torch:Tensor": "_backward_hooks _indices _values _version",
    "torch._C:": "_current_graph_task_id _nn",
    "torch.autograd:Variable": "_execution_engine",
    "torch.distributed:": "_broadcast_coalesced _composable",
    "torch.distributed._composable.fsdp:FSDPModule": "_get_fsdp_state",
    "torch.distributed:ProcessGroup": "_get_backend",
    "torch.distributed.distributed_c10d:": "_world",
    "torch.nn.modules.batchnorm:": "_BatchNorm",
    "torch.nn.modules.batchnorm:_BatchNorm": "_check_input_dim",
    "torch.nn.parallel.distributed:": "_MixedPrecision",
    "torch._ops:OpOverload": "_schema",
    "torch.optim.lr_scheduler:LRScheduler": "_last_lr",
    "torch.utils:": "_python_dispatch",
    _DDP: "_build_params_for_reducer",
    "torch.utils.data:DataLoader": "_get_iterator _iterator",
    "torchmetrics:Metric": "_computed _reductions _update_count",
    "torch.utils.data.dataloader:_SingleProcessDataLoaderIter": "_dataset_fetcher",
}
"""Names by `module:Class` of their owner, or `module:`."""

NEWER: Mapping[str, Mapping[str, str]] = {
    "lightning>=2.6": {
        "lightning.pytorch.strategies:DDPStrategy": "_pl_static_graph_delay_done",
        f"{_LOOPS}.training_epoch_loop:_TrainingEpochLoop": "_broadcast_sigterm_tensor",
        "lightning.pytorch.trainer.trainer:Trainer": "_signal_connector",
        f"{_CONNECTORS}.signal_connector:_SignalConnector": "_sigterm_notifier_fn _slurm_sigusr_handler_fn",
    },
    "torch>=2.13": {"torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": "_fsdp_param_groups"},
    "torch>=2.6": {"torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": "_fsdp_param_group"},
    "torch>=2.7": {"torch._C._distributed_c10d:Backend.Options": "_timeout"},
}
"""Names of which the package asks whether they are there, by the release that has them first."""


def missing(private: Mapping[str, str] = PRIVATE, newer: Mapping[str, Mapping[str, str]] = NEWER) -> list[str]:
    """Return the names that the installed releases have not, as `module:Class.name`. Empty where all is as expected."""
    there = [private, *(names for release, names in newer.items() if RequirementCache(release))]
    listed = ((owner, name) for names in there for owner, each in names.items() for name in each.split())
    return [f"{owner}.{name}".replace(":.", ":") for owner, name in listed if not _has(owner, name)]


def _has(owner: str, name: str) -> bool:
    module, _, cls = owner.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return False
    for part in filter(None, cls.split(".")):
        found = getattr(found, part, None)
    # What a constructor sets is no attribute of the class: it stands in its text.
    bases = inspect.getmro(found) if inspect.isclass(found) else ()
    return hasattr(found, name) or any(f"self.{name}" in _source(base) for base in bases)


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):  # of an extension module
        return ""


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return what serves a device in a process group: the group's own name may be `cpu:gloo,cuda:nccl`.

    `ProcessGroup._get_backend`: `torch.distributed.get_backend` returns the name of the whole configuration.
    """
    backend: Any = group._get_backend(device)
    name: str = backend.name()
    return name


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return how long a process group waits for a rank; None where its backend does not tell (`options._timeout`)."""
    options: Any = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def reduced_parameters(model: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters that DDP reduces, in the order in which its messages count them.

    `DistributedDataParallel._build_params_for_reducer`: nothing public tells them.
    """
    parameters: list[nn.Parameter] = model._build_params_for_reducer()[0]
    return parameters


def flushes_static_graph(strategy: Any) -> bool:
    """Return whether Lightning starts the reduction of a static graph's first backward in manual optimization.

    `DDPStrategy._pl_static_graph_delay_done`, there since lightning 2.6.
    """
    return hasattr(strategy, "_pl_static_graph_delay_done")


def defers_reduction(strategy: Any) -> bool:
    """Return whether the reduction of the backward that runs now happens in Lightning's `post_backward`: see above."""
    return not getattr(strategy, "_pl_static_graph_delay_done", True)


def syncs_batch_norm(strategy: Any) -> bool:
    """Return whether Lightning is about to turn batch norm into SyncBatchNorm.

    `ParallelStrategy._layer_sync`: what `Trainer(sync_batchnorm=True)` sets.
    """
    return strategy._layer_sync is not None


class SignalHooks:
    """Where Lightning asks all ranks whether to end, and what it does on SIGTERM, and when SLURM ends a job.

    `_TrainingEpochLoop._broadcast_sigterm_tensor`, `_SignalConnector._sigterm_notifier_fn` and `received_sigterm`,
    there since lightning 2.6, which blocks every rank at every batch, and `_slurm_sigusr_handler_fn`: see
    `lightning_gradavg.termination`.

    Args:
        loop: The training epoch loop.
        connector: The signal connector.
    """

    _BROADCAST, _NOTIFIER, _REQUEUE = "_broadcast_sigterm_tensor", "_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"

    def __init__(self, loop: Any, connector: Any) -> None:
        self._loop, self._connector = loop, connector

    @classmethod
    def of(cls, trainer: Any) -> SignalHooks | None:
        """Return those of a trainer, None if it has none."""
        loop, connector = trainer.fit_loop.epoch_loop, getattr(trainer, "_signal_connector", None)
        there = hasattr(type(loop), cls._BROADCAST) and hasattr(type(connector), cls._NOTIFIER)
        return cls(loop, connector) if there else None

    def replace(self, agree: Callable[[], None], notice: Callable[..., None], requeue: Callable[..., None]) -> None:
        """Have these called instead."""
        setattr(self._loop, self._BROADCAST, agree)
        setattr(self._connector, self._NOTIFIER, notice)
        setattr(self._connector, self._REQUEUE, requeue)

    def restore(self) -> None:
        """Leave the trainer as it was."""
        vars(self._loop).pop(self._BROADCAST, None)
        for name in (self._NOTIFIER, self._REQUEUE):
            vars(self._connector).pop(name, None)

    def requeue(self, *args: Any) -> None:
        """Write a checkpoint, and have SLURM queue the job again, as Lightning does."""
        getattr(type(self._connector), self._REQUEUE)(self._connector, *args)

    @property
    def received(self) -> bool:
        """Whether the run is to end."""
        return bool(self._connector.received_sigterm)

    @received.setter
    def received(self, value: bool) -> None:
        self._connector.received_sigterm = value


def is_interactive() -> bool:
    """Return whether this is a notebook or a prompt, where no script can be started again.

    `lightning.fabric.utilities.imports._IS_INTERACTIVE`, asked for late, since tests replace it.
    """
    # The core imports no Lightning.
    from lightning.fabric.utilities import imports  # noqa: PLC0415  # see above

    return bool(imports._IS_INTERACTIVE)


def start_method(strategy: Any) -> str:
    """Return how a strategy starts its processes: `DDPStrategy._start_method`."""
    method: str = strategy._start_method
    return method


def leave_batch_norm_alone(strategy: Any) -> None:
    """Have Lightning not turn batch norm into SyncBatchNorm: see `syncs_batch_norm`."""
    strategy._layer_sync = None


class MetricInside:
    """What torchmetrics keeps of a metric beside its states: `Metric._update_count`, `_computed` and `_reductions`.

    Args:
        metric: The metric.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    @property
    def updates(self) -> int:
        """How often it was updated. Of a metric that never was, `compute` warns."""
        return self._metric._update_count

    @updates.setter
    def updates(self, count: int) -> None:
        self._metric._update_count = count

    @property
    def reductions(self) -> dict[str, Any]:
        """What reduces each of its states over the ranks."""
        return dict(self._metric._reductions)

    @reductions.setter
    def reductions(self, reductions: Mapping[str, Any]) -> None:
        self._metric._reductions = dict(reductions)

    def forget(self) -> None:
        """Have it compute anew: it remembers the value that it computed last."""
        self._metric._computed = None


def put_back(metric: Metric, states: Mapping[str, Any], updates: int) -> None:
    """Give a metric the states and the number of updates of before. Its `reset` knows those of the beginning."""
    for name, state in states.items():
        setattr(metric, name, state)
    inside = MetricInside(metric)
    inside.updates = updates
    inside.forget()


_BROADCAST_BYTES = 250 * 2**20  # as DistributedDataParallel broadcasts its buffers


def broadcast_from_first(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Write rank 0's tensors into those of all ranks of a group, None for that of all, in few messages.

    `torch.distributed._broadcast_coalesced`: `broadcast` sends one tensor at a time.
    """
    if tensors:
        of_all: Any = dist.group.WORLD
        dist._broadcast_coalesced(of_all if group is None else group, list(tensors), _BROADCAST_BYTES, 0)


def injects_samplers(trainer: Any) -> bool:
    """Return whether Lightning gives loaders a sampler for each rank.

    `Trainer._accelerator_connector.use_distributed_sampler`: it is asked for every loader, of training or not.
    """
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def set_injection_of_samplers(trainer: Any, value: bool) -> None:
    """Have Lightning give the loaders that it prepares next a sampler for each rank, or not: see above."""
    trainer._accelerator_connector.use_distributed_sampler = value


class TrainingLoop:
    """What Lightning's training loop reads, and whether it is at the end of an epoch.

    `_FitLoop._combined_loader` and `_should_accumulate`, `CombinedLoader._iterator` and `_spec`,
    `_TrainingEpochLoop._num_ready_batches_reached` and `_batches_that_stepped`.
    A batch comes to the strategy in the user's own type, and nothing public tells which iterator it came from.

    Args:
        fit_loop: The Trainer's.
    """

    def __init__(self, fit_loop: Any) -> None:
        self._loop = fit_loop

    @property
    def epoch(self) -> Any:
        """What reads the loaders in the epoch under way, another object in each; None before the first."""
        return getattr(self._loop._combined_loader, "_iterator", None)

    @property
    def iterators(self) -> list[Any]:
        """Those of the loaders in the epoch under way, in order. The shorter of two loaders gets several in turn."""
        iterators: list[Any] = getattr(self.epoch, "iterators", [])
        return iterators

    @property
    def structure(self) -> Any:
        """The loaders' structure, which is that of their batches: a `TreeSpec` of `torch.utils._pytree`."""
        return self._loop._combined_loader._spec

    @property
    def cycles(self) -> bool:
        """Whether the shorter of several loaders is begun anew until the longest has ended: `CombinedLoader._mode`."""
        return bool(self._loop._combined_loader._mode == "max_size_cycle")

    @property
    def epoch_ended(self) -> bool:
        """Whether no further batch of the epoch will be trained on, although loaders may have some."""
        return bool(self._loop.epoch_loop._num_ready_batches_reached())

    @property
    def between_batches(self) -> bool:
        """Whether the next batch is read or moved, and no hook of a batch is running: `batch_progress`."""
        progress = self._loop.epoch_loop.batch_progress.current
        return bool(progress.ready == progress.completed)

    @property
    def ready(self) -> int:
        """Batches of the epoch that reached training: one more than the number of the batch in training."""
        return int(self._loop.epoch_loop.batch_progress.current.ready)

    @property
    def processed(self) -> int:
        """Batches of the epoch that were trained on."""
        return int(self._loop.epoch_loop.batch_progress.current.processed)

    @property
    def completed(self) -> int:
        """Batches of the epoch whose hooks have been called, too."""
        return int(self._loop.epoch_loop.batch_progress.current.completed)

    @property
    def accumulates(self) -> bool:
        """Whether the window goes on after the batch in training."""
        return bool(self._loop._should_accumulate())

    @property
    def step(self) -> int:
        """The step that Lightning's own callbacks log with: the optimizer steps before this one."""
        steps: int = self._loop.epoch_loop._batches_that_stepped
        return steps

    def restart_at(self, batch: int) -> None:
        """Have a resumed epoch go on at a batch, which is trained on again if it was, or was interrupted."""
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


def finds_learning_rate(trainer: Any) -> bool:
    """Return whether Lightning is searching for a learning rate: `_LRCallback` is there while it does."""
    return any(type(callback).__name__ == "_LRCallback" for callback in trainer.callbacks)


def last_rates(scheduler: LRScheduler) -> Any:
    """Return what a scheduler computed last, another object after every step: `LRScheduler._last_lr`."""
    return vars(scheduler).get("_last_lr")


def limited_batches(stage: RunningStage, length: float, limit: float) -> float:
    """Return how many batches of a loader `limit_*_batches` leaves: `_parse_num_batches`, with Lightning's errors.

    Raises:
        MisconfigurationException: If it is a fraction of an unknown length, or leaves nothing of a loader.
    """
    # The core imports no Lightning.
    from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches  # noqa: PLC0415  # see above

    return _parse_num_batches(stage, length, limit)


class EvaluationPass:
    """The evaluation loop under way, and where it computes what was logged.

    `Trainer._active_loop` and `_logger_connector`; `_combined_loader` of the loops, with `CombinedLoader._mode`;
    `_EvaluationLoop._results`, `_logged_outputs` and `_store_dataloader_outputs`; `_PredictionLoop._predictions`.
    No hook comes between the last batch of an evaluation and the computation of its results.

    Args:
        trainer: The Trainer.

    Attributes:
        mode: How several loaders are read: `"sequential"`, or together, as `CombinedLoader` names it.
        loaders: The loaders that are read, in order.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._loop = trainer, trainer._active_loop
        combined = self._loop._combined_loader
        self.mode: str = combined._mode
        self.loaders: list[Any] = list(combined.flattened)

    @property
    def predictions(self) -> list[list[Any]]:
        """Of a prediction loop those of each loader, which the Trainer returns; nothing where it returns none."""
        predictions: list[list[Any]] = self._loop._predictions
        return predictions if self._loop.return_predictions else []

    @property
    def results(self) -> dict[str, Any]:
        """What was logged, by key."""
        results: dict[str, Any] = self._loop._results
        return results

    def compute_at_end(self, complete: Callable[[], None]) -> None:
        """Have the results of all loaders computed once all were read, after `complete`, and not of each after its own.

        In stock, ranks that have no batch of a loader compute the results of fewer loaders than the others.
        """
        loop, connector = self._loop, self._trainer._logger_connector

        def end() -> Any:
            complete()
            count = loop.num_dataloaders
            for index in range(count) if self.mode == "sequential" and count > 1 else (None,):
                loop._results.dataloader_idx = index
                loop._logged_outputs.append(connector.update_eval_epoch_metrics())
            _restore(loop)
            return loop.on_run_end()

        loop._store_dataloader_outputs, loop.on_run_end = connector.epoch_end_reached, end


def _restore(loop: Any) -> None:
    for name in ("on_run_end", "_store_dataloader_outputs"):
        vars(loop).pop(name, None)


def neutral_result(
    fields: Mapping[str, Any], reduce: Callable[..., Any], *, synced: bool, tensor: bool
) -> _ResultMetric:
    """Return what `log` makes of a value, before it is updated: `_Metadata`, `_Sync._should` and `_ResultMetric`.

    Args:
        fields: Of the metadata.
        reduce: The reduction over the ranks. It must equal what Lightning compares with in the next epoch.
        synced: Whether it is reduced over the ranks.
        tensor: Whether a number or tensor was logged, and not a `Metric`.
    """
    # The core imports no Lightning.
    from lightning.pytorch.trainer.connectors.logger_connector import result  # noqa: PLC0415  # see above

    meta = result._Metadata(**fields)
    meta.sync = result._Sync(_should=synced, fn=reduce)
    metric = result._ResultMetric(meta, tensor)
    metric._update_count = 1
    return metric


def restore_evaluation_loops(trainer: Any) -> None:
    """Leave the loops as they were, whose evaluation may have failed."""
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        _restore(loop)


def within_notes(batch_sampler: Any, function: Callable[[Any], Any]) -> Any:
    """Return `function` of a batch sampler, inside of what notes its indices for prediction writers.

    `_IndexBatchSamplerWrapper._batch_sampler`: Lightning looks for this class.
    """
    if type(batch_sampler).__name__ == "_IndexBatchSamplerWrapper":
        return type(batch_sampler)(function(batch_sampler._batch_sampler))
    return function(batch_sampler)


def cloned(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a `DataLoader` with other attributes, of any subclass, without a constructor that may not know them.

    `DataLoader._iterator` holds its worker processes, which are not shared.
    """
    copy = object.__new__(type(loader))
    copy.__dict__.update({**loader.__dict__, "_iterator": None, **attributes})
    return copy


def iterator_of(read: Callable[[Any], Any]) -> property:
    """Return the attribute `_iterator` of what stands for a loader: Lightning shuts down worker processes through it.

    Args:
        read: Returns, of the object with that attribute, the loader that is really read.
    """
    return property(lambda self: read(self)._iterator, lambda self, value: setattr(read(self), "_iterator", value))


_KEPT: list[dist.ProcessGroup] = []


def let_go(group: dist.ProcessGroup, *, failed: bool) -> None:
    """Destroy a process group; ranks that wait for this one in it fail, as gloo closes its connections.

    In torch 2.4 a group is deleted by whoever holds Python's lock, and joins threads that may wait for the lock to let
    go of their tensors: seen once in some 200 trainings. There it is kept until the process ends, unless one failed.
    """
    dist.destroy_process_group(group)
    if not failed and not RequirementCache("torch>=2.6"):
        _KEPT.append(group)


def store_of_world() -> Any:
    """Return the store that the default process group was made with: `distributed_c10d._world.pg_map`."""
    of_all: Any = dist.group.WORLD
    return dist.distributed_c10d._world.pg_map[of_all][1]


class _AfterBackward:
    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        self._ended, self._failed, self._called = ended, failed, False

    def __call__(self) -> None:
        self._called = True
        # DDP queued the end of its reduction while the backward ran.
        torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def __del__(self) -> None:
        if not self._called:
            self._failed()


def after_backward(ended: Callable[[], None], failed: Callable[[], None]) -> None:
    """Have a function called after the backward that runs now, and after DDP has ended its reduction.

    `torch.autograd.Variable._execution_engine`, as FSDP does it. It lets go of what was queued where a backward raises.

    Args:
        ended: Called after the backward.
        failed: Called instead where it raises.
    """
    torch.autograd.Variable._execution_engine.queue_callback(_AfterBackward(ended, failed))


def in_backward() -> bool:
    """Return whether autograd is running a backward: `_current_graph_task_id`, which checkpointing asks, too."""
    return bool(torch._C._current_graph_task_id() != -1)


def require_dimensions(norm: BatchNorm, input: Tensor) -> None:  # noqa: A002  # torch's name
    """Raise as batch norm does for an input of other dimensions: `_BatchNorm._check_input_dim`."""
    norm._check_input_dim(input)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written in place: `Tensor._version`, which autograd's notes name."""
    return tensor._version


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return `version_of` each of several tensors."""
    return [tensor._version for tensor in tensors]


def stored(tensor: Tensor) -> Tensor:
    """Return what memory a tensor has here: the values of a sparse one (`Tensor._values`), this rank's of a DTensor."""
    if hasattr(tensor, "to_local"):  # torch 2.4 has DTensor elsewhere
        local: Tensor = tensor.to_local()
        return local
    return tensor._values() if tensor.is_sparse else tensor


def sharded_modules(module: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was called on, in which every other is a parent or a child.

    `torch.distributed._composable.fsdp`: torch 2.4 and 2.5 have `FSDPModule` nowhere else.
    """
    from torch.distributed._composable.fsdp import FSDPModule  # noqa: PLC0415  # slow, and only for sharded models

    return [each for each in module.modules() if isinstance(each, FSDPModule)]


def averages_of(module: Any) -> list[tuple[int, float | None]]:
    """Return over how many ranks a sharded module averages gradients, and what a user has it divide by instead.

    `FSDPModule._get_fsdp_state`: its `_fsdp_param_groups`, in older torch the one `_fsdp_param_group`, and their
    `mesh_info` and `gradient_divide_factor`.
    """
    state = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    sizes = ("shard_mesh_size", "replicate_mesh_size")
    return [
        (
            math.prod(getattr(group.mesh_info, size, 1) for size in sizes),
            getattr(group, "gradient_divide_factor", getattr(group, "reduce_scatter_divide_factor", None)),
        )
        for group in groups
        if group is not None
    ]


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices and values of a sparse tensor, coalesced or not: `_indices` and `_values`."""
    return tensor._indices(), tensor._values()


def views_of(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a flat tensor in the shapes of others: `torch._C._nn.unflatten_dense_tensors`, as DDP has."""
    return list(torch._C._nn.unflatten_dense_tensors(flat, list(like)))


def copy_each(destinations: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy tensors into others by one kernel: `torch._foreach_copy_`, the foreach functions have no public names."""
    torch._foreach_copy_(list(destinations), list(sources))


def scale_each(tensors: Iterable[Tensor], factor: Any) -> None:
    """Multiply tensors by a number, or a 0-dim tensor, by one kernel: `torch._foreach_mul_`."""
    held = list(tensors)
    if held:
        torch._foreach_mul_(held, factor)


class _SyncControl:
    def __init__(self, stock: Any, hold: Callable[..., Any]) -> None:
        self._stock, self._hold = stock, hold

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Any:  # Fabric's signature
        return self._hold(self._stock.no_backward_sync(module, enabled), enabled=enabled)


def replace_sync_control(strategy: Any, hold: Callable[..., Any]) -> None:
    """Have `fabric.no_backward_sync` enter `hold(stock, enabled=)`, with the context of the stock strategy.

    `Strategy._backward_sync_control`: nothing public tells a strategy of Fabric that a context begins.
    """
    strategy._backward_sync_control = _SyncControl(strategy._backward_sync_control, hold)


BEFORE_TRANSFER = "_on_before_batch_transfer"
"""`LightningModule._on_before_batch_transfer` gets every batch as the loader made it: no hook of callbacks does."""


def start_no_processes(strategy: Any) -> None:
    """Have a strategy start no processes, because the ranks are there.

    `DDPStrategy._start_method`: one that comes by name, such as "ddp_spawn", has no other way to be told.
    """
    strategy._start_method = "popen"


def writes_in_place(operator: Any) -> bool:
    """Return whether an operator of torch changes an argument: `OpOverload._schema`."""
    return bool(operator._schema.is_mutable)


@contextmanager
def without_gradient_hooks(module: nn.Module) -> Iterator[None]:
    """Take the hooks on a module's parameters off inside.

    `Tensor._backward_hooks`: a hook is removed by the handle alone, which only the user has.
    """
    hooks = [(parameter, parameter._backward_hooks) for parameter in module.parameters()]
    try:
        for parameter, _ in hooks:
            parameter._backward_hooks = None
        yield
    finally:
        for parameter, own in hooks:
            parameter._backward_hooks = own


@contextmanager
def fetched_here(watch: Callable[[Any], None]) -> Iterator[None]:
    """Have every `DataLoader` load in this process, and show what fetches its samples, whoever made the loader.

    `DataLoader._get_iterator` begins a pass, and its iterator's `_dataset_fetcher` collates.

    Args:
        watch: Is given the fetcher of every pass that begins.
    """
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

    DataLoader._get_iterator = begun  # type: ignore[assignment]
    try:
        yield
    finally:
        DataLoader._get_iterator = own  # type: ignore[method-assign]
