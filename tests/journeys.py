"""Which files of the package a step passes, and how often: what `python -m tests.structure` prints.

A *call* is a Python function of the package that begins, or a generator that goes on. It is *between files* if the
innermost function of the package below it on the stack, if any, is in another file. Gloo's threads are not seen.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback
from ranks import RankPool, make_trainer
from structure import ROOT
from torch import Tensor
from torch.utils.data import DataLoader
from toys import Toy

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.hooks import bfloat16

__all__ = ["JOURNEYS", "travel", "travelled"]

Arrow = tuple[str, str, str]
"""A call between files: from where ("outside" where no file of the package calls), to where, and the function."""

ARROWS: list[Arrow] = []
"""The arrows of this process, which sees one journey at a time."""


def file_of(frame: FrameType | None) -> str:
    """Return the file of the package in which a frame is, or else the first one below it on the stack."""
    while frame and not frame.f_code.co_filename.startswith(f"{ROOT}{os.sep}"):
        frame = frame.f_back
    return os.path.relpath(frame.f_code.co_filename, ROOT) if frame else "outside"


def look(frame: FrameType, event: str, _: object) -> None:
    """Keep a call between files."""
    if event == "call" and frame.f_code.co_filename.startswith(f"{ROOT}{os.sep}"):
        source, target = file_of(frame.f_back), file_of(frame)
        ARROWS.extend([(source, target, frame.f_code.co_name)] if source != target else ())


def start() -> None:
    ARROWS.clear()
    gc.disable()  # what an earlier run left would end within the journey
    sys.setprofile(look)


def stop() -> None:
    sys.setprofile(None)
    gc.enable()


LAST = 3
"""The batch that is looked at: the fourth, when DDP has formed its buckets and nothing is made for the first time."""


class Net(Toy):
    """A weight, and batches for all that is looked at."""

    def __init__(self) -> None:
        super().__init__(weight=lambda batch, batch_idx: len(batch), dtype=torch.float32)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("value", self.losses(batch).mean())

    def train_dataloader(self) -> DataLoader[Tensor]:
        data: Any = torch.arange(96.0)
        return DataLoader(data, batch_size=4)

    val_dataloader = train_dataloader


class LossToGradient(Net):
    """From the loss of a batch to the gradient that the optimizer gets."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        if batch_idx == LAST:
            start()
        return found

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        stop()


def between(first: tuple[str, int | None], last: tuple[str, int | None]) -> Callback:
    """Return a callback that looks from one hook of a batch to another; without an index, of any or of none."""
    callback = Callback()
    for (hook, index), act in ((first, start), (last, stop)):
        setattr(callback, hook, lambda *args, index=index, act=act: act() if index in (None, args[-1]) else None)
    return callback


ONE_STEP = ("on_train_batch_start", LAST), ("on_train_batch_end", LAST)
ONE_CHUNK = ("on_train_batch_end", LAST - 1), ("on_train_batch_start", None)
EVALUATION = ("on_validation_start", None), ("on_validation_end", None)


@dataclass(frozen=True)
class Journey:
    """What is looked at: options of `GradAvgStrategy` and of the Trainer, its method, and from where to where."""

    options: Mapping[str, Any]
    module: type[Net] = Net
    looks: tuple[tuple[str, int | None], ...] = ()
    trainer: Mapping[str, Any] = field(default_factory=dict)
    run: str = "fit"


WEIGHTED = {"reduction": "weighted_mean"}
SCALED = {"lr_scaling": "linear", "base_batch_size": 2, "lr_warmup_steps": 3}
REPLICAS = {"equivalent_to": "data_parallel", "num_replicas": 4}
EXACT: Mapping[str, Any] = {"run": "validate", "trainer": {"limit_val_batches": 6}}
JOURNEYS: Mapping[str, Journey] = {
    "loss and weight to reduced gradient": Journey(WEIGHTED, LossToGradient),
    "fetched batch to this rank's chunk": Journey({**WEIGHTED, "split_batches": True}, looks=ONE_CHUNK),
    "step with learning-rate scaling": Journey({**WEIGHTED, **SCALED}, looks=ONE_STEP),
    "value logged in 3 batches of exact evaluation": Journey({"exact_evaluation": True}, looks=EVALUATION, **EXACT),
    "step with the bfloat16 hook": Journey({**WEIGHTED, "ddp_comm_hook": bfloat16}, looks=ONE_STEP),
    "data_parallel with 4 replicas": Journey(REPLICAS, looks=ONE_STEP),
}


def travelled(name: str) -> list[Arrow]:
    """Body: go on a journey, and return what was seen on this rank."""
    journey = JOURNEYS[name]
    callbacks = [between(*journey.looks)] if journey.looks else []
    trainer = make_trainer(GradAvgStrategy(**journey.options), max_epochs=1, callbacks=callbacks, **journey.trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            getattr(trainer, journey.run)(journey.module())
        finally:
            stop()
    return list(ARROWS)


def travel(names: Iterable[str]) -> Iterator[tuple[str, list[Arrow]]]:
    """Yield what was seen of some journeys on rank 0 of 2, whose processes are started for it."""
    with closing(RankPool(2)) as pool:
        for name in names:
            yield name, pool.run(travelled, name)[0]
