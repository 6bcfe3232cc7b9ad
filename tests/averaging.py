"""What the tests of `average_gradients` share: dictated gradients, the literal formulas, and equality of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gradavg.place import Place
from lightning_gradavg.reduction.average import average_gradients
from lightning_gradavg.rules import Share

Gradients = Sequence["Tensor | None"]


def square_root_of_weight(place: Place, weight: Any) -> Share:
    """A user's rule: weigh by the square root, normalize by the node's share of it."""
    return Share(weight**0.5 / place.ranks_on_node, weight**0.5)


def literal(name: str, gradients: Sequence[Tensor], weights: Sequence[float], nodes: Sequence[int]) -> Tensor:
    """Return the reduced gradient by the formula as it is written down, rank by rank."""
    W, N = len(gradients), len(set(nodes))
    L = [nodes.count(node) for node in nodes]
    ranks = range(W)
    there = [rank for rank in ranks if weights[rank] > 0]
    formulas: dict[str, Callable[[], Any]] = {
        "mean": lambda: sum(gradients[r] for r in ranks) / W,
        "sum": lambda: sum(gradients[r] for r in ranks),
        "weighted_mean": lambda: sum(weights[r] * gradients[r] for r in there) / sum(weights),
        "normalized_sum": lambda: sum(gradients[r] for r in there) / sum(weights),
        "mean_of_node_sums": lambda: sum(gradients[r] for r in ranks) / N,
        "mean_of_node_means": lambda: sum(gradients[r] / L[r] for r in ranks) / N,
        "sum_of_node_means": lambda: sum(gradients[r] / L[r] for r in ranks),
        "square_root_of_weight": lambda: (
            sum(weights[r] ** 0.5 / L[r] * gradients[r] for r in there) / sum(weights[r] ** 0.5 for r in there)
        ),
    }
    total: Tensor = formulas[name]()
    return total


def reduce_given(
    of_ranks: Sequence[Gradients],
    weights: Sequence[Any] | None = None,
    nodes: Sequence[int] | None = None,
    **options: Any,
) -> list[Tensor | None]:
    """Body: reduce dictated gradients, `of_ranks[rank][parameter]`, and return this rank's."""
    rank = dist.get_rank()
    if nodes is not None:
        os.environ["NODE_RANK"] = str(nodes[rank])
    parameters = []
    for gradients in zip(*of_ranks, strict=True):
        like = next((gradient for gradient in gradients if gradient is not None), torch.zeros(2))
        parameters.append(nn.Parameter(torch.zeros(like.shape, dtype=like.dtype)))
        parameters[-1].grad = gradients[rank]
    if weights is not None:
        options["weight"] = weights[rank]
    average_gradients(parameters, **options)
    return [parameter.grad for parameter in parameters]


def same_everywhere(results: Sequence[Sequence[Tensor | None]], world_size: int) -> list[Tensor]:
    """Assert that all ranks hold the same bits, and return them."""
    assert world_size == len(results)
    for result in results[1:]:
        for mine, first in zip(result, results[0], strict=True):
            assert (mine is None) == (first is None)
            if mine is not None and first is not None:
                assert mine.layout == first.layout
                assert mine.dtype == first.dtype
                for part, of_first in zip(parts(mine), parts(first), strict=True):
                    assert torch.equal(of_first, part)
    return [gradient for gradient in results[0] if gradient is not None]


def parts(gradient: Tensor) -> list[Tensor]:
    return [gradient.indices(), gradient.values()] if gradient.is_sparse else [gradient]


def draw_gradients(
    world_size: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float64
) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(world_size)
    return [[torch.randn(tuple(shape), dtype=dtype, generator=draw) for shape in shapes] for _ in range(world_size)]


def approx(value: Any, tolerance: float = 1e-12) -> Any:
    return pytest.approx(value, rel=tolerance, abs=tolerance)
