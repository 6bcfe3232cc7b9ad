"""`gather` in a world of one: a copy with gradient, the same checks, and the formula behind its backward."""

from __future__ import annotations

import re
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gradavg.reduction.gather import gather
from lightning_gradavg.reduction.reference import combine, rank_factors
from lightning_gradavg.rules import RULES, Share

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024  # a user's namedtuple, of whatever kind


def test_copy_with_gradient():
    """Without a process group the result is a copy, which the gradient passes through, but that of a gradient."""
    x = torch.tensor([[2.0], [3.0]], requires_grad=True)
    result = gather(x)
    assert torch.equal(x, result)
    assert x.data_ptr() != result.data_ptr()
    (first,) = torch.autograd.grad((result**3).sum(), x, create_graph=True)
    assert torch.equal(3 * x**2, first)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    with torch.no_grad():
        assert not gather(x * 2).requires_grad


def test_structure_is_kept():
    """Tuples, named tuples, lists and dicts come back as what they are, nested in any way."""
    x, y = torch.ones(2), torch.zeros(3, dtype=torch.int64)
    result = gather(Pair(x, [y, {"a": x, "b": (y,)}]))
    assert isinstance(result, Pair)
    assert torch.equal(x, result.left)
    inner = result.right
    assert [list, dict, tuple] == [type(inner), type(inner[1]), type(inner[1]["b"])]
    assert torch.equal(y, inner[1]["b"][0])
    assert ["b", "a"] == list(gather(OrderedDict(b=x, a=y)))


def negative(place: Any, weight: Any) -> Share:
    return Share(-1.0, 1.0)


ROW, WEIGHTED = torch.ones(1), {"reduction": "weighted_mean"}


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        (torch.tensor(1.0), {}, r"tensors has no dimension to concatenate along: pass tensor.reshape\(1\)"),
        ((), {}, r"there is no tensor in \(\): pass at least one"),
        ({}, {}, r"there is no tensor in \{\}: pass at least one"),
        ({"a": [1.5]}, {}, r"tensors\['a'\]\[0\] must be a tensor, or a tuple, list or dict of tensors; got 1.5"),
        (ROW.to_sparse(), {}, "tensors must be a dense tensor, got layout torch.sparse_coo"),
        (ROW, WEIGHTED, r"'weighted_mean', sum\(n \* g\) / sum\(n\), needs a weight"),
        (ROW, {**WEIGHTED, "weight": -1}, "weight -1.0 is not a finite number >= 0"),
        (ROW, {"reduction": negative, "weight": 1}, "returned multiplier=-1.0"),
    ],
    ids=lambda given: re.sub(r" at 0x\w+", "", str(given)),  # where a function is differs between processes
)
def test_bad_input(tensors, options, message):
    """What cannot be gathered is quoted, with what is accepted."""
    with pytest.raises(ValueError, match=message):
        gather(tensors, **options)


@given(
    st.sampled_from(sorted(RULES)),
    st.lists(st.tuples(st.integers(0, 2), st.floats(0.25, 8)), min_size=1, max_size=5),
    st.integers(0, 2**32 - 1),
)
def test_formula_of_the_backward(reduction, ranks, seed):
    """Sent home times `w_q / w_r` and reduced by the rule, gradients are those of the rule applied to the losses."""
    rule = RULES[reduction]
    nodes, weights = [node for node, _ in ranks], [weight for _, weight in ranks]
    W = len(ranks)
    # crossing[q, r]: the gradient of rank q's loss in a parameter, through the rows of rank r.
    crossing = torch.randn(W, W, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    factors = torch.tensor(rank_factors(rule, nodes, weights), dtype=torch.float64)
    home = torch.stack([sum((factors[q] / factors[r]) * crossing[q, r] for q in range(W)) for r in range(W)])

    of_losses = combine(crossing.sum(1), rule=rule, nodes=nodes, weights=weights)

    torch.testing.assert_close(combine(home, rule=rule, nodes=nodes, weights=weights), of_losses, rtol=1e-9, atol=1e-9)
