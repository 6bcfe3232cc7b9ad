"""Case 25: what a script, a command line, a config file or Hydra names trains two ranks, with its options unchanged."""

from __future__ import annotations

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
from toys import Toy, make_loader

from lightning_gradavg import hooks

# LightningCLI of lightning 2.6 calls an old API of jsonargparse 4.53.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

HERE = Path(__file__).resolve().parent
STRATEGY = "lightning_gradavg.GradAvgStrategy"
OPTIONS = {"reduction": "weighted_mean", "bucket_cap_mb": 7.5}
HOOK = {"ddp_comm_hook": "lightning_gradavg.hooks.float32_sum"}
IN_YAML: dict[str, Any] = {"class_path": STRATEGY, "init_args": {**OPTIONS, **HOOK, "timeout": "0:05:00"}}
# The gradient on two ranks under each rule.
MEAN = (14 / 3 + 16) / 2
WEIGHTED = 7.5
NAMED = [f"--trainer.strategy={STRATEGY}"]
QUIET: dict[str, Any] = {
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
    """Toy-S on 1, 2, 3 on rank 0 and 4 on the other, which writes what it was trained with."""

    def __init__(self, out: str) -> None:
        super().__init__("s")
        self.out = Path(out)

    def train_dataloader(self) -> Any:
        return make_loader([[1.0, 2.0, 3.0] if dist.get_rank() == 0 else [4.0]])

    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        of_ddp = [strategy._ddp_kwargs.get("bucket_cap_mb")]
        found = [dist.get_rank(), dist.get_world_size(), strategy.node_rank, type(strategy).__name__]
        found += [strategy._ddp_comm_hook is hooks.float32_sum, strategy._timeout.total_seconds(), *of_ddp]
        (self.out / f"rank{dist.get_rank()}.yaml").write_text(yaml.safe_dump([*found, self.seen.gradients[0].item()]))


def assert_trained(out: Path, gradient: float, hooked: bool = False, timeout: float = 1800.0, *of_ddp: Any) -> None:
    """Both ranks trained with the strategy and these options, and got this gradient."""
    found = [yaml.safe_load(path.read_text()) for path in sorted(out.rglob("rank*.yaml"))]
    expected = ["GradAvgStrategy", hooked, timeout, *(of_ddp or (None,)), pytest.approx(gradient, rel=1e-12)]
    assert [[rank, 2, 0, *expected] for rank in range(2)] == found


def in_config(folder: Path, strategy: Any) -> list[str]:
    trainer = {**QUIET, "strategy": strategy, "default_root_dir": str(folder)}
    model = {"class_path": "test_selection.Job", "init_args": {"out": str(folder)}}
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed_everything": 1, "trainer": trainer, "model": model}))
    return ["fit", "--config", str(folder / "config.yaml")]


def own_cli(strategy: Any, more: list[str], folder: Path) -> None:
    with mock.patch.object(sys, "argv", ["job.py", *in_config(folder, strategy), *more]):
        LightningCLI(save_config_callback=None)


def hydra(strategy: Any, more: list[str], folder: Path) -> None:
    trainer = {"_target_": "lightning.pytorch.Trainer", **QUIET, "strategy": strategy}
    instantiate(OmegaConf.create(trainer)).fit(Job(str(folder)))


def train_by(way: Any, folder: str, *given: Any) -> None:
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    own = Path(folder, str(dist.get_rank()))
    own.mkdir()
    way(*given, own)


WAYS: list[tuple[Any, Any, list[str], tuple[Any, ...]]] = [
    (own_cli, "auto", NAMED, (MEAN,)),
    (own_cli, "gradavg_weighted", [], (WEIGHTED,)),
    (own_cli, IN_YAML, [], (WEIGHTED, True, 300.0, 7.5)),
    (own_cli, "auto", [*NAMED, "--trainer.strategy.reduction=weighted_mean"], (WEIGHTED,)),
    (hydra, {"_target_": STRATEGY, **OPTIONS}, [], (WEIGHTED, False, 1800.0, 7.5)),
]


@pytest.mark.parametrize(("way", "strategy", "more", "expected"), WAYS)
def test_selected_on_ranks_that_run(world, tmp_path, way, strategy, more, expected):
    """Case 25 (a, b, d): a name, a class path, an option, a config file and Hydra; DDP's options included."""
    world(2).run(train_by, way, str(tmp_path), strategy, more)
    assert_trained(tmp_path, *expected)


def test_the_printed_config_is_the_config(tmp_path, capsys):
    """Case 25 (b): --print_config prints a config that prints itself, and holds every option."""
    given = in_config(tmp_path, IN_YAML)
    printed = []
    for file in (given[-1], str(tmp_path / "printed.yaml")):
        command = ["job.py", "fit", "--config", file, "--print_config"]
        with mock.patch.object(sys, "argv", command), pytest.raises(SystemExit, match=r"^0$"):
            LightningCLI()
        printed.append(capsys.readouterr().out)
        (tmp_path / "printed.yaml").write_text(printed[-1])
    of_strategy = yaml.safe_load(printed[0])["trainer"]["strategy"]["init_args"]
    expected = {**IN_YAML["init_args"], "find_unused_parameters": False, "start_method": "popen"}
    assert expected.items() <= of_strategy.items()
    assert printed[0] == printed[1]
