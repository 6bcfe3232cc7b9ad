"""The lines of the user's code: where a hook begins, where a random number is drawn, and where a run failed."""

from __future__ import annotations

import functools
import inspect
import linecache
import sysconfig
from pathlib import Path
from typing import Any

import jsonargparse
import lightning
import torch
from lightning.pytorch import Trainer

__all__ = ["function_in_words", "is_library", "is_of_user", "running_line"]

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


def _innermost(function: object) -> Any:
    """Return the function that decorators and `functools.partial` call."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)  # type: ignore[arg-type]  # it takes any object


def is_of_user(function: object) -> bool:
    """Return whether a function is written in the user's code."""
    code = getattr(_innermost(function), "__code__", None)
    return code is not None and not is_library(code.co_filename)


def function_in_words(function: object) -> str:
    """Return the name of a function, and the line on which it begins if it is the user's."""
    innermost = _innermost(function)
    name = getattr(innermost, "__qualname__", type(innermost).__name__)
    if not is_of_user(innermost):
        return f"`{name}`"
    return f"`{name}` ({_line(innermost.__code__.co_filename, innermost.__code__.co_firstlineno)})"


def running_line() -> str:
    """Return the innermost line of the user's code that runs; "" if no line leads here."""
    frame = inspect.currentframe()
    # What started the run is other code on a rank than on one process.
    while frame is not None and frame.f_code is not Trainer.fit.__code__:
        if not is_library(frame.f_code.co_filename):
            return _line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""
