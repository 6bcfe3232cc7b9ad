"""What a strategy does around a training step, whatever engine averages the gradients: DDP, or FSDP2 on shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gradavg._lightning.arrival import Arrival
from lightning_gradavg._lightning.internals import require_reduced
from lightning_gradavg._lightning.launch import Registered, require_one_run
from lightning_gradavg._lightning.part import Part, Run
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.running import running
from lightning_gradavg.batches.chunks import Pieces
from lightning_gradavg.batches.part import Batches
from lightning_gradavg.faults.collectives import Collectives
from lightning_gradavg.reduction.reduction import Reduction

__all__ = ["WeighedTraining"]


_STAGE_OF_BARRIER: Mapping[str | None, str] = {
    "train_dataloader()": "train",
    "val_dataloader()": "val",
    "test_dataloader()": "test",
    "predict_dataloader()": "predict",
}
"""The stage of the loaders that Lightning prepares after the barrier of a name."""


class _Phase(Enum):
    """Where training is; `WeighedTraining` has the table."""

    NO_TRAINING = auto()
    BETWEEN_BATCHES = auto()
    ON_BATCH = auto()


class _Moved(NamedTuple):
    """A batch that was moved to the device."""

    on_host: object
    on_device: object


class WeighedTraining(Registered, Collectives, ParallelStrategy):
    """Weighs the losses of a strategy that averages gradients. Its class comes before that of the engine.

    Where training is:

    | phase | begins with | `training_step` |
    |---|---|---|
    | NO_TRAINING | `on_train_end` or `teardown` | is that of the engine |
    | BETWEEN_BATCHES | `on_train_start`, a batch arrives or ends, an epoch ends | the engine's: a user's own call |
    | ON_BATCH | `on_train_batch_start`, which comes after the user's hooks of that name | weighs its losses |
    """

    _reduction: Reduction
    _batches: Batches
    _parts: tuple[Part, ...]  # in the order in which they are called
    _plain_options: Mapping[str, object]  # numbers and texts, which must be the same on all ranks
    _run: Run  # from `setup` on
    _preparing: str | None = None  # the stage of the loaders that Lightning prepares
    _parts_set_up: tuple[Part, ...] = ()  # those whose `setup` returned
    _phase: _Phase = _Phase.NO_TRAINING
    _arrival: Arrival | None = None  # of the run that trains
    _moved: _Moved | None = None  # the batch that was moved to the device last

    @property
    def _trains(self) -> bool:
        """Whether the run is a fit."""
        module = self.lightning_module
        return module is not None and module.trainer.state.fn == TrainerFn.FITTING

    @property
    def _restores(self) -> bool:
        """Whether Lightning may be restoring a run that is about to train. At other times a user reads a checkpoint."""
        module = self.lightning_module
        if module is None or not self._trains:
            return False
        return module.trainer.state.status == TrainerStatus.RUNNING and self._phase is _Phase.NO_TRAINING

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        self._run = Run(trainer, module, self.root_device, World.of(None))
        self._parts_set_up = ()
        if self._trains:
            # Before the parts' and the engine's, in which ranks of different runs would wait for each other.
            require_one_run(self._run.world, trainer, module, self._plain_options)
        # A part whose `setup` raises is not torn down.
        for part in self._parts:
            part.setup(self._run)
            self._parts_set_up += (part,)
        super().setup(trainer)

    @override
    def teardown(self) -> None:
        for part in reversed(self._parts_set_up):
            part.teardown()
            # As Lightning does: else DDP's buckets take memory until the next run.
            part.run = replace(part.run, model=None)
            self._run = part.run
        self._preparing = None
        self._end_training()
        super().teardown()

    @property
    def has_samples(self) -> bool:
        """Whether this rank has samples in the training step that runs, or ran last.

        A rank that has none of a batch, or no batch left, runs `training_step` all the same, on samples that do not
        count. Gradients, logged values, metrics and buffers leave them out. Your own collectives, such as
        `dist.all_reduce`, and lists of your own don't: ask this on every rank, and bring nothing that counts where it
        is False. See docs/uneven.md.
        """
        return self._batches.has_samples

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks. Lightning names the loaders here that it is about to prepare.

        It prepares them, and no others, until the next batch arrives, or a pass of evaluation begins.

        No hook tells the same. Between the user's `train_dataloader()` and the sampler that Lightning adds, it calls
        nothing but this barrier (2.6): `process_dataloader` comes after the sampler and without a stage, and
        `trainer.state.stage` is that of the hook in which a user asks for `trainer.estimated_stepping_batches`.
        """
        super().barrier(name, *args, **kwargs)
        stage = _STAGE_OF_BARRIER.get(name)
        if stage is not None and self.lightning_module is not None:
            self._preparing = stage
            for part in self._parts:
                part.prepare_loaders(stage)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        if self._preparing == "train" and self._trains:
            return self._process_training_loader(dataloader)
        return dataloader

    def _process_training_loader(self, loader: object) -> object:
        """Return what is read instead of a training loader. A collective operation. `GradAvgStrategy` extends it."""
        return self._batches.process_dataloader(loader)

    def on_train_start(self) -> None:
        """Begin training, with loaders that are known now. Lightning calls it on all ranks; parts may exchange."""
        super().on_train_start()
        self._phase = _Phase.BETWEEN_BATCHES
        # Not in `setup`: a search for a learning rate or batch size trains with other callbacks than the run.
        if self._arrival is None:
            self._arrival = Arrival(self._begin_batch, self._end_batch, self._end_epoch)
        self._arrival.insert(self._run.trainer)
        # Of joined loaders, some ranks may have fewer batches than others.
        self._reduction.may_miss = self._batches.joins
        for part in self._parts:
            part.on_train_start()

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, Pieces):
            return batch  # each piece is moved when it is computed
        with self._batches.transferring(batch):
            moved = super().batch_to_device(batch, device, dataloader_idx)
        # Users may call this, too: it begins no batch, and `_begin_batch` checks that it was this one.
        if self._phase is not _Phase.NO_TRAINING and self._run.trainer.training:
            self._moved = _Moved(on_host=batch, on_device=moved)
        return moved

    def _begin_batch(self, batch: object) -> None:
        """Begin to train on a batch: `Arrival`, the first callback, calls this.

        The batch's number is counted already, and no hook of the user's has seen it.
        """
        self._phase = _Phase.BETWEEN_BATCHES
        self._preparing = None
        self._batches.on_train_batch_start()
        # The reduction looks for ignored targets. On an accelerator, it reads the batch as it was on the host.
        host_batch = batch
        if self._moved is not None and self._moved.on_device is batch:
            host_batch = self._moved.on_host
        self._moved = None
        self._reduction.search_targets(host_batch)

    @override
    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Train on the batch: Lightning calls this after the hooks of callbacks and module, before the step."""
        super().on_train_batch_start(batch, batch_idx)
        # A user has given the trainer another list of callbacks, without `Arrival`. So nobody has called
        # `_begin_batch`, and the step would count for the batch before.
        if self._arrival is not None and self._arrival.insert(self._run.trainer):
            self._begin_batch(batch)
        self._phase = _Phase.ON_BATCH

    def _end_batch(self, batch: object) -> None:
        """End a batch: `Arrival` calls this. Raise a RuntimeError if it is None, on one of several ranks.

        Of a batch that is None, Lightning calls no other hook. Raise DDP's own error, too, if it waits for gradients
        after the last batch of an epoch.
        """
        self._phase = _Phase.BETWEEN_BATCHES
        world = self._run.world
        loop = self._run.loop
        # DDP raises in its next forward, before which come other exchanges: other ranks would wait in a bucket.
        if self._run.model is not None and loop.is_on_last_batch:
            require_reduced(self._run.model)
        # Where `training_step` fetches its batches itself, Lightning may have none.
        if batch is None and world.size > 1 and not self._batches.fetches_within:
            raise RuntimeError(
                f"the train loader yielded None on rank {world.rank}. Lightning skips such a batch, and this rank would"
                " then train on its next batch together with the others' current one. Leave bad samples out in the"
                " dataset, or use reduction='weighted_mean' and return"
                ' {"loss": loss, "weight": 0} from training_step for a batch that should not count.'
            )

    def _end_epoch(self) -> None:
        """End an epoch, before the hooks of the user, and with it a batch that no hook of Lightning has ended."""
        self._phase = _Phase.BETWEEN_BATCHES

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._phase is not _Phase.ON_BATCH:
            # A user computes a loss between two batches, perhaps on one rank, which is no part of any window.
            return super().training_step(*args, **kwargs)
        arguments = (*args, *kwargs.values())
        batches = self._batches
        self._reduction.begin_step(_batch_of(arguments), batches.missing)
        try:
            output: STEP_OUTPUT = self._run_step(super().training_step, *arguments)
        finally:
            self._reduction.end_step()
        return output

    def _run_step(self, forward: Callable[..., Any], *arguments: Any) -> Any:
        """Return the output of a step with its loss weighed. `GradAvgStrategy` runs a step in pieces here."""
        batch = _batch_of(arguments)
        (piece,) = self._batches.pieces(batch)
        forward_of_piece = self._batches.make_forward(piece, self._reduction.exchanging)
        with running(forward_of_piece), self._batches.training_step():
            output = forward(*arguments)
            return self._reduction.read(output, batch, forward_of_piece)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Have the window go on after the backward within."""
        with self._reduction.window_continues(), super().block_backward_sync():
            yield

    @override
    def backward(
        self, closure_loss: Any, optimizer: Optimizer | None, *args: Any, weight: Any = None, **kwargs: Any
    ) -> Tensor:
        """Run the backward of a loss, and reduce the gradients if it is the last one of its window.

        The calls are those of Lightning's `Strategy.backward`, with the reduction around the backward of the precision
        plugin; `post_backward` comes before the gradients are finished.
        """
        module, precision, reduction = self.lightning_module, self.precision_plugin, self._reduction
        assert module is not None
        if reduction.is_manual:
            # In automatic optimization, `read` has weighed the loss, and Lightning divided it by N.
            closure_loss = reduction.add(closure_loss, weight)
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
        self._phase = _Phase.NO_TRAINING
        self._moved = None
        if self._arrival is not None:
            self._arrival.remove(self._run.trainer)
            self._arrival = None

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        # A rank that failed alone writes none: the other ranks would write no part of it.
        if not self._faults.ends_apart():
            super().save_checkpoint(checkpoint, *args, **kwargs)


def _batch_of(arguments: tuple[object, ...]) -> object:
    """Return the batch of a `training_step`, its first argument; None if it takes none."""
    return arguments[0] if arguments else None
