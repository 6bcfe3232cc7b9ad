"""Every example that examples/README.md lists runs on two ranks, and what it claims is true."""

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

import nbformat
import pytest
import torch.distributed as dist
import yaml
from nbclient import NotebookClient

from lightning_gradavg.cli import main

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PACKAGES = {"plain_pytorch": "torch", "accelerate_ddp": "accelerate", "hf_trainer": "transformers", "ray_train": "ray"}
"""Examples of other trainers, which torchrun or Ray starts, and the package that each needs."""
ALONE = sorted({path.stem for path in EXAMPLES.glob("*.py")} - {*PACKAGES, "__init__", "cluster"})
"""Those that start two processes."""
EVALUATED = [
    ("ddp, 2 processes", "0.250000", "12"),
    ("GradAvgStrategy, 2 processes", "0.272727", "11"),
    ("without processes", "0.272727", "11"),
]


def ran(name):
    """Body: run an example, whose Trainer takes these ranks for its processes, and return what it prints."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        importlib.import_module(f"examples.{name}").main()
    return dist.get_rank(), dist.get_world_size(), printed.getvalue()


def started(*command, folder):
    """Return what a command printed that starts two processes as a user does."""
    of_ray = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environ = {**os.environ, **of_ray, "PYTHONPATH": str(ROOT), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *command]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def assert_true(name, printed):
    """Two ranks have the weights of one process up to rounding, which stock DDP has not; or what else is claimed."""
    if name == "evaluation":
        assert EVALUATED == re.findall(r"^(.*): accuracy (\S+) of (\d+) samples$", printed, re.MULTILINE)
        return
    if name == "noise_scale":  # by chunks of 5 and 4 samples
        (found,) = re.findall(r"noise scale (\S+) samples, of 100 steps; by definition 9\n", printed)
        assert pytest.approx(9, rel=0.1) == float(found)
        return
    found = re.findall(r"(\S+, )?2 processes: largest difference to one process (\S+)", printed)
    stock = [float(difference) for run, difference in found if run == "ddp, "]
    ours = {run: float(difference) for run, difference in found if run != "ddp, "}  # Ray repeats lines
    assert (name == "swap_in_one_line", 1 + (name == "plain_pytorch")) == (bool(stock), len(ours))
    assert all(difference > 1e-2 for difference in stock)
    assert max(ours.values()) < 1e-6  # float32, added up in another order


@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders")  # stock DDP repeats some
@pytest.mark.parametrize("name", [*ALONE, "plain_pytorch"])
def test_two_ranks_are_one_process(world, name):
    """Rank 0 prints it; the other rank takes part."""
    (*first, printed), second = world(2).run(ran, name)
    assert [[0, 2], (1, 2, "")] == [first, second]
    assert_true(name, printed)


@pytest.mark.full
@pytest.mark.timeout(300)  # Ray takes 50 s on two busy cores
@pytest.mark.parametrize("name", [*ALONE, *(pytest.param(each, marks=pytest.mark.slow) for each in PACKAGES)])
def test_started_as_its_docstring_says(tmp_path, name):
    """As a script, which starts the second process automatically, or by its launcher, an example says the same."""
    package = PACKAGES.get(name, "torch")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'lightning-gradavg[integrations]'")
    by_torchrun = name in PACKAGES and package != "ray"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2") if by_torchrun else ()
    assert_true(name, started(*launcher, EXAMPLES / f"{name}.py", folder=tmp_path))


# LightningCLI of lightning 2.6 calls an old API of jsonargparse 4.53.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_config_can_be_read(capsys):
    """The options of the config file are those of the strategy, the model and the callback."""
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", str(EXAMPLES / "config.yaml"), "--print_config"])
    assert 0 == ended.value.code
    trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert ("weighted_mean", True) == tuple(trainer["strategy"]["init_args"][n] for n in ("reduction", "split_batches"))


@pytest.mark.full
def test_a_config_alone_trains_and_proves(tmp_path):
    """`gradavg fit` trains what the config file says, and `gradavg verify` finds the steps of one process."""
    started("-m", "lightning_gradavg", "fit", "--config", EXAMPLES / "config.yaml", folder=tmp_path)
    printed = started("-m", "lightning_gradavg", "verify", "--config", EXAMPLES / "config.yaml", folder=tmp_path)
    assert "EQUAL: every step matches one process." in printed


def assert_shows(notebook):
    """The notebook has its picture, and differences that are rounding where GradAvg weighs, and not in stock DDP."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    found = re.findall(r"^(.*): relative difference of the weights to one process (\S+)$", printed, re.MULTILINE)
    rounding, *stock, weighted = [float(difference) for _, difference in found]
    assert ["stock DDP, 2 processes", "gradavg_notebook, 2 processes"] == [name for name, _ in found[1:3]]
    assert "gradavg_notebook without options, and stock DDP: the same bits" in printed
    assert max(rounding, weighted) < 1e-5
    assert min(stock) > 1e-3
    assert 1 == sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of Jupyter: its sockets are not encrypted, its event loop is closed late
def test_the_notebook_runs(tmp_path, monkeypatch):
    """The notebook runs from top to bottom, in forked processes, and shows what it did."""
    for name, value in {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(EXAMPLES / "demo.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.get("outputs", []).clear()
    NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    assert_shows(notebook)


def test_every_example_is_listed_and_short():
    """examples/README.md names every file of the folder, and an example has less than 80 lines."""
    text, there = (EXAMPLES / "README.md").read_text(), {path.name for path in EXAMPLES.iterdir()}
    assert there - {"__init__.py", "__pycache__", "README.md"} <= set(re.findall(r"\]\((\S+)\)", text))
    lines = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert {} == {name: count for name, count in lines.items() if count >= 80}
