"""`gradavg fit` finds the modules beside it, and says in one line what is wrong with a value and what is accepted."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

import lightning_gradavg
from lightning_gradavg.cli import main

# LightningCLI of lightning 2.6 calls an old API of jsonargparse 4.53.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

STRATEGY = "--trainer.strategy=lightning_gradavg.GradAvgStrategy --trainer.strategy"
MODULE = """
import torch
from lightning.pytorch import LightningModule


class Net(LightningModule):
    def __init__(self, hidden: int = 3):
        super().__init__()
        if hidden == 13:
            raise ValueError("thirteen")
        self.layer = torch.nn.Linear(1, hidden)
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a config file that names a module beside it, from within their folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(Path.cwd()))])
    monkeypatch.setattr(sys, "argv", ["pytest", "some", "arguments"])
    monkeypatch.delitem(sys.modules, "net_of_fit", raising=False)
    Path("net_of_fit.py").write_text(MODULE)
    trainer = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    run = {"seed_everything": 1, "model": {"class_path": "net_of_fit.Net"}, "trainer": trainer}
    Path("run.yaml").write_text(yaml.safe_dump(run))
    return "run.yaml"


def test_modules_of_the_folder_are_found(config, capsys):
    """The module of a config is that of the folder where the command runs, and arguments are not warned of."""
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", config, "--model.hidden=7", "--print_config"])
    assert ended.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert {"hidden": 7} == printed["model"]["init_args"]
    assert ["pytest", "some", "arguments"] == sys.argv


@pytest.mark.parametrize(
    ("given", "quoted", "accepted"),
    [
        ("--trainer.max_epochs=foo", "foo", "Expected a <class 'int'>"),
        ("--trainer.foo=3", "--trainer.foo=3", "unrecognized arguments"),
        ("--config none.yaml", "none.yaml", "does not exist"),
        ("--model.hidden=x", "x", "Expected a <class 'int'>"),
        ("--model=nett.Net", "nett.Net", "No module named 'nett'"),
        (f"{STRATEGY}.reduction=avg", "avg", "Literal['mean', 'sum', 'weighted_mean'"),
        (f"{STRATEGY}.num_replicas=4", "num_replicas=4", "cuts the chunks of split_batches=True"),
        (f"{STRATEGY}.split_batches=maybe", "maybe", "Expected a <class 'bool'>"),
        ("--trainer.strategy=gradavgs", "gradavgs", "invalid strategy name"),
        ("--trainer.devices=0", "0", "devices"),
    ],
)
def test_a_wrong_value_is_one_line(config, capsys, given, quoted, accepted):
    """A value that is refused, by the parser, the strategy or the Trainer, ends with code 2 and one line."""
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", config, *given.split()])
    assert ended.value.code == 2
    *before, line = capsys.readouterr().err.splitlines()
    assert [] == [text for text in before if re.search(r"usage|Traceback|error", text)]
    assert re.match("gradavg( fit)?: error: ", line)
    assert quoted in line
    assert accepted in line


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("fit", ""),
        ("fit --config run.yaml", "model: {hidden: 4}"),
        ("verify --config run.yaml", "trainer: {max_epochs: 1}"),
    ],
)
def test_without_a_model_the_line_says_which_option_names_one(config, capsys, command, text):
    Path("run.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(command.split()))
    assert ended.value.code == 2
    assert "name the classes: --model train.py:Net" in capsys.readouterr().err.splitlines()[-1]


def test_a_fault_of_the_module_keeps_its_trace(config):
    """What a user's own code raises is raised."""
    with pytest.raises(ValueError, match="thirteen"):
        main(["fit", "--config", config, "--model.hidden=13"])


def test_the_version(capsys):
    """`gradavg --version` tells the version of the package, as `__version__` does."""
    assert 0 == main(["--version"])
    assert f"gradavg {lightning_gradavg.__version__}\n" == capsys.readouterr().out
