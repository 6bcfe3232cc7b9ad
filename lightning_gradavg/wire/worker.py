"""A thread that runs calls in the order in which they were submitted."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Worker"]

_Call = tuple[Callable[..., None], tuple[Any, ...]]


class Worker:
    """One thread, first in first out. It ends when it is closed, collected, or the interpreter ends.

    Gloo matches collectives by the order in which each rank starts them in a process group. What starts more than one
    for a bucket must not start them when another completes, which is at another moment on every rank: ranks hang or
    abort as soon as two buckets are in flight. A worker that alone uses a process group keeps one order on all ranks.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # A daemon: where a peer is lost in the middle of a collective, the interpreter must not wait for the thread.
        self._thread = threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._calls.put, None)

    def submit(self, call: Callable[..., None], *arguments: Any) -> None:
        """Run `call(*arguments)` after all that was submitted before; what it raises, it must handle itself."""
        self._calls.put((call, arguments))

    def end(self) -> None:
        """End the thread after what was submitted, without waiting for it."""
        self._end()

    def close(self) -> None:
        """End the thread after what was submitted, and wait for it."""
        self._end()
        self._thread.join()


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    with torch.no_grad():
        while (job := calls.get()) is not None:
            call, arguments = job
            call(*arguments)
            # What the call held must not live until the next one comes.
            del job, call, arguments
