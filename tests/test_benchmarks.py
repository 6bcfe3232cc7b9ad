"""The benchmarks run from their command to their files; what they measure is not looked at."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.nodes import main as run_nodes
from benchmarks.step import main as run_step

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("run", "arguments", "message"),
    [
        (run_step, ["--rounds", "0"], "--rounds, --steps and --ranks are 1 or more; got 0, None and 2"),
        (run_step, ["--models", "vgg"], "invalid choice: 'vgg'"),
        (run_nodes, ["--rate", "fast"], "'fast' is not a rate; give a number > 0 and kbit, mbit or gbit: 1gbit"),
        (run_nodes, ["--nodes", "0"], "--nodes and --ranks are 1 or more; got 0 and 1"),
    ],
)
def test_a_bad_argument_is_quoted_before_anything_is_started(run, arguments, message, capsys):
    with pytest.raises(SystemExit):
        run(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the bytes are counted by Linux")
def test_step_prints_a_table_and_saves_its_numbers(tmp_path):
    names = ["DDP", "Lightning DDPStrategy", "GradAvg weighted_mean"]
    options = ["--rounds", "1", "--steps", "2", "--output", str(tmp_path / "found.json"), "--only", *names]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.step", "--models", "mlp", *options],
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
    # Half of a ring's traffic leaves each of two ranks, and both share the interface.
    assert model["sent"]["DDP"][0] > model["gradient_bytes"]


def no_namespaces() -> str | None:
    """Return why network namespaces cannot be made here, or None."""
    if sys.platform != "linux" or shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs Linux and iproute2"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return None if os.geteuid() == 0 and made.returncode == 0 else "needs the right to make network namespaces"


NODES = """
from benchmarks import nodes

def commands(given, made):
    for name in made.namespaces:
        yield ["ip", "netns", "exec", name, "sh", "-c", "echo ready; exec cat"]

nodes._commands = commands
nodes.main(["--nodes", "2", "--rate", "1gbit"])
"""


@pytest.mark.skipif(no_namespaces() is not None, reason=str(no_namespaces()))
def test_interrupted_nodes_leave_nothing_behind():
    with subprocess.Popen(
        [sys.executable, "-c", NODES],
        cwd=ROOT,
        stdin=subprocess.PIPE,  # open to the end: who reads it, waits until it is ended
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        assert run.stdout is not None
        assert ["ready\n"] * 2 == [run.stdout.readline() for _ in range(2)]
        run.send_signal(signal.SIGTERM)
        printed = run.stdout.read()  # to the end of the last process that could write to it
        assert 1 == run.wait()
    assert "ended by SIGTERM; the nodes are removed" in printed
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"gradavg{run.pid}" not in listed
