"""The command and the function, in processes that they start themselves."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader
from toys import Toy

from lightning_gradavg import verify
from lightning_gradavg.cli import main
from lightning_gradavg.verify.processes import in_processes

HERE, ROWS = Path(__file__), list(torch.arange(1.0, 25.0) / 24)


class Scaled(Toy):
    """Takes its learning rate from what a launcher sets."""

    def configure_optimizers(self) -> Any:
        assert int(os.environ["LOCAL_RANK"]) == self.local_rank
        return torch.optim.SGD(self.parameters(), lr=0.1 * int(os.environ["WORLD_SIZE"]))


class Failing(Toy):
    """Starts a process on every rank that holds a pipe open, and fails."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with Path(os.environ["PIPE"]).open("w") as pipe:
            subprocess.Popen(["sleep", "600"], stdout=pipe)
        raise ArithmeticError("as planted")


class Waiting(Toy):
    """Holds a pipe open on every rank, and waits for the end of its process, or until nobody reads the pipe."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with Path(os.environ["PIPE"]).open("wb", buffering=0) as pipe:
            pipe.write(b"x")
            unread = select.poll()
            unread.register(pipe, 0)  # for errors alone, such as that nobody reads
            unread.poll()
        raise AssertionError


class Data(LightningDataModule):
    """Samples that are read in order by a worker, whose `collate_fn` no pickle reaches."""

    def __init__(self, samples: int = 24) -> None:
        super().__init__()
        self.rows = ROWS[:samples]

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 4, num_workers=1, collate_fn=lambda rows: torch.stack(rows))  # noqa: PLW0108


def verified(*arguments: object, capsys: pytest.CaptureFixture[str], code: int) -> str:
    """Return what the command printed in this process, or its errors; its ranks are others."""
    found = main(["verify", *map(str, arguments)])
    output, errors = capsys.readouterr()
    assert code == found, errors
    assert code != 2 or not output
    return errors if code == 2 else output


def test_the_command_verifies_a_module_by_name(capsys):
    """A rate follows the variables of a launcher, and Lightning's sampler deals the data."""
    options = (
        "--init",
        "loss=sum",
        "--strategy",
        "gradavg_sum",
        "--trainer",
        "max_epochs=1",
        "--precision",
        "32-true",
        "--json",
    )
    said = json.loads(verified(f"{HERE}:Scaled", "--data", f"{HERE}:Data", *options, capsys=capsys, code=1))
    assert ("different", False, 2, 1) == tuple(said[name] for name in ("verdict", "equal", "world_size", "steps"))
    assert ("32-true", 1e-4) == (said["precision"], said["tolerance"])
    assert ["optimizer options", "data order"] == [finding["cause"] for finding in said["findings"]]
    assert ["note", "equal", "differs"] == [
        said["stages"][n] for n in ("samples", "clipped gradient", "optimizer options")
    ]


def test_a_run_that_fails_shows_the_last_line_of_the_user(tmp_path, monkeypatch, capsys):
    """An error in the user's code ends the command with code 2, and shows where; no process lives on."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv("PIPE", str(pipe))
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # a writer would otherwise wait for a reader
    errors = verified(f"{HERE}:Failing", "--data", f"{HERE}:Data", capsys=capsys, code=2)
    shown = [line.strip() for line in errors[errors.index("gradavg verify") :].splitlines()]
    assert "failed: ArithmeticError: as planted" in shown[0]
    number = HERE.read_text("utf-8").splitlines().index('        raise ArithmeticError("as planted")') + 1
    assert [f"{HERE}, line {number}, in training_step", 'raise ArithmeticError("as planted")'] == shown[1:]
    os.set_blocking(end, True)
    assert b"" == os.read(end, 1), "the end of the pipe, which only comes when nobody can write to it any more"
    os.close(end)


def verify_waiting(folder: str, pipe: str) -> None:
    """Run the command in a process of its own, with its folders in one of the test's."""
    os.environ.update(TMPDIR=folder, PIPE=pipe)
    tempfile.tempdir = None  # it is asked for again
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where the tests run under nohup, the command would outlive it, too
    main(["verify", f"{HERE}:Waiting", "--data", f"{HERE}:Data"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_ranks_and_removes_their_folders(number, tmp_path, request):
    """A job's time is over, or the terminal is closed: what the command started ends with it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    folder = Path(tempfile.mkdtemp(prefix="gav"))  # the path of a socket is below 108 characters
    request.addfinalizer(partial(shutil.rmtree, folder))
    process = multiprocessing.get_context("forkserver").Process(target=verify_waiting, args=(str(folder), str(pipe)))
    process.start()
    with pipe.open("rb", buffering=0) as end:
        assert b"xx" == end.read(1) + end.read(1), "both ranks wait"
        assert list(folder.glob("gradavg-verify-*"))
        os.kill(process.pid, number)
        process.join()
        assert 128 + number == process.exitcode
        assert b"" == end.read(1), "the end of the pipe, which only comes when no rank can write to it any more"
    assert [] == list(folder.glob("gradavg-verify-*"))


def test_an_instance_is_verified():
    """`verify` takes instances, sends them to the processes, and returns the report."""
    report = verify(Toy(loss="sum"), DataLoader(ROWS[:16], 4), strategy="gradavg_sum", steps=2, max_epochs=1)
    assert ("equal", "GradAvgStrategy", "sum") == (report.verdict, report.strategy, report.reduction), report.remarks


def test_a_config_file_is_verified(tmp_path, monkeypatch, capsys):
    """A config of LightningCLI and options behind it are equal: code 0 and the verdict."""
    monkeypatch.chdir(HERE.parent)
    of_strategy = {"split_batches": True, "reduction": "sum"}
    strategy = {"class_path": "lightning_gradavg.GradAvgStrategy", "init_args": of_strategy}
    content = {
        "seed_everything": 5,
        "trainer": {"strategy": strategy, "max_epochs": 2, "default_root_dir": str(tmp_path), "devices": 7},
        "model": {"start": 2.0},
        "data": {"class_path": "test_verification.Data", "init_args": {"samples": 10}},
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    arguments = ["--config", config, "--model", "../toys.py:Toy", "--steps", "4", "--model.loss=sum"]
    assert verified(*arguments, capsys=capsys, code=0).startswith("EQUAL to one process with batch 4.\n")


def test_the_first_process_that_fails_is_named():
    """Tensors travel by file: as arguments of a process each would take a file descriptor, of which there are few."""
    tensors = [torch.full((2,), float(index)) for index in range(600)]
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed: ZeroDivisionError"):
        in_processes([partial(len, tensors), partial(divmod, 1, 0)])
    with pytest.raises(
        RuntimeError, match=r"rank 0 of 1 failed: exit code -9: see standard error, and call verify under"
    ):
        in_processes([partial(signal.raise_signal, signal.SIGKILL)])
