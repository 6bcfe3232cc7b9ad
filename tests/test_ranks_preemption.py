"""A run that is killed at any moment, and resumed on any number of ranks, ends with the bits of the one undisturbed."""

from __future__ import annotations

import os
import signal
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from ranks import RankError, make_trainer
from torch.utils.data import DataLoader

from examples.demo.text import ByteLanguageModel, DocstringData, collate
from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.fingerprint import state_digests

BATCH = 8
NUM_TRAIN = 10 * BATCH + 5
EPOCHS = 2
STEPS = 11 * EPOCHS
SAVING = "on_save_checkpoint"
MOMENTS = ("on_train_batch_start", "on_after_backward", "on_before_optimizer_step", SAVING)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),
]


class Kill(NamedTuple):
    """A SIGKILL that a rank sends itself in a step, or rank 0 when a part of the checkpoint after it is written."""

    rank: int
    step: int
    moment: str


def schedule(seed: int, kills: int) -> list[tuple[int, Kill | None]]:
    """Return numbers of ranks, each with the kill that ends its run; the last run is not killed."""
    random = Random(seed)
    steps = sorted(random.sample(range(1, STEPS), kills))
    worlds = [random.choice((1, 2, 4)) for _ in range(kills + 1)]
    killed = [Kill(random.randrange(w), step, random.choice(MOMENTS)) for w, step in zip(worlds, steps, strict=False)]
    return list(zip(worlds, [*killed, None], strict=True))


class _Killed:
    """Ends the process when it is pickled."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def killing(kill: Kill) -> Callback:
    def now(trainer: Any, *args: Any) -> None:
        if (kill.rank, kill.step) == (trainer.global_rank, trainer.global_step):
            os.kill(os.getpid(), signal.SIGKILL)

    def within(trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.global_step > kill.step:
            checkpoint["~killed"] = _Killed()

    hooks: dict[str, Any] = {kill.moment: within if kill.moment == SAVING else now}
    return LambdaCallback(**hooks)


class Adam(ByteLanguageModel):
    """Keeps moments, and takes the norm of the gradient."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Data(DocstringData):
    """Few and short docstrings, in an order that is drawn anew in every epoch."""

    def train_dataloader(self) -> DataLoader[bytes]:
        train: Any = self.samples[: self.num_train]
        order = torch.Generator().manual_seed(5)
        return DataLoader(train, BATCH, shuffle=True, generator=order, collate_fn=collate)


def train(folder: str, kill: Kill | None = None) -> tuple[int, int, dict[str, str]]:
    """Body: train from the last checkpoint to the end, or a kill; return the first step, the last, and the state."""
    seed_everything(0, verbose=False)
    module, begun = Adam(), []
    module.on_train_start = lambda: begun.append(module.trainer.global_step)  # type: ignore[method-assign]  # to note it
    keep = ModelCheckpoint(
        folder, "{step}", every_n_train_steps=2, save_top_k=2, monitor="step", mode="max", save_last=True
    )
    trainer = make_trainer(
        GradAvgStrategy(reduction="weighted_mean", num_replicas=4, reproducible=True),
        max_epochs=EPOCHS,
        callbacks=[keep, *([] if kill is None else [killing(kill)])],
        gradient_clip_val=1.0,
        enable_checkpointing=True,
    )
    trainer.fit(module, Data(num_train=NUM_TRAIN, max_bytes=48), ckpt_path="last")
    return begun[0], trainer.global_step, state_digests(module, trainer.optimizers)


@pytest.fixture(scope="module")
def undisturbed(world, tmp_path_factory):
    """Return the state in which the run ends on one process that nobody kills."""
    [(*steps, digests)] = world(1).run(train, str(tmp_path_factory.mktemp("undisturbed")))
    assert [0, STEPS] == steps
    return digests


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 20))])
def test_killed_at_random_steps(world, tmp_path, undisturbed, seed):
    """Killed at random moments of random ranks, and resumed on random numbers of ranks, it ends the same."""
    least = 0
    for size, kill in schedule(seed, 5 if seed else 2):
        if kill is not None:
            with pytest.raises(RankError, match="ProcessDied: the process ended with exit code -9"):
                world(size).run(train, str(tmp_path), kill)
            least = max(least, kill.step // 2 * 2 - 2)
            continue
        for begun, steps, digests in world(size).run(train, str(tmp_path)):
            assert [] == [name for name, digest in undisturbed.items() if digest != digests.get(name)]
            assert (begun >= least, steps, digests) == (True, STEPS, undisturbed)
