"""What a strategy does around a training step, whatever engine averages the gradients: DDP, or FSDP2 on shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gradavg._lightning.arrival import Arrival
from lightning_gradavg._lightning.internals import LoaderSetUp
from lightning_gradavg._lightning.launch import Registered, require_one_run
from lightning_gradavg._lightning.part import Part, Run
from lightning_gradavg._lightning.user_collectives import answer_for
from lightning_gradavg._support.collectives import World
from lightning_gradavg.batches.part import Batches
from lightning_gradavg.faults.collectives import Collectives
from lightning_gradavg.reduction.reduction import Reduction

__all__ = ["WeighedTraining"]


_STAGES: Mapping[str | None, str] = {f"{stage}_dataloader()": stage for stage in ("train", "val", "test", "predict")}
"""The stage of the loaders that are prepared after the barrier of a name."""


class WeighedTraining(Registered, Collectives, ParallelStrategy):
    """Weighs the losses of a strategy that averages gradients. Its class comes before that of the engine."""

    _reduction: Reduction
    _batches: Batches
    _parts: tuple[Part, ...]  # in the order in which they are asked
    _plain: Mapping[str, Any]  # the options that must be the same on all ranks
    _set_up: LoaderSetUp | None = None
    _begun: tuple[Part, ...] = ()
    _arrival: Arrival | None = None  # of the run that trains
    _trains_on_batch = False  # from the last hook on_train_batch_start on
    _moved: tuple[Any, Any] | None = None  # the batch that was moved to the device last, before and after

    @property
    def _trains(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.fn == TrainerFn.FITTING

    @property
    def _restores(self) -> bool:
        """Whether Lightning may be restoring a run that is about to train; any other time a user reads a file."""
        module = self.lightning_module
        if module is None or not self._trains:
            return False
        return module.trainer.state.status == TrainerStatus.RUNNING and self._arrival is None

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        run = Run(trainer, module, self.root_device, World.of(None))
        self._begun = ()
        for part in self._parts:
            part.setup(run)
            self._begun += (part,)
        if self._trains:
            require_one_run(run.world, trainer, module, self._plain)
        super().setup(trainer)

    @override
    def teardown(self) -> None:
        for part in reversed(self._begun):
            part.teardown()
        self._set_up = None
        self._end_training()
        super().teardown()

    @property
    def has_samples(self) -> bool:
        """Whether this rank has samples in the training step that runs, or ran last.

        A rank that has none of a batch, or no batch left, runs `training_step` all the same, on samples that do not
        count. Gradients, logged values, metrics and buffers leave them out; lists of your own don't.

        A `training_step` that asks this answers for its collectives: `dist.all_reduce` and the like are an error in
        such a step unless it asks on every rank. See docs/uneven.md.
        """
        answer_for()
        return self._batches.has_samples

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks. Lightning names the loaders here that it is about to prepare.

        No hook tells the same. Between the user's `train_dataloader()` and the sampler that Lightning adds, it calls
        nothing but this barrier (2.5 and 2.6): `process_dataloader` comes after the sampler and without a stage, and
        `trainer.state.stage` is that of the hook in which a user asks for `trainer.estimated_stepping_batches`.
        """
        super().barrier(name, *args, **kwargs)
        stage = _STAGES.get(name)
        if stage is not None and self.lightning_module is not None:
            self._set_up = LoaderSetUp(self.lightning_module.trainer, stage)
            for part in self._parts:
                part.prepare_loaders(stage)

    @property
    def _prepares(self) -> str | None:
        """The stage whose loaders Lightning prepares now; None where a user has another loader processed."""
        if self._set_up is None or not self._set_up.under_way:
            return None
        return self._set_up.stage

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        return self._process_training_loader(dataloader) if self._prepares == "train" and self._trains else dataloader

    def _process_training_loader(self, loader: object) -> object:
        return self._batches.process_dataloader(loader)

    def on_train_start(self) -> None:
        """Begin with the training loaders, which are known now."""
        super().on_train_start()
        self._trains_on_batch = False
        # Not in `setup`: a search for a learning rate or batch size trains with other callbacks than the run.
        if self._arrival is None:
            self._arrival = Arrival(self._begin_batch, self._end_batch)
        self._arrival.insert(self._reduction.run.trainer)
        for part in self._parts:
            part.on_train_start()

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        moved = super().batch_to_device(batch, device, dataloader_idx)
        if self._arrival is not None and self._reduction.run.trainer.training:
            self._moved = (batch, moved)
        return moved

    def _begin_batch(self, batch: Any) -> None:
        """Begin to train on a batch. Its number is counted already, and no hook of the user's has seen it."""
        self._trains_on_batch = False
        self._batches.on_train_batch_start()
        # On an accelerator, this reads the batch as it was on the host. It may be another one that was moved last.
        host = batch
        if self._moved is not None and self._moved[1] is batch:
            host = self._moved[0]
        self._moved = None
        self._reduction.look_at(host)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Train on the batch: Lightning calls this after the hooks of callbacks and module, before the step."""
        super().on_train_batch_start(batch, batch_idx)
        # Without it the step would count for the batch before.
        if self._arrival is not None and self._arrival.insert(self._reduction.run.trainer):
            self._begin_batch(batch)
        self._trains_on_batch = True

    def _end_batch(self, batch: Any) -> None:
        """End a batch. Of None Lightning calls no hook but the one that leads here."""
        self._trains_on_batch = False
        world = self._reduction.run.world
        if batch is None and world.size > 1 and not self._batches.fetches_within:
            raise RuntimeError(
                f"the train loader yielded None on rank {world.rank}. Lightning skips such a batch, and this rank would"
                " then train on its next batch together with the others' current one. Leave bad samples out in the"
                " dataset, or use reduction='weighted_mean' and return"
                ' {"loss": loss, "weight": 0} from training_step for a batch that should not count.'
            )

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if not self._trains_on_batch:
            # A user computes a loss between two batches, perhaps on one rank, which is no part of any window.
            return super().training_step(*args, **kwargs)
        arguments = *args, *kwargs.values()
        batches = self._batches
        self._reduction.begin_step(next(iter(arguments), None), batches.missing, may_miss=batches.joins)
        self._batches.stepping = True
        try:
            output: STEP_OUTPUT = self._run_step(super().training_step, *arguments)
        finally:
            self._batches.stepping = False
            self._reduction.end_step()
        return output

    def _run_step(self, forward: Callable[..., Any], *arguments: Any) -> Any:
        """Return the output of a step, in automatic optimization with one loss to run the backward from."""
        with self._batches.training_step():
            output = forward(*arguments)
        return self._reduction.read(output, self._samples, next(iter(arguments), None))

    @property
    def _samples(self) -> float | None:
        """The weight of a loss that has none: None where only its batch tells, 0 for one that does not count."""
        return None if self._batches.chunk is None else self._batches.chunk.samples

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Have the window go on after the backward within."""
        self._reduction.set_window_continues(continues=True)
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._reduction.set_window_continues(continues=False)

    @override
    def backward(
        self, closure_loss: Any, optimizer: Optimizer | None, *args: Any, weight: Any = None, **kwargs: Any
    ) -> Tensor:
        module, precision, reduction = self.lightning_module, self.precision_plugin, self._reduction
        assert module is not None
        if reduction.is_manual:
            closure_loss = reduction.add(closure_loss, weight, self._samples).value
        self.pre_backward(closure_loss)
        root = precision.pre_backward(closure_loss, module)
        reduction.backward(partial(precision.backward, root, module, optimizer, *args, **kwargs))
        # Here Lightning reduces the first backward of a static graph in manual optimization.
        self.post_backward(closure_loss)
        reduction.finish()
        return precision.post_backward(root, module)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        for part in self._parts:
            part.on_train_end()
        self._end_training()

    def _end_training(self) -> None:
        """Leave the trainer's callbacks as they were."""
        self._moved = None
        self._trains_on_batch = False
        if self._arrival is not None:
            self._arrival.remove(self._reduction.run.trainer)
            self._arrival = None

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if not self._faults.ends_apart():
            super().save_checkpoint(checkpoint, *args, **kwargs)
