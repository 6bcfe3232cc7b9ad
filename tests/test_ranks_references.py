"""Whole runs against one process: the same weights along the way, and what a user sees of loss and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from ranks import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toys import Toy, loader

from lightning_gradavg import GradAvgStrategy


class MLP(LightningModule):
    """8-16-4, tanh, cross-entropy on 64 fixed samples in sequential order."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def train_mlp(dtype: torch.dtype, single: bool, split: bool) -> Any:
    """Body: 20 steps on global batches of 16."""
    draw = torch.Generator().manual_seed(2)
    x, y = torch.randn(64, 8, generator=draw, dtype=dtype), torch.randint(4, (64,), generator=draw)
    world_size = 1 if single else dist.get_world_size()
    if not split:
        chunks = [chunk.chunk(world_size)[dist.get_rank() % world_size] for chunk in torch.arange(64).split(16)]
        x, y = x[torch.cat(chunks)], y[torch.cat(chunks)]
    model = MLP(dtype)
    strategy: Any = SingleDeviceStrategy("cpu") if single else GradAvgStrategy(split_batches=split)
    options: Any = {"max_epochs": 5, "use_distributed_sampler": False}
    trainer = make_trainer(strategy, **options)
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=16 if split else 16 // world_size))
    assert trainer.global_step == 20
    return dist.get_rank(), model.state_dict()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("world_size", "dtype", "tolerance"),
    [(1, torch.float64, 1e-12), (2, torch.float32, 5e-6), (4, torch.float64, 1e-12)],
)
def test_same_global_batch_same_weights(world, world_size, dtype, tolerance, split):
    """Case 3: after 20 steps the weights are those of one device, whose bits one rank has."""
    ((_, expected),) = world(1).run(train_mlp, dtype, True, False)
    ranks = world(world_size).run(train_mlp, dtype, False, split)
    assert list(range(world_size)) == [rank for rank, _ in ranks]
    for name, value in expected.items():
        assert all(torch.equal(ranks[0][1][name], state[name]) for _, state in ranks)
        if world_size == 1 and not split:
            assert torch.equal(value, ranks[0][1][name])
        torch.testing.assert_close(ranks[0][1][name], value, rtol=tolerance, atol=tolerance)


class Logged(Toy):
    """Every micro-loss is 8."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self.w * 8
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss, "weight": batch.numel()}

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.outputs.append(outputs["loss"].item())


def log_loss() -> Any:
    model = Logged()
    trainer = make_trainer(
        GradAvgStrategy(reduction="weighted_mean"),
        max_epochs=1,
        use_distributed_sampler=False,
        accumulate_grad_batches=4,
    )
    trainer.fit(model, loader([[1.0] * (1 + dist.get_rank())] * 4))
    return dist.get_rank(), trainer.callback_metrics["loss_epoch"].item(), model.outputs, model.seen


def test_logged_loss_is_not_divided_by_the_window(world):
    """Case 17: what the module logs is its own undivided loss, 8.0; Lightning's output stays divided by the window."""
    ranks = world(2).run(log_loss)
    assert [(0, 8.0, [2.0] * 4), (1, 8.0, [2.0] * 4)] == [rank[:3] for rank in ranks]
