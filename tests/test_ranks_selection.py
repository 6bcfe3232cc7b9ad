"""Case 25: what a command line, a config file or Hydra names trains two ranks, with its options unchanged."""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import yaml
from hydra.utils import instantiate
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from omegaconf import OmegaConf
from toys import Toy, loader

from lightning_gradavg import GradAvgStrategy
from lightning_gradavg.cli import main

# LightningCLI of lightning 2.6 calls an old API of jsonargparse 4.53.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CASE_2 = [[[1.0, 2.0, 3.0]], [[4.0]]]
STRATEGY = "lightning_gradavg.GradAvgStrategy"
OPTIONS = {"reduction": "weighted_mean", "bucket_cap_mb": 7.5, "static_graph": True, "timeout": "0:05:00"}
TRAINER = {
    "accelerator": "cpu",
    "devices": 2,
    "max_epochs": 1,
    "logger": False,
    "use_distributed_sampler": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Job(Toy):
    """Toy-S on uneven batches: rank 0 holds 1, 2, 3 and rank 1 holds 4."""

    trained: Job

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__("s", lr=lr)

    def train_dataloader(self) -> Any:
        return loader(CASE_2[dist.get_rank()])

    def on_train_end(self) -> None:
        Job.trained = self


def seen(job: Job) -> Any:
    """Return what one rank trained with: its place, the strategy and its options, and the gradient."""
    strategy: Any = job.trainer.strategy
    [gradient] = job.seen.gradients
    ddp = {name: strategy._ddp_kwargs.get(name) for name in ("bucket_cap_mb", "static_graph")}
    of_it = {"timeout": strategy._timeout.total_seconds(), **ddp}
    return (job.seen.rank, job.seen.world_size), type(strategy).__name__, of_it, gradient.item()


STOCK = {"timeout": 1800.0, "bucket_cap_mb": None, "static_graph": None}
GIVEN = {"timeout": 300.0, "bucket_cap_mb": 7.5, "static_graph": True}


def assert_trained(ranks: Any, options: Any, gradient: float) -> None:
    """Both ranks trained with the strategy and these options, and got this gradient."""
    expected = ["GradAvgStrategy", options, pytest.approx(gradient, rel=1e-12)]
    assert [[(rank, 2), *expected] for rank in range(2)] == [list(one) for one in ranks]


def from_command_line(command: str, arguments: list[str]) -> Any:
    """Body: train as `gradavg fit`, or a user's own LightningCLI, does, on these ranks."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    arguments = ["fit", "--model=test_ranks_selection.Job", *arguments]
    if command == "gradavg":
        main(arguments)
    else:
        with mock.patch.object(sys, "argv", ["job.py", *arguments]):
            LightningCLI(save_config_callback=None)
    return seen(Job.trained)


def options(strategy: Any, folder: Any) -> list[str]:
    """Return the Trainer's options for a command line, the strategy in a config file."""
    file = folder / "config.yaml"
    trainer = {**TRAINER, "strategy": strategy, "default_root_dir": str(folder)}
    file.write_text(yaml.safe_dump({"seed_everything": 1, "trainer": trainer}))
    return ["--config", str(file)]


@pytest.mark.parametrize(
    ("command", "more", "gradient"),
    [
        ("gradavg", [], 31 / 3),  # the mean of 14 / 3 and 16
        ("LightningCLI", [], 31 / 3),
        ("LightningCLI", ["--trainer.strategy.reduction=weighted_mean"], 7.5),
    ],
)
def test_a_class_path(world, tmp_path, command, more, gradient):
    """Case 25 (d): `--trainer.strategy=lightning_gradavg.GradAvgStrategy`, with options or without, is that class."""
    given = [*options("auto", tmp_path), f"--trainer.strategy={STRATEGY}", *more]
    assert_trained(world(2).run(from_command_line, command, given), STOCK, gradient)


def test_a_config_file(world, tmp_path):
    """Case 25 (b): class path and options of a config file reach the strategy unchanged, those of DDP included."""
    given = options({"class_path": STRATEGY, "init_args": OPTIONS}, tmp_path)
    before = (tmp_path / "config.yaml").read_bytes()
    assert_trained(world(2).run(from_command_line, "gradavg", given), GIVEN, 7.5)
    # Without a logger LightningCLI saves its own in the folder where the run begins.
    assert before == (tmp_path / "config.yaml").read_bytes()


def test_the_printed_config_is_the_config(tmp_path, capsys):
    """Case 25 (b): --print_config prints a config that prints itself, and holds every option."""
    given = options({"class_path": STRATEGY, "init_args": OPTIONS}, tmp_path)
    printed = []
    for arguments in (given, ["--config", str(tmp_path / "printed.yaml")]):
        with pytest.raises(SystemExit) as ended:
            main(["fit", "--model=test_ranks_selection.Job", *arguments, "--print_config"])
        assert 0 == ended.value.code
        printed.append(capsys.readouterr().out)
        (tmp_path / "printed.yaml").write_text(printed[-1])
    of_strategy = yaml.safe_load(printed[0])["trainer"]["strategy"]["init_args"]
    assert {**OPTIONS, "find_unused_parameters": False, "start_method": "popen"}.items() <= of_strategy.items()
    assert printed[0] == printed[1]


def test_a_misspelt_option(tmp_path, capsys):
    """Case 25 (c): a misspelt option in a config file ends the command with code 2 and an error that contains it."""
    given = options({"class_path": STRATEGY, "init_args": {"reductoin": "sum"}}, tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--model=test_ranks_selection.Job", *given])
    assert 2 == ended.value.code
    assert "reductoin" in capsys.readouterr().err


def from_hydra(trainer: str) -> Any:
    """Body: build a Trainer as Hydra does, with its strategy nested in it, and train on these ranks."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    built = instantiate(OmegaConf.create(json.loads(trainer)))
    assert isinstance(built, Trainer)
    job = Job()
    built.fit(job)
    return seen(job)


def test_hydra(world):
    """Case 25: a Hydra config with `_target_`, nested in that of a Trainer, trains with its options, DDP's included."""
    strategy = {"_target_": STRATEGY, "reduction": "weighted_mean", "bucket_cap_mb": 7.5, "static_graph": True}
    trainer = {"_target_": "lightning.pytorch.Trainer", **TRAINER, "strategy": strategy}
    assert_trained(world(2).run(from_hydra, json.dumps(trainer)), {**GIVEN, "timeout": 1800.0}, 7.5)
    assert GradAvgStrategy is type(instantiate(OmegaConf.create(strategy)))
