"""Every row of FAULTS: no wait without end, no difference in silence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from faults import FAULTS, Injected, inject, run_ranks
from lightning.pytorch import Trainer
from torch import float64, ones
from torch.utils.data import DataLoader

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.faults.last_words import LastWords
from lightning_gradavg.lightning_internals import store_of_world
from lightning_gradavg.ranks import World

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * row.full) for name, row in FAULTS.items()]
)
def test_every_rank_ends_and_names_what_happened(name, tmp_path):
    expected, ended = inject(FAULTS[name], tmp_path)
    assert expected, ended
    if line := LINES.get(name):
        (first,) = [one.printed for one in ended if "\nGradAvgStrategy: " in "\n" + one.printed and line in one.printed]
        before, _, after = first.partition(line)
        assert "Traceback" not in before
        assert "gloo/transport" not in before
        assert "Traceback" in after


def uneven(node_of: list[int]) -> Any:
    """Body: train as the agents of torchrun would start these ranks on nodes; return rank and node."""
    rank, size = dist.get_rank(), len(node_of)
    node, place = node_of[rank], node_of[:rank].count(node_of[rank])
    told = {"RANK": rank, "WORLD_SIZE": size, "GROUP_RANK": node, "GROUP_WORLD_SIZE": len({*node_of})}
    told |= {"LOCAL_RANK": place, "LOCAL_WORLD_SIZE": node_of.count(node), "TORCHELASTIC_RUN_ID": 1}
    os.environ.update({name: str(value) for name, value in told.items()})
    devices, nodes = node_of.count(node), len({*node_of})
    trainer = Trainer(
        strategy=GradAvgStrategy(), accelerator="cpu", devices=devices, num_nodes=nodes, logger=False, max_epochs=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Injected(), DataLoader([ones(1, dtype=float64)], batch_size=None))
    return [trainer.global_rank, trainer.world_size, trainer.node_rank]


def test_uneven_nodes_of_torchrun():
    """1 and 2 processes, each told the number of its own node's devices, are two nodes and three ranks."""
    ended = run_ranks(uneven, world_size=3, node_of=[0, 1, 1])
    assert [f"[{rank}, 3, {node}]" for rank, node in enumerate((0, 1, 1))] == [one.said for one in ended]
    assert "3 ranks on 2 nodes" in ended[0].printed


LINES = {
    "exception in training_step": "GradAvgStrategy: rank 1 ended with ValueError: the user's own error",
    "kill -9": "GradAvgStrategy: nothing was heard from rank 1: lost, killed or stuck",
    "another torch": "GradAvgStrategy: rank ",
}
"""What one rank prints before any traceback."""


def last_words() -> str | None:
    """Body: of three ranks one is lost; what the others say of it is in a store that rank 0 holds."""
    rank, files = dist.get_rank(), store_of_world()
    if rank == 2:
        return None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        files.set("port", str(store.port))
        files.wait(["rank 1 listens"])
    else:
        store = dist.TCPStore("127.0.0.1", int(files.get("port")))
    with mock.patch("lightning_gradavg.faults.last_words.store_of_world", return_value=store):
        words = LastWords(World.of(None), 0)
    lines = words._lines

    def noted(seconds: float) -> dict[int, str]:
        files.set(f"rank {rank} listens", "")
        return lines(0.8 if rank == 1 else 0.1)

    with mock.patch.object(words, "_lines", noted):
        words.say(RuntimeError("gloo: connection closed by peer"), 0)
        return words.listen()


def test_the_rank_that_holds_the_store_leaves_last():
    """Of three ranks two hear of the third's end, however much earlier rank 0 has heard of it."""
    first, second, _ = run_ranks(last_words, world_size=3, timeout=60)
    assert "'nothing was heard from rank 2: lost, killed or stuck'" == first.said == second.said


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from faults import Injected, Trainer, fail, kill
from torch import ones, float64
from torch.utils.data import DataLoader
from lightning_gradavg import GradAvgStrategy
trainer = Trainer(
    strategy=GradAvgStrategy(), accelerator="cpu", devices=2, logger=False, max_epochs=1, limit_val_batches=0,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Injected("step", {act}, {rank}), DataLoader([ones(1, dtype=float64)] * 50, batch_size=None))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher", [[], ["-m", "torch.distributed.run", "--nproc-per-node=2"]], ids=["popen", "torchrun"]
)
@pytest.mark.parametrize("act", ["fail", "kill"])
@pytest.mark.parametrize("rank", [0, 1])
def test_started_by_a_launcher(tmp_path, launcher, act, rank):
    """Whatever started the processes, all of them end, with an exit code that is not 0."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(path=[str(TESTS), str(TESTS.parent)], act=act, rank=rank))
    # It returns once nobody holds the pipe any more: no orphan is left.
    command = [sys.executable, *launcher, str(script)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=110)
    assert ended.returncode != 0
    if act == "fail":
        assert "ValueError: the user's own error" in ended.stderr
