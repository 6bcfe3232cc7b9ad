"""Checkpoints free of the world size: saved at 3, resumed at 2 and 4, the run is the one never interrupted."""

from __future__ import annotations

from inspect import signature
from math import ceil
from typing import Any

import pytest
import torch
from grids import grid
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import make_trainer
from torch.utils.data import DataLoader, WeightedRandomSampler
from toys import Stop, Toy

from lightning_gradavg import GradAvgStrategy

SIZE, BATCH, EPOCHS = 26, 4, 3

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")


class Resumed(Toy):
    """Toy-S with momentum, a scheduler of its own, and a shuffled loader; notes samples and rates of each step."""

    def __init__(self, order: str) -> None:
        super().__init__(kind="s", lr=0.02)
        self.order = order
        self.samples: list[list[float]] = []
        self.rates: list[float] = []

    def train_dataloader(self) -> Any:
        data: Any = torch.arange(1, SIZE + 1, dtype=torch.float64) / SIZE
        if self.order == "weighted":
            return DataLoader(data, BATCH, sampler=WeightedRandomSampler([1.0 + i for i in range(SIZE)], SIZE))
        if self.order == "generator":
            return DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
        return DataLoader(data, BATCH, shuffle=self.order == "shuffle")

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        strategy: Any = self.trainer.strategy
        chunk = strategy._batches.chunk
        self.samples.append([] if chunk.stand_in else batch.tolist())
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(
    order: str, limit: int | None, window: int, folder: str, stop: int | None, resume: str | None, **options: Any
) -> Any:
    """Body: train to step `stop`, from the checkpoint `resume`, and save there."""
    seed_everything(11, verbose=False)
    model = Resumed(order)
    strategy = GradAvgStrategy(
        split_batches=True,
        max_device_batch_size=limit,
        lr_scaling="linear",
        base_batch_size=2,
        lr_warmup_steps=5,
        **options,
    )
    trainer = make_trainer(
        strategy,
        max_epochs=EPOCHS,
        accumulate_grad_batches=window,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1), Stop(stop)],
    )
    # lightning 2.5 has no such argument, and loads everything.
    plain_data_only: Any = {"weights_only": True} if "weights_only" in signature(trainer.fit).parameters else {}
    trainer.fit(model, ckpt_path=resume, **plain_data_only)
    optimizer = trainer.strategy.optimizer_state(trainer.optimizers[0])
    return model.w.item(), model.samples, model.rates, optimizer["param_groups"][0]["lr"]


def of_all(ranks: list[Any]) -> Any:
    """Return weight, global batches and rates, after asserting that the ranks agree."""
    assert len({rank[0] for rank in ranks}) == 1
    assert all(rank[2] == ranks[0][2] for rank in ranks)
    return ranks[0][0], sorted(x for rank in ranks for batch in rank[1] for x in batch), ranks[0][2], ranks[0][3]


@pytest.mark.parametrize(
    ("order", "limit", "window"),
    grid(["shuffle", "sequential", "weighted", "generator"], [None, 1], [1, 2], strength=1),
)
def test_save_at_3_resume_at_2_and_4(world, tmp_path, order, limit, window):
    """Weights, samples, schedule and scale go on as if nothing had happened, in mid-epoch and across epochs."""
    steps_per_epoch = ceil(ceil(SIZE / BATCH) / window)
    total = EPOCHS * steps_per_epoch
    for first in (2, steps_per_epoch):
        second = first + steps_per_epoch - 1
        folders = [str(tmp_path / f"{first}-{part}") for part in range(4)]
        whole = of_all(world(1).run(fit, order, limit, window, folders[0], None, None))
        parts = [of_all(world(3).run(fit, order, None, window, folders[1], first, None))]
        parts.append(
            of_all(world(2).run(fit, order, limit, window, folders[2], second, f"{folders[1]}/step={first}.ckpt"))
        )
        parts.append(
            of_all(world(4).run(fit, order, limit, window, folders[3], None, f"{folders[2]}/step={second}.ckpt"))
        )
        assert total == len(whole[2])
        assert whole[2] == [pytest.approx(rate, rel=1e-12) for part in parts for rate in part[2]]
        assert whole[1] == sorted(x for part in parts for x in part[1])
        assert whole[0] == pytest.approx(parts[-1][0], rel=1e-12)


def test_another_recipe_is_refused(world, tmp_path):
    """A resume under another recipe lists the differences, on all ranks, unless it is meant."""
    world(2).run(fit, "shuffle", None, 1, str(tmp_path), 2, None)
    arguments = ("shuffle", None, 2, str(tmp_path / "again"), 4, f"{tmp_path}/step=2.ckpt")
    raised = world(2).run_expecting_errors(fit, *arguments)
    assert ["ValueError"] * 2 == [one.type_name for one in raised]
    assert all("global_batch_size: 4 in the checkpoint, now 8" in one.message for one in raised)


def test_another_recipe_that_is_meant(world, tmp_path):
    """With allow_recipe_change the run goes on under the new recipe."""
    world(2).run(fit, "shuffle", None, 1, str(tmp_path), 2, None)
    ranks = world(2).run(
        fit, "shuffle", None, 2, str(tmp_path / "again"), 4, f"{tmp_path}/step=2.ckpt", allow_recipe_change=True
    )
    assert [2, 2] == [len(rank[2]) for rank in ranks]


class Plain(Resumed):
    """The same with a constant learning rate, which any number of epochs will do for."""

    configure_optimizers = Toy.configure_optimizers


def batches_counted(path: str, limit: int | None, epochs: int, resume: str | None = None) -> int:
    """Body: train, save after the end of training, and return how many batches Lightning has counted."""
    strategy = GradAvgStrategy(split_batches=True, max_device_batch_size=limit)
    trainer = make_trainer(strategy, max_epochs=epochs)
    trainer.fit(Plain("sequential"), ckpt_path=resume)
    trainer.save_checkpoint(path)
    return trainer.fit_loop.epoch_loop.batch_progress.total.completed


def test_a_checkpoint_written_after_training_counts_as_one_within_it(world, tmp_path):
    """7 loader batches are 7, in parts of a sample and whole; resumed for another epoch, they are 7 of 14."""
    first, second = str(tmp_path / "first.ckpt"), str(tmp_path / "second.ckpt")
    assert [7, 7] == world(2).run(batches_counted, first, 1, 1)
    assert [14, 14] == world(2).run(batches_counted, second, None, 2, first)
