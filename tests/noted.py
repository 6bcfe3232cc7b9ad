"""A run of a real Trainer, in the ranks: it notes what it trains on, and something may happen to it on the way.

`fit` is the body. It returns what the rank noted; `join_ranks`, `drawn_numbers` and `read_journal` put that in a form
in which runs on any number of ranks are equal.
"""

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

__all__ = ["KINDS", "Act", "Noted", "Order", "drawn_numbers", "fit", "join_ranks", "read_journal", "step_of_checkpoint"]

SAVING: dict[str, Any] = {"save_on_exception": True}
"""When a run saves, unless a test says otherwise."""

KINDS = orders.ORDERS | orders.WHOLE | orders.WORKERS | orders.ODD
"""What makes a loader, by its kind."""


class Order(NamedTuple):
    """A training loader."""

    # A name of KINDS.
    kind: str
    # The number of its samples, and that of a batch.
    size: int = 20
    batch: int = 4


class Act(NamedTuple):
    """What happens once in a run."""

    # What happens: a name of ACTS.
    how: str
    # When it happens: "start", "batch start", "transfer", "backward", "step", "saving", "batch", "validation", "end"
    # (of an epoch) or "after" (the run).
    hook: str
    # The epoch; None: any.
    epoch: int | None = None
    # The batch of the epoch. If the hook is not reached in it, the act comes in the first later batch that has the
    # hook.
    batch: int = 0
    # The rank; None: all of them.
    rank: int | None = None


class NotedBatch(NamedTuple):
    """A batch that a rank trained on."""

    # The samples of each loader that this rank trained on.
    samples: list[list[Any]]
    # A number that was drawn when the batch came.
    drawn: float


class Step(NamedTuple):
    """An optimizer step."""

    epoch: int
    # The learning rate.
    rate: float
    # The batches of its window.
    batches: list[NotedBatch]


class Noted(NamedTuple):
    """What a rank noted of a run."""

    steps: list[Step]
    # The weight, and digests of all states, when the run ended.
    weight: float
    state: dict[str, str]
    # The optimizer steps that were taken before each validation.
    validated: list[int]
    # How often Lightning asked for the training loaders.
    set_up: int
    # The number of batches that Lightning counts.
    batches: int
    # Of each loader, the indices that its data set has loaded, or None if it does not tell.
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


def make_raise(error: type[BaseException]) -> Callable[..., None]:
    def act(*_: Any) -> None:
        raise error("the run ends here")

    return act


def make_signal(number: int) -> Callable[..., None]:
    def act(*_: Any) -> None:
        os.kill(os.getpid(), number)

    return act


class KillsWhenPickled:
    """Kills its process when it is saved."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def kill_in_saving(trainer: Trainer, checkpoint: Any) -> None:
    """Have the process killed when a part of the checkpoint is written."""
    checkpoint["~killed"] = KillsWhenPickled()


ACTS: dict[str, Callable[[Trainer, Any], None]] = {
    "save": save,
    "look": look,
    "replace callbacks": replace_callbacks,
    "error": make_raise(EndError),
    "interrupt": make_raise(KeyboardInterrupt),
    "SIGTERM": make_signal(signal.SIGTERM),
    "SIGKILL": make_signal(signal.SIGKILL),
    "SIGKILL in saving": kill_in_saving,
}
"""What may happen: functions of the Trainer and the folder, or in "saving" the checkpoint."""


class Acting(Callback):
    """Acts, and writes down at once what is trained on, so that a run that is killed tells, too."""

    def __init__(self, acts: Sequence[Act], folder: str) -> None:
        rank = dist.get_rank()
        # The acts of this rank that have not happened.
        self.acts = [act for act in acts if act.rank in (None, rank)]
        self.folder = folder
        self.journal = Path(folder, f"rank {rank}.journal") if folder else None
        Path(folder).mkdir(parents=True, exist_ok=True)

    def reach(self, trainer: Trainer, hook: str, batch: float = math.inf, checkpoint: Any = None) -> None:
        """Act if an act is due in a hook and batch."""
        for act in [*self.acts]:
            if act.hook == hook and act.epoch in (None, trainer.current_epoch) and act.batch <= batch:
                self.acts.remove(act)
                ACTS[act.how](trainer, checkpoint if checkpoint is not None else self.folder)

    def note(self, event: Any) -> None:
        if self.journal is not None:
            with self.journal.open("a") as file:
                file.write(f"{json.dumps(event)}\n")

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        self.reach(trainer, "start")

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.reach(trainer, "batch start", batch_idx)

    def on_before_backward(self, trainer: Trainer, module: Any, loss: Any) -> None:
        self.note(module.window[-1].samples)
        self.reach(trainer, "backward", trainer.fit_loop.epoch_loop.batch_idx)

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        self.reach(trainer, "step", trainer.fit_loop.epoch_loop.batch_idx)
        self.note("step")

    def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self.reach(trainer, "saving", trainer.fit_loop.epoch_loop.batch_idx, checkpoint)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        # Acts of later batches come in the last one of an epoch.
        self.reach(trainer, "batch", math.inf if is_last else batch_idx)

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        self.reach(trainer, "validation")

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        # Of a stream that is shorter than the limit no batch is known to be the last, and no validation comes.
        for hook in ("batch", "validation", "end"):
            self.reach(trainer, hook)


class Noting(LightningModule):
    """Weights that are drawn, momentum and a schedule; of several loaders a loss over the samples of all."""

    def __init__(self, loaders: Sequence[Order], mode: str, weighs: bool, draws: bool) -> None:
        super().__init__()
        # Whether hooks and validation draw random numbers, which moves the order of a stock process.
        self.draws = draws
        self.orders = loaders
        self.mode = mode
        self.weighs = weighs
        self.net = nn.Linear(1, 1, dtype=torch.float64)
        # What is returned as `Noted`.
        self.steps: list[Step] = []
        self.validated: list[int] = []
        self.set_up = 0
        # The batches of the window that is not stepped on.
        self.window: list[NotedBatch] = []
        # The loaders that were made last.
        self.made: list[Any] = []
        # Whether the user's code moves other data than a training batch.
        self.looks = False

    def train_dataloader(self) -> Any:
        """Return the one loader, or all of them in a nested structure that is read in the mode."""
        self.set_up += 1
        self.made = [KINDS[order.kind](order.size, order.batch) for order in self.orders]
        first, *others = self.made
        if not others:
            return first
        return CombinedLoader([first, {"others": others}], self.mode)

    def parts(self, batch: Any) -> list[Any]:
        """Return each loader's part of a batch."""
        if len(self.orders) == 1:
            return [batch]
        return [batch[0], *batch[1]["others"]]

    def val_dataloader(self) -> Any:
        return DataLoader([1.0])

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(self.trainer.global_step)
        self.draw(2)

    def draw(self, count: int = 1) -> float:
        """Return the last of so many numbers, or 0."""
        if not self.draws:
            return 0.0
        return float(torch.rand(count)[-1])

    def on_train_epoch_start(self) -> None:
        self.window = []  # that of a stream that is shorter than the limit may have been cut off
        self.look()

    def look(self) -> None:
        self.looks = True
        self.trainer.strategy.batch_to_device(torch.zeros(2, 1))  # a user's look at other data changes nothing
        self.looks = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.look()
        self.window.append(NotedBatch([[] for _ in self.parts(batch)], self.draw()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        chunk = getattr(getattr(self.trainer.strategy, "_batches", None), "chunk", None)
        parts = self.parts(batch)
        is_stand_in = chunk is not None and chunk.stand_in
        values = []
        for samples, part in zip(self.window[-1].samples, parts, strict=True):
            # Of several loaders, one may have no batch left.
            if part is None:
                continue
            # What a rank without samples runs on is another rank's.
            if not is_stand_in:
                samples.extend(orders.listed(part))
            values.append(part["x"].mean(1) if isinstance(part, dict) else part)
        x = torch.cat(values).double()[:, None] / 40
        loss = self.net(x).square().mean()
        if self.weighs and len(parts) > 1:
            return {"loss": loss, "weight": len(x)}
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.stepped_on = self.window
        self.window = []

    def note_step(self, optimizer: Any, *_: Any) -> None:
        """Note a step, and the rate that it used: a hook from before training is called before the strategy's own."""
        self.steps.append(Step(self.current_epoch, optimizer.param_groups[0]["lr"], self.stepped_on))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.5)
        optimizer.register_step_post_hook(self.note_step)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_drawing_hook(acting: Acting, module: Noting, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that draws, and acts if an act is due, before it moves a training batch."""

    def move(batch: Any, *args: Any) -> Any:
        if module.trainer.training and not module.looks:
            module.draw(3)
            acting.reach(module.trainer, "transfer", module.trainer.fit_loop.epoch_loop.batch_idx + 1)
        return hook(batch, *args)

    return move


def fit(
    loaders: Sequence[Order],
    strategy: Mapping[str, Any] | None,
    acts: Sequence[Act] = (),
    folder: str = "",
    resume: str | None = None,
    *,
    model_checkpoint: Mapping[str, Any] | None = None,
    mode: str = "max_size_cycle",
    weighs: bool = True,
    transfer_batch_to_device: Callable[..., Any] | None = None,
    drawing_hook: str | None = None,
    draws: bool = True,
    **options: Any,
) -> Noted:
    """Body: train as stock Lightning does (`strategy` is None), or under our strategy with split batches.

    Each rank has random states of its own.

    Args:
        loaders: The training loaders, which are read together in the `mode` if there are several.
        strategy: Options of the strategy.
        acts: What happens in the run.
        folder: Where the journal and checkpoints are written; "" writes none.
        resume: A checkpoint.
        model_checkpoint: Options of a `ModelCheckpoint` in the folder; None for none.
        mode: That of the `CombinedLoader`.
        weighs: Whether the loss over several loaders has a weight.
        transfer_batch_to_device: The module's hook of this name.
        draws: Whether hooks and validation draw random numbers.
        drawing_hook: The name of a hook that moves batches, in which the module draws.
        options: Those of the Trainer.
    """
    # A resumed run must not depend on the seed that it begins with.
    seed = 7 if resume is None else 99
    orders.seed(seed + dist.get_rank())
    module = Noting(loaders, mode, weighs, draws)
    if transfer_batch_to_device is not None:
        vars(module)["transfer_batch_to_device"] = transfer_batch_to_device
    acting = Acting(acts, folder)
    if drawing_hook is not None:
        setattr(module, drawing_hook, make_drawing_hook(acting, module, getattr(module, drawing_hook)))
    callbacks: list[Callback] = [acting, *options.pop("callbacks", ())]
    if model_checkpoint is not None:
        callbacks.append(ModelCheckpoint(folder, "{step}", save_top_k=-1, **{**SAVING, **model_checkpoint}))
    trainer = make_trainer(
        "auto" if strategy is None else GradAvgStrategy(split_batches=True, **strategy),
        callbacks=callbacks,
        enable_checkpointing=model_checkpoint is not None,
        **{"max_epochs": 3, "num_sanity_val_steps": 0, **options},
    )
    with contextlib.suppress(EndError, KeyboardInterrupt, SystemExit):
        trainer.fit(module, ckpt_path=resume, **PLAIN_DATA_ONLY)
    acting.reach(trainer, "after")
    return Noted(
        steps=module.steps,
        weight=module.net.weight.item(),
        state=state_digests(module, trainer.optimizers),
        validated=module.validated,
        set_up=module.set_up,
        batches=trainer.fit_loop.epoch_loop.batch_progress.total.completed,
        loaded=[getattr(getattr(loader, "dataset", None), "loaded", None) for loader in module.made],
    )


def join_samples(samples_of_ranks: Sequence[Sequence[list[Any]]]) -> list[list[Any]]:
    """Return each loader's samples in a batch: those of all ranks, in rank order."""
    return [list(chain(*samples_of_loader)) for samples_of_loader in zip(*samples_of_ranks, strict=True)]


def join_ranks(ranks: Sequence[Noted]) -> list[Any]:
    """Return the steps of all ranks, each with its epoch, its rate, and all samples of its batches in order."""
    assert len({noted.weight for noted in ranks}) == 1
    steps = []
    for step_of_ranks in zip(*[noted.steps for noted in ranks], strict=True):
        batches = []
        for batch_of_ranks in zip(*[step.batches for step in step_of_ranks], strict=True):
            batches.append(join_samples([batch.samples for batch in batch_of_ranks]))
        first = step_of_ranks[0]
        steps.append((first.epoch, pytest.approx(first.rate, rel=1e-12), batches))
    return steps


def read_journal(folder: Path) -> list[Any]:
    """Return the samples of each batch that all ranks trained on, and "step" where they stepped, also if killed."""
    events_of_ranks = []
    for path in sorted(folder.glob("*.journal")):
        events_of_ranks.append([json.loads(line) for line in path.read_text().splitlines()])
    events: list[Any] = []
    # If killed, a rank has gone farther than another.
    for event_of_ranks in zip(*events_of_ranks, strict=False):
        if "step" in event_of_ranks:
            events.append("step")
        else:
            events.append(join_samples(event_of_ranks))
    return events


def drawn_numbers(noted: Noted) -> list[float]:
    """Return the number that was drawn in each batch of a rank."""
    numbers = []
    for step in noted.steps:
        numbers += [batch.drawn for batch in step.batches]
    return numbers


def step_of_checkpoint(path: Any) -> int:
    """Return the step that the name of a checkpoint says."""
    return int(str(path).rpartition("step=")[2].partition(".")[0])
