"""The command and the function, in processes that they start themselves."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
import torch
import yaml
from test_selection import HERE
from torch.utils.data import DataLoader
from toys import Toy
from verify_job import ROWS

from lightning_gradavg import verify
from lightning_gradavg.cli import main
from lightning_gradavg.verify.run import in_processes

JOB, TOY = HERE / "verify_job.py", HERE.parent / "toys.py"
DATA = ["--data", f"{JOB}:Data", "--trainer", "max_epochs=1"]


def verified(*arguments: object, capsys: pytest.CaptureFixture[str], code: int) -> str:
    """Return what the command printed in this process, or its errors; its ranks are others."""
    found = main(["verify", *map(str, arguments)])
    output, errors = capsys.readouterr()
    assert code == found, errors
    assert code != 2 or not output
    return errors if code == 2 else output


# What is given, the exit code, and what the JSON says, in which what changes gradients comes first.
COMMANDS: dict[str, tuple[list[str], int, dict[str, Any]]] = {
    "a sum loss under stock DDP": (
        [f"{TOY}:Toy", *DATA, "--init", "loss=sum", "--init", "lr=0.1"],
        1,
        {"causes": ["sum loss", "data order"], "world_size": 2, "steps": 1, "verdict": "different", "equal": False},
    ),
    "a rate and a stream that follow the variables of a launcher": (
        [f"{JOB}:Scaled", "--data", f"{JOB}:stream", "--single"],
        1,
        {"causes": ["learning-rate scale"], "precision": "float32", "tolerance": 1e-4},
    ),
}


@pytest.mark.parametrize(("arguments", "code", "said"), COMMANDS.values(), ids=COMMANDS)
def test_the_command_verifies_a_module_by_name(arguments, code, said, capsys):
    report = json.loads(verified(*arguments, "--json", capsys=capsys, code=code))
    found = {**report, **report["stages"], "causes": [finding["cause"] for finding in report["findings"]]}
    assert said == {name: found[name] for name in said}


def test_a_run_that_fails_shows_the_last_line_of_the_user(tmp_path, monkeypatch, capsys):
    """An error in the user's code ends the command with code 2, and shows where; no process lives on."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv("PIPE", str(pipe))
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # a writer would otherwise wait for a reader
    errors = verified(f"{JOB}:Failing", *DATA, capsys=capsys, code=2)
    shown = [line.strip() for line in errors[errors.index("gradavg verify") :].splitlines()]
    assert "failed: ArithmeticError: as planted" in shown[0]
    number = JOB.read_text("utf-8").splitlines().index('        raise ArithmeticError("as planted")') + 1
    assert [f"{JOB}, line {number}, in training_step", 'raise ArithmeticError("as planted")'] == shown[1:]
    os.set_blocking(end, True)
    assert b"" == os.read(end, 1), "the end of the pipe, which only comes when nobody can write to it any more"
    os.close(end)


def test_a_wrong_target_is_one_line(capsys):
    """What only the ranks can find out is one line, too."""
    errors = verified(f"{TOY}:Toy", capsys=capsys, code=2)
    assert "there is no training data: give --data train.py:data" in errors.splitlines()[-1]


def test_an_instance_is_verified():
    """`verify` takes instances, sends them to the processes, and returns the report."""
    report = verify(Toy(loss="sum"), DataLoader(ROWS[:16], 4), strategy="gradavg_sum", steps=2, max_epochs=1)
    assert ("equal", "GradAvgStrategy", "sum") == (report.verdict, report.strategy, report.reduction), report.remarks


def test_a_config_file_is_verified(tmp_path, monkeypatch, capsys):
    """A config of LightningCLI and options behind it are equal: code 0 and the verdict."""
    monkeypatch.chdir(HERE)
    of_strategy = {"split_batches": True, "reduction": "sum"}
    strategy = {"class_path": "lightning_gradavg.GradAvgStrategy", "init_args": of_strategy}
    content = {
        "seed_everything": 5,
        "trainer": {"strategy": strategy, "max_epochs": 2, "default_root_dir": str(tmp_path), "devices": 7},
        "model": {"start": 2.0},
        "data": {"class_path": "verify_job.Data", "init_args": {"samples": 10}},
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    arguments = ["--config", config, "--model", "../toys.py:Toy", "--steps", "4", "--model.loss=sum"]
    assert verified(*arguments, capsys=capsys, code=0).startswith("EQUAL: every step matches one process.")


def test_processes_are_given_any_number_of_tensors():
    """Tensors travel by file: as arguments of a process each would take a file descriptor, of which there are few."""
    tensors = [torch.full((2,), float(index)) for index in range(600)]
    assert [600, 3] == in_processes([(len, (tensors,)), (len, ("abc",))])


def test_the_first_process_that_fails_is_named():
    """One process fails: its error is the message, and the call ends."""
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed: ZeroDivisionError"):
        in_processes([(len, ("abc",)), (divmod, (1, 0))])
    with pytest.raises(
        RuntimeError, match=r"rank 0 of 1 failed: exit code -9: see standard error, and call verify under"
    ):
        in_processes([(signal.raise_signal, (signal.SIGKILL,))])
