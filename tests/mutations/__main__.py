"""Plant defects in the package, one at a time, and see whether the tests catch them.

    python -m tests.mutations [AREA ...] [--only WORD]

A defect is a row of `tests/mutations/AREA.yaml`: the one occurrence of `old` in `file` becomes `new`. The row says what
that breaks, and which tests (arguments of pytest) should fail. Defects are planted in a copy of the checkout, which
keeps its compiled files. The table printed last says what failed first, and after how many seconds. The exit code is 1
if a defect survives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIMEOUT_S = 900


@dataclass(frozen=True)
class Mutation:
    """A planted defect: a row of a table."""

    area: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, root: Path) -> str:
        """Return the text of the file under `root` with the defect in it."""
        text = (root / self.file).read_text()
        if (found := text.count(self.old)) != 1:
            raise SystemExit(
                f"{self.area}: {self.breaks!r}: {self.old!r} occurs {found} times in {self.file}, not once"
            )
        return text.replace(self.old, self.new)


def mutations(areas: list[str]) -> Iterator[Mutation]:
    """Yield the rows of the tables of these areas, or of all."""
    for table in sorted(HERE.glob("*.yaml")):
        if not areas or table.stem in areas:
            for row in yaml.safe_load(table.read_text()):
                yield Mutation(table.stem, row["breaks"], row["file"], row["old"], row["new"], tuple(row["tests"]))


def copy_of_checkout(folder: Path) -> None:
    """Copy what git knows of, as it is in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


@contextmanager
def planted(mutation: Mutation, folder: Path) -> Iterator[None]:
    """Have the copy hold the defect within the context."""
    path = folder / mutation.file
    sound = path.read_text()
    _write(path, mutation.planted(folder))
    try:
        yield
    finally:
        _write(path, sound)


def _write(path: Path, text: str) -> None:
    # Python compiles a file anew where its size or the second of its change is another.
    changed = int(path.stat().st_mtime) + 1
    path.write_text(text)
    os.utime(path, (changed, changed))


def first_failure(folder: Path, tests: tuple[str, ...]) -> str:
    """Run the tests in the copy until one fails; return its name, or nothing if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    try:
        ran = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"nothing within {TIMEOUT_S} s"
    if ran.returncode == 0:
        return ""
    named = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if not named:
        raise SystemExit(
            f"{' '.join(command)} ended with {ran.returncode} and no failed test:\n{ran.stdout}{ran.stderr}"
        )
    return named[0].split(" - ")[0].partition(" ")[2]


def main() -> int:
    """Plant all, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.partition("\n")[0])
    parser.add_argument("areas", nargs="*", metavar="AREA", help="tables to plant; all by default")
    parser.add_argument("--only", default="", metavar="WORD", help="only rows whose `breaks` contains this")
    chosen = parser.parse_args()
    table = Table("area", "breaks", "first failure", "seconds")
    survived = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_of_checkout(folder)
        for mutation in mutations(chosen.areas):
            if chosen.only not in mutation.breaks:
                continue
            started = time.perf_counter()
            with planted(mutation, folder):
                failed = first_failure(folder, mutation.tests)
            survived += not failed
            seconds = f"{time.perf_counter() - started:.0f}"
            table.add_row(mutation.area, mutation.breaks, failed or "SURVIVED", seconds)
            Console(stderr=True).print(mutation.breaks, "->", failed or "SURVIVED", f"({seconds} s)")
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
