"""Arguments that a function does not have, and values that its annotations exclude, refused where they are given."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches
from functools import wraps
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "SET_BY_STRATEGIES",
    "as_count",
    "as_count_or_none",
    "by_keyword",
    "did_you_mean",
    "nearest",
    "raise_first",
    "refuse_unknown",
]

_F = TypeVar("_F", bound=Callable[..., Any])

SET_BY_STRATEGIES = {"self", "module", "device_ids"}
"""Parameters of `DistributedDataParallel` that are no options."""

_PLAIN = {bool, int, float, str, timedelta, types.NoneType}


def by_keyword(constructor: _F) -> _F:
    """Have a constructor refuse positional arguments, unknown names, and values of a wrong plain type.

    The signature stays, for command lines made of it. `_given` holds what was given.
    """
    annotations = {name: one.annotation for name, one in inspect.signature(constructor).parameters.items()}
    of_ddp = inspect.signature(DistributedDataParallel.__init__).parameters.keys()
    known = [name for name in [*annotations, *of_ddp] if name not in {"ddp_options", *SET_BY_STRATEGIES}]

    @wraps(constructor)
    def checked(self: Any, *positional: Any, **given: Any) -> None:
        owner = type(self).__name__
        if positional:
            raise TypeError(
                f"{owner} takes its options by name, such as {known[0]}={positional[0]!r}; got {positional!r}"
            )
        refuse_unknown(owner, given, known)
        for name, value in given.items():
            _require_type(name, value, annotations.get(name, Any))
        self._given = given
        constructor(self, **given)

    return checked  # type: ignore[return-value]  # `wraps` keeps the signature


def _require_type(name: str, value: Any, annotation: Any) -> None:
    """Raise an error if an annotation of literals and plain types excludes a value: the string "false" is true."""
    *alternatives, _ = get_args(Union[annotation, types.EllipsisType])  # noqa: UP007  # of one type, too
    literals = [value for one in alternatives if get_origin(one) is Literal for value in get_args(one)]
    plain = tuple(one for one in alternatives if one in _PLAIN)
    # True is an integer.
    fits = bool in plain if isinstance(value, bool) else isinstance(value, plain)
    if fits or value in literals or len(plain) + bool(literals) < len(alternatives):
        return
    if literals:
        listed = ", ".join(map(repr, [*literals, *[None] * len(plain)]))
        raise ValueError(f"{name}={value!r} is not one of {listed}.{did_you_mean(value, literals)}")
    expected = " or ".join(one.__name__ for one in plain).replace("NoneType", "None")
    raise TypeError(f"{name}={value!r} is of type {type(value).__name__}: give {expected}")


def as_count(name: str, value: Any, least: int = 1, also: str = "") -> int:
    """Return the int `value`; ValueError if it is below `least`, TypeError if it is no int, such as a bool."""
    expected = f"{name} must be an integer >= {least}{also}, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{expected} of type {type(value).__name__}.")
    if value < least:
        raise ValueError(f"{expected}.")
    return value


def as_count_or_none(name: str, value: Any) -> int | None:
    """Return the int `value`, or None; raise as `as_count` does for anything else."""
    return None if value is None else as_count(name, value, also=", or None")


def raise_first(error: type[Exception], refused: Mapping[str, object]) -> None:
    """Raise an error with the first message whose condition holds, if any does."""
    for message in (message for message, holds in refused.items() if holds):
        raise error(message)


def refuse_unknown(owner: str, options: Mapping[str, object], known: Sequence[str]) -> None:
    """Raise a TypeError about the first unknown option."""
    for name in sorted(options.keys() - {*known}):
        raise TypeError(f"{name}={options[name]!r} is not an option of {owner}{nearest(name, known)}")


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return the sentence that names the known name nearest to a wrong one, with a space before it; "" without one."""
    return "".join(f" Did you mean {found!r}?" for found in get_close_matches(str(given), list(known), 1))


def nearest(name: str, known: Sequence[str]) -> str:
    """Return what ends a sentence that refuses a name: the nearest known one, or all of them."""
    return "." + (did_you_mean(name, known) or f" It has {', '.join(known)}.")
