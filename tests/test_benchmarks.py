"""The benchmark of a step runs from its command to its file; what it measures is not looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


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
