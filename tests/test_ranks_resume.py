"""Whatever ends a run, on any number of ranks: resumed on another number, it trains as an undisturbed one."""

from __future__ import annotations

import contextlib
import os
import signal
from inspect import signature
from typing import Any

import pytest
import torch
from grids import grid
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from ranks import RankError, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gradavg import GradAvgStrategy

SIZE, BATCH, WINDOW, EPOCHS = 20, 4, 2, 2
BATCHES = SIZE // BATCH
STEPS = 3  # of an epoch: windows of 2, 2 and 1 batches

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")


class Shuffled(LightningModule):
    """Weights that are drawn, a shuffled loader, momentum and a schedule; notes samples and rate of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1, dtype=torch.float64)
        self.window: list[float] = []
        self.stepped: list[tuple[list[float], float]] = []

    def train_dataloader(self) -> Any:
        data: Any = torch.arange(1, SIZE + 1, dtype=torch.float64)[:, None] / SIZE
        return DataLoader(data, BATCH, shuffle=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        self.window += [] if strategy._batches.chunk.stand_in else batch.flatten().tolist()
        return (self.net(batch) ** 2).mean()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, *args: Any) -> None:  # type: ignore[override]
        rate = optimizer.param_groups[0]["lr"]
        super().optimizer_step(epoch, batch_idx, optimizer, *args)
        self.stepped.append((self.window, rate))
        self.window = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.5)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10 * STEPS, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class End(Callback):
    """Ends the run in a batch, before its backward; and looks at data by way of the strategy, which changes nothing."""

    def __init__(self, how: str, batch: int) -> None:
        self.how, self.batch = how, batch

    def on_train_epoch_start(self, trainer: Trainer, module: Any, *args: Any) -> None:
        trainer.strategy.batch_to_device(torch.zeros(2, 1))

    on_train_batch_start = on_train_epoch_start  # type: ignore[assignment]  # of more arguments

    def on_before_backward(self, trainer: Trainer, *args: Any) -> None:
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        if progress.total.processed == self.batch:
            if self.how.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, self.how))
            elif self.how:
                raise {"error": RuntimeError, "interrupt": KeyboardInterrupt}[self.how]("the run ends here")


def fit(
    folder: str, how: str = "", batch: int = -1, resume: str | None = None, *, window: int = WINDOW, **options: Any
) -> Any:
    """Body: train for some epochs, or until the run is ended; return steps, weight, and batches that were counted."""
    seed_everything(11, verbose=False)
    module = Shuffled()
    steps = {"every_n_train_steps": 1} if how == "SIGKILL" or (resume and "killed" in resume) else {}
    keep = ModelCheckpoint(folder, "{step}", save_top_k=-1, save_on_exception=True, **steps)  # type: ignore[arg-type]
    epochs = options.pop("epochs", EPOCHS)
    scaled = {"lr_scaling": "linear", "base_batch_size": 2, "lr_warmup_steps": 4}
    trainer = make_trainer(
        GradAvgStrategy(split_batches=True, **scaled, **options),
        max_epochs=epochs,
        accumulate_grad_batches=window,
        enable_checkpointing=True,
        callbacks=[End(how, batch), keep],
    )
    # lightning 2.5 has no such argument, and loads everything.
    plain_data_only: Any = {"weights_only": True} if "weights_only" in signature(trainer.fit).parameters else {}
    with contextlib.suppress(*([RuntimeError, KeyboardInterrupt, SystemExit] if how else [])):
        trainer.fit(module, ckpt_path=resume, **plain_data_only)
    if not how:
        trainer.save_checkpoint(f"{folder}/step=99.ckpt")
    return module.stepped, module.net.weight.item(), trainer.fit_loop.epoch_loop.batch_progress.total.completed


def windows(ranks: list[Any]) -> list[Any]:
    """Return the samples of each optimizer step, of all ranks, and its rate."""
    assert len({weight for _, weight, _ in ranks}) == 1
    steps = zip(*(stepped for stepped, *_ in ranks), strict=True)
    return [
        (sorted(sample for part, _ in parts for sample in part), pytest.approx(parts[0][1], rel=1e-12))
        for parts in steps
    ]


@pytest.fixture(scope="module")
def undisturbed(world, tmp_path_factory):
    """Return the steps, and the last weight, of a run on one process that nobody ends."""
    (ended,) = world(1).run(fit, str(tmp_path_factory.mktemp("undisturbed")))
    return windows([ended]), ended[1]


# How the run ends, in which batch of two epochs of 5, on how many ranks before and after, and in pieces of how many.
HOWS = ["error", "interrupt", "SIGTERM", "SIGKILL"]
RESUMES = [
    *grid(HOWS, [0, 1, 2, 3], [(2, 1), (1, 2), (4, 2), (2, 4), (1, 4), (4, 1)], [None, 1]),
    ("error", 4, (2, 3), None),
    ("interrupt", 7, (3, 1), 1),
    *(pytest.param(how, batch, (4, 1), None, marks=pytest.mark.full) for how in HOWS for batch in range(4, 10)),
]


@pytest.mark.parametrize(("how", "batch", "ranks", "limit"), RESUMES)
def test_a_resumed_run_goes_on_after_the_last_whole_window(world, tmp_path, undisturbed, how, batch, ranks, limit):
    """Wherever and however a run ends, resumed on another number of ranks it trains on what it has not stepped on.

    Samples, effective rates and weights are those of the undisturbed run, also in pieces of one sample.
    """
    expected, weight = undisturbed
    before, after = ranks
    folder, first = tmp_path / ("killed" if how == "SIGKILL" else "ended"), None
    with pytest.raises(RankError, match="exit code -9") if how == "SIGKILL" else contextlib.nullcontext():
        first = world(before).run(fit, str(folder), how, batch)
    # Lightning saves no checkpoint before the first step.
    done, kept = max(((int(path.stem.partition("=")[2]), str(path)) for path in folder.glob("*")), default=(0, None))
    rest = world(after).run(fit, str(tmp_path / "rest"), "", -1, kept, max_device_batch_size=limit)

    stepped = batch // BATCHES * STEPS + batch % BATCHES // WINDOW
    assert stepped <= done if how == "SIGTERM" else stepped == done  # which has the batches at hand trained on
    assert first is None or expected[:done] == windows(first)
    assert expected[done:] == windows(rest)
    assert weight == pytest.approx(rest[0][1], rel=1e-12)


def test_another_recipe_is_refused_unless_it_is_meant(world, tmp_path):
    """A resume under another recipe lists the differences, on all ranks; or it goes on under the new one."""
    world(2).run(fit, str(tmp_path), "error", 2)
    kept = f"{tmp_path}/step=1.ckpt"
    raised = world(2).run_expecting_errors(fit, str(tmp_path / "refused"), "", -1, kept, window=1)
    assert ["ValueError"] * 2 == [one.type_name for one in raised]
    assert all("global_batch_size: 8 in the checkpoint, now 4" in one.message for one in raised)
    ranks = world(2).run(fit, str(tmp_path / "meant"), "", -1, kept, window=1, allow_recipe_change=True)
    assert [2 * BATCHES - 2] * 2 == [len(stepped) for stepped, *_ in ranks]


def test_a_checkpoint_written_after_training_counts_as_one_within_it(world, tmp_path):
    """5 loader batches are 5, in parts of a sample and whole; resumed for another epoch, they are 5 of 10."""
    first = world(2).run(fit, str(tmp_path / "first"), epochs=1, max_device_batch_size=1)
    again = world(2).run(fit, str(tmp_path / "again"), "", -1, f"{tmp_path}/first/step=99.ckpt")
    assert [BATCHES, BATCHES, 2 * BATCHES, 2 * BATCHES] == [counted for *_, counted in first + again]


class Two(Shuffled):
    """Reads two loaders of different lengths together."""

    def train_dataloader(self) -> Any:
        data: Any = torch.arange(80, dtype=torch.float64)[:, None]
        return [DataLoader(data[:size], BATCH) for size in (16, 80)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return sum((self.net(part) ** 2).mean() for part in batch)  # type: ignore[return-value]


def two(limit: float, path: str | None = None, resume: str | None = None, **options: Any) -> int:
    """Body: train on two loaders, and save in mid-epoch."""
    trainer = make_trainer(GradAvgStrategy(split_batches=True, **options), max_epochs=1, limit_train_batches=limit)
    module = Two()
    if path is not None:
        module.on_train_batch_end = lambda *_: trainer.save_checkpoint(path)  # type: ignore[method-assign, assignment]
        trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = 2, 3
    trainer.fit(module, ckpt_path=resume)
    return trainer.global_step


@pytest.mark.parametrize("limit", [None, 1])
def test_a_part_of_each_loader_is_its_own(world, limit):
    """Half of 4 and of 20 batches are 2 and 10, of which the longer counts, in whatever micro-batches."""
    assert [10, 10] == world(2).run(two, 0.5, max_device_batch_size=limit)


def test_several_loaders_go_on_from_the_end_of_an_epoch_only(world, tmp_path):
    """A checkpoint of mid-epoch is refused on all ranks, with what to do."""
    path = str(tmp_path / "mid.ckpt")
    world(2).run(two, 1.0, path)
    for raised in world(2).run_expecting_errors(two, 1.0, None, path):
        assert raised.type_name == "ValueError"
        assert "within an epoch, after 3 batches of one of 2 train loaders" in raised.message
