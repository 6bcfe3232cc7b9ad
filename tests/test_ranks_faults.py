"""Every row of FAULTS: no wait without end, no difference in silence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from faults import FAULTS, run_ranks
from lightning.pytorch import Trainer
from ranks import on_ranks
from toys import Toy, loader

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.faults import last_words
from lightning_gradavg.ranks import World

TESTS = Path(__file__).parent
LOGGED = re.compile(r"^GradAvgStrategy: (?:rank \d ended|nothing was heard)", re.MULTILINE)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * row.full) for name, row in FAULTS.items()]
)
def test_every_rank_ends_and_names_what_happened(name, tmp_path):
    """So does the line that one rank logs before any traceback."""
    fault = FAULTS[name]
    stuck = fault.codes.index(None) if None in fault.codes else None
    ended = run_ranks(fault.body, stuck=stuck, folder=str(tmp_path), **fault.args)
    assert fault.codes == tuple(one.exit_code for one in ended), ended
    for part, one in zip(fault.said, ended, strict=True):
        assert part in one.said if part else not one.said, ended
    before = [LOGGED.split(one.printed)[0] for one in ended if LOGGED.search(one.printed)]
    assert fault.logged == len(before), ended
    assert not any("Traceback" in text or "gloo/transport" in text for text in before), ended


@on_ranks(3)
def test_uneven_nodes_of_torchrun():
    """1 and 2 processes, each told the number of its own node's devices, are two nodes and three ranks."""
    rank, node_of = dist.get_rank(), [0, 1, 1]
    devices, nodes, place = node_of.count(node_of[rank]), len({*node_of}), node_of[:rank].count(node_of[rank])
    told = {"RANK": rank, "WORLD_SIZE": 3, "GROUP_RANK": node_of[rank], "GROUP_WORLD_SIZE": nodes}
    told |= {"LOCAL_RANK": place, "LOCAL_WORLD_SIZE": devices, "TORCHELASTIC_RUN_ID": 1}
    os.environ.update({name: str(value) for name, value in told.items()})
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    strategy = GradAvgStrategy()
    trainer = Trainer(strategy=strategy, devices=devices, num_nodes=nodes, accelerator="cpu", max_epochs=1, **quiet)
    trainer.fit(Toy(), loader([[1.0]]))
    assert [rank, 3, node_of[rank]] == [trainer.global_rank, trainer.world_size, trainer.node_rank]
    assert node_of == [place.node for place in strategy._reduction.run.places]


def test_the_rank_that_holds_the_store_leaves_last(monkeypatch):
    """Of three ranks two hear of the third's end; rank 0, however much earlier it has heard, waits for the other."""
    store = dist.HashStore()
    monkeypatch.setattr(last_words, "store_of_world", lambda: store)
    monkeypatch.setattr(last_words, "_WAIT_SECONDS", 0.1)
    first, second, _ = (last_words.LastWords(World(None, rank, 3), 0) for rank in range(3))
    for rank in (first, second):
        rank.say(RuntimeError("gloo: connection closed by peer"), 0)
    with ThreadPoolExecutor() as pool:
        heard = pool.submit(first.listen)
        assert {heard} == wait([heard], timeout=0.5).not_done
        assert "nothing was heard from rank 2: lost, killed or stuck" == second.listen() == heard.result(1)


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from faults import Injected, fail, kill
from lightning.pytorch import Trainer
from ranks import on_ranks
from toys import loader
from lightning_gradavg import GradAvgStrategy
trainer = Trainer(
    strategy=GradAvgStrategy(), accelerator="cpu", devices=2, logger=False, max_epochs=1, limit_val_batches=0,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Injected("training_step", {act}, {rank}), loader([[1.0]] * 50))
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
