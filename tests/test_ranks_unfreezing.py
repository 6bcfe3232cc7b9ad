"""Parameters that begin to train after DDP was built, which reduces only those that trained then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.strategies import DDPStrategy
from ranks import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from toys import WEIGHTED

from lightning_gradavg import GradAvgStrategy

SAMPLES = [[1.0, 2.0, 3.0, 4.0], [-1.0, 0.5, 2.0, 3.0], [2.0, 0.0, -3.0, 1.0], [1.5, 2.5, -2.0, 1.0]]
"""Per batch, of which two ranks take 3 and 1, or 2 and 2."""


class Frozen(LightningModule):
    """A backbone that is frozen when training begins, and trains from the third batch on."""

    def __init__(self, moment: str, named: bool = False) -> None:
        super().__init__()
        self.backbone = nn.Linear(1, 2).double()
        self.head = nn.Parameter(torch.tensor([0.5, -0.25], dtype=torch.float64))
        for parameter in self.backbone.parameters():
            nn.init.constant_(parameter, 0.5).requires_grad_(False)
        self.moment, self.named = moment, named
        self.automatic_optimization = moment != "manual"

    def begin(self, moment: str) -> None:
        late = self.trainer.current_epoch * len(SAMPLES) + self.trainer.fit_loop.epoch_loop.batch_idx >= 1
        if moment == self.moment and late:
            self.backbone.requires_grad_(True)

    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch > 0:
            self.begin("epoch")

    def on_train_batch_start(self, *args: Any) -> None:
        self.begin("batch")

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.begin("step")
        self.begin("manual")
        losses = (self.backbone(batch[:, None]).tanh() @ self.head - batch) ** 2
        loss: Any = losses.mean()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss, weight=len(batch))
            optimizer.step()
            return None
        if self.named:
            penalty = self.backbone.weight.square().sum() + self.head.square().sum()
            return {"loss": {"fit": loss, "size": penalty}, "weight": {"fit": len(batch), "size": 1}}
        return {"loss": loss, "weight": len(batch)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


def train_frozen(
    strategy: dict[str, Any] | None, sizes: list[int], moment: str, window: int, named: bool = False
) -> Any:
    """Body: train for three epochs on this rank's share of every batch, and return all parameters."""
    model, start = Frozen(moment, named), sum(sizes[: dist.get_rank()])
    data: Any = [torch.tensor(batch, dtype=torch.float64)[start : start + sizes[dist.get_rank()]] for batch in SAMPLES]
    trainer = make_trainer(
        DDPStrategy() if strategy is None else GradAvgStrategy(**strategy),
        max_epochs=3,
        accumulate_grad_batches=window,
        use_distributed_sampler=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=None))
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.filterwarnings('ignore:a "weight" was given')
@pytest.mark.parametrize(
    ("strategy", "sizes", "moment", "window"),
    [
        ({}, [2, 2], "epoch", 1),
        ({}, [2, 2], "step", 2),
        ({}, [2, 2], "manual", 1),
        (WEIGHTED, [3, 1], "step", 1),
        (WEIGHTED, [3, 1], "epoch", 2),
        (WEIGHTED, [3, 1], "manual", 1),
        ({**WEIGHTED, "gradient_as_bucket_view": True}, [1, 3], "batch", 2),
    ],
)
def test_unfrozen_parameters_train_as_on_one_process(world, strategy, sizes, window, moment):
    (alone,) = world(1).run(train_frozen, None if moment != "manual" else {}, [4], moment, window)
    (one,) = world(1).run(train_frozen, strategy, [4], moment, window)
    first, second = world(2).run(train_frozen, strategy, sizes, moment, window)
    assert torch.equal(first, second)
    assert not torch.equal(torch.full((4,), 0.5, dtype=torch.float64), first[2:])
    torch.testing.assert_close(alone, one)
    torch.testing.assert_close(alone, first)


def test_unfrozen_parameters_of_named_terms(world):
    (one,) = world(1).run(train_frozen, WEIGHTED, [4], "batch", 1, named=True)
    first, second = world(2).run(train_frozen, WEIGHTED, [3, 1], "batch", 1, named=True)
    assert torch.equal(first, second)
    torch.testing.assert_close(one, first)


def finetune(strategy: dict[str, Any] | None) -> Any:
    """Body: Lightning's callback unfreezes the backbone at the second epoch, and adds it to the optimizer."""

    class Tuned(Frozen):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.head], lr=0.02)

    model, size = Tuned("by the callback"), 4 // dist.get_world_size()
    start = size * dist.get_rank()
    data: Any = [torch.tensor(batch, dtype=torch.float64)[start : start + size] for batch in SAMPLES]
    trainer = make_trainer(
        DDPStrategy() if strategy is None else GradAvgStrategy(**strategy),
        max_epochs=3,
        use_distributed_sampler=False,
        callbacks=[BackboneFinetuning(1, backbone_initial_lr=0.01)],
    )
    trainer.fit(model, DataLoader(data, batch_size=None))
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.filterwarnings('ignore:a "weight" was given')
@pytest.mark.parametrize("strategy", [{}, WEIGHTED], ids=str)
def test_backbone_finetuning(world, strategy):
    (alone,) = world(1).run(finetune, None)
    first, second = world(2).run(finetune, strategy)
    assert torch.equal(first, second)
    torch.testing.assert_close(alone, first)
    of_stock = world(2).run(finetune, None)
    assert (of_stock[0] - of_stock[1]).abs().max() > 1e-3
