"""A SIGTERM to any rank ends all ranks at the same step, SLURM's signal has all of them save, others go undisturbed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.exceptions import SIGTERMException
from ranks import RankEnvironment, make_trainer
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
    """Signalled in the first of a window's two batches, both ranks hear of it before the window after this one."""
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


class Slurm(RankEnvironment, SLURMEnvironment):
    """The ranks, as if SLURM had started them and were to queue the job again."""

    auto_requeue, requeue_signal = True, signal.SIGUSR1


class Requeued(Toy):
    """Receives SLURM's signal in one step on rank 0, and two steps later on rank 1."""

    def __init__(self) -> None:
        super().__init__(start=[1.0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 1 + 2 * dist.get_rank():
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(batch, batch_idx)


def train_requeued(folder: str, seen: str) -> Any:
    """Body: return the steps made, those of the checkpoints saved, and what is left in the trainer."""
    os.environ.update(SLURM_JOB_ID="7", PATH=folder)
    trainer = make_trainer(GradAvgStrategy(), max_epochs=1, use_distributed_sampler=False, default_root_dir=seen)
    trainer._accelerator_connector.cluster_environment = Slurm()
    trainer.fit(Requeued(), loader([[1.0 + dist.get_rank()]] * BATCHES))
    steps = [torch.load(path, weights_only=True)["global_step"] for path in sorted(Path(seen).glob("hpc_ckpt_*"))]
    return trainer.global_step, steps, [name for name in vars(trainer._signal_connector) if "_fn" in name]


def test_ranks_answer_slurm_together(world, tmp_path):
    """Signalled two steps apart, the ranks save one checkpoint at one step, queue the job once, and train on."""
    command, seen = tmp_path / "scontrol", tmp_path / "seen"
    command.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/queued\n')
    command.chmod(0o755)
    assert [(BATCHES, [3], [])] * 2 == world(2).run(train_requeued, str(tmp_path), str(seen))
    assert "requeue 7\n" == (tmp_path / "queued").read_text()
