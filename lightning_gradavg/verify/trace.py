"""What a training step computes, call by call, so that a report can name a module and a line.

Two modes look on, and change nothing:

| mode | sees | notes |
|---|---|---|
| `Trace` | the functions of torch that `training_step` calls, also in layers | what they return, and its gradient |
| `Writes` | the operators that write in place, but for optimizers | the last line that wrote a weight or a buffer |

No tensor is kept: nine numbers stand for each (`Numbers`). A rank notes every step. One process, which trains again to
explain a difference, holds what it computes against what the ranks noted (`Followed`):

| what a call returned on one process | compared with that of a rank |
|---|---|
| has rows for the samples, along dimension 0 or 1 | the rows of the rank's samples, without further padding |
| has none, and the shape of the rank's, such as a loss | as it is |
| any other | not at all |

`places.py` chooses the call that a report names.
"""

from __future__ import annotations

import functools
import inspect
import sysconfig
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeAlias

import jsonargparse
import lightning
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_gradavg._lightning.internals import TorchDispatchMode, version_of, writes_in_place
from lightning_gradavg._support.tree import leaves
from lightning_gradavg.verify.rows import (
    Layout,
    Layouts,
    Numbers,
    Samples,
    are_near,
    as_it_is,
    layouts_of,
    numbers_of,
    rounding_of,
    rows_from,
)

__all__ = [
    "Call",
    "CodeLine",
    "Followed",
    "Match",
    "Piece",
    "Place",
    "Trace",
    "Writes",
    "is_library",
    "line_of_function",
]

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

_MOST_CALLS = 20_000
"""Of a micro-batch that are noted, which takes some 20 MB. Later calls are not compared."""


@functools.lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Return whether a file is none of the user's."""
    return file.startswith(_LIBRARIES)


class CodeLine(NamedTuple):
    """A line of the user's code."""

    file: str
    number: int


class Place(NamedTuple):
    """Where something runs."""

    module: str  # the path of the innermost layer; "" for the LightningModule itself, and for an unregistered layer
    layer: str  # the class of that layer, or of the LightningModule
    line: CodeLine | None  # None if no line of the user's leads there


def line_of_function(function: object) -> CodeLine | None:
    """Return where a function of the user's begins; None for any other object."""
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


def _first_argument(frame: FrameType) -> object:
    """Return the first argument of a function that runs, such as `self`; None if it has none."""
    if frame.f_code.co_argcount == 0:
        return None
    return frame.f_locals.get(frame.f_code.co_varnames[0])


def _place_of_running_code(module: nn.Module | None, names: Mapping[int, str]) -> Place:
    """Return the innermost layer whose `forward` runs, and the innermost line of the user's code.

    Args:
        module: The LightningModule, which runs if no layer does.
        names: The paths of its layers by their ids.
    """
    layer: nn.Module | None = None
    line: CodeLine | None = None
    for frame in _running_frames():
        if line is None and not is_library(frame.f_code.co_filename):
            line = CodeLine(frame.f_code.co_filename, frame.f_lineno)
        if layer is None and frame.f_code.co_name == "forward":
            first_argument = _first_argument(frame)
            if isinstance(first_argument, DistributedDataParallel):
                layer = module  # it calls `training_step` from its own `forward`
            elif isinstance(first_argument, nn.Module):
                layer = first_argument
        if line is not None and layer is not None:
            break
    if layer is None:
        layer = module
    return Place(names.get(id(layer), ""), type(layer).__name__, line)


def _is_optimizing() -> bool:
    """Return whether an optimizer runs, and no code of the user's that it calls, such as the closure of a step."""
    for frame in _running_frames():
        if isinstance(_first_argument(frame), Optimizer):
            return True
        if not is_library(frame.f_code.co_filename):
            return False
    return False


@dataclass(slots=True)
class Call:
    """A call of a function of torch.

    Attributes:
        function: The name of the function.
        place: Where it was called.
        inputs: The positions in the piece of the calls that made its arguments, as far as these are known.
        weights: The names of its arguments that are weights.
        is_blind: Whether an argument was computed by what is not seen, such as a function of torch within `torch.vmap`.
        shape: That of what it returned.
        values: What it returned.
        gradient: The gradient of that, or None if none was computed.
    """

    function: str
    place: Place
    inputs: tuple[int, ...]
    weights: tuple[str, ...]
    is_blind: bool
    shape: tuple[int, ...]
    values: Numbers
    gradient: Numbers | None = None


@dataclass
class Piece:
    """What one call of `training_step` ran, in order.

    Attributes:
        start: Its first sample in the micro-batch.
        stop: The sample behind its last one.
        calls: The calls.
        loss: The position of the call that made the loss; None if that is not known.
        backward: Where the last backward was called; None if Lightning calls it, in automatic optimization.
    """

    start: int
    stop: int
    calls: list[Call] = field(default_factory=list)
    loss: int | None = None
    backward: Place | None = None


@dataclass(slots=True)
class Match:
    """What one process computed where a rank made a call.

    Attributes:
        position: That of the call on one process.
        has_samples: Whether it has rows for samples, or the batch has no others; else its values are those of a batch.
        is_same: Whether the values are equal, but for rounding.
        gradient: The gradient, of the rank's samples only, or None if none was computed.
    """

    position: int
    has_samples: bool
    is_same: bool
    gradient: Numbers | None = None


@dataclass
class Followed:
    """What a rank noted, held against the samples from `start` on of the batch that one process computes.

    Attributes:
        piece: What the rank noted.
        start: The first of its samples in the batch.
        matches: What one process computed there, by the position of the rank's call.
        alone: What one process noted of the batch.
    """

    piece: Piece
    start: int
    alone: Piece | None = None
    matches: dict[int, Match] = field(default_factory=dict)

    @functools.cached_property
    def positions(self) -> Mapping[_Key, int]:
        """The positions of the rank's calls by what the same call has on one process."""
        positions: dict[_Key, int] = {}
        seen: Counter[object] = Counter()
        for position, call in enumerate(self.piece.calls):
            positions[_key_of(call, seen)] = position
        return positions


_Key: TypeAlias = tuple[str, Place, int]
"""A function, where it is called, and how often it was called there before."""


def _key_of(call: Call, seen: Counter[object]) -> _Key:
    """Return what the same call has on a rank and on one process, and count it in `seen`."""
    number = seen[call.function, call.place]
    seen[call.function, call.place] += 1
    return call.function, call.place, number


def _start_of(followed: Followed) -> int:
    return followed.start


class _Producer(NamedTuple):
    tensor: weakref.ref[Tensor]  # another tensor may get the id when this one is gone
    position: int  # of the call that made it


class Trace(TorchFunctionMode):
    """Notes the calls of `training_step`, and compares them with those that ranks noted.

    The recorder enters it around the user's `training_step`, in every run, because torch takes other paths within such
    a mode: attention without gradient does not fuse. The order of its calls is:

    ```text
    watch              when training begins, and for every batch: the module, whose tensors may be new
    begin_step         before `training_step`, which then runs within the mode
    end_step           behind it; the gradients follow in the backward
    ```

    Args:
        mode: The dispatch mode that is paused while a tensor is read; it has attributes `paused` and `double`.
        followed: What ranks noted of the samples of the batch.

    Attributes:
        is_on: Whether to note anything of the running batch.
    """

    def __init__(self, mode: Any, followed: Sequence[Followed] = ()) -> None:
        super().__init__()
        self._mode = mode
        self._rounding = rounding_of(double=mode.double)
        self.is_on = False
        self._followed = followed
        self._module: nn.Module | None = None
        self._names_of_layers: Mapping[int, str] = {}
        self._names_of_weights: Mapping[int, str] = {}
        # Of the running call of `training_step`.
        self._piece = Piece(0, 0)
        self._samples_of_batch = 0
        self._seen: Counter[object] = Counter()
        self._producers: dict[int, _Producer] = {}

    def watch(self, module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the names of layers and weights from a module."""
        self._module = module
        self._names_of_layers = {id(layer): name for name, layer in module.named_modules()}
        self._names_of_weights = {id(weight): name for name, weight in weights}

    def place(self) -> Place:
        """Return where code runs that calls this."""
        return _place_of_running_code(self._module, self._names_of_layers)

    def begin_step(self, start: int, stop: int, total: int) -> None:
        """Note the calls from here on, of samples `start` to `stop` of a batch of `total`."""
        self._piece = Piece(start, stop)
        self._samples_of_batch = total
        self._seen.clear()

    def end_step(self, loss: object) -> Piece:
        """Return the calls since `begin_step`."""
        if isinstance(loss, Tensor):
            self._piece.loss = self._position_of(loss)
        self._producers = {}
        return self._piece

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, and note what it returns."""
        kwargs = kwargs or {}
        if not self.is_on or len(self._piece.calls) >= _MOST_CALLS:
            return func(*args, **kwargs)
        tensors = [leaf for _, leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        arguments = [_Argument(tensor, _version_of(tensor)) for tensor in tensors]
        output = func(*args, **kwargs)
        if func is Tensor.backward:
            self._piece.backward = self.place()
        with self._paused():
            self._note(func, arguments, output)
        return output

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Read tensors as they are, unseen by the dispatch mode. What cannot be read is left out."""
        was_paused = self._mode.paused
        self._mode.paused = True
        try:
            with torch.no_grad():
                yield
        except RuntimeError:
            # A tensor without values of its own, such as one within `torch.vmap`, or on the device "meta".
            pass
        finally:
            self._mode.paused = was_paused

    def _position_of(self, tensor: Tensor) -> int | None:
        """Return which call made a tensor."""
        producer = self._producers.get(id(tensor))
        if producer is None or producer.tensor() is not tensor:
            return None
        return producer.position

    def _note(self, func: Any, arguments: Sequence[_Argument], output: object) -> None:
        """Note a call.

        | the call | noted |
        |---|---|
        | returned no tensor of real numbers | nothing |
        | returned an argument as it was | nothing |
        | returned a view of an argument, which has the same values | the view as made by the same call |
        | wrote to an argument, or made a tensor | the call |
        """
        name = getattr(func, "__name__", str(func))
        if name == "__setitem__":  # which returns nothing, and writes to its first argument
            output = arguments[0].tensor
        outputs = [leaf for _, leaf in leaves(output) if _is_readable(leaf)]
        if not outputs:
            return
        result = outputs[0]
        is_argument = any(tensor is result for tensor, _ in arguments)
        inputs = []
        weights = []
        is_blind = False
        for tensor, version in arguments:
            position = self._position_of(tensor)
            if tensor is result and version == _version_of(result):
                return
            if not is_argument and _address(tensor) == _address(result):
                if position is not None:
                    self._remember(outputs, position)
                return
            if position is not None:
                inputs.append(position)
            elif tensor.grad_fn is not None:
                is_blind = True
            if id(tensor) in self._names_of_weights:
                weights.append(self._names_of_weights[id(tensor)])
        call = Call(
            function=name,
            place=self.place(),
            inputs=tuple(dict.fromkeys(inputs)),
            weights=tuple(weights),
            is_blind=is_blind,
            shape=tuple(result.shape),
            values=numbers_of(result),
        )
        position_of_call = len(self._piece.calls)
        self._piece.calls.append(call)
        self._remember(outputs, position_of_call)
        compared = self._compare(call, result, position_of_call)
        if result.requires_grad and result.grad_fn is not None:
            result.register_hook(functools.partial(self._note_gradient, call, compared))

    def _remember(self, outputs: Sequence[Tensor], position: int) -> None:
        for output in outputs:
            self._producers[id(output)] = _Producer(weakref.ref(output), position)

    def _compare(self, call: Call, result: Tensor, position: int) -> list[tuple[Match, Layout]]:
        """Hold a call against those of the ranks, and return how to do the same with its gradient."""
        if not self._followed:
            return []
        key = _key_of(call, self._seen)
        compared = []
        for followed in self._followed:
            position_of_rank = followed.positions.get(key)
            if position_of_rank is None:
                continue
            call_of_rank = followed.piece.calls[position_of_rank]
            found = _matched(call_of_rank, result, self._layouts(key, followed, result), position, self._rounding)
            if found is not None:
                followed.matches[position_of_rank] = found[0]
                compared.append(found)
        return compared

    def _layouts(self, key: _Key, followed: Followed, result: Tensor) -> Layouts:
        """Return the ways in which a result may have the rows of a rank's samples."""
        shape = followed.piece.calls[followed.positions[key]].shape
        number = followed.piece.stop - followed.piece.start
        if number == self._samples_of_batch:
            if shape == tuple(result.shape):
                return Layouts([as_it_is], [])
            return Layouts([], [])
        layouts = layouts_of(shape, result.shape, Samples(followed.start, number, self._samples_of_batch))
        layout = self._rows_of_all(key, followed, result)
        if layout is not None:
            layouts.likely.insert(0, layout)
        return layouts

    def _rows_of_all(self, key: _Key, followed: Followed, result: Tensor) -> Layout | None:
        """Return how to select a rank's rows if a result has those of all ranks one after the other, as of graphs."""
        rows_before = 0
        rows_of_all = 0
        for other in sorted(self._followed, key=_start_of):
            position = other.positions.get(key)
            if position is None:
                return None
            shape = other.piece.calls[position].shape
            if len(shape) == 0 or shape[1:] != result.shape[1:]:
                return None
            if other.start < followed.start:
                rows_before += shape[0]
            rows_of_all += shape[0]
        rows = followed.piece.calls[followed.positions[key]].shape[0]
        if rows_of_all != result.shape[0]:
            return None
        return functools.partial(rows_from, rows_before, rows)

    def _note_gradient(self, call: Call, compared: Sequence[tuple[Match, Layout]], gradient: Tensor) -> None:
        """Note the gradient of what a call returned; the last one, if there are several backwards."""
        if not _is_readable(gradient):
            return
        with self._paused():
            call.gradient = numbers_of(gradient)
            for match, layout in compared:
                match.gradient = numbers_of(layout(gradient))


def _is_readable(value: object) -> bool:
    """Return whether a value is a tensor of real numbers, all of them in this process."""
    if type(value) not in (Tensor, nn.Parameter):
        return False
    tensor: Any = value
    return bool(tensor.is_floating_point() and tensor.layout == torch.strided)


def _address(tensor: Tensor) -> int:
    """Return what tensors share of which one is a view of the other; 0 of a sparse tensor."""
    if tensor.layout != torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


class _Argument(NamedTuple):
    """An argument of a call, before the call."""

    tensor: Tensor
    version: int


def _version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written in place; 0 of a tensor that does not count it."""
    if tensor.is_inference():
        return 0
    return int(version_of(tensor))


def _matched(
    call_of_rank: Call, result: Tensor, layouts: Layouts, position: int, rounding: float
) -> tuple[Match, Layout] | None:
    """Return whether a rank's call has the values of one process, and how the rows of its samples are selected.

    | the values are equal | returned |
    |---|---|
    | in some layout | equal, in this layout |
    | in none, but one is likely | not equal |
    | in none, and there is none, but the shape is the same, as of a loss | values of no sample, equal or not |
    | any other | None |
    """
    for layout in (*layouts.likely, *layouts.possible):
        if are_near(call_of_rank.values, numbers_of(layout(result)), rounding):
            return Match(position, has_samples=True, is_same=True), layout
    if layouts.likely:
        return Match(position, has_samples=True, is_same=False), layouts.likely[0]
    if layouts.possible or call_of_rank.shape != tuple(result.shape):
        return None
    is_same = are_near(call_of_rank.values, numbers_of(result), rounding)
    return Match(position, has_samples=False, is_same=is_same), as_it_is


class Writes(TorchDispatchMode):
    """Notes the line that last wrote a weight or a buffer in place, but for optimizers.

    The recorder enters it for the whole training, because hooks of the user write at any time.

    Attributes:
        names: The names of what is watched, by the addresses of the storages.
        places: Where each was written, by its name. The recorder empties it when a step ends.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._trace = trace
        self.names: dict[int, str] = {}
        self.places: dict[str, Place] = {}

    def watch(self, name: str, tensor: Tensor) -> None:
        """Note who writes to a tensor."""
        if _is_readable(tensor):
            self.names[_address(tensor)] = name

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note what it writes."""
        if writes_in_place(func) and args and _is_readable(args[0]):
            name = self.names.get(_address(args[0]))
            if name is not None and not _is_optimizing():
                place = self._trace.place()
                if place.line is not None:
                    self.places[name] = place
        return func(*args, **(kwargs or {}))
