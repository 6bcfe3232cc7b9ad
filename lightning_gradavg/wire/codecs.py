"""Numbers as they are sent: in their own type, or in one of half the bytes.

A *payload* is a matrix of the type that is sent. Each row goes to one rank, and begins with a header where a codec
needs one, of 16 bytes: NCCL moves rows in packs of 16 bytes only where all of them begin at such an address.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "CODECS", "Codec", "Float16", "refuse_double_precision"]

ALIGNMENT = 16
"""Bytes that the size of a row is a multiple of."""


class Codec:
    """Sends numbers as numbers of another floating-point type, or of their own.

    Args:
        wire: The type that is sent.

    Attributes:
        header: Numbers of that type before those of a row.
        multiple: What the length of a row must be a multiple of, for all rows to be aligned.
    """

    header: int = 0

    def __init__(self, wire: torch.dtype) -> None:
        self.wire = wire
        self.multiple = ALIGNMENT // wire.itemsize

    def encode(self, rows: Tensor, payload: Tensor) -> None:
        """Write `rows`, shape `(n, width)`, into a payload of shape `(n, header + width)`."""
        payload.copy_(rows)

    def decode(self, payload: Tensor, rows: Tensor) -> None:
        """Write the numbers of a payload into `rows`, which may be of any floating-point type."""
        rows.copy_(payload)


class Float16(Codec):
    """float32 as float16, each row times a power of two of its own, which stands in its header.

    The power, which is exact to multiply by and to divide by, brings the row's largest finite magnitude into
    [2**14, 2**15): nothing overflows, and what underflows is below 2**-39 of the largest.
    """

    header = 8

    def __init__(self) -> None:
        super().__init__(torch.float16)

    def encode(self, rows: Tensor, payload: Tensor) -> None:
        """As in `Codec`; what is not finite stays so."""
        largest = rows.abs().nan_to_num_(0, 0, 0).amax(1, keepdim=True)
        # The biased exponent b of a float32 stands in bits 23 to 30: 2**(b - 127) <= x < 2**(b - 126).
        power = (141 - (largest.view(torch.int32) >> 23)).clamp_(max=126)
        payload[:, :2].view(torch.float32).copy_(_power_of_two(-power))
        payload[:, self.header :].copy_(rows * _power_of_two(power))

    def decode(self, payload: Tensor, rows: Tensor) -> None:
        """As in `Codec`."""
        numbers = payload[:, self.header :].float().mul_(payload[:, :2].view(torch.float32))
        rows.copy_(numbers)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent in float32, from its bits: a computed power may be off by a rounding."""
    bits: Tensor = (exponent + 127) << 23
    return bits.view(torch.float32)


CODECS: Mapping[str, Codec] = MappingProxyType({"bfloat16": Codec(torch.bfloat16), "float16": Float16()})
"""By `wire_dtype`."""


def refuse_double_precision(wire_dtype: str, label: str, dtype: torch.dtype) -> None:
    """Raise a ValueError if gradients of `dtype` would be rounded more than anyone who chose it can want."""
    if dtype in (torch.float64, torch.complex128):
        raise ValueError(
            f"wire_dtype={wire_dtype!r} would round the gradient of {label}, which is {dtype}, to a quarter of its"
            " digits or fewer. Leave wire_dtype out, or train in float32."
        )
