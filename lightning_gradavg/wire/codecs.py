"""Numbers as bytes: each row of a payload goes to one rank, behind a header that says whether its sender failed.

A payload is a uint8 matrix. A row begins with two float32 words, the fault and a factor, and goes on with the numbers.
Passes over the numbers are what a codec costs, so there are as few as can be, into memory that is there already. Of the
reductions of torch, `amax` and `amin` are the fast ones on CPUs; `all`, `aminmax` and norms of rows take twenty times
as long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

__all__ = ["BLOCK", "CODECS", "HEADER", "Codec", "Float16", "Int8", "Plain", "fault_of"]

BLOCK = 256
"""Numbers that share a scale in `Int8`."""

HEADER = 8
"""Bytes before the numbers of a row."""


class Codec(ABC):
    """Turns rows of numbers into rows of bytes and back.

    Attributes:
        dtype: What rows of numbers are and become.
        multiple: What the length of a row must be a multiple of.
        lossy: Whether errors are so large that they must be fed back.
    """

    dtype: torch.dtype = torch.float32
    multiple: int = 1
    lossy: bool = False

    @abstractmethod
    def row_bytes(self, width: int) -> int:
        """Return the size of a row of `width` numbers."""

    @abstractmethod
    def write(self, rows: Tensor, payload: Tensor, factor: float = 1.0, lost: Tensor | None = None) -> None:
        """Write numbers times a factor into a payload with headers.

        Args:
            rows: The numbers, of `dtype`.
            payload: As many rows of bytes, of which the fault is left as it is.
            factor: Not 0.
            lost: Receives what the payload does not say of the numbers; of a lossy codec only. Where that is not
                finite, it stays as it is.
        """

    @abstractmethod
    def decode(self, payload: Tensor) -> Tensor:
        """Return the numbers of a payload, of `dtype`; perhaps in the payload's own memory."""

    def read(self, payload: Tensor, rows: Tensor) -> None:
        """Write the numbers of a payload into `rows`, which may be of another type."""
        rows.copy_(self.decode(payload))

    def blank(self, rows: int, width: int, fault: int, device: torch.device) -> Tensor:
        """Return a payload whose headers say a fault and a factor of 1, and whose numbers are not written."""
        payload = torch.empty(rows, self.row_bytes(width), dtype=torch.uint8, device=device)
        header = payload[:, :HEADER].view(torch.float32)
        header[:, 0] = fault
        header[:, 1] = 1
        return payload

    def encode(self, rows: Tensor, fault: int = 0) -> Tensor:
        """Return the payload of a matrix of `dtype`."""
        payload = self.blank(rows.shape[0], rows.shape[1], fault, rows.device)
        self.write(rows, payload)
        return payload


def fault_of(payload: Tensor) -> int:
    """Return the largest fault that the rows' senders reported, 0 for none. Reads the payload: not for accelerators."""
    return int(payload[:, :4].view(torch.float32).amax()) if len(payload) else 0


class Plain(Codec):
    """Numbers of one floating-point type, sent as those of another."""

    def __init__(self, wire: torch.dtype, dtype: torch.dtype = torch.float32) -> None:
        self.wire, self.dtype = wire, dtype
        self.multiple = 4 // min(wire.itemsize, 4)

    def row_bytes(self, width: int) -> int:
        """Return the size of a row of `width` numbers."""
        return HEADER + width * self.wire.itemsize

    def write(self, rows: Tensor, payload: Tensor, factor: float = 1.0, lost: Tensor | None = None) -> None:
        """As in `Codec`."""
        del lost
        numbers = payload[:, HEADER:].view(self.wire)
        if factor == 1:
            numbers.copy_(rows)
        else:
            torch.mul(rows, factor, out=numbers)

    def read(self, payload: Tensor, rows: Tensor) -> None:
        """As in `Codec`."""
        rows.copy_(payload[:, HEADER:].view(self.wire))

    def decode(self, payload: Tensor) -> Tensor:
        """As in `Codec`."""
        return payload[:, HEADER:].view(self.wire).to(self.dtype)


class Float16(Codec):
    """float32 as float16, each row times a power of two of its own.

    The power, which is exact to multiply by and to divide by, brings the row's largest finite magnitude into
    [2**14, 2**15): nothing overflows, and what underflows is below 2**-39 of the largest.
    """

    multiple = 2

    def row_bytes(self, width: int) -> int:
        """Return the size of a row of `width` numbers."""
        return HEADER + 2 * width

    def write(self, rows: Tensor, payload: Tensor, factor: float = 1.0, lost: Tensor | None = None) -> None:
        """As in `Codec`."""
        del lost
        rows = rows if factor == 1 else rows * factor
        largest = _magnitude(rows)
        if largest.device.type != "cpu" or not largest.isfinite().all():
            largest = rows.abs().masked_fill(~rows.isfinite(), 0).amax(1)
        # The biased exponent b of a float32 stands in bits 23 to 30: 2**(b - 127) <= x < 2**(b - 126).
        power = (141 - (largest.view(torch.int32) >> 23)).clamp(max=126)
        payload[:, 4:HEADER].view(torch.float32)[:, 0] = _power_of_two(-power)
        payload[:, HEADER:].view(torch.float16).copy_(rows * _power_of_two(power)[:, None])

    def decode(self, payload: Tensor) -> Tensor:
        """As in `Codec`."""
        return payload[:, HEADER:].view(torch.float16).float().mul_(payload[:, 4:HEADER].view(torch.float32))


def _magnitude(rows: Tensor) -> Tensor:
    """Return the largest magnitude along the last dimension, or NaN where that holds one."""
    return torch.maximum(rows.amax(-1), rows.amin(-1).neg_())


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent in float32, from its bits: a computed power may be off by a rounding."""
    bits: Tensor = (exponent + 127) << 23
    return bits.view(torch.float32)


class Int8(Codec):
    """float32 as integers from -127 to 127 times a float32 scale per block of 256.

    A block with a number that is not finite comes back as NaN.
    """

    multiple = BLOCK
    lossy = True

    def row_bytes(self, width: int) -> int:
        """Return the size of a row of `width` numbers."""
        return HEADER + width // BLOCK * 4 + width

    def write(self, rows: Tensor, payload: Tensor, factor: float = 1.0, lost: Tensor | None = None) -> None:
        """As in `Codec`."""
        rows = rows if factor == 1 else rows * factor
        blocks = rows.unflatten(1, (-1, BLOCK))
        largest = _magnitude(blocks)
        # A scale that is not a normal number has no reciprocal; such a block is sent as 0 and fed back.
        scale = (largest / 127).masked_fill_(~largest.isfinite(), torch.nan)
        scale.masked_fill_(scale < torch.finfo(torch.float32).tiny, 0)
        inverse = scale.reciprocal().nan_to_num_(0, posinf=0)
        integers = torch.mul(blocks, inverse[:, :, None]).round_()
        middle = HEADER + 4 * scale.shape[1]
        payload[:, HEADER:middle].view(torch.float32).copy_(scale)
        # Where a number is not finite, neither is this product, and its integer is anything: NaN is the scale.
        payload[:, middle:].view(torch.int8).unflatten(1, (-1, BLOCK)).copy_(integers)
        if lost is None:
            return
        left = lost.unflatten(1, (-1, BLOCK))
        if blocks.device.type == "cpu" and (scale * 127).isfinite().all():
            torch.addcmul(blocks, integers, scale[:, :, None], value=-1, out=left)
        else:
            unsaid = torch.addcmul(blocks, integers, scale[:, :, None], value=-1)
            left.copy_(torch.where(unsaid.isfinite(), unsaid, left))

    def read(self, payload: Tensor, rows: Tensor) -> None:
        """As in `Codec`."""
        scale, integers = self._parts(payload)
        if rows.dtype == torch.float32:
            torch.mul(integers, scale, out=rows.unflatten(1, (-1, BLOCK)))
        else:
            rows.copy_(self.decode(payload))

    def decode(self, payload: Tensor) -> Tensor:
        """As in `Codec`."""
        scale, integers = self._parts(payload)
        numbers: Tensor = integers * scale
        return numbers.flatten(1)

    def _parts(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        blocks = (payload.shape[1] - HEADER) // (4 + BLOCK)
        middle = HEADER + 4 * blocks
        scale = payload[:, HEADER:middle].view(torch.float32)
        return scale[:, :, None], payload[:, middle:].view(torch.int8).unflatten(1, (blocks, BLOCK))


CODECS: dict[str, Codec] = {"bfloat16": Plain(torch.bfloat16), "float16": Float16(), "int8": Int8()}
"""By `wire_dtype`."""
