"""Stage by stage, the run against the reference: numbers only, no causes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gradavg.place import places_on_nodes
from lightning_gradavg.reduction.combine import share_of
from lightning_gradavg.verification.measure import Difference, differences
from lightning_gradavg.verification.records import Run, Step, Tensors
from lightning_gradavg.verification.report import Stage
from lightning_gradavg.verification.script import Pair, pairs_of

__all__ = ["Comparison", "across_ranks", "global_loss", "is_random", "stage_of", "update_of"]


class Comparison:
    """A run and its reference, side by side.

    Args:
        runs: What the ranks recorded, in rank order.
        reference: What the reference recorded.
        tolerance: The largest relative difference that counts as equal.
    """

    def __init__(self, runs: Sequence[Run], reference: Run, tolerance: float) -> None:
        self.runs, self.reference, self.tolerance = runs, reference, tolerance
        self.facts = runs[0].facts

    @property
    def steps(self) -> range:
        """The positions of the steps."""
        return range(min(len(self.reference.steps), *(len(run.steps) for run in self.runs)))

    def pairs(self, position: int) -> list[Pair]:
        """Return every rank's micro-batches of a step whose samples count."""
        return list(pairs_of(self.runs, position))

    def measure(
        self, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], slack: Tensors | None = None
    ) -> list[Difference]:
        """Return the differences at the tolerance of the comparison."""
        return differences(found, expected, tolerance=self.tolerance, slack=slack)

    def beyond(self, found: Sequence[Difference]) -> list[Difference]:
        """Return the differences that count."""
        return [difference for difference in found if difference.relative > self.tolerance]


def is_random(comparison: Comparison, position: int) -> bool:
    """Return whether a step drew random numbers."""
    draws = any(micro_batch.draws for _, micro_batch, _ in comparison.pairs(position))
    return draws or bool(comparison.reference.draws_in)


def stage_of(name: str, comparison: Comparison, measured: Sequence[Sequence[Difference] | None]) -> Stage:
    """Return a stage from the differences of every step; None for a step that is not compared."""
    compared = [found for found in measured if found is not None]
    if not compared:
        return Stage(name, "not compared")
    for position, found in enumerate(measured):
        beyond = comparison.beyond(found or ())
        if beyond:
            return Stage(name, "differs", position, beyond[0])
    largest = max((each for found in compared for each in found), key=lambda each: each.relative, default=None)
    return Stage(name, "equal", difference=largest)


def across_ranks(runs: Sequence[Run], of: Callable[[Run], Tensors]) -> Difference | None:
    """Return the first tensor that is not the same bits on all ranks, or None."""
    first = of(runs[0])
    for run in runs[1:]:
        other = of(run)
        for name in dict.fromkeys([*first, *other]):
            a, b = first.get(name), other.get(name)
            if a is not None and b is not None and _same_bits(a, b):
                continue
            found = differences({name: b} if b is not None else {}, {name: a} if a is not None else {}, tolerance=0.0)
            return found[0] if found else None
    return None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124  # NaN differs from itself


def update_of(step: Step) -> Tensors:
    """Return what the optimizer added to the weights."""
    return {name: after - step.weights_before[name] for name, after in step.weights_after.items()}


def outputs_of(comparison: Comparison, position: int) -> tuple[Tensors, Tensors] | None:
    """Return the outputs of `forward` on the global batch, of the run and of the reference; None where they differ."""
    found = [micro_batch.outputs for _, micro_batch, _ in comparison.pairs(position)]
    batches = comparison.reference.steps[position].micro_batches
    expected = batches[0].outputs if batches else {}
    joined: Tensors = {}
    for name, output in expected.items():
        pieces = [outputs[name] for outputs in found if name in outputs]
        if len(pieces) != len(found) or any(piece.shape[1:] != output.shape[1:] for piece in pieces):
            return None
        joined[name] = torch.cat(pieces)
        if joined[name].shape != output.shape:
            return None
    return (joined, expected) if joined else None


def global_loss(comparison: Comparison, position: int) -> float | None:
    """Return the loss of the global batch as the run's rule combines those of its micro-batches; None if unknown."""
    pairs = comparison.pairs(position)
    named = any(part is None or isinstance(micro_batch.weight, dict) for _, micro_batch, part in pairs)
    if named or comparison.facts.counts_replicas:
        return None
    losses = [part.loss for _, _, part in pairs if part is not None]
    rule: Any = comparison.facts.rule
    if rule is None:
        return sum(losses) / len(losses)
    weights: list[Any] = [micro_batch.weight for _, micro_batch, _ in pairs]
    counts = [
        float(len(micro_batch.samples) if weight is None else weight)
        for (_, micro_batch, _), weight in zip(pairs, weights, strict=True)
    ]
    nodes = comparison.facts.nodes
    places = places_on_nodes([nodes[rank] if nodes else 0 for rank, _, _ in pairs])
    shares = [share_of(rule, place, count) for place, count in zip(places, counts, strict=True)]
    normalizer = float(sum(share.normalizer for share in shares))
    if normalizer == 0:
        return None
    return sum(float(s.multiplier) * loss for s, loss in zip(shares, losses, strict=True) if s.multiplier != 0) / normalizer
