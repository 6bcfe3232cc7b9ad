"""What replicas log: the values and metrics of one process, of steps and epochs, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replicas import Options, Regression, RegressionEnd, assert_same, data, fit, outcome, parallel
from torch import Tensor
from torchmetrics import MeanMetric, Metric
from torchmetrics.utilities import dim_zero_cat


class LogsOften(Regression):
    """Logs a name three times, one only on rank zero, and one in the replicas whose first sample says so."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for factor in (1, 2, 3):
            self.log("often", factor * loss, on_step=True, on_epoch=True)
        if self.trainer.is_global_zero:
            self.log("rank_zero", 0.5, on_step=False, on_epoch=True)
        if len(batch[0]) < 4 and batch[0][0, 0] > 0:  # of some replicas, and so on some ranks
            self.log("sometimes", loss, on_step=False, on_epoch=True)
        return loss


def test_ranks_may_log_different_names_and_often(world):
    assert_same(world, (2, 3, 4), LogsOften, parallel())
    assert "sometimes" in world(4).run(outcome, LogsOften, parallel())[3][1]


class LogsDict(RegressionEnd):
    """Has a `log` of its own, which `log_dict` calls, too."""

    def build(self) -> None:
        self.mean = MeanMetric()

    def log(self, name: str, value: Any, **options: Any) -> None:  # type: ignore[override]  # as users narrow it
        super().log(f"mine/{name}", value, **options)

    def training_step_end(self, outputs: Any) -> Tensor:
        loss = super().training_step_end(outputs)
        self.log_dict({"a": loss, "b": 2 * loss}, on_step=True, on_epoch=True)
        self.log("infinite", torch.tensor(torch.inf), reduce_fx="sum", on_step=False, on_epoch=True)
        self.mean(7.0)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


class OwnLog(LogsDict):
    """The same, of the loss of each replica."""

    training_step_end: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step_end(super().training_step(batch, batch_idx))


def test_a_modules_own_log_and_log_dict_are_called(world):
    for kind, strategy in ((LogsDict, {"equivalent_to": "data_parallel"}), (OwnLog, parallel())):
        logged = world(2).run(outcome, kind, strategy)[0][1]
        assert {"mine/a_step", "mine/b_epoch", "mine/infinite", "mine/mean"} < set(logged)
        assert_same(world, (2,), kind, strategy)


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
        return torch.stack([dim_zero_cat(self.rows).sum(), torch.cat(self.entries).sum()])


class Listing(Regression):
    """Has a metric with lists, and computes it after each epoch."""

    def build(self) -> None:
        self.lists = Lists()
        self.found: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.lists.update(batch[0])
        return self.a(batch[0]).square().mean() + 0 * self.b(self.a(batch[0])).sum()

    def on_train_epoch_end(self) -> None:
        self.found.append(self.lists.compute())
        self.lists.reset()


def listed(strategy: Options) -> list[Tensor]:
    module = Listing()
    fit(module, strategy, data(), max_epochs=2)
    return module.found


@pytest.mark.filterwarnings("ignore:num_replicas=2 leaves 1 of 3 ranks without a replica")
def test_metrics_with_lists_count_each_sample_once(world):
    strategy = parallel(2)
    expected = torch.full((2,), float(data().dataset.tensors[0].sum()), dtype=torch.float64)
    for size in (1, 2, 3):
        for found in world(size).run(listed, strategy):
            torch.testing.assert_close(torch.stack(found), torch.stack([expected] * 2), rtol=1e-12, atol=1e-12)
