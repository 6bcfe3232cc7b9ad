"""The benchmarks run from their command to their files; what they measure is not looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.nodes import main as run_nodes
from benchmarks.report import Measurements, Spread
from benchmarks.step import main as run_step
from benchmarks.step import sent_by

ROOT = Path(__file__).parent.parent


def test_spread():
    """Median and quartiles include the ends; a single round is its own spread."""
    assert (2.0, 3.0, 4.0) == Spread.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (7.0, 7.0, 7.0) == Spread.of([7.0])


def two_rounds(bandwidth: float | None = None) -> Measurements:
    found = Measurements("m", "a model", 100, 2, 1, "cpu", 5, ["DDP", "slow", "compute only"], bandwidth=bandwidth)
    rounds = (
        ("DDP", (2.0, 4.0), 100.0),
        ("slow", (3.0, 5.0), 300.0),
        ("compute only", (1.0, 2.0), 0.0),
        ("communication only", (0.5, 1.0), 100.0),
    )
    for name, seconds, sent in rounds:
        for second in seconds:
            found.add(name, second, second, sent)
    return found


def test_numbers_of_the_table():
    """Ratios and exposed times are taken within a round, and the bound is the larger of computing and sending."""
    found = two_rounds()
    assert [1.5, 1.25] == found.ratios("slow", "DDP")
    assert [2.0, 3.0] == found.exposed("slow")
    # 300 bytes take three times what the exchange of 100 takes: 1.5 s and 3 s.
    assert [2.0, pytest.approx(5 / 3)] == found.above_bound("slow")
    assert [2.0, 2.0] == found.above_bound("DDP")
    assert [1.0, pytest.approx(5 / 3)] == two_rounds(bandwidth=100.0).above_bound("slow")


def test_unknown_interface():
    """An interface that is not there is an error that lists those that are."""
    with pytest.raises(
        ValueError, match=r"--interface='no such' is not a network interface of this machine; it has \["
    ):
        sent_by("no such")


@pytest.mark.parametrize(
    ("run", "arguments", "message"),
    [
        (run_step, ["--rounds", "0"], "--rounds, --steps and --ranks are 1 or more; got 0, None and 2"),
        (run_step, ["--models", "vgg"], "invalid choice: 'vgg'"),
        (run_nodes, ["--rate", "fast"], "'fast' is not a rate; give a number > 0 and kbit, mbit or gbit: 1gbit"),
        (run_nodes, ["--nodes", "0"], "--nodes and --ranks are 1 or more; got 0 and 1"),
    ],
)
def test_bad_arguments(run, arguments, message, capsys):
    """A bad argument is quoted, before anything is started."""
    with pytest.raises(SystemExit):
        run(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the bytes are counted by Linux")
def test_step_from_command_to_files(tmp_path):
    """Two tiny rounds on two ranks print a table, and leave the rounds and a picture of them."""
    names = ["DDP", "compute only", "Lightning DDPStrategy", "GradAvg weighted_mean"]
    command = [sys.executable, "-m", "benchmarks.step", "--models", "mlp", "--rounds", "2", "--steps", "2"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "found"), "--only", *names],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    assert all(name in done.stdout for name in names)
    (model,) = json.loads((tmp_path / "found.json").read_text())["models"]
    assert 2 == model["world_size"]
    assert sorted(names) == sorted(model["seconds"])
    assert {2} == {len(rounds) for rounds in model["seconds"].values()}
    assert model["sent"]["DDP"][0] > model["gradient_bytes"]
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
