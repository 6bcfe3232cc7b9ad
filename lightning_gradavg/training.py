"""What a strategy does around a training step, whatever engine averages the gradients: DDP, or FSDP2 on shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gradavg.batches.part import Batches
from lightning_gradavg.faults.collectives import Collectives
from lightning_gradavg.launch import Registered, require_one_run
from lightning_gradavg.part import Part, Run
from lightning_gradavg.ranks import World
from lightning_gradavg.reduction.reduction import Reduction
from lightning_gradavg.user_collectives import answer_for

__all__ = ["WeighedTraining"]


class WeighedTraining(Registered, Collectives, ParallelStrategy):
    """Weighs the losses of a strategy that averages gradients. Its class comes before that of the engine."""

    _reduction: Reduction
    _batches: Batches
    _parts: tuple[Part, ...]  # in the order in which they are asked
    _plain: Mapping[str, Any]  # the options that must be the same on all ranks
    _prepares: str | None = None
    _begun: tuple[Part, ...] = ()

    @property
    def _trains(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.fn == TrainerFn.FITTING

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
        """Wait for all ranks. Lightning names the loaders here that it is about to prepare."""
        super().barrier(name, *args, **kwargs)
        if name is not None and name.endswith("_dataloader()"):
            self._prepares = name.removesuffix("_dataloader()")
            for part in self._parts:
                part.prepare_loaders(self._prepares)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        return self._process_training_loader(dataloader) if self._prepares == "train" and self._trains else dataloader

    def _process_training_loader(self, loader: object) -> object:
        return self._batches.process_dataloader(loader)

    def on_train_start(self) -> None:
        """Begin with the training loaders, which are known now."""
        super().on_train_start()
        for part in self._parts:
            part.on_train_start()

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self.lightning_module is not None and self.lightning_module.trainer.training:
            self._begin_batch(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    def _begin_batch(self, batch: Any) -> None:
        self._batches.on_train_batch_start()
        world = self._reduction.run.world
        if batch is None and world.size > 1:
            raise RuntimeError(
                f"the train loader yielded None on rank {world.rank}. Lightning skips such a batch, and this rank would"
                " then train on its next batch together with the others' current one. Leave bad samples out in the"
                " dataset, or use reduction='weighted_mean' and return"
                ' {"loss": loss, "weight": 0} from training_step for a batch that should not count.'
            )
        self._reduction.look_at(batch)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        arguments = *args, *kwargs.values()
        self._reduction.begin_step(next(iter(arguments), None), self._batches.missing)
        self._batches.stepping = True
        try:
            output: STEP_OUTPUT = self._run_step(super().training_step, *arguments)
        finally:
            self._batches.stepping = False
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
        self._reduction.hold(holding=True)
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._reduction.hold(holding=False)

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

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if not self._faults.ends_apart():
            super().save_checkpoint(checkpoint, *args, **kwargs)
