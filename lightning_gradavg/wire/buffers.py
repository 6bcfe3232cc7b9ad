"""Memory that segments travel in, used again by others."""

from __future__ import annotations

import threading
from collections import defaultdict

import torch
from torch import Tensor

__all__ = ["Buffers"]


class Buffers:
    """Pieces of memory that are lent and come back, of a CPU.

    The C library returns freed memory of megabytes to the system, and every page of what comes instead is cleared and
    mapped at its first use: a fifth of the processor time of a sum over ranks. Torch keeps the memory of accelerators.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, size: int) -> Tensor:
        """Return some bytes of a piece of memory that is nobody else's until `give` gets them back."""
        # Segments are of a few sizes, nearly but not quite equal.
        capacity = 1 << (size - 1).bit_length()
        with self._lock:
            free = self._free[capacity]
            piece = free.pop() if free else None
        return (torch.empty(capacity, dtype=torch.uint8) if piece is None else piece)[:size]

    def give(self, taken: Tensor) -> None:
        """Get back what `take` returned."""
        whole = taken.untyped_storage()
        piece = torch.empty(0, dtype=torch.uint8).set_(whole)
        with self._lock:
            self._free[len(whole)].append(piece)
