"""`average_gradients` in one process: factors, buckets, and a world of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import root
from torch import nn

from lightning_gradavg.ranks import World
from lightning_gradavg.reduction import sums
from lightning_gradavg.reduction.average import average_gradients
from lightning_gradavg.reduction.reference import rank_factors
from lightning_gradavg.reduction.sums import SUM_DTYPES
from lightning_gradavg.rules import RULES, Rule, Share


def rule_of(share: Share) -> Rule:
    return Rule("broken", lambda place, weight: share, uses_weight=True, formula="?")


@pytest.mark.parametrize(
    ("rule", "weights", "message"),
    [
        (RULES["weighted_mean"], [1.7e308, 1.7e308], r"the normalizer inf\. Scale the weights"),
        (
            RULES["normalized_sum"],
            [5e-324, 0.0],
            r"the multipliers \[1\.0, 0\.0\] and the normalizer 5e-324\. .* quotients, are finite",
        ),
        (rule_of(Share(-1.0, 1.0)), [1.0], r"rule 'broken' returned multiplier=-1\.0"),
        (rule_of(Share(torch.tensor(torch.nan), 1.0)), [1.0, 1.0], r"the multipliers \[nan, nan\]"),
        (rule_of(Share(1.0, torch.tensor(-1.0))), [1.0], r"the normalizer -1\.0"),
    ],
)
def test_factors_that_are_no_numbers(rule: Rule, weights: list[float], message: str) -> None:
    """A factor or a normalizer that is no finite number >= 0 is an error that quotes it."""
    with pytest.raises(ValueError, match=message):
        rank_factors(rule, [0] * len(weights), weights)


@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", list(SUM_DTYPES), ids=str)
def test_every_dtype_is_scaled_as_it_is_summed(dtype: torch.dtype, factor: float) -> None:
    """A gradient of any dtype is multiplied in the dtype that it is summed in, and rounded once."""
    values = torch.tensor([0.25, -1.5, 3.0, 0.0]).to(dtype)
    gradients = [values.clone(), values.reshape(2, 2).clone().t(), torch.zeros((), dtype=dtype)]
    sums.sum_dense(gradients, factor, World())
    wire = SUM_DTYPES[dtype]
    expected = (values.to(wire) * torch.tensor(factor, dtype=torch.float64).to(wire)).to(dtype).to(wire)
    assert torch.equal(expected, gradients[0].to(wire))
    assert torch.equal(expected.reshape(2, 2).t(), gradients[1].to(wire))


def weight_and_gradient(value: Any) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor(value, dtype=torch.float64)
    return parameter


@pytest.mark.parametrize(
    ("reduction", "weight", "expected"),
    [
        ("mean", None, [3.0, 6.0]),
        ("sum", None, [3.0, 6.0]),
        ("weighted_mean", 12, [3.0, 6.0]),
        ("normalized_sum", 12, [0.25, 0.5]),
        ("weighted_mean", 0, [0.0, 0.0]),
        ("mean_of_node_sums", None, [3.0, 6.0]),
        (root, 4, [3.0, 6.0]),
        (RULES["normalized_sum"], torch.tensor(3), [1.0, 2.0]),
    ],
)
def test_world_of_one(reduction: Any, weight: Any, expected: list[float]) -> None:
    """Without a process group the formula holds for one rank."""
    parameter = weight_and_gradient([3.0, 6.0])
    average_gradients([parameter], reduction=reduction, weight=weight)
    assert parameter.grad is not None
    assert expected == parameter.grad.tolist()


def test_original_error_is_kept() -> None:
    """The error that this rank met is the cause of the one that all ranks raise."""
    with pytest.raises(ValueError, match="got 'x' of type str") as caught:
        average_gradients([], weight="x")  # type: ignore[arg-type]  # the mistake under test
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_dtype_that_is_not_summed() -> None:
    parameter = nn.Parameter(torch.zeros(2).to(torch.float8_e5m2fnuz))
    parameter.grad = parameter.detach().clone()
    with pytest.raises(ValueError, match=r"parameter 0 is torch\.float8_e5m2fnuz; only torch\.float16, .* can"):
        average_gradients([parameter])


def test_a_gradient_with_a_graph_is_reduced_without_one() -> None:
    w = nn.Parameter(torch.tensor(3.0))
    with pytest.warns(UserWarning, match="create_graph=True will create a reference cycle"):
        (w**2).backward(create_graph=True)
    gradient: Any = w.grad
    graph = gradient.grad_fn
    average_gradients([w], reduction="normalized_sum", weight=2)
    assert (3.0, True, True) == (gradient.item(), gradient is w.grad, graph is gradient.grad_fn)
    w.grad = None


def test_module_without_gradients_is_left_alone() -> None:
    """Frozen parameters, also of integers, and parameters without gradient take part and change nothing."""
    model = nn.Linear(2, 2).requires_grad_(False)
    model.register_parameter("counts", nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False))
    average_gradients(model)
    assert all(parameter.grad is None for parameter in model.parameters())
