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

__all__ = ["drawn_in", "is_library"]

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


def drawn_in() -> str:
    """Return the innermost line of the user's code that runs; "" if no line leads here.

    It is as in "; drawn in train.py:31: x.mul_(2)", by a path from the working directory if it is below that.
    """
    frame = inspect.currentframe()
    # What started the run is other code on a rank than on one process.
    while frame is not None and frame.f_code is not Trainer.fit.__code__:
        path = frame.f_code.co_filename
        if not is_library(path):
            file = Path(path)
            if file.is_relative_to(Path.cwd()):
                file = file.relative_to(Path.cwd())
            return f"; drawn in {file}:{frame.f_lineno}: {linecache.getline(path, frame.f_lineno).strip()}"
        frame = frame.f_back
    return ""
