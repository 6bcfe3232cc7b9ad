"""What the simulated device saw: races, memory freed early, waits of the host, launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from accelerator.device import load, wire

__all__ = ["Seen", "Wait", "observed", "recorded", "reset", "seen"]


class Wait(NamedTuple):
    """The host waited for the device.

    Attributes:
        what: What it did: "item", "copy to the host", "event.synchronize", an operator.
        where: The innermost line, and up to three of the package and the tests that led there; or a thread of torch's
            own, such as autograd's, which has no lines.
    """

    what: str
    where: str


@dataclass
class Seen:
    """What happened on one rank's device.

    Attributes:
        races: Accesses to the same bytes that nothing orders, and early reads of pinned memory.
        early_frees: Memory given back while another stream may still use it.
        waits: Waits of the host, in order.
        launches: Names of all that was launched, in order: operators, copies, collectives as "nccl:all_reduce".
    """

    races: list[str] = field(default_factory=list)
    early_frees: list[str] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)

    def waits_in(self, part: str) -> list[Wait]:
        """Return the waits whose innermost line has `part` in it: "lightning_gradavg/" for those of the package."""
        return [wait for wait in self.waits if part in wait.where.split(" < ")[0]]


def seen() -> Seen:
    """Return what happened since `reset`."""
    engine = load()
    waits = [Wait(what, where or "a thread of torch's own") for what, where in engine.waits()]
    return Seen(engine.races(), engine.early_frees(), waits, engine.launches())


@contextmanager
def recorded() -> Iterator[Seen]:
    """Yield a `Seen` that holds, after the block, what happened within it."""
    before, block = seen(), Seen()
    yield block
    after = seen()
    for name, values in vars(after).items():
        getattr(block, name).extend(values[len(getattr(before, name)) :])


def reset() -> None:
    """Forget all findings and accesses, as if the host had waited for the whole device. Call it on all ranks."""
    load().reset()
    if wire() is not None:
        wire().renew()


def observed(body: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Seen]:
    """Body: call another, and return its result and what the device saw of it.

    Ranks that end while others wait for them in a collective get the error that says so.
    """
    reset()
    result = body(*args, **kwargs)
    everything = seen()
    wire().meet("the end of the test", timedelta(seconds=10))
    return result, everything
