"""Every private name of Lightning, torch and torchmetrics that this package touches, each with its reason.

Public interfaces do not offer what is done here. Names were read in lightning 2.5.0 and 2.6.6, torch 2.4.0 and 2.13.0
and torchmetrics 1.4.0 and 1.9.0, unless another version stands beside them. `missing()` tells which of them an
installed release has not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

__all__ = [
    "BEFORE_TRANSFER",
    "SigtermHooks",
    "TrainingLoop",
    "backend_name",
    "broadcast_from_first",
    "defers_reduction",
    "ends_window",
    "flushes_static_graph",
    "in_backward",
    "injects_samplers",
    "leave_batch_norm_alone",
    "profiling",
    "put_back",
    "reduced_parameters",
    "set_injection_of_samplers",
    "start_no_processes",
    "syncs_batch_norm",
    "without_gradient_hooks",
]


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return what serves a device in a process group: the group's own name may be `cpu:gloo,cuda:nccl`.

    `ProcessGroup._get_backend`: `torch.distributed.get_backend` returns the name of the whole configuration.
    """
    backend: Any = group._get_backend(device)
    name: str = backend.name()
    return name


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


class SigtermHooks:
    """Where Lightning asks all ranks whether to end, and what it does on SIGTERM.

    `_TrainingEpochLoop._broadcast_sigterm_tensor`, `_SignalConnector._sigterm_notifier_fn` and `received_sigterm`,
    there since lightning 2.6, which blocks every rank at every batch (docs/sigterm.md).

    Args:
        loop: The training epoch loop.
        connector: The signal connector.
    """

    _BROADCAST, _NOTIFIER = "_broadcast_sigterm_tensor", "_sigterm_notifier_fn"

    def __init__(self, loop: Any, connector: Any) -> None:
        self._loop, self._connector = loop, connector

    @classmethod
    def of(cls, trainer: Any) -> SigtermHooks | None:
        """Return those of a trainer, None if it has none."""
        loop, connector = trainer.fit_loop.epoch_loop, getattr(trainer, "_signal_connector", None)
        there = hasattr(type(loop), cls._BROADCAST) and hasattr(type(connector), cls._NOTIFIER)
        return cls(loop, connector) if there else None

    def replace(self, agree: Callable[[], None], notice: Callable[..., None]) -> None:
        """Have these called instead."""
        setattr(self._loop, self._BROADCAST, agree)
        setattr(self._connector, self._NOTIFIER, notice)

    def restore(self) -> None:
        """Leave the trainer as it was."""
        for owner, name in ((self._loop, self._BROADCAST), (self._connector, self._NOTIFIER)):
            vars(owner).pop(name, None)

    @property
    def received(self) -> bool:
        """Whether the run is to end."""
        return bool(self._connector.received_sigterm)

    @received.setter
    def received(self, value: bool) -> None:
        self._connector.received_sigterm = value


def leave_batch_norm_alone(strategy: Any) -> None:
    """Have Lightning not turn batch norm into SyncBatchNorm: see `syncs_batch_norm`."""
    strategy._layer_sync = None


def profiling() -> bool:
    """Return whether a torch profiler is active: a label that nobody reads costs 17 us.

    `torch.autograd._profiler_enabled`.
    """
    return bool(torch.autograd._profiler_enabled())


def put_back(metric: Metric, states: Mapping[str, Any], update_count: int) -> None:
    """Give a metric the states and the number of updates that it had before, and have it compute anew.

    `Metric._update_count` and `_computed`: its `reset` knows the states of the beginning only.
    """
    for name, state in states.items():
        setattr(metric, name, state)
    metric._update_count, metric._computed = update_count, None


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

    `_FitLoop._combined_loader`, `CombinedLoader._iterator` and `_spec`, `_MaxSizeCycle._consumed` and
    `_TrainingEpochLoop._num_ready_batches_reached`. A batch comes to the strategy in the user's own type, and nothing
    public tells which iterator it came from.

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
    def epoch_ended(self) -> bool:
        """Whether no further batch of the epoch will be trained on, although loaders may have some."""
        return bool(self._loop.epoch_loop._num_ready_batches_reached())

    def count_as_read(self, index: int) -> None:
        """Tell that a loader was read to its end in this epoch: without lengths, one ends once all of them were."""
        if hasattr(self.epoch, "_consumed"):
            self.epoch._consumed[index] = True


BEFORE_TRANSFER = "_on_before_batch_transfer"
"""`LightningModule._on_before_batch_transfer` gets every batch as the loader made it: no hook of callbacks does."""


def ends_window(trainer: Any) -> bool:
    """Return whether the gradients of this batch are reduced, and not accumulated for another.

    `_FitLoop._should_accumulate`: it knows of the last batch of an epoch, which a count of batches does not.
    """
    return not trainer.fit_loop._should_accumulate()


def in_backward() -> bool:
    """Return whether autograd is running a backward.

    `torch._C._current_graph_task_id`, which checkpointing asks, too.
    """
    return torch._C._current_graph_task_id() != -1


def start_no_processes(strategy: Any) -> None:
    """Have a strategy start no processes, because the ranks are there.

    `DDPStrategy._start_method`: one that comes by name, such as "ddp_spawn", has no other way to be told.
    """
    strategy._start_method = "popen"


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
