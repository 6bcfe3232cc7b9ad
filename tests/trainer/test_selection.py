"""Case 25: ways of selecting the strategy, through the real launchers; tests/test_ranks_selection.py has the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from selected import MEAN, QUIET, WEIGHTED, seen

HERE = Path(__file__).resolve().parent
TESTS, ROOT = HERE.parents[:2]
GRADAVG = [sys.executable, "-m", "lightning_gradavg"]


def run(*command: Any, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; the ranks it starts end with it."""
    path = os.pathsep.join(map(str, (HERE, TESTS, ROOT)))
    return subprocess.run(
        [str(part) for part in command],
        cwd=HERE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "default"},
        capture_output=True,
        text=True,
        timeout=100,
        check=check,
    )


def assert_trained(out: Path, gradient: float) -> None:
    found = [(place, trained_with) for place, _, _, trained_with in seen(out)]
    assert [([rank, 2, 0], pytest.approx(gradient, rel=1e-12)) for rank in range(2)] == found


FULL = pytest.mark.full  # the walk of tests/newcomer.py starts an instance's processes, too


@pytest.mark.parametrize(
    ("name", "gradient"),
    [
        ("gradavg_fork", MEAN),
        pytest.param("gradavg_spawn", MEAN, marks=FULL),
        pytest.param("weighted_mean", WEIGHTED, marks=FULL),
    ],
)
def test_script(name, gradient, tmp_path):
    """Case 25 (a, e): a name after the import, or an instance, trains two processes that the Trainer launches."""
    run(sys.executable, TESTS / "selected.py", tmp_path, name)
    assert_trained(tmp_path, gradient)


def test_console_command_knows_the_names(tmp_path):
    """Case 25 (a): `gradavg fit` needs no import in user code for a name."""
    trainer = {**QUIET, "devices": 2, "strategy": "gradavg_weighted", "default_root_dir": str(tmp_path)}
    model = {"class_path": "selected.Job", "init_args": {"out": str(tmp_path)}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": trainer, "model": model}))
    run(*GRADAVG, "fit", "--config", tmp_path / "config.yaml")
    assert_trained(tmp_path, WEIGHTED)


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
