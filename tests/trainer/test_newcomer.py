"""The quick start of the README is true as printed, and so is what a release uploads, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from scripts import run_script

import lightning_gradavg

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


@dataclass(frozen=True)
class Step:
    """A command that the newcomer runs, and what that prints: the lines of a curve, or words.

    Attributes:
        program: What is in train.py.
        files: Other files, by name.
        code: The exit code.
    """

    command: str
    prints: list[str]
    program: str = FIXED
    files: dict[str, str] = field(default_factory=dict)
    code: int = 0

    def write(self, folder: Path) -> None:
        for name, text in {"train.py": self.program, **self.files}.items():
            (folder / name).write_text(text)

    def check(self, code: int | None, printed: str) -> None:
        assert self.code == code, f"{self.command}\n{printed}"
        if self.prints in CURVES:
            assert self.prints == re.findall(r"^ *(loss \d\.\d{4})$", printed, re.MULTILINE), self.command
        assert all(words in " ".join(printed.split()) for words in self.prints), f"{self.command}\n{printed}"


VERIFY = "gradavg verify train.py:Net"
STEPS = [
    Step("python train.py 1", CURVES[0], PROGRAM),
    Step("python train.py 2", CURVES[1], PROGRAM),
    Step(VERIFY, ["DIFFERENT, from step 0 on, in the reduced gradient", "mean of means"], PROGRAM, code=1),
    Step("python train.py 2", CURVES[0]),
    Step("python train.py 1", CURVES[0]),
    Step(f"{VERIFY} --strategy gradavg_single_device", ["EQUAL: every step matches one process."]),
    Step("torchrun --nproc-per-node=2 train.py 2", CURVES[0]),
]
"""The README's commands."""

CONFIG = block("yaml", "class_path")
TRAINER = CONFIG.split("  strategy:")[0]
OPTIONS = "--trainer.strategy=lightning_gradavg.GradAvgStrategy --trainer.strategy.equivalent_to=single_device"
TARGET = "_target_: lightning_gradavg.GradAvgStrategy"
INSTANCE = [
    "from lightning_gradavg import GradAvgStrategy",
    'Trainer(strategy=GradAvgStrategy(equivalent_to="single_device"))',
]
NAME = ["import lightning_gradavg", 'Trainer(strategy="gradavg_single_device")']
OWN_CLI = "from lightning.pytorch.cli import LightningCLI\nfrom train import Net\n\nLightningCLI(Net)\n"
HYDRA = """import hydra
from train import Net


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(config):
    hydra.utils.instantiate(config.trainer).fit(Net())


main()
"""
OF_HYDRA = f"""{TRAINER}  _target_: lightning.pytorch.Trainer
  strategy:
    {TARGET}
    equivalent_to: single_device
"""


def script(imported: str, trainer: str) -> str:
    """Return a program that trains with the strategy of a Trainer of docs/select.md."""
    more = trainer.removesuffix(")") + ', accelerator="cpu", devices=2, max_epochs=4)'
    return f"{imported}\nfrom lightning.pytorch import Trainer\nfrom train import Net\n\n{more}.fit(Net())\n"


WAYS = [
    Step("gradavg fit --config config.yaml --model train.py:Net", CURVES[0], files={"config.yaml": CONFIG}),
    Step("python cli.py fit --config config.yaml", CURVES[0], files={"config.yaml": CONFIG, "cli.py": OWN_CLI}),
    Step(f"python cli.py fit --config config.yaml {OPTIONS}", CURVES[0], files={"config.yaml": TRAINER}),
    Step("python instance.py", CURVES[0], files={"instance.py": script(*INSTANCE)}),
    Step("python name.py", CURVES[0], files={"name.py": script(*NAME)}),
    Step("python of_hydra.py", CURVES[0], files={"config.yaml": OF_HYDRA, "of_hydra.py": HYDRA}),
]
"""Each way to select the strategy, in one folder."""


def test_the_quick_start_is_short():
    """It is a whole program of less than 30 lines; its fix adds an import, and changes two places."""
    assert len(PROGRAM.splitlines()) < 30
    assert 4 == len(set(FIXED.splitlines()) - set(PROGRAM.splitlines()))
    assert [4, 4] == [len(curve) for curve in CURVES]


def test_the_pages_say_what_a_newcomer_writes():
    """Commands, and what this package adds to a program, are in the README or docs/select.md, word for word."""
    said = " ".join([README, *(ROOT / "docs/select.md").read_text("utf-8").split()])
    words = [*(step.command for step in [*STEPS, WAYS[0]]), OPTIONS, *INSTANCE, *NAME, TARGET]
    assert [] == [each for each in words if each not in said]


@pytest.mark.parametrize("step", STEPS[:4], ids=["one", "stock DDP", "verdict", "fixed"])
def test_the_quick_start(step, tmp_path):
    """In a process that has imported torch and Lightning, which is quicker than the command."""
    step.write(tmp_path)
    command = "from lightning_gradavg.cli import main\nif __name__ == '__main__':\n    raise SystemExit(main())\n"
    (tmp_path / "gradavg.py").write_text(command)
    program, *arguments = step.command.split()
    name, *arguments = arguments if program == "python" else ["gradavg.py", *arguments]
    step.check(*run_script(tmp_path / name, *arguments))


def run(*command: str | Path, folder: Path) -> tuple[int, str]:
    """Return the exit code of a command that knows nothing of this checkout, and what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout


def printed_by(*command: str | Path, folder: Path) -> str:
    """Return what a command printed that ends well."""
    code, printed = run(*command, folder=folder)
    assert 0 == code, printed
    return printed


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build both; return the programs of an environment with the wheel, and the sources less the package."""
    folder = tmp_path_factory.mktemp("release")
    # The wheel is made of the source distribution, which so is shown to have all that a wheel needs.
    printed_by(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", ROOT, folder=folder)
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    venv.create(folder / "venv", symlinks=True)
    programs = folder / "venv/bin"
    # What the package needs is taken from this environment, where the wheel's own place comes first.
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (site / "needs.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    pip = [sys.executable, "-m", "pip", "--python", programs / "python"]
    printed_by(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, folder=folder)
    printed_by(*pip, "check", folder=folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.glob("lightning_gradavg-*/")
    (source / "lightning_gradavg").rename(folder / "not_on_the_path")
    return programs, source


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_way_trains(installed, tmp_path):
    """From the installed wheel, the quick start is true, and every way to select the strategy prints its curve."""
    programs, _ = installed
    for step in [*STEPS, *WAYS]:
        step.write(tmp_path)
        program, *arguments = step.command.split()
        # torchrun is a program of torch's environment; its module is found in both.
        start = ["python", "-m", "torch.distributed.run"] if program == "torchrun" else [program]
        step.check(*run(programs / start[0], *start[1:], *arguments, folder=tmp_path))


# A rule, the contract, ranks with real collectives, the console command in processes of its own.
SELECTION = [
    "tests/test_rules.py",
    "tests/test_contract.py",
    "tests/test_ranks_weights.py",
    "tests/trainer/test_selection.py::test_console_command_knows_the_names",
]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel(installed):
    """The wheel brings its types and its command, and the tests of the source distribution pass with it."""
    programs, source = installed
    where = "import lightning_gradavg as g; print(g.__version__, g.__file__)"
    version, file = printed_by(programs / "python", "-c", where, folder=source).split()
    (site,) = (programs.parent / "lib").glob("python*/site-packages")
    assert (lightning_gradavg.__version__, str(site / "lightning_gradavg/__init__.py")) == (version, file)

    (metadata,) = Distribution.discover(name="lightning-gradavg", path=[str(site)])
    files = {str(path) for path in metadata.files or ()}
    assert "lightning_gradavg/py.typed" in files
    of_wheel = {"lightning_gradavg", f"lightning_gradavg-{version}.dist-info", ".."}
    assert of_wheel == {name.split("/")[0] for name in files}
    assert {"docs", "dev"} <= set(metadata.metadata.get_all("Provides-Extra") or ())
    page = metadata.metadata.get_payload()  # PyPI shows the README without the files that it links to
    assert "# lightning-gradavg" in page
    assert [] == re.findall(r"\]\((?!\w+:)[^)]*\)", page)

    by_module = printed_by(programs / "python", "-m", "lightning_gradavg", "--help", folder=source)
    assert by_module == printed_by(programs / "gradavg", "--help", folder=source)
    pytest_of_both = [programs / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    assert "passed" in printed_by(*pytest_of_both, *SELECTION, folder=source)
