"""The command `gradavg`: what reaches a run and a plan, and one line that says what is wrong and what is accepted."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from lightning_gradavg.cli import main
from lightning_gradavg.cli.lightning import read_config
from lightning_gradavg.cli.verify import names_a_gradavg_strategy
from lightning_gradavg.plan import Recipe, make_plan
from lightning_gradavg.verify.processes import reported_error
from lightning_gradavg.verify.target import resolve_strategy

# LightningCLI of lightning 2.6 calls an old API of jsonargparse 4.53.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

STRATEGY = "--trainer.strategy=lightning_gradavg.GradAvgStrategy --trainer.strategy"
VERIFY = "verify net_of_fit.py:Net"
PLAN = "plan --batch-size 16 --lr 0.01 --nodes 2 --devices-per-node 2"
UNNAMED = "name the classes: --model train.py:Net"
MODULE = """
import torch
from lightning.pytorch import LightningModule


class Net(LightningModule):
    def __init__(self, hidden: int = 3):
        super().__init__()
        if hidden == 13:
            raise ValueError("thirteen or more")
        if hidden == 14:
            raise ValueError("thirteen or more") from KeyError
        self.layer = torch.nn.Linear(1, hidden)


NET = 7
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in a folder with a config file that names a module beside it."""
    monkeypatch.chdir(tmp_path)
    others = [entry for entry in sys.path if entry not in ("", str(Path.cwd()))]
    monkeypatch.setattr(sys, "path", [str(Path.cwd()), *others])
    monkeypatch.setattr(sys, "argv", ["gradavg"])
    monkeypatch.delitem(sys.modules, "net_of_fit", raising=False)
    Path("net_of_fit.py").write_text(MODULE)
    trainer = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    run = {"seed_everything": 1, "model": {"class_path": "net_of_fit.Net"}, "trainer": trainer}
    Path("run.yaml").write_text(yaml.safe_dump(run))
    Path("hidden.yaml").write_text("model: {hidden: 4}")
    Path("epochs.yaml").write_text("trainer: {max_epochs: 1}")
    Path("colon.yaml").write_text("model: {class_path: net_of_fit:Net}")
    Path("latin.yaml").write_bytes(b"# \xe9\n")


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("fit --config run.yaml", ["'fit' is not a command; choose from plan, verify"]),
        (f"{PLAN} --batch-size 1.5", ["argument --batch-size: invalid int value: '1.5'"]),
        (f"{PLAN} --lr inf", ["lr must be finite and > 0, got inf"]),
        (f"{PLAN} --global-batch-size 1{'0' * 400}", ["too large"]),
        ("verify --config none.yaml", ["--config 'none.yaml': there is no such file"]),
        ("verify --config latin.yaml", ["--config 'latin.yaml' is not UTF-8", "0xe9"]),
        (f"{VERIFY} --strategy gradavgs", ["strategy='gradavgs' is not registered"]),
        (f"{VERIFY} --strategy gradavg_ddp", ["Did you mean 'gradavg"]),
        (f"{VERIFY} --trainer strategy=5", ["strategy=5 is no name: give --strategy gradavg_single_device, or"]),
    ],
)
def test_a_wrong_value_is_one_line(capsys, given, parts):
    """A value that is refused, by the parser or a plan, ends with code 2 and one line."""
    sys.path.remove(str(Path.cwd()))
    try:
        code = main(given.split())
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    printed = capsys.readouterr()
    *before, line = printed.err.splitlines()
    assert (printed.out, []) == ("", [text for text in before if re.search(r"usage|Traceback|error", text)])
    assert re.match(rf"gradavg( {given.split()[0]})?: error: ", line)
    # Users name modules of the folder that they are in.
    assert given.startswith("fit") or str(Path.cwd()) in sys.path
    assert all(part in line for part in parts)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("--config run.yaml --trainer.max_epochs=foo", ["foo", "Expected a <class 'int'>"]),
        ("--config run.yaml --model=nett.Net", ["nett.Net", "No module named 'nett'"]),
        ("--config run.yaml --model=net_of_fit.py:Net:x", ["net_of_fit.py:Net", "cannot be imported"]),
        ("--config colon.yaml", ["Expected a dot import path string: net_of_fit:Net"]),
        (f"--config run.yaml {STRATEGY}.reduction=avg", ["avg", "Literal['mean', 'sum', 'weighted_mean'"]),
        (f"--config run.yaml {STRATEGY}.reductoin=sum", ["reductoin"]),
        (f"--config run.yaml {STRATEGY}.num_replicas=4", ["num_replicas=4", "requires split_batches=True"]),
        ("--config hidden.yaml", [UNNAMED]),
        ("--config epochs.yaml", [UNNAMED]),
    ],
)
def test_what_a_config_says_wrong_is_one_line(given, parts):
    """As verify reads it in its own processes."""
    with pytest.raises(ValueError, match=re.escape(parts[0])) as raised:
        read_config(given.split(), None)
    text = str(raised.value)
    assert 1 == len(text.splitlines())
    assert all(part in text for part in parts)


def test_a_class_is_that_of_the_folder():
    """Named by its file, it needs no class path in the config."""
    given = "--config epochs.yaml --seed_everything=1 --model=net_of_fit.py:Net --model.hidden=7"
    run = read_config(given.split(), None)
    assert (7, 1) == (run.module.layer.out_features, run.options["max_epochs"])


def test_without_a_command_one_line_says_what_to_do_next(capsys):
    assert main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("gradavg: error: a command is missing.")
    assert "'gradavg verify train.py:Net'" in line
    assert "'gradavg --help'" in line


@pytest.mark.parametrize("hidden", [13, 14])
def test_a_fault_of_the_module_keeps_its_trace(hidden):
    """Also one that is raised `from` the class of an exception, which nobody raised."""
    with pytest.raises(ValueError, match=r"^thirteen or more$") as raised:
        read_config(["--config=run.yaml", f"--model.hidden={hidden}"], None)
    reported = str(reported_error(raised.value, "rank 0 of 2"))
    assert reported.startswith("rank 0 of 2 failed: ValueError: thirteen or more\n")
    assert "net_of_fit.py, line" in reported


def test_an_instance_is_no_strategy():
    with pytest.raises(
        ValueError, match=r"strategy='net_of_fit.py:NET' is 7; name the class, or a function that makes"
    ):
        resolve_strategy("net_of_fit.py:NET")


def test_a_script_may_have_another_encoding():
    """As it says in its first line; verify looks for the name of a strategy in it."""
    Path("latin.py").write_bytes("# -*- coding: latin-1 -*-\n# \xe9: GradAvgStrategy".encode("latin-1"))
    assert names_a_gradavg_strategy("latin.py:Net")


def test_every_option_reaches_the_plan(capsys):
    options = (
        "--optimizer adamw --betas 0.8 0.95 --eps 1e-7 --base-devices 2 --steps 90 --accumulate-grad-batches 3"
        " --dataset-size 500 --warmup-steps 9 --global-batch-size 192 --max-device-batch-size 10 --json"
    )
    assert main([*PLAN.split(), *options.split()]) == 0
    recipe = Recipe(16, 0.01, 2, 3, "adamw", (0.8, 0.95), 1e-7, steps=90, dataset_size=500, warmup_steps=9)
    expected = make_plan(recipe, nodes=2, devices_per_node=2, global_batch_size=192, max_device_batch_size=10)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps({"schema": 2, **expected}))
