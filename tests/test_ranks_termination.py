"""A SIGTERM to any rank ends all ranks at the same step, and a run without one is left alone."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.exceptions import SIGTERMException
from ranks import make_trainer
from toys import Toy, loader

from lightning_gradavg import GradAvgStrategy

BATCHES = 6

pytestmark = pytest.mark.skipif(
    not hasattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor"), reason="this lightning has no agreement to replace"
)


class Signalled(Toy):
    """Sends SIGTERM to its own process in one step of one rank."""

    def __init__(self, rank: int, step: int) -> None:
        super().__init__(start=[1.0])
        self.rank = rank
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if dist.get_rank() == self.rank and self.trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def train_signalled(
    ranks: int, step: int, epochs: int, reduction: str, accumulate: int = 1
) -> tuple[int, int, bool, Any]:
    """Body: return rank, steps, whether a termination ended the run, and what is left in the trainer."""
    trainer = make_trainer(
        GradAvgStrategy(reduction=reduction),
        max_epochs=epochs,
        use_distributed_sampler=False,
        accumulate_grad_batches=accumulate,
    )
    terminated = False
    try:
        trainer.fit(Signalled(ranks, step), loader([[1.0 + dist.get_rank()]] * BATCHES))
    except SIGTERMException:
        terminated = True
    left = [*vars(trainer.fit_loop.epoch_loop), *vars(trainer._signal_connector)]
    return dist.get_rank(), trainer.global_step, terminated, [name for name in left if "sigterm_" in name]


@pytest.mark.parametrize("rank", [0, 1])
def test_signal_to_one_rank_ends_all(world, rank):
    """Signalled in step 2, the third, both ranks finish it and one more, and end together."""
    assert [(0, 4, True, []), (1, 4, True, [])] == world(2).run(train_signalled, rank, 2, 1, "mean")


@pytest.mark.parametrize("rank", [0, 1])
def test_signal_within_a_window(world, rank):
    """Signalled in the first of a window's two batches, both ranks end after it."""
    ended = world(2).run(train_signalled, rank, 1, 1, "weighted_mean", 2)
    assert [(0, 2, True, []), (1, 2, True, [])] == ended


@pytest.mark.parametrize("rank", [0, 1])
def test_signal_at_the_end_of_an_epoch(world, rank):
    """Signalled in the last step of an epoch, both ranks end after one step of the next."""
    ended = world(2).run(train_signalled, rank, BATCHES - 1, 3, "mean")
    assert [(0, BATCHES + 1, True, []), (1, BATCHES + 1, True, [])] == ended


def test_signal_in_the_last_step(world):
    """Signalled in the very last step, the run ends as it would have anyway."""
    assert [(0, BATCHES, False, []), (1, BATCHES, False, [])] == world(2).run(
        train_signalled, 1, BATCHES - 1, 1, "mean"
    )


def test_no_signal(world):
    """Without a signal all steps are made, and the trainer is left as it was."""
    assert [(0, BATCHES, False, []), (1, BATCHES, False, [])] == world(2).run(train_signalled, -1, 0, 1, "mean")
