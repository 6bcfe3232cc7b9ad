"""The lines of the user's code: where a hook begins, and where weights, buffers and gradients are written."""

from __future__ import annotations

import functools
import inspect
import linecache
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import jsonargparse
import lightning
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_gradavg._lightning.internals import TorchDispatchMode, writes_in_place
from lightning_gradavg._support.tree import leaves
from lightning_gradavg.verify.shards import is_shard

__all__ = ["GRADIENT_OF", "CodeLine", "Writes", "is_library", "line_of_function", "running_line"]

GRADIENT_OF = "gradient of "
"""How the names of gradients begin in `Writes`."""

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


class CodeLine(NamedTuple):
    """A line of the user's code."""

    file: str
    number: int

    def __str__(self) -> str:
        """Return the line as in "train.py:31: x.mul_(2)", by a path from the working directory if it is below that."""
        file = Path(self.file)
        if file.is_relative_to(Path.cwd()):
            file = file.relative_to(Path.cwd())
        return f"{file}:{self.number}: {linecache.getline(self.file, self.number).strip()}"


def line_of_function(function: object) -> CodeLine | None:
    """Return where a function of the user's begins; None for any other object."""
    function = inspect.unwrap(function)  # type: ignore[arg-type]  # it takes any object
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)  # of a function, and of a method
    if not isinstance(code, CodeType) or is_library(code.co_filename):
        return None
    return CodeLine(code.co_filename, code.co_firstlineno)


def _running_frames() -> Iterator[FrameType]:
    """Yield what runs, the innermost first.

    It ends at `Trainer.fit`: what started the run is other code on a rank than on one process.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not Trainer.fit.__code__:
        yield frame
        frame = frame.f_back


def running_line() -> CodeLine | None:
    """Return the innermost line of the user's code that runs; None if no line leads here."""
    for frame in _running_frames():
        if not is_library(frame.f_code.co_filename):
            return CodeLine(frame.f_code.co_filename, frame.f_lineno)
    return None


def _is_optimizing() -> bool:
    """Return whether an optimizer runs, and no code of the user's that it calls, such as the closure of a step."""
    for frame in _running_frames():
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        if names and isinstance(frame.f_locals.get(names[0]), Optimizer):
            return True
        if not is_library(frame.f_code.co_filename):
            return False
    return False


def _address(tensor: Any) -> int:
    """Return what tensors share of which one is a view of the other; of a DTensor, that of this rank's shard."""
    if is_shard(tensor):
        tensor = tensor.to_local()
    if tensor.layout != torch.strided:
        return 0
    return int(tensor.untyped_storage().data_ptr())


class Writes(TorchDispatchMode):
    """Notes the line that last wrote a weight, a buffer or a gradient in place, but for optimizers.

    The recorder enters it for the whole training, because hooks of the user write at any time.

    Attributes:
        names: The names of what is watched, by the addresses of the storages.
        places: Where each was written, by its name. The recorder empties it when a step ends.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.names: dict[int, str] = {}
        self.places: dict[str, CodeLine] = {}

    def watch(self, name: str, tensor: Tensor) -> None:
        """Note who writes to a tensor."""
        address = _address(tensor)
        if address != 0:
            self.names[address] = name

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note what it writes."""
        is_collective = func.namespace == "c10d"
        if args and (writes_in_place(func) or is_collective):
            self._note(args[0], is_collective=is_collective)
        return func(*args, **(kwargs or {}))

    def _note(self, written: object, *, is_collective: bool) -> None:
        # Collectives and `_foreach` operators write to lists of tensors.
        for _, tensor in leaves(written):
            if not isinstance(tensor, Tensor):
                continue
            name = self.names.get(_address(tensor))
            if name is None or _is_optimizing():
                continue
            if is_collective and name.startswith(GRADIENT_OF):
                continue  # DDP reduces its buckets, of which gradients may be views
            line = running_line()
            if line is not None:
                self.places[name] = line
