"""split_batches inside real Trainers: every global batch is that of one process, whatever the world and the window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grids import grid
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from ranks import make_trainer
from torch.utils.data import DataLoader
from toys import Toy, approx, same_everywhere

from lightning_gradavg import GradAvgStrategy


class Samples(Toy):
    """Toy-S over samples x = 1 .. n; notes the samples of each micro-batch that count."""

    def __init__(self, size: int, batch: int, shuffle: bool = False, **options: Any) -> None:
        super().__init__(kind="s", **options)
        self.size, self.batch, self.shuffle = size, batch, shuffle
        self.samples: list[list[float]] = []

    def train_dataloader(self) -> Any:
        data: Any = torch.arange(1, self.size + 1, dtype=torch.float64)
        return DataLoader(data, batch_size=self.batch, shuffle=self.shuffle)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        strategy: Any = self.trainer.strategy
        chunk = strategy._batches.chunk
        self.samples.append([] if chunk.stand_in else batch.tolist())
        self.log("loss", self.losses(batch).mean(), on_epoch=True, on_step=False, sync_dist=True)
        return super().training_step(batch, batch_idx)


def fit(options: dict[str, Any], strategy: dict[str, Any], seed: int = 7, **trainer_options: Any) -> Any:
    seed_everything(seed, verbose=False)
    model = Samples(**options)
    trainer = make_trainer(GradAvgStrategy(split_batches=True, **strategy), **{"max_epochs": 1, **trainer_options})
    trainer.fit(model)
    return model.seen, model.samples, trainer.global_step, float(trainer.callback_metrics["loss"])


@pytest.mark.parametrize(
    ("world_size", "limit", "reduction"), grid([1, 2, 3, 4], [None, 1, 2], ["mean", "weighted_mean"], strength=1)
)
def test_batch_of_12_on_any_world(world, world_size, limit, reduction):
    """Case 23: 24 samples in batches of 12 are the two steps of one process, on any world, accumulated or not."""
    options = {"size": 24, "batch": 12, "lr": 0.001}
    ranks = world(world_size).run(fit, options, {"reduction": reduction, "max_device_batch_size": limit})
    seen = same_everywhere([rank[0] for rank in ranks])
    w = 1.0
    for gradient, xs in zip(seen.gradients, (range(1, 13), range(13, 25)), strict=True):
        expected = sum(w * x * x for x in xs) / 12
        assert approx(expected) == gradient.item()
        w -= 0.001 * expected
    assert [2] * world_size == [rank[2] for rank in ranks]


@pytest.mark.parametrize(
    ("world_size", "sizes", "limit"), grid([2, 3, 4], [(5, 5), (1, 1), (7, 4)], [None, 1], strength=2)
)
def test_uneven_and_missing_chunks(world, world_size, sizes, limit):
    """Case 27: 5 samples over 4 ranks are 2, 2, 1, 0; the gradient is that of all samples, and the logged loss, too."""
    size, batch = sizes
    ranks = world(world_size).run(fit, {"size": size, "batch": batch, "lr": 0.0}, {"max_device_batch_size": limit})
    seen = same_everywhere([rank[0] for rank in ranks])
    for step, gradient in enumerate(seen.gradients):
        xs = range(1 + step * batch, min(size, (step + 1) * batch) + 1)
        assert approx(sum(x * x for x in xs) / len(xs)) == gradient.item()
    read = sorted(x for rank in ranks for micro_batch in rank[1] for x in micro_batch)
    assert list(range(1, size + 1)) == read
    if batch == size:
        assert [approx(0.5 * sum(x * x for x in range(1, size + 1)) / size, 1e-6)] * world_size == [r[3] for r in ranks]


class Counted(Samples):
    """Notes in how many micro-batches and loader batches validation and each epoch came."""

    def __init__(self, loaders: int = 1, workers: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.loaders, self.workers = loaders, workers
        self.validated_at: list[int] = []
        self.loaded = 0

    def train_dataloader(self) -> Any:
        self.loaded += 1
        data: Any = torch.arange(1, self.size + 1, dtype=torch.float64)
        persistent = {"persistent_workers": True} if self.workers else {}
        made = [
            DataLoader(data, self.batch, shuffle=self.shuffle, num_workers=self.workers, **persistent)
            for _ in range(self.loaders)
        ]
        return made[0] if self.loaders == 1 else dict(zip("ab", made, strict=False))

    def val_dataloader(self) -> Any:
        return DataLoader(torch.ones(4), batch_size=2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.validated_at.append(self.trainer.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"] + 0 * batch["b"] if isinstance(batch, dict) else batch, batch_idx)


def count(options: dict[str, Any], limit: int | None, **trainer_options: Any) -> Any:
    """Body: train on batches of 4 and return what happened when."""
    seed_everything(7, verbose=False)
    model = Counted(**{"size": 20, "batch": 4, "lr": 0.0, **options})
    strategy = GradAvgStrategy(split_batches=True, max_device_batch_size=limit)
    trainer = make_trainer(strategy, **{"max_epochs": 1, **trainer_options})
    trainer.fit(model)
    after = (trainer.accumulate_grad_batches, trainer.limit_train_batches, trainer.val_check_interval)
    gradients = [round(gradient.item(), 9) for gradient in model.seen.gradients]
    return gradients, model.validated_at, model.loaded, strategy.global_batch_size, after


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "limit": ({}, {"limit_train_batches": 3}, 3),
    "fraction": ({}, {"limit_train_batches": 0.7}, 3),
    "overfit": ({}, {"overfit_batches": 2, "max_epochs": 2}, 4),
    "validation every 2 batches": ({}, {"val_check_interval": 2}, 5),
    "validation in mid-epoch": ({}, {"val_check_interval": 0.5}, 5),
    "window of 2": ({}, {"accumulate_grad_batches": 2}, 3),
    "scheduled window": ({}, {"max_epochs": 2, "callbacks": "schedule"}, 8),
    "steps": ({}, {"max_epochs": 5, "max_steps": 7}, 7),
    "reloaded": ({"shuffle": True}, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}, 10),
    "reloaded, validation in mid-epoch": (
        {},
        {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2, "val_check_interval": 0.5},
        10,
    ),
    "two loaders": ({"loaders": 2}, {}, 5),
    "workers": ({"workers": 1, "shuffle": True}, {"max_epochs": 2}, 10),
}


def count_option(name: str, limit: int | None) -> Any:
    options, trainer_options, _ = OPTIONS[name]
    if trainer_options.get("callbacks") == "schedule":
        trainer_options = {**trainer_options, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]}
    return count(options, limit, **trainer_options)


@pytest.mark.parametrize(("name", "limit"), grid(list(OPTIONS), [None, 1], strength=1))
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_trainer_options_count_loader_batches(world, name, limit):
    """Options that count batches mean loader batches, on 3 ranks and in micro-batches of one sample, too."""
    (expected,) = world(1).run(count_option, name, None)
    assert OPTIONS[name][2] == len(expected[0])
    for ours in world(3).run(count_option, name, limit):
        assert expected == ours


class Normed(Samples):
    """Normalizes over the samples of its chunk."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm = torch.nn.BatchNorm1d(1).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.losses(batch).mean() + self.norm(batch[:, None]).sum()


def fit_normed(batch: int) -> Any:
    model = Normed(size=batch, batch=batch, lr=0.0)
    trainer = make_trainer(GradAvgStrategy(split_batches=True), max_epochs=1)
    trainer.fit(model)
    return model.norm.running_mean.item(), model.norm.num_batches_tracked.item()


@pytest.mark.parametrize(("world_size", "batch"), [(2, 4), (4, 6), (3, 4)])
def test_batch_norm_with_missing_chunks(world, world_size, batch):
    """Batch norm trains where ranks have no samples (6 over 4, 4 over 3), and rank 0's buffers see its own alone."""
    mean, tracked = world(world_size).run(fit_normed, batch)[0]
    assert (approx(0.1 * 1.5), 1) == (mean, tracked)


class Drawn(LightningModule):
    """Draws its weights before it is trained, on a shuffled loader."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1, dtype=torch.float64)

    def train_dataloader(self) -> Any:
        data: Any = torch.arange(20, dtype=torch.float64)[:, None] / 20
        return DataLoader(data, 4, shuffle=True)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return (self.net(batch) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def order(options: dict[str, Any] | None) -> list[float]:
    """Body: a script that seeds, draws weights, and trains."""
    seed_everything(3, verbose=False)
    module = Drawn()
    if options is None:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(accelerator="cpu", devices=1, max_epochs=2, enable_model_summary=False, **quiet)  # type: ignore[arg-type]
    else:
        trainer = make_trainer(GradAvgStrategy(**options), max_epochs=2)
    trainer.fit(module)
    return [module.net.weight.item(), module.net.bias.item()]


@pytest.mark.parametrize(
    "options",
    [
        {"split_batches": True},
        {"split_batches": True, "max_device_batch_size": 1},
        {"num_replicas": 2, "split_batches": True},
    ],
)
def test_weights_drawn_before_fit_leave_the_order_of_one_process(world, options):
    """The script of one device trains to the same bits on one process, and to 1e-12 on 2 and 3."""
    (expected,) = world(1).run(order, None)
    (alone,) = world(1).run(order, options)
    if options == {"split_batches": True}:
        assert expected == alone
    for ranks in (1, 2, 3):
        for weights in world(ranks).run(order, options):
            assert expected == pytest.approx(weights, rel=1e-12)


class Both(Samples):
    """Reads batches of 8 and of 5 samples together; a number weighs each of them."""

    weighs: bool = True

    def train_dataloader(self) -> Any:
        return {"a": DataLoader(torch.arange(8.0).double(), 8), "b": DataLoader(torch.arange(5.0).double(), 5)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        samples = torch.cat([batch["a"], batch["b"]])
        loss = self.losses(samples).mean()
        return {"loss": loss, "weight": len(samples)} if self.weighs else loss


def fit_both(weighs: bool, **strategy: Any) -> Any:
    model = Both(13, 13)
    model.weighs = weighs
    make_trainer(GradAvgStrategy(split_batches=True, **strategy), max_epochs=1).fit(model)
    return model.seen


def test_loaders_that_fall_on_ranks_in_other_proportions_need_a_weight(world):
    """4 + 3 samples on rank 0 and 4 + 2 on rank 1 are neither 4 and 4 nor 3 and 2."""
    seen = same_everywhere(world(2).run(fit_both, True))
    assert [approx(sum(x * x for x in [*range(8), *range(5)]) / 13)] == [each.item() for each in seen.gradients]
    for pieces in ({}, {"max_device_batch_size": 4}):
        raised = world(2).run_expecting_errors(fit_both, False, **pieces)
        assert all("the number of samples cannot be read from a batch of type dict" in one.message for one in raised)
