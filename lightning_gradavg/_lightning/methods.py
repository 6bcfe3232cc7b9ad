"""Methods of a module that are replaced for a while: a step that runs once per replica, a `log` that says more."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch import LightningModule

__all__ = ["logged_as", "replaced"]


@contextmanager
def replaced(module: object, name: str, method: Any) -> Iterator[None]:
    """Replace a method of a module within the context; a user's method on the instance comes back."""
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
    """Within the context, give `change` the arguments of `module.log` by name and log what it returns, unless None."""
    log: Callable[..., None] = module.log

    def changed(*args: Any, **kwargs: Any) -> None:
        # A user's own `log` hands on what Lightning's takes.
        arguments = change(dict(_SIGNATURE.bind(*args, **kwargs).arguments))
        if arguments is not None:
            log(**arguments)

    return replaced(module, "log", changed)
