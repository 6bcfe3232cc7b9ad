"""The lines of the user's code: where a random number is drawn, and where a run failed."""

from __future__ import annotations

import functools
import inspect
import linecache
import sysconfig
from pathlib import Path

import jsonargparse
import lightning
import torch
from lightning.pytorch import Trainer

__all__ = ["is_library", "running_line"]

_LIBRARIES = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    str(Path(__file__).parents[1]),
    # After `pip install --target`, or in a checkout, these packages are in none of the folders above.
    str(Path(torch.__file__).parent),
    str(Path(lightning.__file__).parent),
    str(Path(jsonargparse.__file__).parent),
    "<",  # no file, such as <frozen importlib._bootstrap>
)
"""How the paths of files begin that are not the user's."""


@functools.lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Return whether a file is none of the user's."""
    return file.startswith(_LIBRARIES)


def _line(path: str, number: int) -> str:
    """Return a line as in "train.py:31: x.mul_(2)", by a path from the working directory if it is below that."""
    file = Path(path)
    if file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    return f"{file}:{number}: {linecache.getline(path, number).strip()}"


def running_line() -> str:
    """Return the innermost line of the user's code that runs; "" if no line leads here."""
    frame = inspect.currentframe()
    # What started the run is other code on a rank than on one process.
    while frame is not None and frame.f_code is not Trainer.fit.__code__:
        if not is_library(frame.f_code.co_filename):
            return _line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""
