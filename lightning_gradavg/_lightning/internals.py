"""Every private name of Lightning, torch and torchmetrics that this package touches, each with its reason.

No public interface offers these. No other file may touch one (ruff's SLF001 and PLC2701, `tests/test_tools.py`). A
comment `Private:` names what is touched, the releases in which it was read, what happens if a release drops it, and why
no public name serves:

    L  lightning 2.6.0 and 2.6.6
    T  torch 2.6.0 and 2.13.0
    M  torchmetrics 1.4.0 and 1.9.0

Names without an underscore are listed where Lightning documents them nowhere.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from enum import Enum, auto
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

if TYPE_CHECKING:  # the core, which touches names of torch, works without Lightning and torchmetrics
    from lightning.pytorch.trainer.states import RunningStage

# The base of all batch norms, also of SyncBatchNorm, has no public name of its own.
BatchNorm: Any = nn.BatchNorm1d.__base__
# Private: `torch.utils._python_dispatch` (T). Without it the import fails. Torch documents this class ("Extending
# PyTorch"), in a module without a public name; `TorchFunctionMode` does not see the operators of the backward.
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode


def store_of_world() -> Any:
    """Return the store that the ranks of the default process group share."""
    world: Any = dist.group.WORLD
    if hasattr(world, "get_group_store"):
        return world.get_group_store()
    # Private: `distributed_c10d._world.pg_map` (torch 2.6.0), where there is no public name yet. Without it no run of
    # several ranks begins.
    return dist.distributed_c10d._world.pg_map[world][1]


def injects_samplers(trainer: Any) -> bool:
    """Return whether Lightning gives every loader a distributed sampler."""
    # Private: `Trainer._accelerator_connector` (L). Without it a fit that splits batches fails with an AttributeError.
    # The Trainer keeps its option nowhere else, and once its sampler is in place, the user's is lost.
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def set_injection_of_samplers(trainer: Any, value: bool) -> None:
    """Have Lightning give the loaders that it prepares next a distributed sampler, or not."""
    # Private: as above. `_DataConnector._requires_distributed_sampler` reads it for each loader.
    trainer._accelerator_connector.use_distributed_sampler = value


def limited_batches(stage: RunningStage, length: float, limit: float) -> float:
    """Return how many batches of a loader `limit_*_batches` leaves, a number or a fraction of its length.

    Raises:
        MisconfigurationException: If a fraction leaves none, or the length is not known, as in Lightning.
    """
    from lightning.pytorch.utilities.exceptions import MisconfigurationException  # noqa: PLC0415  # the core works without

    if length == 0 or isinstance(limit, int):
        return min(length, limit)
    if math.isinf(length) and limit == 1:
        return length
    prefix = stage.dataloader_prefix
    if math.isinf(length):
        raise MisconfigurationException(
            f"limit_{prefix}_batches={limit} is a fraction of a loader that does not tell its length. Give a number of"
            " batches, or 1.0."
        )
    batches = int(length * limit)
    if batches == 0 and limit > 0:
        raise MisconfigurationException(
            f"limit_{prefix}_batches={limit} leaves none of {length} batches. Give {1 / length} or more, or a number of"
            " batches."
        )
    return batches


def start_no_processes(strategy: Any) -> None:
    """Have a strategy start no processes, even one by name such as "ddp_spawn"."""
    # Private: `DDPStrategy._start_method` (L). Without it `gradavg verify` would start processes for "ddp_spawn". The
    # constructor takes it, but the registry has made the strategy of such a name already.
    strategy._start_method = "popen"


class TrainingLoop:
    """What Lightning's training loop reads, and how far it is: a batch does not say which iterator it came from.

    Progress is public (`fit_loop.epoch_loop.batch_progress`, documented for custom loops); what else is read has a
    comment.
    """

    def __init__(self, fit_loop: Any) -> None:
        self._loop = fit_loop

    @property
    def epoch(self) -> Any:
        """What reads the loaders in this epoch, a new object in each; None before the first."""
        # Private: `_FitLoop._combined_loader` and `CombinedLoader._iterator` (L). Without the former no run begins.
        # Without the latter no loader is known to be read by training, and checkpoints do not note how far it is.
        # Public is `trainer.train_dataloader`, which a user may iterate, too.
        return getattr(self._loop._combined_loader, "_iterator", None)

    @property
    def iterators(self) -> list[Any]:
        """The iterators of the loaders in this epoch, in order. The shorter of two loaders gets several in turn."""
        return getattr(self.epoch, "iterators", [])

    def epoch_of(self, iterator: object) -> Any:
        """Return the epoch in progress if it reads this iterator; None of one by which a user looks at the data."""
        epoch = self.epoch
        if iterator in getattr(epoch, "iterators", ()):
            return epoch
        return None

    @property
    def epoch_ended(self) -> bool:
        """Whether the epoch trains on no further batch, although loaders may have some, or fewer than they said."""
        # After the last batch, Lightning counts the epoch as processed, and calls its hooks then. Before the first one,
        # both counts are 0, and a loader without length may have been read ahead.
        epochs = self._loop.epoch_progress.current
        return self.is_on_last_batch or 0 < epochs.ready == epochs.processed

    @property
    def is_on_last_batch(self) -> bool:
        """Whether no batch of the epoch follows the one that reached training last."""
        trainer = self._loop.trainer
        return bool(trainer.is_last_batch) or self.ready == trainer.num_training_batches

    @property
    def ready(self) -> int:
        """Batches of the epoch that reached training."""
        return int(self._loop.epoch_loop.batch_progress.current.ready)

    @property
    def processed(self) -> int:
        """Batches of the epoch that were trained on."""
        return int(self._loop.epoch_loop.batch_progress.current.processed)

    @property
    def total_ready(self) -> int:
        """Batches of the run that reached training, over all epochs."""
        return int(self._loop.epoch_loop.batch_progress.total.ready)

    @property
    def batch_number(self) -> int:
        """The number in its epoch of the batch whose hooks run."""
        return self.ready - 1

    @property
    def skips_backward(self) -> bool:
        """Whether training steps run without a backward, as where weight averaging (SWA) updates batch norm."""
        # In the epoch after its last one, `on_train_epoch_start` of SWA sets a private flag of the loop.
        from lightning.pytorch.callbacks import StochasticWeightAveraging  # noqa: PLC0415  # the core works without

        trainer = self._loop.trainer
        for callback in trainer.callbacks:
            if isinstance(callback, StochasticWeightAveraging) and trainer.current_epoch == callback.swa_end + 1:
                return True
        return False

    @property
    def accumulates(self) -> bool:
        """Whether the window goes on after the batch in training."""
        # As `_TrainingEpochLoop._should_accumulate`, for a strategy that leaves accumulation to Lightning. The tests of
        # short windows fail if a release counts otherwise.
        return self.ready % self._loop.trainer.accumulate_grad_batches != 0 and not self.is_on_last_batch

    @property
    def accumulation(self) -> int:
        """Batches per optimizer step. A `GradientAccumulationScheduler` tells the Trainer when the epoch begins."""
        trainer = self._loop.trainer
        # The scheduler sets `trainer.accumulate_grad_batches` in `on_train_epoch_start`; this may be asked before.
        for callback in trainer.callbacks:
            if hasattr(callback, "get_accumulate_grad_batches"):
                return int(callback.get_accumulate_grad_batches(trainer.current_epoch))
        return int(trainer.accumulate_grad_batches)

    @property
    def short_last_window(self) -> int:
        """Batches in the last window of an epoch if it is short; 0 if it is full, or the number of batches unknown."""
        batches = self._loop.trainer.num_training_batches
        if math.isinf(batches):
            return 0
        return int(batches % self.accumulation)

    @property
    def step(self) -> int:
        """Optimizer steps before this one: the step that Lightning's own callbacks log with."""
        # Private: `_TrainingEpochLoop._batches_that_stepped` (L). Without it the monitor fails. `trainer.global_step`
        # counts the steps of several optimizers, and values at such steps stand beside those that Lightning logs.
        return int(self._loop.epoch_loop._batches_that_stepped)

    def leave_ended_epoch(self) -> None:
        """Have a run that is resumed at the last batch of an epoch begin the next one.

        Called when training begins, after `_FitLoop.reset`, which has restored the progress of a checkpoint.
        """
        epochs = self._loop.epoch_progress.total
        loop = self._loop.epoch_loop
        if epochs.ready == epochs.processed:
            # Lightning 2.6 ends the epoch in `reset`, but takes itself to be within it: the next one would not count as
            # begun, and another checkpoint would not resume it.
            self._loop.reset_restart_stage()
        # Private: `_TrainingEpochLoop.restarted_on_train_batch_end` and `reset_restart_stage` (L).
        if loop.batch_progress.is_last_batch and getattr(loop, "restarted_on_train_batch_end", False):
            # Of loaders without length Lightning would go on counting the batches of the old one. `reset` does the same
            # where the number of batches is known.
            loop.batch_progress.increment_completed()
            for progress in (loop.batch_progress, loop.scheduler_progress, loop.automatic_optimization.optim_progress):
                progress.reset_on_run()
            loop.val_loop.batch_progress.total.reset()
            loop.reset_restart_stage()

    def restart_at(self, batch: int) -> None:
        """Have a resumed epoch go on at a batch, even if it was trained on before."""
        loop = self._loop.epoch_loop
        progress = loop.batch_progress
        processed = self.processed
        repeats = self.ready > processed or batch < processed
        for name in ("ready", "started", "processed", "completed"):
            total = getattr(progress.total, name)
            ahead = getattr(progress.current, name) - processed
            setattr(progress.total, name, total + batch - processed)
            setattr(progress.current, name, batch + ahead)
        if repeats and not self.accumulates:
            # Private: `_TrainingEpochLoop._batches_that_stepped` (L). Its `reset` has counted the last batch as one
            # that stepped, because a checkpoint is written before that is counted.
            loop._batches_that_stepped -= 1


def _evaluation_loop_of(trainer: Any) -> Any:
    """Return the loop that evaluates now."""
    if trainer.state.fn == "fit":
        return trainer.fit_loop.epoch_loop.val_loop
    loops = {"validate": trainer.validate_loop, "test": trainer.test_loop, "predict": trainer.predict_loop}
    return loops[trainer.state.fn]


class EvaluationPass:
    """The evaluation loop under way: no hook comes between its last batch and the computation of its results."""

    def __init__(self, trainer: Any) -> None:
        # Private: `_combined_loader` of the loops and `CombinedLoader._mode` (L). Without them exact evaluation fails
        # when a pass begins. Public are the loaders, as `trainer.val_dataloaders`, and not how they are combined.
        self._loop = _evaluation_loop_of(trainer)
        combined = self._loop._combined_loader
        self.mode: str = combined._mode
        self.loaders: list[Any] = list(combined.flattened)

    @property
    def results(self) -> dict[str, Any]:
        """What was logged, by Lightning's key: entries of its class `_ResultMetric`."""
        # Private: `_EvaluationLoop._results` (L). Without it exact evaluation fails at the end of a loader. Public are
        # the values, `trainer.callback_metrics`, and not the sums and numbers of samples that they come from.
        results: dict[str, Any] = self._loop._results
        return results

    def index_in_results(self, loader_index: int) -> int | None:
        """Return the index of a loader in what is logged: None of a single loader, whose keys then have no suffix."""
        if len(self.loaders) == 1:
            return None
        return loader_index

    @property
    def predictions(self) -> list[list[Any]]:
        """The predictions per loader that the Trainer returns, if any."""
        if not self._loop.return_predictions:
            return []
        # The property drops the outer list for a single loader.
        predictions: list[Any] = self._loop.predictions
        if len(self.loaders) == 1:
            return [predictions]
        return predictions

    def call_at_end(self, end: Callable[[], None]) -> None:
        """Call `end` after the last batch, before the hooks at the end; `store_results` is left to the caller.

        Stock computes what was logged of a loader after the last batch that it has of it. A rank without a batch would
        compute less than the others.
        """
        # Private: `_EvaluationLoop.on_run_end` and `_store_dataloader_outputs` (L). Without the former, exact
        # evaluation fails at the end of a pass; without the latter, results are stored twice. The first public hook
        # after the last batch, `on_validation_epoch_end`, comes when results are computed, and is the user's, too.
        loop = self._loop

        def end_run() -> Any:
            end()
            _restore(loop)
            return loop.on_run_end()

        loop._store_dataloader_outputs = lambda: None
        loop.on_run_end = end_run

    def store_results(self, loader_index: int) -> None:
        """Compute what was logged of a loader, unless it is computed already, and have the Trainer return it."""
        # Private: `_EvaluationLoop._results` and `_store_dataloader_outputs` (L). Without them exact evaluation fails
        # at the end of a loader. The method of the class: `call_at_end` has replaced that of the loop.
        loop = self._loop
        loop._results.dataloader_idx = self.index_in_results(loader_index)
        type(loop)._store_dataloader_outputs(loop)


def _restore(loop: Any) -> None:
    """Undo `call_at_end`: the methods of the class show again."""
    for name in ("on_run_end", "_store_dataloader_outputs"):
        vars(loop).pop(name, None)


def restore_evaluation_loops(trainer: Any) -> None:
    """Leave the loops as they were, even if their evaluation failed."""
    for loop in (
        trainer.fit_loop.epoch_loop.val_loop,
        trainer.validate_loop,
        trainer.test_loop,
        trainer.predict_loop,
    ):
        _restore(loop)


def sendable(entry: Any) -> Any:
    """Return a copy of what was logged that can be sent: on the CPU, and without what reduces it, or its metric.

    Args:
        entry: One of `EvaluationPass.results`.
    """
    # Documented nowhere: `meta` and `is_tensor` of an entry (L). Without them exact evaluation fails where something is
    # logged.
    sync = type(entry.meta.sync)()
    sync.should = entry.meta.sync.should
    meta = copy(entry.meta)
    meta.sync = sync
    sent = type(entry)(meta, entry.is_tensor)
    vars(sent).setdefault("value", None)  # of a metric, whose text is pickled
    for state in sent.metric_state:
        setattr(sent, state, getattr(entry, state).cpu())
    return sent


# Private: `Metric._sync_dist` and `Metric._reductions` (M). Without them exact evaluation fails where a metric is
# logged. A public `dist_sync_fn` gets one tensor, and neither its state's name nor how often the metric was updated; no
# public name tells the reduction that `add_state` was given.
SYNC = "_sync_dist"
"""How a metric of torchmetrics reduces its states over the ranks."""
REDUCTIONS = "_reductions"
"""The reduction of each state."""
# Private: `Metric._computed` (M). Setting another name would do nothing: a rank that has not updated a metric since it
# was computed would return the old value, and the others wait for it. Only `reset` and an update forget it, which
# change the states, too; without a cache at all (`compute_with_cache`), a value that a user asks for again on one rank
# would hang.
COMPUTED = "_computed"
"""The last value of a metric; None if it is to be computed anew."""


def forget_noted_indices(batch_sampler: Any) -> list[Any]:
    """Return the list in which a batch sampler notes its indices for prediction writers, emptied; else an empty one."""
    # Documented nowhere: `seen_batch_indices` of Lightning's wrapper (L). Without it, prediction writers get the
    # indices of all ranks under exact evaluation.
    if hasattr(batch_sampler, "seen_batch_indices"):
        batch_sampler.seen_batch_indices = []
        noted: list[Any] = batch_sampler.seen_batch_indices
        return noted
    return []


def cloned(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a copy of a `DataLoader` of any subclass with other attributes and without its worker processes."""
    # Private: `DataLoader._iterator` (T), which holds workers that persist. Without it two loaders read from them. A
    # shallow copy would share it, and `DataLoader` has no method that ends workers.
    # The constructor of a subclass may take anything, and `DataLoader.__setattr__` refuses a sampler.
    clone = object.__new__(type(loader))
    clone.__dict__.update(loader.__dict__)
    clone.__dict__["_iterator"] = None
    clone.__dict__.update(attributes)
    return clone


def show_dataset_of_worker(dataset: Any) -> None:
    """Have `torch.utils.data.get_worker_info().dataset` be a dataset, in a worker."""
    # Not private, but the object is read-only (T). Torch's own recipe seeds `dataset.rng` there.
    object.__setattr__(torch.utils.data.get_worker_info(), "dataset", dataset)


def iterator_of(read: Callable[[Any], Any]) -> property:
    """Return the attribute `_iterator`, through which Lightning shuts down workers, of what stands for `read(self)`."""

    # Private: `DataLoader._iterator` (T). Lightning looks at it when it resets a `CombinedLoader` (L:
    # `_shutdown_workers_and_reset_iterator`). Without it workers that persist outlive a run. It asks for no other name.
    def get(wrapper: Any) -> Any:
        return read(wrapper)._iterator

    def put(wrapper: Any, iterator: Any) -> None:
        read(wrapper)._iterator = iterator

    return property(get, put)


@contextmanager
def fetched_here(watch: Callable[[Any], None]) -> Iterator[None]:
    """Have every `DataLoader` load in this process, and call `watch` with the fetcher of every pass that begins."""
    # Private: `_BaseDataLoaderIter._dataset_fetcher` (T). Without it `gradavg verify` does not see which samples were
    # read: it holds the dataset and the `collate_fn` of a pass, and a loader refuses another dataset.
    make_iterator = DataLoader.__iter__
    in_this_process = {"num_workers": 0, "timeout": 0, "prefetch_factor": None, "persistent_workers": False}

    def begun(loader: Any) -> Any:
        before = {name: vars(loader)[name] for name in in_this_process if name in vars(loader)}
        vars(loader).update(in_this_process)  # past its __setattr__, which refuses
        try:
            iterator: Any = make_iterator(loader)
        finally:
            vars(loader).update(before)
        if hasattr(iterator, "_dataset_fetcher"):
            watch(iterator._dataset_fetcher)
        return iterator

    DataLoader.__iter__ = begun  # type: ignore[method-assign]  # replaced on purpose
    try:
        yield
    finally:
        DataLoader.__iter__ = make_iterator  # type: ignore[method-assign]  # put back


class _CallbackState(Enum):
    """Where an `_AfterBackward` is."""

    QUEUED = auto()  # before DDP's own callback, which ends its reduction
    QUEUED_AGAIN = auto()  # behind DDP's
    HAS_RUN = auto()  # `ended` was called


class _AfterBackward:
    """A queued callback of autograd: it calls `ended` after the backward and DDP's reduction, else `failed`.

    | state | autograd calls it | autograd drops it, and it is freed |
    |---|---|---|
    | QUEUED | it queues itself again | `failed` |
    | QUEUED_AGAIN | `ended` | `failed` |
    | HAS_RUN | | nothing |

    The engine drops its queue when a backward, or a callback in the queue, raises. No exception tells that.
    """

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        self._ended = ended
        self._failed = failed
        self._state = _CallbackState.QUEUED

    def __call__(self) -> None:
        if self._state is _CallbackState.QUEUED:
            # DDP queued the end of its reduction while the backward ran, and it may raise: behind that.
            self._state = _CallbackState.QUEUED_AGAIN
            torch.autograd.Variable._execution_engine.queue_callback(self)
            return
        self._state = _CallbackState.HAS_RUN
        self._ended()

    def __del__(self) -> None:
        if self._state is not _CallbackState.HAS_RUN:
            self._failed()


def after_backward(ended: Callable[[], None], failed: Callable[[], None]) -> None:
    """Call `ended` after the backward that runs now and DDP's reduction, or `failed` if one of them raises."""
    # Private: `Variable._execution_engine.queue_callback` (T), which DDP and FSDP2 use, too. Without it no backward of
    # Fabric or `GradAvgReducer` runs under a rule. A hook of the last leaf comes before the end of DDP's reduction.
    torch.autograd.Variable._execution_engine.queue_callback(_AfterBackward(ended, failed))


def in_reentrant_checkpoint() -> bool:
    """Return whether the first forward of a reentrant `torch.utils.checkpoint` runs, which keeps no graph."""
    if torch.is_grad_enabled():
        return False
    # Private: `torch.utils.checkpoint.CheckpointFunction` (T). Without it no `gather` or batch norm over all ranks runs
    # without gradients in a step. Torch tells nobody that a checkpoint runs; gradients are off under `no_grad`, too.
    checkpointed = torch.utils.checkpoint.CheckpointFunction.forward.__code__
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is checkpointed:
            return True
        frame = frame.f_back
    return False


def parameters_known_to(model: Any) -> int:
    """Return how many parameters DDP reduces: those that trained when it was made."""
    # Private: `DistributedDataParallel._get_ddp_logging_data` (T). Without it no model can be registered.
    # What requires a gradient now is public, and what did when DDP was made is not: unfrozen in between, a parameter
    # would drift apart.
    return int(model._get_ddp_logging_data()["num_parameter_tensors"])


def require_reduced(model: Any) -> None:
    """Raise DDP's own error if it has begun to reduce in a backward and not ended, as parameters got no gradient.

    A collective operation in the first call after the first reduction, in which DDP orders its buckets.
    """
    # Private: `Reducer._rebuild_buckets` (T), with which DDP's forward begins. Without it a run ends with an
    # AttributeError after its first epoch. No public name asks DDP before its next forward, and after the last batch
    # there is none: this rank would go on to another exchange, while others wait for it in a bucket (`faults.py`: a
    # head that the last step of one rank does not use).
    model.reducer._rebuild_buckets()


# Private: `Tensor._version` (T). Without it a change in place is not seen: an AttributeError in the first step. To
# compare values, the host would wait for the accelerator. `torch.autograd.graph` has a function that raises a version,
# and none that reads it.
version_of = attrgetter("_version")
"""Returns how often a tensor was written in place."""

# Private: `Module._buffers` (T). Without it buffers cannot be exchanged for those of a replica. `named_buffers` walks
# the modules anew, twice in a step, which takes ten times as long.
buffers_of = attrgetter("_buffers")
"""Returns the mapping in which a module keeps its own buffers."""


def copy_each(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others by one kernel."""
    # Private: `torch._foreach_copy_` (T). Without it `average_gradients` fails. The foreach functions have no public
    # names, and a loop starts a kernel for each tensor.
    torch._foreach_copy_(list(destinations), list(sources))


def scale_each(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply tensors by a number, by one kernel."""
    # Private: `torch._foreach_mul_` (T). Without it no rule but the plain mean works on shards. As above.
    torch._foreach_mul_(list(tensors), factor)


def class_of_sharded_modules() -> type[Any]:
    """Return the class that `fully_shard` adds to a module's."""
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415  # slow, and only for sharded models

    return FSDPModule


def sharded_modules(module: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was called on."""
    sharded = class_of_sharded_modules()
    return [submodule for submodule in module.modules() if isinstance(submodule, sharded)]


def _parameter_groups(module: Any) -> list[Any]:
    """Return the groups of parameters that a sharded module gathers and reduces together."""
    # Private: `FSDPModule._get_fsdp_state` (T), `FSDPState._fsdp_param_group` (torch 2.6.0) and `_fsdp_param_groups`
    # (torch 2.13.0). Without them no strategy of shards begins a run. Public are setters of a factor alone, and one
    # that is set has FSDP2 multiply within the collective, which gloo does not do.
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    if state._fsdp_param_group is None:  # of a module whose parameters are all in other groups
        return []
    return [state._fsdp_param_group]


class ShardedAverage(NamedTuple):
    """How a group of parameters averages its gradients."""

    ranks: int  # whose gradients are summed
    divisor: float  # of the sum


def averages_of(module: Any) -> list[ShardedAverage]:
    """Return over how many ranks a sharded module sums gradients, and what it divides them by."""
    averages = []
    for group in _parameter_groups(module):
        # Private: `FSDPParamGroup.mesh_info` (T). HSDP has both sizes, FSDP the first alone.
        shards = getattr(group.mesh_info, "shard_mesh_size", 1)
        copies = getattr(group.mesh_info, "replicate_mesh_size", 1)
        ranks = shards * copies
        # Private: `FSDPParamGroup.gradient_divide_factor` (torch 2.13.0), `reduce_scatter_divide_factor` (torch 2.6.0).
        # Without them a factor that the user sets is not seen, and the gradient of a rule is wrong by it.
        divisor = getattr(group, "gradient_divide_factor", getattr(group, "reduce_scatter_divide_factor", None))
        averages.append(ShardedAverage(ranks, ranks if divisor is None else divisor))
    return averages
