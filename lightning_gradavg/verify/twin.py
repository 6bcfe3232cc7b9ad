"""One process that trains freely on the samples that the ranks took.

A global batch is what the user's own `collate_fn` makes of the samples of all ranks. Nothing but the samples comes from
the run: up to the first difference both have the same state, so what differs first is the culprit. What one process
makes of some of the samples is found by training anew up to a step that has only those.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_gradavg.verify.recorder import Recorder
from lightning_gradavg.verify.records import Record, Refused
from lightning_gradavg.verify.replay import (
    Group,
    OneProcess,
    Replay,
    ReplayLoader,
    TakenBatch,
    world_of_one,
)
from lightning_gradavg.verify.shards import on_mesh_of_one
from lightning_gradavg.verify.sketches import Tensors
from lightning_gradavg.verify.target import Build, Options, without_types

__all__ = ["Twin"]


_OPTIONS_OF_ONE_DEVICE: Options = {
    "devices": 1,
    "sync_batchnorm": False,
    # These count batches of one rank, while the batches of one process come from a record.
    "limit_train_batches": None,
    "overfit_batches": 0.0,
}


@dataclass
class Twin:
    """Trains on one process on what the ranks took.

    Every method but `group_of_step` builds the module and the data anew, and trains from the first step on.

    Attributes:
        records: What the ranks recorded, in their order.
        build: Builds what is trained.
        precision: What to compute in.
    """

    records: Sequence[Record]
    build: Build
    precision: str = "64-true"

    def group_of_step(self, step: int) -> Group:
        """Return what all ranks took in a step, in the order of the window, and there of the ranks."""
        group = []
        for rank, record in enumerate(self.records):
            for window_index, rank_batch in enumerate(record.steps[step].batches):
                if rank_batch.counts:
                    group.append(TakenBatch(window_index, rank, rank_batch))
        return sorted(group, key=attrgetter("window_index", "rank"))

    def train(self) -> Record:
        """Train on one batch in each step, which holds the micro-batches of all ranks, and note what it would read."""
        return self._train(self._whole_steps(), reads=True)

    def train_in_windows(self) -> Record:
        """Train on windows, as the ranks do, of which each micro-batch holds those of all ranks."""
        steps = []
        for step in range(len(self.records[0].steps)):
            by_window_index = groupby(self.group_of_step(step), key=attrgetter("window_index"))
            steps.append([list(group) for _, group in by_window_index])
        return self._train(steps)

    def gradient_of(self, group: Group, step: int) -> Tensors:
        """Return the gradient of a step on these micro-batches alone, after the steps before it."""
        record = self._train([*self._whole_steps()[:step], [group]])
        if record.problem:
            raise Refused(record.problem)
        for stage in record.steps[step].stages:
            if stage.stage == "reduced gradient":
                return stage.tensors
        raise AssertionError("a step that was recorded has a reduced gradient")

    def _whole_steps(self) -> list[list[Group]]:
        return [[self.group_of_step(step)] for step in range(len(self.records[0].steps))]

    def _train(self, steps: Sequence[Sequence[Group]], *, reads: bool = False) -> Record:
        """Train on groups, which are the micro-batches of each step."""
        gc.collect()  # the module of the run before, which its Trainer and it hold in a circle
        facts = self.records[0].facts
        window = max(len(groups) for groups in steps)
        module, data, options = self.build()
        recorder = Recorder(len(steps), self.precision, reads=False)
        epochs = [step.epoch for step in self.records[0].steps][: len(steps)]
        replay = Replay(steps, epochs, recorder, facts.epoch_batches / facts.accumulation * window, reads)
        if "train_dataloaders" in data:
            data = {**data, "train_dataloaders": ReplayLoader(data["train_dataloaders"], replay)}
        for owner in (module, data.get("datamodule")):
            if isinstance(owner, (LightningModule, LightningDataModule)) and is_overridden("train_dataloader", owner):
                replay.replace_train_dataloader(owner)
        trainer = self._trainer(options, recorder, window)
        replay.epoch = lambda: trainer.current_epoch
        with ExitStack() as stack:
            stack.enter_context(world_of_one())
            if facts.sharded:
                stack.enter_context(on_mesh_of_one())
            stack.enter_context(recorder.watching(module))
            trainer.fit(module, **data)
        record = recorder.record
        if not record.problem and len(record.steps) < len(steps):
            record.problem = "one process takes fewer steps than the run"
        return record

    def _trainer(self, options: Options, recorder: Recorder, window: int) -> Trainer:
        """Return a Trainer as the run has, but for one device, with windows of `window` batches."""
        # `window` is the length that counts.
        callbacks = without_types(options["callbacks"], (GradientAccumulationScheduler,))
        changed = {
            **_OPTIONS_OF_ONE_DEVICE,
            "strategy": OneProcess(torch.device("cpu"), recorder, self.records[0].facts),
            "callbacks": [*callbacks, recorder],
            "plugins": [recorder.plugin],
            "accumulate_grad_batches": window,
        }
        return Trainer(**{**options, **changed})
