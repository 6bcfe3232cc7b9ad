"""Parameters that begin to train after DDP was built, which reduces only those that trained then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from toys import WEIGHTED, Recorded, train

from lightning_gradavg import GradAvgStrategy

SAMPLES = [[1.0, 2.0, 3.0, 4.0], [-1.0, 0.5, 2.0, 3.0], [2.0, 0.0, -3.0, 1.0], [1.5, 2.5, -2.0, 1.0]]
"""Per batch, of which two ranks take 3 and 1, or 2 and 2."""


class Frozen(Recorded):
    """A backbone that is frozen when training begins, and trains from the second batch on."""

    def __init__(self, moment: str, named: bool = False) -> None:
        super().__init__(0.02)
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


def train_frozen(
    world: Any, strategy: Any, sizes: Sequence[int], moment: str, *, of: Any = GradAvgStrategy, **given: Any
) -> list[Tensor]:
    """Return all parameters of each rank after three epochs, in which it has so many samples of every batch."""
    module = given.pop("module", Frozen)
    toy = {"moment": moment, "named": given.pop("named", False)}
    batches = torch.tensor(SAMPLES, dtype=torch.float64)
    rows = [list(part) for part in batches.split(list(sizes), 1)]
    seen = world(len(sizes)).run(train, rows, toy, strategy, module=module, of=of, max_epochs=3, **given)
    return [one.weights[-1] for one in seen]


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
    options = {"moment": moment, "accumulate_grad_batches": window}
    (alone,) = train_frozen(world, {}, [4], of=GradAvgStrategy if moment == "manual" else DDPStrategy, **options)
    (one,) = train_frozen(world, strategy, [4], **options)
    first, second = train_frozen(world, strategy, sizes, **options)
    assert torch.equal(first, second)
    assert not torch.equal(torch.full((4,), 0.5, dtype=torch.float64), first[2:])
    torch.testing.assert_close(alone, one)
    torch.testing.assert_close(alone, first)


def test_unfrozen_parameters_of_named_terms(world):
    (one,) = train_frozen(world, WEIGHTED, [4], "batch", named=True)
    first, second = train_frozen(world, WEIGHTED, [3, 1], "batch", named=True)
    assert torch.equal(first, second)
    torch.testing.assert_close(one, first)


class Tuned(Frozen):
    """Lightning's callback unfreezes the backbone at the second epoch, and adds it to the optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.head], lr=0.02)

    def configure_callbacks(self) -> Any:
        return [BackboneFinetuning(1, backbone_initial_lr=0.01)]


@pytest.mark.filterwarnings('ignore:a "weight" was given')
@pytest.mark.parametrize("strategy", [{}, WEIGHTED], ids=str)
def test_backbone_finetuning(world, strategy):
    options = {"moment": "by the callback", "module": Tuned}
    (alone,) = train_frozen(world, {}, [4], of=DDPStrategy, **options)
    first, second = train_frozen(world, strategy, [2, 2], **options)
    assert torch.equal(first, second)
    torch.testing.assert_close(alone, first)
    one, other = train_frozen(world, {}, [2, 2], of=DDPStrategy, **options)
    assert (one - other).abs().max() > 1e-3
