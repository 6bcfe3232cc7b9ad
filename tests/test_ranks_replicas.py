"""What replicas log is what one process logs, of steps and epochs, on any number of ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from data_parallel import Model, Options, assert_same_run, fit, parallel
from ranks import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_gradavg import GradAvgStrategy


class Lists(Metric):
    """Keeps the rows of every update, concatenated over the ranks, and as one entry per update, which are not."""

    full_state_update = False
    rows: list[Tensor]
    entries: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", default=[], dist_reduce_fx="cat")
        self.add_state("entries", default=[], dist_reduce_fx=None)

    def update(self, rows: Tensor) -> None:
        self.rows.append(rows)
        self.entries.append(rows.sum().reshape(1))

    def compute(self) -> Tensor:
        return dim_zero_cat(self.rows).sum() + 1000 * torch.cat(self.entries).sum()


class Logs(Model):
    """Logs as modules for dp did, whose only process had nothing to synchronize, by a `log` of its own.

    The learning rate follows what validation logs.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.mean = MeanMetric()

    def log(self, name: str, value: Any, **options: Any) -> None:  # type: ignore[override]  # as users narrow it
        super().log(f"mine/{name}", value, **options)

    def log_often(self, loss: Tensor) -> Tensor:
        """Log several names at once, one three times, one on rank zero, and what is reduced otherwise."""
        self.log_dict({"a": loss, "b": 2 * loss}, on_step=True, on_epoch=True)
        for factor in (1, 2, 3):
            self.log("often", factor * loss, on_step=True, on_epoch=True)
        if self.trainer.is_global_zero:
            self.log("rank_zero", 0.5, on_step=False, on_epoch=True)
        self.log("infinite", torch.tensor(torch.inf), reduce_fx="sum", on_step=False, on_epoch=True)
        self.mean(7.0)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if len(batch[0]) < 4 and batch[0][0, 0] > 0:  # of some replicas, and so on some ranks
            self.log("sometimes", loss, on_step=False, on_epoch=True)
        return self.log_often(loss)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*self.data()), 8)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss_of(*batch))

    def on_train_epoch_start(self) -> None:
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"], sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "mine/val"}}


class LogsLists(Logs):
    """Has a metric that ranks update as often as they have replicas."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.lists = Lists()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.lists.update(batch[0])
        self.log("lists", self.lists, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class LogsOfAll(Logs):
    """The same, of the loss of all outputs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]), batch[1]

    def training_step_end(self, outputs: Any) -> Tensor:
        return self.log_often(nn.functional.mse_loss(*outputs))


@pytest.mark.filterwarnings("ignore:num_replicas=2 leaves 1 of 3 ranks without a replica")
@pytest.mark.parametrize(
    ("kind", "strategy", "sizes"),
    [
        (Logs, parallel(), (2, 3, 4)),
        (LogsLists, parallel(), (2, 3)),
        (LogsOfAll, parallel(None), (2, 4)),
    ],
)
def test_replicas_log_what_one_process_logs(world, kind, strategy, sizes):
    """Also without `sync_dist=True`, and where other ranks log other names."""
    options = {"max_epochs": 3, "load": {"times": 2}}
    (expected,) = world(1).run(fit, kind, strategy, **options)
    logged = expected.logged[-1]
    assert {"mine/a_step", "mine/b_epoch", "mine/often", "mine/infinite", "mine/val"} < logged.keys()
    assert logged["mine/rate"] < 0.05
    if kind is Logs:
        assert {"mine/sometimes", "mine/rank_zero"} < logged.keys()
    if kind is LogsLists:
        each = float(sum(x.sum() for x, _ in kind(torch.float64).loader(times=2)))
        assert pytest.approx(1001 * each, rel=1e-6) == logged["mine/lists"]
    for size in sizes:
        runs = world(size).run(fit, kind, strategy, **options)
        assert logged.keys() == runs[0].logged[-1].keys()
        assert_same_run(runs, expected, 1e-12, 1e-11)


def patched(strategy: Options) -> tuple[list[int], bool]:
    """Body: the calls of methods that a user has put on the instance, and whether they are still there."""
    module = Model()
    mine = {name: Mock(wraps=getattr(module, name)) for name in ("training_step", "log")}
    vars(module).update(mine)
    make_trainer(GradAvgStrategy(**strategy), max_epochs=1).fit(module, module.loader([8], times=3))
    return [each.call_count for each in mine.values()], mine.items() <= vars(module).items()


def test_patched_methods_are_called_and_put_back(world):
    """In 3 steps of 2 replicas each, which log once."""
    assert world(2).run(patched, parallel()) == [([6, 3], True)] * 2
