"""How the package is built: its journeys through the files, which docs/architecture.md states.

`python -m tests.structure` prints how often control goes from one file of the package into another on each journey of
rank 0 of 2. A *call* is a Python function of the package that begins, or a generator that goes on. It is *between
files* if the innermost function of the package below it on the stack, if any, is in another file. Gloo's threads are
not seen.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_gradavg
from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.hooks import bfloat16

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # test modules import each other by name
from ranks import RankPool, make_trainer  # found there
from toys import WEIGHTED, Toy  # likewise

ROOT = Path(lightning_gradavg.__file__).parent  # the sources, or the installed wheel where that is what is tested


class Call(NamedTuple):
    """A call between files of the package."""

    # The file that calls; "outside" if none of the package does.
    source: str
    # The file that is called.
    target: str


CALLS: list[Call] = []
"""The calls between files since a journey began."""


def is_in_package(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(f"{ROOT}{os.sep}")


def file_of(frame: FrameType | None) -> str:
    """Return the file of the package in which a frame is, or else the first one below it on the stack."""
    while frame is not None and not is_in_package(frame):
        frame = frame.f_back
    if frame is None:
        return "outside"
    return os.path.relpath(frame.f_code.co_filename, ROOT)


def note_call(frame: FrameType, event: str, _: object) -> None:
    """Be the profiler of a journey: note a call if it is between files."""
    if event != "call" or not is_in_package(frame):
        return
    call = Call(source=file_of(frame.f_back), target=file_of(frame))
    if call.source != call.target:
        CALLS.append(call)


def begin_journey() -> None:
    CALLS.clear()
    gc.disable()  # what an earlier run left would end within the journey
    sys.setprofile(note_call)


def end_journey() -> None:
    sys.setprofile(None)
    gc.enable()


LAST = 3
"""The batch of a journey: the fourth, when DDP has formed its buckets and nothing is made for the first time."""


class Net(Toy):
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
        output = super().training_step(batch, batch_idx)
        if batch_idx == LAST:
            begin_journey()
        return output

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        end_journey()


class Hook(NamedTuple):
    """A hook of a callback at which a journey begins or ends."""

    name: str
    # The batch; None: any, or a hook that has none.
    batch_idx: int | None = None


def act_in(callback: Callback, hook: Hook, act: Callable[[], None]) -> None:
    """Have a callback act in a hook."""

    def acting(*args: Any) -> None:
        if hook.batch_idx is None or hook.batch_idx == args[-1]:
            act()

    setattr(callback, hook.name, acting)


class Journey(NamedTuple):
    """A row of JOURNEYS."""

    # Options of `GradAvgStrategy`.
    options: dict[str, Any]
    # Where the journey begins and ends; None: the module says it.
    begin: Hook | None
    end: Hook | None
    module: type[Net] = Net
    # The method of the Trainer.
    method: str = "fit"


STEP_BEGINS = Hook("on_train_batch_start", LAST)
STEP_ENDS = Hook("on_train_batch_end", LAST)
JOURNEYS: Mapping[str, Journey] = {
    "loss and weight to reduced gradient": Journey(WEIGHTED, None, None, LossToGradient),
    "fetched batch to this rank's chunk": Journey(
        {**WEIGHTED, "split_batches": True}, Hook("on_train_batch_end", LAST - 1), Hook("on_train_batch_start")
    ),
    "step with learning-rate scaling": Journey(
        {**WEIGHTED, "lr_scaling": "linear", "base_batch_size": 2, "lr_warmup_steps": 3}, STEP_BEGINS, STEP_ENDS
    ),
    "value logged in 3 batches of exact evaluation": Journey(
        {"exact_evaluation": True}, Hook("on_validation_start"), Hook("on_validation_end"), method="validate"
    ),
    "step with the bfloat16 hook": Journey({**WEIGHTED, "ddp_comm_hook": bfloat16}, STEP_BEGINS, STEP_ENDS),
    "data_parallel with 4 replicas": Journey(
        {"equivalent_to": "data_parallel", "num_replicas": 4}, STEP_BEGINS, STEP_ENDS
    ),
}


def travel(name: str) -> list[Call]:
    """Body: make a journey, and return the calls between files on it."""
    journey = JOURNEYS[name]
    callback = Callback()
    if journey.begin is not None and journey.end is not None:
        act_in(callback, journey.begin, begin_journey)
        act_in(callback, journey.end, end_journey)
    strategy = GradAvgStrategy(**journey.options)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[callback], limit_val_batches=6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            getattr(trainer, journey.method)(journey.module())
        finally:
            end_journey()
    return list(CALLS)


def main() -> None:
    _print("journey on rank 0 of 2", "files", "calls")
    with closing(RankPool(2)) as pool:
        for name in JOURNEYS:
            calls, _ = pool.run(travel, name)
            _print(name, len({call.target for call in calls}), len(calls))


def _print(name: object, *cells: object) -> None:
    sys.stdout.write(f"{name:50}{''.join(f'{cell!s:>10}' for cell in cells)}\n")


if __name__ == "__main__":
    main()
