"""Case 25: ways of selecting the strategy, through the real launchers; tests/test_ranks_selection.py has the others."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).resolve().parent
CASE_2 = pytest.approx(7.5, rel=1e-12)


def run(*command: Any, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; the ranks it starts end with it."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=HERE,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}",
            "PYTHONWARNINGS": "default",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def ranks(out: Path, world_size: int = 2) -> list[dict[str, Any]]:
    """Return what each rank wrote, after asserting that all of them did."""
    seen = [json.loads(path.read_text()) for path in sorted(out.glob("rank*.json"))]
    assert [(rank, world_size) for rank in range(world_size)] == [(one["rank"], one["world_size"]) for one in seen]
    assert len({one["gradient"] for one in seen}) == 1
    return seen


GRADAVG = [sys.executable, "-m", "lightning_gradavg"]
FULL = pytest.mark.full  # the walk of tests/newcomer.py starts an instance's processes, too
NAMES = [("gradavg_fork", 31 / 3), pytest.param("gradavg_spawn", 31 / 3, marks=FULL)]
NAMES += [pytest.param("weighted_mean", 7.5, marks=FULL)]


@pytest.mark.parametrize(("name", "gradient"), NAMES)
def test_script(name, gradient, tmp_path):
    """Case 25 (a, e): a name after the import, or an instance, trains two processes that the Trainer launches."""
    run(sys.executable, "script_job.py", tmp_path, 1, 2, name)
    assert pytest.approx(gradient, rel=1e-12) == ranks(tmp_path / name)[0]["gradient"]


def test_console_command_knows_the_names(tmp_path):
    """Case 25 (a): `gradavg fit` needs no import in user code for a name."""
    switches = ["logger", "use_distributed_sampler", "enable_checkpointing", "enable_progress_bar"]
    options = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, **dict.fromkeys(switches, False)}
    trainer = {**options, "strategy": "gradavg_weighted", "default_root_dir": str(tmp_path / "root")}
    model = {"class_path": "cli_job.Job", "init_args": {"out": str(tmp_path)}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": trainer, "model": model}))
    run(*GRADAVG, "fit", "--config", path)
    assert CASE_2 == ranks(tmp_path)[0]["gradient"]


def test_what_the_import_registers():
    """Case 25 (a): names are there once, however often they are registered, and for no Trainer of pytorch_lightning."""
    code = (
        "import importlib, lightning_gradavg as g; from lightning.pytorch.strategies import StrategyRegistry as r;"
        "importlib.reload(g); g.GradAvgStrategy.register_strategies(r);"
        "print(sorted(name for name in r if name.startswith('gradavg')));"
        "import pytorch_lightning as pl; pl.Trainer(strategy=g.GradAvgStrategy())"
    )
    kinds = ["data_parallel", "fork", "model_parallel", "notebook", "single_device", "spawn", "sum", "weighted"]
    done = run(sys.executable, "-c", code, check=False)
    assert f"{['gradavg', *(f'gradavg_{kind}' for kind in kinds)]}\n" == done.stdout
    assert done.returncode != 0
    assert "lightning.pytorch.Trainer, of the package `lightning`" in done.stderr


def run_agents(out: Path, local_ranks: list[int]) -> str:
    """Start one torchrun agent per node on `script_job.py`, and return what they printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(local_ranks)}"]
    rendezvous = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    agents = []
    for node, number in enumerate(local_ranks):
        script = ["script_job.py", str(out), str(len(local_ranks)), str(number), "weighted_mean"]
        agents.append(
            subprocess.Popen(
                [*torchrun, f"--nproc-per-node={number}", f"--node-rank={node}", *rendezvous, *script],
                cwd=HERE,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [agent.communicate(timeout=100)[0] for agent in agents]
    assert [0] * len(local_ranks) == [agent.returncode for agent in agents], outputs
    return "".join(outputs)


@pytest.mark.full
@pytest.mark.slow
def test_uneven_nodes_of_torchrun(tmp_path):
    """Agents with 1 and 2 processes, each with the number of its own devices, are two nodes and three ranks."""
    printed = run_agents(tmp_path, [1, 2])
    assert [0, 1, 1] == [one["node_rank"] for one in ranks(tmp_path / "weighted_mean", 3)]
    assert "3 ranks on 2 nodes" in printed
