"""A bucket on its way, in segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lightning_gradavg.rules import Weight
from lightning_gradavg.wire.feedback import Residuals
from lightning_gradavg.wire.transport import Work

__all__ = ["Segment", "Travelling", "columns_of", "read_columns"]


@dataclass(eq=False)
class Travelling:
    """A bucket under way.

    Attributes:
        buffer: What DDP gave.
        flat: Its numbers, in one dimension.
        factor: What they are multiplied by.
        wide: The type that they are summed in.
        width: Numbers in a part; the last parts may be shorter, or empty.
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
    width: int
    future: Future[Any]
    remaining: int = 0
    residuals: Residuals | None = None
    fault: int = 0
    error: Exception | None = None


@dataclass(eq=False)
class Segment:
    """The same columns of all parts of a bucket.

    Attributes:
        bucket: The bucket.
        start: The first column.
        stop: The column after the last.
        own: What this rank itself adds to the sum of the current hop: it is not read from the wire, and so is exact.
        received: What came last.
        work: Its arrival, or None.
    """

    bucket: Travelling
    start: int
    stop: int
    own: Tensor | None = None
    received: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.uint8))
    work: Work | None = None

    @property
    def columns(self) -> int:
        """Number of columns."""
        return self.stop - self.start

    def arrived(self) -> Tensor:
        """Return what came last, waiting for it."""
        work, self.work = self.work, None
        if work is not None:
            work.wait()
        return self.received


def columns_of(flat: Tensor, width: int, start: int, stop: int) -> Iterator[tuple[Any, Tensor]]:
    """Yield where numbers of a segment stand in the matrix of all parts, and a view of them in the bucket.

    The bucket may end within a part.
    """
    whole = flat.numel() // width
    yield slice(0, whole), flat[: whole * width].view(whole, width)[:, start:stop]
    rest = flat[whole * width :][start:stop]
    if rest.numel() > 0:
        yield whole, rest


def read_columns(bucket: Travelling, parts: int, start: int, stop: int) -> Tensor:
    """Return columns of every part of a bucket, times the factor, with zeros beyond its end."""
    rows = torch.zeros(parts, stop - start, dtype=bucket.wide, device=bucket.flat.device)
    factor = bucket.factor()
    if isinstance(factor, Tensor) or factor != 0:
        for place, columns in columns_of(bucket.flat, bucket.width, start, stop):
            rows[place][..., : columns.shape[-1]].copy_(columns)
    if isinstance(factor, Tensor):
        # 0 times NaN is NaN: a discarded gradient is selected away.
        rows.mul_(factor).masked_fill_(factor == 0, 0)
    elif factor not in (0, 1):
        rows.mul_(factor)
    return rows
