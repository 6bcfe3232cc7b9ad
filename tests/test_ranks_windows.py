"""Accumulation windows on real ranks: short, cut off, skipped, on a schedule, and interrupted by validation."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from ranks import make_trainer
from torch import Tensor, nn
from toys import AWARE, WEIGHTED, Toy, approx, loader, same_everywhere, train

from lightning_gradavg import GradAvgStrategy

pytestmark = AWARE


class Interrupted(Toy):
    """Ends its first epoch in the middle of a window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.trainer.current_epoch == 0 and batch_idx == 3 else None


def test_epoch_that_ends_within_a_window(world: Any) -> None:
    rows = [[[1], [2, 2, 2], [3], [4], [5], [6]]] * 2
    seen = same_everywhere(
        world(2).run(train, rows, {"lr": 0.0}, WEIGHTED, module=Interrupted, max_epochs=2, accumulate_grad_batches=2)
    )
    assert [1.75, 1.75, 3.5, 5.5] == [gradient.item() for gradient in seen.gradients]


class Validated(Toy):
    """Has buffers, which DDP broadcasts in validation, too."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.norm = nn.BatchNorm1d(1).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.losses(batch).mean() + 0 * self.norm(batch.reshape(-1, 1)).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.norm(batch.reshape(-1, 1))


def train_validated(window: int, interval: int) -> Any:
    model = Validated()
    rows = [
        [[1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0], [8.0, 9.0]],
        [[1.0, 3.0], [3.0, 1.0], [6.0, 0.0, 3.0, 1.0], [2.0, 2.0]],
    ]
    trainer = make_trainer(
        GradAvgStrategy(**WEIGHTED),
        max_epochs=1,
        use_distributed_sampler=False,
        accumulate_grad_batches=window,
        val_check_interval=interval,
    )
    for _ in range(2):
        trainer.fit(model, loader(rows[dist.get_rank()]), loader([[1.0, 2.0], [3.0, 4.0]]))
        trainer.fit_loop.max_epochs = 2
    return dist.get_rank(), [gradient.item() for gradient in model.seen.gradients]


@pytest.mark.parametrize(("window", "interval", "expected"), [(2, 1, [23 / 9, 44 / 10]), (4, 3, [67 / 19])])
def test_validation_within_a_window_and_fit_again(world: Any, window: int, interval: int, expected: Any) -> None:
    twice = [approx(value) for value in expected * 2]
    assert [(0, twice), (1, twice)] == world(2).run(train_validated, window, interval)


class Skipping(Toy):
    """Returns None for a micro-batch of one sample."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch.numel() == 1 else self.losses(batch).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.w.grad is not None:
            super().on_before_optimizer_step(optimizer)


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_step_without_loss(world: Any, reduction: str) -> None:
    """Case 50: None, which Lightning allows in a world of one, leaves other windows as they are, and closes none."""
    rows, given = [[[1.0, 3.0], [5.0], [4.0, 8.0]]], ({"lr": 0.0}, {"reduction": reduction})
    (seen,) = world(1).run(train, rows, *given, module=Skipping)
    assert [2.0, 6.0] == [gradient.item() for gradient in seen.gradients]
    for window in ([[1.0, 3.0], [5.0]], [[5.0], [1.0, 3.0]]):
        (one,) = world(1).run_expecting_errors(train, [window], *given, module=Skipping, accumulate_grad_batches=2)
        assert "training_step returned no loss within an accumulation window" in one.message
        assert (True, "RuntimeError") == ('"weight": 0' in one.message, one.type_name)


def train_on_schedule(reduction):
    model = Toy(lr=1.0)
    trainer = make_trainer(
        GradAvgStrategy(reduction=reduction),
        max_epochs=2,
        use_distributed_sampler=False,
        callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})],
    )
    trainer.fit(model, loader([[1]] * 4))
    return model.seen


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
def test_scheduled_window(world, reduction):
    """Case 14: 4 batches of gradient 1, windows of 1 and then 2, end at 1 - 4 - 2 = -5."""
    seen = same_everywhere(world(2).run(train_on_schedule, reduction))
    assert approx(-5.0) == seen.weights[-1].item()
    assert len(seen.weights) == 6
