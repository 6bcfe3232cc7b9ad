"""What the machine does besides: the bytes of its interfaces, and the processor time of everybody else (Linux)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

__all__ = ["ForeignLoad", "sent_by"]

_STAT = Path("/proc/stat")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def sent_by(interface: str) -> Callable[[], int]:
    """Return a function that tells how many bytes a network interface has sent, headers included.

    Raises:
        ValueError: If there is no such interface.
    """
    counter = Path("/sys/class/net") / interface / "statistics" / "tx_bytes"
    if not counter.exists():
        names = sorted(path.name for path in counter.parents[2].iterdir()) if counter.parents[2].exists() else []
        raise ValueError(f"--interface={interface!r} is not a network interface of this machine; it has {names}.")
    return lambda: int(counter.read_text())


def _busy() -> float:
    """Return the seconds that all cores were busy with processes since the machine began, interrupts left out."""
    user, nice, system = map(int, _STAT.read_text().split(maxsplit=4)[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


class ForeignLoad:
    """How many cores are busy with anything but the ranks."""

    def __init__(self) -> None:
        self._machine = _BOOT.read_text().strip()
        self._begin()

    def _begin(self) -> None:
        self._since = time.perf_counter(), _busy(), time.process_time()

    def since_last(self) -> float:
        """Return the mean since the last call, of this rank's machine, at least 0; call it on all ranks."""
        wall, busy, own = self._since
        mine: tuple[str, float] = self._machine, time.process_time() - own
        # Emulated nodes are one machine.
        everyone: list[tuple[str, float]] = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        ranks = sum(seconds for machine, seconds in everyone if machine == self._machine)
        found = (_busy() - busy - ranks) / (time.perf_counter() - wall)
        self._begin()
        return max(0.0, found)
