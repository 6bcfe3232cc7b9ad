"""A bucket on its way, in segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lightning_gradavg.rules import Weight
from lightning_gradavg.wire.feedback import Residual, Residuals
from lightning_gradavg.wire.transport import Work

__all__ = ["Segment", "Travelling"]


@dataclass(eq=False)
class Travelling:
    """A bucket under way.

    Attributes:
        buffer: What DDP gave.
        flat: Its numbers, in one dimension.
        factor: What they are multiplied by.
        wide: The type that they are summed in.
        future: Of the buffer with the sum in it.
        remaining: Segments that have not arrived.
        residuals: Of a lossy codec, otherwise None.
        fault: 1 + the rank on which something failed, as far as known; 0 if nothing did.
        error: What failed on this rank, or None.
    """

    buffer: Tensor
    flat: Tensor
    factor: Callable[[], Weight]
    wide: torch.dtype
    future: Future[Any]
    remaining: int = 0
    residuals: Residuals | None = None
    fault: int = 0
    error: Exception | None = None


@dataclass(eq=False)
class Segment:
    """Consecutive numbers of a bucket, cut into equal parts, one for each rank.

    Attributes:
        bucket: The bucket.
        start: The first number.
        columns: Numbers in a part; the last parts of the last segment may be shorter, or empty.
        parts: Number of parts.
        residual: What a lossy codec owes, or None.
        own: What this rank itself adds to the sum of the current hop, and what that is to be multiplied by; it is not
            read from the wire, and so is exact. None if something failed.
        received: What came last.
        gathered: The sum, of which parts that are not there yet are not written.
        work: Its arrival, or None.
        taken: Memory of `Buffers` that it travels in.
    """

    bucket: Travelling
    start: int
    columns: int
    parts: int
    residual: Residual | None = None
    own: tuple[Tensor, float] | None = None
    received: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.uint8))
    gathered: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.uint8))
    work: Work | None = None
    taken: list[Tensor] = field(default_factory=list)

    def arrived(self) -> Tensor:
        """Return what came last, waiting for it."""
        work, self.work = self.work, None
        if work is not None:
            work.wait()
        return self.received

    @property
    def numbers(self) -> Tensor:
        """What the bucket has of the segment: a view, in one dimension."""
        return self.bucket.flat[self.start : self.start + self.parts * self.columns]

    def read(self) -> tuple[Tensor, float]:
        """Return all parts of the bucket, of the type of the sum, and what they are still to be multiplied by.

        They are the memory of the bucket itself where nothing else is needed. Beyond its end are zeros.
        """
        numbers, factor, size = self.numbers, self.bucket.factor(), self.parts * self.columns
        residuals = self.bucket.residuals
        carried = None if residuals is None else residuals.carried
        if len(numbers) < size or carried is not None or isinstance(factor, Tensor) or factor == 0:
            rows = torch.zeros(size, dtype=self.bucket.wide, device=numbers.device)
            here = rows[: len(numbers)]
            if isinstance(factor, Tensor):
                # 0 times NaN is NaN: a discarded gradient is selected away.
                here.copy_(numbers).mul_(factor).masked_fill_(factor == 0, 0)
            elif factor != 0:
                here.copy_(numbers).mul_(factor)
            if carried is not None:
                here += carried[self.start : self.start + len(numbers)]
            return rows.view(self.parts, self.columns), 1.0
        return numbers.to(self.bucket.wide).view(self.parts, self.columns), factor

    def write(self, fill: Callable[[Tensor], None]) -> None:
        """Have a function fill the matrix of all parts, and keep it in the bucket."""
        numbers = self.numbers
        if len(numbers) == self.parts * self.columns:
            fill(numbers.view(self.parts, self.columns))
            return
        rows = torch.empty(self.parts, self.columns, dtype=self.bucket.wide, device=numbers.device)
        fill(rows)
        numbers.copy_(rows.flatten()[: len(numbers)])
