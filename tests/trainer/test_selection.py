"""Case 25: ways of selecting the strategy, through the real launchers; tests/test_ranks_selection.py has the others."""

from __future__ import annotations

import json
import os
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
