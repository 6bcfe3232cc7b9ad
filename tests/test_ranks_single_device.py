"""A script trains and logs on any number of ranks, whole or in pieces, as in stock Lightning on one device.

One loader batch is one step of Lightning, however many pieces a rank computes; a rank without samples adds nothing.
"""

from __future__ import annotations

import pickle
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from data_parallel import SEED, Model, Options, assert_same_run, fit, parallel, single
from lightning.pytorch import Callback, LightningDataModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from ranks import group_of, make_trainer
from test_ranks_evaluation import Lists
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, Metric, SumMetric
from toys import Toy, approx, make_loader

from lightning_gradavg import GradAvgStrategy, gather
from lightning_gradavg.reduction.rows import RowExchange


class Script(Model):
    """Logs values and metrics in every way, by a `log` of its own; its rates follow the batches, and validation."""

    samples, generator = 21, None  # in batches of 8

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        seed_everything(SEED, verbose=False)  # the order of the samples is drawn after the weights
        self.net = self.build().to(dtype)
        self.means, self.lists = nn.ModuleDict({"train_mean": MeanMetric(), "val_mean": MeanMetric()}), Lists()

    def data(self) -> Any:
        return [leaf[: self.samples] for leaf in super().data()]

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*self.data()), 8, shuffle=True, generator=self.generator)

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
        return {"loss": self.log_often(losses), "rows": batch[1], "height": len(batch[1])}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        losses = self.losses("val_mean", batch)
        self.log("val", losses.mean(), sync_dist=True)
        # As of a model that is evaluated in training mode: by the statistics of the batch.
        normed = nn.functional.batch_norm(losses[:, None], None, None, training=True)
        self.log("val_normed", normed.max(), sync_dist=True)

    def on_train_epoch_start(self) -> None:
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"], sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        of_batches = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return [optimizer], [
            {"scheduler": plateau, "monitor": "mine/val"},
            {"scheduler": of_batches, "interval": "step", "frequency": 2},
        ]

    def optimizer(self) -> Any:
        return super().configure_optimizers()


class Even(Script):
    """No batch is short; if the sampler is asked for one more after the last, it draws from its generator again."""

    samples, generator = 16, property(lambda _: torch.Generator().manual_seed(1))  # anew


class OfNorm(Script):
    normed = True


class ComputedAgain(OfNorm):
    """Has the backward compute the net again, and with it batch norm over all ranks."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.net, x, use_reentrant=False)


class OfFrozenNorm(OfNorm):
    """Normalizes by its running statistics, also in training."""

    def build(self) -> nn.Module:
        net = super().build()
        for layer in net.modules():
            if isinstance(layer, nn.BatchNorm1d):
                layer.eval()
        return net


class Spectral(Script):
    """Every forward in training moves the buffers that the weights follow from."""

    def build(self) -> nn.Module:
        net: Any = super().build()
        nn.utils.parametrizations.spectral_norm(net[0])
        return net


class LBFGS(Script):
    def optimizer(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class Keeps(Script):
    """Zeroes the gradients of every second window of two; none is short."""

    samples = 32

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 4 == 0:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)


class Seen(ProgressBar):
    """Notes what a callback sees at the end of each batch, averages the weights, and stops the run when told."""

    def __init__(self, stop: int | None) -> None:
        super().__init__()
        self.stop, self.average = stop, dict[str, Tensor]()
        self.steps: list[tuple[Any, ...]] = []
        self.outputs: list[tuple[float, list[Any]]] = []

    def disable(self) -> None:
        """Stay on all ranks."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rate, total = trainer.optimizers[0].param_groups[0]["lr"], self.total_train_batches
        self.steps.append((batch_idx, trainer.global_step, rate, total))
        for name, value in module.named_parameters():
            self.average[name] = self.average.get(name, value).detach().lerp(value.detach(), 0.3)
        if "rows" in outputs:
            chunk = getattr(getattr(trainer.strategy, "_batches", None), "chunk", None)
            size = 0 if chunk is not None and chunk.stand_in else int(torch.as_tensor(outputs["height"]).sum())
            self.outputs.append((size * float(outputs["loss"]), outputs["rows"][:size].tolist()))
        trainer.should_stop |= len(self.steps) == self.stop


def seen(kind: type[Script], strategy: Options | None, folder: str, stop: int | None = None, **options: Any) -> Any:
    """Body: train; return the run, what is exact on any number of ranks, averages, and outputs."""
    callback, hooks = Seen(stop), Mock(spec=Callback, state_key="hooks", **{"state_dict.return_value": {}})
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    options = {"max_epochs": 3, "precision": "64-true", **options}
    callbacks = [callback, hooks, keep]
    run = fit(kind, strategy, callbacks=callbacks, enable_checkpointing=True, enable_progress_bar=True, **options)
    saved = sorted(path.name for path in Path(folder).iterdir())
    called = [name for name, *_ in hooks.method_calls if "validation_batch" not in name]  # which are dealt
    progress = callback.trainer.fit_loop.epoch_loop.batch_progress.state_dict()
    return run, (callback.steps, saved, called, progress), callback.average, callback.outputs


SPLIT = {"split_batches": True, "reduction": "weighted_mean", "exact_evaluation": True}
PARTS = {**SPLIT, "max_device_batch_size": 2}
TWO = {"accumulate_grad_batches": 2}  # full windows: stock Lightning divides a short one by the length of these
VIEWS = parallel(gradient_as_bucket_view=True, find_unused_parameters=True)


@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True")
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@pytest.mark.filterwarnings("ignore:Found 1 module.* in eval mode at the start of training")
@pytest.mark.parametrize(
    ("kind", "world_size", "strategy", "options"),
    [
        (OfNorm, 1, single(), {}),
        (OfNorm, 3, single(), {}),
        (ComputedAgain, 2, single(), {}),
        (OfFrozenNorm, 2, single(max_device_batch_size=3), {}),
        (Script, 3, PARTS, {}),
        (Even, 2, {"split_batches": True, "exact_evaluation": True}, {}),
        (Spectral, 4, PARTS, {"limit_train_batches": 0.7}),
        (Keeps, 2, single(max_device_batch_size=3), TWO),
        (Keeps, 2, {"reproducible": True, "num_replicas": 2, "exact_evaluation": True}, TWO),
        (Script, 4, single(), {**TWO, "limit_train_batches": 2, "gradient_clip_val": 0.05}),
        (LBFGS, 2, PARTS, {}),
        (Script, 1, single(max_device_batch_size=3), {"stop": 2, "min_epochs": 0}),
        (Script, 3, VIEWS, {}),
    ],
    ids=str,
)
def test_a_script_trains_as_in_stock_lightning(world, tmp_path, kind, world_size, strategy, options):
    """Order, gradients, statistics, losses, metrics, hooks, progress, rates and checkpoints are stock Lightning's.

    Those of one rank that computes whole batches are so to the bit; outputs side by side are those of the batch.
    """
    ((expected, exact, average, whole),) = world(1).run(seen, kind, None, str(tmp_path / "whole"), **options)
    runs, *found = zip(*world(world_size).run(seen, kind, strategy, str(tmp_path / "ours"), **options), strict=True)
    last = expected.logged[-1]
    assert last.keys() == runs[0].logged[-1].keys()
    assert "stop" in options or last["mine/rate"] < 0.05
    assert {"mine/a_step", "mine/b_epoch", "mine/often", "mine/infinite", "mine/rank_zero"} < last.keys()
    if "equivalent_to" not in strategy:  # what training logs is then Lightning's mean over ranks, or a rank's own
        expected, *runs = (
            replace(run, logged=[{name: one[name] for name in one if "val" in name} for one in run.logged])
            for run in (expected, *runs)
        )
    assert_same_run(runs, expected, 0 if world_size == 1 and strategy == single() else 1e-12)
    for mine, averaged, _ in zip(*found, strict=True):
        assert exact == mine
        torch.testing.assert_close(averaged, average, rtol=1e-12, atol=1e-12)
    for parts, (loss, rows) in zip(zip(*found[-1], strict=True), whole, strict=True):
        losses, of_ranks = zip(*parts, strict=True)
        assert rows == [row for part in of_ranks for row in part]
        assert pytest.approx(loss, rel=1e-12) == sum(losses)


class Cut(Model):
    """Ends its first epoch within the second batch, of 7 samples, whose last piece has 4."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (self.current_epoch, batch_idx) == (0, 1) and len(batch[0]) in (4, 7):
            raise StopIteration
        return self.loss_of(*batch)


def test_a_step_that_ends_its_epoch_leaves_nothing_to_the_next(world):
    given = {"load": {"sizes": [8, 7]}, "max_epochs": 2}
    (expected,) = world(1).run(fit, Cut, None, **given)
    assert len(expected.gradients) == 3
    assert_same_run(world(1).run(fit, Cut, single(max_device_batch_size=5), **given), expected, 1e-12)


class Adversarial(Model):
    """Trains on inputs that it has moved up the gradient of the loss: a backward within `training_step`."""

    normed = True

    def loss_of(self, x: Tensor, y: Tensor) -> Any:
        x = x.clone().requires_grad_()
        # The gradient of samples that do not count is undefined below batch norm.
        gradients: Any = torch.autograd.grad((self(x) - y).square().sum(), x, allow_unused=True)
        uphill = gradients[0]
        moved = x.detach()
        if uphill is not None:
            moved = moved + 0.1 * uphill
        return super().loss_of(moved, y)


@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True")
def test_a_backward_within_a_step_passes_batch_norm_where_a_rank_has_no_samples(world):
    """The second batch has 2 samples, and rank 2 has none of them. The sums of batch norm are no user's collective."""
    load = {"sizes": [8, 2]}
    (expected,) = world(1).run(fit, Adversarial, None, load=load)
    assert_same_run(world(3).run(fit, Adversarial, single(), load=load), expected, 1e-11)


def patched() -> tuple[list[int], bool]:
    """Body: the calls of methods that a user has put on the instance, and whether they are still there."""
    module = Model()
    mine = {name: Mock(wraps=getattr(module, name)) for name in ("training_step", "log")}
    vars(module).update(mine)
    make_trainer(GradAvgStrategy(**parallel()), max_epochs=1).fit(module, module.loader([8], times=3))
    return [each.call_count for each in mine.values()], mine.items() <= vars(module).items()


def test_patched_methods_are_called_and_put_back(world):
    """In 3 steps of 2 replicas each, which log once."""
    assert [([6, 3], True)] * 2 == world(2).run(patched)


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
        self.log("group step", batch.mean(), sync_dist=True, sync_dist_group=group_of((0, 1)))
        return super().training_step(batch, batch_idx)


def log_of_stand_ins(split: bool) -> Any:
    """Body: 3 samples, of which rank 1 has one or, split in batches of 2, none of the last batch."""
    module, samples = Logging(), [[1.0, 1.5], [2.75]] if split else [[[1.0], [2.75]], [[1.5]]][dist.get_rank()]
    strategy: Any = {"split_batches": True} if split else {"reduction": "weighted_mean"}
    trainer = make_trainer(GradAvgStrategy(**strategy), max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, make_loader(samples))
    assert module.w.grad is None or module.w.grad.isfinite()
    return {name: value.item() for name, value in trainer.callback_metrics.items()}, module.sums.item()


@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True")
@pytest.mark.parametrize("split", [True, False])
def test_a_stand_in_leaves_no_trace(world, split):
    """Samples 1, 1.5 and 2.75 on 2 ranks: their sum is 5.25, their mean 1.75; the second step has one of them only."""
    for rank, (logged, sums) in enumerate(world(2).run(log_of_stand_ins, split)):
        assert (5.25, 1.75, 2.75) == tuple(pytest.approx(logged[f"metric {name}"]) for name in ("sum", "mean", "max"))
        assert (1.75, 5.25, 2.75, 1.0) == tuple(pytest.approx(logged[name]) for name in ("mean", "sum", "max", "min"))
        assert pytest.approx(2.75) == logged["step"] == logged["group step"]
        assert {0: 3.75, 1: 1.5}[rank] == sums, "a buffer that sums samples"
        own = {0: (1.875, 3.75, 2.75, 1.0), 1: (1.5, 1.5, 1.5, 1.5)}[rank]
        assert own == tuple(pytest.approx(logged[f"own {name}"]) for name in ("mean", "sum", "max", "min"))


class OfSamples(Metric):
    """The mean of a list of samples, one tensor without dimensions each."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("samples", default=[], dist_reduce_fx=None)

    def update(self, samples: Tensor) -> None:
        self.samples += list(samples)

    def compute(self) -> Tensor:
        return torch.stack(self.samples).mean()


class OfUpdates(Metric):
    """The mean of the means of updates, which the ranks average."""

    full_state_update = False
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="mean")

    def update(self, samples: Tensor) -> None:
        self.mean = self.mean + (samples.mean() - self.mean) / self.update_count

    def compute(self) -> Tensor:
        return self.mean


class OwnStates(Toy):
    """Updates metrics with states of every kind."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.metrics = nn.ModuleDict({"of samples": OfSamples(), "of updates": OfUpdates()})

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        for name, metric in self.metrics.items():
            metric.update(batch)
            self.log(name, metric, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def states_of_stand_ins() -> dict[str, float]:
    """Body: batches of 2 samples, of which the third of three ranks has none, and of which one has a single sample."""
    trainer = make_trainer(GradAvgStrategy(equivalent_to="single_device"), max_epochs=2)
    trainer.fit(OwnStates(), make_loader([[1.0, 2.0], [3.0, 4.0], [5.0]]))
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


# Torchmetrics says it on rank 0 of a node; the ranks of a test are nobody's.
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_a_stand_in_does_not_count_as_an_update_of_a_metric(world):
    """Rank 0 has 1, 3 and 5, rank 1 has 2 and 4: the ranks' means are both 3, and rank 2's default is none of them."""
    assert [{"of samples": 3.0, "of updates": 3.0}] * 3 == world(3).run(states_of_stand_ins)


class LoggingMetric(Toy):
    """Logs a metric object, of a step and of the epoch."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.total = SumMetric()
        self.values_of_steps: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.total(batch)
        self.log("total", self.total, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.values_of_steps.append(self.trainer.callback_metrics["total_step"].item())


def logged_metric(strategy: Any) -> tuple[list[float], float]:
    """Body: 2 batches of 4 samples; return what the metric object shows in each step, and of the epoch."""
    module = LoggingMetric()
    trainer = make_trainer(GradAvgStrategy(**strategy), max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, make_loader([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]))
    return module.values_of_steps, trainer.callback_metrics["total_epoch"].item()


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ({"equivalent_to": "single_device"}, [[3.0, 11.0], [7.0, 15.0]]),
        ({"equivalent_to": "data_parallel", "num_replicas": 4}, [[2.0, 6.0], [4.0, 8.0]]),
    ],
)
def test_a_metric_object_shows_the_last_replica_in_a_step_and_all_samples_in_an_epoch(world, strategy, expected):
    """docs/equivalence.md says so. The epoch's sum is that of 1 to 8."""
    assert [(values, 36.0) for values in expected] == world(2).run(logged_metric, strategy)


class Weighing(Model):
    """Returns what `returns` makes of its loss. Notes when its backward begins, beside what a test notes."""

    events: list[str]

    def returns(self, loss: Tensor) -> Any:
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss: Tensor = self.loss_of(*batch)
        loss.register_hook(self.note_backward)
        return self.returns(loss)

    def note_backward(self, gradient: Tensor) -> None:
        self.events.append("backward")


class Counting(Weighing):
    def returns(self, loss: Tensor) -> Any:
        return {"loss": loss, "weight": 3}


class CountingOnRank1(Weighing):
    def returns(self, loss: Tensor) -> Any:
        if dist.get_rank() == 1:
            return {"loss": loss, "weight": 3}
        return loss


def events_of_steps(kind: type[Weighing], strategy: Options, accumulation: int = 1) -> list[str]:
    """Body: in which order backwards begin and this rank waits for the rows of all ranks."""
    module, events = kind(), list[str]()
    vars(module)["events"] = events
    read = RowExchange.read

    def noted(exchange: RowExchange) -> list[list[float]]:
        events.append("rows")
        return read(exchange)

    with patch.object(RowExchange, "read", noted):
        trainer = make_trainer(GradAvgStrategy(**strategy), max_epochs=1, accumulate_grad_batches=accumulation)
        trainer.fit(module, module.loader([8, 8, 8]))
    return events


@pytest.mark.parametrize("kind", [Weighing, Counting])
@pytest.mark.parametrize("strategy", [single(), parallel(2), {"split_batches": True, "reduction": "weighted_mean"}])
def test_ranks_wait_for_each_other_within_the_last_backward_of_a_window(world, strategy, kind):
    """And once before the first backward of a run, to choose the unit of its weights."""
    assert [["rows", *["backward", "rows"] * 3]] * 2 == world(2).run(events_of_steps, kind, strategy)
    events = world(2).run(events_of_steps, kind, strategy, accumulation=2)
    assert [["rows", "backward", "backward", "rows", "backward", "rows"]] * 2 == events


def test_a_weight_on_one_rank_is_an_error_on_all(world):
    for raised in world(2).run_expecting_errors(events_of_steps, CountingOnRank1, single()):
        assert "the ranks' losses differ: no weight given on rank 0; a weight given on rank 1" in raised.message


class CountsSamples(Toy):
    """Counts samples in a buffer, or in a way that gives the same on any number of ranks."""

    total: Tensor

    def __init__(self, counts: str) -> None:
        super().__init__()
        self.counts = counts
        self.register_buffer("total", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.counts == "samples":
            self.total += len(batch)
        if self.counts == "gathered samples":
            self.total += len(gather(batch))
        if self.counts == "steps":
            self.total += 1
        if self.counts == "forwards":
            for _ in range(4):  # as many as a rank has samples
                self.total += 1
        if self.counts == "nothing, but holds a length":
            self.total.fill_(4)  # as many as a rank has samples
        return super().training_step(batch, batch_idx)


def train_counting_samples(counts: str, **strategy: Any) -> int:
    """Body: train 4 steps of 8 samples, and return what the buffer counts."""
    module = CountsSamples(counts)
    make_trainer(GradAvgStrategy(**strategy), max_epochs=1).fit(module, make_loader([[1.0] * 8] * 4))
    return int(module.total)


@pytest.mark.parametrize(
    ("options", "samples", "whole"),
    [
        ({"equivalent_to": "single_device"}, 4, 8),
        ({"equivalent_to": "single_device", "max_device_batch_size": 2}, 2, 8),
        ({"split_batches": True, "max_device_batch_size": 2}, 2, 4),
    ],
    ids=str,
)
def test_a_buffer_that_counts_the_samples_of_a_piece_is_an_error(world, options, samples, whole):
    for raised in world(2).run_expecting_errors(train_counting_samples, "samples", **options):
        said = f"training_step adds {samples} to the buffer 'total', the samples of one piece of a batch"
        assert raised.message.startswith(f"{said}, where one process adds {whole}.")


@pytest.mark.parametrize(
    ("counts", "expected"),
    [("gathered samples", 32), ("steps", 4), ("forwards", 16), ("nothing, but holds a length", 4)],
)
def test_a_buffer_that_does_not_depend_on_the_cut_is_that_of_one_process(world, counts, expected):
    assert [expected] * 2 == world(2).run(train_counting_samples, counts, equivalent_to="single_device")


class Validated(Toy):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.losses(batch).mean())


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return make_loader([[1.0] * 4] * 2)

    val_dataloader = train_dataloader


class Copying(Callback):
    """Copies the module in hooks, as weight averaging does, and pickles it."""

    def __init__(self) -> None:
        for hook in ("on_train_start", "on_train_batch_start", "on_validation_batch_end", "on_validation_end"):
            setattr(self, hook, self.copy)

    def copy(self, trainer: Any, module: Any, *_: Any) -> None:
        for copied in (deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert copied.on_before_batch_transfer("a batch", 0) == "a batch"


def train_copying(*data: Any) -> float:
    """Body: train, and return the weight."""
    module = Validated()
    trainer = make_trainer(GradAvgStrategy(**single()), max_epochs=1, callbacks=[Copying()])
    if data:
        trainer.fit(module, *data)
    else:
        trainer.fit(module, datamodule=Data())
    return module.w.item()


@pytest.mark.parametrize("data", [(), (make_loader([[1.0] * 4] * 2),) * 2], ids=["data module", "loaders"])
def test_a_module_in_training_is_copied_and_pickled_as_in_stock(world, data):
    """Lightning warns of no hook that the user does not have."""
    assert [0.98] * 2 == approx(world(2).run(train_copying, *data))
