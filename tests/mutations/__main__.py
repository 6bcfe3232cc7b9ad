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
    area: str
    breaks: str
    file: str
    old: str
    new: str
    tests: list[str]

    def planted(self, root: Path) -> str:
        text = (root / self.file).read_text()
        if (found := text.count(self.old)) != 1:
            raise SystemExit(f"{self.breaks!r}: {self.old!r} occurs {found} times in {self.file}, not once")
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
        failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", ran.stdout, re.MULTILINE)
        if ran.returncode and not failed:
            raise SystemExit(f"pytest {self.tests} ended without a failed test:\n{ran.stdout}{ran.stderr}")
        return failed[1] if failed else ""


def write(path: Path, text: str) -> None:
    """Write a file so that Python compiles it anew: its size, or the second of its change, must be another."""
    changed = int(path.stat().st_mtime) + 1
    path.write_text(text)
    os.utime(path, (changed, changed))


def mutations(areas: list[str]) -> Iterator[Mutation]:
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
            if chosen.only in mutation.breaks:
                started = time.perf_counter()
                failed = mutation.first_failure(folder)
                survived += not failed
                seconds = f"{time.perf_counter() - started:4.0f} s"
                print(f"{mutation.area}: {mutation.breaks}\n  {seconds}  {failed or 'SURVIVED'}", flush=True)  # noqa: T201  # the command's output
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
