"""Arguments that a function does not have, and values that its annotations exclude, refused where they are given."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

from torch.nn.parallel import DistributedDataParallel

__all__ = ["Refusals", "by_keyword", "did_you_mean", "nearest", "refuse", "refuse_unknown"]

_F = TypeVar("_F", bound=Callable[..., Any])

Refusals: TypeAlias = Sequence[tuple[Callable[[Any], object], str]]
"""What is refused, and why: a predicate, and what the message goes on with, in which `{0}` is the value."""


def refuse(name: str, value: object, refusals: Refusals) -> None:
    """Raise a ValueError about the first of the refusals that holds, if any does."""
    for holds, reason in refusals:
        if holds(value):
            raise ValueError(f"{name} {reason.format(value)}")


_WORDS: dict[Any, tuple[str, ...]] = {
    bool: ("True", "False"),
    int: ("an integer",),
    float: ("a number",),
    str: ("a string",),
    timedelta: ("a datetime.timedelta",),
    Callable: ("a function",),
    type(None): ("None",),
}


_SET = ("self", "module", "device_ids")  # by the strategy
_TYPED: dict[str, Any] = {"bucket_cap_mb": float | None}  # by its documentation alone


def by_keyword(constructor: _F) -> _F:
    """Have a constructor refuse positional arguments, unknown names, and values of a wrong plain type.

    Values are checked if the annotation consists of types such as `bool`, `int` and None, or is one `Literal`: the
    string `"false"` is true, and `True` is the number 1. The signature stays, for command lines made of it. `_given`
    holds what was given.
    """
    _, *parameters = inspect.signature(constructor, eval_str=True).parameters.values()
    if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:  # stands for the options of DDP, whose defaults are typed
        of_ddp = inspect.signature(DistributedDataParallel.__init__).parameters.values()
        further = [one.replace(annotation=_TYPED.get(one.name, type(one.default))) for one in of_ddp]
        untyped = [one.replace(annotation=Any) if one.annotation is type(None) else one for one in further]
        parameters = [*parameters[:-1], *(one for one in untyped if one.name not in _SET)]
    annotations = {parameter.name: parameter.annotation for parameter in parameters}
    literal = {name: get_args(one) for name, one in annotations.items() if get_origin(one) is Literal}
    plain, names = {name: _plain(one) for name, one in annotations.items()}, list(annotations)

    @wraps(constructor)
    def checked(self: Any, *positional: Any, **given: Any) -> None:
        owner = type(self).__name__
        if positional:
            raise TypeError(
                f"{owner} takes its options by name, such as {names[0]}={positional[0]!r}; got {positional!r}"
            )
        for name, value in given.items():
            if name not in annotations:
                raise TypeError(f"{name}={value!r} is not an option of {owner}{nearest(name, names)}")
            if value not in literal.get(name, [value]):
                accepted_names = ", ".join(map(repr, literal[name]))
                hint = did_you_mean(value, literal[name])
                raise ValueError(f"{name}={value!r} is not one of {accepted_names}.{hint}")
            accepted = plain[name]
            if accepted and not any(_is(value, one) for one in accepted):
                *words, last = [word for one in accepted for word in _WORDS[one]]
                allowed = f"{', '.join(words)} or {last}" if words else last
                raise TypeError(f"{name}={value!r} is of type {type(value).__name__}: give {allowed}")
        self._given = given
        constructor(self, **given)

    return checked  # type: ignore[return-value]  # `wraps` keeps the signature


def refuse_unknown(
    owner: str, options: Mapping[str, object], known: Sequence[str], reasons: Mapping[str, str], where: str
) -> None:
    """Raise a TypeError about the first unknown option, with the reason if there is one, or the nearest name."""
    for name in [name for name in options if name not in known]:
        why = f" cannot be {where}: it {reasons[name]}." if name in reasons else None
        unknown = f" is not an option of {owner}{nearest(name, known)}"
        raise TypeError(f"{name}={options[name]!r}{why or unknown}")


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return the sentence that names the known name nearest to a wrong one, with a space before it; "" without one."""
    found = get_close_matches(given, list(known), 1) if isinstance(given, str) else []
    return f" Did you mean {found[0]!r}?" if found else ""


def nearest(name: str, known: Sequence[str]) -> str:
    """Return what ends a sentence that refuses a name: the nearest known one, or all of them."""
    return "." + (did_you_mean(name, known) or f" It has {', '.join(known)}.")


def _plain(annotation: Any) -> tuple[Any, ...]:
    """Return the plain types of an annotation; none where it has any other."""
    union = get_origin(annotation) in (Union, types.UnionType)
    alternatives = get_args(annotation) if union else (annotation,)
    alternatives = tuple(Callable if get_origin(one) is Callable else one for one in alternatives)
    return alternatives if all(one in _WORDS for one in alternatives) else ()


def _is(value: object, plain: Any) -> bool:
    """Return whether a value is of a plain type; integers are numbers, and truth values are not."""
    numeric = {int: Integral, float: Real}.get(plain)
    return isinstance(value, numeric or plain) and not (numeric and isinstance(value, bool))
