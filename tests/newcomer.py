"""A newcomer's walk: from the built wheel and an empty folder to a trained model, by each way that the README names.

`python tests/newcomer.py FOLDER` builds the wheel, installs it in a fresh environment that finds torch, Lightning and
Hydra where this Python does, writes what the README says into files, and runs its commands.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["WAYS", "Way", "install", "walk"]

ROOT = Path(__file__).resolve().parent.parent

NET = """
import json
import sys

import torch
from lightning.pytorch import LightningModule
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Embedding(10, 16), torch.nn.Linear(16, 10))
        self.losses = []

    def forward(self, inputs):
        return self.layers(inputs).transpose(1, 2)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = cross_entropy(self(inputs), targets, ignore_index=-100)
        self.losses.append(loss.item())
        return {"loss": loss, "weight": (targets != -100).sum()}

    def train_dataloader(self):
        inputs = torch.arange(320).reshape(32, 10) % 10
        targets = (inputs + 1) % 10
        targets[::3, 4:] = -100
        return DataLoader(list(zip(inputs, targets)), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def on_train_end(self):
        trained = {
            "place": [self.global_rank, self.trainer.world_size],
            "rule": self.trainer.strategy.facts().rule.name,
            "losses": [self.losses[0], self.losses[-1]],
            "weights": sum(parameter.sum().item() for parameter in self.parameters()),
            "package": sys.modules["lightning_gradavg"].__file__,
        }
        with open(f"rank{self.global_rank}.json", "w") as file:
            json.dump(trained, file)
"""

TRAINER = """trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 3
"""

HYDRA = """import hydra

from net import Net


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(config):
    hydra.utils.instantiate(config.trainer).fit(Net())


main()
"""


@dataclass(frozen=True)
class Way:
    """A way of selecting the strategy.

    Attributes:
        name: What it is.
        said: What the README says to write, word for word.
        command: What is run, by the programs of the new environment.
        rule: The rule that the strategy then has.
        files: What the newcomer writes beside the module, by name.
    """

    name: str
    said: tuple[str, ...]
    command: str
    rule: str
    files: dict[str, str] = field(default_factory=dict)


def _script(*lines: str) -> dict[str, str]:
    imports = "from lightning.pytorch import Trainer\nfrom net import Net\n"
    options = ', accelerator="cpu", devices=2, max_epochs=3).fit(Net())'
    return {"train.py": imports + "\n".join(lines).removesuffix(")") + options}


_INSTANCE = 'Trainer(strategy=GradAvgStrategy(reduction="sum"))'
_IMPORT, _NAME = "import lightning_gradavg", 'Trainer(strategy="gradavg_weighted")'
_OPTIONS = "--trainer.strategy=lightning_gradavg.GradAvgStrategy --trainer.strategy.reduction=sum"
_CLASS_PATH = "class_path: lightning_gradavg.GradAvgStrategy"
_FIT = "gradavg fit --config config.yaml"
_TARGET = "_target_: lightning_gradavg.GradAvgStrategy"

WAYS = (
    Way(
        "an instance",
        (_INSTANCE, "from lightning_gradavg import GradAvgStrategy"),
        "python train.py",
        "sum",
        _script("from lightning_gradavg import GradAvgStrategy", _INSTANCE),
    ),
    Way("a name", (_IMPORT, _NAME), "python train.py", "weighted_mean", _script(_IMPORT, _NAME)),
    Way(
        "LightningCLI",
        (_OPTIONS,),
        f"python train.py fit --config config.yaml {_OPTIONS}",
        "sum",
        {
            "train.py": "from lightning.pytorch.cli import LightningCLI\nfrom net import Net\n\nLightningCLI(Net)",
            "config.yaml": TRAINER,
        },
    ),
    Way(
        "a config file",
        (_CLASS_PATH, "init_args"),
        "python train.py fit --config config.yaml",
        "weighted_mean",
        {
            "train.py": "from lightning.pytorch.cli import LightningCLI\nfrom net import Net\n\nLightningCLI(Net)",
            "config.yaml": f"{TRAINER}  strategy:\n    {_CLASS_PATH}\n    init_args:\n      reduction: weighted_mean\n",
        },
    ),
    Way(
        "gradavg fit",
        (_FIT,),
        _FIT,
        "weighted_mean",
        {"config.yaml": f"{TRAINER}  strategy: gradavg_weighted\n  logger: false\nmodel:\n  class_path: net.Net\n"},
    ),
    Way(
        "Hydra",
        (_TARGET,),
        "python train.py",
        "weighted_mean",
        {
            "train.py": HYDRA,
            "config.yaml": f"{TRAINER}  _target_: lightning.pytorch.Trainer\n  strategy:\n    {_TARGET}\n"
            "    reduction: weighted_mean\n",
        },
    ),
)


def _run(*command: Any, folder: Path, path: str | None = None) -> str:
    """Return what a command printed that was started in a folder, with the programs of `path` before others."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environ = {**kept, "OMP_NUM_THREADS": "1", "PATH": os.pathsep.join(filter(None, (path, kept.get("PATH"))))}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


def install(folder: Path) -> Path:
    """Build the wheel, install it in an environment in the folder, and return the folder of its programs."""
    _run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder / "dist", ROOT, folder=folder)
    [wheel] = (folder / "dist").glob("*.whl")
    environment = folder / ".venv"
    venv.create(environment, with_pip=True)
    of_it = {"base": str(environment), "platbase": str(environment)}
    # Torch and Lightning need not be installed a second time; packages of the environment itself come first.
    Path(sysconfig.get_path("purelib", vars=of_it), "reused.pth").write_text(sysconfig.get_path("purelib"))
    programs = Path(sysconfig.get_path("scripts", vars=of_it))
    _run(programs / "python", "-m", "pip", "install", wheel, folder=folder)
    _run(programs / "python", "-m", "pip", "check", folder=folder)
    return programs


def walk(way: Way, folder: Path, programs: Path) -> list[dict[str, Any]]:
    """Train in an empty folder by one of the ways, and return what each rank wrote."""
    folder.mkdir()
    for name, text in {"net.py": NET, **way.files}.items():
        (folder / name).write_text(text)
    program, *arguments = way.command.split()
    _run(programs / program, *arguments, folder=folder, path=str(programs))
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]


def main() -> None:
    """Walk, and print what was trained by each way."""
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    programs = install(folder)
    for way in WAYS:
        sys.stdout.write(f"{way.name}: {way.command}\n")
        for rank in walk(way, folder / way.name.replace(" ", "_"), programs):
            sys.stdout.write(f"    {rank}\n")


if __name__ == "__main__":
    main()
