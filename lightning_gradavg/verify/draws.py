"""Random numbers that one process draws as the ranks did, and operators in float64.

Ranks record what every operator drew. The one process runs the same operators on the samples of all ranks, and gets
what the ranks drew, one after the other along the dimension of the samples. So a dropout mask of shape `(8, 64)` is
made of two of shape `(4, 64)`, also where texts are padded to other lengths. What has no such dimension, such as the
noise of a weight, belongs to no sample: it is comparable if all ranks drew the same, as behind a seed of the user's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_gradavg._lightning.internals import TorchDispatchMode
from lightning_gradavg._support.tree import mapped
from lightning_gradavg.verify.lines import drawn_in
from lightning_gradavg.verify.records import DrawnNumbers

__all__ = ["Draws", "of_no_sample"]

_LOW_TYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


_DRAWN_WITHIN = ("rrelu", "attention", "rnn")
"""Parts of the names of operators whose results are no random numbers, but computed with some that are not returned."""


def of_no_sample(operator: str, place: str = "") -> str:
    """Return why a draw cannot be compared that every rank makes for itself."""
    return (
        f"one draw for a whole batch ({operator}): it belongs to no sample, or to a generator of your own; every rank"
        f" draws its own, and one process draws otherwise{place}"
    )


class Draws(TorchDispatchMode):
    """Records what operators draw, or draws what was recorded, and computes in float64 if `double`.

    The recorder enters it when a batch arrives, and leaves it when the batch ends.

    Attributes:
        double: Whether operators compute in float64.
        drawn: What was drawn while these samples are computed, and behind their backward until the batch ends.
        parts: What each part of the batch drew, if one process draws that again.
        problem: Why random numbers cannot be compared; "" if they can.
    """

    def __init__(self, *, double: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.double = double
        self._is_paused = False
        self.drawn: list[DrawnNumbers] = []
        self.parts: Sequence[Sequence[DrawnNumbers]] = ()
        self.problem = ""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run operators as they are within, such as those of communication hooks, which state their types."""
        was_paused = self._is_paused
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = was_paused

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        kwargs = {} if kwargs is None else dict(kwargs)
        # Collectives take tensors of one type.
        if self.double and not self._is_paused and func.namespace not in ("c10d", "fsdp", "profiler"):
            args, kwargs = _widened(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        states = _generator_states(args, kwargs)
        result = func(*args, **kwargs)
        if all(torch.equal(*pair) for pair in zip(states, _generator_states(args, kwargs), strict=True)):
            return result  # it draws nothing, as attention without dropout
        if self._is_paused:
            self.problem = of_no_sample("in a communication hook")
            return result
        return self._recorded_or_drawn_again(func, result)

    def _recorded_or_drawn_again(self, func: Any, result: Any) -> Any:
        """Note what an operator drew, and return it, or what the parts of the batch drew, joined.

        Each operator's draws are counted. What cannot be joined stays: a generator that is seeded for each sample draws
        the same on one process.
        """
        operator = str(func.overloadpacket)
        if not isinstance(result, Tensor) or any(part in operator for part in _DRAWN_WITHIN):
            self.problem = f"an operator draws what it does not return ({operator}){drawn_in()}"
            return result
        position = sum(drawn.operator == operator for drawn in self.drawn)
        numbers_of_result = result.new_empty(0)
        if not self.parts:  # what draws again only counts its draws
            numbers_of_result = _compact(result.detach())
        self.drawn.append(DrawnNumbers(operator, numbers_of_result))
        if not self.parts:
            return result
        numbers = []
        for part in self.parts:
            draws = [drawn for drawn in part if drawn.operator == operator][position : position + 1]
            if not draws or draws[0].numbers.ndim != result.ndim:
                self.problem = self.problem or (
                    f"a batch of another size or rank draws other random numbers ({operator}){drawn_in()}"
                )
                return result
            numbers.append(draws[0].numbers.to(result.dtype))
        joined = _joined(numbers, result.detach())
        if joined is None:
            self.problem = self.problem or of_no_sample(operator, drawn_in())
            return result
        if _writes_in_place(func):
            return result.copy_(joined)
        return joined


def _compact(numbers: Tensor) -> Tensor:
    """Return a copy of numbers; of a mask, which may be as large as all activations, as booleans."""
    mask = numbers.bool()
    if torch.equal(mask.to(numbers.dtype), numbers):
        return mask
    return numbers.clone()


def _joined(numbers: Sequence[Tensor], own: Tensor) -> Tensor | None:
    """Return the numbers of parts along the dimension in which they add up to a tensor; None if there is none.

    Numbers that all parts have in common stay as they are. Other dimensions may be shorter, as of padded texts.
    """
    first = numbers[0]
    if first.shape == own.shape and all(torch.equal(first, part) for part in numbers):
        return first
    for dim in range(own.ndim):
        sizes = [part.shape[dim] for part in numbers]
        if sum(sizes) != own.shape[dim]:
            continue
        joined = own.clone()
        for part, place in zip(numbers, joined.split(sizes, dim), strict=True):
            kept = tuple(slice(min(pair)) for pair in zip(part.shape, place.shape, strict=True))
            place[kept] = part[kept]
        return joined
    return None


def _generator_states(args: Sequence[object], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the states of the generators that an operator may draw from."""
    own = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, torch.Generator)]
    return [generator.get_state() for generator in (torch.default_generator, *own)]


def _widened(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of an operator with float64 in place of lower types.

    | the operator | changed |
    |---|---|
    | is given a lower type as `dtype=`, as in `x.float()` or `torch.zeros(2, dtype=torch.float32)` | that type |
    | writes to a tensor of a lower type | its other tensors, if any is float64 |
    | returns a view of a tensor of a lower type, to which may be written | nothing |
    | is `new_empty`, by which a tensor is copied that then takes a storage of its own type | nothing |
    | has tensors of lower types | these tensors |
    """
    if kwargs.get("dtype") in _LOW_TYPES:
        kwargs["dtype"] = torch.float64
    types = {tensor.dtype for tensor in _tensors_in(args)}
    if types.isdisjoint(_LOW_TYPES) or func.is_view:
        return args, kwargs
    if func is torch.ops.aten.new_empty.default:
        return args, kwargs
    if _writes_in_place(func):  # the first argument is what is written to, and cannot be another tensor
        if torch.float64 not in types:
            return args, kwargs
        return (args[0], *mapped(args[1:], _as_float64)), kwargs
    return mapped(args, _as_float64), kwargs


def _writes_in_place(func: Any) -> bool:
    """Return whether an operator writes to its first argument, by torch's rule for names, as in `aten.add_`."""
    return str(func.overloadpacket).endswith("_")


def _tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of an operator. Other nested values than lists do not occur there."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _as_float64(leaf: Any) -> Any:
    if getattr(leaf, "dtype", None) in _LOW_TYPES:
        return leaf.double()
    return leaf
