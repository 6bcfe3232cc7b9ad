"""A part of the strategy: one concern, and the moments of a run that it answers.

Moments have the names of Lightning's hooks. The strategy calls all parts at every moment, in the order of
`GradAvgStrategy._parts`, except those of a loader, batch or evaluation, which it calls on the parts that answer them.
Parts do not know each other: the strategy passes what one needs of another.

    load                            of a run that resumes; Lightning reads the checkpoint before it sets up the strategy
    setup                           of every run: fit, validate, test, predict
    configure_ddp                   of a run that trains, once its module is wrapped
        prepare_loaders             before Lightning prepares the loaders of a stage
        process_dataloader          for each of these loaders
        on_train_start
            on_train_batch_start    for each batch
            on_evaluation_start     of each pass over evaluation loaders, also within training
            on_evaluation_end
            save                    of each checkpoint
        on_train_end
    teardown                        in reverse order, of the parts whose `setup` returned
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel

from lightning_gradavg._lightning.internals import TrainingLoop
from lightning_gradavg._support.collectives import World
from lightning_gradavg._support.place import Place

__all__ = ["Part", "Run", "Saved"]

Saved = dict[str, Any]
"""What a checkpoint holds of the strategy, by name: plain data, free of the world size."""


@dataclass(frozen=True)
class Run:
    """What every part is told of a run of the Trainer.

    Attributes:
        trainer: The Trainer that runs.
        module: The user's module, not wrapped.
        device: The device of this rank.
        world: All ranks of the run.
        model: The wrapper that reduces the gradients, if the run trains.
        places: The places of all ranks, in rank order, if the run trains.
    """

    trainer: Trainer
    module: LightningModule
    device: torch.device
    world: World
    model: DistributedDataParallel | None = None
    places: tuple[Place, ...] = ()

    @property
    def ddp(self) -> DistributedDataParallel:
        """The wrapper, of a run that trains."""
        assert self.model is not None
        return self.model

    @cached_property
    def loop(self) -> TrainingLoop:
        """How far training is."""
        return TrainingLoop(self.trainer.fit_loop)

    @property
    def num_nodes(self) -> int:
        """Number of nodes that gradients are reduced over."""
        return len({place.node for place in self.places})


class Part:
    """The part that does nothing. A part overrides the moments that it needs."""

    run: Run

    def setup(self, run: Run) -> None:
        """Begin any run of the Trainer, before the module is moved and wrapped."""
        self.run = run

    def configure_ddp(self, run: Run) -> None:
        """Begin a run that trains, with the module wrapped."""
        self.run = run

    def prepare_loaders(self, stage: str) -> None:
        """Get ready for the loaders that Lightning is about to prepare: `"train"`, `"val"`, `"test"` or `"predict"`."""

    def process_dataloader(self, loader: Any) -> Any:
        """Return what is read instead of a loader. A collective operation."""
        return loader

    def on_train_start(self) -> None:
        """Begin training: the loaders are set up, and the progress of a checkpoint is restored."""

    def on_train_batch_start(self) -> None:
        """Note that a batch is about to be trained on."""

    def on_train_end(self) -> None:
        """End training, after its last step."""

    def on_evaluation_start(self) -> None:
        """Begin one pass over evaluation loaders, which are set up."""

    def on_evaluation_end(self) -> None:
        """End one pass over evaluation loaders, when its results are computed."""

    def save(self, saved: Saved, checkpoint: dict[str, Any]) -> None:
        """Add to what a checkpoint holds."""

    def load(self, saved: Saved) -> None:
        """Take what a checkpoint held; before `configure_ddp`."""

    def describe(self) -> str:
        """Return the sentence that the line at the start of a run says of this part, or ""."""
        return ""

    def teardown(self) -> None:
        """End a run that began, and restore what this part replaced."""
