"""Arguments that a function does not have, and values that its annotations exclude, refused where they are given."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from typing import Any, TypeVar, Union, get_args, get_origin

__all__ = ["by_keyword", "nearest"]

_F = TypeVar("_F", bound=Callable[..., Any])

_WORDS = {bool: ("True", "False"), int: ("an integer",), float: ("a number",), type(None): ("None",)}


def by_keyword(constructor: _F) -> _F:
    """Have a constructor refuse positional arguments, unknown names, and values of a wrong plain type.

    Values are checked where the annotation is made of `bool`, `int`, `float` and None alone: `"false"` is true, and
    `True` is the number 1. The signature stays as it is, for command lines that are made of it.

    Args:
        constructor: An `__init__` with keyword-only parameters.
    """
    parameters = inspect.signature(constructor, eval_str=True).parameters
    names = list(parameters)[1:]
    plain = {name: _plain(parameters[name].annotation) for name in names}

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
    return alternatives if all(one in _WORDS for one in alternatives) else ()


def _is(value: object, plain: Any) -> bool:
    """Return whether a value is of a plain type; integers are numbers, and truth values are not."""
    numeric = {int: Integral, float: Real}.get(plain)
    if numeric is None:
        return isinstance(value, plain)
    return isinstance(value, numeric) and not isinstance(value, bool)
