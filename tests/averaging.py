"""A user's rule, and every rule as a formula that is written down: what the tests of `average_gradients` share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_gradavg.place import Place
from lightning_gradavg.rules import Share


def square_root_of_weight(place: Place, weight: Any) -> Share:
    """A user's rule: weigh by the square root, normalize by the node's share of it."""
    return Share(weight**0.5 / place.ranks_on_node, weight**0.5)


def literal(reduction: Any, gradients: Sequence[Tensor], weights: Sequence[float], nodes: Sequence[int]) -> Any:
    """Return the reduced gradient by the formula as it is written down, rank by rank."""
    W, N, total = len(gradients), len(set(nodes)), sum(weights)
    L = [nodes.count(node) for node in nodes]
    ranks, there = range(W), [rank for rank in range(W) if weights[rank] > 0]
    formulas: dict[Any, Callable[[], Any]] = {
        "mean": lambda: sum(gradients[r] for r in ranks) / W,
        "sum": lambda: sum(gradients[r] for r in ranks),
        "weighted_mean": lambda: sum(weights[r] * gradients[r] for r in there) / total,
        "normalized_sum": lambda: sum(gradients[r] for r in there) / total,
        "mean_of_node_sums": lambda: sum(gradients[r] for r in ranks) / N,
        "mean_of_node_means": lambda: sum(gradients[r] / L[r] for r in ranks) / N,
        "sum_of_node_means": lambda: sum(gradients[r] / L[r] for r in ranks),
        square_root_of_weight: lambda: (
            sum(weights[r] ** 0.5 / L[r] * gradients[r] for r in there) / sum(weights[r] ** 0.5 for r in there)
        ),
    }
    return formulas[reduction]()
