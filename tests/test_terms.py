"""Loss terms whose gradients are weighed at the backward, and gradients that are kept out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning_gradavg.reduction.terms import Coefficients, keep_gradients, weigh_terms
from torch import Tensor, nn


def leaf(value: float, dtype: torch.dtype = torch.float64) -> Any:
    return nn.Parameter(torch.tensor(value, dtype=dtype))


def test_value_is_the_plain_sum() -> None:
    """Only gradients are weighed; the value is the sum of the terms, with graph."""
    a, b = leaf(2.0), leaf(3.0)
    total = weigh_terms(Coefficients([0.5, None]), [a * 1, b * 1])
    assert 5.0 == total.item()
    assert total.requires_grad
    assert (2.0, 3.0) == (a.item(), b.item())


def test_gradients_are_weighed() -> None:
    """Each term's gradient is multiplied by its coefficient, also below a division and a loss scale."""
    w = leaf(1.0)
    (weigh_terms(Coefficients([0.5, 4.0]), [3 * w, 5 * w]) / 2 * 1024).backward()
    assert (0.5 * 3 + 4.0 * 5) / 2 * 1024 == w.grad.item()


def test_coefficients_are_read_at_the_backward() -> None:
    """Coefficients set after the forward count, and another backward of the same graph may have others."""
    w, coefficients = leaf(1.0), Coefficients([1.0, 1.0])
    loss = weigh_terms(coefficients, [3 * w, 5 * w])
    seen = []
    for values in ([1.0, None], [None, 1.0], [2.0, 10.0]):
        coefficients.values = list(values)
        w.grad = None
        loss.backward(retain_graph=True)
        seen.append(w.grad.item())
    assert [3.0, 5.0, 56.0] == seen


def test_none_stops_a_gradient_that_is_no_number() -> None:
    """Case 9: the term of an empty mean is left out of the backward, where 0 times its NaN would be NaN."""
    w, mask = leaf(1.0), torch.zeros(3, dtype=torch.float64)
    empty = (w * mask).sum() / mask.sum()
    coefficients = Coefficients([1.0, None])
    weigh_terms(coefficients, [2 * w, empty]).backward()
    assert 2.0 == w.grad.item()
    w.grad = None
    coefficients.values = [1.0, 0.0]
    weigh_terms(coefficients, [2 * w, (w * mask).sum() / mask.sum()]).backward()
    assert math.isnan(w.grad.item())


def test_all_terms_stopped() -> None:
    """With every term stopped no gradient arrives."""
    w = leaf(1.0)
    weigh_terms(Coefficients([None]), [2 * w]).backward()
    assert w.grad is None or w.grad.item() == 0


@pytest.mark.parametrize("coefficient", [0.5, torch.tensor(0.5, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_gradients_keep_their_dtype(dtype: torch.dtype, coefficient: float | Tensor) -> None:
    """Every term gets a gradient of its own dtype, whatever the others' and the coefficient's."""
    a, b = leaf(1.0, dtype), leaf(1.0, torch.float32)
    loss = weigh_terms(Coefficients([coefficient, coefficient]), [2 * a, 4 * b])
    assert torch.promote_types(dtype, torch.float32) == loss.dtype
    loss.backward()
    assert (dtype, torch.float32) == (a.grad.dtype, b.grad.dtype)
    assert (1.0, 2.0) == (a.grad.item(), b.grad.item())


def test_terms_of_shape_one() -> None:
    """A term may have the shape (1,)."""
    w = leaf(1.0)
    weigh_terms(Coefficients([1.0, 3.0]), [2 * w, (5 * w).reshape(1)]).sum().backward()
    assert 17.0 == w.grad.item()


def test_first_term_is_not_changed_in_place() -> None:
    """The loss is a tensor of its own: changing it in place leaves the terms as they are."""
    w = leaf(1.0)
    term = 2 * w
    loss = weigh_terms(Coefficients([1.0]), [term])
    with torch.no_grad():
        loss.mul_(10)
    assert 2.0 == term.item()


def test_double_backward() -> None:
    """A gradient of a gradient goes through the weighing."""
    w = leaf(3.0)
    loss = weigh_terms(Coefficients([2.0]), [w**2])
    (slope,) = torch.autograd.grad(loss, w, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, w)
    assert (12.0, 4.0) == (slope.item(), curvature.item())


def hooks_of(parameter: nn.Parameter) -> int:
    return len(parameter._backward_hooks or {})


KEEP = {"bool": (True, False), "tensor": (torch.tensor(True), torch.tensor(False))}


@pytest.mark.parametrize("kind", KEEP)
def test_gradients_are_kept_or_selected_away(kind: str) -> None:
    """A gradient that is not kept becomes 0, NaN included; one that is kept stays; what was there before stays."""
    yes, no = KEEP[kind]
    w = nn.Parameter(torch.ones(2, dtype=torch.float64))
    with keep_gradients([w], no):
        (w * torch.tensor([math.nan, math.inf])).sum().backward()
    assert [0.0, 0.0] == w.grad.tolist()
    with keep_gradients([w], yes):
        (w * torch.tensor([2.0, 3.0])).sum().backward()
    with keep_gradients([w], no):
        (w * math.nan).sum().backward()
    assert [2.0, 3.0] == w.grad.tolist()
    assert 0 == hooks_of(w)


@pytest.mark.parametrize("kind", KEEP)
def test_sparse_gradients_are_kept_or_selected_away(kind: str) -> None:
    """Sparse gradients stay sparse, and repeated rows are added before they are selected."""
    yes, no = KEEP[kind]
    table = nn.Embedding(4, 2, sparse=True)
    tokens = torch.tensor([1, 2, 2])
    with keep_gradients(table.parameters(), no):
        (table(tokens).sum() * math.nan).backward()
    assert table.weight.grad.is_sparse
    assert torch.equal(torch.zeros(4, 2), table.weight.grad.to_dense())
    with keep_gradients(table.parameters(), yes):
        table(tokens).sum().backward()
    assert [0.0, 1.0, 2.0, 0.0] == table.weight.grad.to_dense()[:, 0].tolist()


def test_term_that_is_stopped_has_no_gradient_to_keep() -> None:
    """Case 9: a parameter of a stopped term alone gets no gradient, and the hook that selects survives that."""
    a, b = leaf(1.0), leaf(1.0)
    for keep in (False, torch.tensor(False), torch.tensor(True)):
        with keep_gradients([a, b], keep):
            weigh_terms(Coefficients([1.0, None]), [a * 2, b * 3]).backward()
    assert 2.0 == a.grad.item()
    assert b.grad is None or b.grad.item() == 0


def test_frozen_parameters_are_passed_over() -> None:
    """A parameter that does not require grad has nothing to keep."""
    w, frozen = leaf(1.0), leaf(1.0).requires_grad_(False)
    with keep_gradients([w, frozen], False):
        (w * 2 + frozen).backward()
    assert 0.0 == w.grad.item()
    assert frozen.grad is None


def test_hooks_are_removed_after_an_error() -> None:
    """An error in the backward leaves no hook behind."""
    w = leaf(1.0)

    def fail() -> None:
        with keep_gradients([w], False):
            assert 1 == hooks_of(w)
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fail()
    assert 0 == hooks_of(w)
