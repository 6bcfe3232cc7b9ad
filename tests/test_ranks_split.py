"""split_batches inside real Trainers: every global batch is that of one process, whatever the world and the window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from ranks import make_trainer
from torch.utils.data import DataLoader
from toys import Toy, same_everywhere

from lightning_gradavg import GradAvgStrategy


def approx(value, tolerance=1e-12):
    return pytest.approx(value, rel=tolerance, abs=tolerance)


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
        chunk = strategy._data.chunk
        self.samples.append([] if chunk.stand_in else batch.tolist())
        self.log("loss", self.losses(batch).mean(), on_epoch=True, on_step=False, sync_dist=True)
        return super().training_step(batch, batch_idx)


def fit(options: dict[str, Any], strategy: dict[str, Any], seed: int = 7, **trainer_options: Any) -> Any:
    seed_everything(seed, verbose=False)
    model = Samples(**options)
    trainer = make_trainer(GradAvgStrategy(split_batches=True, **strategy), **{"max_epochs": 1, **trainer_options})
    trainer.fit(model)
    return model.seen, model.samples, trainer.global_step, float(trainer.callback_metrics["loss"])


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
@pytest.mark.parametrize("limit", [None, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
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


@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.parametrize(("size", "batch"), [(5, 5), (1, 1), (7, 4)])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_uneven_and_missing_chunks(world, world_size, size, batch, limit):
    """Case 27: 5 samples over 4 ranks are 2, 2, 1, 0; the gradient is that of all samples, and the logged loss, too."""
    ranks = world(world_size).run(fit, {"size": size, "batch": batch, "lr": 0.0}, {"max_device_batch_size": limit})
    seen = same_everywhere([rank[0] for rank in ranks])
    for step, gradient in enumerate(seen.gradients):
        xs = range(1 + step * batch, min(size, (step + 1) * batch) + 1)
        assert approx(sum(x * x for x in xs) / len(xs)) == gradient.item()
    read = sorted(x for rank in ranks for micro_batch in rank[1] for x in micro_batch)
    assert list(range(1, size + 1)) == read
    if batch == size:
        assert [approx(0.5 * sum(x * x for x in range(1, size + 1)) / size, 1e-6)] * world_size == [r[3] for r in ranks]
