"""The quick start of the README is true as printed, and so is what a release uploads, in an empty folder."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import venv
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist
from ranks import run_script

from lightning_gradavg.cli import main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def block(language: str, words: str) -> str:
    """Return the block of the README that has some words."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    [text] = [str(text) for text in found if words in text]
    return text


def patched(text: str, diff: str) -> str:
    """Return a text with a diff applied, of which lines that begin with @@ separate the places."""
    for place in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        old, new = ("".join(re.findall(rf"^[ {sign}](.*\n)", place, re.MULTILINE)) for sign in "-+")
        assert 1 == text.count(old), f"not once in the program:\n{old}"
        text = text.replace(old, new)
    return text


PROGRAM = block("python", "class Net")
FIXED = patched(PROGRAM, block("diff", "GradAvgStrategy"))
CURVES = [run.splitlines()[1:] for run in block("console", "$ python train.py").split("$ ")[1:]]
"""The lines that the program prints on one process, and on two."""


class Step(NamedTuple):
    """A command of the README, and what that prints: the lines of a curve, or words."""

    command: str
    prints: list[str]
    program: str = FIXED
    code: int = 0

    def write(self, folder: Path) -> None:
        (folder / "train.py").write_text(self.program)
        (folder / "config.yaml").write_text(CONFIG)
        (folder / "cli.py").write_text(SCRIPT)

    def check(self, printed: str) -> None:
        if self.prints in CURVES:
            assert self.prints == re.findall(r"^ *(loss \d\.\d{4})$", printed, re.MULTILINE), self.command
        assert all(words in " ".join(printed.split()) for words in self.prints), f"{self.command}\n{printed}"


CONFIG = block("yaml", "class_path")
SCRIPT = block("python", "LightningCLI(Net)")
ONE, STOCK, VERDICT, FIX, *MORE = [
    Step("python train.py 1", CURVES[0], PROGRAM),
    Step("python train.py 2", CURVES[1], PROGRAM),
    Step(
        "gradavg verify train.py:Net",
        [
            "DIFFERENT from one process with batch 16. Your loader's batch is 8, so",
            "in the reduced gradient of `table`",
            "mean of means",
        ],
        PROGRAM,
        1,
    ),
    Step("python train.py 2", CURVES[0]),
    Step("python train.py 1", CURVES[0]),
    Step("gradavg verify train.py:Net --strategy gradavg_single_device", ["EQUAL to one process with batch 8."]),
    Step("torchrun --nproc-per-node=2 train.py 2", CURVES[0]),
    Step("python cli.py fit --config config.yaml", CURVES[0]),
]
assert all(step.command in README for step in [ONE, STOCK, VERDICT, FIX, *MORE])


def play(folder: str) -> str:
    os.chdir(folder)
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    with (
        redirect_stdout(StringIO()) as printed,
        mock.patch.object(sys, "argv", ["train.py", str(dist.get_world_size())]),
    ):
        runpy.run_path("train.py", run_name="__main__")
    return printed.getvalue()


@pytest.mark.filterwarnings("ignore")  # of Lightning, about so short a program
@pytest.mark.parametrize(("step", "ranks"), [(ONE, 1), (STOCK, 2)])
def test_the_quick_start_on_ranks_that_run(world, tmp_path, step, ranks):
    step.write(tmp_path)
    step.check(world(ranks).run(play, str(tmp_path))[0])


def test_the_quick_start_is_fixed(tmp_path):
    """Lightning starts the second process."""
    FIX.write(tmp_path)
    code, printed = run_script(tmp_path / "train.py", "2")
    assert 0 == code, printed
    FIX.check(printed)


def test_the_quick_start_is_judged(tmp_path, monkeypatch, capfd):
    """It starts processes, too."""
    VERDICT.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert VERDICT.code == main(VERDICT.command.split()[1:])
    VERDICT.check(capfd.readouterr().out)


def printed_by(*command: str | Path, folder: Path, code: int = 0) -> str:
    """Return what a command printed that knows nothing of this checkout, after asserting its exit code."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["OMP_NUM_THREADS"] = "1"
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=folder, env=environment, timeout=300, check=False, **pipes)
    assert code == done.returncode, done.stdout
    return str(done.stdout)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quick_start_of_the_wheel(tmp_path):
    """Every command of the README works with the wheel; `.github/workflows` run all tests with it."""
    # The wheel is made of the source distribution, which so is shown to have all that a wheel needs.
    printed_by(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", ROOT, folder=tmp_path)
    (wheel,), programs = (tmp_path / "dist").glob("*.whl"), tmp_path / "venv/bin"
    venv.create(tmp_path / "venv", symlinks=True)
    # What the package needs is taken from this environment, where the wheel's own place comes first.
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (site / "needs.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    pip = [sys.executable, "-m", "pip", "--python", programs / "python"]
    printed_by(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, folder=tmp_path)
    assert (site / "lightning_gradavg/py.typed").exists()
    for step in [ONE, STOCK, VERDICT, FIX, *MORE]:
        step.write(tmp_path)
        program, *arguments = step.command.split()
        # torchrun is a program of torch's environment; its module is found in both.
        start = ["python", "-m", "torch.distributed.run"] if program == "torchrun" else [program]
        step.check(printed_by(programs / start[0], *start[1:], *arguments, folder=tmp_path, code=step.code))
