"""Norms of gradients of every kind, and local gradients seen during a backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_gradavg.report.part import local_gradients, squared_norm


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_norms_of_every_dtype(dtype):
    """(3, 4) beside (12,) has the squared norm 169, in float64 whatever the gradients are; none have the norm 0."""
    total = squared_norm([torch.tensor([3, 4], dtype=dtype), None, torch.tensor([12], dtype=dtype)])
    assert torch.float64 == total.dtype
    assert 169 == pytest.approx(float(total), rel=1e-6)
    assert 0 == squared_norm([None])


def test_norms_that_need_care():
    """The norm alone may be beyond float16's range; rows that occur twice are added before they are squared."""
    assert 1e9 == pytest.approx(float(squared_norm([torch.full((1000,), 1000.0, dtype=torch.float16)])), rel=1e-6)
    rows, values = torch.tensor([[1, 1, 4]]), torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    gradient = torch.sparse_coo_tensor(rows, values, (5, 2), check_invariants=True)
    assert 16 + 36 + 25 + 36 == pytest.approx(float(squared_norm([gradient])))


def test_what_is_accumulated_is_seen():
    """A hook sees the gradient of the whole window, and no hook is left afterwards, not even after an error."""
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    (used * torch.tensor([1.0, 2.0])).sum().backward()
    (unused * 5).sum().backward()
    with local_gradients([used, unused, nn.Parameter(torch.zeros(2))], accumulated=True) as squares:
        (used * torch.tensor([2.0, 2.0])).sum().backward()
        assert used.grad is not None
        used.grad.zero_()  # as a reduction overwrites it
    assert {used: 9 + 16, unused: 25} == {parameter: float(square) for parameter, square in squares.items()}

    with pytest.raises(KeyError), local_gradients([used], accumulated=False) as later:
        raise KeyError
    used.sum().backward()
    assert {} == later
    assert 25 == squares[used]
