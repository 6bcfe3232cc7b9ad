"""Case 25: what a command line, a config file or Hydra names trains two ranks, with its options unchanged."""

from __future__ import annotations

import json
import os
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
from selected import MEAN, QUIET, WEIGHTED, Job, seen

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.cli import main

# LightningCLI of lightning 2.6 calls an old API of jsonargparse 4.53.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

STRATEGY = "lightning_gradavg.GradAvgStrategy"
OPTIONS = {"reduction": "weighted_mean", "bucket_cap_mb": 7.5, "static_graph": True}
IN_YAML: dict[str, Any] = {"class_path": STRATEGY, "init_args": {**OPTIONS, "timeout": "0:05:00"}}


def arguments(folder: Path, strategy: Any) -> list[str]:
    """Return those of `fit`, with a strategy in a config file."""
    trainer = {**QUIET, "devices": 2, "strategy": strategy, "default_root_dir": str(folder)}
    model = {"class_path": "selected.Job", "init_args": {"out": str(folder)}}
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed_everything": 1, "trainer": trainer, "model": model}))
    return ["fit", "--config", str(folder / "config.yaml")]


def from_command_line(command: str, given: list[str]) -> None:
    """Body: train as `gradavg fit`, or a user's own LightningCLI, does, on these ranks."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    if command == "gradavg":
        main(given)
    else:
        with mock.patch.object(sys, "argv", ["job.py", *given]):
            LightningCLI(save_config_callback=None)


def from_hydra(trainer: str, out: str) -> None:
    """Body: build a Trainer as Hydra does, with its strategy nested in it, and train on these ranks."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    instantiate(OmegaConf.create(json.loads(trainer))).fit(Job(out))


def assert_trained(out: Path, options: list[Any], gradient: float) -> None:
    """Both ranks trained with the strategy and these options, and got this gradient."""
    expected = ["GradAvgStrategy", options, pytest.approx(gradient, rel=1e-12)]
    assert [[[rank, 2, 0], *expected] for rank in range(2)] == seen(out)


@pytest.mark.parametrize(
    ("command", "more", "gradient"),
    [
        ("gradavg", [], MEAN),
        ("LightningCLI", [], MEAN),
        ("LightningCLI", ["--trainer.strategy.reduction=weighted_mean"], WEIGHTED),
    ],
)
def test_a_class_path(world, tmp_path, command, more, gradient):
    """Case 25 (d): `--trainer.strategy=lightning_gradavg.GradAvgStrategy`, with options or without, is that class."""
    given = [*arguments(tmp_path, "auto"), f"--trainer.strategy={STRATEGY}", *more]
    world(2).run(from_command_line, command, given)
    assert_trained(tmp_path, [1800.0, None, None], gradient)


def test_a_config_file(world, tmp_path):
    """Case 25 (b): class path and options of a config file reach the strategy unchanged, those of DDP included."""
    given = arguments(tmp_path, IN_YAML)
    before = (tmp_path / "config.yaml").read_bytes()
    world(2).run(from_command_line, "gradavg", given)
    assert_trained(tmp_path, [300.0, 7.5, True], WEIGHTED)
    # Without a logger LightningCLI saves its own in the folder where the run begins.
    assert before == (tmp_path / "config.yaml").read_bytes()


def test_the_printed_config_is_the_config(tmp_path, capsys):
    """Case 25 (b): --print_config prints a config that prints itself, and holds every option."""
    given, printed = arguments(tmp_path, IN_YAML), []
    for file in (given[-1], str(tmp_path / "printed.yaml")):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["fit", "--config", file, "--print_config"])
        printed.append(capsys.readouterr().out)
        (tmp_path / "printed.yaml").write_text(printed[-1])
    of_strategy = yaml.safe_load(printed[0])["trainer"]["strategy"]["init_args"]
    expected = {**IN_YAML["init_args"], "find_unused_parameters": False, "start_method": "popen"}
    assert expected.items() <= of_strategy.items()
    assert printed[0] == printed[1]


def test_hydra(world, tmp_path):
    """Case 25: a Hydra config with `_target_`, nested in that of a Trainer, trains with its options, DDP's included."""
    strategy = {"_target_": STRATEGY, **OPTIONS}
    trainer = {"_target_": "lightning.pytorch.Trainer", **QUIET, "devices": 2, "strategy": strategy}
    world(2).run(from_hydra, json.dumps(trainer), str(tmp_path))
    assert_trained(tmp_path, [1800.0, 7.5, True], WEIGHTED)
    assert GradAvgStrategy is type(instantiate(OmegaConf.create(strategy)))
