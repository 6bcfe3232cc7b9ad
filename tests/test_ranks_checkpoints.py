"""Checkpoints are in their place whole or not at all, and a run goes on from the newest that is whole."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from faults import fail, interrupt, run_ranks
from faults import train as train_injected
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from ranks import make_trainer
from torch.utils.data import DataLoader
from toys import Toy

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.checkpoints import WholeCheckpoints, require_whole
from lightning_gradavg.ranks import World

STEPS = 6
DATA: Any = torch.arange(1.0, 2 * STEPS + 1, dtype=torch.float64)

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


def saved(folder: Path, name: str, step: int) -> Path:
    """Return the path of a checkpoint whose time is its step."""
    path = folder / name
    WholeCheckpoints().save_checkpoint({"global_step": step, "weight": torch.arange(1000.0)}, path)
    os.utime(path, (step, step))
    return path


def changed(path: Path, change: Callable[[bytearray], bytes | bytearray]) -> None:
    """Change the content of a file, and not the time of its last change."""
    stat = path.stat()
    path.write_bytes(change(bytearray(path.read_bytes())))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def cut(path: Path) -> None:
    """Leave the first half of a file, as a kill within a copy does."""
    changed(path, lambda content: content[: len(content) // 2])


def flip(path: Path) -> None:
    """Change one bit of a weight."""
    place = path.read_bytes().index(torch.arange(1000.0).numpy().tobytes()) + 1234
    changed(path, lambda content: content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


def empty(path: Path) -> None:
    """Leave a file without bytes."""
    changed(path, lambda content: b"")


def zero(path: Path) -> None:
    """Leave a file whose blocks were never written."""
    changed(path, lambda content: bytes(len(content)))


@pytest.mark.parametrize("tear", [cut, flip, empty, zero])
def test_a_torn_one_is_refused(tmp_path, tear):
    """The error names the damaged checkpoint, the damage, and the newest intact one in its folder."""
    first, second, third = (saved(tmp_path, f"step={step}.ckpt", step) for step in (1, 2, 3))
    for torn, whole in ((third, second), (second, first), (first, "none")):
        tear(torn)
        with pytest.raises(ValueError, match=f"step=3.ckpt is damaged: .+ The newest intact .* is {whole}$"):
            require_whole(third, World())


def test_a_whole_one_is_read_as_named(tmp_path):
    """A whole checkpoint is read, whatever is newer; so is one of another format, and one on another file system."""
    first, torn = saved(tmp_path, "step=1.ckpt", 1), saved(tmp_path, "step=2.ckpt", 2)
    cut(torn)
    require_whole(first, World())
    torch.save({}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    require_whole(tmp_path / "old.ckpt", World())
    require_whole("memory://no/such.ckpt", World())


class Unfinished:
    """Fails while it is pickled, when a part of the file is written."""

    def __reduce__(self) -> Any:
        raise OSError(28, "No space left on device")


def test_an_unfinished_one_leaves_the_one_before(tmp_path):
    """A checkpoint that cannot be written leaves the one before in its place, and nothing else in the folder."""
    path = saved(tmp_path, "last.ckpt", 1)
    with pytest.raises(OSError, match="No space left"):
        WholeCheckpoints().save_checkpoint({"global_step": 2, "callback": Unfinished()}, path)
    assert 1 == torch.load(path, weights_only=True)["global_step"]
    assert [path] == list(tmp_path.iterdir())


def test_other_file_systems_are_left_to_lightning():
    """What is not on a local file system is written as Lightning writes it."""
    WholeCheckpoints().save_checkpoint({"global_step": 3}, "memory://folder/last.ckpt")
    assert 3 == WholeCheckpoints().load_checkpoint("memory://folder/last.ckpt", weights_only=True)["global_step"]


class Terminated(Callback):
    """Has a rank terminated at one step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        if dist.get_rank() == self.rank and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def train(folder: str, *callbacks: Callback, resume: str | None = None, **options: Any) -> Any:
    """Body: save after every second step; return the step that the run began with, the last, and the weight."""
    model, begun = Toy(kind="s"), []
    model.on_train_start = lambda: begun.append(model.trainer.global_step)  # type: ignore[method-assign]  # to note it
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1, save_last=True, **options)
    trainer = make_trainer(
        GradAvgStrategy(split_batches=True),
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=[keep, *callbacks],
        enable_checkpointing=True,
    )
    with contextlib.suppress(SIGTERMException):
        trainer.fit(model, DataLoader(DATA, 2), ckpt_path=resume)
    return begun, trainer.global_step, [p.tolist() for p in model.parameters()]


@pytest.fixture(scope="module")
def undisturbed(world, tmp_path_factory):
    """Return how both ranks end if nothing happens."""
    ended = world(2).run(train, str(tmp_path_factory.mktemp("undisturbed")))
    assert [([0], STEPS)] * 2 == [(begun, steps) for begun, steps, _ in ended]
    return ended


SAVES_ON_EXCEPTION = pytest.mark.skipif(
    "save_on_exception" not in signature(ModelCheckpoint).parameters, reason="Lightning 2.6 brought it"
)


@SAVES_ON_EXCEPTION
@pytest.mark.parametrize("rank", [0, 1])
def test_a_terminated_run_goes_on_from_its_last_step(world, undisturbed, tmp_path, rank):
    """Terminated in its second step, a run saves after the third, on all ranks, and goes on from there."""
    folder = str(tmp_path / "terminated")
    ended = world(2).run(train, folder, Terminated(rank, 1), save_on_exception=True)
    assert [([0], 3), ([0], 3)] == [(begun, steps) for begun, steps, _ in ended]
    assert [([3], STEPS, weight) for _, _, weight in undisturbed] == world(2).run(train, folder, resume="last")


def end_in_step_2(act: Any, ranks: list[int], folder: str) -> None:
    """Body: train, and have some ranks end in their third step."""
    rank = dist.get_rank() if dist.get_rank() in ranks else -1
    keep = ModelCheckpoint(folder, "{step}", save_on_exception=True)
    with mock.patch("lightning_gradavg.faults.last_words._PATIENCE_SECONDS", 1.0):
        train_injected("step", act, rank=rank, callbacks=[keep], enable_checkpointing=True)


@SAVES_ON_EXCEPTION
@pytest.mark.parametrize(
    ("act", "ranks", "kept"),
    [
        *((fail, [0, 1], ["step=2.ckpt"]), (interrupt, [0, 1], ["step=2.ckpt"])),
        *((fail, [0], []), (interrupt, [1], [])),
    ],
)
def test_an_exception_saves_if_all_ranks_end_by_it(tmp_path, act, ranks, kept):
    """A rank that ends alone saves nothing, which it would wait for until the timeout; the other names it."""
    args = {"act": act, "ranks": ranks, "folder": str(tmp_path / "saved")}
    ended = run_ranks(end_in_step_2, args, folder=tmp_path, timeout=300)
    assert [1, 1] == [one.exit_code for one in ended]
    assert kept == [path.name for path in (tmp_path / "saved").glob("*")]
    for rank, one in enumerate(ended):
        named = f"rank {ranks[0]} ended with {'ValueError' if act is fail else 'KeyboardInterrupt'}"
        assert (named in one.said) == (rank not in ranks)
