"""A run that is killed at any moment, and resumed on any number of ranks, ends with the bits of the one undisturbed."""

from __future__ import annotations

import os
import signal
from random import Random
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from ranks import RankError, make_trainer
from torch.utils.data import DataLoader, TensorDataset
from toys import MLP, samples

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.fingerprint import state_digests

EPOCHS, BATCHES = 2, 11
SAVING = "on_save_checkpoint"
MOMENTS = ("on_train_batch_start", "on_after_backward", "on_before_optimizer_step", SAVING)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),
]


class _Killed:
    """Ends the process when it is pickled, as a part of the checkpoint is written."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def killing(rank: int, step: int, moment: str) -> Callback:
    """Return what kills a rank in a step, or rank 0 within the checkpoint after it."""

    def now(trainer: Any, *args: Any) -> None:
        if (rank, step) == (trainer.global_rank, trainer.global_step):
            os.kill(os.getpid(), signal.SIGKILL)

    def within(trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.global_step > step:
            checkpoint["~killed"] = _Killed()

    hooks: dict[str, Any] = {moment: within if moment == SAVING else now}
    return LambdaCallback(**hooks)


def train(folder: str, *kill: Any) -> tuple[int, int, dict[str, str]]:
    """Body: train from the last checkpoint to the end, or a kill; return the first step, the last, and the state."""
    seed_everything(0, verbose=False)
    module, begun = MLP(), []
    module.on_train_start = lambda: begun.append(module.trainer.global_step)  # type: ignore[method-assign]  # to note it
    keep = ModelCheckpoint(
        folder, "{step}", every_n_train_steps=2, save_top_k=2, monitor="step", mode="max", save_last=True
    )
    trainer = make_trainer(
        GradAvgStrategy(reduction="weighted_mean", num_replicas=4, reproducible=True),
        max_epochs=EPOCHS,
        callbacks=[keep, *([killing(*kill)] if kill else [])],
        gradient_clip_val=1.0,
        enable_checkpointing=True,
    )
    x, y = (torch.cat(part)[:-1] for part in zip(*samples(2 * BATCHES), strict=True))
    order = torch.Generator().manual_seed(5)
    trainer.fit(module, DataLoader(TensorDataset(x, y), 8, shuffle=True, generator=order), ckpt_path="last")
    return begun[0], trainer.global_step, state_digests(module, trainer.optimizers)


@pytest.fixture(scope="module")
def undisturbed(world, tmp_path_factory):
    """Return the state in which the run ends on one process that nobody kills."""
    return world(1).run(train, str(tmp_path_factory.mktemp("undisturbed")))[0][2]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 20))])
def test_killed_at_random_steps(world, tmp_path, undisturbed, seed):
    """Killed at random moments of random ranks, and resumed on random numbers of ranks, it ends the same."""
    random, least = Random(seed), 0
    for step in sorted(random.sample(range(1, BATCHES * EPOCHS), 5 if seed else 2)):
        size = random.choice((1, 2, 4))
        with pytest.raises(RankError, match="ProcessDied: the process ended with exit code -9"):
            world(size).run(train, str(tmp_path), random.randrange(size), step, random.choice(MOMENTS))
        least = max(least, step // 2 * 2 - 2)
    for begun, steps, digests in world(random.choice((1, 2, 4))).run(train, str(tmp_path)):
        assert [] == [name for name, digest in undisturbed.items() if digest != digests.get(name)]
        assert (begun >= least, steps, digests) == (True, BATCHES * EPOCHS, undisturbed)
