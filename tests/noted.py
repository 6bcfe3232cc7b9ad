"""A run of a real Trainer, in the ranks: it notes what it trains on, and something may happen to it on the way."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import orders
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from ranks import PLAIN_DATA_ONLY, make_trainer
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg._support.fingerprint import state_digests

__all__ = ["KINDS", "Act", "Noted", "Order", "done", "draws", "fit", "journal", "together"]

KINDS = orders.ORDERS | orders.WHOLE | orders.WORKERS | orders.ODD


class Order(NamedTuple):
    """The kind of a loader, its samples, and the samples of a batch."""

    kind: str
    size: int = 20
    batch: int = 4


class Act(NamedTuple):
    """What happens once, on one rank or all, in a hook, in this batch of an epoch or a later one, or of any epoch."""

    how: str
    hook: str
    epoch: int | None = None
    batch: int = 0
    rank: int | None = None


class Step(NamedTuple):
    """An optimizer step: its epoch, rate, and of each of its batches each loader's samples, and a number drawn."""

    epoch: int
    rate: float
    batches: list[tuple[list[list[Any]], float]]


class Noted(NamedTuple):
    """What a rank noted: steps, the weight and state at the end, validations, and how often data were set up."""

    steps: list[Step]
    weight: float
    state: dict[str, str]
    validated: list[int]
    set_up: int
    batches: int
    loaded: list[Any]


class EndError(Exception):
    """Ends the run."""


def look(trainer: Trainer, folder: str) -> None:
    """Read what the run reads, which changes nothing."""
    for loader in tree_flatten(trainer.train_dataloader)[0]:
        next(iter(loader))
        list(loader)


def save(trainer: Trainer, folder: str) -> None:
    trainer.save_checkpoint(f"{folder}/step={trainer.global_step}.ckpt")


def replace_callbacks(trainer: Any, folder: str) -> None:
    trainer.callbacks = [callback for callback in trainer.callbacks if isinstance(callback, Acting)]


def raising(error: type[BaseException]) -> Callable[..., None]:
    def act(*_: Any) -> None:
        raise error("the run ends here")

    return act


def killing(name: str) -> Callable[..., None]:
    return lambda *_: os.kill(os.getpid(), getattr(signal, name))


class Killed:
    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def kill_in_saving(trainer: Trainer, checkpoint: Any) -> None:
    checkpoint["~killed"] = Killed()


ACTS: dict[str, Callable[[Trainer, Any], None]] = {
    "save": save,
    "look": look,
    "replace callbacks": replace_callbacks,
    "error": raising(EndError),
    "interrupt": raising(KeyboardInterrupt),
    "SIGKILL in saving": kill_in_saving,
    **{name: killing(name) for name in ("SIGTERM", "SIGKILL")},
}


class Acting(Callback):
    """Acts, and writes down at once what is trained on, so that a run that is killed tells, too."""

    def __init__(self, acts: Sequence[Act], folder: str) -> None:
        rank = dist.get_rank()
        self.acts, self.folder = [act for act in acts if act.rank in (None, rank)], folder
        self.journal = Path(folder, f"rank {rank}.journal") if folder else None
        Path(folder).mkdir(parents=True, exist_ok=True)

    def reach(self, trainer: Trainer, hook: str, batch: float = math.inf, given: Any = None) -> None:
        for act in [*self.acts]:
            if act.hook == hook and act.epoch in (None, trainer.current_epoch) and act.batch <= batch:
                self.acts.remove(act)
                ACTS[act.how](trainer, self.folder if given is None else given)

    def note(self, what: Any) -> None:
        if self.journal is not None:
            with self.journal.open("a") as file:
                file.write(f"{json.dumps(what)}\n")

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        self.reach(trainer, "start")

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.reach(trainer, "batch start", batch_idx)

    def on_before_backward(self, trainer: Trainer, module: Any, loss: Any) -> None:
        self.note(module.window[-1][0])
        self.reach(trainer, "backward", trainer.fit_loop.epoch_loop.batch_idx)

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        self.reach(trainer, "step", trainer.fit_loop.epoch_loop.batch_idx)
        self.note("step")

    def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self.reach(trainer, "saving", trainer.fit_loop.epoch_loop.batch_idx, checkpoint)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        self.reach(trainer, "batch", math.inf if last else batch_idx)

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        self.reach(trainer, "validation")

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        # Of a stream that is shorter than the limit no batch is known to be the last, and no validation comes.
        for hook in ("batch", "validation", "end"):
            self.reach(trainer, hook)


class Noting(LightningModule):
    """Weights that are drawn, momentum and a schedule; of several loaders a loss over the samples of all."""

    def __init__(self, read: Sequence[Order], mode: str, weighs: bool) -> None:
        super().__init__()
        self.read, self.mode, self.weighs = read, mode, weighs
        self.net = nn.Linear(1, 1, dtype=torch.float64)
        self.window: list[Any] = []
        self.steps: list[Step] = []
        self.validated: list[int] = []
        self.made: list[Any] = []
        self.looks = False
        self.set_up = 0

    def train_dataloader(self) -> Any:
        self.set_up += 1
        self.made = [KINDS[kind](size, batch) for kind, size, batch in self.read]
        first, *others = self.made
        return CombinedLoader([first, {"others": others}], self.mode) if others else first

    def parts(self, batch: Any) -> list[Any]:
        return [batch[0], *batch[1]["others"]] if len(self.read) > 1 else [batch]

    def val_dataloader(self) -> Any:
        return DataLoader([1.0])

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(self.trainer.global_step)
        torch.rand(2)

    def on_train_epoch_start(self) -> None:
        self.window = []  # that of a stream that is shorter than the limit may have been cut off
        self.look()

    def look(self) -> None:
        self.looks = True
        self.trainer.strategy.batch_to_device(torch.zeros(2, 1))  # a user's look at other data changes nothing
        self.looks = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.look()
        self.window.append(([[] for _ in self.parts(batch)], torch.rand(()).item()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        chunk = getattr(getattr(self.trainer.strategy, "_batches", None), "chunk", None)
        parts = self.parts(batch)
        for samples, part in zip(self.window[-1][0], parts, strict=True):
            samples.extend([] if part is None or (chunk is not None and chunk.stand_in) else orders.listed(part))
        values = [part["x"].mean(1) if isinstance(part, dict) else part for part in parts if part is not None]
        x = torch.cat(values).double()[:, None] / 40
        loss = self.net(x).square().mean()
        return {"loss": loss, "weight": len(x)} if self.weighs and len(parts) > 1 else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps.append(Step(self.current_epoch, optimizer.param_groups[0]["lr"], self.window))
        self.window = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.5)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def drawing(acting: Acting, module: Noting, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that draws before it moves a training batch."""

    def move(batch: Any, *args: Any) -> Any:
        if module.trainer.training and not module.looks:
            torch.rand(3)
            acting.reach(module.trainer, "transfer", module.trainer.fit_loop.epoch_loop.batch_idx + 1)
        return hook(batch, *args)

    return move


def fit(
    read: Sequence[Order],
    strategy: Mapping[str, Any] | None,
    acts: Sequence[Act] = (),
    folder: str = "",
    resume: str | None = None,
    *,
    keep: Mapping[str, Any] | None = None,
    mode: str = "max_size_cycle",
    weighs: bool = True,
    hook: Any = None,
    transfer: str | None = None,
    **options: Any,
) -> Noted:
    """Body: train as stock Lightning does (`strategy` is None), or with split batches; each rank has own random states.

    Loaders are read together in a `mode`, and their loss has a weight if it `weighs`. `keep` are options of a
    `ModelCheckpoint` in a folder, `hook` is the module's `transfer_batch_to_device`. In `transfer`, the name of a hook
    that moves batches, the module draws, and something may happen.
    """
    orders.seed((7 if resume is None else 99) + dist.get_rank())
    module = Noting(read, mode, weighs)
    if hook is not None:
        vars(module)["transfer_batch_to_device"] = hook
    acting = Acting(acts, folder)
    if transfer is not None:
        setattr(module, transfer, drawing(acting, module, getattr(module, transfer)))
    callbacks: list[Callback] = [acting, *options.pop("callbacks", ())]
    if keep is not None:
        callbacks.append(ModelCheckpoint(folder, "{step}", save_top_k=-1, save_on_exception=True, **keep))
    trainer = make_trainer(
        "auto" if strategy is None else GradAvgStrategy(split_batches=True, **strategy),
        callbacks=callbacks,
        enable_checkpointing=keep is not None,
        **{"max_epochs": 3, "num_sanity_val_steps": 0, **options},
    )
    with contextlib.suppress(EndError, KeyboardInterrupt, SystemExit):
        trainer.fit(module, ckpt_path=resume, **PLAIN_DATA_ONLY)
    acting.reach(trainer, "after")
    loaded = [getattr(getattr(each, "dataset", None), "loaded", None) for each in module.made]
    batches = trainer.fit_loop.epoch_loop.batch_progress.total.completed
    state = state_digests(module, trainer.optimizers)
    return Noted(module.steps, module.net.weight.item(), state, module.validated, module.set_up, batches, loaded)


def together(ranks: Sequence[Noted]) -> list[Any]:
    """Return the steps of all ranks, each with its epoch, its rate, and all samples of its batches in order."""
    assert len({noted.weight for noted in ranks}) == 1
    steps = []
    for step in zip(*(noted.steps for noted in ranks), strict=True):
        of_batches = zip(*([samples for samples, _ in of_rank.batches] for of_rank in step), strict=True)
        joined = [[list(chain(*parts)) for parts in zip(*of_batch, strict=True)] for of_batch in of_batches]
        steps.append((step[0].epoch, pytest.approx(step[0].rate, rel=1e-12), joined))
    return steps


def journal(folder: Path) -> list[Any]:
    """Return the samples of each batch that all ranks trained on, and "step" where they stepped, also if killed."""
    of_ranks = [map(json.loads, path.read_text().splitlines()) for path in sorted(folder.glob("*.journal"))]
    events = zip(*of_ranks, strict=False)  # if killed, a rank has gone farther than another
    return [
        "step" if "step" in event else [list(chain(*parts)) for parts in zip(*event, strict=True)] for event in events
    ]


def draws(noted: Noted) -> list[float]:
    return [drawn for step in noted.steps for _, drawn in step.batches]


def done(path: Any) -> int:
    return int(str(path).rpartition("step=")[2].partition(".")[0])
