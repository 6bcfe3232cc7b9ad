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
import torch

from benchmarks.block import WARMUP, Clock, Variant
from benchmarks.machine import sent_by
from benchmarks.nodes import main as run_nodes
from benchmarks.report import Measurements, Spread, print_report
from benchmarks.step import chosen
from benchmarks.step import main as run_step

ROOT = Path(__file__).parent.parent


def test_spread():
    """Median and quartiles include the ends; a single round is its own spread."""
    assert (2.0, 3.0, 4.0) == Spread.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (7.0, 7.0, 7.0) == Spread.of([7.0])


def two_rounds() -> Measurements:
    names = ["DDP", "slow", "Lightning DDPStrategy"]
    found = Measurements("m", "a model", 100, 2, 1, "cpu", 5, names)
    found.in_lightning = ["slow", "Lightning DDPStrategy"]
    rounds = (
        ("DDP", (2.0, 4.0), 100.0),
        ("slow", (3.0, 5.0), 300.0),
        ("Lightning DDPStrategy", (4.0, 4.0), 100.0),
    )
    for name, seconds, sent in rounds:
        for second in seconds:
            found.add(name, second, second, sent)
    found.foreign = [0.25, 0.75]
    return found


def test_ratios_are_taken_within_a_round():
    """A variant's time is relative to that of another in the same round, if that was measured."""
    found = two_rounds()
    assert [1.5, 1.25] == found.ratios("slow", "DDP")
    assert found.ratios("slow", "not measured") is None


def test_table_compares_with_lightning_what_runs_in_lightning(capsys):
    """A variant that Lightning runs is compared with Lightning's strategy, too, and no other; reasons are told once."""
    found = two_rounds()
    found.skipped = {"one [way]": "it cannot be", "another": "it cannot be"}
    print_report(found)
    printed = capsys.readouterr().out
    slow, ddp = (next(line for line in printed.splitlines() if f"│ {name} " in line) for name in ("slow", "DDP"))
    # 3 / 4 and 5 / 4.
    assert "1.000 [0.875, 1.125]" in slow
    assert "-" == ddp.split("│")[4].strip()
    assert "other processes kept 0.50 [0.38, 0.62] cores busy" in printed
    assert "left out, because it cannot be: one [way]; another" in printed


def test_clock_counts_its_ticks():
    """A variant that ticks too seldom is an error, not a number."""
    clock = Clock(2, torch.device("cpu"), lambda: 0)
    for _ in range(WARMUP + 2):
        clock.tick()
    with pytest.raises(RuntimeError, match="a variant ticked 5 times instead of 6"):
        clock.block()
    clock.tick()
    assert 0.0 == clock.block().sent


def test_variants_are_chosen_by_name():
    """Wildcards name variants, others leave some of them out; names that leave none are an error with all names."""
    everything = [Variant(name, lambda setting, clock: None) for name in ("DDP", "GradAvg sum", "GradAvg mean")]
    assert ["GradAvg sum"] == [one.name for one in chosen(everything, ["GradAvg *"], ["* mean"])]
    with pytest.raises(ValueError, match=r"--only=\['DPP'\] and --without=\[\] leave none of \['DDP', 'GradAvg sum', "):
        chosen(everything, ["DPP"], [])


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
        (run_step, ["--minutes", "0"], "--minutes is more than 0; got 0.0"),
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


def no_namespaces() -> str | None:
    """Say why network namespaces cannot be made here, or None."""
    if sys.platform != "linux" or shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs Linux and iproute2"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return None if os.geteuid() == 0 and made.returncode == 0 else "needs the right to make network namespaces"


NODES = """
import sys
from benchmarks import nodes

def commands(given, made):
    for name, script in zip(made.namespaces, sys.argv[1:], strict=True):
        yield ["ip", "netns", "exec", name, "sh", "-c", script]

nodes._commands = commands
nodes.main(["--nodes", "2", "--rate", "1gbit"])
"""

WAITS = "echo ready; exec cat"


@pytest.mark.skipif(no_namespaces() is not None, reason=str(no_namespaces()))
@pytest.mark.parametrize(
    ("scripts", "interrupt", "message"),
    [
        ([WAITS, WAITS], signal.SIGTERM, "ended by SIGTERM; the nodes are removed"),
        ([WAITS, WAITS], signal.SIGINT, "ended by SIGINT; the nodes are removed"),
        ([WAITS, "echo ready; exit 3"], None, "a node's launcher ended with exit code 3"),
        (["trap '' TERM; echo ready; cat & kill -9 $$", WAITS], None, "a node's launcher ended with exit code -9"),
        (["echo ready", "echo ready"], None, ""),
    ],
    ids=["terminated", "interrupted", "rank dies", "launcher is killed", "ends"],
)
def test_nodes_leave_nothing_behind(scripts, interrupt, message):
    """Whatever ends a run on emulated nodes, its namespaces are gone, and all that ran in them; the others are told."""
    with subprocess.Popen(
        [sys.executable, "-c", NODES, *scripts],
        cwd=ROOT,
        stdin=subprocess.PIPE,  # open to the end: who reads it, waits until it is ended
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        assert run.stdout is not None
        if interrupt is not None:
            assert ["ready\n"] * 2 == [run.stdout.readline() for _ in range(2)]
            run.send_signal(interrupt)
        # It ends when the last process has ended that could write to it.
        printed = run.stdout.read()
        code = run.wait()
    assert message in printed
    assert (0 if message == "" else 1) == code
    assert f"gradavg{run.pid}" not in netns("list")


def netns(*arguments: str) -> str:
    return subprocess.run(["ip", "netns", *arguments], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(no_namespaces() is not None, reason=str(no_namespaces()))
def test_what_a_killed_run_leaves_is_removed_by_the_next():
    """Namespaces of a run that was killed are removed by the next run with what is in them, those of a live one not."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    abandoned, alive = f"gradavg{ended.pid}n0", f"gradavg{os.getpid()}n0"
    try:
        for name in (abandoned, alive):
            netns("add", name)
        with subprocess.Popen(["ip", "netns", "exec", abandoned, "cat"], stdin=subprocess.PIPE) as rank:
            subprocess.run([sys.executable, "-c", NODES, "true", "true"], cwd=ROOT, check=True)
            assert -signal.SIGKILL == rank.wait()
        listed = netns("list")
        assert alive in listed
        assert abandoned not in listed
    finally:
        netns("del", alive)


def run_benchmark(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--models", "mlp", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(300)  # 15 s on two idle cores, most of it imports
@pytest.mark.skipif(sys.platform != "linux", reason="the bytes are counted by Linux")
def test_step_from_command_to_files(tmp_path):
    """A tiny round on two ranks prints a table, and leaves its numbers."""
    names = ["DDP", "compute only", "communication only", "Lightning DDPStrategy"]
    names += ["GradAvg weighted_mean", "GradAvg weighted_mean, hooks.bfloat16"]
    options = ["--rounds", "1", "--steps", "2", "--output", str(tmp_path / "found.json"), "--only", *names]
    done = run_benchmark("step", *options)
    assert 0 == done.returncode, done.stderr
    assert all(name in done.stdout for name in names)
    saved = json.loads((tmp_path / "found.json").read_text())
    assert options == saved["command"][-len(options) :]
    (model,) = saved["models"]
    assert 2 == model["world_size"]
    for table in ("seconds", "processor", "sent"):
        assert sorted(names) == sorted(model[table])
        assert {1} == {len(rounds) for rounds in model[table].values()}
    assert [sorted(names)] == [sorted(turn) for turn in model["turns"]]
    assert 1 == len(model["foreign"])
    assert set(names[3:]) == set(model["in_lightning"])
    assert model["sent"]["DDP"][0] > model["gradient_bytes"]
