"""Weights of every type that users count with."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from lightning_gradavg.weights import as_weight, weight_problem

CPU = torch.device("cpu")
META = torch.device("meta")
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
]


@pytest.mark.parametrize(
    "value",
    [3, 3.0, np.int64(3), np.float32(3), np.float64(3), np.uint8(3), np.array(3), Fraction(3), Decimal(3)],
    ids=lambda value: type(value).__name__,
)
def test_numbers(value: Any) -> None:
    """Case 32: ints, floats and NumPy scalars are weights; the weight is a float."""
    weight = as_weight(value, CPU)
    assert (float, 3.0) == (type(weight), weight)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Case 32: a tensor with one element, of any dtype, is a weight."""
    weight = as_weight(torch.full(shape, 3, dtype=dtype), CPU)
    assert (float, 3.0) == (type(weight), weight)


def test_bool_tensor() -> None:
    """A single truth value counts as one or nothing."""
    assert [0.0, 1.0] == [as_weight(torch.tensor(value), CPU) for value in (False, True)]


def test_weight_is_not_rounded() -> None:
    """Case 32: counts beyond float32 stay exact."""
    assert 2.0**24 + 1 == as_weight(torch.tensor(2**24 + 1), CPU)
    assert 2.0**40 + 1 == as_weight(2**40 + 1, torch.device("meta"))


def test_weight_is_detached() -> None:
    """A weight that requires grad is taken without its graph."""
    assert 3.0 == as_weight(torch.tensor(3.0, requires_grad=True) * 1, CPU)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64], ids=str)
def test_tensor_on_an_accelerator_stays_there(dtype: torch.dtype) -> None:
    """A tensor off the CPU is not read: it becomes a detached 0-dim float64 tensor on the gradients' device."""
    weight = as_weight(torch.empty(1, dtype=dtype, device=META, requires_grad=dtype.is_floating_point), META)
    assert isinstance(weight, torch.Tensor)
    assert (torch.float64, (), "meta", False) == (weight.dtype, weight.shape, weight.device.type, weight.requires_grad)
    assert weight_problem(weight) is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "None of type NoneType"),
        ("3", "'3' of type str"),
        (b"3", "b'3' of type bytes"),
        ([3], "[3] of type list"),
        (3j, "3j of type complex"),
        pytest.param(10**400, "too large for a float", id="10**400"),
        (np.array([1, 2]), "of type ndarray"),
        (torch.ones(2), "a tensor of shape (2,) and torch.float32"),
        (torch.ones(0), "a tensor of shape (0,) and torch.float32"),
        (torch.tensor(1j), "a tensor of shape () and torch.complex64"),
    ],
    ids=str,
)
def test_what_is_not_one_number(value: Any, said: str) -> None:
    """What is not one number is quoted with its type."""
    with pytest.raises(TypeError, match="a weight is one number, got") as caught:
        as_weight(value, CPU)
    assert said in str(caught.value)


@pytest.mark.parametrize("weight", [0.0, -0.0, 5e-324, 1.0, 1e300])
def test_usable(weight: float) -> None:
    """Every finite number >= 0 is usable, any unit of measure."""
    assert weight_problem(weight) is None


@pytest.mark.parametrize("weight", [-1.0, -5e-324, math.nan, math.inf, -math.inf])
def test_unusable(weight: float) -> None:
    """Case 32: a negative, infinite or NaN weight is quoted."""
    assert f"weight {weight!r} is not a finite number >= 0" == weight_problem(weight)
