"""Norms and products of gradients of every kind, and local gradients seen during a backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_gradavg.report.measure import LocalGradients, squared_norm

CPU = torch.device("cpu")


def seen_product(local: torch.Tensor, now: torch.Tensor) -> float:
    """Return the inner product of a gradient seen in a backward with another one that takes its place."""
    parameter = nn.Parameter(torch.zeros(local.shape, dtype=local.dtype))
    gradients = LocalGradients([parameter], copies=True, accumulated=True)
    parameter.grad = local
    with gradients:
        parameter.grad = now
    return float(gradients.product(CPU))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_norms_of_every_dtype(dtype):
    """(3, 4) beside (12,) has the squared norm 169, in float64 whatever the gradients are."""
    total = squared_norm([torch.tensor([3, 4], dtype=dtype), None, torch.tensor([12], dtype=dtype)])
    assert torch.float64 == total.dtype
    assert 169 == pytest.approx(float(total), rel=1e-6)


def test_norms_of_half_precision_do_not_overflow():
    """A thousand numbers of 1000 in float16, whose norm alone is beside float16's range, have the right one."""
    assert 1e9 == pytest.approx(float(squared_norm([torch.full((1000,), 1000.0, dtype=torch.float16)])), rel=1e-6)
    product = seen_product(torch.full((100,), 300.0, dtype=torch.float16), torch.full((100,), 300.0).half())
    assert 9e6 == pytest.approx(product, rel=1e-6)


def test_no_gradients_have_norm_zero():
    """Without any gradient norm and product are 0."""
    assert 0 == squared_norm([None])
    gradients = LocalGradients([nn.Parameter(torch.zeros(2))], copies=True, accumulated=True)
    with gradients:
        pass
    assert (0, 0) == (gradients.squared_norm(CPU), gradients.product(CPU))


def sparse(rows: list[int], values: list[list[float]]) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([rows]), torch.tensor(values, dtype=torch.float32), (5, 2), check_invariants=True
    )


@pytest.mark.parametrize("dense", [(), ("local",), ("now",), ("local", "now")])
def test_sparse_gradients(dense):
    """Rows that occur twice are added before they are squared or multiplied, sparse with sparse or with dense."""
    local = sparse([1, 1, 4], [[1, 2], [3, 4], [5, 6]])
    now = sparse([4, 1, 0], [[2, 1], [1, 10], [7, 7]])
    local = local.to_dense() if "local" in dense else local
    now = now.to_dense() if "now" in dense else now
    assert 16 + 36 + 25 + 36 == pytest.approx(float(squared_norm([local])))
    assert 4 + 60 + 10 + 6 == pytest.approx(seen_product(local, now))


def test_complex_gradients_multiply_as_pairs_of_reals():
    """The product of 1 + 2i and 3 + 4i is 11, as that of (1, 2) and (3, 4)."""
    assert 11 == seen_product(torch.tensor([1 + 2j]), torch.tensor([3 + 4j]))


@pytest.mark.parametrize("copies", [True, False])
def test_what_is_accumulated_is_seen(copies):
    """A hook sees the gradient of the whole window, and no hook is left afterwards, not even after an error."""
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    (used * torch.tensor([1.0, 2.0])).sum().backward()
    (unused * 5).sum().backward()
    gradients = LocalGradients([used, unused], copies=copies, accumulated=True)
    with gradients:
        (used * torch.tensor([2.0, 2.0])).sum().backward()
        assert used.grad is not None
        used.grad.zero_()  # as a reduction overwrites it
    assert 9 + 16 + 25 == pytest.approx(float(gradients.squared_norm(CPU)))
    later = LocalGradients([used], copies=copies, accumulated=False)

    with pytest.raises(KeyError), later:
        raise KeyError
    used.sum().backward()
    assert 0 == later.squared_norm(CPU)
    assert 9 + 16 + 25 == pytest.approx(float(gradients.squared_norm(CPU)))
