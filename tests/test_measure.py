"""Norms of gradients of every kind, and local gradients seen during a backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_gradavg.report.measure import LocalGradients, squared_norm

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_norms_of_every_dtype(dtype):
    """(3, 4) beside (12,) has the squared norm 169, in float64 whatever the gradients are."""
    total = squared_norm([torch.tensor([3, 4], dtype=dtype), None, torch.tensor([12], dtype=dtype)])
    assert torch.float64 == total.dtype
    assert 169 == pytest.approx(float(total), rel=1e-6)


def test_norms_of_half_precision_do_not_overflow():
    """A thousand numbers of 1000 in float16, whose norm alone is beside float16's range, have the right one."""
    assert 1e9 == pytest.approx(float(squared_norm([torch.full((1000,), 1000.0, dtype=torch.float16)])), rel=1e-6)


def test_no_gradients_have_norm_zero():
    """Without any gradient the norm is 0."""
    assert 0 == squared_norm([None])
    gradients = LocalGradients([nn.Parameter(torch.zeros(2))], accumulated=True)
    with gradients:
        pass
    assert 0 == gradients.squared_norm(CPU)


@pytest.mark.parametrize("dense", [False, True])
def test_sparse_gradients(dense):
    """Rows that occur twice are added before they are squared."""
    rows, values = torch.tensor([[1, 1, 4]]), torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    gradient = torch.sparse_coo_tensor(rows, values, (5, 2), check_invariants=True)
    assert 16 + 36 + 25 + 36 == pytest.approx(float(squared_norm([gradient.to_dense() if dense else gradient])))


def test_what_is_accumulated_is_seen():
    """A hook sees the gradient of the whole window, and no hook is left afterwards, not even after an error."""
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    (used * torch.tensor([1.0, 2.0])).sum().backward()
    (unused * 5).sum().backward()
    gradients = LocalGradients([used, unused], accumulated=True)
    with gradients:
        (used * torch.tensor([2.0, 2.0])).sum().backward()
        assert used.grad is not None
        used.grad.zero_()  # as a reduction overwrites it
    assert 9 + 16 + 25 == pytest.approx(float(gradients.squared_norm(CPU)))
    later = LocalGradients([used], accumulated=False)

    with pytest.raises(KeyError), later:
        raise KeyError
    used.sum().backward()
    assert 0 == later.squared_norm(CPU)
    assert 9 + 16 + 25 == pytest.approx(float(gradients.squared_norm(CPU)))
