"""Models of other libraries, as these ship them, train on several ranks as on one process.

The scripts of tests/clients/ run as a user runs them: Lightning starts the ranks. Install the libraries beside the
package, `pip install chemprop gluonts[torch] pytorch-forecasting litgpt monai mlflow`, and run
`pytest -m '' tests/trainer/test_clients.py`. docs/frameworks.md has the releases that were tried.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-6  # relative; in float64
SMALL = 1e-6
"""Of a tensor with smaller elements, such as 1e-20, which are 0 but for roundings, the difference to this counts."""


class Client(NamedTuple):
    """A model of a library, and the strategy that fits it."""

    library: str
    # The script in tests/clients/, and its arguments after the number of devices and the output.
    script: str
    arguments: tuple[str, ...]
    # Logged values that are those of rank 0: the step of a metric object, which torchmetrics reduces once per epoch.
    of_rank_zero: tuple[str, ...] = ()


CLIENTS = [
    Client("chemprop", "chemprop_mpnn", (), ("train_loss_step",)),
    Client("chemprop", "chemprop_mpnn", ("--ragged",), ("train_loss_step",)),
    Client("gluonts", "gluonts_deepar", ()),
    Client("pytorch_forecasting", "forecasting_tft", ()),
    Client("litgpt", "litgpt_sft", ()),
    Client("monai", "monai_retinanet", ()),
]


def start(script: str, devices: int, output: Path, *arguments: str) -> None:
    """Run a script of tests/clients/ on so many processes, in the folder of its output."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MLFLOW_ALLOW_FILE_STORE": "true"}
    file = ROOT / "tests" / "clients" / f"{script}.py"
    command = [sys.executable, str(file), str(devices), str(output), *arguments]
    done = subprocess.run(
        command, cwd=output.parent, env=environ, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def result(client: Client, devices: int, folder: Path) -> dict[str, Any]:
    """Train on so many processes, and return what rank 0 saved."""
    output = folder / f"{devices}.pt"
    start(client.script, devices, output, *client.arguments)
    saved: dict[str, Any] = torch.load(output)
    return saved


def assert_equal(expected: dict[str, Any], found: dict[str, Any], of_rank_zero: tuple[str, ...]) -> None:
    """Compare each weight by its largest element, each logged value and the number of steps."""
    assert expected["steps"] == found["steps"]
    assert expected["weights"].keys() == found["weights"].keys()
    for name, weight in expected["weights"].items():
        assert weight.shape == found["weights"][name].shape, name
        if weight.numel() > 0:
            difference = (found["weights"][name] - weight).abs().max().item()
            assert difference <= TOLERANCE * max(weight.abs().max().item(), SMALL), name
    assert expected["logged"].keys() == found["logged"].keys()
    for name, value in expected["logged"].items():
        if name not in of_rank_zero:
            assert pytest.approx(value, rel=TOLERANCE) == found["logged"][name], name


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: " ".join([client.script, *client.arguments]))
def test_a_librarys_own_model_trains_as_on_one_process(client, tmp_path):
    """Model, loss, loader and optimizer are the library's."""
    pytest.importorskip(client.library, reason="a library that need not be installed: see the module's docstring")
    expected = result(client, 1, tmp_path)
    for devices in (2, 3):
        assert_equal(expected, result(client, devices, tmp_path), client.of_rank_zero)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_run_of_mlflow_goes_on_with_another_number_of_ranks(tmp_path):
    """MLflow refuses another value of a hyperparameter, so none is logged that depends on where a run goes on."""
    pytest.importorskip("mlflow", reason="a library that need not be installed: see the module's docstring")
    output = tmp_path / "run.txt"
    start("mlflow_resume", 2, output)
    start("mlflow_resume", 1, output, output.read_text())
    logged = {path.name: path.read_text() for path in tmp_path.glob("mlruns/*/*/params/gradavg/*")}
    assert {"reduction": "mean", "num_replicas": "2"} == logged
