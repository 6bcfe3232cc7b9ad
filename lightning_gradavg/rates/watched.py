"""Schedulers that step within a context, although nothing in the object itself tells so."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["unwatch", "watch"]

STEPS = ("step", "step_update")
"""Methods by which schedulers write learning rates; the second is that of timm for optimizer steps."""

_REMEDY = "Wrap what writes learning rates in `with learning_rates.in_base_units():` instead."


class _Watched:
    """Marks the classes that `watch` makes."""

    __slots__ = ()


def watch(scheduler: Any, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Let `step` and `step_update` of a scheduler run within a context, until `unwatch`.

    The object gets a subclass of its class, because `state_dict()` of torch's schedulers saves all that stands in the
    object's `__dict__`, where a wrapped method would stand. Pickles and copies of it are of its own class.

    Raises:
        TypeError: If its class has neither method or cannot be changed, the object holds a step of its own, or is
            watched already.
    """
    name = type(scheduler).__qualname__
    steps = [step for step in STEPS if hasattr(type(scheduler), step)]
    if issubclass(type(scheduler), _Watched):
        raise TypeError(f"{name} is watched by another LearningRates; call its detach() first.")
    if not steps:
        raise TypeError(f"{name} has no method {' or '.join(map(repr, STEPS))}. {_REMEDY}")
    if own := {*steps} & getattr(scheduler, "__dict__", {}).keys():
        raise TypeError(f"This {name} holds {' and '.join(own)} in the object, before that of its class. {_REMEDY}")
    try:
        scheduler.__class__ = _watched_class(type(scheduler), steps, context)
    except TypeError as error:
        raise TypeError(f"A {name} cannot be watched: {error}. {_REMEDY}") from None


def unwatch(scheduler: Any) -> None:
    """Give a watched scheduler its own class back."""
    scheduler.__class__ = type(scheduler).__bases__[0]


def _watched_class(original: type, steps: Sequence[str], context: Callable[[], AbstractContextManager[None]]) -> type:
    def reduce_ex(self: Any, protocol: Any) -> Any:
        self.__class__ = original
        try:
            return self.__reduce_ex__(protocol)
        finally:
            self.__class__ = watched

    def in_context(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def step_in_context(*args: Any, **kwargs: Any) -> Any:
            with context():
                return step(*args, **kwargs)

        return step_in_context

    body: dict[str, Any] = {name: in_context(getattr(original, name)) for name in steps}
    body |= {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    # pickle compares the class that `__reduce_ex__` names with `__class__`.
    own_class = property(lambda _: original, vars(object)["__class__"].__set__)
    body |= {"__slots__": (), "__reduce_ex__": reduce_ex, "__class__": own_class}
    watched = type(original.__name__, (original, _Watched), body)
    return watched
