"""Case 25: what a script, a command line, a config file or Hydra names trains two ranks, with its options unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import yaml
from hydra.utils import instantiate
from lightning.pytorch.cli import LightningCLI
from omegaconf import OmegaConf
from selected import QUIET, Job

from lightning_gradavg.cli import main

# LightningCLI of lightning 2.6 calls an old API of jsonargparse 4.53.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

HERE = Path(__file__).resolve().parent
TESTS, ROOT = HERE.parents[:2]
STRATEGY = "lightning_gradavg.GradAvgStrategy"
OPTIONS = {"reduction": "weighted_mean", "bucket_cap_mb": 7.5, "static_graph": True}
IN_YAML: dict[str, Any] = {"class_path": STRATEGY, "init_args": {**OPTIONS, "timeout": "0:05:00"}}
MEAN, WEIGHTED = (14 / 3 + 16) / 2, 7.5
"""The gradient on two ranks."""
NAMED = [f"--trainer.strategy={STRATEGY}"]


def assert_trained(out: Path, gradient: float, timeout: float = 1800.0, *of_ddp: Any) -> None:
    """Both ranks trained with the strategy and these options, and got this gradient."""
    found = [yaml.safe_load(path.read_text()) for path in sorted(out.rglob("rank*.json"))]
    expected = ["GradAvgStrategy", timeout, *(of_ddp or (None, None)), pytest.approx(gradient, rel=1e-12)]
    assert [[rank, 2, 0, *expected] for rank in range(2)] == found


def in_config(folder: Path, strategy: Any) -> list[str]:
    """Return the arguments of `fit`, with a strategy in a config file."""
    trainer = {**QUIET, "strategy": strategy, "default_root_dir": str(folder)}
    model = {"class_path": "selected.Job", "init_args": {"out": str(folder)}}
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed_everything": 1, "trainer": trainer, "model": model}))
    return ["fit", "--config", str(folder / "config.yaml")]


def command(strategy: Any, more: list[str], folder: Path) -> None:
    """Train as `gradavg fit` does."""
    main([*in_config(folder, strategy), *more])


def own_cli(strategy: Any, more: list[str], folder: Path) -> None:
    """Train as a user's own LightningCLI does."""
    with mock.patch.object(sys, "argv", ["job.py", *in_config(folder, strategy), *more]):
        LightningCLI(save_config_callback=None)


def hydra(strategy: Any, more: list[str], folder: Path) -> None:
    """Train by a Trainer that Hydra builds, with its strategy nested in it."""
    trainer = {"_target_": "lightning.pytorch.Trainer", **QUIET, "strategy": strategy}
    instantiate(OmegaConf.create(trainer)).fit(Job(str(folder)))


def train_by(way: Any, folder: str, *given: Any) -> None:
    """Body: train on these ranks."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    own = Path(folder, str(dist.get_rank()))
    own.mkdir()
    way(*given, own)


WAYS: list[tuple[Any, Any, list[str], tuple[Any, ...]]] = [
    (command, "auto", NAMED, (MEAN,)),
    (own_cli, "auto", NAMED, (MEAN,)),
    (own_cli, "auto", [*NAMED, "--trainer.strategy.reduction=weighted_mean"], (WEIGHTED,)),
    (command, IN_YAML, [], (WEIGHTED, 300.0, 7.5, True)),
    (hydra, {"_target_": STRATEGY, **OPTIONS}, [], (WEIGHTED, 1800.0, 7.5, True)),
]


@pytest.mark.parametrize(("way", "strategy", "more", "expected"), WAYS)
def test_selected_on_ranks_that_run(world, tmp_path, way, strategy, more, expected):
    """Case 25 (b, d): a class path, an option on the command line, a config file and Hydra; DDP's options included."""
    world(2).run(train_by, way, str(tmp_path), strategy, more)
    assert_trained(tmp_path, *expected)


def test_the_printed_config_is_the_config(tmp_path, capsys):
    """Case 25 (b): --print_config prints a config that prints itself, and holds every option."""
    given, printed = in_config(tmp_path, IN_YAML), []
    for file in (given[-1], str(tmp_path / "printed.yaml")):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["fit", "--config", file, "--print_config"])
        printed.append(capsys.readouterr().out)
        (tmp_path / "printed.yaml").write_text(printed[-1])
    of_strategy = yaml.safe_load(printed[0])["trainer"]["strategy"]["init_args"]
    expected = {**IN_YAML["init_args"], "find_unused_parameters": False, "start_method": "popen"}
    assert expected.items() <= of_strategy.items()
    assert printed[0] == printed[1]


def run(*command: Any) -> None:
    """Run a command to its end; the ranks it starts end with it."""
    path = os.pathsep.join(map(str, (HERE, TESTS, ROOT)))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "default"}
    subprocess.run([sys.executable, *map(str, command)], cwd=HERE, env=environ, timeout=100, check=True)


FULL = pytest.mark.full  # test_newcomer.py starts an instance's processes, too


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
    run(TESTS / "selected.py", tmp_path, name)
    assert_trained(tmp_path, gradient)


def test_console_command_knows_the_names(tmp_path):
    """Case 25 (a): `gradavg fit` needs no import in user code for a name; it leaves the config file as it is."""
    given = in_config(tmp_path, "gradavg_weighted")
    before = (tmp_path / "config.yaml").read_bytes()
    run("-m", "lightning_gradavg", *given)
    assert_trained(tmp_path, WEIGHTED)
    # Without a logger LightningCLI saves its own in the folder where the run begins.
    assert before == (tmp_path / "config.yaml").read_bytes()
