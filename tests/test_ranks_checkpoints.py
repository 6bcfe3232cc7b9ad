"""Checkpoints are in their place whole or not at all, and a damaged one is not read."""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from faults import fail, interrupt, run_ranks, train
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gradavg.checkpoints import WholeCheckpoints

CONTENT = torch.arange(1000.0)


def saved(folder: Path, step: int) -> Path:
    """Return the path of a checkpoint whose time is its step."""
    path = folder / f"step={step}.ckpt"
    WholeCheckpoints().save_checkpoint({"global_step": step, "weight": CONTENT}, path)
    os.utime(path, (step, step))
    return path


def flipped(content: bytes) -> bytes:
    place = content.index(CONTENT.numpy().tobytes()) + 1234
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


TORN: dict[str, Callable[[bytes], bytes]] = {
    "cut, as by a kill within a copy": lambda content: content[: len(content) // 2],
    "a bit of a weight": flipped,
    "empty": lambda content: b"",
    "of blocks that were never written": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("tear", TORN.values(), ids=TORN)
def test_a_torn_one_is_refused(tmp_path, tear):
    """The error names the damaged checkpoint, the damage, and the newest intact one in its folder."""
    (tmp_path / "of shards.ckpt").mkdir()
    first, second, third = (saved(tmp_path, step) for step in (1, 2, 3))
    assert torch.equal(CONTENT, WholeCheckpoints().load_checkpoint(third, weights_only=True)["weight"])
    for torn, whole in ((third, second), (second, first), (first, "none")):
        torn.write_bytes(tear(torn.read_bytes()))
        os.utime(torn, (step := int(torn.stem[-1]), step))
        with pytest.raises(ValueError, match=f"step=3.ckpt is damaged: .+ The newest intact .* is {whole}$"):
            WholeCheckpoints().load_checkpoint(third)


class Unfinished:
    """Fails while it is pickled, when a part of the file is written."""

    def __reduce__(self) -> Any:
        raise OSError(28, "No space left on device")


def test_an_unfinished_one_leaves_the_one_before(tmp_path):
    """A checkpoint that cannot be written leaves the one before in its place, and nothing else in the folder."""
    path = saved(tmp_path, 1)
    with pytest.raises(OSError, match="No space left"):
        WholeCheckpoints().save_checkpoint({"global_step": 2, "callback": Unfinished()}, path)
    assert 1 == torch.load(path, weights_only=True)["global_step"]
    assert [path] == list(tmp_path.iterdir())


def test_other_file_systems_are_left_to_lightning():
    """What is not on a local file system is written as Lightning writes it."""
    WholeCheckpoints().save_checkpoint({"global_step": 3}, "memory://folder/last.ckpt")
    assert 3 == WholeCheckpoints().load_checkpoint("memory://folder/last.ckpt", weights_only=True)["global_step"]


def end_in_step_2(act: Any, rank: int, folder: str) -> None:
    """Body: train, and have a rank end in its third step."""
    keep = {"filename": "{step}", "save_on_exception": True}
    with mock.patch("lightning_gradavg.faults.last_words._PATIENCE_SECONDS", 1.0):
        train(act=act, rank=rank, keep=keep, folder=folder)


@pytest.mark.skipif("save_on_exception" not in signature(ModelCheckpoint).parameters, reason="Lightning 2.6 brought it")
@pytest.mark.parametrize(("act", "rank", "named"), [(fail, 0, "ValueError"), (interrupt, 1, "KeyboardInterrupt")])
def test_a_rank_that_ends_alone_saves_nothing(tmp_path, act, rank, named):
    """It would wait for the others until the timeout, which name it. `test_ranks_resume.py` has all ranks end."""
    ended = run_ranks(end_in_step_2, timeout=300, act=act, rank=rank, folder=str(tmp_path))
    assert ([1, 1], []) == ([one.exit_code for one in ended], [*tmp_path.iterdir()])
    assert f"rank {rank} ended with {named}" in ended[1 - rank].said
    assert "ended with" not in ended[rank].said
