"""Schedulers that step within a context, although nothing in the object itself tells so."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["STEPS", "is_watched", "watched_class"]

STEPS = ("step", "step_update")
"""Methods by which schedulers write learning rates; the second is that of timm for optimizer steps."""


class _Watched:
    """Marks the classes that `watched_class` makes."""

    __slots__ = ()


class _Unregistered:
    def __init_subclass__(cls, **_options: Any) -> None:
        """Keep a user's `__init_subclass__`, which may count its classes or ask for options, from being called."""


_set_class = vars(object)["__class__"].__set__


def is_watched(scheduler: Any) -> bool:
    """Return whether the scheduler is of a class that `watched_class` made."""
    return isinstance(scheduler, _Watched)


def watched_class(original: type, context: Callable[[], AbstractContextManager[None]]) -> type:
    """Return a subclass of a scheduler's class whose objects step within a context.

    It is a class, because `state_dict()` of torch's schedulers saves all that stands in the object's `__dict__`, where
    a wrapped method would stand. Pickles and copies of an object are of the original class.

    Args:
        original: The class of the scheduler. Objects may be given the new one: `scheduler.__class__ = ...`.
        context: Called at each step.
    """

    def reduce_ex(self: Any, protocol: Any) -> Any:
        self.__class__ = original
        try:
            return self.__reduce_ex__(protocol)
        finally:
            self.__class__ = watched

    def own_class(_self: Any) -> type:
        return original

    def stepping(name: str) -> property:
        # A property goes before a `step` in the object's own `__dict__`, where another library may have put one.
        def get(self: Any) -> Any:
            step = getattr(self, "__dict__", {}).get(name) or getattr(super(watched, self), name)

            @functools.wraps(step)
            def step_in_context(*args: Any, **kwargs: Any) -> Any:
                with context():
                    return step(*args, **kwargs)

            return step_in_context

        def put(self: Any, step: Any) -> None:
            self.__dict__[name] = step

        def delete(self: Any) -> None:
            del self.__dict__[name]

        return property(get, put, delete)

    body: dict[str, Any] = {name: stepping(name) for name in STEPS if hasattr(original, name)}
    body |= {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    # pickle compares the class that `__reduce_ex__` names with `__class__`.
    body |= {"__slots__": (), "__reduce_ex__": reduce_ex, "__class__": property(own_class, _set_class)}
    # `_Unregistered` only where it is needed: to a class with such a first base, an object can change only if it has a
    # `__dict__`.
    registers = hasattr(original.__init_subclass__, "__func__")
    bases = (_Unregistered, original, _Watched) if registers else (original, _Watched)
    watched = types.new_class(original.__name__, bases, exec_body=lambda space: space.update(body))
    return watched
