"""Arguments that a function does not have, and values that its annotations exclude, refused where they are given."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from datetime import timedelta
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["by_keyword", "nearest"]

_F = TypeVar("_F", bound=Callable[..., Any])

_WORDS: dict[Any, tuple[str, ...]] = {
    bool: ("True", "False"),
    int: ("an integer",),
    float: ("a number",),
    str: ("a string",),
    timedelta: ("a datetime.timedelta",),
    Callable: ("a function",),
    dist.ProcessGroup: ("a process group, as torch.distributed.new_group returns it,",),
    DeviceMesh: ("one dimension of a DeviceMesh",),
    type(None): ("None",),
}


def by_keyword(constructor: _F) -> _F:
    """Have a constructor refuse positional arguments, unknown names, and values of a wrong plain type.

    Values are checked where the annotation is made of types such as `bool`, `int` and None alone, or is one `Literal`:
    `"false"` is true, and `True` is the number 1. The signature stays as it is, for command lines that are made of it.

    Args:
        constructor: An `__init__` with keyword-only parameters.
    """
    parameters = inspect.signature(constructor, eval_str=True).parameters
    names = list(parameters)[1:]
    plain = {name: _plain(parameters[name].annotation) for name in names}
    annotations = {name: parameters[name].annotation for name in names}
    literal = {name: get_args(one) for name, one in annotations.items() if get_origin(one) is Literal}

    @wraps(constructor)
    def checked(self: Any, *positional: Any, **given: Any) -> None:
        owner = type(self).__name__
        if positional:
            raise TypeError(
                f"{owner} takes its options by name, such as {names[0]}={positional[0]!r}; got {positional!r}"
            )
        for name, value in given.items():
            if name not in parameters:
                raise TypeError(f"{name}={value!r} is not an option of {owner}{nearest(name, names)}")
            if value not in literal.get(name, [value]):
                raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, literal[name]))}.")
            accepted = plain[name]
            if accepted and not any(_is(value, one) for one in accepted):
                *words, last = [word for one in accepted for word in _WORDS[one]]
                allowed = f"{', '.join(words)} or {last}" if words else last
                raise TypeError(f"{name}={value!r} is of type {type(value).__name__}: give {allowed}")
        constructor(self, **given)

    return checked  # type: ignore[return-value]  # `wraps` keeps the signature


def nearest(name: str, known: Sequence[str]) -> str:
    """Return what ends a sentence that refuses a name: the nearest known one, or all of them."""
    found = get_close_matches(name, known, 1)
    return f". Did you mean {found[0]!r}?" if found else f". It has {', '.join(known)}."


def _plain(annotation: Any) -> tuple[Any, ...]:
    """Return the plain types of an annotation; none where it has any other."""
    union = get_origin(annotation) in (Union, types.UnionType)
    alternatives = get_args(annotation) if union else (annotation,)
    alternatives = tuple(Callable if get_origin(one) is Callable else one for one in alternatives)
    return alternatives if all(one in _WORDS for one in alternatives) else ()


def _is(value: object, plain: Any) -> bool:
    """Return whether a value is of a plain type; integers are numbers, and truth values are not."""
    numeric = {int: Integral, float: Real}.get(plain)
    if plain is dist.ProcessGroup and value == dist.GroupMember.NON_GROUP_MEMBER:
        return True  # what new_group returns to others, who would wait if this rank raised alone: `require_members`
    if numeric is None:
        return isinstance(value, plain)
    return isinstance(value, numeric) and not isinstance(value, bool)
