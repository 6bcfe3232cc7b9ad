"""Methods that are replaced for a while: a step that runs once per replica, a `log` that says more."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any

from lightning.pytorch import LightningModule

__all__ = ["logged_as", "method_of", "replaced"]


@contextmanager
def replaced(owner: object, name: str, method: object) -> Iterator[None]:
    """Replace a method of a module, or of another object or class, within the context.

    Afterwards the attribute of the owner itself, as a method that a user put on the instance, is restored. If there was
    none, the one of the class shows again.
    """
    before = vars(owner).get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)


def method_of(owner: object, name: str, method: Callable[..., Any]) -> MethodType:
    """Return a method to put on an object, of which no copy of the object knows.

    Users copy and pickle their module within hooks, as for weight averaging. A copy calls the method of the class
    again, and holds nothing that `method` refers to.
    """

    def of_owner(called_on: object, *args: Any, **kwargs: Any) -> object:
        if called_on is owner:
            return method(*args, **kwargs)
        return getattr(type(called_on), name)(called_on, *args, **kwargs)

    # A copy of a bound method is bound to the copy of its object. A pickle holds the name, by which the class answers.
    of_owner.__name__ = name
    return MethodType(of_owner, owner)


_LOG = inspect.signature(LightningModule.log)
_LOG_OF_INSTANCE = _LOG.replace(parameters=list(_LOG.parameters.values())[1:])  # without `self`


def logged_as(
    module: LightningModule, change: Callable[[dict[str, Any]], dict[str, Any] | None]
) -> AbstractContextManager[None]:
    """Within the context, give `change` the arguments of `module.log` by name and log what it returns, unless None."""
    # The instance's, which may be a user's own. It hands on what Lightning's takes.
    log: Callable[..., None] = module.log

    def changed(*args: Any, **kwargs: Any) -> None:
        arguments = _LOG_OF_INSTANCE.bind(*args, **kwargs).arguments
        changed_arguments = change(dict(arguments))
        if changed_arguments is not None:
            log(**changed_arguments)

    return replaced(module, "log", method_of(module, "log", changed))
