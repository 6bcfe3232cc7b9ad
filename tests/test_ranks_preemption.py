"""A run that is killed at any moment, and resumed on any number of ranks, ends with the bits of the one undisturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from preemption import STEPS, Ended, Kill, schedule, train
from ranks import TESTS, RankError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),
]
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 20))]
KILLS = {0: 2}


def ends_like(expected: Ended, ended: Ended) -> None:
    """Assert that every tensor and number of the final state is the same, to the bit."""
    assert [] == [name for name, digest in expected.digests.items() if digest != ended.digests.get(name)]
    assert (expected.steps, expected.digests) == (ended.steps, ended.digests)


@pytest.fixture(scope="module")
def undisturbed(world, tmp_path_factory):
    """Return how the run ends on one process that nobody kills."""
    (ended,) = world(1).run(train, str(tmp_path_factory.mktemp("undisturbed")), None)
    assert (0, STEPS) == (ended.begun, ended.steps)
    return ended


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_random_steps(world, tmp_path, undisturbed, seed):
    """Killed at random moments of random ranks, and resumed on random numbers of ranks, it ends the same."""
    begun = 0
    for size, kill in schedule(seed, KILLS.get(seed, 5)):
        if kill is None:
            for rank, ended in enumerate(world(size).run(train, str(tmp_path), None)):
                assert (rank, True) == (ended.rank, ended.begun >= begun)
                ends_like(undisturbed, ended)
        else:
            with pytest.raises(RankError, match="ProcessDied: the process ended with exit code -9"):
                world(size).run(train, str(tmp_path), kill)
            begun = max(begun, kill.step // 2 * 2 - 2)


@pytest.mark.slow
def test_restarts_of_torchrun(tmp_path, undisturbed):
    """Of four ranks under torchrun one is killed, and after the restart another; the third start ends the same."""
    kills = json.dumps([asdict(kill) for kill in (Kill(2, 5, "backward"), Kill(0, 13, "save"))])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "--max-restarts=2"]
    done = subprocess.run(
        [*torchrun, str(TESTS / "preemption.py"), str(tmp_path), kills],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
        check=False,
    )
    assert 0 == done.returncode, done.stdout
    ends = [json.loads(path.read_text()) for path in sorted(Path(tmp_path).glob("ended-*.json"))]
    assert [[2, rank, 12] for rank in range(4)] == [end[:3] for end in ends]
    for _, *ended in ends:
        ends_like(undisturbed, Ended(*ended))
