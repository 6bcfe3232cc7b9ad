"""The quick start of the README is true as printed, also with the wheel in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def block(language: str, words: str) -> str:
    """Return the block of the README that has some words."""
    [found] = [
        text for text in re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL) if words in text
    ]
    return str(found)


def patched(text: str, diff: str) -> str:
    """Return a text with a diff applied; every line of the diff that is not new must be there, in order."""
    lines, at = text.splitlines(), 0
    for line in diff.splitlines():
        if line.startswith("+"):
            lines.insert(at, line[1:])
            at += 1
        elif not line.startswith("@@"):
            at = lines.index(line[1:], at)
            if line.startswith("-"):
                del lines[at]
            else:
                at += 1
    return "\n".join(lines) + "\n"


PROGRAM = block("python", "class Net")
FIXED = patched(PROGRAM, block("diff", "GradAvgStrategy"))
CURVES = [run.splitlines()[1:] for run in block("console", "$ python train.py").split("$ ")[1:]]
"""The lines that the program prints on one process, and on two."""

OWN_CLI = "from lightning.pytorch.cli import LightningCLI\nfrom train import Net\n\nLightningCLI(Net)\n"
CONFIG = block("yaml", "class_path")
TRAINER = CONFIG.split("  strategy:")[0]
HYDRA = """import hydra
from train import Net


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(config):
    hydra.utils.instantiate(config.trainer).fit(Net())


main()
"""


@dataclass(frozen=True)
class Step:
    """A command that the newcomer runs.

    Attributes:
        command: What is run, by the programs of the environment.
        prints: Lines of its output that begin with "loss", or words that it has to print.
        said: What the README or docs/select.md says to write, word for word.
        files: What is written first, by name.
        code: The exit code.
    """

    command: str
    prints: list[str]
    said: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    code: int = 0


STOCK, RIGHT = {"train.py": PROGRAM}, {"train.py": FIXED}
_VERIFY = "gradavg verify train.py:Net"
STEPS = [
    Step("python train.py 1", CURVES[0], files=STOCK),
    Step("python train.py 2", CURVES[1], files=STOCK),
    Step(_VERIFY, ["DIFFERENT, from step 0 on, in the reduced gradient", "mean of means"], files=STOCK, code=1),
    Step("python train.py 1", CURVES[0], files=RIGHT),
    Step("python train.py 2", CURVES[0], files=RIGHT),
    Step(f"{_VERIFY} --strategy gradavg_single_device", ["EQUAL: every step matches one process."], files=RIGHT),
]
"""The quick start."""


def _script(strategy: str, imported: str) -> dict[str, str]:
    trainer = strategy.removesuffix(")") + ', accelerator="cpu", devices=2, max_epochs=4).fit(Net())'
    return {"way.py": f"{imported}\nfrom lightning.pytorch import Trainer\nfrom train import Net\n\n{trainer}\n"}


_INSTANCE = (
    'Trainer(strategy=GradAvgStrategy(equivalent_to="single_device"))',
    "from lightning_gradavg import GradAvgStrategy",
)
_NAME = ('Trainer(strategy="gradavg_single_device")', "import lightning_gradavg")
_OPTIONS = "--trainer.strategy=lightning_gradavg.GradAvgStrategy --trainer.strategy.equivalent_to=single_device"
_TARGET = "_target_: lightning_gradavg.GradAvgStrategy"
_HYDRA = (
    f"{TRAINER}  _target_: lightning.pytorch.Trainer\n  strategy:\n    {_TARGET}\n    equivalent_to: single_device\n"
)
_CLI = {"cli.py": OWN_CLI}

WAYS = [
    Step(command, CURVES[0], said, RIGHT | files)
    for command, said, files in (
        ("torchrun --nproc-per-node=2 train.py 2", (), {}),
        ("gradavg fit --config config.yaml --model train.py:Net", (), {"config.yaml": CONFIG}),
        ("python cli.py fit --config config.yaml", (CONFIG,), _CLI | {"config.yaml": CONFIG}),
        (f"python cli.py fit --config config.yaml {_OPTIONS}", (_OPTIONS,), _CLI | {"config.yaml": TRAINER}),
        ("python way.py", _INSTANCE, _script(*_INSTANCE)),
        ("python way.py", _NAME, _script(*_NAME)),
        ("python way.py", (_TARGET,), {"way.py": HYDRA, "config.yaml": _HYDRA}),
    )
]
"""Each way to select the strategy; all print the curve of one process."""


def run(*command: Any, folder: Path, path: str | None = None, code: int = 0) -> str:
    """Return what a command printed that was started in a folder, with the programs of `path` before others."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environ = {**kept, "OMP_NUM_THREADS": "1", "PATH": os.pathsep.join(filter(None, (path, kept.get("PATH"))))}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


def install(folder: Path) -> Path:
    """Build the wheel, install it in an environment in the folder, and return the folder of its programs."""
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder / "dist", ROOT, folder=folder)
    [wheel] = (folder / "dist").glob("*.whl")
    environment = folder / ".venv"
    venv.create(environment, with_pip=True)
    of_it = {"base": str(environment), "platbase": str(environment)}
    # Torch and Lightning need not be installed a second time; packages of the environment itself come first.
    Path(sysconfig.get_path("purelib", vars=of_it), "reused.pth").write_text(sysconfig.get_path("purelib"))
    programs = Path(sysconfig.get_path("scripts", vars=of_it))
    run(programs / "python", "-m", "pip", "install", wheel, folder=folder)
    run(programs / "python", "-m", "pip", "check", folder=folder)
    return programs


def write(step: Step, folder: Path) -> None:
    """Write the files of a step."""
    for name, text in step.files.items():
        (folder / name).write_text(text)


def check(step: Step, printed: str) -> None:
    """Compare what a step printed with what the README says."""
    if step.prints in CURVES:
        assert step.prints == re.findall(r"^ *(loss \d\.\d{4})$", printed, re.MULTILINE), f"{step.command}\n{printed}"
    assert all(words in " ".join(printed.split()) for words in step.prints), f"{step.command}\n{printed}"


def test_the_quick_start_is_short():
    """It is a whole program of less than 30 lines; its fix adds an import, and changes two places."""
    assert len(PROGRAM.splitlines()) < 30
    assert 4 == len(set(FIXED.splitlines()) - set(PROGRAM.splitlines()))
    assert [4, 4] == [len(curve) for curve in CURVES]
    assert CURVES[0] != CURVES[1]


def test_the_pages_say_what_a_newcomer_writes():
    """Every command, and what the walk writes of this package, is in the README or docs/select.md, word for word."""
    said = " ".join((ROOT / page).read_text("utf-8") for page in ("README.md", "docs/select.md"))
    words = [*(step.command for step in [*STEPS, *WAYS[:1]]), *(part for step in WAYS for part in step.said)]
    assert [] == [each for each in words if " ".join(each.split()) not in re.sub(r"\s+", " ", said)]


@pytest.mark.parametrize("step", [*STEPS[:3], STEPS[4]], ids=["one", "stock DDP", "verdict", "fixed"])
def test_the_quick_start(step, tmp_path):
    """In a process that has imported torch and Lightning, which is quicker than the command."""
    write(step, tmp_path)
    command = "from lightning_gradavg.cli import main\nif __name__ == '__main__':\n    raise SystemExit(main())\n"
    (tmp_path / "gradavg.py").write_text(command)
    program, *arguments = step.command.split()
    script, *arguments = arguments if program == "python" else ["gradavg.py", *arguments]
    code, printed = run_script(tmp_path / script, *arguments)
    assert step.code == code, printed
    check(step, printed)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_way_trains(tmp_path):
    """From the installed wheel, the quick start is true, and every way to select the strategy prints its curve."""
    programs = install(tmp_path)
    for step in [*STEPS, *WAYS]:
        write(step, tmp_path)
        program, *arguments = step.command.split()
        # torchrun is of torch's environment; its module is found in both.
        start = [programs / "python", "-m", "torch.distributed.run"] if program == "torchrun" else [programs / program]
        check(step, run(*start, *arguments, folder=tmp_path, path=str(programs), code=step.code))
