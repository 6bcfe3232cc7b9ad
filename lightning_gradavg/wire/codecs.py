"""Numbers as bytes: each row of a payload goes to one rank, behind a header that says whether its sender failed.

A payload is a uint8 matrix. A row begins with two float32 words, the fault and a factor, and goes on with the numbers.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["BLOCK", "CODECS", "Codec", "Float16", "Int8", "Plain", "fault_of"]

BLOCK = 256
"""Numbers that share a scale in `Int8`."""

_HEADER = 8


class Codec(Protocol):
    """Turns rows of numbers into rows of bytes and back."""

    @property
    def dtype(self) -> torch.dtype:
        """What rows of numbers are and become."""
        ...

    @property
    def multiple(self) -> int:
        """What the length of a row must be a multiple of."""
        ...

    @property
    def lossy(self) -> bool:
        """Whether errors are so large that they must be fed back."""
        ...

    def row_bytes(self, width: int) -> int:
        """Return the size of a row of `width` numbers."""
        ...

    def encode(self, rows: Tensor, fault: int = 0) -> Tensor:
        """Return the payload of a matrix of `dtype`."""
        ...

    def decode(self, payload: Tensor) -> Tensor:
        """Return the matrix of a payload, of `dtype`."""
        ...


def _blank(codec: Codec, rows: Tensor, fault: int) -> tuple[Tensor, Tensor]:
    """Return an empty payload and its header."""
    payload = torch.empty(rows.shape[0], codec.row_bytes(rows.shape[1]), dtype=torch.uint8, device=rows.device)
    header = payload[:, :_HEADER].view(torch.float32)
    header[:, 0] = fault
    header[:, 1] = 1
    return payload, header


def fault_of(payload: Tensor) -> int:
    """Return the largest fault that the rows' senders reported, 0 for none. Reads the payload: not for accelerators."""
    return int(payload[:, :4].view(torch.float32).amax())


class Plain:
    """Numbers of one floating-point type, sent as those of another."""

    lossy = False

    def __init__(self, wire: torch.dtype, dtype: torch.dtype = torch.float32) -> None:
        self.wire, self.dtype = wire, dtype
        self.multiple = 4 // min(wire.itemsize, 4)

    def row_bytes(self, width: int) -> int:
        """Return the size of a row of `width` numbers."""
        return _HEADER + width * self.wire.itemsize

    def encode(self, rows: Tensor, fault: int = 0) -> Tensor:
        """Return the payload of a matrix of `dtype`."""
        payload, _ = _blank(self, rows, fault)
        payload[:, _HEADER:].view(self.wire).copy_(rows)
        return payload

    def decode(self, payload: Tensor) -> Tensor:
        """Return the matrix of a payload, of `dtype`."""
        return payload[:, _HEADER:].view(self.wire).to(self.dtype)


class Float16:
    """float32 as float16, each row times a power of two of its own.

    The power, which is exact to multiply by and to divide by, brings the row's largest finite magnitude into
    [2**14, 2**15): nothing overflows, and what underflows is below 2**-39 of the largest.
    """

    dtype = torch.float32
    multiple = 2
    lossy = False

    def row_bytes(self, width: int) -> int:
        """Return the size of a row of `width` numbers."""
        return _HEADER + 2 * width

    def encode(self, rows: Tensor, fault: int = 0) -> Tensor:
        """Return the payload of a float32 matrix."""
        payload, header = _blank(self, rows, fault)
        largest = rows.abs().amax(1)
        if largest.device.type != "cpu" or not largest.isfinite().all():
            largest = rows.abs().masked_fill(~rows.isfinite(), 0).amax(1)
        # The biased exponent b of a float32 stands in bits 23 to 30: 2**(b - 127) <= x < 2**(b - 126).
        power = (141 - (largest.view(torch.int32) >> 23)).clamp(max=126)
        header[:, 1] = _power_of_two(-power)
        payload[:, _HEADER:].view(torch.float16).copy_(rows * _power_of_two(power)[:, None])
        return payload

    def decode(self, payload: Tensor) -> Tensor:
        """Return the float32 matrix of a payload."""
        factor = payload[:, 4:_HEADER].view(torch.float32)
        return payload[:, _HEADER:].view(torch.float16).float() * factor


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent in float32, from its bits: a computed power may be off by a rounding."""
    bits: Tensor = (exponent + 127) << 23
    return bits.view(torch.float32)


class Int8:
    """float32 as integers from -127 to 127 times a float32 scale per block of 256.

    A block with a number that is not finite comes back as NaN.
    """

    dtype = torch.float32
    multiple = BLOCK
    lossy = True

    def row_bytes(self, width: int) -> int:
        """Return the size of a row of `width` numbers."""
        return _HEADER + width // BLOCK * 4 + width

    def encode(self, rows: Tensor, fault: int = 0) -> Tensor:
        """Return the payload of a float32 matrix."""
        payload, _ = _blank(self, rows, fault)
        blocks = rows.unflatten(1, (-1, BLOCK))
        largest = blocks.abs().amax(2)
        # A scale that is not a normal number has no reciprocal; such a block is sent as 0 and fed back.
        scale = (largest / 127).masked_fill(~largest.isfinite(), torch.nan)
        scale = scale.masked_fill(scale < torch.finfo(torch.float32).tiny, 0)
        inverse = (1 / scale).nan_to_num(0, posinf=0)
        integers = (blocks * inverse[:, :, None]).nan_to_num(0).round_().clamp_(-127, 127)
        middle = _HEADER + 4 * scale.shape[1]
        payload[:, _HEADER:middle].view(torch.float32).copy_(scale)
        payload[:, middle:].view(torch.int8).copy_(integers.flatten(1))
        return payload

    def decode(self, payload: Tensor) -> Tensor:
        """Return the float32 matrix of a payload."""
        blocks = (payload.shape[1] - _HEADER) // (4 + BLOCK)
        middle = _HEADER + 4 * blocks
        scale = payload[:, _HEADER:middle].view(torch.float32)
        integers = payload[:, middle:].view(torch.int8).float().unflatten(1, (blocks, BLOCK))
        numbers: Tensor = integers * scale[:, :, None]
        return numbers.flatten(1)


CODECS: dict[str, Codec] = {"bfloat16": Plain(torch.bfloat16), "float16": Float16(), "int8": Int8()}
"""By `wire_dtype`."""
