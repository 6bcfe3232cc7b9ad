"""The private names of Lightning and torch that the verification touches; each with its reason.

Read in lightning 2.5.0 and 2.6.6 and in torch 2.4.0 and 2.13.0, where all of them are.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

__all__ = [
    "BEFORE_TRANSFER",
    "ConfigReader",
    "begin_at",
    "ends_window",
    "in_backward",
    "in_running_processes",
    "own_attributes",
    "random_states",
    "set_random_states",
    "start_workers_as_usual",
    "torch_settings",
    "without_gradient_hooks",
    "without_main_module",
]

BEFORE_TRANSFER = "_on_before_batch_transfer"
"""The method of a LightningModule that gets every training batch as the loader made it: no hook of callbacks does."""

# What Lightning and torch keep in a module beside what the user does; both have no public list of it.
_OF_FRAMEWORK = frozenset(vars(LightningModule())) | frozenset(vars(nn.Module())) | {"_hparams", "_log_hyperparams"}


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that the user's code set, beside parameters, buffers and submodules."""
    return {name: value for name, value in vars(module).items() if name not in _OF_FRAMEWORK}


def random_states() -> dict[str, Any]:
    """Return the states of torch's, Python's and NumPy's global random generators."""
    # Public only as a part of `isolate_rng`, which puts them back and does not hand them out.
    return _collect_rng_states(include_cuda=torch.cuda.is_available())


def set_random_states(states: dict[str, Any]) -> None:
    """Go back to such states."""
    _set_rng_states(states)


def in_running_processes(strategy: DDPStrategy) -> DDPStrategy:
    """Return the strategy so that it starts no processes: the ranks are there."""
    # A strategy by name, such as "ddp_spawn", has no other way to be told.
    strategy._start_method = "popen"
    return strategy


def torch_settings(apply: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what torch computes with, process-wide, and compute so from now on where other settings are given."""
    found = {
        "matmul": torch.get_float32_matmul_precision(),
        "tf32": torch.backends.cudnn.allow_tf32,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
    }
    if apply is not None:
        torch.set_float32_matmul_precision(apply["matmul"])
        torch.backends.cudnn.allow_tf32 = apply["tf32"]
        torch.use_deterministic_algorithms(apply["deterministic"], warn_only=True)
        torch.set_default_dtype(apply["dtype"])
    return found


def in_backward() -> bool:
    """Return whether autograd is running a backward."""
    # Checkpointing asks the same function; there is no public one.
    return torch._C._current_graph_task_id() != -1


def ends_window(trainer: Trainer) -> bool:
    """Return whether the gradients of this batch are reduced, and not accumulated for another."""
    # The loop knows of the last batch of an epoch, which a count of batches does not.
    return not trainer.fit_loop._should_accumulate()


def begin_at(trainer: Trainer, epoch: int, step: int) -> None:
    """Have a run that has not begun take itself for one that went on from there."""
    # A checkpoint would say it, and bring weights and optimizers that were never saved.
    epochs: Any = trainer.fit_loop.epoch_progress.current
    epochs.ready = epochs.started = epochs.processed = epochs.completed = epoch
    loop = trainer.fit_loop.epoch_loop
    loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
    loop.manual_optimization.optim_step_progress.total.completed = step


@contextmanager
def without_gradient_hooks(module: nn.Module) -> Iterator[list[str]]:
    """Take the hooks on the module's parameters off within the context, and give the names of those that had any."""
    # A hook can only be removed by the handle that `register_hook` returned to the user.
    hooked: dict[str, Any] = {n: p._backward_hooks for n, p in module.named_parameters() if p._backward_hooks}
    parameters = dict(module.named_parameters())
    try:
        for name in hooked:
            parameters[name]._backward_hooks = None
        yield list(hooked)
    finally:
        for name, hooks in hooked.items():
            parameters[name]._backward_hooks = hooks


class ConfigReader(LightningCLI):
    """A LightningCLI that builds what `fit` needs, and runs nothing."""

    options: dict[str, Any]

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> Any:
        # `run=False` would build a Trainer, whose strategy takes the devices of the config.
        given = config.get("callbacks") or []
        self.options = {**config, "callbacks": [*(given if isinstance(given, list) else [given]), *callbacks]}

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


@contextmanager
def without_main_module() -> Iterator[None]:
    """Start processes that do not import the main module of this one, which may train when it is imported."""
    # multiprocessing imports it in every process that it spawns, found by `sys.modules["__main__"]`.
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def start_workers_as_usual() -> None:
    """Start processes in this one, such as those of loaders, as in a script: by the platform's own method."""
    # A process that a fork server started would have its workers come from that server, too.
    multiprocessing.set_start_method(None, force=True)  # None: what a script begins with
