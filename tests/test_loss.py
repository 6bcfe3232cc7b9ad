"""The terms of a loss and their weights; gradients weighed at the backward, and gradients discarded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gradavg.reduction.loss import (
    NoWeights,
    WeighedLoss,
    Weights,
    gradients_discarded,
    loss_terms,
    weigh_terms,
    zero_loss,
)
from lightning_gradavg.reduction.window import MOST_TERMS, WHOLE_LOSS, MicroBatch, as_weight
from lightning_gradavg.rules import RULES, Rule

CPU = torch.device("cpu")
WEIGHTED = RULES["weighted_mean"]


def leaf(value: float, dtype: torch.dtype = torch.float64) -> Any:
    return nn.Parameter(torch.tensor(value, dtype=dtype))


def test_value_is_the_plain_sum() -> None:
    """Only gradients are weighed; the value is the sum of the terms, with graph."""
    a, b = leaf(2.0), leaf(3.0)
    total = weigh_terms([0.5, None], [a * 1, b * 1])
    assert 5.0 == total.item()
    assert total.requires_grad
    assert (2.0, 3.0) == (a.item(), b.item())


def test_gradients_are_weighed() -> None:
    """Each term's gradient is multiplied by its coefficient, also below a division and a loss scale."""
    w = leaf(1.0)
    (weigh_terms([0.5, 4.0], [3 * w, 5 * w]) / 2 * 1024).backward()
    assert (0.5 * 3 + 4.0 * 5) / 2 * 1024 == w.grad.item()


def test_coefficients_are_read_at_the_backward() -> None:
    """Coefficients set after the forward count, and another backward of the same graph may have others."""
    w, coefficients = leaf(1.0), list[Any]([1.0, 1.0])
    loss = weigh_terms(coefficients, [3 * w, 5 * w])
    seen = []
    for values in ([1.0, None], [None, 1.0], [2.0, 10.0]):
        coefficients[:] = values
        w.grad = None
        loss.backward(retain_graph=True)
        seen.append(w.grad.item())
    assert [3.0, 5.0, 56.0] == seen


def test_none_stops_a_gradient_that_is_no_number() -> None:
    """Case 9: the term of an empty mean is left out of the backward, where 0 times its NaN would be NaN."""
    w, mask = leaf(1.0), torch.zeros(3, dtype=torch.float64)
    empty = (w * mask).sum() / mask.sum()
    coefficients: list[Any] = [1.0, None]
    weigh_terms(coefficients, [2 * w, empty]).backward()
    assert 2.0 == w.grad.item()
    w.grad = None
    coefficients[:] = [1.0, 0.0]
    weigh_terms(coefficients, [2 * w, (w * mask).sum() / mask.sum()]).backward()
    assert math.isnan(w.grad.item())


def test_all_terms_stopped() -> None:
    """With every term stopped no gradient arrives."""
    w = leaf(1.0)
    weigh_terms([None], [2 * w]).backward()
    assert w.grad is None or w.grad.item() == 0


@pytest.mark.parametrize("coefficient", [0.5, torch.tensor(0.5, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_gradients_keep_their_dtype(dtype: torch.dtype, coefficient: float | Tensor) -> None:
    """Every term gets a gradient of its own dtype, whatever the others' and the coefficient's."""
    a, b = leaf(1.0, dtype), leaf(1.0, torch.float32)
    loss = weigh_terms([coefficient, coefficient], [2 * a, 4 * b])
    assert torch.promote_types(dtype, torch.float32) == loss.dtype
    loss.backward()
    assert (dtype, torch.float32) == (a.grad.dtype, b.grad.dtype)
    assert (1.0, 2.0) == (a.grad.item(), b.grad.item())


def test_terms_of_shape_one() -> None:
    """A term may have the shape (1,)."""
    w = leaf(1.0)
    weigh_terms([1.0, 3.0], [2 * w, (5 * w).reshape(1)]).sum().backward()
    assert 17.0 == w.grad.item()


def test_first_term_is_not_changed_in_place() -> None:
    """The loss is a tensor of its own: changing it in place leaves the terms as they are."""
    w = leaf(1.0)
    term = 2 * w
    loss = weigh_terms([1.0], [term])
    with torch.no_grad():
        loss.mul_(10)
    assert 2.0 == term.item()


def test_double_backward() -> None:
    """A gradient of a gradient goes through the weighing."""
    w = leaf(3.0)
    loss = weigh_terms([2.0], [w**2])
    (slope,) = torch.autograd.grad(loss, w, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, w)
    assert (12.0, 4.0) == (slope.item(), curvature.item())


def test_terms_are_named_and_sorted() -> None:
    """A tensor is one term without a name; named terms come in the order of their names."""
    a, b = leaf(1.0), leaf(2.0)
    assert {WHOLE_LOSS: a} == loss_terms(a)
    assert ["box", "cls"] == list(loss_terms({"cls": a, "box": b}))


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
    """What is no tensor is quoted, and too few or too many terms are counted."""
    with pytest.raises(error, match=said):
        loss_terms(loss)


def reader(rule: Rule = WEIGHTED) -> NoWeights:
    return (Weights if rule.uses_weight else NoWeights)(rule, CPU, "training_step returned", print, print)


def weights_of(micro_batch: MicroBatch) -> dict[str, float]:
    return {term: weight.item() for term, weight in micro_batch.weights.items()}


@pytest.mark.parametrize(
    ("given", "weights"),
    [
        ({}, {"": 5.0}),
        ({"samples": 3}, {"": 3.0}),
        ({"weight": 7}, {"": 7.0}),
        ({"weight": {"cls": 2, "box": torch.tensor(4)}}, {"box": 4.0, "cls": 2.0}),
        ({"rule": RULES["sum"], "weight": "ignored"}, {"": 1.0}),
    ],
    ids=["counted", "samples", "weight", "of terms", "of a rule without"],
)
def test_weights_are_read(given: dict[str, Any], weights: dict[str, float]) -> None:
    """The weight is that given, for all terms or for each; else the samples, told or counted; or none where unused."""
    options = {"terms": ("cls", "box"), "weight": None, "batch": torch.ones(5, 2)} | given
    micro_batch = reader(options.pop("rule", WEIGHTED)).read(**options)
    assert weights == weights_of(micro_batch)
    explicit = given.get("weight") is not None and "rule" not in given
    assert (explicit, None, False) == (micro_batch.explicit, micro_batch.problem, micro_batch.absent)


def test_samples_that_do_not_count() -> None:
    """A micro-batch without samples of its own is absent, whatever its weight, with a weight of 0 for each term."""
    for weight, terms in ((None, {"": 0.0}), (3, {"": 0.0}), ({"a": 1, "b": 2}, {"a": 0.0, "b": 0.0})):
        micro_batch = reader().read(("a", "b"), weight, torch.ones(5), samples=0)
        assert (terms, True, weight is not None) == (weights_of(micro_batch), micro_batch.absent, micro_batch.explicit)


@pytest.mark.parametrize(
    ("weight", "batch", "problem"),
    [
        ({"a": 1}, None, "its weights are named ['a'], but its loss terms ['a', 'b']"),
        ({"a": 1, "b": "x"}, None, "a weight is one number, got 'x' of type str"),
        ("x", None, "a weight is one number, got 'x' of type str"),
        (None, object(), "the number of samples cannot be read from a batch of type object"),
    ],
    ids=["missing", "a string of a term", "a string", "no samples"],
)
def test_faults_of_weights_are_noted(weight: Any, batch: Any, problem: str) -> None:
    """What is wrong with weights is noted for all ranks to raise together, and not raised here."""
    micro_batch = reader().read(("a", "b"), weight, batch)
    assert micro_batch.problem is not None
    assert micro_batch.problem.startswith(problem)
    assert {"a": 0.0, "b": 0.0} == weights_of(micro_batch)


def test_terms_that_share_a_weight_are_one() -> None:
    """A loss of several terms with one weight has one coefficient, and one without weights has none."""
    terms = {"a": 2 * leaf(1.0), "b": 3 * leaf(1.0)}
    whole = MicroBatch({WHOLE_LOSS: as_weight(4, CPU)})
    each = MicroBatch({"a": as_weight(4, CPU), "b": as_weight(4, CPU)})
    for micro_batch, count in ((whole, 1), (each, 2)):
        weighed = WeighedLoss.of(terms, micro_batch)
        assert (5.0, count) == (weighed.value.item(), len(weighed.coefficients))
    assert [] == WeighedLoss.plain(terms, whole).coefficients


def hooks_of(parameter: nn.Parameter) -> int:
    return len(parameter._backward_hooks or {})


def test_gradients_are_discarded() -> None:
    """A gradient that is discarded becomes 0, NaN included; what was there before stays."""
    w = nn.Parameter(torch.ones(2, dtype=torch.float64))
    with gradients_discarded([w]):
        (w * torch.tensor([math.nan, math.inf])).sum().backward()
    assert [0.0, 0.0] == w.grad.tolist()
    (w * torch.tensor([2.0, 3.0])).sum().backward()
    with gradients_discarded([w]):
        (w * math.nan).sum().backward()
    assert [2.0, 3.0] == w.grad.tolist()
    assert 0 == hooks_of(w)


def test_sparse_gradients_are_discarded() -> None:
    """Sparse gradients stay sparse."""
    table = nn.Embedding(4, 2, sparse=True)
    with gradients_discarded(table.parameters()):
        (table(torch.tensor([1, 2, 2])).sum() * math.nan).backward()
    assert table.weight.grad.is_sparse
    assert torch.equal(torch.zeros(4, 2), table.weight.grad.to_dense())


def test_term_that_is_stopped_has_no_gradient_to_discard() -> None:
    """Case 9: a parameter of a stopped term alone gets no gradient, and the hook that discards survives that."""
    a, b = leaf(1.0), leaf(1.0)
    with gradients_discarded([a, b]):
        weigh_terms([1.0, None], [a * 2, b * 3]).backward()
    assert 0.0 == a.grad.item()
    assert b.grad is None or b.grad.item() == 0


def test_frozen_parameters_are_passed_over() -> None:
    """A parameter that does not require grad has nothing to discard."""
    w, frozen = leaf(1.0), leaf(1.0).requires_grad_(False)
    with gradients_discarded([w, frozen]):
        (w * 2 + frozen).backward()
    assert 0.0 == w.grad.item()
    assert frozen.grad is None


def test_hooks_are_removed_after_an_error() -> None:
    """An error in the backward leaves no hook behind."""
    w = leaf(1.0)

    def fail() -> None:
        with gradients_discarded([w]):
            assert 1 == hooks_of(w)
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fail()
    assert 0 == hooks_of(w)


def test_loss_of_nothing() -> None:
    """A loss of 0 gives each parameter, NaN as it may be, a gradient of zeros, and a sparse one no entries."""
    dense, table = nn.Parameter(torch.full((2,), math.nan)), nn.Parameter(torch.ones(4, 2))
    loss = zero_loss([dense, table], {id(table)})
    loss.backward()
    assert (0.0, [0.0, 0.0]) == (loss.item(), dense.grad.tolist())
    assert (True, 0) == (table.grad.is_sparse, table.grad._nnz())
