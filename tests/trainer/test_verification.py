"""The real command and the callback, in processes that they start themselves."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import yaml
from test_selection import GRADAVG, HERE, run

from lightning_gradavg.verification.worlds import in_processes

VERIFY = [*GRADAVG, "verify"]


def test_a_module_by_name_is_verified(tmp_path):
    """A sum loss under stock DDP ends the command with code 1, and both its causes stand in the JSON, in order."""
    done = run(
        *VERIFY, "verify_job:Summed", "--data", "verify_job:Data", "--json", "--trainer", "max_epochs=1", check=False
    )
    assert 1 == done.returncode, done.stderr
    report = json.loads(done.stdout)
    assert ["data order", "sum loss"] == [finding["cause"] for finding in report["findings"]]
    assert pytest.approx(0.5) == report["findings"][1]["factor"]
    assert (2, 3, False) == (report["world_size"], report["steps"], report["equal"])


@pytest.mark.slow
def test_a_config_file_is_verified(tmp_path):
    """A config of LightningCLI and options behind it are equal: code 0, the verdict and a picture."""
    pytest.importorskip("matplotlib")
    config = tmp_path / "config.yaml"
    strategy = {
        "class_path": "lightning_gradavg.GradAvgStrategy",
        "init_args": {"split_batches": True, "reduction": "sum"},
    }
    content = {
        "seed_everything": 5,
        "trainer": {"strategy": strategy, "max_epochs": 2, "default_root_dir": str(tmp_path), "devices": 7},
        "model": {"class_path": "verify_job.Classifier"},
        "data": {"class_path": "verify_job.Data", "init_args": {"samples": 10}},
    }
    config.write_text(yaml.safe_dump(content))
    picture = tmp_path / "report.png"
    done = run(*VERIFY, "--config", config, "--steps", 4, "--plot", picture, "--model.init_args.loss=sum")
    assert "EQUAL: every step is that of the reference." in done.stdout
    assert b"\x89PNG" == picture.read_bytes()[:4]


def test_a_run_that_fails_ends_the_command_with_its_traceback():
    """An error in the user's code on the ranks ends the command with code 2, and shows where."""
    done = run(*VERIFY, "verify_job:Failing", "--data", "verify_job:Data", check=False)
    assert 2 == done.returncode
    assert "gradavg verify: error: process" in done.stderr
    assert "ArithmeticError: as planted" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "code"), [("mean", 0), ("sum", 1)])
def test_the_callback_verifies_a_real_run(loss, code):
    """A run that is its reference goes on to its end on both ranks; one that is not is ended with the cause."""
    done = run(sys.executable, HERE / "verify_job.py", loss, "raise", check=False)
    assert code == done.returncode, done.stderr
    if code == 0:
        assert {"rank 0: 6 steps, equal True", "rank 1: 6 steps, equal True"} <= set(done.stdout.splitlines())
    else:
        assert "is not the one that one process would train: sum loss (the gradient is 0.5 x" in done.stderr


def test_processes_are_given_any_number_of_tensors():
    """Tensors travel by file: as arguments of a process each would take a file descriptor, of which there are few."""
    tensors = [torch.full((2,), float(index)) for index in range(600)]
    assert [600, 3] == in_processes([(len, (tensors,)), (len, ("abc",))])


def test_the_first_process_that_fails_is_named():
    """One process fails: its traceback is the message, and the call ends."""
    with pytest.raises(RuntimeError, match=r"(?s)process 1 .* exit code 1.*ValueError: invalid literal"):
        in_processes([(len, ("abc",)), (int, ("x",))])
