"""Examples of loops that are not those of Lightning's Trainer: on two processes they train as on one."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
# float32, added up in another order.
TOLERANCE = 1e-6


def differences(printed: str) -> list[float]:
    """Return the differences to one process that an example printed, each once: Ray repeats what workers print."""
    lines = dict.fromkeys(re.findall(r"2 processes: largest difference to one process (\S+)", printed))
    return [float(difference) for difference in lines]


def ran(name: str) -> tuple[int, str]:
    """Body: run an example on these ranks, and return what it prints."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # as a launcher does
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        importlib.import_module(f"examples.{name}").main()
    return dist.get_rank(), printed.getvalue()


@pytest.mark.parametrize(("name", "ways"), [("fabric_loop", 1), ("plain_pytorch", 2)])
def test_the_weights_are_those_of_one_process(world, name, ways):
    """After training, two ranks have the weights of a plain loop on one process, in each way that is shown."""
    (first, printed), second = world(2).run(ran, name)
    assert [0, (1, "")] == [first, second]
    assert ways == printed.count("2 processes: largest difference to one process ")
    assert max(differences(printed)) < TOLERANCE


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(300)  # Ray takes 50 s on two busy cores
@pytest.mark.parametrize(
    ("name", "launcher", "package"),
    [
        ("fabric_loop", (), "lightning"),
        ("plain_pytorch", TORCHRUN, "torch"),
        ("accelerate_ddp", TORCHRUN, "accelerate"),
        ("hf_trainer", TORCHRUN, "transformers"),
        ("ray_train", (), "ray"),
    ],
)
def test_by_its_own_launcher(tmp_path, name, launcher, package):
    """Started as its docstring says, an example prints that two processes have the weights of one."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'lightning-gradavg[integrations]'")
    of_ray = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / f"{name}.py")],
        cwd=tmp_path,
        env={**os.environ, **of_ray, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        timeout=280,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    found = differences(done.stdout + done.stderr)
    assert found
    assert max(found) < TOLERANCE
