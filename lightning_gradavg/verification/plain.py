"""What one process reads with the configuration of a run: the samples of its batches, in its order."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from typing_extensions import override

from lightning_gradavg.verification.reference import world_of_one
from lightning_gradavg.verification.samples import sample_fingerprints

__all__ = ["record_stream"]


class _Reading(SingleDeviceStrategy):
    """Reads batches and trains on none."""

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> None:
        return None


class _Reader(Callback):
    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.stream: list[tuple[int, tuple[bytes, ...]]] = []

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        batch = move_data_to_device(batch, torch.device("cpu"))
        self.stream.append((trainer.current_epoch, sample_fingerprints(batch)))
        if len(self.stream) >= self.batches:
            trainer.should_stop = True


def record_stream(
    module: LightningModule, data: Mapping[str, Any], options: Mapping[str, Any], batches: int
) -> list[tuple[int, tuple[bytes, ...]]]:
    """Return the epoch and the samples' fingerprints of the first batches that one process trains on.

    Args:
        module: The module as before training. It is not trained.
        data: The arguments `train_dataloaders` or `datamodule` of `fit`, or none.
        options: The options of the run's Trainer.
        batches: How many batches to read, at most.
    """
    dropped = {"strategy", "devices", "num_nodes", "plugins", "callbacks", "accelerator", "max_steps", "sync_batchnorm"}
    kept = {name: value for name, value in options.items() if name not in dropped}
    reader = _Reader(batches)
    trainer = Trainer(strategy=_Reading(), accelerator="cpu", callbacks=[reader], **kept)
    with world_of_one(), warnings.catch_warnings():
        # Lightning warns of a training step without loss, and of an optimizer that did not step before its scheduler.
        warnings.simplefilter("ignore")
        trainer.fit(module, **data)
    return reader.stream
