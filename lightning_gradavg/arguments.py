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


_WORDS: dict[Any, str] = {
    bool: "True, False",
    int: "an integer",
    float: "a number",
    str: "a string",
    timedelta: "a datetime.timedelta",
    Callable: "a function",
    type(None): "None",
}
_SET = ("self", "module", "device_ids")  # by the strategy


def by_keyword(constructor: _F) -> _F:
    """Have a constructor refuse positional arguments, unknown names, and values of a wrong plain type.

    Values are checked if the annotation consists of types such as `bool`, `int` and None, or is one `Literal`: the
    string `"false"` is true, and `True` is the number 1. The signature stays, for command lines made of it. `_given`
    holds what was given.
    """
    own = inspect.signature(constructor, eval_str=True).parameters.values()
    annotations = {one.name: one.annotation for one in own if one.name != "self"}
    if annotations.pop("ddp_options", None) is not None:
        of_ddp = inspect.signature(DistributedDataParallel.__init__).parameters.values()
        # Not annotated there; their defaults have their types, but for two.
        typed = {one.name: Any if one.default is None else type(one.default) for one in of_ddp}
        annotations |= {name: one for name, one in typed.items() if name not in _SET} | {"bucket_cap_mb": float | None}

    @wraps(constructor)
    def checked(self: Any, *positional: Any, **given: Any) -> None:
        owner, names = type(self).__name__, list(annotations)
        if positional:
            raise TypeError(
                f"{owner} takes its options by name, such as {names[0]}={positional[0]!r}; got {positional!r}"
            )
        refuse_unknown(owner, given, names)
        for name, value in given.items():
            _require_type(name, value, annotations[name])
        self._given = given
        constructor(self, **given)

    return checked  # type: ignore[return-value]  # `wraps` keeps the signature


def _require_type(name: str, value: Any, annotation: Any) -> None:
    """Raise an error if an annotation that is one `Literal`, or plain types, excludes a value."""
    origin, accepted = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        if value not in accepted:
            listed = ", ".join(map(repr, accepted))
            raise ValueError(f"{name}={value!r} is not one of {listed}.{did_you_mean(value, accepted)}")
        return
    alternatives = accepted if origin in (Union, types.UnionType) else (annotation,)
    plain = [Callable if get_origin(one) is Callable else one for one in alternatives]
    if all(one in _WORDS for one in plain) and not any(_is(value, one) for one in plain):
        *words, last = ", ".join(_WORDS[one] for one in plain).split(", ")
        allowed = f"{', '.join(words)} or {last}" if words else last
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}: give {allowed}")


def refuse_unknown(
    owner: str,
    options: Mapping[str, object],
    known: Sequence[str],
    reasons: Mapping[str, str] | None = None,
    where: str = "",
) -> None:
    """Raise a TypeError about the first unknown option, with the reason if there is one, or the nearest name."""
    for name in [name for name in options if name not in known]:
        reason = (reasons or {}).get(name)
        unknown = f"is not an option of {owner}{nearest(name, known)}"
        why = f"cannot be {where}: it {reason}." if reason is not None else unknown
        raise TypeError(f"{name}={options[name]!r} {why}")


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return the sentence that names the known name nearest to a wrong one, with a space before it; "" without one."""
    found = get_close_matches(given, list(known), 1) if isinstance(given, str) else []
    return f" Did you mean {found[0]!r}?" if found else ""


def nearest(name: str, known: Sequence[str]) -> str:
    """Return what ends a sentence that refuses a name: the nearest known one, or all of them."""
    return "." + (did_you_mean(name, known) or f" It has {', '.join(known)}.")


def _is(value: object, plain: Any) -> bool:
    """Return whether a value is of a plain type; integers are numbers, and truth values are not."""
    numeric = {int: Integral, float: Real}.get(plain)
    return isinstance(value, numeric or plain) and not (numeric and isinstance(value, bool))
