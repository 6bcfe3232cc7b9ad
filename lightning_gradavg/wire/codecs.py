"""Numbers as bytes: each row of a payload goes to one rank, behind a header that says whether its sender failed.

A payload is a uint8 matrix. A row begins with two float32 words, the fault and a factor, and goes on with the numbers.
Passes over the numbers are what a codec costs. So there are as few as can be, and where several follow each other, they
go over a piece that fits a processor's caches. Of the reductions of torch, `amax` and `amin` are the fast ones on CPUs;
`all`, `aminmax` and norms of rows take twenty times as long.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["BLOCK", "CODECS", "HEADER", "Codec", "Float16", "Int8", "Plain", "fault_of"]

BLOCK = 256
"""Numbers that share a scale in `Int8`."""

HEADER = 8
"""Bytes before the numbers of a row."""

_PIECE = 2**17
"""Numbers that one pass after another goes over on a CPU: a few times 512 KiB fit its caches."""


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
    def write(self, rows: Tensor, payload: Tensor, factor: float = 1.0, owed: Tensor | None = None) -> None:
        """Write numbers times a factor into a payload with headers.

        Args:
            rows: The numbers, of `dtype`.
            payload: As many rows of bytes, of which the fault is left as it is.
            factor: Not 0.
            owed: Of a lossy codec: what earlier payloads did not say, which is added, and then what this one does not
                say. After numbers that are not finite it is of no use.
        """

    @abstractmethod
    def decode(self, payload: Tensor) -> Tensor:
        """Return the numbers of a payload, of `dtype`; perhaps in the payload's own memory."""

    def lost(self, payload: Tensor) -> Tensor:
        """Return whether any number of a payload is not finite; of a lossy codec only."""
        raise NotImplementedError

    def read(self, payload: Tensor, rows: Tensor) -> None:
        """Write the numbers of a payload into `rows`, which may be of another type."""
        rows.copy_(self.decode(payload))

    def blank(self, rows: int, width: int, fault: int, device: torch.device) -> Tensor:
        """Return a payload whose headers say a fault and a factor of 1, and whose numbers are not written."""
        payload = torch.empty(rows, self.row_bytes(width), dtype=torch.uint8, device=device)
        self.address(payload, fault)
        return payload

    def address(self, payload: Tensor, fault: int) -> None:
        """Write headers that say a fault and a factor of 1."""
        header = payload[:, :HEADER].view(torch.float32)
        header[:, 0] = fault
        header[:, 1] = 1

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

    def write(self, rows: Tensor, payload: Tensor, factor: float = 1.0, owed: Tensor | None = None) -> None:
        """As in `Codec`."""
        del owed
        numbers = payload[:, HEADER:].view(self.wire)
        if factor == 1:
            numbers.copy_(rows)
            return
        for piece in _pieces(rows):
            if self.wire == self.dtype:
                torch.mul(rows[:, piece], factor, out=numbers[:, piece])
            else:
                numbers[:, piece].copy_(torch.mul(rows[:, piece], factor, out=_scratch.like(rows[:, piece])))

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

    def write(self, rows: Tensor, payload: Tensor, factor: float = 1.0, owed: Tensor | None = None) -> None:
        """As in `Codec`."""
        del owed
        largest = _magnitude(rows)
        if largest.device.type != "cpu" or not largest.isfinite().all():
            largest = rows.abs().masked_fill(~rows.isfinite(), 0).amax(1)
        # The biased exponent b of a float32 stands in bits 23 to 30: 2**(b - 127) <= x < 2**(b - 126).
        power = (141 - ((largest * abs(factor)).view(torch.int32) >> 23)).clamp(max=126)
        payload[:, 4:HEADER].view(torch.float32)[:, 0] = _power_of_two(-power)
        halves, scale = payload[:, HEADER:].view(torch.float16), _power_of_two(power)[:, None]
        for piece in _pieces(rows):
            scratch = _scratch.like(rows[:, piece])
            numbers = rows[:, piece] if factor == 1 else torch.mul(rows[:, piece], factor, out=scratch)
            halves[:, piece].copy_(torch.mul(numbers, scale, out=scratch))

    def read(self, payload: Tensor, rows: Tensor) -> None:
        """As in `Codec`."""
        halves, scale = payload[:, HEADER:].view(torch.float16), payload[:, 4:HEADER].view(torch.float32)
        for piece in _pieces(halves):
            scratch = _scratch.like(halves[:, piece]) if rows.dtype != torch.float32 else rows[:, piece]
            torch.mul(scratch.copy_(halves[:, piece]), scale, out=rows[:, piece])

    def decode(self, payload: Tensor) -> Tensor:
        """As in `Codec`."""
        rows = torch.empty(payload.shape[0], (payload.shape[1] - HEADER) // 2, device=payload.device)
        self.read(payload, rows)
        return rows


class _Scratch(threading.local):
    """Memory of a thread for one piece: the C library would fetch it from the system again and again."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def like(self, rows: Tensor) -> Tensor:
        """Return float32 in the shape of a piece, not written, until the thread asks again."""
        if rows.device.type != "cpu":
            return torch.empty(rows.shape, device=rows.device)
        if self._memory.numel() < rows.numel():
            self._memory = torch.empty(rows.numel())
        return self._memory[: rows.numel()].view(rows.shape)


_scratch = _Scratch()


def _pieces(rows: Tensor) -> Iterator[slice]:
    """Cut the columns of a matrix into pieces for a CPU's cache; on an accelerator a piece would only be a launch."""
    width = rows.shape[1]
    piece = width if rows.device.type != "cpu" else max(BLOCK, _PIECE // rows.shape[0] // BLOCK * BLOCK)
    return (slice(start, min(start + piece, width)) for start in range(0, width, piece))


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

    def write(self, rows: Tensor, payload: Tensor, factor: float = 1.0, owed: Tensor | None = None) -> None:
        """As in `Codec`."""
        scale, integers = self._parts(payload)
        for piece in _pieces(rows):
            of_piece = slice(piece.start // BLOCK, piece.stop // BLOCK)
            if owed is not None:
                numbers = owed[:, piece].add_(rows[:, piece], alpha=factor)
            else:
                numbers = rows[:, piece] if factor == 1 else rows[:, piece] * factor
            blocks = numbers.unflatten(1, (-1, BLOCK))
            largest = _magnitude(blocks)[..., None]
            # A scale that is not a normal number has no reciprocal; such a block is sent as 0 and fed back.
            exact = (largest / 127).masked_fill_(~largest.isfinite(), torch.nan)
            exact.masked_fill_(exact < torch.finfo(torch.float32).tiny, 0)
            inverse = exact.reciprocal().nan_to_num_(0, posinf=0)
            whole = torch.mul(blocks, inverse, out=_scratch.like(blocks)).round_()
            scale[:, of_piece] = exact
            # Where a number is not finite, neither is this product, and its integer is anything: NaN is the scale.
            integers[:, of_piece] = whole
            if owed is not None:
                blocks.addcmul_(whole, exact, value=-1)

    def read(self, payload: Tensor, rows: Tensor) -> None:
        """As in `Codec`."""
        scale, integers = self._parts(payload)
        for piece in _pieces(rows):
            of_piece = slice(piece.start // BLOCK, piece.stop // BLOCK)
            blocks = rows[:, piece].unflatten(1, (-1, BLOCK))
            scratch = blocks if rows.dtype == torch.float32 else _scratch.like(blocks)
            torch.mul(scratch.copy_(integers[:, of_piece]), scale[:, of_piece], out=blocks)

    def decode(self, payload: Tensor) -> Tensor:
        """As in `Codec`."""
        width = (payload.shape[1] - HEADER) // (4 + BLOCK) * BLOCK
        rows = torch.empty(payload.shape[0], width, device=payload.device)
        self.read(payload, rows)
        return rows

    def lost(self, payload: Tensor) -> Tensor:
        """As in `Codec`."""
        return self._parts(payload)[0].amax().isnan()

    def _parts(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scale of each block, and its integers: shapes `(rows, blocks, 1)` and `(rows, blocks, 256)`."""
        blocks = (payload.shape[1] - HEADER) // (4 + BLOCK)
        middle = HEADER + 4 * blocks
        scale = payload[:, HEADER:middle].view(torch.float32)
        return scale[:, :, None], payload[:, middle:].view(torch.int8).unflatten(1, (blocks, BLOCK))


CODECS: dict[str, Codec] = {"bfloat16": Plain(torch.bfloat16), "float16": Float16(), "int8": Int8()}
"""By `wire_dtype`."""
