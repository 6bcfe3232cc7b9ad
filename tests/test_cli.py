"""The command `gradavg`: what reaches a run and a plan, and one line that says what is wrong and what is accepted."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from lightning_gradavg.cli import main
from lightning_gradavg.plan import Recipe, make_plan

# LightningCLI of lightning 2.6 calls an old API of jsonargparse 4.53.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

STRATEGY = "--trainer.strategy=lightning_gradavg.GradAvgStrategy --trainer.strategy"
FIT = "fit --config run.yaml"
PLAN = "plan --batch-size 16 --lr 0.01 --nodes 2 --devices-per-node 2"
UNNAMED = "name the classes: --model train.py:Net"
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


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in a folder with a config file that names a module beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(Path.cwd()))])
    monkeypatch.setattr(sys, "argv", ["pytest", "some", "arguments"])
    monkeypatch.delitem(sys.modules, "net_of_fit", raising=False)
    Path("net_of_fit.py").write_text(MODULE)
    trainer = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    run = {"seed_everything": 1, "model": {"class_path": "net_of_fit.Net"}, "trainer": trainer}
    Path("run.yaml").write_text(yaml.safe_dump(run))
    Path("hidden.yaml").write_text("model: {hidden: 4}")
    Path("epochs.yaml").write_text("trainer: {max_epochs: 1}")


def test_modules_of_the_folder_are_found(capsys):
    """The module of a config is that of the folder where the command runs, and arguments are not warned of."""
    with pytest.raises(SystemExit) as ended:
        main([*FIT.split(), "--model=net_of_fit.py:Net", "--model.hidden=7", "--print_config"])
    assert ended.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert {"class_path": "net_of_fit.Net", "init_args": {"hidden": 7}} == printed["model"]
    assert ["pytest", "some", "arguments"] == sys.argv


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (f"{FIT} --trainer.max_epochs=foo", ["foo", "Expected a <class 'int'>"]),
        ("fit --config none.yaml", ["none.yaml", "does not exist"]),
        (f"{FIT} --model=nett.Net", ["nett.Net", "No module named 'nett'"]),
        (f"{FIT} {STRATEGY}.reduction=avg", ["avg", "Literal['mean', 'sum', 'weighted_mean'"]),
        (f"{FIT} {STRATEGY}.reductoin=sum", ["reductoin"]),
        (f"{FIT} {STRATEGY}.num_replicas=4", ["num_replicas=4", "requires split_batches=True"]),
        (f"{FIT} --trainer.strategy=gradavgs", ["gradavgs", "invalid strategy name"]),
        (f"{FIT} --trainer.devices=0", ["0", "devices"]),
        ("fit", [UNNAMED]),
        ("fit --config hidden.yaml", [UNNAMED]),
        ("verify --config epochs.yaml", [UNNAMED]),
        (f"{PLAN} --batch-size 1.5", ["argument --batch-size: invalid int value: '1.5'"]),
        (f"{PLAN} --lr inf", ["lr must be finite and > 0, got inf"]),
    ],
)
def test_a_wrong_value_is_one_line(capsys, given, parts):
    """A value that is refused, by the parser, the strategy, the Trainer or a plan, ends with code 2 and one line."""
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(given.split()))
    assert ended.value.code == 2
    printed = capsys.readouterr()
    *before, line = printed.err.splitlines()
    assert (printed.out, []) == ("", [text for text in before if re.search(r"usage|Traceback|error", text)])
    assert re.match(rf"gradavg( {given.split()[0]})?: error: ", line)
    assert all(part in line for part in parts)


def test_without_a_command_one_line_says_what_to_do_next(capsys):
    assert main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("gradavg: error: a command is missing.")
    assert "'gradavg verify train.py:Net'" in line
    assert "'gradavg --help'" in line


def test_a_fault_of_the_module_keeps_its_trace():
    with pytest.raises(ValueError, match="thirteen"):
        main([*FIT.split(), "--model.hidden=13"])


def test_every_option_reaches_the_plan(capsys):
    options = (
        "--optimizer adamw --betas 0.8 0.95 --eps 1e-7 --base-devices 2 --steps 90 --accumulate-grad-batches 3"
        " --dataset-size 500 --warmup-steps 9 --global-batch-size 192 --max-device-batch-size 10 --json"
    )
    assert main([*PLAN.split(), *options.split()]) == 0
    recipe = Recipe(16, 0.01, 2, 3, "adamw", (0.8, 0.95), 1e-7, steps=90, dataset_size=500, warmup_steps=9)
    expected = make_plan(recipe, nodes=2, devices_per_node=2, global_batch_size=192, max_device_batch_size=10)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps({"schema": 2, **expected}))
