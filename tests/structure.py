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
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_gradavg
from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.hooks import bfloat16

sys.path[:0] = [str(Path(__file__).parent)] * (__name__ == "__main__")  # test modules import each other by name
from ranks import RankPool, make_trainer  # noqa: E402  # found there
from toys import WEIGHTED, Toy  # noqa: E402  # likewise

ROOT = Path(lightning_gradavg.__file__).parent  # the sources, or the installed wheel where that is what is tested

ARROWS: list[tuple[str, str]] = []
"""The calls between files on a journey: from where ("outside" where no file of the package calls), and to where."""


def file_of(frame: FrameType | None) -> str:
    """Return the file of the package in which a frame is, or else the first one below it on the stack."""
    while frame and not frame.f_code.co_filename.startswith(f"{ROOT}{os.sep}"):
        frame = frame.f_back
    return os.path.relpath(frame.f_code.co_filename, ROOT) if frame else "outside"


def look(frame: FrameType, event: str, _: object) -> None:
    if event == "call" and frame.f_code.co_filename.startswith(f"{ROOT}{os.sep}"):
        source, target = file_of(frame.f_back), file_of(frame)
        ARROWS.extend([(source, target)] if source != target else ())


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


SCALED = {**WEIGHTED, "lr_scaling": "linear", "base_batch_size": 2, "lr_warmup_steps": 3}
REPLICAS = {"equivalent_to": "data_parallel", "num_replicas": 4}
# Of each: options of `GradAvgStrategy`, the module, from which hook to which, and the method of the Trainer.
JOURNEYS: Mapping[str, tuple[dict[str, Any], type[Net], Any, str]] = {
    "loss and weight to reduced gradient": (WEIGHTED, LossToGradient, None, "fit"),
    "fetched batch to this rank's chunk": ({**WEIGHTED, "split_batches": True}, Net, ONE_CHUNK, "fit"),
    "step with learning-rate scaling": (SCALED, Net, ONE_STEP, "fit"),
    "value logged in 3 batches of exact evaluation": ({"exact_evaluation": True}, Net, EVALUATION, "validate"),
    "step with the bfloat16 hook": ({**WEIGHTED, "ddp_comm_hook": bfloat16}, Net, ONE_STEP, "fit"),
    "data_parallel with 4 replicas": (REPLICAS, Net, ONE_STEP, "fit"),
}


def travelled(name: str) -> list[tuple[str, str]]:
    options, module, looks, run = JOURNEYS[name]
    callbacks = [between(*looks)] if looks else []
    trainer = make_trainer(GradAvgStrategy(**options), max_epochs=1, callbacks=callbacks, limit_val_batches=6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            getattr(trainer, run)(module())
        finally:
            stop()
    return list(ARROWS)


def main() -> None:
    _print("journey on rank 0 of 2", "files", "calls")
    with closing(RankPool(2)) as pool:
        for name in JOURNEYS:
            arrows = pool.run(travelled, name)[0]
            _print(name, len({target for _, target in arrows}), len(arrows))


def _print(name: object, *cells: object) -> None:
    sys.stdout.write(f"{name:50}{''.join(f'{cell!s:>10}' for cell in cells)}\n")


if __name__ == "__main__":
    main()
