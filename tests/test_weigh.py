"""Weights of every type, the terms of a loss, and gradients weighed at the backward."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_gradavg.reduction.weigh import WeighedLoss, weigh_terms
from lightning_gradavg.reduction.weights import MOST_TERMS, WHOLE_LOSS, MicroBatch, Weights, as_weight, loss_terms
from lightning_gradavg.rules import RULES, Rule

CPU, META = torch.device("cpu"), torch.device("meta")
WEIGHTED = RULES["weighted_mean"]
FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
TENSORS = [
    torch.full(shape, 3, dtype=dtype, requires_grad=dtype in FLOATING)
    for shape in ((), (1,), (1, 1))
    for dtype in (*FLOATING, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
]
NUMBERS = [3, 3.0, np.int64(3), np.float32(3), np.float64(3), np.uint8(3), np.array(3), Fraction(3), Decimal(3)]


@pytest.mark.parametrize("value", [*NUMBERS, *TENSORS], ids=repr)
def test_numbers_and_tensors_of_one_are_weights(value: Any) -> None:
    """Case 32: of any type, and read as a float of the host."""
    weight = as_weight(value, CPU)
    assert (float, 3.0) == (type(weight), weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64], ids=str)
def test_tensor_on_an_accelerator_stays_there(dtype: torch.dtype) -> None:
    """A tensor off the CPU is not read, but detached, 0-dim and float64 there; a number stays on the host."""
    weight = as_weight(torch.empty(1, dtype=dtype, device=META, requires_grad=dtype.is_floating_point), META)
    assert (torch.float64, (), "meta", False) == (weight.dtype, weight.shape, weight.device.type, weight.requires_grad)
    assert 3.0 == as_weight(3, META)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "None of type NoneType"),
        ("3", "'3' of type str"),
        (b"3", "b'3' of type bytes"),
        ([3], "[3] of type list"),
        (3j, "3j of type complex"),
        pytest.param(10**400, "of type int", id="10**400"),
        (np.array([1, 2]), "of type ndarray"),
        (torch.ones(2), "a tensor of shape (2,) and torch.float32"),
        (torch.ones(0), "a tensor of shape (0,) and torch.float32"),
        (torch.tensor(1j), "a tensor of shape () and torch.complex64"),
        (torch.ones(2, device=META), "a tensor of shape (2,) and torch.float32"),
    ],
    ids=str,
)
def test_what_is_not_one_number(value: Any, said: str) -> None:
    with pytest.raises(TypeError, match="a weight is one number, got") as caught:
        as_weight(value, CPU)
    assert said in str(caught.value)


def reader(rule: Rule = WEIGHTED, **told: Any) -> Weights:
    return Weights(rule, CPU, told.get("warn", print), told.get("tell", print))


@pytest.mark.parametrize(
    ("given", "weights"),
    [
        ({}, {"": 5.0}),
        ({"samples": 3}, {"": 3.0}),
        ({"weight": 7}, {"": 7.0}),
        ({"weight": {"cls": 2, "box": torch.tensor(4)}}, {"box": 4.0, "cls": 2.0}),
        ({"rule": RULES["sum"], "weight": "ignored"}, {"": 1.0}),
        ({"samples": 0}, {"": 0.0}),
        ({"samples": 0, "weight": 3}, {"": 0.0}),
        ({"samples": 0, "weight": {"cls": 1, "box": 2}}, {"box": 0.0, "cls": 0.0}),
    ],
    ids=str,
)
def test_weights_are_read(given: dict[str, Any], weights: dict[str, float]) -> None:
    loss = {"cls": torch.ones(()), "box": torch.zeros(())}
    options = {"loss": loss, "weight": None, "batch": torch.ones(5, 2)} | given
    terms, micro_batch = reader(options.pop("rule", WEIGHTED)).read(**options)
    assert [*sorted(loss)] == [*terms]
    assert weights == micro_batch.weights
    explicit, absent = given.get("weight") is not None and "rule" not in given, given.get("samples") == 0
    assert (explicit, None, absent) == (micro_batch.explicit, micro_batch.problem, micro_batch.absent)


def leaf(value: float, dtype: torch.dtype = torch.float64) -> Any:
    return nn.Parameter(torch.tensor(value, dtype=dtype))


def test_gradients_are_weighed_and_the_value_is_not() -> None:
    a, b = leaf(1.0), leaf(1.0)
    loss = weigh_terms([0.5, None], [3 * a, 5 * b])
    assert (8.0, True) == (loss.item(), loss.requires_grad)
    (loss / 2 * 1024).backward()
    assert (0.5 * 3 / 2 * 1024, 0.0) == (a.grad.item(), 0.0 if b.grad is None else b.grad.item())
    w = leaf(3.0)
    (slope,) = torch.autograd.grad(weigh_terms([2.0], [w**2]), w, create_graph=True)
    assert (12.0, 4.0) == (slope.item(), torch.autograd.grad(slope, w)[0].item())


COEFFICIENTS: list[list[Any]] = [[1.0, None], [None, 1.0], [2.0, 10.0]]


def test_coefficients_are_read_at_the_backward() -> None:
    w, coefficients, values = leaf(1.0), list[Any]([1.0, 1.0]), iter(COEFFICIENTS)
    loss = weigh_terms(
        coefficients, [3 * w, (5 * w).reshape(1)], lambda: coefficients.__setitem__(slice(2), next(values))
    )
    seen = []
    for _ in range(3):
        w.grad = None
        loss.sum().backward(retain_graph=True)
        seen.append(w.grad.item())
    assert [3.0, 5.0, 56.0] == seen


@pytest.mark.parametrize("coefficient", [0.5, torch.tensor(0.5, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_gradients_keep_their_dtype(dtype: torch.dtype, coefficient: float | Tensor) -> None:
    a, b = leaf(1.0, dtype), leaf(1.0, torch.float32)
    loss = weigh_terms([coefficient, coefficient], [2 * a, 4 * b])
    assert torch.promote_types(dtype, torch.float32) == loss.dtype
    loss.backward()
    assert (dtype, torch.float32, 1.0, 2.0) == (a.grad.dtype, b.grad.dtype, a.grad.item(), b.grad.item())


def test_first_term_is_not_changed_in_place() -> None:
    term = 2 * leaf(1.0)
    weigh_terms([1.0], [term]).detach().mul_(10)
    assert 2.0 == term.item()


@pytest.mark.parametrize(
    ("loss", "error", "said"),
    [
        (0.5, TypeError, "a loss is a tensor with a graph, got 0.5 of type float"),
        ({"a": None}, TypeError, "got None of type NoneType"),
        ({}, ValueError, f"a loss has 1 to {MOST_TERMS} named terms, got 0"),
        (dict.fromkeys(map(str, range(MOST_TERMS + 1)), leaf(1.0)), ValueError, f"got {MOST_TERMS + 1}: add some"),
    ],
)
def test_what_is_no_loss(loss: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        loss_terms(loss)


@pytest.mark.parametrize(
    ("weights", "plain", "count"),
    [({WHOLE_LOSS: 4.0}, False, 1), ({"a": 4.0, "b": 4.0}, False, 2), ({"": 1.0}, True, 0)],
)
def test_terms_that_share_a_weight_are_one(weights: dict[str, float], plain: bool, count: int) -> None:
    weighed = WeighedLoss.of({"a": 2 * leaf(1.0), "b": 3 * leaf(1.0)}, MicroBatch(weights), plain=plain)
    assert (5.0, count) == (weighed.value.item(), len(weighed.coefficients))
