"""What a release uploads: its version and metadata, and the tests in a source distribution, run against the wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
from importlib.metadata import Distribution
from pathlib import Path

import pytest
import yaml

import lightning_gradavg

ROOT = Path(__file__).resolve().parent.parent
# A rule, the contract, ranks with real collectives, the console command in processes of its own.
SELECTION = [
    "tests/test_rules.py",
    "tests/test_contract.py",
    "tests/test_ranks_weights.py",
    "tests/trainer/test_selection.py::test_console_command_knows_the_names",
]


def run(*command: str | Path, cwd: Path) -> str:
    """Return what a command printed that knows nothing of this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_one_version():
    """The citation, the newest released heading of the changelog and the package name one version and one day."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    headings = re.findall(r"^## \[(\d\S*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert lightning_gradavg.__version__ == str(citation["version"])
    assert headings[0] == (str(citation["version"]), str(citation["date-released"]))
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text("utf-8").splitlines()


def test_all_that_ships_is_there():
    """Every file and folder of the source distribution's list exists."""
    _, include = (ROOT / "pyproject.toml").read_text("utf-8").split("\ninclude = [")
    names = re.findall(r'"/([^"]+)"', include.split("\n]")[0])
    assert "CITATION.cff" in names
    assert [] == [name for name in names if not (ROOT / name).exists()]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build both; return the Python of an environment with the wheel, and the source distribution less its package."""
    folder = tmp_path_factory.mktemp("packaging")
    # The wheel is made of the source distribution, which so is shown to have all that a wheel needs.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", ROOT, cwd=folder)
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv/bin/python"
    # What the package needs is taken from this environment, where the wheel's own place comes first.
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (site / "needs.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, wheel, cwd=folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.glob("lightning_gradavg-*/")
    (source / "lightning_gradavg").rename(folder / "not_on_the_path")
    return python, source


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel(installed):
    """The wheel brings its types and its command, and the tests of the source distribution pass with it."""
    python, source = installed
    where = "import lightning_gradavg as g; print(g.__version__, g.__file__)"
    version, file = run(python, "-c", where, cwd=source).split()
    (site,) = (python.parents[1] / "lib").glob("python*/site-packages")
    assert (lightning_gradavg.__version__, str(site / "lightning_gradavg/__init__.py")) == (version, file)

    (metadata,) = Distribution.discover(name="lightning-gradavg", path=[str(site)])
    assert version == metadata.version
    files = {str(path) for path in metadata.files or ()}
    assert "lightning_gradavg/py.typed" in files
    assert {"lightning_gradavg", f"lightning_gradavg-{version}.dist-info", ".."} == {
        name.split("/")[0] for name in files
    }
    assert {"gradavg": "lightning_gradavg.cli:main"} == {entry.name: entry.value for entry in metadata.entry_points}
    assert {"docs", "dev"} <= set(metadata.metadata.get_all("Provides-Extra") or ())
    page = metadata.metadata.get_payload()  # PyPI shows the README without the files that it links to
    assert "# lightning-gradavg" in page
    assert [] == re.findall(r"\]\((?!\w+:)[^)]*\)", page)

    by_module = run(python, "-m", "lightning_gradavg", "--help", cwd=source)
    assert by_module == run(python.parent / "gradavg", "--help", cwd=source)
    assert "verify" in by_module
    assert "passed" in run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SELECTION, cwd=source)
