"""The demo's language model, killed at any moment and resumed on any number of ranks; also a script for torchrun.

`torchrun --nproc-per-node 4 --max-restarts 2 tests/preemption.py FOLDER KILLS` is the run of `train` on the ranks of
torchrun; the kills are a list in JSON, one for each time that the agent starts the ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import make_trainer
from torch.utils.data import DataLoader

from examples.demo.text import ByteLanguageModel, DocstringData, collate
from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.fingerprint import state_digests

REPLICAS = 4
BATCH = 8
NUM_TRAIN = 10 * BATCH + 5
EPOCHS = 2
STEPS = 11 * EPOCHS
MOMENTS = ("forward", "backward", "step", "save")


@dataclass(frozen=True)
class Kill:
    """A SIGKILL that one rank sends itself.

    Attributes:
        rank: The rank.
        step: The optimizer step within which it does.
        moment: One of `MOMENTS`; in `"save"` rank 0 does, when a part of the checkpoint is written.
    """

    rank: int
    step: int
    moment: str


def schedule(seed: int, kills: int) -> list[tuple[int, Kill | None]]:
    """Return numbers of ranks, each with the kill that ends its run; the last run is not killed."""
    random = Random(seed)
    steps = sorted(random.sample(range(1, STEPS), kills))
    worlds = [random.choice((1, 2, 4)) for _ in range(kills + 1)]
    killed = [Kill(random.randrange(w), step, random.choice(MOMENTS)) for w, step in zip(worlds, steps, strict=False)]
    return list(zip(worlds, [*killed, None], strict=True))


class _Killed:
    """Ends the process when it is pickled."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Killing(Callback):
    """Kills a rank as a `Kill` says."""

    def __init__(self, kill: Kill) -> None:
        self.kill = kill

    def _at(self, moment: str, trainer: Trainer) -> None:
        kill = self.kill
        if (kill.moment, kill.rank, kill.step) == (moment, trainer.global_rank, trainer.global_step):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self._at("forward", trainer)

    def on_after_backward(self, trainer: Trainer, *args: Any) -> None:
        self._at("backward", trainer)

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        self._at("step", trainer)

    def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        if self.kill.moment == "save" and trainer.global_step > self.kill.step:
            checkpoint["~killed"] = _Killed()


class Adam(ByteLanguageModel):
    """Keeps moments, and takes the norm of the gradient."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Ended(NamedTuple):
    """How a run ended: on which rank, from which step to which, and in which state."""

    rank: int
    begun: int
    steps: int
    digests: dict[str, str]


class Data(DocstringData):
    """Few and short docstrings, in an order that is drawn anew in every epoch."""

    def train_dataloader(self) -> DataLoader[bytes]:
        train: Any = self.samples[: self.num_train]
        order = torch.Generator().manual_seed(5)
        return DataLoader(train, BATCH, shuffle=True, generator=order, collate_fn=collate)


def train(folder: str, kill: Kill | None, trainer_of: Callable[..., Trainer] = make_trainer) -> Ended:
    """Train from the last checkpoint in `folder` to the end, or until a rank is killed. A body."""
    seed_everything(0, verbose=False)
    module, begun = Adam(), []
    module.on_train_start = lambda: begun.append(module.trainer.global_step)  # type: ignore[method-assign]  # to note it
    keep = ModelCheckpoint(
        folder, "{step}", every_n_train_steps=2, save_top_k=2, monitor="step", mode="max", save_last=True
    )
    trainer = trainer_of(
        GradAvgStrategy(reduction="weighted_mean", num_replicas=REPLICAS, reproducible=True),
        max_epochs=EPOCHS,
        callbacks=[keep, *([] if kill is None else [Killing(kill)])],
        gradient_clip_val=1.0,
        enable_checkpointing=True,
    )
    trainer.fit(module, Data(num_train=NUM_TRAIN, max_bytes=48), ckpt_path="last")
    return Ended(trainer.global_rank, begun[0], trainer.global_step, state_digests(module, trainer.optimizers))


def main(folder: str, kills: str) -> None:
    """Train on the ranks of torchrun, and write how it ended to a file per rank."""
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kill = dict(enumerate(json.loads(kills))).get(restarts)
    trainer_of = partial(
        Trainer, accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), logger=False, enable_progress_bar=False
    )
    ended = train(folder, kill and Kill(**kill), lambda strategy, **options: trainer_of(strategy=strategy, **options))
    Path(folder, f"ended-{ended.rank}.json").write_text(json.dumps([restarts, *ended]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
