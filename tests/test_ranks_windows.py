"""Accumulation windows on real ranks: short, cut off, skipped, on a schedule, and interrupted by validation."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from ranks import make_trainer, on_ranks
from torch import Tensor, nn
from toys import AWARE, WEIGHTED, Toy, approx, loader, same_everywhere, train

from lightning_gradavg import GradAvgStrategy

pytestmark = AWARE


class Interrupted(Toy):
    """Ends its first epoch in the middle of a window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.trainer.current_epoch == 0 and batch_idx == 3 else None


def test_epoch_that_ends_within_a_window(world):
    rows = [[[1], [2, 2, 2], [3], [4], [5], [6]]] * 2
    options = {"module": Interrupted, "max_epochs": 2, "accumulate_grad_batches": 2}
    seen = same_everywhere(world(2).run(train, rows, {"lr": 0.0}, WEIGHTED, **options))
    assert [1.75, 1.75, 3.5, 5.5] == [gradient.item() for gradient in seen.gradients]


class Validated(Toy):
    """Has buffers, which DDP broadcasts in validation, too."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.norm = nn.BatchNorm1d(1, affine=False).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.losses(batch).mean() + 0 * self.norm(batch.reshape(-1, 1)).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.norm(batch.reshape(-1, 1))


@pytest.mark.parametrize(("window", "interval", "expected"), [(2, 1, [23 / 9, 44 / 10]), (4, 3, [67 / 19])])
@on_ranks()
def test_validation_within_a_window_and_fit_again(window, interval, expected):
    model = Validated()
    rows = [
        [[1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0], [8.0, 9.0]],
        [[1.0, 3.0], [3.0, 1.0], [6.0, 0.0, 3.0, 1.0], [2.0, 2.0]],
    ]
    options = {"accumulate_grad_batches": window, "val_check_interval": interval}
    trainer = make_trainer(GradAvgStrategy(**WEIGHTED), max_epochs=1, use_distributed_sampler=False, **options)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model, loader(rows[dist.get_rank()]), loader([[1.0, 2.0], [3.0, 4.0]]))
    assert [approx(value) for value in expected * 2] == [gradient.item() for gradient in model.seen.gradients]


class Skipping(Toy):
    """Returns None for a micro-batch of one sample."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch.numel() == 1 else self.losses(batch).mean()


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_step_without_loss(world, reduction):
    """None, which Lightning allows in a world of one, leaves other windows as they are, and closes none."""
    rows, given = [[[1.0, 3.0], [5.0], [4.0, 8.0]]], ({"lr": 0.0}, {"reduction": reduction})
    (seen,) = world(1).run(train, rows, *given, module=Skipping)
    assert [2.0, 6.0] == [gradient.item() for gradient in seen.gradients]
    for window in ([[1.0, 3.0], [5.0]], [[5.0], [1.0, 3.0]]):
        (one,) = world(1).run_expecting_errors(train, [window], *given, module=Skipping, accumulate_grad_batches=2)
        assert "training_step returned no loss within an accumulation window" in one.message
        assert (True, "RuntimeError") == ('"weight": 0' in one.message, one.type_name)


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
def test_scheduled_window(world, reduction):
    """4 batches of gradient 1, windows of 1 and then 2, end at 1 - 4 - 2 = -5."""
    options = {"max_epochs": 2, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]}
    seen = same_everywhere(world(2).run(train, [[[1]] * 4] * 2, {"lr": 1.0}, {"reduction": reduction}, **options))
    assert (approx(-5.0), 6) == (seen.weights[-1].item(), len(seen.weights))
