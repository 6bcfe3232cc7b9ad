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
    """Sends a signal to its own process in one step on every rank: None for no step."""

    def __init__(self, number: int, steps: tuple[int | None, int | None]) -> None:
        super().__init__(start=[1.0])
        self.number, self.step = number, steps[dist.get_rank()]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)
        return super().training_step(batch, batch_idx)


def train_signalled(steps: Any, strategy: dict[str, Any], options: dict[str, Any]) -> tuple[int, bool, Any]:
    """Body: return steps, whether a termination ended the run, and what is left in the trainer."""
    trainer = make_trainer(GradAvgStrategy(**strategy), **{**ONE_EPOCH, **options})
    terminated = False
    try:
        trainer.fit(Signalled(signal.SIGTERM, steps), loader([[1.0 + dist.get_rank()]] * BATCHES))
    except SIGTERMException:
        terminated = True
    left = [*vars(trainer.fit_loop.epoch_loop), *vars(trainer._signal_connector)]
    return trainer.global_step, terminated, [name for name in left if "sigterm_" in name]


ONE_EPOCH: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": False}
WINDOWS = {"reduction": "weighted_mean"}, {"accumulate_grad_batches": 2}


@pytest.mark.parametrize(
    ("steps", "strategy", "options", "ended"),
    [
        # Signalled in step 2, the third, both ranks finish it and one more, and end together.
        *(((2, None), {}, {}, (4, True)), ((None, 2), {}, {}, (4, True))),
        # In the first of a window's two batches: both hear of it before the window after this one.
        *(((1, None), *WINDOWS, (2, True)), ((None, 1), *WINDOWS, (2, True))),
        # In the last step of an epoch: after one step of the next.
        ((BATCHES - 1, None), {}, {"max_epochs": 3}, (BATCHES + 1, True)),
        ((None, BATCHES - 1), {}, {"max_epochs": 3}, (BATCHES + 1, True)),
        # In the very last step, the run ends as it would have anyway; so it does without a signal.
        *(((None, BATCHES - 1), {}, {}, (BATCHES, False)), ((None, None), {}, {}, (BATCHES, False))),
    ],
)
def test_signal_to_one_rank_ends_all(world, steps, strategy, options, ended):
    """Whichever rank is signalled, all end at one step, and the trainer is left as it was."""
    assert [(*ended, [])] * 2 == world(2).run(train_signalled, steps, strategy, options)


class Slurm(RankEnvironment, SLURMEnvironment):
    """The ranks, as if SLURM had started them and were to queue the job again."""

    auto_requeue, requeue_signal = True, signal.SIGUSR1


def train_requeued(folder: str, seen: str) -> Any:
    """Body: return the steps made, those of the checkpoints saved, and what is left in the trainer."""
    os.environ.update(SLURM_JOB_ID="7", PATH=folder)
    trainer = make_trainer(GradAvgStrategy(), **ONE_EPOCH, default_root_dir=seen)
    trainer._accelerator_connector.cluster_environment = Slurm()
    trainer.fit(Signalled(signal.SIGUSR1, (1, 3)), loader([[1.0 + dist.get_rank()]] * BATCHES))
    steps = [torch.load(path, weights_only=True)["global_step"] for path in sorted(Path(seen).glob("hpc_ckpt_*"))]
    return trainer.global_step, steps, [name for name in vars(trainer._signal_connector) if "_fn" in name]


def test_ranks_answer_slurm_together(world, tmp_path):
    """Signalled two steps apart, the ranks save one checkpoint at one step, queue the job once, and train on."""
    command, seen = tmp_path / "scontrol", tmp_path / "seen"
    command.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/queued\n')
    command.chmod(0o755)
    assert [(BATCHES, [3], [])] * 2 == world(2).run(train_requeued, str(tmp_path), str(seen))
    assert "requeue 7\n" == (tmp_path / "queued").read_text()
