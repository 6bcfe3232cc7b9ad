"""Plant defects in the package, one at a time, and see whether the tests catch them.

    python -m tests.mutations [AREA ...] [--only WORD]

A defect is a row of `tests/mutations/AREA.yaml`: the one occurrence of `old` in `file` becomes `new`. The row says what
that breaks, and which tests (arguments of pytest) should fail. Defects are planted in a copy of the checkout. For each
the command prints what failed first, and after how many seconds. The exit code is 1 if a defect survives.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIMEOUT_S = 900


@dataclass(frozen=True)
class Mutation:
    """A planted defect: a row of a table."""

    # The name of the table.
    area: str
    # What the defect breaks.
    breaks: str
    # The file, and what replaces what in it.
    file: str
    old: str
    new: str
    # The tests that should fail, as arguments of pytest.
    tests: list[str]

    def planted(self, root: Path) -> str:
        """Return the text of the file with the defect."""
        text = (root / self.file).read_text()
        occurrences = text.count(self.old)
        if occurrences != 1:
            raise SystemExit(f"{self.breaks!r}: {self.old!r} occurs {occurrences} times in {self.file}, not once")
        return text.replace(self.old, self.new)

    def first_failure(self, folder: Path) -> str:
        """Run the tests with the defect in a copy of the checkout; return what failed, or nothing if all pass."""
        path = folder / self.file
        sound = path.read_text()
        write(path, self.planted(folder))
        try:
            ran = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *self.tests],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(folder)},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"nothing within {TIMEOUT_S} s"
        finally:
            write(path, sound)
        if ran.returncode == 0:
            return ""
        failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", ran.stdout, re.MULTILINE)
        if failed is None:
            raise SystemExit(f"pytest {self.tests} ended without a failed test:\n{ran.stdout}{ran.stderr}")
        return failed[1]


def write(path: Path, text: str) -> None:
    """Write a file so that Python compiles it anew: its size, or the second of its change, must be another."""
    changed = int(path.stat().st_mtime) + 1
    path.write_text(text)
    os.utime(path, (changed, changed))


def mutations(areas: list[str]) -> Iterator[Mutation]:
    """Yield the rows of these tables, or of all if none is named."""
    for table in sorted(HERE.glob("*.yaml")):
        if not areas or table.stem in areas:
            yield from (Mutation(table.stem, **row) for row in yaml.safe_load(table.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.partition("\n")[0])
    parser.add_argument("areas", nargs="*", metavar="AREA", help="tables to plant; all by default")
    parser.add_argument("--only", default="", metavar="WORD", help="only rows whose `breaks` contains this")
    chosen = parser.parse_args()
    survived = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkout"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", "demo_output", ".*_cache"))
        for mutation in mutations(chosen.areas):
            if chosen.only not in mutation.breaks:
                continue
            started = time.perf_counter()
            result = mutation.first_failure(folder)
            if not result:
                survived += 1
                result = "SURVIVED"
            seconds = time.perf_counter() - started
            print(f"{mutation.area}: {mutation.breaks}\n  {seconds:4.0f} s  {result}", flush=True)  # noqa: T201  # the command's output
    return min(survived, 1)


if __name__ == "__main__":
    sys.exit(main())
