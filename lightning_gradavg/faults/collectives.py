"""The collectives of a strategy, which do not wait on a rank that ends apart from the others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_gradavg._lightning.methods import replaced
from lightning_gradavg.faults.part import Faults

__all__ = ["Collectives"]


class Collectives(ParallelStrategy):
    """Answers every collective locally on a rank that ends apart. Its class comes before that of the engine.

    When one rank raises, the others wait for it in a collective of training. Callbacks go on on that rank: in
    `on_exception`, `ModelCheckpoint` reduces whether a file exists. Sent to the others, that would be taken for the
    collective that they wait in, or wait for them until the timeout, and hide the error. So the rank answers as if it
    were alone, and the others learn of its error when it ends.

    The order of the calls in a run (Lightning's `_call_and_handle_interrupt`):

        setup_environment               begins the run
        Interruption.on_exception       if the run fails; it is the first callback
        on_exception of all callbacks   their collectives are answered here
        on_exception                    restores what `Interruption` replaced
        teardown
    """

    _faults: Faults
    _interruption: Interruption | None = None

    @override
    def setup_environment(self) -> None:
        """Begin a run, as soon as there is a process group: any hook after this may fail."""
        super().setup_environment()
        module = self.lightning_module
        assert module is not None
        self._faults.begin(module.trainer)
        if self._interruption is None:
            self._interruption = Interruption(self._faults)
        # First again, also in a second run of the Trainer, and where a user has put another list of callbacks there.
        callbacks = module.trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        if self._interruption in callbacks:
            callbacks.remove(self._interruption)
        callbacks.insert(0, self._interruption)

    @override
    def teardown(self) -> None:
        """Leave the Trainer's callbacks as they were."""
        module = self.lightning_module
        if module is not None and self._interruption is not None:
            callbacks = module.trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
            if self._interruption in callbacks:
                callbacks.remove(self._interruption)
        super().teardown()

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        if not self._faults.ends_apart():
            super().barrier(name, *args, **kwargs)  # type: ignore[safe-super]  # the engine's

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._faults.ends_apart():
            return obj
        return super().broadcast(obj, src)  # type: ignore[safe-super]

    @override
    def reduce(
        self, tensor: Tensor, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor:
        if self._faults.ends_apart():
            return tensor
        return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._faults.ends_apart():
            # Lightning compares a sum with the world size: one vote of two would be no for `all`.
            return bool(decision)
        return super().reduce_boolean_decision(decision, all)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        if self._faults.ends_apart():
            return tensor.expand(dist.get_world_size(group), *tensor.shape)
        return super().all_gather(tensor, group, sync_grads)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        # A `ZeroRedundancyOptimizer` gathers its state here. Nothing is written from it.
        if self._faults.ends_apart():
            return {}
        return super().optimizer_state(optimizer)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        # The one that should replace it was not written.
        if not self._faults.ends_apart():
            super().remove_checkpoint(filepath)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Name the rank that failed first."""
        reports_of_others = self._faults.on_exception(exception)
        if reports_of_others is not None:
            exception.args = (f"{exception}\n{reports_of_others}",)  # the cause last, where a user looks first
        if self._interruption is not None:
            self._interruption.restore()
        # Not `DDPStrategy.on_exception`, which replaces what DDP says of unused parameters by the name of another
        # strategy.


class Interruption(Callback):
    """Notes an exception before all other callbacks, as the first in the Trainer's list."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._replaced = ExitStack()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Have the callbacks that come next exchange nothing, and save nothing, if this rank ends apart."""
        self._faults.interrupt(exception)
        for module in pl_module.modules():
            if isinstance(module, Metric):
                # A metric gathers its states past the strategy, also as one of `trainer.callback_metrics`, which are
                # computed anew.
                available = self._unless_apart(module.distributed_available_fn)
                self._replaced.enter_context(replaced(module, "distributed_available_fn", available))
        for checkpoint in trainer.checkpoint_callbacks:
            if not isinstance(checkpoint, ModelCheckpoint):
                continue
            # With `save_last="link"` it would replace the link to the last checkpoint by one to a file that no rank
            # writes.
            if checkpoint.save_on_exception and self._faults.ends_apart():
                self._replaced.enter_context(replaced(checkpoint, "save_on_exception", False))

    def _unless_apart(self, available: Callable[[], bool]) -> Callable[[], bool]:
        def available_and_together() -> bool:
            return available() and not self._faults.ends_apart()

        return available_and_together

    def restore(self) -> None:
        """Restore what `on_exception` replaced, when all callbacks have been called."""
        self._replaced.close()
