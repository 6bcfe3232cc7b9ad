"""A script run as if Python had been started with it, in a process that has imported what is heavy."""

from __future__ import annotations

import os
import runpy
import sys
from multiprocessing import get_context
from pathlib import Path

from ranks import ensure_forkserver

ROOT = Path(__file__).resolve().parent.parent


def run_script(script: Path, *arguments: str) -> tuple[int | None, str]:
    """Run a script to its end in its folder; return its exit code and what it printed."""
    ensure_forkserver()
    output = script.with_suffix(".out")
    process = get_context("forkserver").Process(target=_run_as_main, args=(script, arguments, output))
    process.start()
    process.join(110)
    process.kill()
    process.join()
    return process.exitcode, output.read_text("utf-8")


def _run_as_main(script: Path, arguments: tuple[str, ...], output: Path) -> None:
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(script.parent)
    os.environ.update({"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    sys.argv[:], sys.path[0] = [str(script), *arguments], str(script.parent)
    runpy.run_path(str(script), run_name="__main__")
