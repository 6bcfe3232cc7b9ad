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
    "refuse_unknown",
]

_F = TypeVar("_F", bound=Callable[..., Any])

SET_BY_STRATEGIES = {"self", "module", "device_ids"}
"""Parameters of `DistributedDataParallel` that are no options."""

_PLAIN = {bool, int, float, str, timedelta, types.NoneType}
"""The types of which `by_keyword` checks values. All others are left to who uses the value."""


def by_keyword(constructor: _F) -> _F:
    """Have a constructor refuse positional arguments, unknown names, and values of a wrong plain type.

    The signature stays, because LightningCLI (jsonargparse) makes its command line of it. The attribute `_given` of the
    new object holds the arguments that were given, without defaults.
    """
    # Read once, when the class is made. Annotations must be types, so the file of the class has no `from __future__
    # import annotations`.
    annotations = {name: parameter.annotation for name, parameter in inspect.signature(constructor).parameters.items()}
    parameters_of_ddp = inspect.signature(DistributedDataParallel.__init__).parameters
    # An option of DDP need not stand in the signature of the strategy.
    no_options = {"ddp_options", *SET_BY_STRATEGIES}
    known = [name for name in [*annotations, *parameters_of_ddp] if name not in no_options]

    @wraps(constructor)
    def checked(self: Any, *positional: Any, **given: Any) -> None:
        owner = type(self).__name__
        if positional:
            raise TypeError(
                f"{owner} takes its options by name, such as {known[0]}={positional[0]!r}; got {positional!r}"
            )
        refuse_unknown(owner, given, known)
        for name, value in given.items():
            if name in annotations:
                _require_type(name, value, annotations[name])
        self._given = given
        constructor(self, **given)

    return checked  # type: ignore[return-value]  # `wraps` keeps the signature


def _require_type(name: str, value: object, annotation: object) -> None:
    """Raise an error if an annotation of literals and plain types excludes a value: the string "false" is true."""
    literals: list[object] = []
    plain: list[type] = []
    for alternative in _alternatives(annotation):
        if get_origin(alternative) is Literal:
            literals.extend(get_args(alternative))
        elif alternative in _PLAIN:
            plain.append(alternative)
        else:
            return  # such as a function, or a plugin of Lightning's: any value passes here
    if value in literals or _is_of(value, plain):
        return
    if literals:
        accepted = list(literals)
        if types.NoneType in plain:
            accepted.append(None)
        raise ValueError(
            f"{name}={value!r} is not one of {', '.join(map(repr, accepted))}.{did_you_mean(value, map(str, literals))}"
        )
    expected = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in plain)
    raise TypeError(f"{name}={value!r} is of type {type(value).__name__}: give {expected}")


def _alternatives(annotation: object) -> tuple[object, ...]:
    """Return the members of a union, or the annotation itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _is_of(value: object, plain: Sequence[type]) -> bool:
    """Return whether a value is of one of some types, where a bool counts as no int."""
    if isinstance(value, bool):  # a subclass of int: num_replicas=True is a mistake
        return bool in plain
    return isinstance(value, tuple(plain))


def as_count(name: str, value: object, least: int = 1, also: str = "") -> int:
    """Return the int `value`; ValueError if it is below `least`, TypeError if it is no int, such as a bool.

    `also` ends the sentence about what is accepted, as in ", or None".
    """
    expected = f"{name} must be an integer >= {least}{also}, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{expected} of type {type(value).__name__}.")
    if value < least:
        raise ValueError(f"{expected}.")
    return value


def as_count_or_none(name: str, value: object) -> int | None:
    """Return the int `value`, or None; raise as `as_count` does for anything else."""
    if value is None:
        return None
    return as_count(name, value, also=", or None")


def refuse_unknown(owner: str, options: Mapping[str, object], known: Sequence[str]) -> None:
    """Raise a TypeError about the first unknown option, by name."""
    unknown = sorted(options.keys() - set(known))
    if unknown:
        name = unknown[0]
        raise TypeError(f"{name}={options[name]!r} is not an option of {owner}{nearest(name, known)}")


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return " Did you mean 'mean'?" with the known name nearest to a wrong one; "" if none is near."""
    text = str(given)
    names = list(known)
    # The second is for who wrote the beginning of a long name.
    for of_compared in ({name: name for name in names}, {name[: len(text)]: name for name in names}):
        for match in get_close_matches(text, list(of_compared), 1):
            return f" Did you mean {of_compared[match]!r}?"
    return ""


def nearest(name: str, known: Sequence[str]) -> str:
    """Return what ends a sentence that refuses a name: the nearest known one, or all of them."""
    suggestion = did_you_mean(name, known)
    if suggestion:
        return f".{suggestion}"
    return f". It has {', '.join(known)}."
