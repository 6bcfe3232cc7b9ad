"""Every example that examples/README.md lists runs on two ranks, and what it claims is true; so does the demo."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import nbformat
import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch.cli import LightningCLI
from nbclient import NotebookClient
from ranks import NEEDS_SHARDS_ON_CPU, run_script

from examples.demo import runs, same_bits
from examples.demo.report import TaskResult

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PACKAGES = {"plain_pytorch": "torch", "accelerate_ddp": "accelerate", "hf_trainer": "transformers", "ray_train": "ray"}
"""Examples of other trainers, which torchrun or Ray starts, and the package that each needs."""
ALONE = sorted({path.stem for path in EXAMPLES.glob("*.py")} - {*PACKAGES, "__init__", "cli", "cluster"})
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


def make_parameters_of_examples() -> list[Any]:
    """Return a parameter of pytest for every example that runs on two ranks."""
    parameters = []
    for name in [*ALONE, "plain_pytorch"]:
        marks = []
        if name == "sharded":
            marks.append(NEEDS_SHARDS_ON_CPU)
        parameters.append(pytest.param(name, marks=marks))
    return parameters


@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders")  # stock DDP repeats some
@pytest.mark.parametrize("name", make_parameters_of_examples())
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


def test_without_its_launcher_an_example_says_how_to_start_it(tmp_path, monkeypatch):
    """In one line; torch's own error about a missing RANK is a traceback."""
    monkeypatch.delenv("RANK", raising=False)
    script = Path(shutil.copy(EXAMPLES / "plain_pytorch.py", tmp_path))
    code, printed = run_script(script)
    assert (code, printed) == (1, "Start this example by: torchrun --nproc-per-node 2 examples/plain_pytorch.py\n")


# LightningCLI of lightning 2.6 calls an old API of jsonargparse 4.53.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_config_can_be_read(capsys):
    """The options of the config file are those of the strategy, the model and the callback."""
    command = ["cli.py", "fit", "--config", str(EXAMPLES / "config.yaml"), "--print_config"]
    with mock.patch.object(sys, "argv", command), pytest.raises(SystemExit) as ended:
        LightningCLI()
    assert 0 == ended.value.code
    trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert ("weighted_mean", True) == tuple(trainer["strategy"]["init_args"][n] for n in ("reduction", "split_batches"))


@pytest.mark.full
def test_a_config_alone_trains_and_proves(tmp_path):
    """LightningCLI trains what the config file says, and `gradavg verify` finds the steps of one process."""
    started("-m", "examples.cli", "fit", "--config", EXAMPLES / "config.yaml", folder=tmp_path)
    printed = started("-m", "lightning_gradavg", "verify", "--config", EXAMPLES / "config.yaml", folder=tmp_path)
    assert "EQUAL to one process with batch " in printed


STRATEGY_OF_ANY_RANKS = """
import os
from lightning_gradavg import GradAvgModelParallelStrategy
from examples.sharded import Transformer, data as samples
from torch.utils.data import DataLoader

def data():
    return DataLoader(samples(), batch_size=4)

def make_strategy():
    return GradAvgModelParallelStrategy(
        reduction="weighted_mean", data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1
    )
"""


@pytest.mark.full
@NEEDS_SHARDS_ON_CPU
def test_a_sharded_model_is_verified_on_fewer_ranks(tmp_path):
    """`gradavg verify` shards over its own processes, for whose number the strategy is made."""
    (tmp_path / "train.py").write_text(STRATEGY_OF_ANY_RANKS)
    names = ["train.py:Transformer", "--data", "train.py:data", "--strategy", "train.py:make_strategy"]
    printed = started("-m", "lightning_gradavg", "verify", *names, "--trainer", "max_epochs=1", folder=tmp_path)
    assert "EQUAL to one process with batch " in printed
    assert "GradAvgModelParallelStrategy, reduction 'weighted_mean', ranks: 2, optimizer steps: 3" in printed


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


@pytest.mark.parametrize(
    ("weights", "losses", "status"),
    [(2e-6, 2e-6, 0), (1e-4, 0.0, 1), (0.0, 1e-4, 1), (math.nan, 0.0, 1), (0.0, math.nan, 1)],
)
def test_the_exit_status_says_whether_gradavg_matches(weights, losses, status, monkeypatch, tmp_path, capsys):
    """The demo fails if a weight or a loss of GradAvg differs by more than 1e-5, whatever stock DDP does."""
    factors = {"auto": (1.0, 1.0), "ddp": (1.5, 1.5), "gradavg": (1.0 + weights, 1.0 + losses)}

    def made_up(configuration, *_, **__):
        last_weight, last_loss = factors[configuration.strategy]
        ones = torch.ones(12, dtype=torch.float64)
        found = TaskResult(torch.cat([2 * ones, last_loss * ones[:1]]), {"a": ones, "b": last_weight * ones}, 0.75, 3.0)
        return dict.fromkeys(("digits", "text"), found)

    monkeypatch.setattr(runs, "run", made_up)
    monkeypatch.setenv("COLUMNS", "80")
    assert status == runs.main(["--worlds", "2", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    failure = "Differs from one process by more than 1e-05: GradAvg, 2 processes, digits; GradAvg, 2 processes, text"
    assert bool(status) == (failure in " ".join(printed.split()))
    rows = [" ".join(line.split()) for line in printed.splitlines()]
    assert 2 == rows.count("one process, reversed 0.0e+00 0.0e+00 2.00 to 1.90 0.7500 3.0 s")
    assert 2 == rows.count("stock DDP, 2 processes 5.0e-01 5.0e-01 2.00 to 1.95 0.7500 3.0 s")
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert 0.5 == written["stock DDP, 2 processes"]["text"]["difference_of_weights"]


@pytest.mark.full
@pytest.mark.slow
def test_the_demo_leaves_the_same_bits(tmp_path, capsys):
    """Trained by Lightning's own launcher on one process and on two, the language model has the same weights."""
    assert 0 == same_bits.main(["--worlds", "1", "2", "--samples", "41", "--output", str(tmp_path)])
    assert "the same bits" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(300)  # 40 s on two idle cores
def test_the_demo_runs_on_four_processes(tmp_path):
    """On real processes GradAvg is within 1e-5 of one process in both tasks, where stock DDP is far off."""
    assert 0 == runs.main(["--quick", "--worlds", "4", "--output", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert 4 == len(results)
    assert all(results["stock DDP, 4 processes"][task]["difference_of_weights"] > 1e-3 for task in ("digits", "text"))
