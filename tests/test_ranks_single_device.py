"""A script trains and logs on any number of ranks as in stock Lightning on one: a rank without samples adds nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel import SAMPLES, SEED, Model, assert_same_run, fit, parallel, single
from lightning.pytorch import seed_everything
from ranks import make_trainer
from test_ranks_evaluation import Lists
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, SumMetric
from toys import Toy, loader

from lightning_gradavg import GradAvgStrategy


class Script(Model):
    """Logs values and metrics in every way, by a `log` of its own; its learning rate follows what validation logs."""

    samples, generator = SAMPLES, None

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        seed_everything(SEED, verbose=False)  # the order of the samples is drawn after the weights
        self.net = self.build().to(dtype)
        self.means, self.lists = nn.ModuleDict({"train_mean": MeanMetric(), "val_mean": MeanMetric()}), Lists()

    def train_dataloader(self) -> Any:
        data = TensorDataset(*(leaf[: self.samples] for leaf in self.data()))
        return DataLoader(data, 8, shuffle=True, generator=self.generator)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*self.data()), 8)

    def log(self, name: str, value: Any, **options: Any) -> None:  # type: ignore[override]  # as users narrow it
        super().log(f"mine/{name}", value, **options)

    def losses(self, name: str, batch: Any) -> Tensor:
        """Return the loss of each sample, and log the mean of those of an epoch."""
        losses: Tensor = (self(batch[0]) - batch[1]).square().mean(1)
        self.means[name](losses)
        self.log(name, self.means[name], on_step=False, on_epoch=True)
        return losses

    def log_often(self, losses: Tensor) -> Tensor:
        """Log what is put together in every way, several names at once, one three times, and one on one rank."""
        loss, how = losses.mean(), {"on_step": True, "on_epoch": True}
        for reduce in ("mean", "sum", "max", "min"):
            self.log(reduce, getattr(losses, reduce)(), reduce_fx=reduce, sync_dist=True, **how)
        self.log_dict({"a": loss, "b": 2 * loss}, **how)
        for factor in (1, 2, 3):
            self.log("often", factor * loss, on_step=False, on_epoch=True)
        if self.trainer.is_global_zero:
            self.log("rank_zero", 0.5, on_step=False, on_epoch=True)
        self.log("infinite", torch.tensor(torch.inf), reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.losses("train_mean", batch)
        self.lists.update(losses.detach())
        self.log("lists", self.lists, on_step=False, on_epoch=True)
        return self.log_often(losses)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        losses = self.losses("val_mean", batch)
        self.log("val", losses.mean(), sync_dist=True)
        # As of a model that is evaluated in training mode: by the statistics of the batch.
        normed = nn.functional.batch_norm(losses[:, None], None, None, training=True)
        self.log("val_normed", normed.max(), sync_dist=True)

    def on_train_epoch_start(self) -> None:
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"], sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "mine/val"}}


class Even(Script):
    """No batch is short; if the sampler is asked for one more after the last, it draws from its generator again."""

    samples, generator = 32, property(lambda _: torch.Generator().manual_seed(1))  # anew


class OfNorm(Script):
    normed = True


class OfAll(Script):
    """Has the loss of all outputs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.losses("train_mean", batch)
        called = isinstance(self.trainer.strategy, GradAvgStrategy)  # Lightning 2 ignores what follows
        return losses if called else self.training_step_end(losses)

    def training_step_end(self, losses: Tensor) -> Tensor:
        return self.log_often(losses)


OPTIONS: dict[str, Any] = {"max_epochs": 3, "precision": "64-true"}
SPLIT = {"split_batches": True, "reduction": "weighted_mean", "exact_evaluation": True}


@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True")
@pytest.mark.parametrize(
    ("kind", "world_size", "strategy"),
    [
        (OfNorm, 1, single()),
        (OfNorm, 3, single()),
        (OfAll, 4, parallel(None)),
        (Script, 3, parallel()),
        (Script, 4, single()),
        (Script, 3, SPLIT | {"max_device_batch_size": 2}),
        (Even, 4, {"split_batches": True, "exact_evaluation": True}),
    ],
    ids=str,
)
def test_a_script_trains_as_in_stock_lightning(world, kind, world_size, strategy):
    """Order, gradients, statistics, losses and metrics are stock Lightning's; those of one rank to the bit."""
    (expected,), tolerance = world(1).run(fit, kind, None, **OPTIONS), 0 if world_size == 1 else 1e-12
    runs = world(world_size).run(fit, kind, strategy, **OPTIONS)
    last = expected.logged[-1]
    assert last.keys() == runs[0].logged[-1].keys()
    assert last["mine/rate"] < 0.05
    assert {"mine/a_step", "mine/b_epoch", "mine/often", "mine/infinite", "mine/rank_zero"} < last.keys()
    if "equivalent_to" not in strategy:  # what training logs is then Lightning's mean over ranks, or a rank's own
        expected, *runs = (
            replace(run, logged=[{name: one[name] for name in one if "val" in name} for one in run.logged])
            for run in (expected, *runs)
        )
    assert_same_run(runs, expected, tolerance)


class Logging(Toy):
    """Logs samples in every way; a stand-in's are NaN."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.metrics = nn.ModuleDict({"sum": SumMetric(), "mean": MeanMetric(), "max": MaxMetric()})
        self.register_buffer("sums", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        strategy: Any = self.trainer.strategy
        stands_in = strategy._batches.chunk is not None and strategy._batches.chunk.stand_in
        batch = batch * torch.nan if stands_in else batch
        self.sums += batch.sum()
        for name, metric in self.metrics.items():
            metric.update(torch.tensor(9.0) if stands_in else batch)
            self.log(f"metric {name}", metric, on_step=False, on_epoch=True)
        for reduction in ("mean", "sum", "max", "min"):
            for name, sync in ((reduction, True), (f"own {reduction}", False)):
                self.log(name, batch.mean(), reduce_fx=reduction, on_step=False, on_epoch=True, sync_dist=sync)
        self.log("step", batch.mean(), on_step=True, on_epoch=False, sync_dist=True)
        return super().training_step(batch, batch_idx)


def log_of_stand_ins(split: bool) -> Any:
    """Body: 3 samples, of which rank 1 has one or, split in batches of 2, none of the last batch."""
    module, samples = Logging(), [[1.0, 1.5], [2.75]] if split else [[[1.0], [2.75]], [[1.5]]][dist.get_rank()]
    strategy: Any = {"split_batches": True} if split else {"reduction": "weighted_mean"}
    trainer = make_trainer(GradAvgStrategy(**strategy), max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, loader(samples))
    assert module.w.grad is None or module.w.grad.isfinite()
    return {name: value.item() for name, value in trainer.callback_metrics.items()}, module.sums.item()


@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True")
@pytest.mark.parametrize("split", [True, False])
def test_a_stand_in_leaves_no_trace(world, split):
    """Samples 1, 1.5 and 2.75 on 2 ranks: their sum is 5.25, their mean 1.75; the second step has one of them only."""
    for rank, (logged, sums) in enumerate(world(2).run(log_of_stand_ins, split)):
        assert (5.25, 1.75, 2.75) == tuple(pytest.approx(logged[f"metric {name}"]) for name in ("sum", "mean", "max"))
        assert (1.75, 5.25, 2.75, 1.0) == tuple(pytest.approx(logged[name]) for name in ("mean", "sum", "max", "min"))
        assert pytest.approx(2.75) == logged["step"]
        assert {0: 3.75, 1: 1.5}[rank] == sums, "a buffer that sums samples"
        own = {0: (1.875, 3.75, 2.75, 1.0), 1: (1.5, 1.5, 1.5, 1.5)}[rank]
        assert own == tuple(pytest.approx(logged[f"own {name}"]) for name in ("mean", "sum", "max", "min"))
