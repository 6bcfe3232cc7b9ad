"""What replicas log: the values and metrics of one process, of steps and epochs, on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from replicas import (
    Classifier,
    Options,
    Regression,
    RegressionEnd,
    assert_same,
    data,
    fit,
    outcome,
    parallel,
    single,
)
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.utilities import dim_zero_cat


class Logging(Classifier):
    """Logs a mean, a sum, extremes and metrics in every replica; `end` logs them of the whole batch instead."""

    def __init__(self, *, end: bool) -> None:
        super().__init__()
        self.end = end

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        inputs, labels = batch
        logits = self(inputs)
        if self.end:
            return {"logits": logits, "labels": labels}
        return self.logged(logits, labels)

    def __getattr__(self, name: str) -> Any:
        if name == "training_step_end" and self.__dict__.get("end"):
            return lambda outputs: self.logged(outputs["logits"], outputs["labels"])
        return super().__getattr__(name)

    def logged(self, logits: Tensor, labels: Tensor) -> Tensor:
        each = nn.functional.cross_entropy(logits, labels, reduction="none")
        options: dict[str, Any] = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("mean", each.mean(), **options)
        self.log("sum", each.sum(), reduce_fx="sum", **options)
        self.log("largest", each.max(), reduce_fx="max", **options)
        self.log("smallest", each.min(), reduce_fx="min", **options)
        self.log("of_epoch", each.mean(), on_step=False, on_epoch=True, sync_dist=True)
        self.accuracy(logits, labels)
        self.rows.update(len(labels))
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("rows", self.rows, on_step=False, on_epoch=True)
        return each.mean()


class Steps(Callback):
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.logged_metrics.items()})


def logged(end: bool, strategy: Options, batch_size: int) -> tuple[list[dict[str, float]], dict[str, float]]:
    steps = Steps()
    trainer = fit(
        Logging(end=end), strategy, data(30, batch_size), callbacks=[steps], log_every_n_steps=1, logger=False
    )
    return steps.metrics, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(("end", "strategy"), [(False, parallel()), (False, single()), (True, single())], ids=str)
def test_logged_values_do_not_depend_on_the_world_size(world, end, strategy):
    for steps, epoch in (reference := world(1).run(logged, end, strategy, 12)):
        assert len(steps) == 3
        assert epoch["rows"] == 30
        assert set(epoch) >= {"mean_epoch", "sum_epoch", "largest_epoch", "smallest_epoch", "of_epoch", "accuracy"}
    (steps, epoch), *_ = reference
    for size in (2, 3):
        for of_rank in world(size).run(logged, end, strategy, 12):
            assert of_rank[0] == [pytest.approx(step, rel=1e-12) for step in steps]
            assert of_rank[1] == pytest.approx(epoch, rel=1e-12)


class LogsOften(Regression):
    """Logs a name three times, one only on rank zero, and one in the replicas whose first sample says so."""

    @property
    def num_replicas(self) -> int:
        strategy: Any = self.trainer.strategy
        return strategy._options.num_replicas or 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for factor in (1, 2, 3):
            self.log("often", factor * loss, on_step=True, on_epoch=True)
        if self.trainer.is_global_zero:
            self.log("rank_zero", 0.5, on_step=False, on_epoch=True)
        if self.num_replicas > 1 and batch[0][0, 0] > 0:  # of some replicas, and so on some ranks
            self.log("sometimes", loss, on_step=False, on_epoch=True)
        return loss


@pytest.mark.parametrize("strategy", [parallel(), single(), single(max_device_batch_size=3)], ids=str)
def test_ranks_may_log_different_names_and_often(world, strategy):
    if "max_device_batch_size" in strategy:
        _, metrics = world(2).run(outcome, LogsOften, strategy)[0]
        _, expected = world(1).run(outcome, LogsOften, single())[0]
        assert metrics["often_epoch"] == pytest.approx(expected["often_epoch"], rel=1e-12)
        return
    assert_same(world, (2, 3), LogsOften, strategy)
    if "num_replicas" in strategy:
        assert "sometimes" in world(4).run(outcome, LogsOften, strategy)[3][1]


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
