"""Numbers as they are sent: rounded once, at any magnitude, and what is not finite stays so."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_gradavg.wire.codecs import ALIGNMENT, CODECS, Codec, refuse_double_precision

# The largest error of one rounding to 8 or 11 significant bits, relative to the number: the unit roundoff of the type.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def random_rows(rows: int = 3, width: int = 512, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def encoded(codec: Codec, rows: torch.Tensor) -> torch.Tensor:
    payload = torch.empty(len(rows), codec.header + rows.shape[1], dtype=codec.wire, device=rows.device)
    codec.encode(rows, payload)
    return payload


def sent(name: str, rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return what arrives of rows."""
    received = torch.full(rows.shape, math.nan, dtype=dtype)
    CODECS[name].decode(encoded(CODECS[name], rows), received)
    return received


@pytest.mark.parametrize("codec", [*CODECS.values(), Codec(torch.float32), Codec(torch.float64)])
def test_rows_begin_at_aligned_addresses(codec):
    """A row of a multiple of numbers has a multiple of 16 bytes, its header included."""
    for width in (codec.multiple, 3 * codec.multiple):
        assert 0 == (codec.header + width) * codec.wire.itemsize % ALIGNMENT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_own_type_is_exact(dtype):
    """Numbers sent in their own type come back with all bits, those that are not finite as well."""
    rows = random_rows().to(dtype)
    rows[0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    codec, received = Codec(dtype), torch.empty_like(rows)
    codec.decode(encoded(codec, rows), received)
    torch.testing.assert_close(received, rows, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", CODECS)
def test_numbers_are_read_into_any_type(name, dtype):
    """What is read into memory of another type is what is decoded, rounded once more."""
    rows = random_rows()
    before = rows.clone()
    assert torch.equal(sent(name, rows).to(dtype), sent(name, rows, dtype))
    assert torch.equal(before, rows)


@pytest.mark.parametrize("exponent", [-120, -60, 0, 60, 120])
@pytest.mark.parametrize("name", ROUNDING)
def test_rounding_is_that_of_the_type_at_any_magnitude(name, exponent):
    """float16, which ends at 65504 and at 6e-8, neither overflows nor underflows: each number is rounded once."""
    rows = random_rows() * 2.0**exponent
    # A normal float16 is 2**-28 of the largest or more, and a normal bfloat16 a normal float32.
    normal = rows.abs() >= rows.abs().amax(1, keepdim=True) * 2.0**-28
    normal &= rows.abs() >= torch.finfo(torch.float32).tiny
    assert ((sent(name, rows) - rows).abs() <= ROUNDING[name] * rows.abs())[normal].all()


def test_float16_scale_is_a_power_of_two():
    """Numbers that float16 can hold next to the largest come back exactly, whatever their common power of two."""
    for exponent in (-130, -20, 0, 5, 100):
        rows = torch.tensor([[1.0, -1.5, 1.75, 2.0**-10], [3.0, 0.0, -0.0, 1.25]]) * 2.0**exponent
        assert torch.equal(rows, sent("float16", rows))


def test_float16_extremes():
    """The largest numbers that do not round to 2**128, the smallest, and rows of zeros survive."""
    largest, smallest = 1.9995 * 2.0**127, torch.finfo(torch.float32).smallest_normal
    rows = torch.tensor([[largest, -largest], [smallest, 0.0], [0.0, 0.0], [2.0**-149, 0.0]])
    received = sent("float16", rows)
    assert received.isfinite().all()
    torch.testing.assert_close(received[:3], rows[:3], rtol=ROUNDING["float16"], atol=0)
    assert [0.0, 0.0] == received[2].tolist()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ROUNDING)
def test_what_is_not_finite_stays_so_and_spoils_nothing(name, bad):
    """An infinite number or NaN arrives as itself, and its neighbours as if it were not there."""
    rows = random_rows()
    clean = sent(name, rows.index_fill(1, torch.tensor([5]), 0.0))
    rows[:, 5] = bad
    received = sent(name, rows)
    assert [str(bad)] * 3 == [str(value) for value in received[:, 5].tolist()]
    received[:, 5] = clean[:, 5]
    assert torch.equal(clean, received)


@pytest.mark.parametrize("name", CODECS)
def test_nothing_is_read(name):
    """A payload is made and read on an accelerator without a look at any number."""
    rows = torch.zeros(3, 512, device="meta")
    CODECS[name].decode(encoded(CODECS[name], rows), rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_double_precision_is_refused(dtype):
    """Who trains in double precision has asked for the digits that would be rounded away."""
    with pytest.raises(ValueError, match=rf"wire_dtype='float16' .* of 'w', which is {dtype}.* Leave wire_dtype out"):
        refuse_double_precision("float16", "'w'", dtype)
    refuse_double_precision("float16", "'w'", torch.float32)
