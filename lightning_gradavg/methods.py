"""Methods of a module that are others for a while: a step that is run once per replica, a `log` that says more."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch import LightningModule

__all__ = ["logged_as", "replaced"]


@contextmanager
def replaced(module: object, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Have a module call another method within the context. What a user has put on the instance comes back."""
    own = vars(module).get(name)
    setattr(module, name, method)
    try:
        yield
    finally:
        delattr(module, name)
        if own is not None:
            setattr(module, name, own)


_LOG = inspect.signature(LightningModule.log)
_SIGNATURE = _LOG.replace(parameters=list(_LOG.parameters.values())[1:])


def logged_as(
    module: LightningModule, change: Callable[[dict[str, Any]], dict[str, Any] | None]
) -> AbstractContextManager[None]:
    """Have a function decide, within the context, what `module.log` and `module.log_dict` log.

    Args:
        module: The module.
        change: Gets what `log` was given, by the names of Lightning's parameters, and returns what is to be logged
            instead; None for nothing.
    """
    log: Callable[..., None] = module.log

    def changed(*args: Any, **kwargs: Any) -> None:
        # Whatever the signature of a user's own `log`, it hands on what Lightning's takes.
        arguments = change(dict(_SIGNATURE.bind(*args, **kwargs).arguments))
        if arguments is not None:
            log(**arguments)

    return replaced(module, "log", changed)
